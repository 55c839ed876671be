# SPDX-License-Identifier: Apache-2.0
"""Correct programs, for which zerod must report nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from ..corpus import scenario
from ..models import N_IN, WIDTH, Net
from .duplicates import SharedWeightNet

ALL_STAGES = (1, 2, 3)


def train(t: Any, make: Any, loss_of: Any = None, n_micro_batches: int = 1, zero: Any = None) -> None:
    model = t.model(make)
    opt = t.attach(model)
    for step in t.steps(opt):
        for micro_batch in range(n_micro_batches):
            x, y = t.batch(step, micro_batch)
            loss = loss_of(model, x, y) if loss_of else mse_loss(model(x), y)
            (loss / n_micro_batches).backward()
        opt.step()
        zero(model, opt) if zero else opt.zero_grad()
    opt.close()


@scenario(pattern="a", stages=ALL_STAGES)
def plain(t: Any) -> None:
    """A plain training."""
    train(t, Net)


@scenario(pattern="a", world=4)
def four_ranks(t: Any) -> None:
    """A plain training on four ranks."""
    train(t, Net)


@scenario(pattern="b", stages=ALL_STAGES)
def tied_weights(t: Any) -> None:
    """Two blocks share one weight, which has one gradient."""
    train(t, SharedWeightNet)


@scenario(pattern="b")
def tied_weights_not_reentrant(t: Any) -> None:
    """Two blocks share one weight under non-reentrant checkpoints."""
    train(t, SharedWeightNet, lambda model, x, y: mse_loss(model(x, False), y))


@scenario(pattern="c, 3b", stages=ALL_STAGES)
def reentrant_once(t: Any) -> None:
    """Each block runs once, in one reentrant checkpoint."""
    train(t, Net, lambda model, x, y: mse_loss(model(x, True), y))


class Adapted(Net):
    """A frozen base with trainable adapters, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.h:
            block.lora_a = nn.Linear(WIDTH, 2, bias=False)
            block.lora_b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        x = self.embed(x).requires_grad_()  # like enable_input_require_grads
        for block in self.h:
            x = checkpoint(self.adapted, block, x, use_reentrant=bool(reentrant))
        return self.head(x)

    @staticmethod
    def adapted(block: nn.Module, x: Tensor) -> Tensor:
        return block(x) + block.lora_b(block.lora_a(x))


@scenario(pattern="p, 3b", stages=ALL_STAGES)
def adapters_reentrant(t: Any) -> None:
    """LoRA under reentrant checkpoints. DDP reports unused parameters, but zerod must not."""
    train(t, Adapted, lambda model, x, y: mse_loss(model(x, True), y))


@scenario(pattern="f", stages=ALL_STAGES)
def called_twice(t: Any) -> None:
    """Two forwards, one backward, no checkpoint."""
    train(t, Net, lambda model, x, y: mse_loss(model(x) * model(2 * x), y))


@scenario(pattern="f", stages=ALL_STAGES)
def called_twice_not_reentrant(t: Any) -> None:
    """Two forwards, one backward, non-reentrant checkpoints."""
    train(t, Net, lambda model, x, y: mse_loss(model(x, False) * model(2 * x, False), y))


@scenario(pattern="i", stages=ALL_STAGES)
def accumulation(t: Any) -> None:
    """A step has four micro-batches, and their number is not configured."""
    train(t, Net, n_micro_batches=4)


@scenario(policy={"gradient_accumulation_steps": 4}, pattern="i")
def accumulation_as_configured(t: Any) -> None:
    """A step has four micro-batches, as configured."""
    train(t, Net, n_micro_batches=4)


@scenario(pattern="i")
def accumulation_reentrant(t: Any) -> None:
    """Each micro-batch runs its reentrant segments once."""
    train(t, Net, lambda model, x, y: mse_loss(model(x, True), y), n_micro_batches=2)


def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    model.train()
    return mse_loss(model(x), y)


