# SPDX-License-Identifier: Apache-2.0
"""
A rank of bench/overlap_update.py.

    overlap_rank.py FORWARD RANK WORLD SOCKET OVERLAP

FORWARD is compute or wait. compute: this process multiplies the layers. wait: it sleeps 5 ms per layer and leaves the
cores free, as with a GPU. For each line of standard input, calls step(), forward and backward, and prints when each of
them began.
"""

import json
import os
import sys
import time

import torch
import zerod

N_LAYERS, WIDTH, BATCH = 16, 2048, 32
LAYER_SECONDS = 0.005


class Layer(torch.nn.Linear):
    """A layer whose backward computes the gradient in the same way, with and without a computed forward."""

    elsewhere = False

    def forward(self, x):
        if not self.elsewhere:
            return torch.tanh(super().forward(x))
        time.sleep(LAYER_SECONDS)
        return x + self.weight[0] * x


def main():
    forward, rank, world, socket, overlap = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Layer.elsewhere = forward == "wait"
    model = torch.nn.Sequential(*(Layer(WIDTH, WIDTH, bias=False) for _ in range(N_LAYERS)))
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))
    opt = zerod.Optimizer(model, socket=socket, rank=rank, lr=1e-4, overlap_update=overlap == "1")
    model(x).square().mean().backward()
    print("ready", file=out, flush=True)
    for _ in sys.stdin:
        at = {"start": time.monotonic_ns()}
        opt.step()
        at["stepped"] = time.monotonic_ns()
        loss = model(x).square().mean()
        at["forward"] = time.monotonic_ns()
        loss.backward()
        at["done"] = time.monotonic_ns()
        print(json.dumps(at | {"loss": loss.item()}), file=out, flush=True)
    opt.step()
    opt.close()


if __name__ == "__main__":
    main()
