# SPDX-License-Identifier: Apache-2.0
"""
A stand-in for zerod._cuda on machines without a GPU. Call install() before an optimizer is made. Every tensor of the
program counts as a tensor on a GPU, but is in ordinary memory.

Each stream is a thread: one for copies to the GPU, one for copies to the host. Copies take a random time (seeded). The
memory that a copy writes is full of NaNs until the copy is done. Copies to and from unregistered host memory block, as
in CUDA. `problems` collects three kinds of errors: host memory was written before a copy was done, host memory changed
while a copy read it, or a gradient changed before it was copied.
"""

import atexit
import contextlib
import queue
import random
import sys
import threading
import time

import torch

MAX_DELAY_S = 0.004

# Copies to the host, blocking copies among them, copies to the GPU, and the program's waits for unfinished events.
counts = {"late": 0, "waited": 0, "back": 0, "blocked": 0}
problems: list[str] = []
refuses_to_register = False
elsewhere: dict[int, torch.device] = {}  # data_ptr() of tensors on another device than the usual one -> that device
registered: list[tuple[int, int, bool]] = []

_random = random.Random(1)
_n_under_way = 0  # copies


class _Stream:
    """A thread that does work in order."""

    def __init__(self):
        self._work = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        global _n_under_way
        while True:
            delay, call = self._work.get()
            time.sleep(delay)
            call()
            _n_under_way -= delay > 0

    def copy(self, call):
        global _n_under_way
        _n_under_way += 1
        self._work.put((MAX_DELAY_S * (1 + _random.random()) / 2, call))

    def mark(self, done):
        self._work.put((0, done.set))

    def wait(self):
        done = threading.Event()
        self.mark(done)
        done.wait()


_streams: list[_Stream] = []  # the first is the current stream


def install():
    import zerod.binding
    import zerod.placement

    _streams[:] = [_Stream()]
    atexit.register(synchronize, None)  # a copy that ends while the interpreter does would abort the process
    zerod.placement._cuda = zerod.binding._cuda = sys.modules[__name__]


def _is_registered(tensor, write):
    first = tensor.data_ptr()
    end = first + tensor.numel() * tensor.element_size()
    return any(a <= first and end <= b and not (write and read_only) for a, b, read_only in registered)


def _bytes(tensor):
    return tensor.view(-1).view(torch.uint8)


# ---- functions of zerod._cuda ---------------------------------------------------------------------------------


def is_on_gpu(tensor):
    return True


def device_of(tensor):
    return elsewhere.get(tensor.data_ptr(), torch.device("cpu"))


def current():
    return torch.device("cpu")


def using(device):
    return contextlib.nullcontext()


def synchronize(device):
    for each in _streams:
        each.wait()


def stream(device):
    return 0


class CopyStream:
    def __init__(self, device):
        self._stream = _Stream()
        _streams.append(self._stream)

    def to_host(self, host, source, done):
        """Earlier work of the current stream is done, so nothing waits for it. A copy keeps its source alive."""
        counts["late"] += 1
        assert host.is_contiguous()
        assert not _is_registered(host, write=False) or _is_registered(host, write=True), "registered for reading only"
        taken = source.detach().clone().view(-1)
        if not _is_registered(host, write=True):
            counts["waited"] += 1
            self._stream.wait()
            host.view(-1).copy_(taken)
            done.record_on(self._stream)
            return
        _bytes(host).fill_(0xFF)

        def end(source=source):
            if not bool((_bytes(host) == 0xFF).all()):
                problems.append("host memory was written before the copy into it was done")
            if not torch.equal(_bytes_of_any(source), _bytes(taken)):
                problems.append("a gradient changed before it was copied")
            host.view(-1).copy_(taken)

        self._stream.copy(end)
        done.record_on(self._stream)

    def follow(self):
        """Earlier work of the current stream is done, so nothing waits for it."""

    def to_gpu(self, target, host, done):
        """Until the copy is done, the target is full of NaNs, which a program reads that does not wait."""
        counts["back"] += 1
        if not _is_registered(host, write=False):
            self._stream.wait()
            target.copy_(host)
            done.record_on(self._stream)
            return
        taken = host.clone()
        target.fill_(float("nan"))  # and the program sees the write at once, as it does with CUDA
        late = target.data  # without the version that autograd sees

        def end():
            if not torch.equal(_bytes_of_any(host), _bytes_of_any(taken)):
                problems.append("host memory changed before the copy from it was done")
            late.copy_(taken)

        self._stream.copy(end)
        done.record_on(self._stream)

    def mark(self, done):
        done.record_on(self._stream)

    def join(self):
        """Later work of the current stream runs at once, so the copies must end now."""
        self._stream.wait()


def _bytes_of_any(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


class Event:
    def __init__(self):
        self._done = threading.Event()
        self._done.set()

    def record_on(self, stream):
        self._done = threading.Event()
        stream.mark(self._done)

    @property
    def is_done(self):
        return self._done.is_set()

    def wait(self):
        counts["blocked"] += not self._done.is_set()
        self._done.wait()

    def order(self, device):
        """Later work of the current stream runs at once, so the copy must end now."""
        self._done.wait()


def register(address, n_bytes, read_only=False):
    if refuses_to_register:
        return False
    registered.append((address, address + n_bytes, read_only))
    return True


def unregister(address):
    if _n_under_way:
        problems.append("memory was unregistered while copies were under way")
    registered.remove(next(r for r in registered if r[0] == address))


def pinned(tensor):
    host = torch.empty(tensor.numel(), dtype=tensor.dtype)
    registered.append((host.data_ptr(), host.data_ptr() + tensor.numel() * tensor.element_size(), False))
    return host
