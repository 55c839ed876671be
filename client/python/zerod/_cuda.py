# SPDX-License-Identifier: Apache-2.0
"""
All calls of torch.cuda and of the driver that this package makes, and nothing else. So the other modules can be tested
without a GPU, with a stand-in for this module (tests/torch/programs/late_cuda.py). A model in host memory needs none of
these calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from ctypes import c_size_t, c_uint, c_void_p
from typing import Any

import torch

_PORTABLE, _READ_ONLY = 1, 8  # of cuMemHostRegister


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def device_of(tensor: torch.Tensor) -> torch.device:
    return tensor.device


@contextlib.contextmanager
def using(device: torch.device) -> Any:
    """A context manager. Inside, the device and its context are current in the calling thread."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        yield


def current() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def synchronize(device: torch.device) -> None:
    torch.cuda.synchronize(device)


def stream(device: torch.device) -> int:
    """The CUstream that gets the work of this thread."""
    return torch.cuda.current_stream(device).cuda_stream


def on_gpu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Moves a flat contiguous tensor to device memory, so that address_of() is a device address."""
    return tensor.to(device)


def address_of(tensor: torch.Tensor) -> int:
    """The device address of a contiguous tensor on a GPU; 0 if it is empty."""
    return tensor.data_ptr()


class Event:
    """A point in a stream: done when the stream has done all work before it."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def record_on(self, stream: Any) -> None:
        self._event.record(stream)

    @property
    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def order(self, device: torch.device) -> None:
        """Makes later work of the current stream wait for it; does not wait."""
        torch.cuda.current_stream(device).wait_event(self._event)


class CopyStream:
    """A stream for copies in one direction, so that they take no time from the stream on which the program computes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def to_host(self, host: torch.Tensor, source: torch.Tensor, done: Event) -> None:
        """
        Copies `source`, after the current stream has computed it; does not wait if the host memory is registered or
        pinned. done: the Event of the copy. torch does not reuse the memory of `source` before that.
        """
        self.follow()
        with torch.cuda.stream(self._stream):
            host.copy_(source, non_blocking=True)
        source.record_stream(self._stream)
        done.record_on(self._stream)

    def follow(self) -> None:
        """Makes later copies wait for all earlier work of the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def to_gpu(self, target: torch.Tensor, host: torch.Tensor, done: Event) -> None:
        """
        Copies; does not wait if the host memory is registered or pinned. done: the Event of the copy. `host` must not
        change before that.
        """
        with torch.cuda.stream(self._stream):
            target.copy_(host, non_blocking=True)
        done.record_on(self._stream)

    def mark(self, done: Event) -> None:
        """done: the Event of all copies so far."""
        done.record_on(self._stream)

    def join(self) -> None:
        """Makes later work of the current stream wait for all copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


@functools.cache
def _driver() -> Any:
    """The CUDA driver; None if torch's GPUs have another driver (ROCm)."""
    try:
        return ctypes.CDLL(os.environ.get("ZEROD_LIBCUDA", "libcuda.so.1"))
    except OSError:
        return None


def register(address: int, n_bytes: int, read_only: bool = False) -> bool:
    """
    Registers host memory, so that copies do not wait. Returns False if the driver refuses; then copies wait. Calls the
    driver, because a refusal by cudaHostRegister() would stay the thread's last error, which torch would raise at the
    next kernel.
    """
    driver, flags = _driver(), _PORTABLE | (_READ_ONLY if read_only else 0)
    if driver is None:
        return False
    torch.cuda.synchronize()  # Makes a context of this thread, which the driver needs.
    return bool(driver.cuMemHostRegister_v2(c_void_p(address), c_size_t(n_bytes), c_uint(flags)) == 0)


def unregister(address: int) -> None:
    torch.cuda.synchronize()
    _driver().cuMemHostUnregister(c_void_p(address))


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for the elements of a contiguous tensor that is on a GPU."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)


class _Memory:
    """Device memory that others own, in the form that torch.as_tensor() reads. Its tensors keep the owner alive."""

    def __init__(self, address: int, n_bytes: int, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (n_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


def tensor_at(address: int, n_bytes: int, device: torch.device, owner: Any) -> torch.Tensor:
    """The bytes at an address of a device."""
    return torch.as_tensor(_Memory(address, n_bytes, owner), device=device)
