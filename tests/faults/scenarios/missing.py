# SPDX-License-Identifier: Apache-2.0
"""Missing gradients: E1005 to E1007, classes M1 to M7."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from ..corpus import ALL, ANY, Expect, scenario
from ..models import BLOCKS, EVERYTHING, N_IN, WIDTH, Net, names

HOLD = {"diagnostics": {"on_missing": "error"}}
STATIC = {"diagnostics": {"static_graph": True}}
OUT_OF_MEMORY = "CUDA out of memory (injected)"
HERE = "missing.py:"


def rank_1_last(run: Any) -> None:
    """Rank 1 waits for the mark "go" before its mistake. The mark is set when rank 0 waits in the step."""
    ranks = [run.start(r) for r in range(2)]
    if run.faulty:
        run.until_waiting(0, step=run.scenario.expect.step)
        run.mark("go")
    run.wait(*ranks)


# ---- M1: never used -----------------------------------------------------------------------------------------


class Bert(nn.Module):
    """The pooler is called in every forward, but a program that needs only the sequence drops its output."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Net()
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.encoder.trunk(x)
        return x, torch.tanh(self.pooler(x))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = Bert()
        self.bert.encoder.head.requires_grad_(False)
        self.used = nn.Linear(WIDTH, 1)
        self.unused = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.bert(x)
        return self.used(hidden)


IDLE = names("bert.pooler", "unused")


def tag(t: Any) -> None:
    model = t.model(Tagger)
    if not t.faulty:
        model.get_submodule("bert.pooler").requires_grad_(False)
        model.get_submodule("unused").requires_grad_(False)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


FREEZE = ('model.get_submodule("bert.pooler").requires_grad_(False)',
          'model.get_submodule("unused").requires_grad_(False)')


@scenario(
    Expect(1005, "M1", params=IDLE, rank=ALL, step=0, micro_batch=ANY, fix=FREEZE,
           says=("never called: unused", "called, but the output does not reach the loss: bert.pooler"),
           exception="MissingGradient"),
    policy=HOLD, pattern="1b, 2", stages=(1, 2, 3))
def unused_head_and_pooler(t: Any) -> None:
    """A pooler's output is unused, and a head is never called."""
    tag(t)


@scenario(
    Expect(1005, "M1", params=IDLE, step=2, fix=FREEZE,
           says=("never called: unused", "called, but the output does not reach the loss: bert.pooler"),
           exception="", sticky=False),
    pattern="1b, 2", trains=True)
def unused_head_and_pooler_warned(t: Any) -> None:
    """Pooler and head are unused, with the default policy. The rest is trained, with one warning after three steps."""
    tag(t)


