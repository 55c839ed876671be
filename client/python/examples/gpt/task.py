# SPDX-License-Identifier: Apache-2.0
"""The task: the model's shape and the text, as trainer and reference read them from the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from model import GPT
from torch import Tensor


def add_options(parser: argparse.ArgumentParser) -> None:
    task = parser.add_argument_group("what is trained (the default model has 10.8 million parameters)")
    task.add_argument("--steps", type=int, default=300, metavar="N", help="optimizer steps (%(default)s)")
    task.add_argument("--layers", type=int, default=6, metavar="N", help="(%(default)s)")
    task.add_argument("--width", type=int, default=384, metavar="N", help="(%(default)s)")
    task.add_argument("--heads", type=int, default=6, metavar="N", help="(%(default)s)")
    task.add_argument("--context", type=int, default=64, metavar="N", help="length of a sequence (%(default)s)")
    task.add_argument("--batch", type=int, default=4, metavar="N", help="sequences per rank and step (%(default)s)")
    task.add_argument("--seed", type=int, default=1, metavar="N", help="of weights and batches (%(default)s)")
    task.add_argument(
        "--text",
        type=Path,
        default="/usr/share/common-licenses",
        metavar="FOLDER",
        help="its files are the text (%(default)s)",
    )


def make_model(args: argparse.Namespace) -> GPT:
    torch.manual_seed(args.seed)
    return GPT(layers=args.layers, width=args.width, heads=args.heads, context=args.context)


class Text:
    """The regular files of a folder, one after the other. A token is a byte, so no vocabulary is needed."""

    def __init__(self, args: argparse.Namespace) -> None:
        files = sorted(path for path in args.text.iterdir() if path.is_file() and not path.is_symlink())
        whole = b"".join(path.read_bytes() for path in files)
        if len(whole) <= args.context:
            raise SystemExit(f"{args.text} holds no text, or too little")
        self.bytes = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
        self.seed, self.context, self.batch_size = args.seed, args.context, args.batch

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets. They depend only on step and rank, so a restarted rank continues with them."""
        random = torch.Generator().manual_seed((self.seed << 40) + (step << 8) + rank)
        starts = torch.randint(len(self.bytes) - self.context, (self.batch_size, 1), generator=random)
        window = self.bytes[starts + torch.arange(self.context + 1)].long()
        return window[:, :-1], window[:, 1:]
