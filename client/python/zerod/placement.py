# SPDX-License-Identifier: Apache-2.0
"""
The places of the model and of the daemon's work. Each pair of places has its own class.

    InHost    both in host memory: parameters are the published weights, a push copies
    Offload   the model on a GPU, the daemon in host memory (ZeRO-Offload): the GPU copies gradients into the
              daemon's slots, and weights back into the parameters, while the program computes
    OnGpu     both on the GPU: parameters are the published weights, in device memory that the daemon exports; in
              stage 3 in this process's own memory, which is mapped while they are gathered

The daemon must not read a slot that Offload still copies into, so a push waits until the event after its copy is done.
At each new gradient, the earlier gradients whose events are done are pushed, in order. The end of a micro-batch waits
for all events.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from . import _cuda, _lib
from ._lib import lib
from .binding import Bound, attach, detach, published, read_frozen
from .client import Client

SMALL_BYTES = 64 * 1024  # a smaller push takes less time than to release and acquire the interpreter lock


def _copy_of(record: Any, index: int, data: int | None) -> Any:
    copy = _lib.Push.from_buffer_copy(record)
    copy.param, copy.data = index, data
    return copy


def _address(b: Bound, address: int, record: Any) -> int:
    """
    The address where zerod_push() reads a gradient. A gradient without elements has no address, and NULL has another
    meaning.
    """
    return address if b.n_grad_bytes else ctypes.addressof(record)


def is_large(b: Bound) -> bool:
    return b.n_grad_bytes >= SMALL_BYTES


def _memory_at(address: int, n_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory as a flat tensor that owns nothing."""
    return torch.frombuffer((ctypes.c_char * n_bytes).from_address(address), dtype=dtype)


