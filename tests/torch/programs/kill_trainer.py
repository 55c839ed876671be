# SPDX-License-Identifier: Apache-2.0
"""
A trainer that can be killed at any moment and started again (trainer_kills.py does both). Its random numbers come from
generators and a sampler whose state zerod.user_state() keeps. The learning rate depends on the step's number.

    kill_trainer.py FOLDER N_STEPS

It appends its output to files of FOLDER: rankR.lifeN.pid, rankR.steps (step, micro-batch and loss, in all lives),
rankR.lifeN.formed, rankR.lifeN.steps (one line for each step of this life), rankR.final. FOLDER/plan.json may name a
failpoint for each life.
"""

import hashlib
import json
import os
import random
import sys
import warnings
from pathlib import Path

RANK, LIFE = int(os.environ["RANK"]), int(os.environ.get("ZEROD_RESTART_COUNT", 0))
FOLDER, N_STEPS = Path(sys.argv[1]), int(sys.argv[2])
N_MICRO = 2
N_ROWS, WIDTH, BATCH = 48, 12, 4


def say(name, *words):
    """Writes one line with one write, so that a killed process leaves no incomplete line."""
    with open(FOLDER / name, "ab", buffering=0) as file:
        file.write((" ".join(map(str, words)) + "\n").encode())


def take_failpoint():
    """Sets this process's failpoint before libzerod reads it."""
    lives = json.loads((FOLDER / "plan.json").read_text())[str(RANK)]
    if LIFE < len(lives) and isinstance(lives[LIFE], str):
        os.environ["ZEROD_FAILPOINT"] = lives[LIFE]


say(f"rank{RANK}.life{LIFE}.pid", os.getpid())
take_failpoint()

import numpy  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import zerod  # noqa: E402


class Sampler:
    """Batches of rows in a new random order in each epoch, which differs on every rank."""

    def __init__(self):
        self.epoch, self.at = 0, 0
        self.generator = torch.Generator().manual_seed(100 + RANK)
        self.order = torch.randperm(N_ROWS, generator=self.generator)

    def next(self):
        if self.at == N_ROWS:
            self.epoch, self.at = self.epoch + 1, 0
            self.order = torch.randperm(N_ROWS, generator=self.generator)
        self.at += BATCH
        return self.order[self.at - BATCH : self.at]

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at, "order": self.order.tolist(), "rng": self.generator.get_state()}

    def load_state_dict(self, state):
        self.epoch, self.at, self.order = state["epoch"], state["at"], torch.tensor(state["order"])
        self.generator.set_state(state["rng"])


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Dropout(0.1), nn.Linear(32, WIDTH)
    )


def batch_of(data, sampler):
    """Return: a batch that depends on all three generators."""
    x = data[sampler.next()] + 0.1 * torch.randn(BATCH, WIDTH)
    if random.random() < 0.5:
        x = -x
    return x * float(numpy.random.uniform(0.5, 1.5))


def digest(tensors):
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()[:16]


def say_final(opt, model):
    names = [name for name, _ in model.named_parameters()]
    state = opt.full_state_dict()["state"]
    say(
        f"rank{RANK}.final",
        digest(model.parameters()),
        digest(opt.master(name) for name in names),
        digest(state[i]["exp_avg"] for i in range(len(names))),
        digest(state[i]["exp_avg_sq"] for i in range(len(names))),
        *(int(state[i]["step"]) for i in range(len(names))),
    )


def train():
    torch.set_num_threads(1)
    data = torch.randn(N_ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
    sampler, model = Sampler(), make_model()
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(1000 + RANK)
    opt = zerod.Optimizer(model)
    zerod.user_state(opt, sampler=sampler)
    say(f"rank{RANK}.life{LIFE}.formed", opt.epoch)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: (1 + step % 7) / 7)
    warnings.simplefilter("ignore", UserWarning)  # "lr_scheduler.step() before optimizer.step()": done earlier
    for _ in range(opt.epoch):
        scheduler.step()
    while opt.epoch < N_STEPS:
        step = opt.epoch
        for micro_batch in range(opt.position.micro_batch, N_MICRO):
            x = batch_of(data, sampler)
            loss = (model(x) - x.flip(1)).pow(2).mean() / N_MICRO
            loss.backward()
            say(f"rank{RANK}.steps", step, micro_batch, loss.item().hex())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
        scheduler.step()
        say(f"rank{RANK}.life{LIFE}.steps", step)
    with zerod.gathered(model):
        say_final(opt, model)
    opt.close()


train()
