# SPDX-License-Identifier: Apache-2.0
"""Models that DDP reduces. zerod only watches them, and explains DDP's errors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ..corpus import ALL, ANY, Expect, scenario
from ..models import TRUNK, Net, names
from .guards import Adapted
from .missing import OUT_OF_MEMORY, poison


def observe(t: Any, make: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Return: the wrapped, watched model, the model inside, a torch optimizer. The reference wraps nothing."""
    model = t.model(make)
    if not t.real:
        return model, model, t.attach(model)
    import zerod

    store = dist.FileStore(str(t.folder / f"store-{t.faulty}"), t.world)
    dist.init_process_group("gloo", store=store, rank=t.rank, world_size=t.world)
    wrapped = DistributedDataParallel(model, **options)
    zerod.observe(wrapped)
    t.opt = None
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, betas=(0.9, 0.95),
                            weight_decay=0.01)
    return wrapped, model, opt


@scenario(
    Expect(1001, "D4", params=("h.1.lora_b.weight",), rank=ALL, step=0, micro_batch=ANY,
           says=("exactly 1 gradient", "find_unused_parameters"), fix=("use_reentrant",), sticky=False),
    pattern="p, 3a", world=1, hooks=False)
def ddp_finds_phantoms(t: Any) -> None:
    """LoRA, reentrant checkpoints and find_unused_parameters=True, with one process. No gradient is computed twice."""
    model, _, opt = observe(t, Adapted, find_unused_parameters=True)
    for step in range(3):
        x, y = t.batch(step)
        mse_loss(model(x, reentrant=t.faulty), y).backward()
        opt.step()
        opt.zero_grad()


class Spare(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Linear(2, 2)


@scenario(
    Expect(1005, "M1", params=names("spare"), rank=ALL, step=0, micro_batch=ANY, says=("spare",), sticky=False),
    pattern="2", hooks=False)
def ddp_waits_for_unused(t: Any) -> None:
    """The loss does not use a head, and find_unused_parameters is not set."""

    def make() -> Net:
        net = Spare()
        net.spare.requires_grad_(t.faulty)
        return net

    model, _, opt = observe(t, make)
    for step in range(3):
        x, y = t.batch(step)
        mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()


@scenario(
    Expect(1005, "M4", params=TRUNK, rank=ALL, step=1, micro_batch=ANY, says=(OUT_OF_MEMORY, "observed.py:"),
           sticky=False),
    pattern="1c", world=1)
def ddp_after_a_swallowed_exception(t: Any) -> None:
    """An exception in a backward was caught. DDP's error comes in the next forward, and names parameters."""
    model, bare, opt = observe(t, Net)
    for step in range(3):
        x, y = t.batch(step)
        handle = bare.head.register_forward_pre_hook(poison) if t.faulty and step == 1 else None
        try:
            mse_loss(model(x), y).backward()
        except RuntimeError as error:
            if OUT_OF_MEMORY not in str(error) or type(error).__name__ != "RuntimeError":
                raise
            handle.remove()
            opt.zero_grad()
            continue
        opt.step()
        opt.zero_grad()


@scenario(
    Expect(1105, "X1", rank=ALL, step=0, micro_batch=ANY, says=("model(**inputs)",), sticky=False),
    pattern="X1", hooks=False)
def ddp_bypassed(t: Any) -> None:
    """The loss is computed on the model inside the wrapper, so no gradient is averaged."""
    model, bare, opt = observe(t, Net)
    for step in range(3):
        x, y = t.batch(step)
        mse_loss((bare if t.faulty else model)(x), y).backward()
        opt.step()
        opt.zero_grad()
