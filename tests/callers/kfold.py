# SPDX-License-Identifier: Apache-2.0
"""k-fold training in one process: a new Trainer with a new model for each fold."""

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
    if common.ZEROD and fold < K - 1:  # the last run stays open, because the test reads it from the daemon
        trainer.optimizer.optimizer.close()
common.report(trainer.model, losses)
