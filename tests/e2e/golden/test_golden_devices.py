# SPDX-License-Identifier: Apache-2.0
"""
The golden numbers through a daemon whose job lies on GPUs: real processes, the engine over the stand-ins of tests/sim.
The same cases as in host memory, and the same bits.
"""

import itertools
import random

import pytest

from golden_bits import OPTIMIZERS, make_case
from test_golden_daemon import EVERYTHING, ONE_EACH, ORDERS, Job, constants

OFFLOADS = {"none": {}, "cpu": {"offload_optimizer": {"device": "cpu"}}}


class DeviceJob(Job):
    def run(self, case, how=None, isa=-1, sim="", **config):
        engine = self.build.path("tests/sim/zerod-engine-nccl-sim")
        self.environment = {"ZEROD_DEVICE_ENGINE": engine, "ZEROD_SIM": sim}
        return super().run(case, how, isa, **{"device": "cuda", "collective": "nccl", "deterministic": True} | config)


@pytest.fixture
def job(zerod, build):
    return DeviceJob(zerod, build)


def draw():
    """Each optimizer in each stage, the rest drawn so that each choice comes up."""
    rng = random.Random(7)

    def endless(choices):
        return itertools.chain.from_iterable(rng.sample(choices, len(choices)) for _ in itertools.count())

    rest = [endless(choices) for choices in ((1, 2, 3, 4), (ONE_EACH, 64, 500, EVERYTHING), ORDERS, (False, True))]
    for optimizer, stage, offload in itertools.product(OPTIMIZERS, (1, 2, 3), OFFLOADS):
        yield optimizer, stage, offload, *map(next, rest)


@pytest.mark.parametrize("optimizer, stage, offload, world, bucket_elems, order, in_place", list(draw()))
def test_device_bits(job, optimizer, stage, offload, world, bucket_elems, order, in_place):
    job.check(make_case(world, optimizer), {"order": order, "in_place": in_place}, stage=stage, zero=OFFLOADS[offload],
              bucket_elems=bucket_elems)


@pytest.mark.parametrize("optimizer, stage, offload", list(zip(OPTIMIZERS, itertools.cycle((1, 2, 3)),
                                                               itertools.cycle(("none", "none", "cpu")))))
def test_device_settings_of_the_configuration(job, optimizer, stage, offload):
    """Steps without arguments: what counts is in the daemon's file."""
    case = make_case(2, optimizer, steps=6, max_norm=0.5, loss_scale=1, groups=[{}], nonfinite=[])
    case["optimizer"]["params"] = constants(case["optimizer"]["params"])
    for param in case["params"]:
        param["group"] = 0
    job.check(case, {"configured": True}, stage=stage, zero=OFFLOADS[offload], bucket_elems=500)
