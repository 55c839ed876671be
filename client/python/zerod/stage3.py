# SPDX-License-Identifier: Apache-2.0
"""
Stage 3 in torch: weights are gathered before a module's forward, released after it, and gathered again for the
nodes of the backward that saved them.

The unit is a module with its direct parameters; a tied parameter belongs to the first module that has it. Addresses are
fixed: a parameter's tensor always points to the same memory, which can be read while the parameter is gathered. So no
tensor that autograd saved has to be replaced. Tensors that are saved inside a module's forward pass through a pair of
hooks: a weight is saved as itself, and when its node runs, unpacking gathers its unit. A node's work has ended before
the next node unpacks, so the units of earlier nodes are then released, except the one that the next node needs. All
other saved tensors are passed to the hooks that were installed before, such as a checkpoint's.

If a module reads another module's weight while it runs (a tied head, nn.MultiheadAttention), the read of module.weight
gathers the weight, which is held until the forward of the reading module ends.

So a process maps one unit at a time, and the parameters that the surrounding modules hold: their own direct ones and
those that they read of other modules. The process announces to the daemon the units that followed the last time, and
the daemon copies them while the process computes. This needs no memory in the process. A wrong guess costs nothing,
because the next gather takes as long as without it.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from . import borrowed, compiled
from .binding import Bound
from .client import Client
from .errors import GradientFault
from .uncopied import BreakingHook, Hook
from .registry import owners_of

_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.6 has none
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_why_no_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
_current_node = torch._C._current_autograd_node
_current_task = torch._C._current_graph_task_id

Unit = tuple[int, ...]  # indices of parameters


# ---- tensors saved for the backward ---------------------------------------------------------------------


class _Saved:
    """A weight, or a view of it, that autograd saved for a node."""

    __slots__ = ("index", "tensor")

    def __init__(self, tensor: torch.Tensor, index: int) -> None:
        self.tensor, self.index = tensor, index


class _Saving:
    """The pair of hooks for tensors that autograd saves. below: the pair that was on top before, or None."""

    def __init__(self, sharding: Sharding, below: Any) -> None:
        self.sharding = sharding
        self._pack_below, self._unpack_below = below if below is not None else (None, None)

    def pack(self, tensor: torch.Tensor) -> Any:
        index = self.sharding.find(tensor)
        if index is not None:
            return _Saved(tensor, index)
        return self._pack_below(tensor) if self._pack_below else tensor

    def unpack(self, saved: Any) -> torch.Tensor:
        if type(saved) is _Saved:
            self.sharding.need(saved.index)
            return saved.tensor
        return self._unpack_below(saved) if self._unpack_below else saved


# ---- running modules ------------------------------------------------------------------------------------


class _Frame(NamedTuple):
    """A module's forward that is running: the parameters that it holds, and whether it has pushed hooks."""

    module: nn.Module
    indices: list[int]
    hooked: bool


class _Order:
    """The unit that followed each unit the last time."""

    def __init__(self) -> None:
        self._next: dict[Unit, Unit] = {}
        self._last: Unit = ()

    def passed(self, unit: Unit, n: int) -> set[int]:
        """Notes that unit is needed now. Returns the parameters of the n units that are expected next."""
        self._next[self._last] = unit
        self._last = unit
        expected: set[int] = set()
        for _ in range(n):
            unit = self._next.get(unit, ())
            expected.update(unit)
        return expected

    def begin(self) -> None:
        self._last = ()


def _ids(indices: Sequence[int]) -> Any:
    return (ctypes.c_uint * len(indices))(*indices)


