# SPDX-License-Identifier: Apache-2.0
"""The models of the programs: a few blocks between an embedding and a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

N_IN, WIDTH = 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x))


class Net(nn.Module):
    """forward(x, reentrant): None runs the blocks directly; otherwise each is checkpointed with use_reentrant."""

    def __init__(self, n_blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(N_IN, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(n_blocks))
        self.head = nn.Linear(WIDTH, 1)

    def trunk(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        x = self.embed(x)
        for block in self.h:
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return x

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        return self.head(self.trunk(x, reentrant))


def names(*prefixes: str) -> tuple[str, ...]:
    """Return: the names of the weights and biases of these linear layers."""
    return tuple(f"{p}.{kind}" for p in prefixes for kind in ("weight", "bias"))


TRUNK = names("embed", "h.0.fc", "h.1.fc")
BLOCKS = names("h.0.fc", "h.1.fc")
EVERYTHING = TRUNK + names("head")
