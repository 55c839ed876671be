# SPDX-License-Identifier: Apache-2.0
"""
Case 4, the true duplicate beside it: Qwen2-VL with an image and a video in one batch runs its vision tower twice.

Plain transformers, the whole model trained. Variants: reentrant, nonreentrant.
"""

from __future__ import annotations

from typing import Any

import torch

from shared import Run, torchvision_without_kernels

VOCABULARY, IMAGE, VIDEO, VISION_START, VISION_END = 300, 290, 291, 292, 293


def make_model(reentrant: bool) -> Any:
    torchvision_without_kernels()
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2, use_cache=False, max_position_embeddings=256,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]})  # fmt: skip
    vision = dict(depth=2, embed_dim=32, hidden_size=32, num_heads=2, patch_size=14)
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=VISION_START, vision_end_token_id=VISION_END))  # fmt: skip
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model.train()


def batch(run: Run, step: int) -> dict[str, Any]:
    """Return: one sample: an image and a video of 4 x 4 patches, so of 4 tokens each, and some text."""
    generator = torch.Generator().manual_seed(1000 * run.rank + step)
    text = torch.randint(0, 256, (8,), generator=generator).tolist()
    ids = torch.tensor([[VISION_START, *[IMAGE] * 4, VISION_END, VISION_START, *[VIDEO] * 4, VISION_END, *text]])
    pixels = torch.randn(2, 16, 3 * 2 * 14 * 14, generator=generator)
    grid = torch.tensor([[1, 4, 4]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "pixel_values": pixels[0],
            "image_grid_thw": grid, "pixel_values_videos": pixels[1], "video_grid_thw": grid,
            "mm_token_type_ids": (ids == IMAGE) * 1 + (ids == VIDEO) * 2}  # fmt: skip


def main() -> None:
    run = Run(("reentrant", "nonreentrant"), __doc__.splitlines()[1])
    if run.side == "reference":
        model = make_model(reentrant=False)
        run.reference(model, lambda recorded: model(**recorded).loss)
        return
    model = make_model(reentrant=run.variant == "reentrant")

    def body() -> None:
        optimizer = run.make_optimizer(model)
        wrapped = model
        if run.distributed:
            torch.distributed.init_process_group("gloo")
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
        for step in range(run.steps):
            run.batches.append(batch(run, step))
            loss = wrapped(**run.batches[-1]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(float(loss.detach()))

    run.train(body, model)


if __name__ == "__main__":
    main()
