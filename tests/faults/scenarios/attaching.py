# SPDX-License-Identifier: Apache-2.0
"""Mistakes before the first step: E1101, E1107, E1301, E1401, and impossible arguments."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ..corpus import ALL, Expect, Refused, scenario
from ..models import WIDTH, Net


def train(t: Any, make: Any, attach: Any = None) -> None:
    model = t.model(make)
    opt = attach(model) if attach else t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


# ---- E1101: the manifest ------------------------------------------------------------------------------------


def mismatch(*says: str) -> Expect:
    return Expect(1101, says=(*says, "not formed"), exception="ManifestMismatch", sticky=False)


@scenario(mismatch("head.weight", "bf16", "fp32"), pattern="E1101")
def other_dtype_on_one_rank(t: Any) -> None:
    """The head is in bf16 on rank 1."""

    def make() -> Net:
        net = Net()
        if t.faulty and t.rank == 1:
            net.head.to(torch.bfloat16)
        return net

    train(t, make)


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2)


@scenario(mismatch("head.weight [1, 8]", "head.weight [2, 8]", "rank 2"), world=3, pattern="E1101")
def other_shape_on_one_rank(t: Any) -> None:
    """On rank 2 of three ranks the head has two outputs. Only rank 2 is reported as different."""
    train(t, Wide if t.faulty and t.rank == 2 else Net)


class Reordered(Net):
    def __init__(self) -> None:
        super().__init__()
        first = self.embed
        del self.embed
        self.embed = first


@scenario(mismatch("different orders", "embed.weight"), pattern="E1101")
def other_order_on_one_rank(t: Any) -> None:
    """On rank 1 the modules are made in another order."""
    train(t, Reordered if t.faulty and t.rank == 1 else Net)


@scenario(mismatch("group 0", "group 1", "h.1.fc.bias"), pattern="E1101")
def other_groups_on_one_rank(t: Any) -> None:
    """Biases have their own group. On rank 1 one bias is in the other group."""

    def attach(model: Net) -> Any:
        def is_bias(name: str) -> bool:
            return name.endswith("bias") and not (t.faulty and t.rank == 1 and name == "h.1.fc.bias")

        named = list(model.named_parameters())
        groups = [{"params": [p for n, p in named if not is_bias(n)]}, {"params": [p for n, p in named if is_bias(n)]}]
        return t.attach(groups, model=model)

    train(t, Net, attach)


@scenario(mismatch("h.0.fc.weight", "frozen"), pattern="E1101")
def frozen_on_one_rank(t: Any) -> None:
    """A block is frozen on rank 1 only."""

    def make() -> Net:
        net = Net()
        if t.faulty and t.rank == 1:
            net.h[0].requires_grad_(False)
        return net

    train(t, make)


# ---- E1107: a wrapper that reduces --------------------------------------------------------------------------


def alone() -> None:
    """Makes a process group of one process, for a wrapper that needs one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@scenario(
    Expect(1107, rank=ALL, says=("DistributedDataParallel",),
           fix=("zerod.Optimizer(model)", "zerod.observe(ddp_model)"), exception="ReducedTwice", sticky=False),
    pattern="E1107")
def wrapped_in_ddp(t: Any) -> None:
    """The model is already wrapped in DDP, which averages gradients."""

    def make() -> nn.Module:
        if not t.faulty:
            return Net()
        alone()
        return DistributedDataParallel(Net())

    train(t, make)


@scenario(
    Expect(1107, rank=ALL, says=("FSDP",), fix=("zerod.Optimizer(model)",), exception="ReducedTwice", sticky=False),
    pattern="E1107")
def wrapped_in_fsdp(t: Any) -> None:
    """The model is already wrapped in FSDP, which shards it."""

    def make() -> nn.Module:
        net = Net()
        if t.faulty:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            alone()
            fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
        return net

    train(t, make)


# ---- two owners ---------------------------------------------------------------------------------------------


@scenario(Refused(("Error", "ValueError"), says=("embed.weight",)), pattern="k")
def attached_twice(t: Any) -> None:
    """A second optimizer gets parameters that already have one."""

    def attach(model: Net) -> Any:
        opt = t.attach(model)
        if t.faulty:
            t.attach(model)
        return opt

    train(t, Net, attach)


@scenario(Refused(("Error", "ValueError"), says=("formed",)), pattern="late parameters")
def group_added_later(t: Any) -> None:
    """A parameter group is added after the job was formed."""

    def attach(model: Net) -> Any:
        opt = t.attach(model)
        if t.faulty:
            model.extra = nn.Linear(WIDTH, 1)
            opt.add_param_group({"params": list(model.extra.parameters())})
        return opt

    train(t, Net, attach)


# ---- arguments ----------------------------------------------------------------------------------------------


@scenario(Refused(("ValueError",), says=("leaf",)), pattern="non-leaf")
def non_leaf(t: Any) -> None:
    """A tensor that autograd computed is passed as a parameter."""
    train(t, Net, lambda model: t.attach([model.head.weight * 1] if t.faulty else model, model=model))


@scenario(Refused(("ValueError",), says=("empty",)), pattern="empty list")
def empty_list(t: Any) -> None:
    """An optimizer gets an empty list of parameters."""
    train(t, Net, lambda model: t.attach([] if t.faulty else model, model=model))


@scenario(Refused(("Error", "ValueError"), says=("RANK", "0 to 1")), pattern="wrong rank", world=2)
def rank_beyond_the_world(t: Any) -> None:
    """A rank is beyond the world size."""

    def attach(model: Net) -> Any:
        return t.attach(model, rank=t.rank + 2) if t.faulty else t.attach(model)

    train(t, Net, attach)


@scenario(Refused(("Error",), says=("nobody.sock",)), pattern="no daemon")
def nobody_listens(t: Any) -> None:
    """The socket has no daemon."""

    def attach(model: Net) -> Any:
        return t.attach(model, socket=os.path.join("/nonexistent", "nobody.sock")) if t.faulty else t.attach(model)

    train(t, Net, attach)


@scenario(Refused(("ImportError",), says=("2.6", "2.5.1", "pip install")), pattern="torch's version")
def old_torch(t: Any) -> None:
    """A torch that is too old is refused when zerod is imported."""

    def attach(model: Net) -> Any:
        if t.faulty:
            torch.__version__ = "2.5.1+cpu"
            for name in [name for name in sys.modules if name.split(".")[0] == "zerod"]:
                del sys.modules[name]
        return t.attach(model)

    train(t, Net, attach)


@scenario(
    Expect(1401, says=("limits.memory", "1048576"), fix=("limits.memory",), exception="OverQuota", sticky=False),
    policy={"limits": {"memory": "1MiB"}}, repaired_policy={"limits": {"memory": "1GiB"}}, pattern="E1401")
def too_large_for_its_limit(t: Any) -> None:
    """The model needs more memory than the daemon's limit."""
    train(t, lambda: Net(n_blocks=2))
