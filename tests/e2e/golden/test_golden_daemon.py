# SPDX-License-Identifier: Apache-2.0
"""
The golden numbers through a real daemon: with rings that are small for the ranks' order of pushes, and with settings
that the daemon refuses. test_golden_matrix.py combines all other dimensions.
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
    """A rank that asks for a step with invalid settings gets an error, and the daemon survives."""
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
    Each parameter is a bucket of 512 KiB, so that a ring has room for two. No rank pushes the first bucket, and the
    last rank does not push the last one. Rank 1 is slow, so rank 0 fills its ring and must still finish.
    """
    world = 2
    params = [{"shape": [2**17 - 5 * i]} for i in range(6)]
    case = plain_case(world, params, missing=[{"param": 5}, {"param": 0, "rank": world - 1}])
    job.check(case, {"order": order, "sleep_ms": [0, 30]}, stage=stage, bucket_elems=ONE_EACH)


@pytest.mark.plenty
@pytest.mark.parametrize("order", full("forward", "random"))
def test_thousands_of_one_element(job, order):
    """Rank 0 pushes more buckets of one element than a ring has room for, before rank 1 has pushed any."""
    case = plain_case(2, [{"shape": []}] * 3000, steps=1, micro_batches=1)
    job.check(case, {"order": order, "sleep_ms": [0, 500]}, stage=2, bucket_elems=ONE_EACH)


def test_large_and_small_buckets_beyond_the_ring(job):
    """Small buckets, pushed earlier the second time, do not use the room that large buckets need again."""
    params = [{"shape": [2**17]}] * 6 + [{"shape": []}] * 60 + [{"shape": [2**17]}] * 2
    case = plain_case(2, params, steps=2)
    job.check(case, {"order": "alternate", "sleep_ms": [0, 100]}, stage=2, bucket_elems=ONE_EACH)


def test_accumulated_passes_beyond_the_ring(job):
    """Second pushes use their own slots. The ring has room for two slots; the others are in the overflow."""
    params = [{"shape": [2**17]}] * 3
    case = plain_case(2, params, steps=2, passes=[{"param": [0, 2], "times": 2}])
    job.check(case, {"order": "reverse", "sleep_ms": [0, 30]}, stage=2, bucket_elems=ONE_EACH)