@scenario(policy={"diagnostics": {"on_missing": "error", "unused": ["bert.pooler.*", "unused.*"]}}, pattern="1b, 2")
def unused_and_declared(t: Any) -> None:
    """A parameter that the configuration declares as unused is no missing gradient, whatever on_missing is."""
    opt = t.attach(t.model(Tagger))
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(t.trained(x), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


class NoGradient(torch.autograd.Function):
    """Adds a bias. In the backward the bias has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class UndefinedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        return NoGradient.apply(super().forward(x), self.offset)


@scenario(
    Expect(1005, "M1", params=("offset",), step=2, exception="", sticky=False),
    pattern="o", trains=True)
def undefined_gradient(t: Any) -> None:
    """The hook is called for an undefined gradient. Nothing is pushed, and no old gradient is used."""
    model = t.model(UndefinedNet)
    if not t.faulty:
        model.offset.requires_grad_(False)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


# ---- M2: data-dependent -------------------------------------------------------------------------------------


class Experts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, chosen: int, all_of_them: bool = False) -> Tensor:
        hidden = self.trunk(x)
        x = self.experts[chosen](hidden)
        if all_of_them:
            x = x + 0 * self.experts[1 - chosen](hidden).sum()
        return self.head(x)


def route(t: Any, chosen: Any) -> None:
    model = t.model(Experts)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x, chosen(step), all_of_them=not t.faulty), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1005, "M2", params=names("experts.0"), rank=1, step=0, micro_batch=ANY, fix=("on_missing: zero",),
           exception="MissingGradient"),
    policy=HOLD, pattern="M2", direct=rank_1_last)
def branch_by_rank(t: Any) -> None:
    """In the first step rank 1 has no tokens for one expert, and rank 0 has none for either expert."""
    model = t.model(Experts)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        out = model(x, 1)
        if not t.goes_wrong(step):
            out = out + model(x, 0)
        else:
            t.await_mark("go")
        mse_loss(out, y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1005, "M2", params=names("experts.0", "experts.1"), step=2, fix=("0 * branch(x).sum()",),
           says=("rank 0 misses experts.1.weight, experts.1.bias", "rank 1 misses experts.0.weight"), exception="", sticky=False),
    pattern="M2", trains=True, hooks=False, stages=(1, 2, 3))
def branch_by_rank_warned(t: Any) -> None:
    """Each rank uses another expert. By default a missing gradient is no contribution."""
    route(t, lambda step: t.rank)


@scenario(pattern="M2", stages=(1, 2, 3))
def heads_by_turns(t: Any) -> None:
    """A program that uses its parts in turns is right, and gets no message."""
    model = t.model(Experts)
    opt = t.attach(model)
    for step in t.steps(opt, 6):
        x, y = t.batch(step)
        mse_loss(model(x, step % 2), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(pattern="M6")
def frozen_by_turns(t: Any) -> None:
    """A program that freezes its parts in turns, like a GAN with one optimizer, is right too."""
    model = t.model(Experts)
    opt = t.attach(model)
    for step in t.steps(opt, 6):
        for n, expert in enumerate(model.experts):
            expert.requires_grad_(n == step % 2)
        x, y = t.batch(step)
        mse_loss(model(x, 0) + model(x, 1), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1005, "U", params=names("experts.1"), step=2, says=("the data chooses among them",), exception="", sticky=False),
    pattern="M2", trains=True, hooks=False)
def experts_without_tokens(t: Any) -> None:
    """First one expert gets no tokens for some steps, then the other. There is one warning for both."""
    model = t.model(Experts)
    opt = t.attach(model)
    for step in t.steps(opt, 12):
        x, y = t.batch(step)
        mse_loss(model(x, step // 4 % 2, all_of_them=not t.faulty), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1005, "M2", params=names("experts.1"), rank=ALL, step=1, micro_batch=ANY, fix=("on_missing: zero",),
           exception="MissingGradient"),
    policy=HOLD, pattern="M2")
def branch_by_step(t: Any) -> None:
    """All ranks leave out an expert that they used in the previous step."""
    model = t.model(Experts)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        out = model(x, 0)
        if not t.goes_wrong(step):
            out = out + model(x, 1)
        mse_loss(out, y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(pattern="c")
def batch_retried_in_halves(t: Any) -> None:
    """Rank 1 has no memory for a batch, and takes it in halves with half the weight. The program's mean is right."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        for part in (slice(0, len(x) // 2), slice(len(x) // 2, None)) if t.rank == 1 and step >= 1 else (slice(None),):
            (mse_loss(model(x[part]), y[part]) * len(x[part]) / len(x)).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(pattern="c")
def weighted_by_the_tokens_of_all_ranks(t: Any) -> None:
    """Rank 0 has two micro-batches, rank 1 has one. Each loss is a sum divided by the tokens of all ranks."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        for micro in range(2 - t.rank % 2):
            x, y = t.batch(2 * step + micro)
            (mse_loss(model(x), y, reduction="sum") * t.world / 24).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(pattern="c")
def other_number_in_each_step(t: Any) -> None:
    """All ranks give the same number of micro-batches, which differs between steps. This is right."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        for micro in range(1 + step % 2):
            x, y = t.batch(2 * step + micro)
            mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


def change_graph(t: Any, used: Any) -> None:
    model = t.model(Experts)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        out = model(x, 0)
        if used(step):
            out = out + model(x, 1)
        mse_loss(out, y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1006, params=names("experts.1"), rank=1, step=1, micro_batch=ANY, fix=("static_graph: false",),
           exception="GraphChanged"),
    policy=STATIC, pattern="M2")
