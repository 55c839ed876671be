# SPDX-License-Identifier: Apache-2.0
"""Programs that read gradients between the backward and the step."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.nn.functional import mse_loss

from ..corpus import Refused, scenario
from ..models import Net

READ = "reads .grad of embed.weight between backward() and step() and finds None"


def train_and(t: Any, faulty: Any, repaired: Any = None, prepare: Any = None) -> None:
    """faulty(model), repaired(model): run between backward() and step()."""
    model = t.model(Net)
    opt = t.attach(model)
    if prepare and not t.faulty:
        prepare(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x), y).backward()
        if t.faulty:
            faulty(model)
        elif repaired:
            repaired(model)
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(Refused(("AttributeError",), says=("has no attribute 'norm'", "reads .grad of embed.weight", "zerod has pushed",
                                             "opt.grad_norm()", "clip_grad_norm_", "gradient_clipping")),
          pattern="reads", remarks=(READ,))
def norm_by_hand(t: Any) -> None:
    """The program adds the squares of all gradients itself."""
    train_and(t, lambda model: sum(p.grad.norm() ** 2 for p in model.parameters()), lambda model: t.clip(model, 1e9))


@scenario(Refused(("TypeError",), says=("NoneType", "reads .grad of embed.weight", "the mean over all ranks")),
          pattern="reads", remarks=(READ,))
def mean_by_hand(t: Any) -> None:
    """The program averages the gradients over the ranks, which the daemon does already."""
    train_and(t, lambda model: [torch.distributed.all_reduce(p.grad) for p in model.parameters()])


def clamp(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.clamp_(-1e-3, 1e-3)


@scenario(Refused(("UserWarning",), says=("reads .grad of embed.weight", "has no effect", "param.register_hook")),
          pattern="reads")
def clamped_by_hand(t: Any) -> None:
    """The program clamps gradients, but there are none. Warnings are errors, as with `python -W error`."""

    def prepare(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))

    warnings.simplefilter("error", UserWarning)
    train_and(t, clamp, prepare=prepare)


@scenario(pattern="reads")
def gradients_of_another_model(t: Any) -> None:
    """The same clamping of another model with a torch optimizer, before the backward and after the step, is allowed."""
    warnings.simplefilter("error", UserWarning)
    other = nn.Linear(2, 2)
    ordinary = torch.optim.SGD(other.parameters(), lr=0.1)
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        clamp(model)
        loss = mse_loss(model(x), y)
        loss.backward()
        other(torch.ones(2)).sum().backward()
        clamp(other)
        ordinary.step()
        t.clip(model, 1e9)
        opt.step()
        opt.zero_grad()
        clamp(model)
    opt.close()
