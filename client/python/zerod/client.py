# SPDX-License-Identifier: Apache-2.0
"""
One connection to the daemon: libzerod's calls with Python's values, and its errors as exceptions.

The handle is freed when the last reference to the Client is gone. The model's weights refer to it, through weights(),
so they stay readable after the optimizer is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import faulthandler
import json
import os
import signal
import sys
import weakref
from collections.abc import Iterator, Sequence
from ctypes import byref, c_char, c_char_p, c_double, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple

from . import _lib, sites, where
from ._lib import lib
from .errors import CLASSES, ConnectionLost, Error, GradientFault, StepAborted
from .metrics import Waits


class Position(NamedTuple):
    """The step and micro-batch that a rank must do next; both count from 0."""

    step: int
    micro_batch: int
    attempt: int
    n_windows: int


class StepResult(NamedTuple):
    """The result of a step; see struct zerod_step_result."""

    epoch: int
    applied: bool
    grad_norm: float
    loss_scale: float
    lr: float
    n_missing: int


class Declaration(NamedTuple):
    """One entry of the manifest. init: address of the initial weights, or 0. grad_dtype None: equal to dtype."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    group: int
    trainable: bool
    init: int
    grad_dtype: int | None = None
    muon: bool = False


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


def fault_from(fault: Any, aborted: bool = False) -> GradientFault:
    """The exception for a struct zerod_error."""
    kind = StepAborted if aborted else CLASSES.get(fault.code, GradientFault)
    return kind(
        _text(fault.text),
        code=fault.code,
        cause_class=_text(fault.cause_class),
        rank=fault.rank if fault.rank >= 0 else None,
        step=fault.step if fault.step >= 0 else None,
        micro_batch=fault.micro_batch if fault.micro_batch >= 0 else None,
        params=[_text(fault.params[i]) for i in range(min(fault.n_params, 5))],
        n_params=fault.n_params,
        fields=[(_text(fault.fields[i].label), _text(fault.fields[i].text)) for i in range(fault.n_fields)],
    )


def _interrupt_check() -> Any:
    """
    The function that libzerod asks, while a call waits, whether Ctrl-C was pressed. It must not run Python code: a
    pending handler would raise in the callback, where no code could catch it. check() runs the handler afterwards.
    """
    occurred = ctypes.pythonapi.PyOS_InterruptOccurred
    occurred.restype, occurred.argtypes = ctypes.c_int, [c_void_p]
    return _lib.INTERRUPTED(occurred)


_interrupted = _interrupt_check()
_open_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _program() -> str:
    """The names of the program and its libraries. The daemon uses them to write fixes that fit the libraries."""
    version = sys.modules["torch"].__version__
    callers = [name for name in ("swift", "transformers", "lightning", "fastNLP") if name in sys.modules]
    return " ".join([os.path.basename(sys.argv[0]) or "python", "zerod", f"torch {version}", *callers])


def _is_alone() -> bool:
    """True if no launcher has numbered this process, so that it is the only rank."""
    return "RANK" not in os.environ and "WORLD_SIZE" not in os.environ


def rank_of(rank: int | None) -> int:
    if rank is None and _is_alone():
        return 0
    text = os.environ.get("RANK", "") if rank is None else str(rank)
    if not text.isdigit():
        what = f"the rank is {text!r}, not a whole number from 0" if text else "RANK is not set, or empty"
        raise ValueError(f"{what}: start the program with zerodrun or torchrun, which set RANK, or pass rank=")
    return int(text)


def _check_world(size: int, rank: int | None) -> None:
    world = os.environ.get("WORLD_SIZE", "")
    if rank is None and _is_alone() and size > 1:
        raise ValueError(
            f"RANK is not set, so this process is alone, and the daemon's job has {size} ranks: plain python and "
            f"`accelerate launch --cpu` start one process; zerodrun -n {size} -- python {os.path.basename(sys.argv[0])}, "
            "or torchrun, starts all of them"
        )
    if world.isdigit() and int(world) != size:
        raise ValueError(
            f"WORLD_SIZE is {world}, and the daemon's job has {size} (world.size): start as many ranks as the job has, "
            "or configure as many as you start"
        )


