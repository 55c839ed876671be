# SPDX-License-Identifier: Apache-2.0
"""
The open optimizers of this process, and the optimizer of a parameter. Most programs have one, GAN trainers two.

OpenOptimizer is the part of zerod.Optimizer that the modules below optimizer.py use, because they must not import it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from .binding import Bound
from .client import Client
from .own import Own


class OpenOptimizer(Protocol):
    model: nn.Module
    param_ids: frozenset[int]
    param_groups: list[dict[str, Any]]
    state: Any
    sharding: Any  # Sharding of stage3.py, or None
    _client: Client
    _bound: list[Bound]
    _own: list[Own]
    _unread: Any
    scaling: Any  # LossScale of scaling.py
    _edits: Any
    _optimizer_load_state_dict_pre_hooks: dict[int, Callable[..., Any]]
    _optimizer_load_state_dict_post_hooks: dict[int, Callable[..., Any]]

    @property
    def optimizer_type(self) -> str: ...

    @property
    def device(self) -> torch.device | None: ...

    @property
    def n_trainable(self) -> int: ...

    @property
    def has_gradients(self) -> bool: ...

    @property
    def known_step(self) -> int: ...

    @property
    def goes_on_without(self) -> bool: ...

    @property
    def is_writable(self) -> bool: ...

    def close(self) -> None: ...

    def open_window(self) -> None: ...

    def close_window(self, forget: bool = False) -> None: ...

    def window(self) -> AbstractContextManager[None]: ...

    def gathered(self, params: Iterable[torch.Tensor]) -> AbstractContextManager[None]: ...

    def sync_buffers(self) -> None: ...

    def wait(self, params: Iterable[torch.Tensor] | None = None) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def note_zero_grad(self, params: Iterable[torch.Tensor], set_to_none: bool) -> None: ...

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor: ...

    def refuse(self, code: int, what: str, params: Iterable[torch.Tensor] = ()) -> None: ...


open_optimizers: weakref.WeakSet[OpenOptimizer] = weakref.WeakSet()
when_attached: list[Callable[[Any], None]] = []  # called with each optimizer when it has been made


def owners_of(params: Iterable[torch.Tensor]) -> list[OpenOptimizer]:
    """The open optimizers that some of these parameters belong to."""
    ids = {id(p) for p in params} if open_optimizers else set()
    return [opt for opt in open_optimizers if not ids.isdisjoint(opt.param_ids)]


def with_gradients(params: Iterable[torch.Tensor]) -> list[OpenOptimizer]:
    """As owners_of(), but [] if no optimizer has pushed gradients for an open step."""
    return owners_of(params) if any(opt.has_gradients for opt in open_optimizers) else []
