# SPDX-License-Identifier: Apache-2.0
"""
Chooses the parameters that Muon updates. AdamW updates the job's other parameters.

A parameter group's use_muon decides which optimizer updates it. True means Muon, and is allowed only for trainable
matrices. False means AdamW. With None, the default, the model decides: Muon for the matrices of its hidden layers,
AdamW for vectors, embeddings and the output layer. An output layer is recognised if it is tied to an embedding, or if a
Transformers model names it (get_output_embeddings).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from .binding import Bound


def _outer(model: nn.Module) -> set[int]:
    """The ids of embeddings' and output layers' weights."""
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    outer = {id(p) for m in embeddings for p in m.parameters()}
    for module in model.modules():
        name = getattr(module, "get_output_embeddings", None)
        head = None
        with contextlib.suppress(NotImplementedError, AttributeError):  # raised by Transformers' base classes
            head = name() if callable(name) else None
        if isinstance(head, nn.Module) and isinstance(getattr(head, "weight", None), torch.Tensor):
            outer.add(id(head.weight))
    return outer


def choose(model: nn.Module, groups: list[dict[str, Any]], bound: list[Bound]) -> None:
    """Sets Bound.muon. Raises ValueError for a group with use_muon=True that has anything but contiguous matrices."""
    outer = _outer(model)
    for b in bound:
        wanted = groups[b.group].get("use_muon") if b.trainable else False
        is_matrix = b.param.dim() == 2 and b.param.is_contiguous()
        if wanted and not is_matrix:
            raise ValueError(
                f"{b.name} of shape {tuple(b.param.shape)} is in a group with use_muon=True: Muon is for contiguous "
                "matrices; put it into a group with use_muon=False, which AdamW updates"
            )
        b.muon = bool(wanted) if wanted is not None else is_matrix and id(b.param) not in outer
