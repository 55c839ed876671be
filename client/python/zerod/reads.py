# SPDX-License-Identifier: Apache-2.0
"""
Programs that change gradients between backward() and step(): `if p.grad is not None: p.grad.clamp_(...)`. The gradient
has been pushed by then and .grad is None, so such a loop silently does nothing. This module notices the read.

torch has no hook for reads, so while an optimizer watches, nn.Parameter has a Python property .grad that hides torch's
own property, which is in C. Only a read that finds None is examined further. Reads by torch, by this package and by
other installed packages do not count, nor do reads before a backward and after the step. read_notes.py explains an
exception that follows from a read.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from . import read_notes, sites
from .binding import Bound
from .errors import Error, ZerodWarning

grad_in_c = torch._C.TensorBase.__dict__["grad"]
get_grad: Callable[[torch.Tensor], torch.Tensor | None] = grad_in_c.__get__
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = grad_in_c.__set__

HOW = ("warn", "error", "ignore")
_CALLER = 3  # frames from _found_none() to the caller of the property


@dataclasses.dataclass(eq=False)
class _Watch:
    """was_pushed: tells whether the parameter of an index was pushed for the open step. Keeps no optimizer alive."""

    was_pushed: weakref.WeakMethod[Callable[[int], bool]]
    names: dict[int, tuple[int, str]]  # index and name, by id() of the parameter
    is_error: bool


_watches: list[_Watch] = []


def check_how(how: str) -> str:
    if how not in HOW:
        raise ValueError(f"on_grad_read is {how!r}; it may be 'warn', 'error' or 'ignore'")
    return how


def watch(was_pushed: Callable[[int], bool], bound: Sequence[Bound], how: str) -> Callable[[], None]:
    """Begins to watch. Returns a function that ends the watch."""
    names = {id(b.param): (b.index, b.name) for b in bound if b.trainable}
    one = _Watch(weakref.WeakMethod(was_pushed), names, how == "error")
    if how != "ignore":
        _watches.append(one)
        nn.Parameter.grad = _watched
        read_notes.install()
    return lambda: _end(one)


def _end(one: _Watch) -> None:
    if one in _watches:
        _watches.remove(one)
    if not _watches and "grad" in nn.Parameter.__dict__:
        del nn.Parameter.grad  # torch's own property in C is used again


def _get(param: torch.Tensor) -> torch.Tensor | None:
    grad = get_grad(param)
    if grad is None and _watches:
        _found_none(param)
    return grad


def _found_none(param: torch.Tensor) -> None:
    for one in list(_watches):
        index, name = one.names.get(id(param), (-1, ""))
        was_pushed = one.was_pushed()
        if was_pushed is None:  # the optimizer is gone
            _end(one)
        elif index >= 0 and was_pushed(index) and sites.is_users(sys._getframe(_CALLER - 1)):
            read_notes.note(sys._getframe(_CALLER - 1), name)
            _tell(one, name, sys._getframe(_CALLER - 1))


def _tell(one: _Watch, name: str, frame: Any) -> None:
    text = (
        f"to log a norm, opt.grad_norm() before the step or opt.grad_norm({name!r}) after it; to change gradients, "
        "param.register_hook(lambda grad: grad.clamp(-1, 1)) before the backward, or torch.nn.utils.clip_grad_norm_; no "
        "all_reduce, since the daemon takes the mean over the ranks; if nothing depends on the read, on_grad_read='ignore'. "
        f"{sites.site_of(frame)} reads .grad of {name} between backward() and step() and finds None: zerod has pushed the "
        "gradient already, so a change of it has no effect"
    )
    if one.is_error:
        raise Error(text)
    _end(one)  # once is enough
    warnings.warn(text, ZerodWarning, stacklevel=_CALLER + 1)


_watched = property(_get, lambda p, grad: set_grad(p, grad), lambda p: grad_in_c.__delete__(p), grad_in_c.__doc__)
