# SPDX-License-Identifier: Apache-2.0
"""
Programs that would wrap the model in DDP, as they do under torchrun: accelerate, and with it the Trainer of
transformers. For a model that zerod owns the wrap is left out; everything else about a distributed run stays as it is.
Who wraps it in DDP or FSDP himself is refused (E1107).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from .registry import owners_of

_fully_shard = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")


def install() -> None:
    """At every attach: accelerate may have been imported since the last one."""
    _refuse_wrappers()
    _restore_to_numbered_cpu()
    if "accelerate" in sys.modules:
        _leave_out_ddp()


@functools.cache
def _leave_out_ddp() -> None:
    accelerator = sys.modules["accelerate"].Accelerator
    prepare_model = accelerator.prepare_model

    @functools.wraps(prepare_model)
    def prepare(self: Any, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        # Of a model in evaluation mode accelerate does the same but for the wrap.
        owned = bool(owners_of(model.parameters()))
        return prepare_model(self, model, device_placement, evaluation_mode or owned)

    accelerator.prepare_model = prepare


@functools.cache
def _restore_to_numbered_cpu() -> None:
    """accelerate's device is "cpu:0" in distributed runs, and torch.load(map_location="cpu:0") of a Trainer fails."""
    torch.serialization.register_package(
        100, lambda _storage: None, lambda storage, where: storage if where.startswith("cpu:") else None
    )


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
def _refuse_wrappers() -> None:
    for wrapper in (DistributedDataParallel, FullyShardedDataParallel, nn.DataParallel):
        _refuse_in(wrapper)
    # fully_shard() has no class, and may have been imported by name; this is what it calls before it changes anything.
    validate = getattr(_fully_shard, "_validate_module", None)
    if validate is not None:

        def watched(module: Any, *args: Any) -> None:
            _refuse([module] if isinstance(module, nn.Module) else module, "fully_shard()")
            validate(module, *args)

        _fully_shard._validate_module = watched
