# SPDX-License-Identifier: Apache-2.0
"""
The golden numbers through a real daemon: rings that are small for the order in which ranks push, and settings that the
daemon refuses. test_golden_matrix.py has the combinations of everything else.
"""

import re

import pytest

from golden_bits import make_case
from golden_jobs import ONE_EACH, ORDERS, Job
from tiers import each_once, full

pytestmark = pytest.mark.threads


@pytest.fixture
def job(zerod, build):
    return Job(zerod, build)


@pytest.mark.parametrize("optimizer, group, what", (
    ("SGD", {"momentum": 0.9}, "E1403 .*Step.groups.momentum: the job has no momentum buffer"),
    ("AdamW", {"betas": [0.9, 1.0]}, "zerod_step: beta2 of parameter group 1 is 1; expected"),
    ("Lion", {"betas": [-0.5, 0.9]}, "zerod_step: beta1 of parameter group 1 is -0.5; expected"),
    ("Adagrad", {"eps": 0}, "zerod_step: eps of parameter group 1 is 0; expected a number above 0")))
def test_impossible_settings_are_refused(job, optimizer, group, what):
    """A rank that asks for a step with them is told, and the daemon lives: it ends when it is asked to."""
    rank, = job.run(make_case(1, optimizer, groups=[{}, group]), stage=2, bucket_elems=500)
    assert rank.poll() == 1
    assert re.search(what, rank.err(), re.DOTALL), rank.err()
    assert job.daemon.status()["step"] == 0


# ---- rings that are small for the order of pushes ------------------------------------------------------------


def plain_case(world, params, **changes):
    return {"world_size": world, "seed": 9, "steps": 3, "micro_batches": 2, "max_norm": 1.0, "params": params,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}}} | changes


@pytest.mark.parametrize("order, stage", each_once(ORDERS, (1, 2, 3)))
def test_two_buckets_fit_into_a_ring(job, stage, order):
    """
    One parameter in each bucket, of 512 KiB, so that a ring holds two. The first bucket is never pushed, nor is
    the last by the last rank; rank 1 comes late, so that rank 0 fills its ring and goes on.
    """
    world = 2
    params = [{"shape": [2**17 - 5 * i]} for i in range(6)]
    case = plain_case(world, params, missing=[{"param": 5}, {"param": 0, "rank": world - 1}])
    job.check(case, {"order": order, "sleep_ms": [0, 30]}, stage=stage, bucket_elems=ONE_EACH)


@pytest.mark.plenty
@pytest.mark.parametrize("order", full("forward", "random"))
def test_thousands_of_one_element(job, order):
    """Buckets of one element, more than a ring holds, before the other rank has pushed any."""
    case = plain_case(2, [{"shape": []}] * 3000, steps=1, micro_batches=1)
    job.check(case, {"order": order, "sleep_ms": [0, 500]}, stage=2, bucket_elems=ONE_EACH)


def test_large_and_small_buckets_beyond_the_ring(job):
    """Small buckets, which come earlier the second time, do not take the room that large ones had and need again."""
    params = [{"shape": [2**17]}] * 6 + [{"shape": []}] * 60 + [{"shape": [2**17]}] * 2
    case = plain_case(2, params, steps=2)
    job.check(case, {"order": "alternate", "sleep_ms": [0, 100]}, stage=2, bucket_elems=ONE_EACH)


def test_accumulated_passes_beyond_the_ring(job):
    """Second pushes take slots of their own: two in the ring, as many as there are parameters beyond it."""
    params = [{"shape": [2**17]}] * 3
    case = plain_case(2, params, steps=2, passes=[{"param": [0, 2], "times": 2}])
    job.check(case, {"order": "reverse", "sleep_ms": [0, 30]}, stage=2, bucket_elems=ONE_EACH)
