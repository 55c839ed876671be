# SPDX-License-Identifier: Apache-2.0
"""
Decides how a process continues that has closed its optimizer and attaches again: k-fold, sweeps, a cell of a notebook
that runs twice, layers that are thawed in mid-run. The daemon holds the run that all ranks have left. The run continues
with the same model: the same module, the same trained parameters, and the weights that close() gave back. With any
other model a new run begins, as with torch's optimizers. If the program names runs, the name decides.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from . import binding
from .own import is_plain

_SAMPLE = 1024  # elements of each parameter that are compared


class Attach(enum.Enum):
    """The kind of an attach."""

    FIRST = enum.auto()  # the first attach of this process
    AGAIN = enum.auto()  # this process continues the run that it has left
    ANEW = enum.auto()  # this process begins another run


@dataclasses.dataclass
class _Left:
    """A run that this process has left."""

    model: weakref.ref[nn.Module]
    layout: Any
    weights: list[tuple[int, int, int]]
    run_id: bytes
    optimizer: str


_left: dict[tuple[bytes, int], _Left] = {}  # by socket and rank


def layout_of(model: nn.Module, groups: Iterable[Any]) -> Any:
    """
    The properties that determine the run's layout in the daemon. groups: the argument of zerod.Optimizer, or its
    param_groups.
    """
    placed: dict[int, tuple[int, Any]] = {}
    loose = []
    for i, group in enumerate(groups):
        if isinstance(group, dict):
            placed.update((id(p), (i, group.get("use_muon"))) for p in map(_param, _listed(group)))
        else:
            loose.append(_param(group))
    placed.update((id(p), (0, None)) for p in loose)
    params = tuple(
        (name, tuple(p.shape), p.dtype, binding.grad_dtype(p), p.requires_grad and placed.get(id(p)))
        for name, p in model.named_parameters()
    )
    return params, sum(b.numel() * b.element_size() for b in model.buffers())


def _listed(group: dict[str, Any]) -> list[Any]:
    """The parameters of a group. An iterator can be read only once, so a list replaces it in the group, as in torch."""
    params = group.get("params", ())
    if not isinstance(params, torch.Tensor | list | tuple):
        params = group["params"] = list(params)
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _param(entry: Any) -> Any:
    return entry[1] if isinstance(entry, tuple) else entry


@torch.no_grad()
def _weights(model: nn.Module) -> list[tuple[int, int, int]]:
    """
    Values that show whether the program has changed the weights. A sample shows changes in place that torch does not
    count, such as those of param.data, because a model that is initialised again differs everywhere.
    """
    result = []
    for param in model.parameters():
        if not is_plain(param):  # frozen: own.py compares it over the ranks
            continue
        flat = param.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].cpu().contiguous()
        result.append((param.data_ptr(), param._version, zlib.crc32(binding.copy_bytes(sample))))
    return result


def note_left(path: bytes, rank: int, model: nn.Module, layout: Any, run_id: bytes, optimizer: str) -> None:
    """
    Notes that this process has left the run, and that the model has its weights. layout: layout_of() when the run was
    formed.
    """
    weights = _weights(model) if rank == 0 else []
    _left[path, rank] = _Left(weakref.ref(model), layout, weights, run_id, optimizer)


def find(
    path: bytes, rank: int, model: nn.Module, groups: Iterable[Any], run_id: str | None, optimizer: str | None
) -> Attach:
    """
    The kind of this attach. groups, run_id, optimizer: the program's arguments. Only rank 0's weights count, as in each
    new run.
    """
    left = _left.get((path, rank))
    if left is None:
        return Attach.FIRST
    if layout_of(model, groups) != left.layout or optimizer not in (None, left.optimizer):
        return Attach.ANEW
    if run_id is not None:
        return Attach.AGAIN if run_id.encode() == left.run_id else Attach.ANEW
    is_same = left.model() is model and (rank != 0 or _weights(model) == left.weights)
    return Attach.AGAIN if is_same else Attach.ANEW
