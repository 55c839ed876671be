# SPDX-License-Identifier: Apache-2.0
"""
Patches of accelerate, which the Trainer of transformers uses. Under torchrun accelerate wraps the model in DDP: for a
model that zerod owns the wrap is left out, and everything else about a distributed run stays as it is. Lightning has a
subclass of its strategy for that, see docs/pytorch.md.

accelerate also moves the state of every optimizer to its device and loads it again, which zerod's optimizer does not
need; it counts a step as skipped if step() was not called; and its backward() knows only the loss scale of a
GradScaler.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from typing import Any

import torch
from torch import nn

from ..registry import open_optimizers, owners_of
from ..scaling import scaled


def install() -> None:
    """Called at every attach, because accelerate may have been imported since the last one."""
    _restore_to_numbered_cpu()
    if "accelerate" in sys.modules:
        _patch()
    else:
        _await()


def _patch() -> None:
    _leave_out_ddp()
    _scale_losses()
    _leave_state_alone()


class _Awaited(importlib.abc.MetaPathFinder):
    """Finds accelerate as usual, and patches it when its import is over; transformers imports it late."""

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
                _patch()

            spec.loader.exec_module = exec_module
        return spec


@functools.cache
def _await() -> None:
    sys.meta_path.insert(0, _Awaited())


def refuse_lost_settings(params: Any) -> None:
    """
    Called by zerod.Optimizer(params). A Trainer with optimizer_cls_and_kwargs=(zerod.Optimizer, {"model": model})
    passes the model instead of its groups, and drops the rest of its arguments.
    """
    maker = sys._getframe(2).f_code
    if isinstance(params, nn.Module) and maker.co_name == "create_optimizer" and "transformers" in maker.co_filename:
        raise TypeError(
            'optimizer_cls_and_kwargs=(zerod.Optimizer, {"model": model}): learning rate, weight decay, betas and groups '
            "of the TrainingArguments would be lost; optimizers=(zerod.for_trainer(model, args), None)"
        )


def _is_ours(optimizer: Any) -> bool:
    return any(optimizer is opt for opt in open_optimizers)


@functools.cache
def _leave_state_alone() -> None:
    accelerate = sys.modules["accelerate"]
    prepare_optimizer = accelerate.Accelerator.prepare_optimizer
    skipped = accelerate.optimizer.AcceleratedOptimizer.step_was_skipped.fget

    @functools.wraps(prepare_optimizer)
    def prepare(self: Any, optimizer: Any, device_placement: bool | None = None) -> Any:
        return prepare_optimizer(self, optimizer, False if _is_ours(optimizer) else device_placement)

    def step_was_skipped(self: Any) -> bool:
        """Whether or not the optimizer step was skipped."""
        return self.optimizer.step_was_skipped if _is_ours(self.optimizer) else skipped(self)

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
        # accelerate leaves out only the wrap for a model in evaluation mode.
        owned = bool(owners_of(model.parameters()))
        return prepare_model(self, model, device_placement, evaluation_mode or owned)

    accelerator.prepare_model = prepare


@functools.cache
def _scale_losses() -> None:
    accelerator = sys.modules["accelerate"].Accelerator
    backward = accelerator.backward

    @functools.wraps(backward)
    def watched(self: Any, loss: Any, **kwargs: Any) -> None:
        backward(self, scaled(loss, "accelerator.backward()", self), **kwargs)

    accelerator.backward = watched


@functools.cache
def _restore_to_numbered_cpu() -> None:
    """accelerate's device is "cpu:0" in distributed runs, and torch.load(map_location="cpu:0") of a Trainer fails."""
    torch.serialization.register_package(
        100, lambda _storage: None, lambda storage, where: storage if where.startswith("cpu:") else None
    )
