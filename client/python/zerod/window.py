# SPDX-License-Identifier: Apache-2.0
"""Reading and writing weights outside of the step: zerod.writable() and zerod.gathered()."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from .registry import OpenOptimizer, owners_of


def _owner(model: nn.Module | torch.Tensor) -> OpenOptimizer:
    owners = owners_of(model.parameters() if isinstance(model, nn.Module) else [model])
    if len(owners) != 1:
        raise ValueError("not a model, part of a model or parameter of an open zerod.Optimizer")
    return owners[0]


@contextlib.contextmanager
def writable(model: nn.Module) -> Iterator[None]:
    """
    A context manager, for use between two steps. Inside, the program may write to the weights of the model. A
    collective: all ranks call it. At the end all ranks get rank 0's weights; moments stay. If the body raises, all
    weights stay as they were.

        with zerod.writable(model), torch.no_grad():
            model.merge_adapter()
    """
    with _owner(model).window():
        yield


def sync_buffers(model: nn.Module) -> None:
    """
    Sends rank 0's buffers, such as the running statistics of BatchNorm, to all ranks, between two steps. A collective:
    all ranks call it. If the ranks have a process group, each step sends them, too.
    """
    _owner(model).sync_buffers()


@contextlib.contextmanager
def gathered(model: nn.Module | nn.Parameter) -> Iterator[None]:
    """
    A context manager for stage 3. Inside, the program can read the weights of a model, of a part of it or one
    parameter. Gathered weights count against stage3_max_live_parameters. Not a collective; no effect in stages 1 and 2.
    """
    owner = _owner(model)
    params = list(model.parameters()) if isinstance(model, nn.Module) else [model]
    with owner.gathered(params):
        yield
