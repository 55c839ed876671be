# SPDX-License-Identifier: Apache-2.0
"""
This rank's evidence about parameters whose gradients a step did not get. It is sent only when gradients are missing.

The calls of modules are counted in the first step and, after the first report of a missing parameter, in every step. If
a program uses all its parameters, the counting ends with step 0 and costs nothing afterwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from . import _lib, compiled
from .binding import Bound
from .uncopied import Hook
from .watch import Failure, Segment, now


STEPS_UNTIL_SAID = 3  # the daemon reports parameters that are missing for this many steps


def entry_modules(model: nn.Module) -> list[nn.Module]:
    """
    Modules whose forward begins a forward of the model: the model and its children, and the children of containers,
    which have no forward. The children count because programs call parts of a model, too.
    """
    entries = [model]
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            entries.extend(entry_modules(child)[1:])
        else:
            entries.append(child)
    return list(dict.fromkeys(entries))


class Evidence:
    def __init__(self, model: nn.Module, bound: Sequence[Bound]) -> None:
        self._bound = bound
        self._owners = _owners(model, bound)
        self._called: set[nn.Module] = set()
        self._hooks: list[Any] = []
        self._said: frozenset[int] = frozenset()
        self._n_said = 0  # number of steps in a row with that set
        self.failure: Failure | None = None
        self.n_forwards = self.n_backwards = 0  # of this step
        self.count_calls()

    # ---- counting ------------------------------------------------------------------------------------

    def count_calls(self) -> None:
        if not self._hooks and not compiled.is_used():
            called = self._called
            owners = {owner for owners in self._owners for owner in owners}
            self._hooks = [m.register_forward_pre_hook(Hook(lambda module, _: called.add(module))) for m in owners]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def step_ended(self) -> None:
        """Forgets the step; stops counting if no parameter has ever been missing."""
        if self._hooks and not self._said and not compiled.is_used():  # a change of hooks compiles graphs again
            self.stop()
        self._called.clear()
        self.failure = None
        self.n_forwards = self.n_backwards = 0
        now.dead.clear()
        now.alive.clear()

    # ---- evidence for the daemon ---------------------------------------------------------------------

    def of(self, missing: Sequence[int]) -> _lib.Evidence | None:
        """Evidence about parameters that this step did not push; None if it was already sent in several steps."""
        self._n_said = self._n_said + 1 if self._said == frozenset(missing) else 1
        if self.failure is None and self.n_backwards > 0 and self._n_said > STEPS_UNTIL_SAID:
            return None
        self._said = frozenset(missing)
        evidence = _lib.Evidence(n_forwards=self.n_forwards, n_backwards=self.n_backwards)
        if self.failure is not None:
            evidence.exception = self.failure.text.encode()
            evidence.raised_at = self.failure.raised_at.encode() or None
            evidence.swallowed_by = self.failure.swallowed_by.encode() or None
            evidence.in_forward = self.failure.in_forward
        evidence.requires_grad_changed = any(not self._bound[i].param.requires_grad for i in missing)
        self._add_dead_segments(evidence, set(missing))
        self._add_modules(evidence, missing)
        self.count_calls()
        return evidence

    def _add_dead_segments(self, evidence: _lib.Evidence, missing: set[int]) -> None:
        dead = [s for name, s in now.dead.items() if name not in now.alive and self._all_missing(s, missing)]
        if dead:
            evidence.dead_segment, evidence.site, evidence.n_dead_segments = dead[0].name, dead[0].site, len(dead)

    def _all_missing(self, segment: Segment, missing: set[int]) -> bool:
        module = segment.module() if segment.module else None
        if module is None:
            return False
        inside = set(module.parameters())
        ids = {b.index for b in self._bound if b.trainable and b.param in inside}
        return bool(ids) and ids <= missing

    def _add_modules(self, evidence: _lib.Evidence, missing: Sequence[int]) -> None:
        if not self._hooks:
            return  # calls were not counted in this step; they will be in the next
        called = [i for i in missing if any(owner in self._called for owner in self._owners[i])]
        rest = [] if compiled.is_used() else sorted(set(missing) - set(called))
        evidence.called, evidence.n_called = _ids(called), len(called)
        evidence.not_called, evidence.n_not_called = _ids(rest), len(rest)


def _owners(model: nn.Module, bound: Sequence[Bound]) -> list[list[nn.Module]]:
    """For each parameter, the modules that hold it directly; a tied parameter has several."""
    owners: dict[torch.Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(param, []).append(module)
    return [owners.get(b.param, []) for b in bound]


def _ids(ids: Iterable[int]) -> Any:
    ids = list(ids)
    return ctypes.cast((ctypes.c_uint * len(ids))(*ids), ctypes.POINTER(ctypes.c_uint))
