# SPDX-License-Identifier: Apache-2.0
"""
A rank that trains a small model several times with Lightning: test_callers.py starts it with zerodrun or torchrun and a
file of runs, {name: how}:

    socket      of the daemon; without one it is DDP with torch's AdamW
    resume      the checkpoint to continue from
    clip        with the object that self.optimizers() returns
    args        further arguments of Lightning's Trainer

The results of a run are in FOLDER/NAME.rankN.pt.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path

import lightning
import torch
import zerod
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from zerod.integrations.lightning import ZerodStrategy

ADAM = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.01}


class Net(lightning.LightningModule):
    def __init__(self, socket, clip):
        super().__init__()
        self.socket, self.clip, self.rates = socket, clip, []
        self.net = nn.Sequential(nn.Embedding(40, 24), nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 40, bias=False))

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]).view(-1, 40), batch[0].roll(1, 1).view(-1))

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_before_optimizer_step(self, _):
        if self.clip:
            self.optimizers().clip_grad_norm_(self.clip)

    def on_before_zero_grad(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):
        kind = zerod.Optimizer(self, self.socket, **ADAM) if self.socket else torch.optim.AdamW(self.parameters(), **ADAM)
        return [kind], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(kind, 0.9), "interval": "step"}]


def loader(n):
    tokens = torch.randint(0, 40, (n, 12), generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(tokens), batch_size=4, shuffle=n > 8)


def run(name, folder, rank, world, socket=None, resume=None, clip=None, args=None):
    lightning.seed_everything(11, verbose=False)
    net = Net(socket, clip)
    checkpoint = ModelCheckpoint(folder / f"{name}.checkpoints", filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world, strategy=ZerodStrategy() if socket else DDPStrategy(),
        max_epochs=2, logger=False, callbacks=[checkpoint], enable_progress_bar=False, enable_model_summary=False,
        **(args or {}))
    trainer.fit(net, loader(64), loader(8), ckpt_path=resume)
    result = {
        "wrapped": isinstance(trainer.strategy.model, DistributedDataParallel),
        "rank": trainer.global_rank,
        "sampler": type(trainer.train_dataloader.sampler).__name__,
        "n_steps": trainer.global_step,
        "rates": net.rates,
        "loss": float(trainer.callback_metrics["loss"]),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
    }
    result["validated"] = float(trainer.validate(net, loader(8), verbose=False)[0]["val_loss"])
    result["weights"] = {k: v.clone() for k, v in net.state_dict().items()}
    if socket:
        optimizer = zerod.registry.owners_of(net.parameters())[0]
        result["step"], result["norm"] = optimizer.position.step, optimizer.result.grad_norm
        optimizer.close()
    torch.save(result, folder / f"{name}.rank{rank}.pt")


def main():
    folder, rank = Path(sys.argv[1]).parent, int(os.environ["RANK"])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    world = os.environ["WORLD_SIZE"]
    for name, how in json.loads(Path(sys.argv[1]).read_text()).items():
        os.environ["WORLD_SIZE"] = world  # because Lightning removes it at its end
        run(name, folder, rank, int(world), **how)


main()
