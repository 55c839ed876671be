# SPDX-License-Identifier: Apache-2.0
"""
A side of bench/muon.py.

    muon_rank.py zerod|torch|torch-fp32 SOCKET

For each line of standard input, makes fresh gradients and prints how long step() takes. torch: the optimizer computes
its iterations in bf16. torch-fp32: in fp32, as zerod does.
"""

import json
import os
import sys
import time

import torch

WIDTH, N_LAYERS = 256, 4
SHAPES = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)] * N_LAYERS
SETTINGS = {"lr": 0.02, "weight_decay": 0.1}


def main():
    how, socket = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.matrices = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(s) / WIDTH**0.5) for s in SHAPES)
    if how == "zerod":
        import zerod

        torch.set_num_threads(1)
        opt = zerod.Optimizer(model, socket=socket, rank=0, **SETTINGS)
    else:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        opt = torch.optim.Muon(model.parameters(), **SETTINGS)
    if how == "torch-fp32":
        torch.Tensor.bfloat16 = torch.Tensor.clone
    for _ in sys.stdin:
        sum((p * torch.randn(p.shape)).sum() for p in model.parameters()).backward()
        began = time.monotonic_ns()
        opt.step()
        ms = (time.monotonic_ns() - began) / 1e6
        opt.zero_grad()
        print(json.dumps({"ms": ms}), file=out, flush=True)


if __name__ == "__main__":
    main()
