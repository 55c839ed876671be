# SPDX-License-Identifier: Apache-2.0
"""
What a user could write in an afternoon instead of installing zerod. The gradients of all ranks and the weights are in
memory that all ranks map. A rank copies its gradient to that memory, waits, adds its part of all gradients, updates
that part of the weights, and waits again. If a rank dies, the other ranks wait for ever, and the weights are half
updated. Nothing is checked, and nothing is reduced before the backward ends.
"""

import mmap
import os

import torch
from peers import FIFTEEN, FIFTEEN_CLIP
from peers.chain import MAX_NORM, Chain, make_adamw

LINE_WORDS = 8  # words in a cache line; two ranks' words are never in one line
SPINS = 200  # spins before a rank yields, because there may be more ranks than cores
# A gap between arrays that are read together. Arrays at a distance of a multiple of 2^27 bytes evict each other from
# the nearest cache.
SKEW_ELEMS = 5 << 14
NORM_ELEMS = 1 << 20  # elements added at a time; longer sums of fp32 would be too inexact


class Barrier:
    """Each rank writes how many barriers it has reached, and watches the words of the other ranks. Correct only on
    x86."""

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
    """What the ranks map, and this rank's part of it. Both versions of the chain use it in turn."""

    def __init__(self, rank):
        elems = rank.flat.numel()
        stride = elems + SKEW_ELEMS
        self.grads = mapped(rank, "gradients", rank.world * stride).view(rank.world, stride)[:, :elems]
        self.weights = mapped(rank, "weights", elems + 3 * SKEW_ELEMS)[3 * SKEW_ELEMS :]
        self.squares = mapped(rank, "squares", rank.world)
        self.parts = [grad.chunk(rank.world)[rank.rank] for grad in self.grads]
        self.part = torch.nn.Parameter(self.weights.chunk(rank.world)[rank.rank])
        self.part.grad = self.parts[rank.rank]  # also holds the sum; with separate memory it takes a fifth longer
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
        self.shared.barrier.wait()  # waits until all weights are zero before any rank updates them

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
    """If a value is not finite, the norm is not finite, and the step is skipped. The rank that caused it is not
    found."""

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
