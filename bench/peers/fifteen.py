# SPDX-License-Identifier: Apache-2.0
"""
What somebody writes in an afternoon instead of installing zerod: the gradients of all ranks and the weights lie in
memory that all ranks map. A rank copies its gradient there, waits, adds its part of all gradients, updates that part of
the weights, and waits again. These lines survive nobody's death: the other ranks wait for ever, and the weights are half
updated. Nothing is checked, and nothing is reduced before the backward is over.
"""

import mmap
import os

import torch
from peers import FIFTEEN, FIFTEEN_CLIP
from peers.chain import MAX_NORM, Chain, make_adamw

LINE_WORDS = 8  # each rank's word is alone in its cache line
SPINS = 200  # before others get the processor: there may be more ranks than cores
# Between arrays that are read together: at a multiple of 2^27 bytes from each other they evict each other from the nearest
# cache.
SKEW_ELEMS = 5 << 14
NORM_ELEMS = 1 << 20  # added up at a time: sums of fp32 over more would be too inexact


class Barrier:
    """Each rank writes how often it has come and watches the words of the others. In this order only on x86."""

    def __init__(self, words, rank, world):
        self.words, self.mine, self.came = words, rank * LINE_WORDS, 0
        self.others = [other * LINE_WORDS for other in range(world) if other != rank]

    def wait(self):
        self.came += 1
        self.words[self.mine] = self.came
        for other in self.others:
            spins = 0
            while self.words[other] < self.came:
                spins += 1
                if spins > SPINS:
                    os.sched_yield()


class Shared:
    """What the ranks map, and this rank's part of it; both versions use it in turn."""

    def __init__(self, rank):
        elems = rank.flat.numel()
        stride = elems + SKEW_ELEMS
        self.grads = mapped(rank, "gradients", rank.world * stride).view(rank.world, stride)[:, :elems]
        self.weights = mapped(rank, "weights", elems + 3 * SKEW_ELEMS)[3 * SKEW_ELEMS :]
        self.squares = mapped(rank, "squares", rank.world)
        self.parts = [grad.chunk(rank.world)[rank.rank] for grad in self.grads]
        self.part = torch.nn.Parameter(self.weights.chunk(rank.world)[rank.rank])
        self.part.grad = self.parts[rank.rank]  # where the sum is as well: elsewhere it takes a fifth longer
        self.adamw = make_adamw([self.part], rank.world)
        moments = [torch.zeros(self.part.numel() + skews * SKEW_ELEMS)[skews * SKEW_ELEMS :] for skews in (5, 7)]
        self.adamw.state[self.part] = {"step": torch.zeros(()), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        words = open_shared(rank, "barrier", rank.world * LINE_WORDS * 8)
        self.barrier = Barrier(memoryview(words).cast("Q"), rank.rank, rank.world)


def open_shared(rank, name, n_bytes):
    fd = os.open(f"{rank.shared_folder}/{name}", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, n_bytes)
    return mmap.mmap(fd, n_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def mapped(rank, name, elems):
    return torch.frombuffer(open_shared(rank, name, elems * 4), dtype=torch.float32)


class Fifteen(Chain):
    name = FIFTEEN

    def __init__(self, rank):
        super().__init__(rank)
        if not hasattr(rank, "shared"):
            rank.shared = Shared(rank)
        self.shared = rank.shared

    def weights(self):
        return [self.shared.weights]

    def optimizer(self):
        return self.shared.adamw

    def reset(self):
        super().reset()
        self.shared.barrier.wait()  # all weights are cleared before anybody updates some

    def sum_my_part(self):
        shared = self.shared
        shared.grads[self.rank.rank].copy_(self.rank.grad)
        shared.barrier.wait()
        for rank, part in enumerate(shared.parts):
            if rank != self.rank.rank:
                shared.part.grad.add_(part)

    def run(self):
        self.sum_my_part()
        self.shared.adamw.step()
        self.shared.barrier.wait()


class FifteenClip(Fifteen):
    """A value that is not finite makes the norm so, and the step is left out; whose value it was, nobody knows."""

    name = FIFTEEN_CLIP
    clips = True

    def run(self):
        shared = self.shared
        self.sum_my_part()
        norms = torch.stack(torch._foreach_norm(shared.part.grad.split(NORM_ELEMS)))
        shared.squares[self.rank.rank] = norms.square().sum()
        shared.barrier.wait()
        norm = shared.squares.sum().sqrt().item() / self.rank.world
        if norm < float("inf"):
            if norm > MAX_NORM:
                shared.part.grad.mul_(MAX_NORM / (norm + 1e-6))
            shared.adamw.step()
        shared.barrier.wait()


CHAINS = [FifteenClip, Fifteen]
