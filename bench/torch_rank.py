# SPDX-License-Identifier: Apache-2.0
"""
One process of torch's own chains: gradients of all ranks are summed over gloo and the optimizer is applied.
The faster forms are taken: no clipping, no check for finite values, no division by the number of ranks, gradients
that are one flat tensor from the beginning, fused kernels.

    torch_rank.py RANK WORLD ELEMS PARAMS THREADS STORE

Prints the names of its chains; then runs the chain named by each line of standard input and prints when it
began and ended (CLOCK_MONOTONIC, ns).
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

BUCKET_ELEMS = 25 * (1 << 20) // 4  # as DistributedDataParallel's


class Chains:
    def __init__(self, rank, world, elems, n_params):
        self.rank, self.world = rank, world
        self.flat = torch.zeros(elems)
        self.grad = torch.zeros(elems)
        self.noise = torch.rand(1 << 20) - 0.5
        self.params = [torch.nn.Parameter(p) for p in self.flat.chunk(n_params)]
        for param, grad in zip(self.params, self.grad.chunk(n_params)):
            param.grad = grad
        self.make = {"fused AdamW": self.make_alone} if world == 1 else {
            "all_reduce + fused AdamW": self.make_all_reduce,
            "reduce_scatter_tensor + sharded fused AdamW + all_gather_into_tensor": self.make_sharded,
            "ZeroRedundancyOptimizer with fused AdamW": self.make_zero,
        }
        self.run = {name: make() for name, make in self.make.items()}

    def refill(self, iteration):
        for i, block in enumerate(self.grad.split(self.noise.numel())):
            scale = 1e-3 * (1 + (iteration * 64 + self.rank + i * 7) % 101)
            torch.mul(self.noise[: block.numel()], scale, out=block)

    def all_reduce(self):
        for work in [dist.all_reduce(part, async_op=True) for part in self.grad.split(BUCKET_ELEMS)]:
            work.wait()

    def make_alone(self):
        return torch.optim.AdamW(self.params, lr=1e-3, fused=True).step

    def make_all_reduce(self):
        optimizer = torch.optim.AdamW(self.params, lr=1e-3, fused=True)

        def run():
            self.all_reduce()
            optimizer.step()

        return run

    def make_sharded(self):
        shard = torch.nn.Parameter(self.flat.chunk(self.world)[self.rank])
        shard.grad = torch.zeros_like(shard)
        optimizer = torch.optim.AdamW([shard], lr=1e-3, fused=True)

        def run():
            dist.reduce_scatter_tensor(shard.grad, self.grad)
            optimizer.step()
            dist.all_gather_into_tensor(self.flat, shard.data)

        return run

    def make_zero(self):
        optimizer = ZeroRedundancyOptimizer(self.params, torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3,
                                            fused=True)
        for param, grad in zip(self.params, self.grad.chunk(len(self.params))):
            param.grad = grad

        def run():
            self.all_reduce()
            optimizer.step()

        return run


def main():
    rank, world, elems, n_params, threads = map(int, sys.argv[1:6])
    torch.set_num_threads(threads)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[6]}", rank=rank, world_size=world)
    chains = Chains(rank, world, elems, n_params)
    out = os.fdopen(os.dup(1), "w")
    print(json.dumps(list(chains.run)), file=out, flush=True)
    for iteration, line in enumerate(sys.stdin):
        run = chains.run[line.strip()]
        chains.refill(iteration)
        if world > 1:
            dist.barrier()
        start = time.monotonic_ns()
        run()
        print(json.dumps({"start": start, "done": time.monotonic_ns()}), file=out, flush=True)


main()