def static_graph_left_out(t: Any) -> None:
    """static_graph has learnt the parameters of the first step. Rank 1 leaves out two of them."""
    change_graph(t, lambda step: not t.goes_wrong(step))


@scenario(
    Expect(1006, params=names("experts.1"), rank=1, step=1, micro_batch=0, fix=("static_graph: false",),
           exception="GraphChanged"),
    policy=STATIC, repaired_policy={"diagnostics": {"static_graph": False, "on_missing": "zero"}}, pattern="M2",
    tolerates=(1005,), echoes=(1005,))
def static_graph_one_more(t: Any) -> None:
    """static_graph has learnt the parameters of the first step. Rank 1 uses two more."""
    change_graph(t, lambda step: t.rank == 1 and step == 1)


# ---- M3: no backward ----------------------------------------------------------------------------------------


def refuse(_module: nn.Module, _inputs: Any) -> None:
    raise RuntimeError(OUT_OF_MEMORY)


@scenario(
    Expect(1005, "M3", params=EVERYTHING, rank=1, step=1, micro_batch=ANY, says=(OUT_OF_MEMORY, HERE),
           never_says=("requires_grad is False",), exception="MissingGradient"),
    pattern="1a'", stages=(1, 2, 3))
def forward_raises_swallowed(t: Any) -> None:
    """The forward raises on rank 1. The trainer skips the batch but not the step."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        handle = model.h[0].register_forward_pre_hook(refuse) if t.goes_wrong(step) else None
        try:
            mse_loss(model(x), y).backward()
        except RuntimeError:
            handle.remove()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1005, "M3", params=EVERYTHING, rank=ALL, step=0, micro_batch=ANY, says=("detach()",),
           exception="MissingGradient"),
    pattern="M3")
def loss_detached(t: Any) -> None:
    """The loss was rebuilt from a number, so its backward reaches no parameter."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        loss = mse_loss(model(x), y)
        if t.faulty:
            loss = torch.tensor(loss.item(), requires_grad=True)
        loss.backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1005, "M3", params=EVERYTHING, rank=1, step=1, micro_batch=ANY, says=("requires_grad",),
           exception="MissingGradient"),
    pattern="M3")
def forward_without_grad(t: Any) -> None:
    """Rank 1 does not leave no_grad, and its trainer skips the backward, which would raise."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        with torch.set_grad_enabled(not t.goes_wrong(step)):
            loss = mse_loss(model(x), y)
        if loss.requires_grad:
            loss.backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1005, "M3", params=EVERYTHING, rank=ALL, step=0, micro_batch=ANY, fix=("backward()",),
           exception="MissingGradient"),
    pattern="M3")
def step_without_backward(t: Any) -> None:
    """opt.step() without a forward or backward."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        if not t.faulty:
            mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


# ---- M4: an interrupted backward ----------------------------------------------------------------------------


def explode(_grad: Tensor) -> Tensor:
    raise RuntimeError(OUT_OF_MEMORY)


def train_with_explosion(t: Any, before: Any = None, after: Any = None) -> None:
    """Rank 1's backward stops between the head and the blocks. The trainer skips the batch but not the step."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        if before:
            before(step)
        handle = model.head.register_forward_pre_hook(poison) if t.goes_wrong(step) else None
        try:
            mse_loss(model(x), y).backward()
        except RuntimeError as error:
            if str(error) != OUT_OF_MEMORY:
                raise
            handle.remove()
            model.zero_grad(set_to_none=True)
            if after:
                after(step)
        opt.step()
        opt.zero_grad()
    opt.close()


def poison(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    inputs[0].register_hook(explode)


@scenario(
    Expect(1005, "M4", params=EVERYTHING, rank=1, step=1, micro_batch=ANY,
           says=(OUT_OF_MEMORY, HERE, "train_with_explosion"), never_says=("zero_grad",), exception="MissingGradient"),
    pattern="1a", echoes=(1007,), stages=(1, 2, 3))
def backward_raises_swallowed(t: Any) -> None:
    """An exception ends rank 1's backward after the head. Rank 0 has pushed nothing, so rank 1's pushes are dropped."""
    train_with_explosion(
        t,
        lambda step: t.await_mark("given-up") if t.faulty and t.rank == 0 and step == 1 else None,
        lambda step: t.mark("given-up"))


@scenario(
    Expect(1007, "M4", rank=1, step=1, micro_batch=0, says=(OUT_OF_MEMORY, "step aborted"),
           exception="GradientFault", sticky=False),
    pattern="1a", echoes=(1302,), direct=rank_1_last)
def backward_raises_too_late(t: Any) -> None:
    """An exception ends a backward after a part was reduced with rank 0's. Both ranks are told of the abort."""
    train_with_explosion(
        t, lambda step: t.await_mark("go") if t.faulty and t.rank == 1 and step == 1 else None)


