# SPDX-License-Identifier: Apache-2.0
"""
A stand-in for zerod._cuda in a job on GPUs, on machines without a GPU. Call install() before an optimizer is made.
ZEROD_LIBCUDA must name libcuda-sim.so, and ZEROD_SIM must contain "open", so that torch computes on the host with
weights in a stand-in device's memory. torch's gradients are copied to such memory, from which zerod copies them, and
stay unchanged.
"""

import contextlib
import ctypes
import os
import sys
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

import torch

streams: list[int] = []  # streams that zerod asked for; each push gets another one than the previous push
_driver = None
_context = c_void_p()
_made: list[c_void_p] = []


def _call(name, *arguments):
    error = getattr(_driver, name)(*arguments)
    assert error == 0, f"{name}: {error}"


def install():
    global _driver
    import zerod.binding
    import zerod.placement

    _driver = ctypes.CDLL(os.environ["ZEROD_LIBCUDA"])
    _call("cuInit", 0)
    device = c_int()
    _call("cuDeviceGet", byref(device), c_int(int(os.environ["LOCAL_RANK"])))
    _call("cuDevicePrimaryCtxRetain", byref(_context), device)
    _call("cuCtxSetCurrent", _context)
    for _ in range(2):
        stream = c_void_p()
        _call("cuStreamCreate", byref(stream), 1)
        _made.append(stream)
    zerod.placement._cuda = zerod.binding._cuda = sys.modules[__name__]


def _memory_at(address, n_bytes, owner=None):
    buffer = (ctypes.c_char * n_bytes).from_address(address)
    buffer.owner = owner
    return torch.frombuffer(buffer, dtype=torch.uint8)


# ---- functions of zerod._cuda ---------------------------------------------------------------------------------


def is_on_gpu(tensor):
    return True


def device_of(tensor):
    return torch.device("cpu")


def current():
    return torch.device("cpu")


def using(device):
    return contextlib.nullcontext()


def synchronize(device):
    for stream in _made:
        _call("cuStreamSynchronize", stream)


def stream(device):
    streams.append(_made[len(streams) % 2].value)
    return streams[-1]


def on_gpu(tensor, device):
    memory = c_uint64()
    n_bytes = tensor.numel() * tensor.element_size()
    if n_bytes == 0:
        return tensor
    _call("cuMemAlloc_v2", byref(memory), c_size_t(n_bytes))
    there = _memory_at(memory.value, n_bytes).view(tensor.dtype)
    there.copy_(tensor.detach().view(-1))
    return there


def address_of(tensor):
    return on_gpu(tensor, None).data_ptr()


def tensor_at(address, n_bytes, device, owner):
    return _memory_at(address, n_bytes, owner)
