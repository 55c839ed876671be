# SPDX-License-Identifier: Apache-2.0
"""
zerod._cuda itself, with a stand-in only for torch.cuda. The driver is libcuda-sim.so, and the runtime keeps its last
error, like CUDA's.
"""

import ctypes
import mmap
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p

import pytest
import torch
from zerod import _cuda

PAGE = mmap.PAGESIZE


class Runtime:
    """
    The parts of torch.cuda that registration needs. torch checks the runtime's last error when it launches a kernel.
    """

    def __init__(self, driver):
        self.driver, self.last_error = driver, 0

    def synchronize(self, device=None):
        context = c_void_p()
        assert self.driver.cuInit(0) == 0
        device = c_int()
        assert self.driver.cuDeviceGet(byref(device), c_int(0)) == 0
        assert self.driver.cuDevicePrimaryCtxRetain(byref(context), device) == 0
        assert self.driver.cuCtxSetCurrent(context) == 0

    def cudart(self):
        return self

    def note(self, error):
        self.last_error = error or self.last_error
        return error

    def cudaHostRegister(self, address, n_bytes, flags):
        self.synchronize()
        return self.note(self.driver.cuMemHostRegister_v2(c_void_p(address), c_size_t(n_bytes), c_uint(flags)))

    def cudaHostUnregister(self, address):
        return self.note(self.driver.cuMemHostUnregister(c_void_p(address)))

    def launch(self):
        error, self.last_error = self.last_error, 0
        assert error == 0, f"CUDA error: {error}"


@pytest.fixture
def runtime(build, monkeypatch):
    library = str(build.path("tests/sim/libcuda-sim.so"))
    monkeypatch.setenv("ZEROD_LIBCUDA", library)
    runtime = Runtime(ctypes.CDLL(library))
    monkeypatch.setattr(torch.cuda, "synchronize", runtime.synchronize)
    monkeypatch.setattr(torch.cuda, "cudart", runtime.cudart)
    return runtime


def test_refused_registration_is_forgotten(runtime):
    """A registration that the driver refuses only costs speed. It must not appear as an error of the next kernel."""
    memory = mmap.mmap(-1, 4 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert _cuda.register(address, 2 * PAGE)
    assert not _cuda.register(address + PAGE, 2 * PAGE), "a part of it is registered already"
    runtime.launch()
    assert _cuda.register(address + 2 * PAGE, PAGE, read_only=True)
    for at in (address, address + 2 * PAGE):
        _cuda.unregister(at)
    assert _cuda.register(address, 4 * PAGE)
    _cuda.unregister(address)
    _cuda.unregister(address)  # refused, because it is no longer registered
    runtime.launch()
