# SPDX-License-Identifier: Apache-2.0
"""
Logs the job's figures to TensorBoard in each framework, and in a plain loop: python logged.py KIND, with zerod. The
logs are in the folder CALLERS_OUT/logs.
"""

import os
import sys

import common
import torch
import zerod
from torch.utils.data import DataLoader, Dataset, TensorDataset

LOGS = os.path.join(os.environ["CALLERS_OUT"], "logs")
ADAM = {"lr": 2e-3}
N_STEPS = 12


class Text(Dataset):
    rows = torch.randint(0, 61, (16 * N_STEPS, 12), generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def trainer():
    from transformers import TrainingArguments
    from zerod.integrations.transformers import ZerodTrainer

    args = common.arguments(TrainingArguments, eval_strategy="steps", eval_steps=6)
    args.report_to, args.logging_dir, args.logging_steps = ["tensorboard"], LOGS, 3
    ours = ZerodTrainer(model=common.gpt2(), args=args, train_dataset=Text(), eval_dataset=Text())
    ours.add_callback(zerod.metrics_callback(ours))
    ours.train()
    history = [line for line in ours.state.log_history if "loss" in line]
    assert len(history) == 4 and all(("zerod/step" in line) == (common.RANK == 0) for line in history), history
    assert not any("zerod/step" in line for line in ours.state.log_history if "loss" not in line)
    assert "log" not in vars(ours)  # the callback has restored the trainer's log()


def lightning():
    import lightning
    from lightning.pytorch.loggers import TensorBoardLogger
    from zerod.integrations.lightning import ZerodMetrics, ZerodStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = common.gpt2()

        def training_step(self, batch, _):
            loss = self.net(input_ids=batch[0], labels=batch[0]).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return zerod.Optimizer(self, **ADAM)

    lightning.Trainer(
        accelerator="cpu", devices=common.WORLD, strategy=ZerodStrategy(), max_steps=N_STEPS, log_every_n_steps=3,
        accumulate_grad_batches=2, logger=TensorBoardLogger(LOGS, name="", version=""), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ZerodMetrics()],
    ).fit(Module(), DataLoader(TensorDataset(Text.rows), batch_size=4))  # fmt: skip


def fabric():
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import TensorBoardLogger
    from zerod.integrations.fabric import ZerodMetrics, ZerodStrategy

    logger = TensorBoardLogger(LOGS, name="", version="")
    ours = Fabric(accelerator="cpu", devices=common.WORLD, strategy=ZerodStrategy(), loggers=logger, callbacks=[ZerodMetrics(3)])
    ours.launch()
    plain = common.gpt2()
    model, opt = ours.setup(plain, zerod.Optimizer(plain, **ADAM))
    for batch in Text.rows[common.RANK :: common.WORLD].split(4)[:N_STEPS]:
        ours.backward(model(input_ids=batch, labels=batch).loss)
        opt.step()
        opt.zero_grad()
        ours.call("on_step_end", fabric=ours, optimizer=opt)
    logger.finalize("success")


def plain():
    from torch.utils.tensorboard import SummaryWriter

    model = common.gpt2()
    opt = zerod.Optimizer(model, **ADAM)
    writer = SummaryWriter(LOGS) if opt.rank == 0 else None
    for step, batch in enumerate(Text.rows[common.RANK :: common.WORLD].split(4)[:N_STEPS], 1):
        model(input_ids=batch, labels=batch).loss.backward()
        opt.step()
        opt.zero_grad()
        if writer and step % 3 == 0:
            for name, value in opt.metrics("zerod/").items():
                writer.add_scalar(name, value, step)
    if writer:
        writer.close()


{"trainer": trainer, "lightning": lightning, "fabric": fabric, "plain": plain}[sys.argv[1]]()
common.report(torch.nn.Identity(), [])
