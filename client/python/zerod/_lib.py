# SPDX-License-Identifier: Apache-2.0
"""
libzerod through ctypes: structures and prototypes of zerod/client.h, and of python-hook.h and watch.h in
client/lib, and nothing else.

The library is the one next to this file (from the wheel), or the system's (from Debian's packages). The environment
variable ZEROD_LIBRARY names another library.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_long,
    c_size_t,
    c_uint,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
    py_object,
)
from pathlib import Path

OK, RESUMED, REFUSED, ABORTED = range(4)

DTYPES = {"torch.float32": 0, "torch.bfloat16": 1, "torch.float16": 2}
ON_DUPLICATE = {None: 0, "reject": 1, "accumulate": 2, "abort_step": 3}

PUSH_NESTED, PUSH_HOOK_TWICE, PUSH_NEW_FORWARD, PUSH_SITE_IS_BACKWARD, PUSH_MORE = 1, 2, 4, 8, 16

MEMORY_RING, MEMORY_WEIGHTS = range(2)

MASTER, EXP_AVG, EXP_AVG_SQ, GRAD_NORM, STEP_COUNT = range(5)

# Bits of Job.configured and Hyper.given, by torch's names.
CONFIGURED = {"lr": 2, "betas": 4, "eps": 8, "weight_decay": 16, "momentum": 32, "dampening": 64, "nesterov": 128,
              "lr_decay": 256, "ns_coefficients": 1024, "ns_steps": 2048, "adjust_lr_fn": 4096}  # fmt: skip
CONFIGURED_OPTIMIZER, CONFIGURED_SCHEDULER, CONFIGURED_MAX_LR = 1, 512, 8192
CONFIGURED_LEAVE_CONTINUES = 16384

OVERLAP_UPDATE, COPIES_FROM_GPU, AGAIN, ANEW = 2, 4, 8, 16  # of Options.flags

INTERRUPTED = ctypes.CFUNCTYPE(c_int, c_void_p)


class Options(ctypes.Structure):
    _fields_ = [
        ("socket", c_char_p), ("rank", c_int), ("run_id", c_char_p), ("timeout_ms", c_int), ("on_duplicate", c_int),
        ("flags", c_uint), ("client", c_char_p), ("interrupted", INTERRUPTED), ("interrupted_arg", c_void_p),
        ("optimizer", c_char_p), ("momentum", c_double),
    ]  # fmt: skip


class Param(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p), ("name_len", c_size_t), ("dtype", c_int), ("grad_dtype", c_int), ("ndim", c_uint),
        ("shape", POINTER(c_uint64)), ("group", c_uint), ("trainable", c_bool), ("muon", c_bool), ("init", c_void_p),
    ]  # fmt: skip


class Position(ctypes.Structure):
    _fields_ = [("step", c_uint64), ("micro_batch", c_uint32), ("attempt", c_uint32), ("n_windows", c_uint32)]


class Backward(ctypes.Structure):
    _fields_ = [("n_forwards", c_uint64), ("n_backwards", c_uint64)]


class Push(ctypes.Structure):
    _fields_ = [
        ("param", c_uint), ("data", c_void_p), ("ordinal", c_uint32), ("task", c_uint64), ("depth", c_uint32),
        ("segment", c_char_p), ("call", c_uint32), ("site", c_char_p), ("flags", c_uint), ("n_bytes", c_size_t),
        ("dtype_plus_one", c_int),
    ]  # fmt: skip


class Hooks(ctypes.Structure):
    """struct zerod_python_hooks"""

    _fields_ = [
        ("client", c_void_p), ("push", Push), ("task", c_int64), ("pushed", POINTER(c_uint8)), ("none", py_object),
        ("runtime_error", py_object), ("grad", py_object), ("dtype", py_object), ("current_task", py_object),
        ("is_contiguous", py_object), ("data_ptr", py_object), ("failed", py_object),
    ]  # fmt: skip


class Hook(ctypes.Structure):
    """struct zerod_python_hook"""

    _fields_ = [
        ("owner", py_object), ("dtype", py_object), ("careful", py_object), ("param", c_uint), ("is_large", c_bool),
    ]  # fmt: skip


class Python(ctypes.Structure):
    """struct zerod_python"""

    _fields_ = [("asked", c_int), ("dump", c_int), ("signal", c_int), ("main_thread", c_uint64), ("own_thread", c_uint64)]


class Hyper(ctypes.Structure):
    _fields_ = [
        (name, c_double)
        for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening", "lr_decay")
    ] + [
        ("nesterov", c_bool), ("ns_a", c_double), ("ns_b", c_double), ("ns_c", c_double), ("ns_steps", c_uint),
        ("match_rms_adamw", c_bool), ("given", c_uint),
    ]  # fmt: skip


class StepArgs(ctypes.Structure):
    _fields_ = [
        ("groups", POINTER(Hyper)), ("n_groups", c_uint), ("max_norm", POINTER(c_double)), ("loss_scale", c_double),
        ("found_inf", c_bool), ("blob", c_void_p), ("blob_len", c_size_t),
    ]  # fmt: skip


class StepResult(ctypes.Structure):
    _fields_ = [
        ("epoch", c_uint64), ("applied", c_bool), ("grad_norm", c_double), ("loss_scale", c_double), ("lr", c_double),
        ("n_missing", c_uint),
    ]  # fmt: skip


class Job(ctypes.Structure):
    _fields_ = [
        ("world_size", c_uint), ("stage", c_uint), ("private_weights", c_bool), ("on_duplicate", c_int),
        ("run_id", c_char_p), ("optimizer", c_char_p), ("hyper", Hyper), ("has_scheduler", c_bool),
        ("max_norm", c_double), ("mean", c_bool), ("fp16", c_bool), ("accumulation", c_uint),
        ("max_live_elems", c_uint64), ("cuda", c_bool), ("configured", c_uint),
        ("configured_stage", c_uint),
    ]  # fmt: skip


class Evidence(ctypes.Structure):
    _fields_ = [
        ("exception", c_char_p), ("raised_at", c_char_p), ("swallowed_by", c_char_p), ("in_forward", c_bool),
        ("requires_grad_changed", c_bool), ("dead_segment", c_char_p), ("n_dead_segments", c_uint), ("site", c_char_p),
        ("n_forwards", c_uint64), ("n_backwards", c_uint64), ("not_called", POINTER(c_uint)),
        ("n_not_called", c_size_t),
        ("called", POINTER(c_uint)), ("n_called", c_size_t),
    ]  # fmt: skip


class Observation(ctypes.Structure):
    _fields_ = [
        ("what", c_int), ("client", c_char_p), ("rank", c_int64), ("step", c_int64), ("names", POINTER(c_char_p)),
        ("n_names", c_size_t), ("params", POINTER(c_uint)), ("n_params", c_size_t), ("first", Push), ("second", Push),
        ("world_size", c_uint), ("same_on_all_ranks", c_bool), ("same_every_step", c_bool), ("n_steps_seen", c_uint64),
        ("silent", c_bool), ("evidence", POINTER(Evidence)),
    ]  # fmt: skip


class Field(ctypes.Structure):
    _fields_ = [("label", c_char_p), ("text", c_char_p)]


class Fault(ctypes.Structure):
    """struct zerod_error"""

    _fields_ = [
        ("status", c_int), ("code", c_int), ("text", c_char_p), ("cause_class", c_char_p), ("rank", c_long),
        ("step", c_int64), ("micro_batch", c_long), ("params", POINTER(c_char_p)), ("n_params", c_uint),
        ("fields", POINTER(Field)), ("n_fields", c_uint),
    ]  # fmt: skip


# Calls that may wait for the daemon; they release the interpreter lock.
_WAITING = {
    "zerod_connect": (c_int, POINTER(c_void_p), POINTER(Options)),
    "zerod_declare": (c_int, c_void_p, POINTER(Param), c_size_t),
    "zerod_form": (c_int, c_void_p),
    "zerod_set_stream": (c_int, c_void_p, c_void_p),
    "zerod_begin_backward": (c_int, c_void_p, POINTER(Backward)),
    "zerod_expect": (c_int, c_void_p, POINTER(Hyper), c_uint),
    "zerod_slot": (c_void_p, c_void_p, c_uint),
    "zerod_push": (c_int, c_void_p, c_void_p),
    "zerod_flush": (c_int, c_void_p),
    "zerod_end_backward": (c_int, c_void_p, c_char_p, c_size_t),
    "zerod_abandon_backward": (c_int, c_void_p, c_char_p),
    "zerod_step": (c_int, c_void_p, POINTER(StepArgs), POINTER(StepResult)),
    "zerod_wait": (c_int, c_void_p, POINTER(c_uint), c_size_t),
    "zerod_grad_norm": (c_int, c_void_p, POINTER(c_double)),
    "zerod_gather": (c_int, c_void_p, POINTER(c_uint), c_size_t),
    "zerod_release": (c_int, c_void_p, POINTER(c_uint), c_size_t),
    "zerod_prefetch": (c_int, c_void_p, POINTER(c_uint), c_size_t),
    "zerod_check_weights": (c_int, c_void_p, c_char_p),
    "zerod_status": (c_int, c_void_p, c_int, POINTER(c_char_p)),
    "zerod_save_checkpoint": (c_int, c_void_p, c_bool),
    "zerod_write_begin": (c_int, c_void_p),
    "zerod_write_end": (c_int, c_void_p),
    "zerod_write_forget": (c_int, c_void_p),
    "zerod_read_state": (c_int, c_void_p, c_uint, c_int, c_void_p),
    "zerod_write_state": (c_int, c_void_p, c_uint, c_int, c_void_p),
    "zerod_evidence": (c_int, c_void_p, POINTER(Evidence)),
    "zerod_report": (c_int, c_void_p, c_int, POINTER(c_uint), c_size_t, c_char_p),
    "zerod_abort_step": (c_int, c_void_p, c_char_p),
    "zerod_clear_fault": (c_int, c_void_p),
    "zerod_leave": (c_int, c_void_p),
    "zerod_close": (None, c_void_p),
}

# Calls that never wait.
_IMMEDIATE = {
    "zerod_job": (c_int, c_void_p, POINTER(Job)),
    "zerod_leave_at_exit": (c_int, c_void_p),
    "zerod_epoch": (Position, c_void_p),
    "zerod_loss_scale": (c_double, c_void_p),
    "zerod_is_written": (c_int, c_void_p, c_uint),
    "zerod_user_state": (c_int, c_void_p, POINTER(c_void_p), POINTER(c_size_t)),
    "zerod_weight": (c_void_p, c_void_p, c_uint),
    "zerod_window": (c_void_p, c_void_p, c_uint),
    "zerod_has_written": (c_bool, c_void_p),
    "zerod_memory": (c_int, c_void_p, c_int, POINTER(c_void_p), POINTER(c_size_t)),
    "zerod_error": (POINTER(Fault), c_void_p),
    "zerod_version": (c_char_p,),
    "zerod_explain": (c_int, POINTER(Observation), POINTER(POINTER(Fault))),
    "zerod_explain_free": (None, POINTER(Fault)),
    "zerod_watch": (c_int, c_void_p, POINTER(Python)),
    "zerod_unused_signal": (c_int,),
    "zerod_has_python": (c_bool,),
    "zerod_python_hook": (py_object, POINTER(Hooks), POINTER(Hook)),
}


def _load() -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    beside = Path(__file__).with_name("libzerod.so")
    path = os.environ.get("ZEROD_LIBRARY") or (str(beside) if beside.exists() else "libzerod.so.0")
    try:
        return ctypes.CDLL(path), ctypes.PyDLL(path)
    except OSError as e:
        raise ImportError(
            f"libzerod cannot be loaded: {e}\n"
            "  expected       the wheel's own library, the system's libzerod.so.0, or the one that ZEROD_LIBRARY names\n"
            "  fix            pip install zerod's wheel, apt install libzerod0, or ZEROD_LIBRARY=/path/to/libzerod.so"
        ) from None


def _prototype(library: ctypes.CDLL, name: str, prototype: tuple) -> ctypes._CFuncPtr:
    function = library[name]
    function.restype, function.argtypes = prototype[0], list(prototype[1:])
    return function


class _Library:
    """The prototypes above as attributes, without their prefix: lib.step(...)."""

    def __init__(self) -> None:
        waiting, immediate = _load()
        for name, prototype in _WAITING.items():
            setattr(self, name.removeprefix("zerod_"), _prototype(waiting, name, prototype))
        for name, prototype in _IMMEDIATE.items():
            setattr(self, name.removeprefix("zerod_"), _prototype(immediate, name, prototype))
        # push_small() does not release the interpreter lock, and does not check its arguments, a c_void_p and a
        # byref(). Each of the two would take longer than a small push.
        self.push_small = _prototype(immediate, "zerod_push", _WAITING["zerod_push"])
        self.push_small.argtypes = None


lib = _Library()
