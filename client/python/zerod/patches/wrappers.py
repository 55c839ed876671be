# SPDX-License-Identifier: Apache-2.0
"""
DDP, FSDP and DataParallel around a model that zerod owns are refused (E1107), because the wrapper and zerod would both
reduce the gradients.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ..registry import owners_of

_fully_shard = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")


def _ddps_of(ids: set[int]) -> list[DistributedDataParallel]:
    ddps = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return [ddp for ddp in ddps if any(id(param) in ids for param in ddp.parameters())]


def is_inside_ddp(model: nn.Module) -> bool:
    """True if a DDP holds the model, or a part of it. The model has no reference to the DDP, so all objects are
    searched."""
    ids = {id(param) for param in model.parameters()}
    if not _ddps_of(ids):
        return False
    gc.collect()  # the program may have dropped the DDP
    return bool(_ddps_of(ids))


def _refuse(modules: Iterable[nn.Module], wrapper: str) -> None:
    for module in modules:
        for owner in owners_of(module.parameters()):
            owner.refuse(1107, f"the model is wrapped in {wrapper} after zerod.Optimizer(model)")


def _refuse_in(wrapper: type[nn.Module]) -> None:
    init = wrapper.__init__

    @functools.wraps(init)
    def watched(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        _refuse([module], wrapper.__name__)
        init(self, module, *args, **kwargs)

    wrapper.__init__ = watched


@functools.cache
def install() -> None:
    for wrapper in (DistributedDataParallel, FullyShardedDataParallel, nn.DataParallel):
        _refuse_in(wrapper)
    # fully_shard() has no class, and may have been imported by name. It calls _validate_module() before any change.
    validate = getattr(_fully_shard, "_validate_module", None)
    if validate is not None:

        def watched(module: Any, *args: Any) -> None:
            _refuse([module] if isinstance(module, nn.Module) else module, "fully_shard()")
            validate(module, *args)

        _fully_shard._validate_module = watched
