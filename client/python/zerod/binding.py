# SPDX-License-Identifier: Apache-2.0
"""
The parameters of a model and their places in the daemon.

Parameters are declared in the order of named_parameters(), and their .data is pointed at the published weights: memory
of the daemon, mapped read-only, at an address that never changes. Each parameter has its own storage, so that saving
and sharing work as before. Frozen parameters are declared and published, too, except those of own.py.

A parameter whose strides are not those of a contiguous tensor (channels_last) keeps them. Its declared shape has the
order of memory, so that ranks whose orders differ are refused (E1101).

Buffers are sent once: their bytes are declared as one frozen parameter, and every rank copies rank 0's bytes when the
job is formed. Afterwards buffersync.py broadcasts them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from . import _cuda, _lib, compiled
from .client import Client, Declaration
from .own import FINGERPRINTS, Own, is_plain

BUFFERS = "(buffers)"
OR_FROZEN = ", or freeze it, requires_grad_(False), if it is not to be trained"
SPARSE = "zerod takes dense gradients only; make it with sparse=False"


def grad_dtype(param: torch.Tensor) -> torch.dtype:
    """The type in which torch leaves the parameter's gradients: its own, or what the program has asked for."""
    return getattr(param, "grad_dtype", None) or param.dtype


class Bound:
    """One declared parameter. strides is None if the parameter is contiguous."""

    __slots__ = (
        "address", "grad_dtype", "group", "index", "left_out", "muon", "n_bytes", "n_grad_bytes", "name", "order", "param",
        "shape", "strides", "trainable",
    )  # fmt: skip

    def __init__(self, index: int, name: str, param: nn.Parameter, group: int, trainable: bool) -> None:
        self.index, self.name, self.param, self.group, self.trainable = index, name, param, group, trainable
        self.muon = False  # see muon.py
        self.left_out = param.requires_grad and not trainable  # is in no group
        self.shape = tuple(param.shape)
        self.n_bytes = param.numel() * param.element_size()
        self.grad_dtype = grad_dtype(param)
        self.n_grad_bytes = param.numel() * self.grad_dtype.itemsize
        self.address = 0
        self.order = _memory_order(param)
        self.strides = None if self.order is None else _strides(self.shape, self.order)

    def declared_shape(self) -> tuple[int, ...]:
        return self.shape if self.order is None else tuple(self.shape[d] for d in self.order)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Views a flat tensor in the order of memory as a tensor of this parameter's shape."""
        return flat.view(self.shape) if self.strides is None else flat.as_strided(self.shape, self.strides)

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns any tensor of this shape as a flat contiguous one in the order of memory."""
        return (tensor if self.order is None else tensor.permute(self.order)).contiguous().view(-1)


def _memory_order(param: torch.Tensor) -> list[int] | None:
    """Dimensions from the slowest to the fastest; None if that is the usual order, or if no order fits the strides."""
    if param.is_contiguous():
        return None
    order = sorted(range(param.dim()), key=lambda d: (-param.stride(d), d))
    return order if param.permute(order).is_contiguous() else None


def _strides(shape: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= shape[d]
    return tuple(strides)


# ---- what can be declared -------------------------------------------------------------------------------


def check_parameter(name: str, param: Any) -> None:
    """
    Raises TypeError or ValueError if zerod cannot use the parameter. The text names the parameter and says what to do.
    A frozen parameter may be of any type, layout and device.
    """
    if not isinstance(param, torch.Tensor):
        raise TypeError(
            f"{name} is a {type(param).__name__}, not a parameter: pass the model, or groups of its parameters"
        )
    if not param.is_leaf:
        raise ValueError(
            f"{name} is not a leaf of autograd: only parameters can be trained, not what is computed from them"
        )
    if param.requires_grad:
        _check_trained(name, param)


def _check_trained(name: str, param: torch.Tensor) -> None:
    if param.layout != torch.strided:
        raise TypeError(f"{name} is {param.layout}: zerod trains dense parameters; make it dense{OR_FROZEN}")
    if str(param.dtype) not in _lib.DTYPES:
        raise TypeError(
            f"{name} is {param.dtype}: zerod trains float32, bfloat16 and float16; "
            + ("split it into a real and an imaginary parameter" if param.is_complex() else "convert it")
            + f" before zerod.Optimizer(model){OR_FROZEN}"
        )
    if param.device.type not in ("cpu", "meta", "cuda"):
        raise TypeError(
            f"{name} is on {param.device}: zerod trains models in host memory and on NVIDIA GPUs; "
            f"model.cpu() before zerod.Optimizer(model){OR_FROZEN}"
        )
    if str(grad_dtype(param)) not in _lib.DTYPES:
        raise TypeError(
            f"{name} has gradients of {grad_dtype(param)} (grad_dtype): zerod takes float32, bfloat16 and float16"
        )


def _named(model: nn.Module) -> dict[nn.Parameter, str]:
    """The named parameters. A tied parameter appears once, under its first name."""
    return {param: compiled.plain(name) for name, param in model.named_parameters()}


def _can_publish(param: nn.Parameter, device: torch.device | None) -> bool:
    """True if zerod can publish a frozen parameter. device: the trained parameters' device; None: all are on the meta
    device."""
    is_there = param.device.type == "meta" or device is None or _cuda.device_of(param) == device
    return is_there and is_plain(param) and str(param.dtype) in _lib.DTYPES


def bind(model: nn.Module, groups: list[dict[str, Any]], publish_frozen: bool = True) -> tuple[list[Bound], list[Own]]:
    """
    Returns two lists: the declared parameters in the model's order (the trained ones, and the frozen ones that zerod
    publishes), and the parameters that are not declared. A parameter in no group is frozen.
    """
    names = _named(model)
    group_of = {param: g for g, group in enumerate(groups) for param in group["params"]}

    for g, group in enumerate(groups):
        for i, param in enumerate(group["params"]):
            if param not in names:
                raise ValueError(
                    f"parameter {i} of group {g}, of shape {tuple(param.shape)}, is not a parameter of the model: "
                    "zerod publishes the weights of one model; put several into one torch.nn.ModuleList"
                )
    _refuse_sparse(model)
    trained = [param for param in names if param.requires_grad and param in group_of]
    if not trained:
        raise ValueError(
            "no parameter of the model is trainable: every requires_grad is False, or the groups are empty"
        )
    device = next((_cuda.device_of(param) for param in trained if param.device.type != "meta"), None)
    is_trained = set(trained)
    bound: list[Bound] = []
    own: list[Own] = []
    for param, name in names.items():
        if param in is_trained:
            check_parameter(name, param)
        elif not (publish_frozen and _can_publish(param, device)):
            own.append(Own(name, param))
            continue
        bound.append(Bound(len(bound), name, param, group_of.get(param, 0), param in is_trained))
    _refuse_shared_memory(model, bound, own)
    return bound, own


def _n_span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    return (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.element_size()


def _have_common_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """
    True if two tensors over one storage have common elements. Without common elements, spans may still overlap, as with
    two blocks of columns.
    """
    start = min(a.data_ptr(), b.data_ptr())
    end = max(t.data_ptr() + _n_span(t) for t in (a, b))
    taken = torch.zeros(end - start, dtype=torch.bool)

    def bytes_of(t: torch.Tensor) -> torch.Tensor:
        n = t.element_size()
        return taken.as_strided((*t.shape, n), (*(s * n for s in t.stride()), 1), t.data_ptr() - start)

    bytes_of(a).fill_(True)
    return bool(bytes_of(b).any())


def _refuse_shared_memory(model: nn.Module, bound: list[Bound], own: list[Own]) -> None:
    """
    Refuses two parameters, or a parameter and a buffer, that share memory without being one parameter. The job gives
    each parameter its own memory, so the other tensor would no longer follow the trained parameter.
    """
    tensors = [(b.name, b.param.detach(), b.trainable) for b in bound]
    tensors += [(o.name, o.param.detach(), False) for o in own if is_plain(o.param)]
    tensors += [(compiled.plain(name), buffer.detach(), False) for name, buffer in model.named_buffers()]
    over: dict[int, list[tuple[str, torch.Tensor, bool]]] = {}  # by storage
    for entry in tensors:
        tensor = entry[1]
        if tensor.layout == torch.strided and tensor.numel() and tensor.data_ptr():
            over.setdefault(tensor.untyped_storage().data_ptr(), []).append(entry)
    for entries in over.values():
        entries.sort(key=lambda entry: entry[1].data_ptr())
        for i, (name, tensor, is_trained) in enumerate(entries):
            for other_name, other, other_is_trained in entries[i + 1 :]:
                if other.data_ptr() >= tensor.data_ptr() + _n_span(tensor):
                    break
                if (is_trained or other_is_trained) and _have_common_elements(tensor, other):
                    _refuse_pair(name, other_name, tensor.shape == other.shape)


def _refuse_pair(name: str, other: str, alike: bool) -> None:
    raise ValueError(
        f"{name} and {other} lie in the same memory without being one parameter: zerod gives each of them memory of its own, so "
        "only one would be trained. "
        + (
            f"Make them one parameter, model.{other} = model.{name}, or copy: .clone()"
            if alike
            else "Keep one of them as a parameter, and compute the other one from it in forward()"
        )
    )


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise TypeError(f"{compiled.plain(name) or 'the model'} is {type(module).__name__}(sparse=True): " + SPARSE)


# ---- buffers --------------------------------------------------------------------------------------------


def _buffers(model: nn.Module, saved: bool) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """The owner, the name and the tensor of each buffer. saved: only the buffers that state_dict() has."""
    found, seen = [], set()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if saved and name in module._non_persistent_buffers_set:
                continue
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                found.append((module, name, buffer))
    return found


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def copy_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor in host memory. Tensor.numpy() would fail if numpy is not installed."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def pack_buffers(model: nn.Module, saved: bool = False) -> torch.Tensor:
    """Packs all buffers one after the other, padded to whole floats. A buffer on the meta device becomes zeros."""
    sizes = [b.numel() * b.element_size() for _, _, b in _buffers(model, saved)]
    packed = torch.zeros((sum(sizes) + 3) // 4 * 4, dtype=torch.uint8)
    start = 0

    for (_, _, buffer), size in zip(_buffers(model, saved), sizes, strict=True):
        if buffer.device.type != "meta":
            packed[start : start + size] = bytes_of(buffer)
        start += size
    return packed


def unpack_buffers(
    model: nn.Module, packed: torch.Tensor, saved: bool = False, device: torch.device | None = None
) -> None:
    """Copies packed bytes into the buffers. device: the new device of buffers on the meta device; None: host memory."""
    start = 0

    for module, name, buffer in _buffers(model, saved):
        size = buffer.numel() * buffer.element_size()
        value = packed[start : start + size].clone().view(buffer.dtype).view(buffer.shape)
        start += size
        if buffer.device.type == "meta":
            module._buffers[name] = value if device is None else value.to(device)
        else:
            buffer.copy_(value)


# ---- forming --------------------------------------------------------------------------------------------


def declarations(
    bound: Iterable[Bound],
    buffers: torch.Tensor,
    fingerprints: torch.Tensor,
    rank: int,
    initial: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[list[Declaration], list[torch.Tensor]]:
    """
    Returns the manifest, and the tensors whose memory the manifest points to. Keep the tensors until the job is formed.
    initial: moves a flat tensor to memory that the daemon can read.
    """
    result, keep = [], []

    for b in bound:
        init = 0
        if rank == 0:
            if b.param.device.type == "meta":
                raise ValueError(
                    f"{b.name} is on the meta device: rank 0 brings the initial weights, so its model has to be real"
                )
            keep.append(initial(b.flatten(b.param.detach())))
            init = keep[-1].data_ptr()
        result.append(
            Declaration(
                b.name, _lib.DTYPES[str(b.param.dtype)], b.declared_shape(), b.group, b.trainable, init,
                _lib.DTYPES[str(b.grad_dtype)] if b.trainable else None, b.muon,
            )  # fmt: skip
        )
    for name, packed in (BUFFERS, buffers), (FINGERPRINTS, fingerprints):
        if packed.numel():
            keep.append(initial(packed))
            result.append(Declaration(name, 0, (packed.numel() // 4,), 0, False, keep[-1].data_ptr() if rank == 0 else 0))
    return result, keep


def published(client: Client, b: Bound) -> torch.Tensor:
    """Returns the daemon's weights as a tensor of the parameter's shape, with a storage of its own."""
    if b.n_bytes == 0:
        return torch.empty(b.shape, dtype=b.param.dtype)
    return b.view(torch.frombuffer(client.weights(b.index, b.n_bytes), dtype=b.param.dtype))


@torch.no_grad()
def attach(b: Bound, weights: torch.Tensor) -> None:
    """Points the parameter to these weights, which have its shape."""
    if b.param.device.type == "meta":
        # The Parameter object stays, so that tied weights, optimizers' groups and nn.LSTM's weak references still refer
        # to it. torch.utils.swap_tensors() refuses objects with weak references.
        torch._C._swap_tensor_impl(b.param, nn.Parameter(weights, requires_grad=b.param.requires_grad))
    else:
        b.param.data = weights
    b.address = weights.data_ptr()


@torch.no_grad()
def detach(b: Bound) -> None:
    """Moves the parameter back to this process's own memory."""
    if b.param.data_ptr() == b.address:
        b.param.data = b.param.detach().clone(memory_format=torch.preserve_format)


def read_frozen(client: Client, index: int, n_bytes: int) -> torch.Tensor:
    """Returns a copy of a parameter's published bytes. The parameter is gathered only for the time of the copy."""
    with client.gathered([index]):
        return torch.frombuffer(bytearray(ctypes.string_at(client.weight_address(index), n_bytes)), dtype=torch.uint8)
