# SPDX-License-Identifier: Apache-2.0
"""
The present activity of the process, as evidence for diagnosis: the backward, the nested pass and the segment.

torch has no event for "the outermost backward has ended": a queued callback cannot tell it from the end of a nested
graph task, which reentrant checkpointing makes. So this module wraps torch.autograd.backward, which both
Tensor.backward and CheckpointFunction.backward look up when they are called. A module that needs the events registers
a Watcher. The wrapper does no work per parameter.

`now` and the wrappers are process-wide. The wrappers run on the thread that calls backward. A hook reads `now` and
never changes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import Node
from torch.utils import checkpoint

from . import compiled, sites
from .errors import GradientFault

current_task = torch._C._current_graph_task_id
sequence_number = torch._C._autograd._get_sequence_nr


@dataclasses.dataclass(eq=False, slots=True)
class Segment:
    """One run of a checkpointed segment, or of other code that called backward inside a backward."""

    name: bytes  # name of the module, as in the model
    call: int  # number of this run in the forward, from 1
    site: bytes  # where its forward was called
    module: weakref.ref[torch.nn.Module] | None


class Failure(NamedTuple):
    """An exception that left a backward or a forward."""

    text: str  # "RuntimeError: out of memory"
    raised_at: str
    swallowed_by: str  # as far as the callers' sources show
    in_forward: bool


class Watcher(Protocol):
    """The events that the optimizer and the observer of DDP get."""

    def backward_begins(self, roots: Any) -> None: ...
    def backward_ends(self, error: BaseException | None) -> None: ...
    def second_backward(self, sites: str) -> None: ...


class Now:
    """outer: counts outermost backwards. nested: counts passes inside the present backward. passes: numbers of the open
    passes. segments: one for each open pass, innermost last. site: where the outermost backward was called."""

    def __init__(self) -> None:
        self.outer = 0
        self.inside = False
        self.nested = 0
        self.passes: list[int] = []
        self.segments: list[Segment] = []
        self.site = b""
        self.calls: dict[bytes, int] = {}  # runs of each segment since the last backward
        self.firsts: dict[bytes, tuple[Segment, bytes, list[Any]]] = {}  # first run of each segment, its site, callers
        self.dead: dict[bytes, Segment] = {}  # segments that ran where no gradient can reach them, since the last step
        self.alive: set[bytes] = set()  # segments that ran where a gradient can reach them


now = Now()
_watchers: weakref.WeakSet[Any] = weakref.WeakSet()
_names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()


def add(watcher: Watcher, model: torch.nn.Module) -> None:
    """From now on watcher gets each outermost backward's events. Segments get the names of modules in model."""
    _install()
    _watchers.add(watcher)
    for name, module in model.named_modules():
        _names.setdefault(module, compiled.plain(name))


def remove(watcher: Watcher) -> None:
    _watchers.discard(watcher)


def failure(error: BaseException, in_forward: bool) -> Failure:
    """Call it in a frame through which the exception passes, because the callers of that frame may swallow the
    exception."""
    return Failure(
        f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()[0][:300],
        sites.raised_at(error),
        sites.find_swallower(sites.stack()),
        in_forward,
    )


# ---- backwards ------------------------------------------------------------------------------------------


def runs_elsewhere() -> bool:
    """True if another thread runs a backward."""
    return now.inside and current_task() == -1


def _outermost(backward: Any, args: Any, kwargs: Any) -> Any:
    watchers = list(_watchers)
    if runs_elsewhere():
        for watcher in watchers:
            watcher.second_backward(f"at {sites.user_site().decode()} and {now.site.decode()}")
        return backward(*args, **kwargs)
    roots = kwargs.get("tensors", args[0] if args else ())
    error: BaseException | None = None

    now.site = sites.user_site()
    for watcher in watchers:
        watcher.backward_begins(roots)
    now.outer += 1
    now.nested = 0
    now.inside = True
    try:
        return backward(*args, **kwargs)
    except BaseException as e:
        error = e
        raise
    finally:
        now.inside = False
        now.calls.clear()
        now.firsts.clear()
        with contextlib.ExitStack() as told:  # calls all watchers, even when one of them raises a fault
            for watcher in reversed(watchers):
                told.callback(watcher.backward_ends, error)


def _nested(backward: Any, args: Any, kwargs: Any) -> Any:
    """Runs a backward inside a backward. A checkpoint's backward already has a segment; any other is named by its
    caller."""
    plain = len(now.segments) == len(now.passes)
    if plain:
        now.segments.append(Segment(b"", 0, sites.user_site(), None))
    now.nested += 1
    now.passes.append(now.nested)
    try:
        return backward(*args, **kwargs)
    finally:
        now.passes.pop()
        if plain:
            now.segments.pop()


def newer_than(roots: Any, sequence: int) -> bool:
    """
    True if the whole graph under roots was made after autograd's node number `sequence`. Walks the graph, so it is
    called only if a second backward came without a forward of the model.
    """
    stack: list[Node] = [
        r.grad_fn for r in ([roots] if isinstance(roots, torch.Tensor) else roots) if r.grad_fn is not None
    ]
    seen: set[Node] = set()

    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() != "torch::autograd::AccumulateGrad" and node._sequence_nr() < sequence:
            return False
        stack.extend(following for following, _ in node.next_functions if following is not None)
    return bool(seen)


# ---- checkpointed segments ------------------------------------------------------------------------------


def _module_of(function: Any) -> torch.nn.Module | None:
    """The module that a checkpointed function runs: the function itself, its __self__, or one in its closure."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        return function
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return owner
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found = _module_of(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
        if found is not None:
            return found
    return None


def _segment_of(function: Any) -> Segment:
    module = _module_of(function)
    name = _names.get(module, "") if module is not None else ""
    label = (name or getattr(function, "__qualname__", type(function).__name__)).encode()
    now.calls[label] = call = now.calls.get(label, 0) + 1
    segment = Segment(label, call, sites.user_site(), weakref.ref(module) if module is not None else None)
    if call == 1:
        now.firsts[label] = (segment, segment.site, sites.stack())
    else:
        _tell_apart(*now.firsts[label], segment)
    return segment


def _tell_apart(first: Segment, site: bytes, stack: list[Any], later: Segment) -> None:
    """If both runs have one site, uses the callers' lines in which they differ, if there are any."""
    if later.site == site:
        parted = sites.parting(stack, sites.stack())
        if parted is not None:
            first.site, later.site = parted


def _wrap_checkpoint() -> None:
    function = checkpoint.CheckpointFunction
    forward, backward = function.forward, function.backward

    @staticmethod
    def watched_forward(ctx: Any, run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
        ctx.zerod_segment = segment = _segment_of(run_function)
        if any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            now.alive.add(segment.name)
        else:
            now.dead[segment.name] = segment
        return forward(ctx, run_function, preserve_rng_state, *args)

    @staticmethod
    def watched_backward(ctx: Any, *grads: Any) -> Any:
        now.segments.append(ctx.zerod_segment)
        try:
            return backward(ctx, *grads)
        finally:
            now.segments.pop()

    function.forward, function.backward = watched_forward, watched_backward


@functools.cache
def _install() -> None:
    """Wraps the functions once in a process. They stay wrapped, and the wrappers do nothing without a watcher."""
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not _watchers:
            return backward(*args, **kwargs)
        try:
            return (_outermost if current_task() == -1 else _nested)(backward, args, kwargs)
        except GradientFault as fault:
            raise fault.with_traceback(None) from fault.__cause__  # a user needs no frames of this package

    torch.autograd.backward = watched
    _wrap_checkpoint()