def path_of(socket: str | None) -> bytes:
    path = socket or os.environ.get("ZEROD_SOCKET", "")
    if not path:
        raise ValueError(
            "no socket: zerodrun -n N -- python TRAIN.py starts a daemon and the ranks; or start a daemon with "
            "zerodrun --serve --config FILE, and set ZEROD_SOCKET to its socket, or pass socket="
        )
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(
            f"the second argument is the path of the daemon's socket, not {path!r}: name the others, as in "
            "zerod.Optimizer(model, lr=1e-3)"
        )
    return os.fsencode(path)


class Client:
    def __init__(
        self,
        socket: str | None,
        rank: int | None,
        run_id: str | None,
        timeout: float | None,
        on_duplicate: str | None,
        optimizer: str | None = None,
        momentum: float = 0.0,
        flags: int = 0,
    ) -> None:
        self._handle = c_void_p()
        self._is_kept = False  # the handle stays until the process exits
        self._pid = os.getpid()
        self.rank = rank_of(rank)
        self.left = False
        self.result: StepResult | None = None  # of the last step
        self.waits = Waits()
        self.before_close: list[Any] = []  # called when the handle is about to be freed
        self.current_stream: Any = None  # for a job on GPUs: returns the CUstream of the calling thread
        self._stream = 0  # the stream that was set last; 0: the default stream
        if on_duplicate not in _lib.ON_DUPLICATE:
            raise ValueError(f"on_duplicate is {on_duplicate!r}; it may be 'reject', 'accumulate' or 'abort_step'")
        if not faulthandler.is_enabled():
            with contextlib.suppress(OSError, AttributeError, RuntimeError):  # raised if stderr is not a file
                faulthandler.enable()  # prints the Python frames when a published weight is written to (E1106)
        options = _lib.Options(
            socket=path_of(socket),
            rank=self.rank,
            run_id=run_id.encode() if run_id else None,
            timeout_ms=int(timeout * 1000) if timeout else 0,
            on_duplicate=_lib.ON_DUPLICATE[on_duplicate],
            flags=flags,
            client=_program().encode(),
            interrupted=_interrupted,
            optimizer=optimizer.encode() if optimizer else None,
            momentum=momentum,
        )
        status = lib.connect(byref(self._handle), byref(options))
        self.job = _lib.Job()
        try:
            self.check(status)
            lib.job(self._handle, byref(self.job))
            _check_world(int(self.job.world_size), rank)
            where.watch(self._handle)
        except BaseException:
            self.close()
            raise
        _open_clients.add(self)

    # ---- life ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees the handle, which unmaps weights()."""
        if self._is_kept:
            return
        handle, self._handle = self._handle, c_void_p()
        if handle and lib is not None:
            for call in self.before_close if self.is_mine else ():
                call()
            self.before_close = []
            lib.close(handle)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()

    def leave(self) -> None:
        """Tells the daemon that this rank has finished. This process may attach again: see again.py."""
        if not self.left:
            self.left = True
            self.check(lib.leave(self._handle))

    def leave_at_exit(self) -> None:
        """Leaves when the process exits with status 0. Calls may be made until then; the handle is not freed."""
        if self._handle and not self.left:
            self._is_kept = True
            lib.leave_at_exit(self._handle)

    @property
    def is_mine(self) -> bool:
        """False in a forked child, such as a worker of a DataLoader."""
        return self._pid == os.getpid()

    @property
    def handle(self) -> c_void_p:
        return self._handle

    # ---- errors ----------------------------------------------------------------------------------------

    def check(self, status: int) -> int:
        """Raises the exception for the status that a call returned; returns 0 or _lib.RESUMED."""
        if status in (_lib.OK, _lib.RESUMED):
            return status
        fault = lib.error(self._handle).contents
        if status in (_lib.REFUSED, _lib.ABORTED):
            if fault.code == 0:
                raise Error(_text(fault.text))
            raise fault_from(fault, status == _lib.ABORTED)
        if status == -errno.EINTR:
            signal.raise_signal(signal.SIGINT)  # runs its handler; Python's own handler raises KeyboardInterrupt
        if status == -errno.ECHILD:
            raise ConnectionLost(
                "this is a forked child: its copy of the connection to zerod is closed; only the process "
                "that made zerod.Optimizer can use it"
            )
        if status == -errno.ETIMEDOUT:
            raise TimeoutError(_text(fault.text))
        if status in (-errno.EINVAL, -errno.ENODEV, -errno.ENOMEM):
            raise Error(_text(fault.text))
        raise ConnectionLost(_text(fault.text))

    # ---- forming ---------------------------------------------------------------------------------------

    def form(self, declarations: Sequence[Declaration]) -> bool:
        """Declares all parameters and waits for the other ranks. Returns True if the job resumed committed state."""
        array = (_lib.Param * len(declarations))()
        names = [d.name.encode() for d in declarations]
        shapes = [(c_uint64 * len(d.shape))(*d.shape) for d in declarations]
        for p, d, name, shape in zip(array, declarations, names, shapes, strict=True):
            p.name, p.name_len, p.dtype, p.grad_dtype = name, len(name), d.dtype, d.dtype if d.grad_dtype is None else d.grad_dtype
            p.ndim, p.shape = len(d.shape), ctypes.cast(shape, ctypes.POINTER(c_uint64))
            p.group, p.trainable, p.muon, p.init = d.group, d.trainable, d.muon, d.init or None
        self.check(lib.declare(self._handle, array, len(declarations)))
        return self.check(lib.form(self._handle)) == _lib.RESUMED

    @property
    def loss_scale(self) -> float:
        return float(lib.loss_scale(self._handle))

    @property
    def position(self) -> Position:
        at = lib.epoch(self._handle)
        return Position(at.step, at.micro_batch, at.attempt, at.n_windows)

    @property
    def user_state(self) -> bytes | None:
        """This rank's user state, as it was last committed before the job was formed."""
        data, size = c_void_p(), c_size_t()
        self.check(lib.user_state(self._handle, byref(data), byref(size)))
        return ctypes.string_at(data, size.value) if data else None

    def weight_address(self, index: int) -> int:
        address = lib.weight(self._handle, index)
        if not address:
            raise ConnectionLost(_text(lib.error(self._handle).contents.text))
        return address

    def window_address(self, index: int) -> int:
        """The address of a parameter inside the open write window."""
        address = lib.window(self._handle, index)
        if not address:
            raise Error("no write window is open")
        return address

    def memory(self, kind: int) -> tuple[int, int]:
        """Address and size of memory shared with the daemon; (0, 0) if there is no such host memory."""
        base, n_bytes = c_void_p(), c_size_t()
        self.check(lib.memory(self._handle, kind, byref(base), byref(n_bytes)))
        return base.value or 0, n_bytes.value

    @property
    def stream(self) -> int:
        """The CUstream of the calling thread; 0 in host memory."""
        return self.current_stream() if self.current_stream else 0

    def set_stream(self, stream: int) -> None:
        """In a job on GPUs, sets the CUstream that computes gradients, and that reads weights until they are
        released."""
        if stream != self._stream:
            self.check(lib.set_stream(self._handle, stream))
            self._stream = stream

    def weights(self, index: int, n_bytes: int) -> Any:
        """The published bytes of a parameter as a buffer that keeps this client alive. Read-only memory."""
        buffer = (c_char * n_bytes).from_address(self.weight_address(index))
        buffer.client = self
        return buffer

    # ---- backward and step -----------------------------------------------------------------------------

    def begin_backward(self, n_forwards: int, n_backwards: int) -> None:
        self.check(lib.begin_backward(self._handle, byref(_lib.Backward(n_forwards, n_backwards))))

    def expect(self, hypers: list[_lib.Hyper]) -> bool:
        """
        Says with which hyperparameters of the groups the coming step will be asked for. Return: False if the daemon does
        not update before it is asked, so that it need not be said again.
        """
        return self.check(lib.expect(self._handle, (_lib.Hyper * len(hypers))(*hypers), len(hypers))) == 0

    def flush(self) -> None:
        self.check(lib.flush(self._handle))

    def end_backward(self, blob: bytes | None) -> None:
        self.check(self.waits.during(lib.end_backward, self._handle, blob, len(blob or b"")))

    def abandon_backward(self, why: str) -> None:
        self.check(lib.abandon_backward(self._handle, why.encode()[:1000]))

    def step(self, args: _lib.StepArgs) -> StepResult:
        result = _lib.StepResult()
        self.check(self.waits.during(lib.step, self._handle, byref(args), byref(result)))
        self.result = StepResult(
            result.epoch, result.applied, result.grad_norm, result.loss_scale, result.lr, result.n_missing
        )
        return self.result

    def wait(self, ids: Any, n: int) -> None:
        """With overlap_update: waits until these parameters have the weights of the last step; ids None: all."""
        self.check(self.waits.during(lib.wait, self._handle, ids, n))

    def is_written(self, index: int) -> bool:
        """Would wait() for this parameter return at once?"""
        return bool(lib.is_written(self._handle, index))

    def grad_norm(self) -> float:
        norm = c_double()
        self.check(lib.grad_norm(self._handle, byref(norm)))
        return norm.value

    def status(self, timeout: float) -> dict[str, Any] | None:
        """The daemon's status, over a separate connection; None if no answer has come within timeout seconds."""
        text = c_char_p()
        if not self._handle or lib.status(self._handle, max(int(timeout * 1000), 1), byref(text)) != 0:
            return None
        return json.loads(text.value or b"{}")

    def evidence(self, evidence: _lib.Evidence) -> None:
        self.check(lib.evidence(self._handle, byref(evidence)))

    def report(self, code: int, params: Sequence[int], detail: str) -> None:
        """Reports a fault that only this process sees. The next answered call raises it."""
        self.check(lib.report(self._handle, code, (c_uint * len(params))(*params), len(params), detail.encode()[:1000]))

    def abort_step(self, why: str) -> None:
        self.check(lib.abort_step(self._handle, why.encode()[:1000]))

    def clear_fault(self) -> None:
        self.check(lib.clear_fault(self._handle))

    # ---- weights and state -----------------------------------------------------------------------------

    def gather(self, ids: Any, n: int) -> None:
        """Gathers parameters. ids: an array of c_uint. In stages 1 and 2, neither gather() nor release() has an
        effect."""
        self.check(lib.gather(self._handle, ids, n))

    def release(self, ids: Any, n: int, stream: int | None = None) -> None:
        """Releases parameters. stream: the stream that read them last; None: the calling thread's stream."""
        self.set_stream(self.stream if stream is None else stream)
        self.check(lib.release(self._handle, ids, n))

    def prefetch(self, ids: Any, n: int) -> None:
        """Tells the daemon that these parameters will be gathered soon. Gathers none of them."""
        self.check(lib.prefetch(self._handle, ids, n))

    @contextlib.contextmanager
    def gathered(self, indices: Sequence[int]) -> Iterator[None]:
        ids = (c_uint * len(indices))(*indices)
        self.gather(ids, len(indices))
        try:
            yield
        finally:
            self.release(ids, len(indices))

    @property
    def has_written(self) -> bool:
        """True if the program may have written to published weights outside of a window."""
        return bool(lib.has_written(self._handle))

    def check_weights(self) -> None:
        """Raises E1106 if the program has written to published weights and changed them."""
        if self.has_written:
            self.check(lib.check_weights(self._handle, b"seen at " + sites.user_site()))

    def write_begin(self) -> None:
        self.check(lib.write_begin(self._handle))

    def write_end(self) -> None:
        self.check(lib.write_end(self._handle))

    def write_forget(self) -> None:
        self.check(lib.write_forget(self._handle))

    def save_checkpoint(self, wait: bool) -> None:
        self.check(lib.save_checkpoint(self._handle, wait))

    def read_state(self, index: int, which: int, address: int) -> None:
        self.check(lib.read_state(self._handle, index, which, address))

    def read_number(self, index: int, which: int) -> float:
        number = c_double()
        self.check(lib.read_state(self._handle, index, which, ctypes.addressof(number)))
        return number.value

    def write_state(self, index: int, which: int, address: int) -> None:
        self.check(lib.write_state(self._handle, index, which, address))

    def write_number(self, index: int, which: int, value: float) -> None:
        number = c_double(value)
        self.check(lib.write_state(self._handle, index, which, ctypes.addressof(number)))


@atexit.register
def _leave_at_exit() -> None:
    """
    A rank whose program exits with status 0 leaves the job; after any other status it may be started again. Python does
    not know the status in an exit handler, but libzerod knows it later. Weights stay mapped, because other exit
    handlers may read them.
    """
    for client in list(_open_clients):
        if client.is_mine:
            client.leave_at_exit()
