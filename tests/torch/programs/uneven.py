# SPDX-License-Identifier: Apache-2.0
"""
A rank whose training ends after 3 steps on rank 0, and after 6 steps on other ranks. test_uneven.py starts it with the
library that has the loop, and further TrainingArguments.
"""

import json
import os
import sys

import torch
import zerod
from torch import nn

LIBRARY, MORE, RANK = sys.argv[1], json.loads(sys.argv[2]), int(os.environ["RANK"])
N_STEPS = 3 if RANK == 0 else 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels=None):
        return {"loss": self.layer(x).square().mean()}


def rows(n):
    return [{"x": torch.full((4,), float(i % 3)), "labels": torch.zeros(1)} for i in range(n)]


def with_trainer(model):
    from transformers import TrainerCallback, TrainingArguments
    from zerod.integrations.transformers import ZerodTrainer

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= state.global_step == N_STEPS

    args = TrainingArguments(f"out-{RANK}", max_steps=6, per_device_train_batch_size=2, learning_rate=1e-2, report_to="none",
                             disable_tqdm=True, use_cpu=True, logging_steps=1, **{"save_strategy": "no", **MORE})
    trainer = ZerodTrainer(model=model, args=args, train_dataset=rows(64), callbacks=[Stop()])
    trainer.train()
    return trainer.state.global_step


def with_accelerate(model):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(rows(32), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, zerod.Optimizer(model, lr=1e-2), loader)
    n_done = 0
    for _, batches in zerod.epochs(accelerator, optimizer, loader, 1):
        for batch in batches:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            n_done += 1
            if n_done == N_STEPS:
                break
    return n_done


def with_lightning(model):
    from lightning.pytorch import LightningModule, Trainer
    from zerod.integrations.lightning import ZerodCallback, ZerodStrategy

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, _):
            if self.global_step == N_STEPS - 1:
                self.trainer.should_stop = True
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return zerod.Optimizer(self, lr=1e-2)

    trainer = Trainer(max_steps=6, accelerator="cpu", devices=2, strategy=ZerodStrategy(), callbacks=[ZerodCallback()], logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Module(), torch.utils.data.DataLoader(rows(32), batch_size=2))
    return trainer.global_step


torch.manual_seed(0)
print(f"rank {RANK} ends at {globals()[f'with_{LIBRARY}'](Net())}", flush=True)
