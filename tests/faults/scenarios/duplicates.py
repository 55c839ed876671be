# SPDX-License-Identifier: Apache-2.0
"""More than one gradient for a parameter: E1001, classes D1 and D2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from ..corpus import ALL, ANY, Expect, scenario
from ..models import BLOCKS, EVERYTHING, N_IN, TRUNK, WIDTH, Block, Net, names

ACCUMULATE = {"diagnostics": {"on_duplicate": "accumulate"}}
NOT_REENTRANT = ("use_reentrant=False",)
ONE_SUM = ("(loss_a + loss_b).backward()",)
HERE = "duplicates.py:"


# ---- D1: reentrant checkpoints ------------------------------------------------------------------------------


class TwiceNet(Net):
    """The first block runs twice."""

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        x = self.embed(x)
        for block in (self.h[0], self.h[0], self.h[1]):
            x = checkpoint(block, x, use_reentrant=bool(reentrant))
        return self.head(x)


@scenario(
    Expect(1001, "D1", params=names("h.0.fc"), rank=1, step=1, micro_batch=0, fix=NOT_REENTRANT,
           says=("h.0 call 2", "h.0 call 1", HERE, "accumulate"), exception="DuplicateGradient"),
    pattern="d", stages=(1, 2, 3))
def checkpoint_twice(t: Any) -> None:
    """A block runs twice in one forward, each time in a reentrant checkpoint. On rank 1, in the second step."""
    model = t.model(TwiceNet)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x, reentrant=t.goes_wrong(step)), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1001, "D1", params=names("h.0.fc"), rank=ALL, step=0, micro_batch=0, fix=NOT_REENTRANT,
           says=("h.0 call 2", "h.0 call 1", HERE), exception="DuplicateGradient"),
    pattern="d")
def checkpoint_twice_swallowed(t: Any) -> None:
    """A block runs twice on all ranks, and the trainer catches the exception. The step must raise it again."""
    model = t.model(TwiceNet)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        try:
            mse_loss(model(x, reentrant=t.goes_wrong(step)), y).backward()
        except RuntimeError:
            pass
        opt.step()
        opt.zero_grad()
    opt.close()


class SharedWeightNet(Net):
    """Both blocks share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.h[1].fc.weight = self.h[0].fc.weight


@scenario(
    Expect(1001, "D1", params=("h.0.fc.weight",), rank=ALL, step=0, micro_batch=0, fix=NOT_REENTRANT,
           says=("h.1 call 1", "h.0 call 1"), exception="DuplicateGradient"),
    pattern="d")
def two_segments_tied(t: Any) -> None:
    """Two checkpointed segments share a weight. Each runs once."""
    model = t.model(SharedWeightNet)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x, reentrant=t.goes_wrong(step)), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


class InAndOutNet(Net):
    """The first block runs in a checkpoint, and its weight again outside of it, like a tied output projection."""

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        x = checkpoint(self.h[0], self.embed(x), use_reentrant=bool(reentrant))
        return self.head(self.h[1](nn.functional.linear(x, self.h[0].fc.weight)))


@scenario(
    Expect(1001, "D1", params=("h.0.fc.weight",), rank=ALL, step=0, micro_batch=0, fix=NOT_REENTRANT,
           says=("h.0 call 1",), exception="DuplicateGradient"),
    pattern="e")
def segment_and_outside(t: Any) -> None:
    """A weight is used in a checkpointed segment and outside of it."""
    model = t.model(InAndOutNet)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x, reentrant=t.goes_wrong(step)), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1001, "D1", params=BLOCKS, rank=ALL, step=0, micro_batch=0, fix=NOT_REENTRANT,
           says=("h.1 call 2", "h.1 call 1"), exception="DuplicateGradient"),
    pattern="g, 3c")
