# SPDX-License-Identifier: Apache-2.0
"""
Parameters that join the model after the job was formed. The job does not train them, and many are not meant to be
trained: a reference adapter, a moving average, weights that were folded after training. So such a parameter is refused
only if it has a gradient after a backward, or when the step is requested.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from . import compiled
from .binding import Bound
from .errors import WrongGradient
from .own import Own

_open: weakref.WeakSet[Late] = weakref.WeakSet()


class Late:
    """
    The late parameters of one model, and the frozen parameters in the program's own memory, which may be thawed.
    report: reports a fault of parameters, by index, and raises it.
    """

    def __init__(
        self, model: nn.Module, bound: Sequence[Bound], own: Sequence[Own], report: Callable[[int, list[int], str], None]
    ) -> None:
        self._model, self._report = model, report
        self._own = {id(o.param) for o in own}
        self._index = {b.name: b.index for b in bound}
        self._ids = {id(b.param) for b in bound}
        self._modules = weakref.WeakSet(model.modules())
        self._stale = False  # the model has changed since _params was made
        self._params: list[tuple[str, nn.Parameter]] = [(o.name, o.param) for o in own]
        _watch_registrations()
        _open.add(self)

    def close(self) -> None:
        _open.discard(self)

    def changed(self, where: nn.Module, new: nn.Module | None) -> None:
        """Called when a parameter, or the module `new`, is added to `where`, which may belong to this model."""
        if where in self._modules:
            self._stale = True
            self._modules.update(new.modules() if new is not None else ())

    def check(self) -> None:
        if self._stale:
            self._params = [(compiled.plain(n), p) for n, p in self._model.named_parameters() if id(p) not in self._ids]
            self._stale = False
        for name, param in self._params:
            if param.grad is not None:
                self._refuse(name, param)

    def _refuse(self, name: str, param: nn.Parameter) -> None:
        if id(param) in self._own:
            raise _untrained(name, "it was frozen or in no group when zerod.Optimizer(model) was made: zerod has no place for it")
        if name in self._index:
            what = f"another parameter has taken the place of {name}, and has a gradient"
            self._report(1104, [self._index[name]], what)
        raise _untrained(name, "it came after zerod.Optimizer(model): a job's parameters are fixed when it is formed")


def _untrained(name: str, cause: str) -> WrongGradient:
    """E1103 of a parameter that the daemon does not know."""
    fields = [
        ("cause", cause),
        ("fix", "add or thaw it before zerod.Optimizer(model); in mid-run: opt.close(), then zerod.Optimizer(model) again"),
        ("or", "param.requires_grad_(False)   (if it is not to be trained)"),
        ("state", "its gradient stays in .grad, and no step uses it"),
    ]
    lines = [f"  {label:<14} {text}" for label, text in [("parameter", name), *fields]]
    text = "\n".join(["E1103 gradient of a parameter that nobody trains", *lines])
    return WrongGradient(text, code=1103, params=[name], n_params=1, fields=fields)


@functools.cache
def _watch_registrations() -> None:
    def parameter(module: nn.Module, _name: str, _param: Any) -> None:
        for late in list(_open):
            late.changed(module, None)

    def child(module: nn.Module, _name: str, new: nn.Module | None) -> None:
        for late in list(_open):
            late.changed(module, new)

    register_module_parameter_registration_hook(parameter)
    register_module_module_registration_hook(child)
