# SPDX-License-Identifier: Apache-2.0
"""
Optimizer(..., overlap_update=True): step() returns when the step is decided, and the daemon writes the weights while
the next forward runs. A hook before each module's forward waits for the module's own parameters, and for those of inner
modules that have no forward, such as nn.ParameterList. A read of module.weight waits as well, whichever code reads it.

If the model is on a GPU and the daemon's work in host memory, weights are copied to the GPU beside the computation. Each
hook orders copies of all weights that are written by then, and the stream waits for those that its module reads.

Code that reads weights in another way, such as model.parameters(), calls zerod.wait() first. Calls of the optimizer and
the next backward wait by themselves (zerod_wait() in zerod/client.h).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from ctypes import c_uint
from typing import Any

import torch
from torch import nn

from . import borrowed
from .binding import Bound
from .client import Client
from .placement import InHost
from .registry import open_optimizers, owners_of
from .uncopied import BreakingHook, Hook


class WholeStep:
    """For optimizers without overlap_update, jobs on GPUs, or with gathered weights: step() returns when all weights are
    written."""

    def __init__(self, client: Client, bound: Sequence[Bound], place: InHost) -> None:
        self._client, self._place = client, place
        self._trainable = [b for b in bound if b.trainable]

    def stepped(self, applied: bool) -> None:
        """Called when the step is decided. applied: it changes the weights."""
        self._client.wait(None, 0)
        if applied:
            self._place.weights_change()
            self._place.refresh(self._trainable)
            self._place.order(self._trainable)

    def wait(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Waits until these parameters have the weights of the last step; None: all."""

    def close(self) -> None:
        """Removes the hooks."""


class Overlap(WholeStep):
    """Each module waits for its own weights."""

    def __init__(self, client: Client, bound: Sequence[Bound], place: InHost, model: nn.Module) -> None:
        super().__init__(client, bound, place)
        self._of = {b.param: b for b in self._trainable}
        self._ids: dict[nn.Module, list[Bound]] = {}
        for module in model.modules():
            read = {b.index: b for b in (self._of.get(p) for p in _read_by(module)) if b is not None}
            if read:
                self._ids[module] = [read[index] for index in sorted(read)]
        self._left: dict[nn.Module, list[Bound]] = {}  # modules that have not waited since the last step
        self._old: set[int] = set()  # indices of parameters whose new weights are not copied since the last step
        self._ahead: Iterator[Bound] = iter(())  # parameters whose weights may be written soon, in that order
        self._next: Bound | None = None  # the first of them that was not written yet
        self._lock = threading.RLock()  # a thread must not read weights that another one is still waiting for
        before = BreakingHook(self._before)
        # Runs before hooks that compute a weight from others, such as that of torch.nn.utils.weight_norm.
        self._handles: list[Any] = [m.register_forward_pre_hook(before, prepend=True) for m in self._ids]
        self._handles += [m.register_state_dict_pre_hook(Hook(self._before_state_dict)) for m in model.modules()]
        self._watched = [m for m in self._ids if m._parameters and not isinstance(m, torch.jit.ScriptModule)]
        for module in self._watched:
            borrowed.watch(module, functools.partial(self._read, module))

    def stepped(self, applied: bool) -> None:
        if applied:
            self._place.weights_change()
            self._left = dict(self._ids)
            self._old = {b.index for b in self._trainable}
            self._ahead = iter(self._trainable)
            self._next = next(self._ahead, None)

    def wait(self, params: Iterable[torch.Tensor] | None = None) -> None:
        self._place.other_stream()
        if not self._left and not self._old:
            return
        if params is not None:
            self._wait_for([self._of[p] for p in params if p in self._of])
            return
        with self._lock:
            self._client.wait(None, 0)
            self._renew(self._trainable)
            self._left = {}

    def _wait_for(self, bound: Sequence[Bound]) -> None:
        with self._lock:
            self._client.wait((c_uint * len(bound))(*(b.index for b in bound)), len(bound))
            self._renew(bound)

    def _renew(self, bound: Sequence[Bound]) -> None:
        """
        Copies these weights, which are written, and all others that are written by now. Copies each once in a step,
        because a later copy would look like a write by the program.
        """
        new = [b for b in bound if b.index in self._old]
        self._old.difference_update(b.index for b in new)
        while self._next is not None and self._client.is_written(self._next.index):
            if self._next.index in self._old:
                self._old.remove(self._next.index)
                new.append(self._next)
            self._next = next(self._ahead, None)
        if new:
            self._place.refresh(new)
        self._place.order(bound)

    def _before(self, module: nn.Module, _args: Any) -> None:
        self._place.other_stream()
        if not self._left:
            return
        if not module.training:  # torch's fast paths then read the weights of submodules
            self.wait()
            return
        self._wait_for_module(module)

    def _read(self, module: nn.Module, _param: torch.Tensor) -> None:
        self._place.other_stream()
        if self._left:
            self._wait_for_module(module)

    def _wait_for_module(self, module: nn.Module) -> None:
        bound = self._left.get(module)
        if bound is not None:
            self._wait_for(bound)
            self._left.pop(module, None)

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
