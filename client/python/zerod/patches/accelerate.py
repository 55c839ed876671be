# SPDX-License-Identifier: Apache-2.0
"""
Programs that would wrap the model in DDP, as they do under torchrun: accelerate, and with it the Trainer of
transformers. For a model that zerod owns the wrap is left out; everything else about a distributed run stays as it is.
Who wraps it in DDP or FSDP himself is refused (E1107).

Lightning has a subclass of its strategy for that, see docs/pytorch.md, and broadcasts weights before it validates.
accelerate also moves the state of every optimizer to its device and loads it again, which zerod's need not, and knows
a skipped step by step() not having been called.
"""

from __future__ import annotations

import functools
import gc
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ..registry import open_optimizers, owners_of

_fully_shard = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")


def install() -> None:
    """At every attach."""
    _refuse_wrappers()
    _broadcast_buffers_only()
    _restore_to_numbered_cpu()
    if "accelerate" in sys.modules:
        _teach_accelerate()
    else:
        _await_accelerate()


def _teach_accelerate() -> None:
    _leave_out_ddp()
    _leave_state_alone()


class _Awaited(importlib.abc.MetaPathFinder):
    """Finds accelerate as ever, and has it taught when its import is over; transformers imports it late."""

    def __init__(self) -> None:
        self._is_asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "accelerate" or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                _teach_accelerate()

            spec.loader.exec_module = exec_module
        return spec


@functools.cache
def _await_accelerate() -> None:
    sys.meta_path.insert(0, _Awaited())


def refuse_lost_settings(params: Any) -> None:
    """
    Called by zerod.Optimizer(params). A Trainer with optimizer_cls_and_kwargs=(zerod.Optimizer, {"model": model}) gives
    the model in the place of its groups, and the rest of its arguments to nobody.
    """
    maker = sys._getframe(2).f_code
    if isinstance(params, nn.Module) and maker.co_name == "create_optimizer" and "transformers" in maker.co_filename:
        raise TypeError(
            'optimizer_cls_and_kwargs=(zerod.Optimizer, {"model": model}): learning rate, weight decay, betas and groups '
            "of the TrainingArguments would be lost; optimizers=(zerod.for_trainer(model, args), None)"
        )


def is_ours(optimizer: Any) -> bool:
    return any(optimizer is opt for opt in open_optimizers)


@functools.cache
def _leave_state_alone() -> None:
    accelerate = sys.modules["accelerate"]
    prepare_optimizer = accelerate.Accelerator.prepare_optimizer
    skipped = accelerate.optimizer.AcceleratedOptimizer.step_was_skipped.fget

    @functools.wraps(prepare_optimizer)
    def prepare(self: Any, optimizer: Any, device_placement: bool | None = None) -> Any:
        return prepare_optimizer(self, optimizer, False if is_ours(optimizer) else device_placement)

    def step_was_skipped(self: Any) -> bool:
        """Whether or not the optimizer step was skipped."""
        return self.optimizer.step_was_skipped if is_ours(self.optimizer) else skipped(self)

    accelerate.Accelerator.prepare_optimizer = prepare
    accelerate.optimizer.AcceleratedOptimizer.step_was_skipped = property(step_was_skipped)


@functools.cache
def _leave_out_ddp() -> None:
    accelerator = sys.modules["accelerate"].Accelerator
    prepare_model = accelerator.prepare_model

    @functools.wraps(prepare_model)
    def prepare(
        self: Any, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
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


@functools.cache
def _broadcast_buffers_only() -> None:
    """Published weights are the same everywhere, and cannot be written to."""
    sync = torch.distributed.utils._sync_module_states

    @functools.wraps(sync)
    def watched(
        module: nn.Module,
        process_group: Any,
        broadcast_bucket_size: int,
        src: int,
        params_and_buffers_to_ignore: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        ids = frozenset().union(*(opt.param_ids for opt in open_optimizers))
        ours = {name for name, param in module.named_parameters() if id(param) in ids}
        ignored = ours.union(params_and_buffers_to_ignore)
        return sync(module, process_group, broadcast_bucket_size, src, ignored, *args, **kwargs)

    torch.distributed.utils._sync_module_states = watched


def _ddps_of(ids: set[int]) -> list[DistributedDataParallel]:
    ddps = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return [ddp for ddp in ddps if any(id(param) in ids for param in ddp.parameters())]


def is_inside_ddp(model: nn.Module) -> bool:
    """Does a DDP hold the model, or a part of it? Nothing in a model tells, and both would reduce its gradients."""
    ids = {id(param) for param in model.parameters()}
    if not _ddps_of(ids):
        return False
    gc.collect()  # it may be one that was given up
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
