# SPDX-License-Identifier: Apache-2.0
"""
Case 5, MiniCPM-V 2.6 under DeepSpeed: "The parameter 657 has already been reduced".

The model's code is on a hub only; this is a replica of its structure from the layers of transformers: a vision tower
that takes 16 slices at a time, a resampler, a language model. Variants: reentrant gives it 20 slices, so that the
tower runs twice, under reentrant checkpointing; nonreentrant is the same with use_reentrant=False, sixteen the same
with 16 slices.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from shared import LR, WEIGHT_DECAY, Run, torchvision_without_kernels

WIDTH, LENGTH, VISION_BATCH_SIZE = 32, 32, 16


def make_model(reentrant: bool) -> Any:
    torchvision_without_kernels()
    from transformers import (PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig,
                              SiglipVisionModel)  # fmt: skip

    class MiniV(PreTrainedModel):
        config_class = PretrainedConfig
        supports_gradient_checkpointing = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.llm = Qwen2ForCausalLM(Qwen2Config(
                vocab_size=300, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                intermediate_size=64, use_cache=False))  # fmt: skip
            self.vpm = SiglipVisionModel(SiglipVisionConfig(
                hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, image_size=16,
                patch_size=8, vision_use_head=False))  # fmt: skip
            self.resampler = torch.nn.Linear(WIDTH, WIDTH)
            self.post_init()

        def forward(self, input_ids: Any, pixel_values: Any, labels: Any) -> Any:
            slices = pixel_values.flatten(0, 1)
            seen = []
            for i in range(0, slices.shape[0], VISION_BATCH_SIZE):
                chunk = slices[i : i + VISION_BATCH_SIZE]
                seen.append(self.vpm(pixel_values=chunk).last_hidden_state.mean(1))
            text = self.llm.get_input_embeddings()(input_ids)
            images = self.resampler(torch.cat(seen)).view(text.shape[0], -1, WIDTH)
            mixed = torch.cat([images, text[:, images.shape[1] :]], 1)
            return self.llm(inputs_embeds=mixed, labels=labels)

    torch.manual_seed(0)
    model = MiniV(PretrainedConfig())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model.train()


def batch(run: Run, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * run.rank + step)
    n_slices = 8 if run.variant == "sixteen" else 10
    ids = torch.randint(0, 300, (2, LENGTH), generator=generator)
    pixels = torch.randn(2, n_slices, 3, 16, 16, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "labels": ids}


def deepspeed_engine(run: Run, model: Any) -> Any:
    import deepspeed

    zero = {"stage": run.stage, "reduce_bucket_size": int(run.bucket), "overlap_comm": False}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "zero_allow_untested_optimizer": True,
              "zero_force_ds_cpu_optimizer": False}  # fmt: skip
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = (torch.optim.SGD(params, lr=LR) if run.optimizer == "SGD"
                 else torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY))  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train_deepspeed(run: Run, model: Any) -> None:
    import deepspeed

    # Its own all-reduce through shared memory would be compiled at the first use, into the user's cache, behind a
    # lock that a killed run leaves there. Without it DeepSpeed uses gloo, as it does where there is no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    engine = deepspeed_engine(run, model)
    for step in range(run.steps):
        run.batches.append(batch(run, step))
        loss = engine(**run.batches[-1]).loss
        engine.backward(loss)
        engine.step()
        run.losses.append(float(loss.detach()))
    if run.stage == 3:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            run.gathered = {name: p.detach().clone() for name, p in model.named_parameters()}


def train_plain(run: Run, model: Any) -> None:
    optimizer = run.make_optimizer(model)
    wrapped = model
    if run.distributed:
        torch.distributed.init_process_group("gloo")
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        if run.side == "observe":
            import zerod

            run.observer = zerod.observe(wrapped)
    for step in range(run.steps):
        run.batches.append(batch(run, step))
        loss = wrapped(**run.batches[-1]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(float(loss.detach()))


def main() -> None:
    run = Run(("reentrant", "nonreentrant", "sixteen"), __doc__.splitlines()[1])
    if run.side == "reference":
        model = make_model(reentrant=False)
        run.reference(model, lambda recorded: model(**recorded).loss)
        return
    model = make_model(reentrant=run.variant != "nonreentrant")
    train = train_deepspeed if run.side == "deepspeed" else train_plain
    run.train(lambda: train(run, model), model)


if __name__ == "__main__":
    os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
    main()
