# SPDX-License-Identifier: Apache-2.0
"""
What all chains of one process have in common: its gradients, its weights, AdamW.

Chains sum the gradients of all ranks and do not divide them, which would be one more pass. They train the same as
zerod, which divides, because AdamW does not notice the scale if epsilon, and the norm to clip to, have it as well.
"""

from functools import cached_property

import numpy
import torch

LR, EPS, WEIGHT_DECAY, MAX_NORM = 1e-3, 1e-8, 0.01, 1.0  # as the daemon of the benchmark has them
FILL_ELEMS = 1 << 18  # stays in the cache


class Rank:
    """One process. Chains that hold all weights and all of AdamW's state share them: there is not memory for each."""

    def __init__(self, rank, world, elems, n_params, shared_folder):
        self.rank, self.world, self.n_params, self.shared_folder = rank, world, n_params, shared_folder
        self.flat, self.grad = torch.zeros(elems), torch.zeros(elems)
        self.params = [torch.nn.Parameter(p) for p in self.flat.chunk(n_params)]
        self.restore_gradients()

    def restore_gradients(self):
        """Gradients are views of one flat tensor from the beginning; an optimizer may have made others of them."""
        for param, grad in zip(self.params, self.grad.chunk(self.n_params)):
            param.grad = grad

    @cached_property
    def moments(self):
        """Of each parameter, as the optimizers keep them."""
        return [{name: torch.zeros_like(p, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
                for p in self.params]

    @cached_property
    def adamw(self):
        """Fused AdamW of everything."""
        adamw = make_adamw(self.params, self.world)
        for param, moments in zip(self.params, self.moments):
            adamw.state[param] = {"step": torch.zeros(()), **moments}
        return adamw

    def refill(self, iteration):
        """The gradients that bench-rank has in this iteration (small_number() in rank.c)."""
        seed, grad = iteration * 64 + self.rank, self.grad.numpy()
        products = numpy.arange(FILL_ELEMS, dtype=numpy.uint32) * numpy.uint32(2654435761)
        x, shifted = numpy.empty_like(products), numpy.empty_like(products)
        for first in range(0, len(grad), FILL_ELEMS):
            n = min(FILL_ELEMS, len(grad) - first)
            numpy.add(products, numpy.uint32((first * 2654435761 + seed * 40503) % 2**32), out=x)
            numpy.right_shift(x, 15, out=shifted)
            numpy.bitwise_xor(x, shifted, out=x)
            numpy.multiply(x.view(numpy.int32)[:n], numpy.float32(2**-40), out=grad[first : first + n],
                           casting="unsafe", dtype=numpy.float32)

    def clip(self):
        """As clip_grad_norm_() does it, all of the gradient being here."""
        torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM * self.world, foreach=True)


def make_adamw(params, world):
    return torch.optim.AdamW(params, lr=LR, eps=EPS * world, weight_decay=WEIGHT_DECAY, fused=True)


class Chain:
    """From the gradients in each rank's own memory to the new weights, which each rank can read."""

    name = ""
    clips = False

    def __init__(self, rank):
        self.rank = rank

    def run(self):
        raise NotImplementedError

    def weights(self):
        """Tensors that are all weights, in order."""
        return self.rank.params

    def optimizer(self):
        return self.rank.adamw

    def reset(self):
        """As at the beginning: weights of zero, no step done."""
        for tensor in self.weights():
            tensor.detach().zero_()
        for state in self.optimizer().state.values():
            for key, value in state.items():
                state[key] = value.zero_() if torch.is_tensor(value) else 0

    def sample(self, stride):
        """Each stride-th weight."""
        found, first = [], 0
        for tensor in self.weights():
            found += tensor.detach().view(-1)[-first % stride :: stride].tolist()
            first += tensor.numel()
        return found
