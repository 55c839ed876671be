# SPDX-License-Identifier: Apache-2.0
"""A transformer of GPT-2's shape with random weights, and real text to train it on. All sides use both."""

import math
import pathlib
import re

import torch
from torch import nn
from torch.nn import functional

TEXTS = pathlib.Path("/usr/share/common-licenses")  # exists on every Debian
SMALL = {"layers": 12, "heads": 12, "width": 768, "vocabulary": 50257, "positions": 1024}  # 124 M parameters


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.fc_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, length, width = x.shape
        heads = self.attn(self.ln_1(x)).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attn_proj(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.fc_proj(functional.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """A model without dropout, so that all sides compute equal results, which can be compared."""

    def __init__(self, layers, heads, width, vocabulary, positions):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * layers) if "_proj." in name else 1))
            elif name.endswith(".bias"):
                nn.init.zeros_(p)

    def forward(self, tokens):
        """The loss of predicting each token from those before it."""
        x = self.wte(tokens[:, :-1]) + self.wpe.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


def tokens_of_texts(vocabulary):
    """Splits texts into words and the characters between words. Numbers both in the order of their first appearance."""
    text = "".join(p.read_text(errors="replace") for p in sorted(TEXTS.iterdir()) if not p.is_symlink())
    numbers = {}
    return torch.tensor([numbers.setdefault(word, len(numbers)) % vocabulary for word in re.findall(r"\w+|\W", text)])


class Batches:
    """Returns the next piece of the text at each call. No two ranks get the same piece."""

    def __init__(self, vocabulary, rank, world, batch, length):
        self.tokens = tokens_of_texts(vocabulary)
        self.rank, self.world, self.batch, self.length, self.served = rank, world, batch, length, 0

    def next(self):
        rows = []
        for i in range(self.batch):
            piece = (self.served * self.world + self.rank) * self.batch + i
            start = piece * self.length % (len(self.tokens) - self.length - 1)
            rows.append(self.tokens[start : start + self.length + 1])
        self.served += 1
        return torch.stack(rows)
