# SPDX-License-Identifier: Apache-2.0
"""
The user state of a rank: its random number generators and its place in the data, which it needs besides the weights to
continue exactly where it was. The daemon keeps it with the rank's last micro-batch or step, and returns it to the
rank's next incarnation.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
import weakref
from typing import Any, Protocol

import torch
from torch import nn

from . import binding
from .optimizer import Optimizer

MAX_BYTES = 64 * 1024  # of a blob: the daemon's limit


class Stateful(Protocol):
    """An object that can be stored: a sampler, a loader, the trainer's own counters."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


class Buffers:
    """See buffers()."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> bytes:
        return binding.copy_bytes(binding.pack_buffers(self._model, saved=True))

    def load_state_dict(self, state: bytes) -> None:
        size = binding.pack_buffers(self._model, saved=True).numel()
        if len(state) != size:
            raise ValueError(f"{len(state)} bytes of buffers were stored, this model has {size}")
        if size:
            binding.unpack_buffers(self._model, torch.frombuffer(bytearray(state), dtype=torch.uint8), saved=True)


def buffers(model: nn.Module) -> Stateful:
    """
    For user_state(): the buffers that model.state_dict() has, such as the running statistics of BatchNorm. Each rank
    has its own buffers; a rank that is started again continues with them only if it stores them.
    """
    return Buffers(model)


def _generators() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": numpy.random.get_state() if numpy else None,
    }


def _set_generators(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if states["numpy"] is not None:
        import numpy

        numpy.random.set_state(states["numpy"])


class UserState:
    """See user_state()."""

    def __init__(self, opt: Optimizer, objects: dict[str, Stateful]) -> None:
        self._objects = objects
        for name, thing in objects.items():
            if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
                raise TypeError(f"{name} is a {type(thing).__name__}: it needs state_dict() and load_state_dict()")
        self._opt = weakref.ref(opt)

    def pack(self) -> bytes:
        """Returns the present state of the generators and of all objects."""
        file = io.BytesIO()
        states = {"generators": _generators(), "objects": {name: o.state_dict() for name, o in self._objects.items()}}
        pickle.dump(states, file, pickle.HIGHEST_PROTOCOL)
        blob = file.getvalue()
        if len(blob) > MAX_BYTES:
            sizes = {name: len(pickle.dumps(s, pickle.HIGHEST_PROTOCOL)) for name, s in states["objects"].items()}
            raise ValueError(
                f"user state of {len(blob)} bytes, at most {MAX_BYTES} are kept: "
                f"{', '.join(f'{name} {size}' for name, size in sizes.items())}; store positions, not data"
            )
        return blob

    def unpack(self, blob: bytes) -> None:
        """Restores a packed state. Unpickling is safe, because only this rank can have stored this blob."""
        states = pickle.loads(blob)
        missing = set(states["objects"]) ^ set(self._objects)
        if missing:
            raise ValueError(
                f"the stored user state has {sorted(states['objects'])}, this program gives {sorted(self._objects)}"
            )
        for name, thing in self._objects.items():
            thing.load_state_dict(states["objects"][name])
        _set_generators(states["generators"])


def user_state(opt: Optimizer, **objects: Stateful) -> bool:
    """
    From now on every micro-batch and step of this rank stores the random number generators of random, numpy and torch,
    and objects with state_dict() and load_state_dict(), at most 64 KiB in all. They are stored as they are at the end
    of the backward, and when step() is called. So draw a batch right before its forward.

    If the daemon has a state of an earlier incarnation of this rank, this call restores it. Returns whether it did.
    """
    state = UserState(opt, objects)
    opt.set_user_state(state)
    blob = opt.stored_user_state
    if blob:
        state.unpack(blob)
        opt._unread.read()  # the restored state has the place in the data
    return bool(blob)
