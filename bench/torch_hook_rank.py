# SPDX-License-Identifier: Apache-2.0
"""
One rank of the benchmark torch-hook.

    torch_hook_rank.py SIDE SHAPE PROBES RANK WORLD RENDEZVOUS

RENDEZVOUS: a file, or zerod's socket. Prints the number of parameters. For each line of standard input, makes a forward
and a backward and prints how long they took (ns). If PROBES is 1, also prints for each parameter the time from a probe
hook before zerod's hook to a probe hook after it. The probe hooks have a cost, too.
"""

import json
import os
import sys
import time

import gpt2
import torch
from torch import nn

LR = 1e-6  # small, so that the weights hardly change in many iterations


class Many(nn.Module):
    """A model with many small parameters and next to no arithmetic."""

    def __init__(self, params, elems):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(elems) for _ in range(params))
        self.all = list(self.weights)  # faster to iterate over than the ParameterList

    def forward(self, x):
        total = x
        for weight in self.all:
            total = torch.addcmul(total, weight, x)
        return total.sum()


class Numbers:
    """Random inputs, different for each rank and call."""

    def __init__(self, elems, rank):
        self.elems, self.generator = elems, torch.Generator().manual_seed(rank)

    def next(self):
        return torch.randn(self.elems, generator=self.generator)


def transformer(rank, world, length, **shape):
    return gpt2.GPT2(**shape), gpt2.Batches(shape["vocabulary"], rank, world, 1, length)


def many(rank, world, params, elems):
    return Many(params, elems), Numbers(elems, rank)


# The twin of "30 M" has as many modules and parameters, but next to no elements in them.
SHAPES = {
    "30 M": (transformer, {"length": 128, "layers": 6, "heads": 8, "width": 512, "vocabulary": 20000,
                           "positions": 256}),
    "twin": (transformer, {"length": 8, "layers": 6, "heads": 1, "width": 8, "vocabulary": 16, "positions": 16}),
    "many": (many, {"params": 10000, "elems": 64}),
    "some": (many, {"params": 100, "elems": 64}),  # for tests
}


# The function of each side returns what computes a loss, and what steps and clears gradients.


def alone(model, rank, world, rendezvous):
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def empty_hooks(model, rank, world, rendezvous):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: None)
    return alone(model, rank, world, rendezvous)


def ddp(model, rank, world, rendezvous):
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    return (nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True),
            torch.optim.SGD(model.parameters(), lr=LR))


def with_zerod(model, rank, world, rendezvous):
    import zerod

    return model, zerod.Optimizer(model, socket=rendezvous, rank=rank, lr=LR)


SIDES = {"model alone": alone, "empty hooks": empty_hooks, "DDP": ddp, "zerod": with_zerod}


class Probes:
    """Probe hooks before and after the hooks of a side."""

    def __init__(self):
        self.before, self.after = [], []

    def register(self, model, where):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda _: where.append(time.perf_counter_ns()))

    def take(self):
        took = [b - a for a, b in zip(self.before, self.after, strict=True)]
        self.before.clear()
        self.after.clear()
        return took


def main():
    side, shape, probed, rank, world, rendezvous = sys.argv[1:7]
    probed, rank, world = probed == "1", int(rank), int(world)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, numbers = SHAPES[shape]
    model, inputs = make(rank, world, **numbers)
    probes = Probes()
    if probed:
        probes.register(model, probes.before)
    forward, optimizer = SIDES[side](model, rank, world, rendezvous)
    if probed:
        probes.register(model, probes.after)
    print(len(list(model.parameters())), file=out, flush=True)
    for _ in sys.stdin:
        x = inputs.next()
        start = time.perf_counter_ns()
        loss = forward(x)
        middle = time.perf_counter_ns()
        loss.backward()
        end = time.perf_counter_ns()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"forward": middle - start, "backward": end - middle, "hooks": probes.take()}), file=out,
              flush=True)
    if side == "zerod":
        optimizer.close()


if __name__ == "__main__":
    main()
