# SPDX-License-Identifier: Apache-2.0
"""trl's SFTTrainer. With the argument "peft" it makes a LoRA model from the model."""

import sys

import common
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

if common.ZEROD:
    from zerod.integrations.transformers import ZerodMixin

    class Trainer(ZerodMixin, SFTTrainer):
        pass
else:
    Trainer = SFTTrainer

lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn"], task_type="CAUSAL_LM")
trainer = Trainer(
    model=common.gpt2(),
    args=common.arguments(SFTConfig, max_length=32, gradient_checkpointing=False, bf16=False),
    train_dataset=Dataset.from_list([{"text": text} for text in common.sentences(96)]),
    processing_class=common.tokenizer(),
    peft_config=lora if "peft" in sys.argv else None,
)
trainer.train()
common.report_trainer(trainer)
