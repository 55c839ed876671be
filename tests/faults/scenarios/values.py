# SPDX-License-Identifier: Apache-2.0
"""Gradients that are not finite or not valid, and arguments that differ: E1102, E1108, E1201, E1202."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ..corpus import ALL, ANY, Expect, Refused, scenario
from ..models import WIDTH, Net

STOP_AT_NONFINITE = {"diagnostics": {"on_nonfinite": "error"}}


def train(t: Any, spoil: Any = None, before_step: Any = None) -> None:
    """spoil(model): adds hooks that spoil a gradient, for one backward."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        handle = spoil(model) if spoil and t.goes_wrong(step) else None
        mse_loss(model(x), y).backward()
        if handle:
            handle.remove()
        if before_step:
            before_step(opt, step)
        opt.step()
        opt.zero_grad()
    opt.close()


def nan_at_17(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad.view(-1)[17] = float("nan")
    return grad


def to_nan(model: Net) -> Any:
    return model.h[1].fc.weight.register_hook(nan_at_17)


@scenario(
    Expect(1201, params=("h.1.fc.weight",), rank=1, step=1, micro_batch=0,
           says=("NaN at element 17 of 64", "1 NaN", "step skipped"), fix=("detect_anomaly",), exception="",
           sticky=False),
    pattern="NaN", trains=True, stages=(1, 2, 3))
def nan_on_one_rank(t: Any) -> None:
    """Rank 1 has one NaN. All ranks skip the step."""
    train(t, to_nan)


@scenario(
    Expect(1201, params=("h.1.fc.weight",), rank=1, step=1, micro_batch=0,
           says=("NaN at element 17 of 64", "step held"), exception="NonFiniteGradient", told=1),
    policy=STOP_AT_NONFINITE, pattern="NaN", echoes=(1201, 1302))
def nan_held(t: Any) -> None:
    """Rank 1 has one NaN, and such steps are configured to be held."""
    train(t, to_nan)


@scenario(
    Expect(1201, params=("head.bias",), rank=1, step=2, micro_batch=0, says=("inf at element 0 of 1",), exception="",
           sticky=False),
    pattern="Inf", trains=True)
def inf_after_scaling(t: Any) -> None:
    """The program scales a gradient beyond the range of fp32."""
    train(t, lambda model: model.head.bias.register_hook(lambda g: g * 1e38 * 1e38))


@scenario(
    Expect(1201, params=("head.bias",), step=1, micro_batch=0,
           says=("inf at element 0 of 1", "their sum is beyond what fp32 can hold"), exception="", sticky=False),
    pattern="Inf", trains=True)
def sum_overflows(t: Any) -> None:
    """The gradients of all ranks are finite, but their sum is not."""
    train(t, lambda model: model.head.bias.register_hook(lambda g: torch.full_like(g, 3e38)))


@scenario(
    Expect(1202, params=("h.1.fc.weight",), rank=1, step=1, micro_batch=0, says=("NaN", "minimum"),
           exception="NonFiniteGradient", told=1),
    policy=STOP_AT_NONFINITE | {
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 0, "hysteresis": 1, "min_loss_scale": 1}},
    pattern="E1202", echoes=(1202, 1302))
def loss_scale_at_minimum(t: Any) -> None:
    """A NaN with the loss scale at its minimum: the scale cannot be lowered further."""
    train(t, to_nan)


def second_to_ask(run: Any) -> None:
    """The first arguments of a step count as the expected ones, so rank 0 asks first."""
    ranks = [run.start(r) for r in range(2)]
    if run.faulty:
        run.until_waiting(0, step=1, state="step")
        run.mark("go")
    run.wait(*ranks)


@scenario(
    Expect(1108, rank=1, step=1, micro_batch=ANY, says=("lr of group 0", "0.02", "0.01"), fix=("opt.step()",),
           exception="StepArgumentsDiffer"),
    pattern="E1108", direct=second_to_ask)
def other_lr_on_one_rank(t: Any) -> None:
    """Rank 1's learning rate schedule follows its own loss."""

    def schedule(opt: Any, step: int) -> None:
        if t.goes_wrong(step):
            t.await_mark("go")
            opt.param_groups[0]["lr"] = 0.02

    train(t, before_step=schedule)


# ---- E1102: gradients of another form -----------------------------------------------------------------------


class Lookup(nn.Module):
    """declared: the module declares sparse gradients; called: only the call makes them sparse."""

    def __init__(self, declared: bool, called: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, WIDTH, sparse=declared)
        self.head = nn.Linear(WIDTH, 1)
        self.sparse = declared or called

    def forward(self, x: Tensor) -> Tensor:
        rows = (x * 4).long().abs() % 16
        return self.head(nn.functional.embedding(rows, self.emb.weight, sparse=self.sparse).mean(1))


def look_up(t: Any, declared: bool, called: bool) -> None:
    model = t.model(lambda: Lookup(declared, called))
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(Refused(("Error", "TypeError"), says=("emb", "sparse=False")), pattern="sparse")
def sparse_embedding(t: Any) -> None:
    """An embedding that declares sparse gradients is refused when the model is attached."""
    look_up(t, declared=t.faulty, called=False)


@scenario(
    Expect(1102, params=("emb.weight",), rank=ALL, step=0, micro_batch=0, fix=("sparse=False",),
           says=("torch.sparse_coo",), exception="WrongGradient"),
    pattern="sparse")
def sparse_gradient(t: Any) -> None:
    """A gradient is sparse, although no module declared it."""
    look_up(t, declared=False, called=t.faulty)


class Phases(Net):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.ones(WIDTH, dtype=dtype))

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        return self.head(self.trunk(x) * self.phases.real)


def with_phases(t: Any, dtype: torch.dtype) -> None:
    model = t.model(lambda: Phases(dtype if t.faulty else torch.float32))
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(Refused(("Error", "TypeError", "ValueError"), says=("phases", "complex64")), pattern="complex")
def complex_parameter(t: Any) -> None:
    """A complex parameter is refused when the model is attached, by its name."""
    with_phases(t, torch.complex64)


@scenario(Refused(("Error", "TypeError", "ValueError"), says=("phases", "float64")), pattern="dtype")
def double_parameter(t: Any) -> None:
    """A parameter in double precision is refused when the model is attached, by its name."""
    with_phases(t, torch.float64)