class InHost:
    """The model and the daemon's work in host memory. The base class of the other places."""

    device: torch.device | None = None
    has_quick_hook = True  # a hook only calls zerod_push() with the gradient's address

    def __init__(self, client: Client, bound: Sequence[Bound]) -> None:
        self._client, self._bound = client, bound

    def describe(self) -> str:
        """The text about this place for the line of the run's settings. It is "" or begins with a comma."""
        return ""

    def initial(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a flat tensor of the model in memory that the daemon can read."""
        return flat

    def context(self) -> contextlib.AbstractContextManager[None]:
        """The context in which the job is formed."""
        return contextlib.nullcontext()

    def attach(self) -> None:
        for b in self._bound:
            attach(b, published(self._client, b))

    def detach(self, b: Bound) -> None:
        """Moves the parameter to this process's own memory."""
        detach(b)

    def read_frozen(self, index: int, n_bytes: int) -> torch.Tensor:
        """A copy, in host memory, of the published bytes of a frozen parameter."""
        return read_frozen(self._client, index, n_bytes)

    def before_step(self) -> None:
        """Waits for copies and kernels that read the weights, because the step writes them."""

    def weights_change(self) -> None:
        """Called after the last use of the old weights, before refresh()."""

    def refresh(self, bound: Sequence[Bound]) -> None:
        """Called when the published weights of these parameters are the new weights."""

    def order(self, bound: Sequence[Bound]) -> None:
        """Called before the current stream reads these weights for the first time after refresh()."""

    def other_stream(self) -> None:
        """Called before weights are read, perhaps on another stream than the one for which order() was called."""

    def window_opens(self) -> None:
        """Called before other memory is mapped at the addresses of the published weights."""

    def window_opened(self) -> None:
        """Called when the window is open, to make the model's weights writable."""

    def window_closes(self) -> None:
        """Copies the model's weights into the window, unless the model's weights are in the window."""

    def window_closed(self) -> None:
        """Called when the published weights are the window's, or the old weights if the window was dropped."""

    # ---- pushes --------------------------------------------------------------------------------------

    def push(self, b: Bound, record: Any, grad: torch.Tensor, keep: Any, again: bool) -> int:
        """
        Pushes a contiguous gradient of this parameter, and returns the status of zerod_push(). record: its zerod_push;
        keep: the object that owns the texts of the record; again: the micro-batch has an earlier gradient of this
        parameter.
        """
        record.param, record.data = b.index, _address(b, grad.data_ptr(), record)
        send = lib.push if is_large(b) else lib.push_small
        return send(self._client.handle, ctypes.byref(record))

    def drain(self) -> int:
        """Pushes all pending gradients before the micro-batch ends. Returns the first status that is not 0, or 0."""
        return 0

    def poll(self) -> int:
        """Pushes the pending gradients whose copies are done. Returns the first status that is not 0, or 0."""
        return 0

    def backward_ended(self) -> int:
        """Called after each backward. Returns the first status that is not 0, or 0."""
        return self.poll()

    def forget(self) -> None:
        """Drops the pending gradients of the open micro-batch."""


# ---- the model on a GPU, the daemon in host memory --------------------------------------------------------


class _Pending:
    """A gradient that is being copied into host memory."""

    __slots__ = ("event", "host", "keep", "record")

    def __init__(self, record: Any, keep: Any, host: torch.Tensor, event: Any) -> None:
        self.record, self.keep, self.host, self.event = record, keep, host, event


class _Registered:
    """
    Memory shared with the daemon that is registered with the driver, so that the program does not wait for copies. The
    program waits for copies to and from other memory.
    """

    def __init__(self, client: Client) -> None:
        self._memory, self._addresses = client.memory, dict[int, int]()

    def add(self, kind: int, read_only: bool = False) -> tuple[int, int]:
        """Returns the first address and the address after the last, or (0, 0) if the driver refuses."""
        base, n_bytes = self._memory(kind)
        if not n_bytes or not _cuda.register(base, n_bytes, read_only):
            return 0, 0
        self._addresses[kind] = base
        return base, base + n_bytes

    def remove(self, kind: int) -> None:
        if kind in self._addresses:
            _cuda.unregister(self._addresses.pop(kind))

    def remove_all(self) -> None:
        for kind in list(self._addresses):
            self.remove(kind)


class Offload(InHost):
    has_quick_hook = False

    def __init__(self, client: Client, bound: Sequence[Bound], device: torch.device) -> None:
        super().__init__(client, bound)
        self.device = device
        self._pending: deque[_Pending] = deque()
        self._n_pending_bytes = 0
        self._events: list[Any] = []  # events that are free for the next copies
        self._registered = _Registered(client)
        self._ring = (0, 0)  # first address, and the address after the last; (0, 0): not registered
        self._n_ring_bytes = 0
        self._room = 0  # bytes for pending gradients; 0: the ring holds a whole micro-batch, or is not registered
        self._own: dict[int, torch.Tensor] = {}  # pinned memory for gradients that get no place in the ring
        self._published: list[torch.Tensor] = []
        self._copies = _cuda.CopyStream(device)
        self._weights = _cuda.CopyStream(device)
        self._copied = [_cuda.Event() for _ in bound]  # per parameter: its last copy to the GPU
        self._refreshed = _cuda.Event()  # all copies to the GPU
        self._ordered_on: int | None = None  # the stream that waits for copies by itself; None: the copies are done

    def describe(self) -> str:
        holds = "holds all" if self._ring_holds_all() else "holds a part"
        return f", the ring of {self._n_ring_bytes / 2**20:.1f} MiB {holds} of the GPU's gradients"

    def initial(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.cpu()

    def _ring_holds_all(self) -> bool:
        """True if the ring holds a whole micro-batch, except second gradients, which are pushed at once."""
        return sum(b.n_grad_bytes for b in self._bound if b.trainable) <= self._n_ring_bytes

    def attach(self) -> None:
        self._ring = self._registered.add(_lib.MEMORY_RING)
        self._n_ring_bytes = self._client.memory(_lib.MEMORY_RING)[1]
        self._room = 0 if self._ring_holds_all() or self._ring == (0, 0) else self._n_ring_bytes // 2
        self._registered.add(_lib.MEMORY_WEIGHTS, read_only=True)
        self._client.before_close.append(self._registered.remove_all)
        for b in self._bound:
            if b.param.device.type == "meta":
                attach(b, b.view(torch.empty(b.param.numel(), dtype=b.param.dtype, device=self.device)))
            b.address = b.param.data_ptr()
        self._published = [published(self._client, b) for b in self._bound]
        self._renew_all()

    def detach(self, b: Bound) -> None:
        """Does nothing: the parameters of Offload are always in this process's own memory."""

    # ---- weights -------------------------------------------------------------------------------------

    def weights_change(self) -> None:
        self._weights.follow()

    @torch.no_grad()
    def refresh(self, bound: Sequence[Bound]) -> None:
        for b in bound:
            if b.n_bytes:
                self._weights.to_gpu(b.param.detach(), self._published[b.index], self._copied[b.index])
        self._weights.mark(self._refreshed)

    def order(self, bound: Sequence[Bound]) -> None:
        for b in bound:
            self._copied[b.index].order(self.device)
        self._ordered_on = _cuda.stream(self.device)

    def other_stream(self) -> None:
        """If the current stream is not the one that waits, waits for the copies. Then they are done for all streams."""
        if self._ordered_on is not None and self._ordered_on != _cuda.stream(self.device):
            self._refreshed.wait()
            self._ordered_on = None

    def _renew_all(self) -> None:
        self.weights_change()
        self.refresh(self._bound)
        self.order(self._bound)

    def before_step(self) -> None:
        """Waits for the copies of the last step's weights, whose source this step writes. Usually they are done."""
        self._refreshed.wait()

    def window_opens(self) -> None:
        """Unregisters the weights: a driver registers pages, and the window maps other pages at this address."""
        self._refreshed.wait()
        self._registered.remove(_lib.MEMORY_WEIGHTS)

    @torch.no_grad()
    def window_closes(self) -> None:
        for b in self._bound:
            if b.n_bytes and self._client.rank == 0:
                self._published[b.index].copy_(b.param.detach())

    def window_closed(self) -> None:
        self._registered.add(_lib.MEMORY_WEIGHTS, read_only=True)
        self._renew_all()

    # ---- gradients -----------------------------------------------------------------------------------

    def push(self, b: Bound, record: Any, grad: torch.Tensor, keep: Any, again: bool) -> int:
        # A second gradient is pushed at once, because the next gradient may get its place.
        status = self.drain() if again else self._make_room(b.n_grad_bytes)
        status = status or self._take(b, grad, record, keep)
        return status or (self.drain() if again else 0)

    def _take(self, b: Bound, grad: torch.Tensor, record: Any, keep: Any) -> int:
        if not b.n_grad_bytes:
            return self._send(_copy_of(record, b.index, ctypes.addressof(record)))
        address = 0
        if b.index not in self._own:
            address = lib.slot(self._client.handle, b.index)
            if not address:
                return int(lib.error(self._client.handle).contents.status)
        if self._ring[0] <= address < self._ring[1]:
            host, copy = _memory_at(address, b.n_grad_bytes, grad.dtype), _copy_of(record, b.index, None)
        else:  # pushed in parts, or no room in the ring, so zerod_push() copies it once more
            if b.index not in self._own:
                self._own[b.index] = _cuda.pinned(grad)
            host = self._own[b.index]
            copy = _copy_of(record, b.index, host.data_ptr())
        event = self._events.pop() if self._events else _cuda.Event()
        self._copies.to_host(host, grad.view(-1), event)
        self._pending.append(_Pending(copy, keep, host, event))
        self._n_pending_bytes += b.n_grad_bytes
        return 0

    def _make_room(self, n_bytes: int) -> int:
        """Pushes pending gradients while they fill half the ring, because the daemon frees a slot only after its
        push."""
        status = self.poll()
        while not status and self._pending and self._room and self._n_pending_bytes + n_bytes > self._room:
            status = self._push_first()
        return status

    def _push_first(self) -> int:
        first = self._pending.popleft()
        first.event.wait()
        self._events.append(first.event)
        self._n_pending_bytes -= first.host.numel() * first.host.element_size()
        return self._send(first.record)

    def _send(self, record: Any) -> int:
        return lib.push(self._client.handle, ctypes.byref(record))

    def poll(self) -> int:
        status = 0
        while self._pending and not status and self._pending[0].event.is_done:
            status = self._push_first()
        return status

    def backward_ended(self) -> int:
        self._copies.join()  # a program that has kept a gradient may write to it now
        return self.poll()

    def drain(self) -> int:
        status = 0
        while self._pending and not status:
            status = self._push_first()
        return status

    def forget(self) -> None:
        """Waits for all pending copies, because later gradients get the slots that they write, and drops them."""
        for pending in self._pending:
            pending.event.wait()
            self._events.append(pending.event)
        self._pending.clear()
        self._n_pending_bytes = 0


# ---- both on a GPU ----------------------------------------------------------------------------------------


class OnGpu(InHost):
    has_quick_hook = False

    def __init__(self, client: Client, bound: Sequence[Bound], device: torch.device) -> None:
        super().__init__(client, bound)
        self.device = device
        self._published: list[torch.Tensor] = []
        client.current_stream = functools.partial(_cuda.stream, device)

    def context(self) -> contextlib.AbstractContextManager[None]:
        return _cuda.using(self.device)

    def _weights(self, b: Bound) -> torch.Tensor:
        if not b.n_bytes:
            return torch.empty(b.shape, dtype=b.param.dtype, device=self.device)
        with self._client.gathered([b.index]):  # torch asks the driver about this address, so it must be mapped
            memory = _cuda.tensor_at(self._client.weight_address(b.index), b.n_bytes, self.device, self._client)
        return b.view(memory.view(b.param.dtype))

    def attach(self) -> None:
        self._published = [self._weights(b) for b in self._bound]
        self._point_at_published()

    def _point_at_published(self) -> None:
        for b, weights in zip(self._bound, self._published, strict=True):
            attach(b, weights)

    def read_frozen(self, index: int, n_bytes: int) -> torch.Tensor:
        with self._client.gathered([index]):
            return _cuda.tensor_at(self._client.weight_address(index), n_bytes, self.device, self._client).cpu()

    def initial(self, flat: torch.Tensor) -> torch.Tensor:
        return _cuda.on_gpu(flat, self.device)

    def before_step(self) -> None:
        _cuda.synchronize(self.device)

    def push(self, b: Bound, record: Any, grad: torch.Tensor, keep: Any, again: bool) -> int:
        # No push_small(): a push of any size only orders the copy, but a push in parts may wait for room.
        self._client.set_stream(_cuda.stream(self.device))
        record.param, record.data = b.index, _address(b, _cuda.address_of(grad), record)
        return lib.push(self._client.handle, ctypes.byref(record))

    # ---- windows: the daemon's is in host memory -------------------------------------------------------

    def _in_window(self, b: Bound) -> torch.Tensor:
        if not b.n_bytes:
            return torch.empty(b.shape, dtype=b.param.dtype)
        return b.view(_memory_at(self._client.window_address(b.index), b.n_bytes, b.param.dtype))

    @torch.no_grad()
    def window_opened(self) -> None:
        """In stage 3 the model is in host memory inside a window, because all of it may not fit on the GPU."""
        for b in self._bound:
            if self._client.job.stage == 3:
                b.param.data = self._in_window(b)
            else:
                b.param.data = b.param.detach().clone(memory_format=torch.preserve_format)

    @torch.no_grad()
    def window_closes(self) -> None:
        for b in self._bound if self._client.rank == 0 else ():
            window = self._in_window(b)
            if window.data_ptr() != b.param.data_ptr():  # they are equal in stage 3, unless .data was replaced
                window.copy_(b.param.detach())

    def window_closed(self) -> None:
        self._point_at_published()


# ---- choice of the place -----------------------------------------------------------------------------------


def is_on_gpu(model: torch.nn.Module) -> bool:
    """True if the model's trained parameters are on a GPU."""
    return any(p.requires_grad and p.device.type != "meta" and _cuda.is_on_gpu(p) for p in model.parameters())


def _device_of(bound: Sequence[Bound]) -> torch.device | None:
    """The device of all parameters that are not on the meta device. None: host memory."""
    real = [b for b in bound if b.param.device.type != "meta"]
    for b in real:
        first, other = _cuda.device_of(real[0].param), _cuda.device_of(b.param)
        if other != first:
            raise ValueError(
                f"{b.name} is on {other}, and {real[0].name} is on {first}: a rank's model lies on one device; "
                f"model.to({str(first)!r}) before zerod.Optimizer(model)"
            )
    return _cuda.device_of(real[0].param) if real and _cuda.is_on_gpu(real[0].param) else None


def place(client: Client, bound: Sequence[Bound]) -> InHost:
    device = _device_of(bound)
    if client.job.cuda and device is None and any(b.param.device.type != "meta" for b in bound):
        raise ValueError(
            f"{bound[0].name} is in host memory, and the daemon's job is on GPUs (device: cuda): "
            "model.cuda(LOCAL_RANK) before zerod.Optimizer(model)"
        )
    if client.job.cuda:
        return OnGpu(client, bound, device if device is not None else _cuda.current())
    if device is None:
        return InHost(client, bound)
    if client.job.stage == 3:
        raise ValueError(
            f"{bound[0].name} is on {device}, and the daemon's job is of stage 3 in host memory, where weights are "
            "read as they are gathered: model.cpu() before zerod.Optimizer(model), or stage 1 or 2"
        )
    return Offload(client, bound, device)
