# SPDX-License-Identifier: Apache-2.0
"""Which open optimizer a parameter belongs to. A process has few of them: GAN trainers two, most one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .optimizer import Optimizer

open_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _do_nothing(*_: Any) -> None:
    """What a copy of a model has in the place of an Attached."""


def _copied() -> Callable[..., None]:
    return _do_nothing


class Attached:
    """A hook of a module of the model. Copies and pickles of the module are independent of zerod: theirs does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __deepcopy__(self, _memo: Any) -> Any:
        return _do_nothing

    def __reduce__(self) -> Any:
        return _copied, ()


def owners_of(params: Iterable[torch.Tensor]) -> list[Optimizer]:
    """The open optimizers that some of these parameters belong to."""
    ids = {id(p) for p in params} if open_optimizers else set()
    return [opt for opt in open_optimizers if not ids.isdisjoint(opt.param_ids)]


def with_gradients(params: Iterable[torch.Tensor]) -> list[Optimizer]:
    """Those of them that have pushed gradients for a step that was not taken yet."""
    return owners_of(params) if any(opt.has_gradients for opt in open_optimizers) else []