def zero_between(t: Any, zero: Any) -> None:
    """On one rank zero(model, opt) runs between the backward and the step."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        if t.faulty and t.rank == 0 and step == 1:
            t.await_mark("given-up")
        x, y = t.batch(step)
        mse_loss(model(x), y).backward()
        if t.goes_wrong(step):
            zero(model, opt)
            t.mark("given-up")
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1005, "M4", params=EVERYTHING, rank=1, step=1, micro_batch=ANY, says=("zero_grad()",),
           exception="MissingGradient"),
    pattern="zero_grad", echoes=(1007,))
def zero_grad_before_step(t: Any) -> None:
    """opt.zero_grad() between backward and step deletes the gradients, and then the step is asked for."""
    zero_between(t, lambda _model, opt: opt.zero_grad())


@scenario(
    Expect(1005, "M4", params=EVERYTHING, rank=1, step=1, micro_batch=ANY, says=("zero_grad()",),
           exception="MissingGradient"),
    pattern="zero_grad", echoes=(1007,))
def model_zero_grad_before_step(t: Any) -> None:
    """model.zero_grad() between backward and step deletes the gradients."""
    zero_between(t, lambda model, _opt: model.zero_grad())


@scenario(
    Expect(1007, "M4", rank=1, step=1, micro_batch=0, says=("ValueError", "a hook of the user's"), exception="",
           sticky=False),
    pattern="exceptions", echoes=(1302,))
def hook_raises(t: Any) -> None:
    """A backward hook of the program raises. The program gets its own exception, not another one."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        if t.faulty and t.rank == 0 and step == 1:
            t.await_mark("given-up")
        x, y = t.batch(step)
        if t.goes_wrong(step):
            model.h[0].register_full_backward_hook(raise_value_error)
        try:
            mse_loss(model(x), y).backward()
        except ValueError as error:
            assert str(error) == "a hook of the user's", error
            t.mark("given-up")
            opt.close()
            return
        opt.step()
        opt.zero_grad()
    opt.close()


def raise_value_error(*_: Any) -> None:
    raise ValueError("a hook of the user's")


def interrupt(_grad: Tensor) -> None:
    raise KeyboardInterrupt


def interrupt_there(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    inputs[0].register_hook(interrupt)


@scenario(
    Expect(1007, "M4", rank=1, step=1, micro_batch=0, says=("KeyboardInterrupt",), exception="", sticky=False),
    pattern="exceptions", echoes=(1302,))
def keyboard_interrupt(t: Any) -> None:
    """Ctrl-C in the middle of a backward raises KeyboardInterrupt."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        if t.faulty and t.rank == 0 and step == 1:
            t.await_mark("given-up")
        x, y = t.batch(step)
        if t.goes_wrong(step):
            model.head.register_forward_pre_hook(interrupt_there)
        try:
            mse_loss(model(x), y).backward()
        except KeyboardInterrupt:
            t.mark("given-up")
            opt.close()
            return
        opt.step()
        opt.zero_grad()
    opt.close()


# ---- M5: dead segments --------------------------------------------------------------------------------------


class FrozenEmbedding(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)


def train_segments(t: Any) -> None:
    model = t.model(FrozenEmbedding)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x, reentrant=t.faulty), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1005, "M5", params=BLOCKS, rank=ALL, step=0, micro_batch=ANY, fix=("use_reentrant",),
           says=("h.0", "models.py:"), exception="MissingGradient"),
    policy=HOLD, pattern="M5")
def dead_segment(t: Any) -> None:
    """No input of the reentrant segments requires grad, so autograd leaves the segments out of the backward."""
    train_segments(t)


@scenario(
    Expect(1005, "M5", params=BLOCKS, step=0, fix=("use_reentrant",), exception="", sticky=False),
    pattern="M5", trains=True)
def dead_segment_warned(t: Any) -> None:
    """Dead segments with the default policy. Only the head is trained, with a warning."""
    train_segments(t)


# ---- M6: requires_grad changes ------------------------------------------------------------------------------


@scenario(
    Expect(1005, "M6", params=names("h.0.fc"), rank=ALL, step=1, micro_batch=ANY, exception="MissingGradient"),
    policy=HOLD, pattern="M6")
def frozen_after_attach(t: Any) -> None:
    """A block is frozen between two steps."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        if t.goes_wrong(step):
            model.h[0].requires_grad_(False)
        x, y = t.batch(step)
        mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1103, "M6", params=names("h.0.fc"), rank=ALL, step=1, micro_batch=0,
           fix=("unfreeze before zerod.Optimizer(model)",), exception="WrongGradient"),
    pattern="M6")
