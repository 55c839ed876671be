# SPDX-License-Identifier: Apache-2.0
"""
What all chains of one process share: the gradients, the weights, AdamW.

Chains sum the gradients of all ranks and do not divide them, which would be one more pass. zerod divides the sum. Both
train the same weights, because AdamW does not depend on the scale if epsilon and the clipping norm are scaled, too.
"""

from functools import cached_property

import numpy
import torch

LR, EPS, WEIGHT_DECAY, MAX_NORM = 1e-3, 1e-8, 0.01, 1.0  # as in the daemon of the benchmark
FILL_ELEMS = 1 << 18  # fits into the cache


class Rank:
    """One process. Chains with all weights and all of AdamW's state share them, because memory does not suffice for
    copies."""

    def __init__(self, rank, world, elems, n_params, shared_folder):
        self.rank, self.world, self.n_params, self.shared_folder = rank, world, n_params, shared_folder
        self.flat, self.grad = torch.zeros(elems), torch.zeros(elems)
        self.params = [torch.nn.Parameter(p) for p in self.flat.chunk(n_params)]
        self.restore_gradients()

    def restore_gradients(self):
        """Makes the gradients views of one flat tensor again, because an optimizer may have replaced them."""
        for param, grad in zip(self.params, self.grad.chunk(self.n_params)):
            param.grad = grad

    @cached_property
    def moments(self):
        """The moments of each parameter, in the format of torch's optimizers."""
        return [{name: torch.zeros_like(p, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
                for p in self.params]

    @cached_property
    def adamw(self):
        """Fused AdamW of all parameters."""
        adamw = make_adamw(self.params, self.world)
        for param, moments in zip(self.params, self.moments):
            adamw.state[param] = {"step": torch.zeros(()), **moments}
        return adamw

    def refill(self, iteration):
        """Sets the gradients to those of bench-rank in this iteration (small_number() in rank.c)."""
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
        """Clips as clip_grad_norm_() does. The gradient must be complete in this process."""
        torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM * self.world, foreach=True)


def make_adamw(params, world):
    return torch.optim.AdamW(params, lr=LR, eps=EPS * world, weight_decay=WEIGHT_DECAY, fused=True)


class Chain:
    """Computes new weights, which each rank can read, from the gradients in each rank's own memory."""

    name = ""
    clips = False

    def __init__(self, rank):
        self.rank = rank

    def run(self):
        raise NotImplementedError

    def weights(self):
        """Return: the tensors that together hold all weights, in order."""
        return self.rank.params

    def optimizer(self):
        return self.rank.adamw

    def reset(self):
        """Restores the initial state: weights of zero, no steps."""
        for tensor in self.weights():
            tensor.detach().zero_()
        for state in self.optimizer().state.values():
            for key, value in state.items():
                state[key] = value.zero_() if torch.is_tensor(value) else 0

    def sample(self, stride):
        """Return: each stride-th weight."""
        found, first = [], 0
        for tensor in self.weights():
            found += tensor.detach().view(-1)[-first % stride :: stride].tolist()
            first += tensor.numel()
        return found
