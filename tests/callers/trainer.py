# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer, with a schedule, clipping and two groups (no decay on biases and norms)."""

import common
from torch.utils.data import Dataset
from transformers import TrainingArguments

if common.ZEROD:
    from zerod.integrations.transformers import ZerodTrainer as Trainer
else:
    from transformers import Trainer


class Text(Dataset):
    def __init__(self):
        encode = common.tokenizer()
        self.rows = [encode(text)["input_ids"] for text in common.sentences(96)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


if __name__ == "__main__":
    trainer = Trainer(model=common.gpt2(), args=common.arguments(TrainingArguments, max_grad_norm=0.5), train_dataset=Text())
    trainer.train()
    common.report_trainer(trainer)