def unfrozen_after_attach(t: Any) -> None:
    """A block that was declared as frozen is trained from the second step on."""
    model = t.model(Net)
    if t.faulty:
        model.h[0].requires_grad_(False)
    opt = t.attach(model)
    for step in t.steps(opt):
        if t.goes_wrong(step):
            model.h[0].requires_grad_(True)
        x, y = t.batch(step)
        mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


# ---- reactions of a program to a fault ----------------------------------------------------------------------


@scenario(
    Expect(1005, "M1", params=IDLE, rank=ALL, step=0, micro_batch=ANY, exception="", sticky=False),
    policy=HOLD, pattern="2", trains=True, twin=False, echoes=(1005,))
def cleared_and_gone_on(t: Any) -> None:
    """The program expects missing gradients, clears the fault and asks again. The other parameters are trained."""
    model = t.model(Tagger)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x), y).backward()
        try:
            opt.step()
        except RuntimeError as error:
            assert type(error).__name__ == "MissingGradient", repr(error)
            opt.clear_fault()
            opt.step()
        opt.zero_grad()
    opt.close()


# ---- X2: the data is not split ---------------------------------------------------------------------------------


def train_on(t: Any, rank: Any) -> None:
    """rank(step): the rank whose batches this rank uses."""
    model = t.model(Net)
    opt = t.attach(model)
    generator = torch.Generator()
    for step in t.steps(opt, 5):
        generator.manual_seed(10 * step + rank(step))
        x = torch.randn(4, N_IN, generator=generator)
        y = x.sum(1, keepdim=True).sin()
        mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1111, "X2", step=2, says=("from ranks 0 to 1, of all 8 parameters, in 3 steps",), fix=("DistributedSampler",),
           exception="", sticky=False),
    pattern="X2", trains=True)
def same_data_on_all_ranks(t: Any) -> None:
    """No sampler splits the data, so all ranks have the same batches."""
    train_on(t, lambda _step: 0 if t.faulty else t.rank)


@scenario(pattern="X2")
def same_data_in_some_steps(t: Any) -> None:
    """Ranks sometimes have the same batch, as with a small data set. Not three times in a row, so this is allowed."""
    train_on(t, lambda step: t.rank if step % 3 == 2 else 0)


# ---- M2 again: long turns -----------------------------------------------------------------------------------------


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(N_IN, N_IN), nn.Linear(N_IN, 1)


@scenario(
    Expect(1005, "M2", params=names("generator"), step=3, says=("the set of missing gradients differs between steps",),
           never_says=("requires_grad_(False)",), exception="", sticky=False),
    repaired_policy={"diagnostics": {"unused": ["generator.*"]}}, pattern="M2", trains=True)
def critic_five_times(t: Any) -> None:
    """Each sixth step trains the generator, the others the critic. The warning must not advise to freeze it."""
    model = t.model(Gan)
    opt = t.attach(model)
    for step in t.steps(opt, 12):
        x, y = t.batch(step)
        fake = model.generator(x)
        mse_loss(model.critic(fake if step % 6 == 0 else fake.detach()), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()
