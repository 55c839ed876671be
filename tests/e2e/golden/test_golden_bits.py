# SPDX-License-Identifier: Apache-2.0
"""
The data path of the daemon gives the golden numbers, bit for bit, in every setting. These tests vary one dimension at a
time, over its full range; test_golden_matrix.py combines dimensions. tests/programs/golden-driver.c runs the data path
without a daemon.

ZEROD_GOLDEN_FULL=1 runs the product of all dimensions.
"""

import itertools
import os
import random

import numpy as np
import pytest

from golden_bits import N_STEPS, OPTIMIZERS, PAIRS, make_case
from golden_jobs import BUCKETS, EVERYTHING, ONE_EACH, Driver, check_hows, make_how

WHOLE = os.environ.get("ZEROD_GOLDEN_FULL", "0") == "1"

WORLDS = range(1, 9)
STAGES = (1, 2, 3)
THREADS = (1, 2, 3, 4)
CORES = (1, 2)


@pytest.fixture
def driver(build, tmp_path):
    return Driver(build.path("tests/golden-driver"), tmp_path)


def all_hows(rng, world, isas):
    """Yields every combination. With two cores, every split of the ranks."""
    for *dims, cores in itertools.product(STAGES, BUCKETS, THREADS, isas, CORES):
        for split in range(1, world) if cores == 2 else (0,):
            yield make_how(rng, world, *dims, cores, split)


if WHOLE:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("world", WORLDS)
    def test_whole_product(driver, world, optimizer):
        check_hows(driver, make_case(world, optimizer), list(all_hows(random.Random(1), world, driver.isas)))


# ---- one dimension at a time ------------------------------------------------------------------------------


def short_case(world, steps=5, **changes):
    case = make_case(world, steps=steps, **changes)
    case["nonfinite"] = case.get("nonfinite", [])[:0]
    return case


@pytest.mark.parametrize("world", WORLDS[1:])
def test_every_split(driver, world):
    rng = random.Random(world)
    hows = [make_how(rng, world, stage, rng.choice(BUCKETS), 2, driver.isas[-1], 2, split)
            for stage in STAGES for split in range(1, world)]
    check_hows(driver, short_case(world), hows)


@pytest.mark.parametrize("world", (1, 2, 5))
def test_every_kind_of_bucket_size(driver, world):
    rng = random.Random(world)
    sizes = (1, 2, 63, 64, 65, 127, 128, 129, 192, 256, 500, 512, 513, 577, 1000, 1023, 1024, 1088, 2000, EVERYTHING)
    hows = [make_how(rng, world, 1 + i % 3, size, 2, driver.isas[-1], 1 + i % 2) for i, size in enumerate(sizes)]
    check_hows(driver, short_case(world), hows)


def test_many_orders(driver):
    rng = random.Random(3)
    hows = [make_how(rng, 4, 2, rng.choice(BUCKETS), 4, rng.choice(driver.isas), 1 + i % 2) for i in range(30)]
    check_hows(driver, short_case(4, 4), hows)


@pytest.mark.parametrize("grad, weight", PAIRS)
def test_one_bucket(driver, grad, weight):
    """All parameters are in one bucket, because they have one group and one pair of dtypes."""
    world = 2 + PAIRS.index((grad, weight)) % 7
    case = short_case(world, N_STEPS)
    for param in case["params"]:
        param |= {"group": 0, "grad_dtype": grad, "weight_dtype": weight}
    case["groups"] = [{}]
    rng = random.Random(world)
    hows = [make_how(rng, world, stage, EVERYTHING, stage + 1, isa, cores)
            for stage in STAGES for isa in driver.isas for cores in CORES]
    check_hows(driver, case, hows)


@pytest.mark.parametrize("world", (1, 3, 8))
def test_parameters_of_many_chunks(driver, world):
    """Parameters may be larger than a chunk (the 64 Ki elements that are reduced at a time) and than a partition."""
    params = [{"shape": [n], "grad_dtype": grad, "weight_dtype": weight} for n, grad, weight in
              ((150001, "fp32", "fp32"), (65536, "fp32", "fp32"), (65537, "bf16", "bf16"), (131071, "fp16", "bf16"))]
    case = {"world_size": world, "seed": 5, "steps": 2, "micro_batches": 2, "max_norm": 1.0, "params": params,
            "optimizer": make_case(world)["optimizer"]}
    rng = random.Random(world)
    hows = [make_how(rng, world, stage, bucket, threads, driver.isas[-1], cores) for stage, bucket, threads, cores in
            ((1, EVERYTHING, 4, 1), (2, ONE_EACH, 3, 2), (3, EVERYTHING, 2, 2), (1, 100000, 3, 2), (3, 70000, 4, 1))]
    check_hows(driver, case, hows)


# ---- memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world, split", ((4, 0), (4, 2), (4, 1), (2, 1), (8, 3)))
def test_memory_of_a_part(driver, stage, world, split):
    """
    A core has memory only for its ranks' part of the state; in stages 2 and 3 also only of the gradient, in stage 3
    also only of the weights.
    """
    # Parameters of 2^17 elements, each in its own bucket, are a whole number of pages in each partition. Buckets that
    # are not partitioned have extra room.
    n32, n16, room = 3 * 2**17, 2 * 2**17, 63 * 64
    params = [{"shape": [2**17]}] * 3 + [{"shape": [2**17], "grad_dtype": "bf16", "weight_dtype": "bf16"}] * 2
    case = {"world_size": world, "seed": 5, "steps": 1, "params": params, "optimizer": make_case(world)["optimizer"]}
    how = make_how(random.Random(1), world, stage, 2**17, 2, driver.isas[-1], 2, split)
    results, = driver.run(case, [how])
    for core, n_ranks in enumerate((split, world - split) if split else (world,)):
        part = n_ranks / world
        spare = 0 if split else room
        masters = (part * n32 + 3 * spare if stage == 3 else 0) + part * n16 + 2 * spare  # else fp32 weights are masters
        both = part * (n32 + n16) + 5 * spare
        state, gradient = 4 * (masters + 2 * both), 4 * both
        weights = 0 if stage == 3 else 4 * (n32 + 3 * room) + 2 * (n16 + 2 * room)
        # Each segment is a whole number of pages.
        state, gradient, weights = (-(-n // 4096) * 4096 for n in (state, gradient, weights))
        assert np.frombuffer(results[f"sizes.{core}"], np.uint64).tolist() == [state, gradient, weights]
