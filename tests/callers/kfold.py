# SPDX-License-Identifier: Apache-2.0
"""k-fold in one process: for each fold a Trainer with a model of its own."""

import common
from torch.utils.data import Subset
from transformers import TrainingArguments

if common.ZEROD:
    from zerod.integrations.transformers import ZerodTrainer as Trainer
else:
    from transformers import Trainer

K = 3
losses, data = [], common.Text()
for fold in range(K):
    rest = Subset(data, [i for i in range(len(data)) if i % K != fold])
    trainer = Trainer(model=common.gpt2(), args=common.arguments(TrainingArguments), train_dataset=rest)
    trainer.train()
    losses += [line["loss"] for line in trainer.state.log_history if "loss" in line]
    if common.ZEROD and fold < K - 1:  # the test asks the daemon for the last run
        trainer.optimizer.optimizer.close()
common.report(trainer.model, losses)
