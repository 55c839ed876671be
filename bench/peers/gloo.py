# SPDX-License-Identifier: Apache-2.0
"""torch alone: fused AdamW, and its collectives on gloo, in the faster form: no clipping, no search for non-finite
values."""

import torch
import torch.distributed as dist
from peers.chain import LR, EPS, WEIGHT_DECAY, Chain, make_adamw
from torch.distributed.optim import ZeroRedundancyOptimizer

BUCKET_ELEMS = 25 * (1 << 20) // 4  # as in DistributedDataParallel


class Alone(Chain):
    name = "fused AdamW"

    def run(self):
        self.rank.adamw.step()


class AllReduce(Chain):
    name = "all_reduce + fused AdamW"

    def all_reduce(self):
        for work in [dist.all_reduce(part, async_op=True) for part in self.rank.grad.split(BUCKET_ELEMS)]:
            work.wait()

    def run(self):
        self.all_reduce()
        self.optimizer().step()


class Sharded(Chain):
    name = "reduce_scatter_tensor + sharded fused AdamW + all_gather_into_tensor"

    def __init__(self, rank):
        super().__init__(rank)
        self.shard = torch.nn.Parameter(rank.flat.chunk(rank.world)[rank.rank])
        self.shard.grad = torch.zeros_like(self.shard)
        self.adamw = make_adamw([self.shard], rank.world)

    def optimizer(self):
        return self.adamw

    def weights(self):
        return [self.rank.flat]

    def run(self):
        dist.reduce_scatter_tensor(self.shard.grad, self.rank.grad)
        self.adamw.step()
        dist.all_gather_into_tensor(self.rank.flat, self.shard.data)


class Zero(AllReduce):
    """Makes the parameters views of its buckets, also for the optimizers of the other chains."""

    name = "ZeroRedundancyOptimizer with fused AdamW"

    def __init__(self, rank):
        super().__init__(rank)
        self.zero = ZeroRedundancyOptimizer(rank.params, torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR,
                                            eps=EPS * rank.world, weight_decay=WEIGHT_DECAY, fused=True)
        rank.restore_gradients()

    def optimizer(self):
        return self.zero

    def reset(self):
        for state in self.zero.optim.state.values():
            for value in state.values():
                value.zero_()
        for tensor in self.weights():
            tensor.detach().zero_()


ALONE, GLOO = [Alone], [AllReduce, Sharded, Zero]