class Sharding:
    """prefetch: how many units are announced to the daemon ahead. on_fault: gets a fault before it is raised."""

    def __init__(
        self,
        client: Client,
        model: nn.Module,
        bound: Sequence[Bound],
        device: torch.device | None = None,
        prefetch: int = 1,
    ) -> None:
        if _top_hooks is None:
            raise RuntimeError(
                f"stage 3 needs a newer torch than {torch.__version__}; zerod is made with 2.13: pip install -U torch, "
                "or zero_optimization.stage: 2"
            )
        self._client, self._model, self._bound, self.prefetch = client, model, bound, prefetch
        self._device_type = device.type if device is not None else "cpu"  # type of the model's device
        self.on_fault: Any = None
        self._index = {b.param: b.index for b in bound}
        self._names = [name for name, param in model.named_parameters() if param in self._index]  # torch.compile's, too
        self._places = sorted((b.address, b.index) for b in bound if b.n_bytes)
        self._starts = [start for start, _ in self._places]
        self._n_held = [0] * len(bound)
        self._direct: dict[nn.Module, Unit] = {}
        self._unit_of: dict[int, Unit] = {}
        self._running: list[_Frame] = []
        self._backwards: list[bool] = []  # for each running backward: True if it has pushed hooks
        self._for_nodes: list[Unit] = []  # units gathered for the node of the backward that runs
        self._node: Any = None
        self._stream: int | None = None  # the stream of that node; None: no node runs
        self._forward, self._backward = _Order(), _Order()
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            is_wrapper = compiled.unwrapped(module) is not module  # it passes attributes on to the module inside
            if not is_wrapper and any(param in self._index for param in module.parameters()):
                self._install(name, module)
        _wrap_grad()
        _open.add(self)

    def _install(self, name: str, module: nn.Module) -> None:
        self._direct[module] = unit = tuple(self._index[p] for p in module._parameters.values() if p in self._index)
        for index in unit:
            self._unit_of.setdefault(index, unit)
        borrowed.watch(module, self.borrow)
        self._handles += [
            module.register_forward_pre_hook(BreakingHook(self._before), prepend=True),
            module.register_forward_hook(BreakingHook(self._after), always_call=True),
            module.register_state_dict_post_hook(Hook(functools.partial(self._fill_state_dict, name))),
        ]

    def close(self) -> None:
        _open.discard(self)
        self.reset()
        for handle in self._handles:
            handle.remove()
        for module in self._direct:
            borrowed.unwatch(module)

    # ---- gathering -----------------------------------------------------------------------------------

    def _gather(self, indices: Sequence[int]) -> bool:
        """Gathers parameters. Returns False if all of them were already gathered."""
        new = [i for i in dict.fromkeys(indices) if self._n_held[i] == 0]
        if new:
            try:
                self._client.gather(_ids(new), len(new))
            except GradientFault as fault:
                if self.on_fault:
                    self.on_fault(fault)
                raise
        for i in indices:
            self._n_held[i] += 1
        return bool(new)

    def _release(self, indices: Iterable[int], stream: int | None = None) -> None:
        """Releases parameters. stream: the stream that read them; None: the current stream."""
        free = []
        for i in indices:
            self._n_held[i] -= 1
            if self._n_held[i] == 0:
                free.append(i)
        if free:
            self._client.release(_ids(free), len(free), stream)

    def _gather_unit(self, unit: Unit, order: _Order) -> None:
        """Gathers a unit, and announces to the daemon the units that will probably follow."""
        if unit and self._gather(unit) and self.prefetch > 0:
            ahead = [i for i in order.passed(unit, self.prefetch) if self._n_held[i] == 0]
            if ahead:
                self._client.prefetch(_ids(ahead), len(ahead))

    # ---- forward -------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, _args: Any) -> None:
        if _why_no_hooks() is not None:
            self._refuse_transformed(module)
            return
        if not self._running:
            self._forward.begin()
        self._enter_node(())
        self._gather_unit(self._direct[module], self._forward)
        self._running.append(_Frame(module, list(self._direct[module]), self._push()))

    def _after(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if not any(frame.module is module for frame in self._running):
            return  # _before() did not gather for this module
        while True:  # also ends inner modules whose forward an exception ended before their hooks
            frame = self._running.pop()
            if frame.hooked:
                _pop_hooks()
            self._release(frame.indices)
            if frame.module is module:
                return

    def _refuse_transformed(self, module: nn.Module) -> None:
        """Refuses torch.func.grad and similar: their saved tensors pass no hooks, so no hook could gather them."""
        if any(param in self._index for param in module._parameters.values() if param is not None):
            raise RuntimeError(
                "stage 3: transforms of torch.func compute with weights of their own: functional_call(model, weights, "
                "args) inside them, and before with zerod.gathered(model): weights = {name: p.detach().clone() for "
                "name, p in model.named_parameters()}"
            )

    def borrow(self, param: torch.Tensor) -> None:
        """Gathers a weight when module.weight is read, in a forward or in a function that a checkpoint runs again."""
        if not self._running and _current_task() == -1:
            return
        index = self._index.get(param)
        if index is None:
            return
        if not self._running:
            self.need(index)
        elif self._n_held[index] == 0:
            self._gather_unit((index,), self._forward)
            self._running[-1].indices.append(index)

    # ---- backward ------------------------------------------------------------------------------------

    def find(self, tensor: torch.Tensor) -> int | None:
        """The index of the parameter in whose memory a tensor is, or None."""
        if tensor.device.type != self._device_type or tensor.layout != torch.strided:
            return None
        address = tensor.data_ptr()
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start, index = self._places[at]
        return index if address < start + self._bound[index].n_bytes else None

    def _top_is_ours(self) -> bool:
        top = _top_hooks(True)
        saving = getattr(top[0], "__self__", None) if top is not None else None
        return isinstance(saving, _Saving) and saving.sharding is self

    def _push(self) -> bool:
        """Installs the hooks for saved tensors. Returns False if they are already installed, or torch.func forbids
        hooks."""
        if self._top_is_ours() or _why_no_hooks() is not None:
            return False
        saving = _Saving(self, _top_hooks(True))
        _push_hooks(saving.pack, saving.unpack)
        return True

    def need(self, index: int) -> None:
        """Gathers a weight that the running node unpacks."""
        unit = self._unit_of[index]
        self._enter_node(unit)
        if unit not in self._for_nodes:
            self._gather_unit(unit, self._backward)
            self._for_nodes.append(unit)

    def _enter_node(self, unit: Unit) -> None:
        """If a new node runs, releases the units that were gathered for the last node, except this unit."""
        node = _current_node()
        if node is not self._node:
            self._node = node
            stream, self._stream = self._stream, None if node is None else self._client.stream
            old, self._for_nodes = self._for_nodes, [u for u in self._for_nodes if u == unit]
            for other in old:
                if other != unit:
                    self._release(other, stream)

    def backward_begins(self) -> None:
        """Installs the hooks for a backward, too: with create_graph, it also saves weights."""
        self._backward.begin()
        self._backwards.append(self._push())

    def backward_ended(self) -> None:
        if self._backwards and self._backwards.pop():
            _pop_hooks()
        self._release_nodes()

    def _release_nodes(self) -> None:
        old, self._for_nodes, self._node = self._for_nodes, [], None
        stream, self._stream = self._stream, None
        for unit in old:
            self._release(unit, stream)

    def reset(self) -> None:
        """Releases, between steps, parameters that a KeyboardInterrupt left gathered, because torch calls no hooks
        after it."""
        while self._top_is_ours():
            _pop_hooks()
        running, self._running, self._backwards = self._running, [], []
        for frame in running:
            self._release(frame.indices)
        self._release_nodes()

    # ---- state_dict() --------------------------------------------------------------------------------

    def _is_shared(self, tensor: torch.Tensor, param: torch.Tensor) -> bool:
        """True if the tensor is in the parameter's memory, or, for a model on a GPU, in an open write window."""
        if tensor.layout != torch.strided:
            return False
        return self.find(tensor) is not None or tensor.data_ptr() == param.data_ptr()

    def _fill_state_dict(self, name: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        """
        Completes state_dict() with copies of all parameters, gathered one at a time; a tied parameter is copied once.
        With keep_vars the result keeps the parameters themselves, which zerod.gathered() makes readable.
        """
        outside = prefix.removesuffix(f"{name}." if name else "")
        for key, param in module._parameters.items():
            found = state_dict.get(prefix + key)
            if param not in self._index or found is None or found is param or not self._is_shared(found, param):
                continue
            index = self._index[param]
            first = outside + self._names[index]  # for a tied parameter, its first name
            first = first if first in state_dict else prefix + key
            if self._is_shared(state_dict[first], param):
                with self._client.gathered([index]):
                    state_dict[first] = found.clone()
            state_dict[prefix + key] = state_dict[first]


# ---- torch.autograd.grad --------------------------------------------------------------------------------

_open: weakref.WeakSet[Sharding] = weakref.WeakSet()


@functools.cache
def _wrap_grad() -> None:
    """Watches torch.autograd.grad, which starts a backward, too; watch.py watches torch.autograd.backward."""
    grad = torch.autograd.grad

    @functools.wraps(grad)
    def watched(*args: Any, **kwargs: Any) -> Any:
        shardings = list(_open) if _current_task() == -1 else []
        for sharding in shardings:
            sharding.backward_begins()
        try:
            return grad(*args, **kwargs)
        finally:
            for sharding in reversed(shardings):
                sharding.backward_ended()

    torch.autograd.grad = watched


def stage3(model: nn.Module, prefetch: int = 1) -> Sharding | None:
    """
    Returns, and tunes, the hooks that gather and release the weights of a model whose zerod.Optimizer is on a stage 3
    daemon. The optimizer has already installed them. Returns None if there are none, because all weights are present:
    in stages 1 and 2, and in stage 3 on one node.

    prefetch    number of modules that are announced to the daemon before they are gathered, in the order of the last
                time. The daemon copies their weights while the program computes, as far as there is room under
                stage3_max_live_parameters.
                0: each module is copied when it is needed

    Raises ValueError for a model without an open optimizer.
    """
    owners = owners_of(model.parameters())
    if len(owners) != 1:
        raise ValueError("not the model of an open zerod.Optimizer")
    sharding: Sharding | None = owners[0].sharding
    if sharding is not None:
        sharding.prefetch = prefetch
    return sharding
