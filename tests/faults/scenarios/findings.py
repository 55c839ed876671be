# SPDX-License-Identifier: Apache-2.0
"""
Findings of `zerodctl status` about programs without an error to refuse. Each program trains as many steps as its
finding needs. The guards are similar programs without a finding.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, one_hot

from ..corpus import Found, scenario
from ..models import N_IN, WIDTH, Net, names

SLOWLY = {"optimizer": {"params": {"lr": 1e-4}}}  # small, so that torch alone ends with the same parameters
N_COMPARED = 54  # ranks are compared over 50 steps in a row
N_COUNTED = 104  # zeros are counted over 100 steps in a row


def train(t: Any, n: int, make: Any = Net, loss: Any = mse_loss, size: int = 4, before: Any = None, after: Any = None,
          schedule: Any = None) -> None:
    """before(model, step) and after(step) are called around forward and backward."""
    model = t.model(make)
    opt = t.attach(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, schedule) if schedule else None
    for step in t.steps(opt, n):
        x, y = t.batch(step, n=size)
        if before:
            before(model, step)
        loss(model(x), y).backward()
        if after:
            after(step)
        opt.step()
        opt.zero_grad()
        if scheduler:
            scheduler.step()
    opt.close()


# ---- rank-norm ----------------------------------------------------------------------------------------------


@scenario(Found("rank-norm", rank=1, says=("the gradients of rank 1 were at least ", "a sum and not a mean")), world=3,
          policy=SLOWLY, pattern="findings", trains=True)
def sum_on_one_rank(t: Any) -> None:
    """The loss of rank 1 is a thousand times as large as the losses of the other ranks."""
    train(t, N_COMPARED, loss=(lambda x, y: 1000 * mse_loss(x, y)) if t.goes_wrong() else mse_loss)


@scenario(world=3, policy=SLOWLY, pattern="findings")
def larger_batches_on_one_rank(t: Any) -> None:
    """Rank 1 averages over sixteen times as many rows."""
    train(t, N_COMPARED, size=64 if t.rank == 1 else 4)


@scenario(world=3, policy=SLOWLY, pattern="findings")
def larger_weight_on_one_rank(t: Any) -> None:
    """The loss of rank 1 is only four times as large as the other losses, not ten times."""
    train(t, N_COMPARED, loss=(lambda x, y: 4 * mse_loss(x, y)) if t.rank == 1 else mse_loss, size=256)


# ---- zero-gradient ------------------------------------------------------------------------------------------


class Rectified(nn.Module):
    def __init__(self, bias: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(N_IN, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, 1)
        nn.init.constant_(self.body[0].bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@scenario(Found("zero-gradient", params=(*names("body.0"), "head.weight"),
                says=("exactly zero in the last 104 steps", "diagnostics.unused")),
          policy=SLOWLY, pattern="findings", trains=True)
def nothing_passes_the_relu(t: Any) -> None:
    """The bias before the ReLU is so low that the ReLU passes nothing: all gradients are pushed, and are zero."""
    train(t, N_COUNTED, make=lambda: Rectified(-1000.0 if t.faulty else 0.5))


@scenario(policy={"diagnostics": {"unused": ["body.*", "head.weight"]}} | SLOWLY, pattern="findings")
def zeros_that_are_meant(t: Any) -> None:
    """All gradients are zero, and the configuration allows this."""
    train(t, N_COUNTED, make=lambda: Rectified(-1000.0))


class Mixture(nn.Module):
    """The router sends all rows to the first of three experts. The other experts get zero gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(N_IN, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = one_hot(torch.zeros(len(x), dtype=torch.long), 3).float()
        return sum(w.unsqueeze(1) * expert(x) for w, expert in zip(weights.T, self.experts, strict=True))


@scenario(policy=SLOWLY, pattern="findings")
def experts_with_zeros(t: Any) -> None:
    """An expert without rows has a zero gradient, while another expert has not."""
    train(t, N_COUNTED, make=Mixture)


class Sparse(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x)


@scenario(policy={"diagnostics": {"unused": ["experts.1.*", "experts.2.*"]}} | SLOWLY, pattern="findings")
def experts_without_gradients(t: Any) -> None:
    """An expert without rows is not called, so it has no gradient. This is not a zero gradient."""
    train(t, N_COUNTED, make=Sparse)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(N_IN, N_IN), nn.Linear(N_IN, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.generator(x))


@scenario(policy=SLOWLY, pattern="findings")
def generator_and_critic_by_turns(t: Any) -> None:
    """In each step either the generator or the critic is frozen."""

    def take_turns(model: Any, step: int) -> None:
        model.generator.requires_grad_(step % 2 == 0)
        model.critic.requires_grad_(step % 2 == 1)

    train(t, N_COUNTED, make=Gan, before=take_turns)


# ---- zero-lr ------------------------------------------------------------------------------------------------


@scenario(Found("zero-lr", says=("in the last 104 steps", "have trained nothing")), policy=SLOWLY, pattern="findings",
          trains=True)
def schedule_at_its_end(t: Any) -> None:
    """The schedule has reached 0, and the program trains on."""
    train(t, N_COUNTED, schedule=lambda _step: 0.0 if t.faulty else 1.0)


@scenario(policy=SLOWLY, pattern="findings")
def warm_up_from_zero(t: Any) -> None:
    """The learning rate begins at 0 and grows in each step."""
    train(t, N_COUNTED, schedule=lambda step: step / 200)


# ---- slow-rank ----------------------------------------------------------------------------------------------


@scenario(Found("slow-rank", rank=1, says=("rank 1 was the last in each", "mostly in its forward")), world=3,
          policy=SLOWLY, pattern="findings", trains=True)
def loader_of_one_rank_is_slow(t: Any) -> None:
    """In each step rank 1 waits 50 ms longer for its batch."""
    train(t, N_COMPARED, before=lambda _model, _step: time.sleep(0.05) if t.goes_wrong() and t.real else None)


@scenario(world=3, policy=SLOWLY, pattern="findings")
def one_rank_is_slow_once(t: Any) -> None:
    """Rank 1 writes a file in one step, and needs as long for it as a slow rank in all steps."""
    train(t, N_COMPARED, before=lambda _model, step: time.sleep(2.0) if t.real and t.rank == 1 and step == 20 else None)
