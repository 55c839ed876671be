# SPDX-License-Identifier: Apache-2.0
"""Which open optimizer a parameter belongs to. A process has few of them: GAN trainers two, most one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .optimizer import Optimizer

open_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
when_attached: list[Callable[[Optimizer], None]] = []  # called with each optimizer when it has been made


def owners_of(params: Iterable[torch.Tensor]) -> list[Optimizer]:
    """The open optimizers that some of these parameters belong to."""
    ids = {id(p) for p in params} if open_optimizers else set()
    return [opt for opt in open_optimizers if not ids.isdisjoint(opt.param_ids)]


def with_gradients(params: Iterable[torch.Tensor]) -> list[Optimizer]:
    """Those of them that have pushed gradients for a step that was not taken yet."""
    return owners_of(params) if any(opt.has_gradients for opt in open_optimizers) else []
