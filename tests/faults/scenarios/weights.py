# SPDX-License-Identifier: Apache-2.0
"""Changes of weights and models: E1103 to E1110, and changes that are allowed."""

from __future__ import annotations

import copy
import signal
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from ..corpus import ALL, ANY, Expect, scenario
from ..models import EVERYTHING, Net, names

HERE = "weights.py:"


def train(t: Any, between: Any) -> None:
    """between(model, step) runs before the forward of every step."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        between(model, step)
        x, y = t.batch(step)
        weight = model.head.weight
        mse_loss(model(x.to(weight.dtype)), y.to(weight.dtype)).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


# ---- E1104: weights re-pointed ------------------------------------------------------------------------------

BEFORE = ("before zerod.Optimizer(model)",)


@scenario(
    Expect(1104, params=EVERYTHING, rank=1, step=1, micro_batch=ANY, fix=BEFORE, exception="WeightsRepointed"),
    pattern=".to()", stages=(1, 2))
def to_double_and_back(t: Any) -> None:
    """After two casts the weights have their dtype again, but other memory."""
    train(t, lambda model, step: model.double().float() if t.goes_wrong(step) else None)


@scenario(
    Expect(1104, params=EVERYTHING, rank=ALL, step=1, micro_batch=ANY, fix=BEFORE, exception="WeightsRepointed"),
    pattern=".half()")
def to_half(t: Any) -> None:
    """model.half() after the model was attached: the text names this cause, not the other dtype of the gradients."""
    train(t, lambda model, step: model.half() if t.goes_wrong(step) else None)


@scenario(
    Expect(1104, params=names("head"), rank=ALL, step=1, micro_batch=ANY, fix=("zerod.writable(model)",),
           exception="WeightsRepointed", sticky=False),
    pattern="assign=True")
def load_with_assign(t: Any) -> None:
    """load_state_dict(assign=True) would replace the parameters' memory. It is refused before that."""

    def load(model: Net, step: int) -> None:
        if t.goes_wrong(step):
            head = {k: v.detach().clone() for k, v in model.head.state_dict().items()}
            model.head.load_state_dict(head, assign=True)

    train(t, load)


@scenario(
    Expect(1104, params=("head.bias",), rank=1, step=2, micro_batch=ANY, fix=("zerod.writable(model)",),
           exception="WeightsRepointed"),
    pattern="p.data = x")
def data_replaced(t: Any) -> None:
    """The program assigns p.data."""

    def replace(model: Net, step: int) -> None:
        if t.goes_wrong(step):
            model.head.bias.data = model.head.bias.detach() * 1

    train(t, replace)


# ---- E1106, E1110: published memory -------------------------------------------------------------------------


def average(t: Any, model: nn.Module, step: int, kept: dict[str, torch.Tensor]) -> None:
    """Writes an exponential moving average back in place."""
    if step != 1:
        kept.update({n: p.detach().clone() for n, p in model.named_parameters()})
        return
    with torch.no_grad():
        if t.goes_wrong(step):
            model.head.weight.mul_(0.9).add_(kept["head.weight"], alpha=0.1)
        elif not t.faulty:
            with t.writable(model):
                model.head.weight.mul_(0.9).add_(kept["head.weight"], alpha=0.1)


@scenario(
    Expect(1106, params=("head.weight",), rank=1, step=1, micro_batch=ANY, fix=("zerod.writable(model)", "opt.close()"),
           says=("weights.py",), exception="WeightsWritten"),
    pattern="E1106", stages=(1, 2))
def write_in_place(t: Any) -> None:
    """An in-place write to published weights: the next forward is refused before other ranks get the change."""
    kept: dict[str, torch.Tensor] = {}
    train(t, lambda model, step: average(t, model, step, kept))


@scenario(
    Expect(1110, params=("h.0.fc.weight",), rank=1, step=1, fix=("zerod.gathered(model)",), says=("weights.py",),
           exception="", sticky=False, signal=signal.SIGSEGV),
    pattern="E1110", echoes=(1302,), stages=(3,), policy={"limits": {"reattach_timeout": "1s"}})
def read_released(t: Any) -> None:
    """Stage 3: a weight is read between two forwards, when it is not gathered."""

    def read(model: Net, step: int) -> None:
        if t.goes_wrong(step):
            model.h[0].fc.weight.sum().item()
        elif not t.faulty:
            with t.gathered(model):
                assert torch.isfinite(model.h[0].fc.weight.sum())

    train(t, read)


# ---- what is allowed ----------------------------------------------------------------------------------------


@scenario(pattern="writable", stages=(1, 2, 3))
def load_in_a_window(t: Any) -> None:
    """All ranks load weights in a window. Rank 0's count."""

    def load(model: Net, step: int) -> None:
        if step == 1:
            with t.writable(model):
                model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})

    train(t, load)


@scenario(pattern="deepcopy")
def copy_for_evaluation(t: Any) -> None:
    """A deep copy is an ordinary model: it may be cast, written and run."""

    def evaluate(model: Net, step: int) -> None:
        other = copy.deepcopy(model).double()
        with torch.no_grad():
            other.head.bias.add_(1)
            other(t.batch(step)[0].double())

    train(t, evaluate)


@scenario(pattern=".to()")
def to_where_it_is(t: Any) -> None:
    """model.to("cpu") and model.float() change nothing."""
    train(t, lambda model, step: model.to("cpu").float())
