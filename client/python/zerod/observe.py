# SPDX-License-Identifier: Apache-2.0
"""
Explains DDP's errors. This module needs no daemon: it watches a model in DistributedDataParallel, and when DDP blames
the wrong parameter, it raises a fault that names the real cause, from DDP's own error.

    model = zerod.observe(DistributedDataParallel(model))

    "mark a variable ready only once"        D4 one gradient came, D1 two in one backward, D2 in two backwards
    "finished reduction in the prior ..."    M1 never used, M2 not this time, M4 an exception was swallowed, M5 cut off
    nothing, though the step is asked for    M3 no backward, M4
    nothing at all                           X1 the wrapper's forward was bypassed: ranks drift apart

If a trainer swallows the fault, each later step raises the fault again, until unobserve(). The fault is printed once.
Observing changes no training: it neither reads nor clears gradients. Its cost is a few attribute reads for each
gradient.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import re
import sys
import time
import weakref
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from . import _lib, compiled, sites, watch
from ._lib import lib
from .client import _program, fault_from
from .errors import GradientFault
from .evidence import Evidence
from .gradients import OUTERMOST
from .uncopied import Hook
from .watch import now

TWICE, MISSING, BYPASSED = range(3)  # enum zerod_observed

_READY_TWICE = "mark a variable ready only once"
_UNFINISHED = "finished reduction in the prior iteration"
_NAMED = re.compile(r"Parameter at index (\d+)")
_LISTED = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+?)\s*$", re.MULTILINE)
_numbers = itertools.count()  # numbers of observed models; equal on all ranks, which make DDP models in one order


class Watched(NamedTuple):
    """The part of a Bound that Evidence reads."""

    index: int
    name: str
    param: nn.Parameter
    trainable: bool = True


class Arrival(NamedTuple):
    """
    A gradient that became ready: its outer backward, that backward's call site, its nested pass (0: none), the depth
    and the segment.
    """

    outer: int
    site: bytes
    nested: int
    depth: int
    segment: watch.Segment | None


def observe(ddp_model: DistributedDataParallel, *, patience: float = 10.0) -> DistributedDataParallel:
    """
    Watches ddp_model until unobserve(), and returns it. The model may be compiled. patience: if gradients are missing
    in the first step, the seconds to wait for the other ranks' answers whether they miss the same gradients.
    """
    ddp = compiled.unwrapped(ddp_model)
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"zerod.observe() takes a model in DistributedDataParallel, not {type(ddp).__name__}: with the Trainer, "
            "trainer.add_callback(zerod.observe_callback(trainer)); with accelerate, what prepare() has returned"
        )
    if "_zerod_observer" not in ddp.__dict__:
        ddp.__dict__["_zerod_observer"] = Observer(ddp, patience)
    return ddp_model


def unobserve(ddp_model: DistributedDataParallel) -> None:
    observer = compiled.unwrapped(ddp_model).__dict__.pop("_zerod_observer", None)
    if observer is not None:
        observer.close()


def _reduced_parameters(ddp: DistributedDataParallel) -> list[Watched]:
    """The parameters in DDP's order, so that DDP's indices are indices of this list."""
    ignored = ddp.parameters_to_ignore
    named = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]
    return [Watched(i, compiled.plain(name), p) for i, (name, p) in enumerate(named)]


class Observer:
    def __init__(self, ddp: DistributedDataParallel, patience: float) -> None:
        self._ddp = weakref.ref(ddp)
        self._patience = patience
        self._number = next(_numbers)
        self._params = _reduced_parameters(ddp)
        self._ids = {id(w.param) for w in self._params}
        self._evidence = Evidence(ddp.module, self._params)
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        # This iteration's data. An iteration begins when a forward of DDP ends.
        self._counts = [0] * len(self._params)
        self._first: list[Arrival | None] = [None] * len(self._params)
        self._second: list[Arrival | None] = [None] * len(self._params)
        self._base = now.outer
        self._step = 0
        # The whole run's data.
        self._told: GradientFault | None = None
        self._printed = False  # _told was printed
        self._n_steps = self._n_iterations = self._n_forwards = self._n_backwards = 0
        self._reached = -1  # the last outer backward in which a gradient arrived
        self._inside = False  # DDP's forward runs
        self._wrapped = False  # True if DDP's forward has run since the last step
        self._bypassed = False  # True if the module's own forward has run outside DDP's
        self._alone: set[int] = set()  # gradients that arrived although DDP's forward has not run
        self._install(ddp)

    def _install(self, ddp: DistributedDataParallel) -> None:
        self._handles: list[Any] = [
            w.param.register_post_accumulate_grad_hook(functools.partial(self._arrived, w.index)) for w in self._params
        ]
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._handles.append(ddp.module.register_forward_pre_hook(Hook(self._before_module)))
        self._forward = ddp.forward
        ddp.forward = self._watched_forward  # type: ignore[method-assign]
        watch.add(self, ddp.module)

    def close(self) -> None:
        watch.remove(self)
        for handle in self._handles:
            handle.remove()
        self._evidence.stop()
        ddp = self._ddp()
        if ddp is not None:
            ddp.__dict__.pop("forward", None)

    # ---- gradients -----------------------------------------------------------------------------------

    def _arrived(self, index: int, _param: torch.Tensor) -> None:
        """Counts a ready parameter, as DDP does: an undefined gradient makes a parameter ready, too."""
        self._counts[index] = count = self._counts[index] + 1
        if count <= 2:
            nested = now.passes[-1] if now.passes else 0
            segment = now.segments[-1] if now.passes else None
            arrival = Arrival(now.outer, now.site, nested, len(now.passes), segment)
            (self._first if count == 1 else self._second)[index] = arrival
        self._reached = now.outer
        if not self._wrapped:
            self._alone.add(index)

    # ---- forwards ------------------------------------------------------------------------------------

    def _watched_forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or now.inside:
            return self._forward(*args, **kwargs)
        self._n_forwards += 1
        self._evidence.n_forwards += 1
        self._inside = True
        try:
            output = self._forward(*args, **kwargs)
        except GradientFault:
            raise
        except Exception as error:
            if isinstance(error, RuntimeError) and _UNFINISHED in str(error):
                raise self._unfinished(str(error)) from error
            self._evidence.failure = watch.failure(error, in_forward=True)
            raise
        finally:
            self._inside = False
        self._begin_iteration()
        return output

    def _before_module(self, _module: nn.Module, _args: Any) -> None:
        if now.inside or not torch.is_grad_enabled():
            return
        if not self._inside:
            self._bypassed = True
        elif any(self._counts):
            # DDP has checked the last iteration and found no error, so its data are no longer needed.
            self._evidence.step_ended()
            self._evidence.n_forwards = 1

    def _begin_iteration(self) -> None:
        """Called when DDP has accepted the last iteration, in which nothing was missing."""
        if any(self._counts):
            self._n_iterations += 1
            n = len(self._params)
            self._counts, self._first, self._second = [0] * n, [None] * n, [None] * n
        self._base = now.outer
        self._step = self._n_steps
        self._wrapped = True
        self._alone.clear()

    def _unfinished(self, text: str) -> GradientFault:
        listed = _LISTED.search(text)
        missing = [i for i, count in enumerate(self._counts) if count == 0]
        if listed:  # DDP does not list parameters that it considers unused, nor those after the first hundred
            missing = [i for i in map(int, listed[1].split()) if i < len(self._params)]
        same = self._n_iterations == 0 and self._evidence.failure is None and self._agreed(missing)
        return self._missing_fault(missing, same_on_all_ranks=same, silent=False)

    def _agreed(self, missing: list[int]) -> bool:
        """
        True if all ranks miss the same gradients. Ranks that miss none may wait for this rank inside a collective, so
        the ranks compare through the store. A rank that does not answer within self._patience misses other gradients,
        or none.
        """
        ddp = self._ddp()
        ranks = dist.get_process_group_ranks(ddp.process_group) if ddp is not None else []
        deadline = time.monotonic() + self._patience
        digest = hashlib.sha256(repr(missing).encode()).digest()
        key = f"zerod-observe-{self._number}-{ranks[0] if ranks else 0}"

        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{key}-{dist.get_rank()}", digest)
            for rank in ranks:
                left = max(deadline - time.monotonic(), 0.001)
                store.wait([f"{key}-{rank}"], timedelta(seconds=left))
                if store.get(f"{key}-{rank}") != digest:
                    return False
        except RuntimeError:
            return False
        # The rank that has the store may exit first, so each rank waits until all have read. If the store is gone
        # already, its rank had read everything.
        with contextlib.suppress(RuntimeError):
            store.set(f"{key}-{dist.get_rank()}-read", b"")
            store.wait([f"{key}-{rank}-read" for rank in ranks], timedelta(seconds=1))
        return True

    # ---- backwards: events of watch ------------------------------------------------------------------

    def backward_begins(self, _roots: Any) -> None:
        pass

    def second_backward(self, _sites: str) -> None:
        pass

    def backward_ends(self, error: BaseException | None) -> None:
        reached = self._reached == now.outer
        if reached:
            self._n_backwards += 1
            self._evidence.n_backwards += 1
        if isinstance(error, RuntimeError) and _READY_TWICE in str(error) and reached:
            raise self._ready_twice(str(error)) from error
        if error is not None:
            if reached or self._wrapped:
                self._evidence.failure = watch.failure(error, in_forward=False)
        elif reached:
            self._evidence.failure = None
            if self._bypassed and len(self._alone) == len(self._params) and self._world_size() > 1:
                raise self._fault(what=BYPASSED)

    def _ready_twice(self, text: str) -> GradientFault:
        named = _NAMED.search(text)
        index = int(named[1]) if named and int(named[1]) < len(self._params) else -1
        if index < 0 or self._counts[index] == 0:
            return self._fault(what=TWICE)
        return self._fault(
            what=TWICE, params=[index], first=self._push(self._first[index]), second=self._push(self._second[index])
        )

    def _push(self, arrival: Arrival | None) -> _lib.Push:
        push = _lib.Push()
        if arrival is not None:
            push.ordinal = max(arrival.outer - self._base, 1)
            push.task, push.depth = arrival.nested or OUTERMOST, arrival.depth
            push.flags = _lib.PUSH_NESTED if arrival.nested else _lib.PUSH_SITE_IS_BACKWARD
            push.site = arrival.site
            if arrival.segment is not None:
                push.segment, push.call, push.site = arrival.segment.name, arrival.segment.call, arrival.segment.site
        return push

    # ---- the optimizer's step ------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(a is not None for a in args[1:]) or any(v is not None for v in kwargs.values()):
            return  # a closure runs forward and backward inside the step
        before = self._optimizers.get(optimizer)
        if before is None:
            if not any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"]):
                return
            before = (0, 0)
        if self._told is not None:
            self._print(self._told)  # the program swallowed the fault
            raise self._told.with_traceback(None)
        self._optimizers[optimizer] = (self._n_forwards, self._n_backwards)
        failure = self._evidence.failure
        if failure is not None and not failure.in_forward and self._counts_are_partial():
            raise self._missing_fault([i for i, count in enumerate(self._counts) if count == 0], silent=True)
        if self._n_forwards > before[0] and self._n_backwards == before[1]:
            self._step = self._n_steps  # a forward that failed has not begun this step
            self._evidence.n_backwards = 0
            raise self._missing_fault(list(range(len(self._params))), silent=True)
        self._n_steps += 1
        self._wrapped = self._bypassed = False
        self._alone.clear()

    def _counts_are_partial(self) -> bool:
        return any(self._counts) and not all(self._counts)

    # ---- faults --------------------------------------------------------------------------------------

    def _world_size(self) -> int:
        ddp = self._ddp()
        return dist.get_world_size(ddp.process_group) if ddp is not None else 1

    def _missing_fault(self, missing: list[int], *, silent: bool, same_on_all_ranks: bool = False) -> GradientFault:
        evidence = self._evidence.of(missing)
        return self._fault(
            what=MISSING, params=missing, silent=silent, same_on_all_ranks=same_on_all_ranks,
            same_every_step=self._n_iterations == 0, n_steps_seen=self._n_iterations + 1,
            evidence=ctypes.pointer(evidence) if evidence is not None else None,
        )  # fmt: skip

    def _fault(self, *, what: int, params: list[int] | None = None, **fields: Any) -> GradientFault:
        names = (ctypes.c_char_p * len(self._params))(*(w.name.encode() for w in self._params))
        ids = (ctypes.c_uint * len(params or ()))(*(params or ()))
        observation = _lib.Observation(
            what=what, client=_program().encode(), rank=dist.get_rank(), step=self._step, names=names,
            n_names=len(names), params=ids, n_params=len(ids), world_size=self._world_size(), **fields,
        )  # fmt: skip
        error = ctypes.POINTER(_lib.Fault)()
        status = lib.explain(ctypes.byref(observation), ctypes.byref(error))
        if status != 0:
            raise OSError(-status, "zerod_explain")
        try:
            self._told = fault_from(error.contents)
        finally:
            lib.explain_free(error)
        if sites.find_swallower(sites.stack()):
            self._print(self._told)
        return self._told

    def _print(self, fault: GradientFault) -> None:
        """Prints the fault once, because an except of the program may hide it."""
        if not self._printed:
            print(f"zerod.observe() raises:\n{fault.text}", file=sys.stderr, flush=True)
        self._printed = True
