# SPDX-License-Identifier: Apache-2.0
"""trl's DPOTrainer: a model that is trained, and a reference model that does not change."""

import common
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

if common.ZEROD:
    from zerod.integrations.transformers import ZerodMixin

    class Trainer(ZerodMixin, DPOTrainer):
        pass
else:
    Trainer = DPOTrainer

rows = zip(common.sentences(96, 4), common.sentences(96, 8, seed=6), common.sentences(96, 8, seed=7), strict=True)
trainer = Trainer(
    model=common.gpt2(),
    ref_model=common.gpt2(),
    args=common.arguments(DPOConfig, beta=0.1, max_length=32, gradient_checkpointing=False, bf16=False),
    train_dataset=Dataset.from_list([{"prompt": a, "chosen": " " + b, "rejected": " " + c} for a, b, c in rows]),
    processing_class=common.tokenizer(),
)
trainer.train()
common.report_trainer(trainer)