def two_forwards_one_backward(t: Any) -> None:
    """Queries, then passages, run through the same checkpointed encoder. There is one loss and one backward."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        reentrant = t.goes_wrong(step)
        queries, y = t.batch(step)
        passages, _ = t.batch(step, 1)
        mse_loss(model(queries, reentrant) * model(passages, reentrant), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(N_IN, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, reentrant: bool) -> Tensor:
        x = self.patch(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x


class VisionLanguage(nn.Module):
    """Slices run through the vision tower in chunks of 16, so the batch decides the number of chunks."""

    chunk = 16

    def __init__(self) -> None:
        super().__init__()
        self.vpm = Vision()
        self.resampler = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, slices: Tensor, reentrant: bool) -> Tensor:
        towers = [self.vpm(part, reentrant) for part in slices.split(self.chunk)]
        return self.head(self.resampler(torch.cat(towers)))


TOWER = names("vpm.layers.0.fc", "vpm.layers.1.fc", "vpm.layers.2.fc")


def train_vision(t: Any, n_slices: int, reentrant: bool) -> None:
    model = t.model(VisionLanguage)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step, n=n_slices if t.rank == 1 and step >= 1 else 10)
        mse_loss(model(x, reentrant), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1001, "D1", params=TOWER, rank=1, step=1, micro_batch=0, fix=NOT_REENTRANT,
           says=("under vpm.layers.*", "vpm.layers.2 call 2", "vpm.layers.2 call 1", HERE, "accumulate"),
           exception="DuplicateGradient"),
    pattern="5a", stages=(1, 2, 3))
def vision_chunks(t: Any) -> None:
    """A batch of 20 slices makes two chunks, so each layer of the tower runs twice under reentrant checkpointing."""
    train_vision(t, 20, t.faulty)


@scenario(
    Expect(1001, "D1", params=TOWER, rank=1, step=1, micro_batch=0, fix=NOT_REENTRANT,
           says=("under vpm.layers.*",), exception="", sticky=False),
    policy=ACCUMULATE, pattern="5b", stages=(1, 2, 3), trains=True, echoes=(1001,))
def vision_chunks_accumulate(t: Any) -> None:
    """Two chunks where every push is an increment. The training is right, with one warning."""
    train_vision(t, 20, t.faulty)


@scenario(pattern="5a")
def vision_one_chunk(t: Any) -> None:
    """16 slices are one chunk: each reentrant segment runs once."""
    train_vision(t, 16, True)


class Tiles(torch.autograd.Function):
    """Computes the head in tiles to save memory. Each tile has its own backward inside the outer one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: nn.Module, _weight: Tensor) -> Tensor:
        ctx.x, ctx.head = x.detach(), head
        with torch.no_grad():
            return head(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        inputs = []
        for x, g in zip(ctx.x.split(2), grad.split(2), strict=True):
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.head(x)
            torch.autograd.backward(out, g)
            inputs.append(x.grad)
        return torch.cat(inputs), None, None


class TiledNet(Net):
    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        return Tiles.apply(self.trunk(x), self.head, self.head.weight)


@scenario(
    Expect(1001, "D1", params=names("head"), rank=ALL, step=0, micro_batch=0, fix=("accumulate",),
           never_says=("use_reentrant",), exception="DuplicateGradient"),
    repaired_policy=ACCUMULATE, pattern="j", tolerates=(1001,))
def tiles_in_a_function(t: Any) -> None:
    """A custom autograd function runs a backward for each tile inside its own backward."""
    model = t.model(TiledNet)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


# ---- D2: extra backwards ------------------------------------------------------------------------------------


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, reentrant: bool | None = None) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.head(x), self.other(x)


@scenario(
    Expect(1001, "D2", params=TRUNK, rank=1, step=1, micro_batch=0, fix=ONE_SUM,
           says=("backward 1", "backward 2", HERE), exception="DuplicateGradient"),
    pattern="h", stages=(1, 2, 3))
def two_losses(t: Any) -> None:
    """Two losses of one forward have a backward each. On rank 1, in the second step."""
    model = t.model(TwoHeads)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        first, second = model(x)
        loss_a, loss_b = mse_loss(first, y), mse_loss(second, 2 * y)
        if t.goes_wrong(step):
            loss_a.backward(retain_graph=True)
            loss_b.backward()
        else:
            (loss_a + loss_b).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1001, "D2", params=TRUNK, rank=1, step=1, micro_batch=0, exception="", sticky=False),
    policy=ACCUMULATE, pattern="h", trains=True, twin=False, echoes=(1001,))
def two_losses_accumulate(t: Any) -> None:
    """Two losses where a later backward counts as a later pass. The training is right."""
    two_losses(t)


@scenario(
    Expect(1001, "D2", params=EVERYTHING, rank=ALL, step=0, micro_batch=0, fix=ONE_SUM, exception="DuplicateGradient"),
    pattern="h")
