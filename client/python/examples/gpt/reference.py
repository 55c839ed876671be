# SPDX-License-Identifier: Apache-2.0
"""
The training of --world-size ranks of train.py in one process, without zerod: the gradients of all ranks are computed
here, one rank after the other, and added and applied as docs/numerics.md says, by tests/golden/golden.py. The weights
that it writes must be equal to the ranks', byte for byte.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import torch
from task import Text, add_options, make_model
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tests/golden"))
from golden import adam, exact_sum, runs, tree


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The training of several ranks in one process, without zerod.")
    add_options(parser)
    adamw = parser.add_argument_group("AdamW, and clipping")
    adamw.add_argument("--lr-file", type=Path, required=True, metavar="FILE", help="learning rates, one a step")
    adamw.add_argument("--beta1", type=float, default=0.9)
    adamw.add_argument("--beta2", type=float, default=0.999)
    adamw.add_argument("--eps", type=float, default=1e-8)
    adamw.add_argument("--weight-decay", type=float, default=0.01)
    adamw.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradient; 0: any")
    parser.add_argument("--world-size", type=int, required=True, metavar="N")
    parser.add_argument("--dump", type=Path, required=True, metavar="FILE", help="write the final weights")
    parser.add_argument("--log-every", type=int, default=10, metavar="N")
    return parser.parse_args()


class Reference:
    def __init__(self, args: argparse.Namespace, model: nn.Module) -> None:
        self.args, self.params = args, list(model.parameters())
        # Views: the model computes with the values that are written here.
        self.weights = [p.detach().view(-1).numpy() for p in self.params]
        self.moments = [(np.zeros_like(w), np.zeros_like(w)) for w in self.weights]

    def take_gradients(self) -> list[np.ndarray]:
        """Every parameter has a gradient, because the backward of this model reaches all of them."""
        taken = [p.grad.view(-1).numpy() for p in self.params]
        for p in self.params:
            p.grad = None
        return taken

    def step(self, number: int, lr: float, by_rank: list[list[np.ndarray]]) -> float:
        """Return: the norm of the gradient."""
        a, by_param = self.args, zip(*by_rank, strict=True)
        sums = [np.zeros_like(w) + tree(list(grads)) for w, grads in zip(self.weights, by_param, strict=True)]
        norm = math.sqrt(exact_sum(np.concatenate([runs(acc) for acc in sums]))) / a.world_size
        coef = min(1.0, a.clip / (norm + 1e-6)) if a.clip > 0 else 1.0
        scale = np.float32(coef / a.world_size)
        options = {
            "lr": lr,
            "betas": (a.beta1, a.beta2),
            "eps": a.eps,
            "weight_decay": a.weight_decay,
            "adam_w_mode": True,
        }
        for i, (weight, acc) in enumerate(zip(self.weights, sums, strict=True)):
            weight[:], *self.moments[i] = adam(weight, *self.moments[i], acc * scale, number + 1, options)
        return norm


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # as in the ranks: another number would add in another order
    model, text = make_model(args), Text(args)
    reference = Reference(args, model)
    rates = [float(line) for line in args.lr_file.read_text(encoding="utf-8").split()]
    if len(rates) != args.steps:
        raise SystemExit(f"{args.lr_file} has {len(rates)} learning rates for {args.steps} steps")
    for step, lr in enumerate(rates):
        by_rank = []
        for rank in range(args.world_size):
            loss = model(*text.batch(step, rank))
            loss.backward()
            by_rank.append(reference.take_gradients())
        norm = reference.step(step, lr, by_rank)
        if (step + 1) % args.log_every == 0:
            print(f"step {step + 1:4}/{args.steps}  loss {loss.item():.3f}  grad norm {norm:.3f}", flush=True)
    args.dump.write_bytes(b"".join(weight.tobytes() for weight in reference.weights))


main()