@scenario(pattern="evaluation", stages=ALL_STAGES)
def evaluation_between(t: Any) -> None:
    """Forwards without a backward run before every forward with one, also between micro-batches."""
    train(t, Net, evaluate, n_micro_batches=2)


def forward_for_its_value(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    float(mse_loss(model(2 * x), y))
    return mse_loss(model(x), y)


@scenario(pattern="evaluation")
def forward_in_vain(t: Any) -> None:
    """The loss of a forward with gradients enabled is only printed."""
    train(t, Net, forward_for_its_value)


@scenario(pattern="zero_grad")
def zero_grad_before_backward(t: Any) -> None:
    """opt.zero_grad() at the beginning of each step."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        loss = mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    opt.close()


@scenario(pattern="zero_grad")
def zero_grad_of_the_model(t: Any) -> None:
    """model.zero_grad() after each step."""
    train(t, Net, zero=lambda model, opt: model.zero_grad())


@scenario(pattern="zero_grad")
def zero_grad_to_zero(t: Any) -> None:
    """zero_grad(set_to_none=False) after each step."""
    train(t, Net, zero=lambda model, opt: opt.zero_grad(set_to_none=False))


@scenario(pattern="zero_grad")
def grad_set_to_none_by_hand(t: Any) -> None:
    """The program's loop sets p.grad = None."""

    def clear(model: nn.Module, _opt: Any) -> None:
        for p in model.parameters():
            p.grad = None

    train(t, Net, zero=clear)


@scenario(pattern="GradScaler")
def scaler_skips(t: Any) -> None:
    """The loss scale overflows at first. The scaler skips steps until it is small enough."""
    model = t.model(Net)
    opt = t.attach(model)
    scaler = t.scaler(init_scale=2.0**127, growth_interval=1000, backoff_factor=2.0**-64)
    for step in t.steps(opt, 4):
        x, y = t.batch(step)
        scaler.scale(1e6 * mse_loss(model(x), y)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert scaler.get_scale() < 2.0**127, "no step was skipped"
    opt.close()


@scenario(pattern="clip", stages=ALL_STAGES)
def clipping_by_torch(t: Any) -> None:
    """torch.nn.utils.clip_grad_norm_ clips the gradient of the step, which is in the daemon."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x), y).backward()
        t.clip(model, 0.01)
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(policy={"gradient_clipping": 0.01}, pattern="clip")
def clipping_as_configured(t: Any) -> None:
    """The daemon clips, as configured."""
    train(t, Net)


@scenario(pattern="scheduler")
def learning_rate_schedule(t: Any) -> None:
    """All ranks have the same learning rate schedule."""
    model = t.model(Net)
    opt = t.attach(model)
    schedule = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x), y).backward()
        opt.step()
        schedule.step()
        opt.zero_grad()
    opt.close()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(N_IN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


@scenario(pattern="j")
def gradient_cache(t: Any) -> None:
    """A contrastive loss over many chunks: first all representations, then a forward and a backward for each chunk."""
    model = t.model(Encoder)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, _ = t.batch(step, n=8)
        chunks = x.split(2)
        with torch.no_grad():
            kept = [model(c) for c in chunks]
        leaves = [k.requires_grad_() for k in kept]
        whole = torch.cat(leaves)
        torch.log_softmax(whole @ whole.T, 1).diagonal().mean().neg().backward()
        for chunk, leaf in zip(chunks, leaves, strict=True):
            (model(chunk) * leaf.grad).sum().backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(policy={"diagnostics": {"on_duplicate": "accumulate"}}, pattern="j", tolerates=(1001,))
def loss_in_chunks(t: Any) -> None:
    """The head's loss runs in chunks with a backward each, then the trunk's backward. Right if pushes accumulate."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        hidden = model.trunk(x)
        leaf = hidden.detach().requires_grad_()
        for part, target in zip(leaf.split(2), y.split(2), strict=True):
            (mse_loss(model.head(part), target) / 2).backward()
        hidden.backward(leaf.grad)
        opt.step()
        opt.zero_grad()
    opt.close()