def two_forwards_two_backwards(t: Any) -> None:
    """Forward, forward, backward, backward: both backwards belong to one micro-batch."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        other, z = t.batch(step, 1)
        loss_a, loss_b = mse_loss(model(x), y), mse_loss(model(other), z)
        if t.faulty:
            loss_a.backward()
            loss_b.backward()
        else:
            (loss_a + loss_b).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1001, "D2", params=EVERYTHING, rank=1, step=2, micro_batch=0, says=("backward 1", "backward 2"),
           exception="DuplicateGradient"),
    pattern="h")
def retain_graph(t: Any) -> None:
    """backward(retain_graph=True), and a second backward."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        loss = mse_loss(model(x), y)
        if t.goes_wrong(step):
            loss.backward(retain_graph=True)
        loss.backward()
        opt.step()
        opt.zero_grad()
    opt.close()


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(N_IN, N_IN)
        self.critic = nn.Sequential(nn.Linear(N_IN, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fake = self.generator(noise)
        return self.critic(real), self.critic(fake.detach()), self.critic(fake)


@scenario(
    Expect(1001, "D2", params=names("critic.0", "critic.2"), rank=ALL, step=0, micro_batch=0, fix=ONE_SUM,
           exception="DuplicateGradient"),
    pattern="h")
def gan(t: Any) -> None:
    """The generator's backward runs through the critic, which has already had its own backward."""
    model = t.model(Gan)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, _ = t.batch(step)
        real, _ = t.batch(step, 1)
        on_real, on_fake, judged = model(x, real)
        loss_a = on_fake.mean() - on_real.mean()
        loss_b = -judged.mean()
        if t.faulty:
            loss_a.backward()
            loss_b.backward()
        else:
            (loss_a + loss_b).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


# ---- accumulation with a configured number ------------------------------------------------------------------

OF_TWO = {"gradient_accumulation_steps": 2}


def accumulate(t: Any, n_wrong: int) -> None:
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        for micro_batch in range(n_wrong if t.goes_wrong(step) else 2):
            x, y = t.batch(step, micro_batch)
            mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(
    Expect(1001, "D2", rank=1, step=1, micro_batch=ANY, fix=("gradient_accumulation_steps: auto",),
           says=("2 micro-batches", "3"), exception="DuplicateGradient"),
    policy=OF_TWO, pattern="i", hooks=False)
def one_micro_batch_too_many(t: Any) -> None:
    """Two micro-batches are configured. Rank 1 does three, because it does not mark a boundary."""
    accumulate(t, 3)


@scenario(
    Expect(1005, rank=1, step=1, micro_batch=ANY, fix=("gradient_accumulation_steps: auto",),
           says=("2 micro-batches", "1"), exception="MissingGradient"),
    policy=OF_TWO, pattern="i", stages=(1, 2, 3))
def one_micro_batch_short(t: Any) -> None:
    """Two micro-batches are configured. Rank 1 asks for the step after one."""
    accumulate(t, 1)


# ---- reactions of a program to a fault ----------------------------------------------------------------------


@scenario(
    Expect(1001, "D2", params=("h.1.fc.bias",), rank=1, step=1, micro_batch=0, fix=ONE_SUM, exception="GradientFault",
           says=("step aborted",), sticky=False),
    policy={"diagnostics": {"on_duplicate": "abort_step"}}, pattern="h", echoes=(1302,), twin=False, hooks=False)
def two_losses_abort(t: Any) -> None:
    """A duplicate aborts the step for all ranks. Each rank is told which rank caused it. The first duplicate counts."""
    two_losses(t)


@scenario(
    Expect(1001, "D2", params=TRUNK, rank=1, step=1, micro_batch=0, fix=ONE_SUM, exception="", sticky=False),
    pattern="h", trains=True, twin=False, echoes=(1302,), hooks=False)
def aborted_and_redone(t: Any) -> None:
    """The guilty rank aborts the step, all ranks begin it again, and the numbers are those of an undisturbed run."""
    model = t.model(TwoHeads)
    opt = t.attach(model)
    spoilt = False
    while opt.position.step < 3:
        x, y = t.batch(opt.position.step)
        try:
            first, second = model(x)
            loss_a, loss_b = mse_loss(first, y), mse_loss(second, 2 * y)
            if t.real and not spoilt and t.goes_wrong(opt.position.step):
                spoilt = True
                loss_a.backward(retain_graph=True)
                loss_b.backward()
            else:
                (loss_a + loss_b).backward()
            opt.step()
        except RuntimeError as error:
            if type(error).__name__ != "StepAborted":
                opt.abort_step("two losses")
        opt.zero_grad()
    opt.close()
