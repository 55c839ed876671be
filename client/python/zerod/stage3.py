# SPDX-License-Identifier: Apache-2.0
"""
Stage 3 in torch: weights are gathered before a module's forward, released after it, and gathered again for the
nodes of the backward that saved them.

Addresses are fixed: a parameter's tensor always points to the same place, which can be read while it is gathered. So
nothing that autograd saved has to be replaced. What is saved inside a module's forward passes through a pair of hooks: a
weight is kept as itself, and when its node runs, unpacking gathers it. A node's work is over before the next one unpacks,
so what was gathered for an earlier node can be released then. Anything else goes on to the hooks that stood there
before, such as a checkpoint's.

A module that reads another one's weight while it runs (a tied head, nn.MultiheadAttention) is noticed where it reads
module.weight, and has it until its own forward ends.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .binding import Bound
from .client import Client
from .registry import Attached, owners_of

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_current_node = torch._C._current_autograd_node


class _Saved:
    """A weight, or a view of it, that a node of autograd will want back."""

    __slots__ = ("index", "tensor")

    def __init__(self, tensor: torch.Tensor, index: int) -> None:
        self.tensor, self.index = tensor, index


class _Parameters(dict[str, nn.Parameter]):
    """A module's _parameters, which tells who reads one."""

    def __init__(self, sharding: Sharding, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self._sharding = sharding

    def __getitem__(self, name: str) -> nn.Parameter:
        param = super().__getitem__(name)
        if param is not None and self._sharding.running:
            self._sharding.borrow(param)
        return param

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class _Frame:
    """A module's forward that is running: what it holds, and whether it has pushed hooks."""

    __slots__ = ("hooked", "indices", "module")

    def __init__(self, module: nn.Module, indices: list[int]) -> None:
        self.module, self.indices, self.hooked = module, indices, False


class Sharding:
    """
    prefetch: how many modules that are to be needed next are gathered along, as learnt from the last time.
    """

    def __init__(self, client: Client, model: nn.Module, bound: Sequence[Bound], prefetch: int = 1) -> None:
        self._client, self._model, self._bound, self.prefetch = client, model, bound, prefetch
        self._index = {b.param: b.index for b in bound}
        self._places = sorted((b.address, b.index) for b in bound if b.n_bytes)
        self._starts = [start for start, _ in self._places]
        self._end = max(b.address + b.n_bytes for b in bound)
        self._n_held = [0] * len(bound)
        self.running: list[_Frame] = []
        self._for_nodes: list[int] = []  # gathered for the backward, oldest first
        self._node: Any = None
        self._handles: list[Any] = []
        for module in model.modules():
            if any(True for _ in module.parameters()):
                self._install(module)

    def _install(self, module: nn.Module) -> None:
        module._parameters = _Parameters(self, module._parameters)
        self._handles += [
            module.register_forward_pre_hook(Attached(self._before), prepend=True),
            module.register_forward_hook(Attached(self._after), always_call=True),
            module.register_state_dict_post_hook(Attached(self._fill_state_dict)),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self._model.modules():
            if isinstance(module._parameters, _Parameters):
                module._parameters = dict(module._parameters)

    # ---- gathering -----------------------------------------------------------------------------------

    def _gather(self, indices: Sequence[int]) -> None:
        new = [i for i in indices if self._n_held[i] == 0]
        if new:
            self._client.gather((ctypes.c_uint * len(new))(*new), len(new))
        for i in indices:
            self._n_held[i] += 1

    def _release(self, indices: Sequence[int]) -> None:
        for i in indices:
            self._n_held[i] -= 1
        free = [i for i in indices if self._n_held[i] == 0]
        if free:
            self._client.release((ctypes.c_uint * len(free))(*free), len(free))

    # ---- forward -------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, _args: Any) -> None:
        frame = _Frame(module, [self._index[p] for p in module._parameters.values() if p is not None])
        self._gather(frame.indices)
        self.running.append(frame)
        if torch.is_grad_enabled():
            _push_hooks(*self._hooks(_top_hooks(True)))
            frame.hooked = True

    def _after(self, module: nn.Module, _args: Any, _output: Any) -> None:
        while self.running:  # more than one when an exception passed by a module whose hooks it never reached
            frame = self.running.pop()
            if frame.hooked:
                _pop_hooks()
            self._release(frame.indices)
            if frame.module is module:
                return

    def borrow(self, param: nn.Parameter) -> None:
        index = self._index.get(param)
        if index is not None and self._n_held[index] == 0:
            self._gather([index])
            self.running[-1].indices.append(index)

    # ---- backward ------------------------------------------------------------------------------------

    def _find(self, address: int) -> int | None:
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start, index = self._places[at]
        return index if address < start + self._bound[index].n_bytes else None

    def _hooks(self, below: Any) -> tuple[Any, Any]:
        """Hooks for what is saved from now on. below: the pair that they stand above, or None."""
        pack_below, unpack_below = below if below is not None else (None, None)

        def pack(tensor: torch.Tensor) -> Any:
            index = self._find(tensor.data_ptr()) if tensor.device.type == "cpu" and tensor.layout == torch.strided else None
            if index is not None:
                return _Saved(tensor, index)
            return pack_below(tensor) if pack_below else tensor

        def unpack(saved: Any) -> torch.Tensor:
            if type(saved) is _Saved:
                self._need(saved.index)
                return saved.tensor
            return unpack_below(saved) if unpack_below else saved

        return pack, unpack

    def _need(self, index: int) -> None:
        """A node that is about to run unpacks this weight."""
        node = _current_node()
        if node is not self._node:
            self._node = node
            self._release_old(index)
        if index not in self._for_nodes:
            self._gather([index])
            self._for_nodes.append(index)

    def _release_old(self, index: int) -> None:
        keep = [i for i in self._for_nodes if i == index]
        self._release([i for i in self._for_nodes if i != index])
        self._for_nodes = keep

    def backward_ended(self) -> None:
        self._release(self._for_nodes)
        self._for_nodes = []
        self._node = None

    # ---- the whole -----------------------------------------------------------------------------------

    def _fill_state_dict(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
        """state_dict() is whole: copies, one parameter at a time."""
        for name, param in module._parameters.items():
            if param is not None and prefix + name in state_dict:
                with self._client.gathered([self._index[param]]):
                    state_dict[prefix + name] = param.detach().clone()


def stage3(model: nn.Module, prefetch: int = 1) -> Sharding:
    """
    The hooks that gather and release the weights of a model whose zerod.Optimizer is on a stage 3 daemon: the
    optimizer has installed them already; here they can be tuned.

    prefetch    how many modules are gathered ahead of the one that runs, in the order of the last time: each
                costs the memory of its weights

    Raises ValueError for a model without an open optimizer, or of a job in stage 1 or 2.
    """
    owners = owners_of(model.parameters())
    if len(owners) != 1 or owners[0].sharding is None:
        raise ValueError("not the model of an open zerod.Optimizer in stage 3 (zero_optimization.stage: 3)")
    owners[0].sharding.prefetch = prefetch
    return owners[0].sharding
