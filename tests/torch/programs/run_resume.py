# SPDX-License-Identifier: Apache-2.0
"""
A rank that trains with Hugging Face Trainer, accelerate, Lightning or Fabric, is killed, restarted, and continues.
test_resume.py starts it with `zerodrun --restarts` and a file of runs, {name: how}, which it does one after the other:

    with        "trainer", "accelerate", "lightning" or "fabric"
    socket      of the daemon
    kill        [life, rank, "begin", "micro" or "end", step]: SIGKILL before, inside or after that step
    micro       micro-batches in a step

The results of a run are in FOLDER/NAME.rankN.pt. A run with that file is done.
"""

import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
import zerod
from torch import nn
from torch.utils.data import DataLoader, Dataset

RANK, LIFE = int(os.environ["RANK"]), int(os.environ["ZEROD_RESTART_COUNT"])
N_STEPS = 20  # two and a half epochs


class Rows(Dataset):
    """64 rows are 8 batches of 4 rows for each of two ranks."""

    def __init__(self, n):
        self.rows = torch.randn(n, 8, generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"x": self.rows[i]}


class Net(nn.Module):
    """A model with dropout, which shows whether the random number generators continue correctly."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.Tanh(), nn.Dropout(0.2), nn.Linear(24, 8))

    def forward(self, x):
        loss = (self.body(x) - x.flip(1)).square().mean()
        return {"loss": loss}


class Killer:
    def __init__(self, kill):
        self.kill = kill

    def at(self, where, step):
        if self.kill == [LIFE, RANK, where, step]:
            os.kill(os.getpid(), signal.SIGKILL)


def with_trainer(folder, killer, socket, micro):
    import transformers
    from transformers import TrainerCallback, TrainingArguments
    from zerod.integrations.transformers import ZerodTrainer

    class OwnTrainer(ZerodTrainer):
        zerod_options = {"socket": socket}

    class Kill(TrainerCallback):
        def on_step_begin(self, _args, state, _control, **_):
            killer.at("begin", state.global_step)

        def on_substep_end(self, _args, state, _control, **_):
            killer.at("micro", state.global_step)

        def on_step_end(self, _args, state, _control, **_):
            killer.at("end", state.global_step)

    transformers.logging.set_verbosity_error()
    model = Net()
    args = TrainingArguments(max_steps=N_STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=micro,
                             learning_rate=1e-2, warmup_steps=8, weight_decay=0.3, use_cpu=True, logging_steps=5,
                             report_to="none", disable_tqdm=True, save_strategy="no", output_dir=str(folder / "out"))
    trainer = OwnTrainer(model=model, args=args, train_dataset=Rows(64 * micro), callbacks=[Kill()])
    trainer.train()
    return model, zerod.registry.owners_of(model.parameters())[0], {"n_steps": trainer.state.global_step, "epoch": trainer.state.epoch}


def with_accelerate(folder, killer, socket, micro):
    """A loop of the program, with zerod.epochs()."""
    from accelerate import Accelerator

    torch.manual_seed(11)
    model = Net()
    torch.manual_seed(12)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro)
    opt = zerod.Optimizer(model, socket, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 2 * N_STEPS)
    loader = DataLoader(Rows(64 * micro), batch_size=4, shuffle=True)
    called, optimizer, loader, scheduler = accelerator.prepare(model, opt, loader, scheduler)
    for epoch, batches in zerod.epochs(accelerator, optimizer, loader, 3, scheduler):
        for batch in batches:
            step = opt.epoch
            if step == N_STEPS:
                break
            if accelerator.sync_gradients:
                killer.at("begin", step)
            with accelerator.accumulate(called):
                loss = called(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            killer.at("end" if accelerator.sync_gradients else "micro", opt.epoch)
    return model, opt, {"epoch": epoch, "loss": loss.item()}


def with_lightning(folder, killer, socket, micro):
    import lightning
    from zerod.integrations.lightning import ZerodCallback, ZerodStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.batches = Net(), []

        def training_step(self, batch, batch_idx):
            self.batches = [batch_idx, batch["x"].sum().item()]
            return self.net(**batch)["loss"]

        def on_train_batch_start(self, batch, batch_idx):
            killer.at("micro" if batch_idx % micro else "begin", self.trainer.global_step)

        def on_train_batch_end(self, *_):
            killer.at("end", self.trainer.global_step)

        def configure_optimizers(self):
            opt = zerod.Optimizer(self, socket, lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 2 * N_STEPS)
            return [opt], [{"scheduler": schedule, "interval": "step"}]

    lightning.seed_everything(11, verbose=False)
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=ZerodStrategy(), max_steps=N_STEPS, accumulate_grad_batches=micro, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ZerodCallback()])
    trainer.fit(module, DataLoader(Rows(64 * micro), batch_size=4, shuffle=True))
    opt = zerod.registry.owners_of(module.parameters())[0]
    return module, opt, {"n_steps": trainer.global_step, "epoch": trainer.current_epoch, "last": module.batches}


def with_fabric(folder, killer, socket, micro):
    """A loop with zerod.steps(). It continues at the micro-batch, and chooses its data by the step's number."""
    from lightning.fabric import Fabric
    from zerod.integrations.fabric import ZerodStrategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=ZerodStrategy())
    fabric.launch()
    plain = Net()
    model, opt = fabric.setup(plain, zerod.Optimizer(plain, socket, lr=1e-2))
    zerod.user_state(opt.optimizer)  # keeps the generators for the dropout
    rows = Rows(64 * micro)
    for step in zerod.steps(opt.optimizer, N_STEPS):
        with step:
            killer.at("begin", int(step))
            for n in range(opt.optimizer.position.micro_batch, micro):
                first = 8 * ((step * micro + n) % (8 * micro)) + 4 * fabric.global_rank
                batch = torch.stack([rows[first + i]["x"] for i in range(4)])
                with fabric.no_backward_sync(model, enabled=n + 1 < micro):
                    fabric.backward(model(batch)["loss"])
                if n + 1 < micro:
                    killer.at("micro", int(step))
            fabric.clip_gradients(model, opt, max_norm=1.0)
            opt.step()
            opt.zero_grad()
        killer.at("end", int(step))
    return plain, opt.optimizer, {"world": fabric.world_size, "wrapped": type(model._forward_module).__name__}


WAYS = {"trainer": with_trainer, "accelerate": with_accelerate, "lightning": with_lightning, "fabric": with_fabric}


def main():
    folder = Path(sys.argv[1]).parent
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    world = os.environ["WORLD_SIZE"]
    for name, how in json.loads(Path(sys.argv[1]).read_text()).items():
        os.environ["WORLD_SIZE"] = world  # because Lightning removes it at its end
        file = folder / f"{name}.rank{RANK}.pt"
        if file.exists():
            continue
        killer = Killer(how.get("kill"))
        model, optimizer, result = WAYS[how["with"]](folder, killer, how["socket"], how.get("micro", 1))
        result |= {"weights": model.state_dict(), "lives": LIFE, "resumed": optimizer.resumed,
                   "committed": optimizer.epoch, "rate": optimizer.param_groups[0]["lr"]}
        result["weights"] = {name: value.clone() for name, value in result["weights"].items()}
        optimizer.close()
        torch.save(result, file)


main()
