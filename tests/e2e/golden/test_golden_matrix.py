# SPDX-License-Identifier: Apache-2.0
"""
The golden numbers in every setting and place: one matrix, drawn with a fixed seed, in which each value of each
dimension occurs with each value of every other dimension.

The places: core is the data path without a daemon, with one core or two. daemon is a real daemon in host memory. gpus
has everything on GPUs (stand-ins); gpus-offload has master weights and moments in host memory.
"""

import itertools
import random

import pytest

from golden_bits import N_STEPS, OPTIMIZERS, golden_run, list_isas, make_case
from golden_jobs import BUCKETS, MOMENTS, OFFLOADS, ORDERS, DeviceJob, Driver, Job, check_hows, constants, make_how
from tiers import cover, param

PLACES = ("core", "daemon", "gpus", "gpus-offload")
STAGES, THREADS, ISAS = (1, 2, 3), (1, 2, 3, 4), (0, 1, 2)
WORLDS = (1, 2, 3, 4, 5, 8)
MOST_GPUS = 4
N_MORE = 7  # further runs of a case in the core; together they are faster than computing its golden numbers

DIMENSIONS = [tuple(OPTIMIZERS), PLACES, STAGES, WORLDS, BUCKETS, THREADS, ORDERS, (False, True), ISAS,
              ("shared", "private"), tuple(MOMENTS)]


def rows():
    """
    Yields the rows of the matrix. scripts/test runs each optimizer once in each kind of place, --full runs all rows.
    """
    seen = set()
    for row in cover(DIMENSIONS, seed=4):
        key = row[0], row[1].split("-")[0]
        marks = [pytest.mark.full] if key in seen else []
        yield param(row, *marks, *([pytest.mark.gpu] if key[1] == "gpus" else []))
        seen.add(key)


@pytest.fixture
def place(zerod, build, tmp_path):
    """place(name) -> an object that runs a case in that place."""
    return lambda name: {"core": lambda: Driver(build.path("tests/golden-driver"), tmp_path),
                         "daemon": lambda: Job(zerod, build)}.get(name, lambda: DeviceJob(zerod, build))()


def device_config(place):
    return {"zero": OFFLOADS["cpu"]} if place == "gpus-offload" else {}


@pytest.mark.threads
@pytest.mark.parametrize("optimizer, where, stage, world, bucket_elems, threads, order, in_place, isa, weights, moments",
                         list(rows()))
def test_bits(place, optimizer, where, stage, world, bucket_elems, threads, order, in_place, isa, weights, moments):
    world = min(world, MOST_GPUS) if where.startswith("gpus") else world
    case, runner = make_case(world, optimizer, moments=moments), place(where)
    if where == "core":
        rng, isas = random.Random(isa), runner.isas
        hows = [make_how(rng, world, stage, bucket_elems, threads, isas[isa % len(isas)], 2)]
        hows += [make_how(rng, world, *map(rng.choice, (STAGES, BUCKETS, THREADS, isas, (1, 2)))) for _ in range(N_MORE)]
        check_hows(runner, case, hows)
        return
    weights = "shared" if stage == 3 else weights  # there are no private weights in stage 3
    runner.check(case, {"order": order, "in_place": in_place}, isa=isa, stage=stage, bucket_elems=bucket_elems,
                 **({"threads": threads, "weights": weights} if where == "daemon" else device_config(where)))


@pytest.mark.threads
@pytest.mark.parametrize("optimizer, stage, where", list(zip(OPTIMIZERS, itertools.cycle(STAGES), itertools.cycle(PLACES[1:]))))
def test_settings_of_the_configuration(place, optimizer, stage, where):
    """Steps without arguments use the settings of the daemon's configuration."""
    case = make_case(2, optimizer, steps=6, max_norm=0.5, loss_scale=1, groups=[{}], nonfinite=[])
    case["optimizer"]["params"] = constants(case["optimizer"]["params"])
    for param in case["params"]:
        param["group"] = 0
    place(where).check(case, {"configured": True}, stage=stage, bucket_elems=500, **device_config(where))


@pytest.mark.parametrize("world", WORLDS)
def test_the_case_is_what_it_is_meant_to_be(world):
    """The case has skipped steps, clipped and unclipped steps, and parameters without a gradient."""
    steps = golden_run(make_case(world, "AdamW"))
    assert [i for i, step in enumerate(steps) if not step["applied"]] == [6, 13]
    coefs = [step["coef"] for step in steps if step["applied"]]
    assert min(coefs) < 1 and max(coefs) == 1
    assert {0, N_STEPS - 2} < set(steps[-1]["counts"])


def test_every_instruction_set_is_drawn(build):
    """The matrix has a row for each instruction set that the machine has."""
    assert len(list_isas(build.path("tests/golden-driver"))) <= len(ISAS)
