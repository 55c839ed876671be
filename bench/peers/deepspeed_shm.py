# SPDX-License-Identifier: Apache-2.0
"""
DeepSpeed's all-reduce in shared memory, which DeepSpeed uses for inference on CPUs, not for training. Each rank copies
32 MiB at a time into its segment, adds up its part of all segments, and copies the sums back. Ranks wait in loops
without sleeping. DeepSpeed's own builder compiles it.
"""

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import ShareMemCommBuilder
from peers import SHM, SHM_CLIP, SHM_OWN_ADAM
from peers.chain import LR, EPS, WEIGHT_DECAY, Chain

FP32_LEVEL = 1  # of vector instructions, the level that fp32 sums need


class ShmAllReduce(Chain):
    name = SHM
    loaded = None

    def __init__(self, rank):
        super().__init__(rank)
        if not ShmAllReduce.loaded:
            ShmAllReduce.loaded = ShareMemCommBuilder().load()
            if ShmAllReduce.loaded.vector_kernel_level() < FP32_LEVEL:
                raise SystemExit("DeepSpeed's shared-memory all-reduce needs AVX2")
            ShmAllReduce.loaded.initialize(rank.world, rank.rank)

    def run(self):
        torch.ops.deepspeed.inference_all_reduce_(self.rank.grad)
        if self.clips:
            self.rank.clip()
        self.optimizer().step()


class ShmClip(ShmAllReduce):
    name = SHM_CLIP
    clips = True


class ShmOwnAdam(ShmAllReduce):
    name = SHM_OWN_ADAM
    clips = True

    def __init__(self, rank):
        super().__init__(rank)
        self.adam = DeepSpeedCPUAdam(rank.params, lr=LR, eps=EPS * rank.world, weight_decay=WEIGHT_DECAY,
                                     adamw_mode=True)
        for param, moments in zip(rank.params, rank.moments):
            self.adam.state[param] = {"step": 0, **moments}

    def optimizer(self):
        return self.adam


CHAINS = [ShmClip, ShmAllReduce, ShmOwnAdam]
