# SPDX-License-Identifier: Apache-2.0
"""
Optimizer(..., overlap_update=True): step() returns when the step is decided, and the daemon writes the weights while
the next forward runs. A hook before each module's forward waits for the module's own parameters, and for those of inner
modules that have no forward, such as nn.ParameterList. A read of module.weight waits as well, whichever code reads it.

Code that reads weights in another way, such as model.parameters(), calls zerod.wait() first. Calls of the optimizer and
the next backward wait by themselves (zerod_wait() in zerod/client.h).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from ctypes import c_uint
from typing import Any

import torch
from torch import nn

from . import borrowed
from .binding import Bound
from .client import Client
from .registry import open_optimizers, owners_of
from .uncopied import BreakingHook, Hook


class WholeStep:
    """For optimizers without overlap_update, on GPUs, or with gathered weights: step() returns when all weights are
    written."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def stepped(self) -> None:
        """Called when the step is decided."""
        self._client.wait(None, 0)

    def wait(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Waits until these parameters have the weights of the last step; None: all."""

    def close(self) -> None:
        """Removes the hooks."""


class Overlap(WholeStep):
    """Each module waits for its own weights."""

    def __init__(self, client: Client, model: nn.Module, bound: Sequence[Bound]) -> None:
        super().__init__(client)
        self._index = {b.param: b.index for b in bound if b.trainable}
        self._ids = {}
        for module in model.modules():
            index = sorted({self._index[p] for p in _read_by(module) if p in self._index})
            if index:
                self._ids[module] = (c_uint * len(index))(*index), len(index)
        self._left: dict[nn.Module, Any] = {}  # modules that have not waited since the last step
        before = BreakingHook(self._before)
        # Runs before hooks that compute a weight from others, such as that of torch.nn.utils.weight_norm.
        self._handles: list[Any] = [m.register_forward_pre_hook(before, prepend=True) for m in self._ids]
        self._handles += [m.register_state_dict_pre_hook(Hook(self._before_state_dict)) for m in model.modules()]
        self._watched = [m for m in self._ids if m._parameters and not isinstance(m, torch.jit.ScriptModule)]
        for module in self._watched:
            borrowed.watch(module, functools.partial(self._read, module))

    def stepped(self) -> None:
        self._left = dict(self._ids)

    def wait(self, params: Iterable[torch.Tensor] | None = None) -> None:
        if not self._left:
            return
        if params is None:
            self._left = {}
            self._client.wait(None, 0)
        else:
            index = [self._index[p] for p in params if p in self._index]
            self._client.wait((c_uint * len(index))(*index), len(index))

    def _before(self, module: nn.Module, _args: Any) -> None:
        if not self._left:
            return
        if not module.training:  # torch's fast paths then read the weights of submodules
            self.wait()
            return
        self._wait_for(module)

    def _read(self, module: nn.Module, _param: torch.Tensor) -> None:
        if self._left:
            self._wait_for(module)

    def _wait_for(self, module: nn.Module) -> None:
        ids = self._left.pop(module, None)
        if ids is not None:
            self._client.wait(*ids)

    def _before_state_dict(self, *_args: Any) -> None:
        self.wait()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self._watched:
            borrowed.unwatch(module)


def _read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that the module's forward reads by itself, without the forward of the module that owns them."""
    if isinstance(module, torch.jit.ScriptModule | nn.MultiheadAttention):  # the latter reads out_proj.weight
        yield from module.parameters()
        return
    yield from module.parameters(recurse=False)
    for child in module.children():
        if type(child).forward is nn.Module.forward:  # a list, a dict, or a holder of parameters: never called
            yield from _read_by(child)


def wait(what: nn.Module | Iterable[torch.Tensor] | torch.Tensor | None = None) -> None:
    """
    With overlap_update=True: waits until these weights, of a model, a part of it or parameters, are those of the last
    step; without an argument all weights. For code that reads weights between step() and the next backward without a
    forward of their module: an average of the weights, a norm, torch.save(), F.linear(x, other.weight). Not a
    collective. Without overlap_update there is nothing to wait for.
    """
    params = [what] if isinstance(what, torch.Tensor) else what.parameters() if isinstance(what, nn.Module) else what
    params = None if params is None else list(params)
    for opt in list(open_optimizers) if params is None else owners_of(params):
        opt.wait(params)
