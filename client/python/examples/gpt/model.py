# SPDX-License-Identifier: Apache-2.0
"""A small GPT in plain PyTorch: tokens are bytes, blocks normalise first, nothing is tied, nothing drops out."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # bytes


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n_seqs, length, width = x.shape
        q, k, v = self.qkv(x).view(n_seqs, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(n_seqs, length, width))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Weights that write into the residual stream start smaller, so that its variance does not grow with
                # depth.
                to_stream = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if to_stream else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of predicting each target."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
