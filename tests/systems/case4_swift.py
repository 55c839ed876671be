# SPDX-License-Identifier: Apache-2.0
"""
Case 4, ms-swift with LoRA on Qwen2-VL under DDP: "Expected to mark a variable ready only once".

Variants: reentrant is the reporter's setting, nonreentrant its repair. Samples are text; swift's template runs the
vision tower on a blank image for those.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from shared import LR, WEIGHT_DECAY, Run, byte_tokenizer, hugging_face_callbacks, observe, torchvision_without_kernels

# swift's template contains token numbers of the released vocabulary.
IDS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|vision_start|>": 151652,
       "<|vision_end|>": 151653, "<|vision_pad|>": 151654, "<|image_pad|>": 151655, "<|video_pad|>": 151656}  # fmt: skip
VOCABULARY = 151936


def make_qwen(folder: Path) -> str:
    from transformers import (Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor, Qwen2VLProcessor,
                              Qwen2VLVideoProcessor)  # fmt: skip

    tokenizer = byte_tokenizer(ids=IDS, pad_token="<|endoftext|>", unk_token="<|endoftext|>",
                               bos_token="<|endoftext|>", eos_token="<|im_end|>")  # fmt: skip
    tokenizer.add_special_tokens({"additional_special_tokens": list(IDS)})
    text = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2, max_position_embeddings=512,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]})  # fmt: skip
    vision = dict(depth=2, embed_dim=32, hidden_size=32, num_heads=2, patch_size=14)
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=151655, video_token_id=151656,
        vision_start_token_id=151652, vision_end_token_id=151653, tie_word_embeddings=True))  # fmt: skip
    model.save_pretrained(folder)
    Qwen2VLProcessor(image_processor=Qwen2VLImageProcessor(), tokenizer=tokenizer,
                     video_processor=Qwen2VLVideoProcessor()).save_pretrained(folder)  # fmt: skip
    return str(folder)


def write_data(path: Path, rank: int) -> str:
    with path.open("w") as file:
        for i in range(16):
            turns = [{"role": "user", "content": f"what is {i} + {rank}"}, {"role": "assistant", "content": str(i + rank)}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return str(path)


def main() -> None:
    run = Run(("reentrant", "nonreentrant"), __doc__.splitlines()[1])
    torchvision_without_kernels()
    private = run.folder / f"in{run.rank}{run.side}"
    private.mkdir(parents=True, exist_ok=True)
    qwen = make_qwen(private / "qwen")
    data = write_data(private / "data.jsonl", run.rank if not run.distributed else 0)
    os.environ["MODELSCOPE_CACHE"] = str(private / "cache")

    from swift import OptimizerCallback, SftArguments, optimizers_map
    from swift.pipelines.train.sft import SwiftSft

    class Attach(OptimizerCallback):
        def create_optimizer(self, model: Any = None) -> Any:
            return run.make_optimizer(self.trainer.model)

    class Training(SwiftSft):
        def train(self, trainer: Any) -> Any:
            run.trained = trainer.model
            trainer.data_collator = run.recorded(trainer.data_collator)
            if run.side == "reference":
                return run.reference(trainer.model, lambda batch: trainer.compute_loss(trainer.model, batch))
            for callback in hugging_face_callbacks(run):
                trainer.add_callback(callback)
            observe(run, trainer)
            return super().train(trainer)

    optimizers_map["ours"] = Attach
    arguments = SftArguments(
        model=qwen, model_type="qwen2_vl", template="qwen2_vl", dataset=[data], tuner_type="lora", optimizer="ours", torch_dtype="float32",
        attn_impl="sdpa", use_cpu=True, max_steps=run.steps, per_device_train_batch_size=2, gradient_accumulation_steps=1,
        max_length=256, gradient_checkpointing=run.side != "reference", lora_dropout=0.0, lr_scheduler_type="constant", warmup_ratio=0.0,
        gradient_checkpointing_kwargs={"use_reentrant": run.variant == "reentrant"}, max_grad_norm=0.0,
        learning_rate=LR, weight_decay=WEIGHT_DECAY, report_to=["none"], save_strategy="no", eval_strategy="no",
        logging_steps=1, output_dir=str(run.folder / f"out{run.rank}"), dataloader_num_workers=0,
        dataloader_persistent_workers=False, average_tokens_across_devices=False)  # fmt: skip
    training = Training(arguments)
    if run.side == "reference":
        training.main()
    else:
        run.train(training.main, training.model)


if __name__ == "__main__":
    main()
