# SPDX-License-Identifier: Apache-2.0
"""
The golden numbers through a real daemon: a process per rank (tests/programs/golden-client.c) pushes in its own order over the
socket, and reads norms, weights and state back.

With ZEROD_TIMING=1 no push may take longer than 50 ms; without, what the slowest took is only printed.
"""

import itertools
import json
import os
import random
import re

import numpy as np
import pytest

from conftest import DEFAULTS, wait_for
from golden_bits import OPTIMIZERS, check_norms, differences, golden_run, list_isas, make_case, read_results, \
    wanted_state

pytestmark = pytest.mark.threads

TIMING = os.environ.get("ZEROD_TIMING", "0") == "1"
MOST_MS = 50
ONE_EACH, EVERYTHING = 1, 10**9
ORDERS = ("forward", "reverse", "alternate", "random")


def constants(settings):
    """Of settings that may have one value for each step, the first."""
    return {name: value[0] if isinstance(value, list) and name != "betas" else value
            for name, value in settings.items()}


def make_config(case, stage, bucket_elems, zero=None, **config):
    """zero: more of zero_optimization."""
    params = dict.fromkeys(DEFAULTS["optimizer"]["params"]) | constants(case["optimizer"]["params"])
    return {
        "world": {"size": case["world_size"]},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket_elems} | (zero or {}),
        "optimizer": {"type": case["optimizer"]["type"], "params": params},
        "gradient_clipping": constants({"max_norm": case.get("max_norm", 0)})["max_norm"],
        "gradient_allreduce_op": case.get("op", "mean"),
        **config,
    }


class Job:
    """A daemon, and all ranks of a case as its trainers."""

    def __init__(self, zerod, build):
        self.zerod, self.client, self.patience = zerod, build.path("tests/golden-client"), build.patience
        self.build, self.environment = build, {}
        self.isas = list_isas(build.path("tests/golden-driver"))

    def run(self, case, how=None, isa=-1, **config):
        """Return: the ranks' processes, which have ended, or one of which has failed."""
        self.daemon = self.zerod(make_config(case, **config),
                                 {"ZEROD_ISA": self.isas[isa % len(self.isas)]} | self.environment)
        folder = self.daemon.folder
        (folder / "case.json").write_text(json.dumps(case))
        (folder / "how.json").write_text(json.dumps({"order": "random", "seed": 1} | (how or {})))
        ranks = [self.daemon.spawn(self.client, folder / "case.json", folder / "how.json", rank, folder / f"rank{rank}",
                                   rank=rank) for rank in range(case["world_size"])]
        wait_for(lambda: "".join(rank.err() for rank in ranks) + self.daemon.log(),
                 lambda: all(rank.poll() == 0 for rank in ranks) or any(rank.poll() for rank in ranks),
                 120 * self.patience)
        return ranks

    def check(self, case, how=None, **config):
        """All ranks see the golden numbers."""
        ranks = self.run(case, how, **config)
        assert {rank.poll() for rank in ranks} == {0}, "".join(rank.err() for rank in ranks) + self.daemon.log()
        results = [read_results(self.daemon.folder / f"rank{rank}") for rank in range(len(ranks))]
        steps = golden_run(case)
        for rank in results:
            check_rank(case, steps, rank)
        slowest_ms = max(np.frombuffer(rank["slowest_push_ns.0"], np.uint64)[0] for rank in results) / 1e6
        print(f"slowest push {slowest_ms:.2f} ms")
        assert slowest_ms <= MOST_MS or not TIMING


@pytest.fixture
def job(zerod, build):
    return Job(zerod, build)


def n_missing(case, counts):
    """Trainable parameters that nobody pushed in each step, from how the counts grow. None of a skipped step."""
    trainable = [i for i, p in enumerate(case["params"]) if p.get("trainable", True)]
    before = [0] * len(case["params"])
    for after in counts:
        yield None if after == before else sum(after[i] == before[i] for i in trainable)
        before = after


def check_rank(case, steps, results):
    wanted = wanted_state(case, steps[-1])
    for i, step in enumerate(steps):
        seen = i % len(case["params"])
        wanted[f"seen.{i}"] = step["weights"][seen]
    check_norms(results, steps)
    assert list(differences(results, wanted)) == []
    for i, (step, missing) in enumerate(zip(steps, n_missing(case, [step["counts"] for step in steps]))):
        epoch, applied, n = np.frombuffer(results[f"said.{i}"], np.uint64).tolist()
        assert (epoch, applied) == (i + 1, step["applied"])
        assert missing in (None, n), f"step {i}"


# ---- every optimizer, every stage --------------------------------------------------------------------------


def draw():
    """Each optimizer in each stage, the rest drawn so that each choice comes up; stage 3 has no private weights."""
    rng = random.Random(4)

    def endless(choices):
        return itertools.chain.from_iterable(rng.sample(choices, len(choices)) for _ in itertools.count())

    rest = [endless(choices) for choices in (range(1, 9), (ONE_EACH, 64, 500, EVERYTHING), (1, 2, 3, 4), ORDERS,
                                             (False, True), (0, 1, 2))]
    weights = endless(("shared", "private"))
    for optimizer, stage in itertools.product(OPTIMIZERS, (1, 2, 3)):
        yield optimizer, stage, *map(next, rest), "shared" if stage == 3 else next(weights)


@pytest.mark.parametrize("optimizer, stage, world, bucket_elems, threads, order, in_place, isa, weights", list(draw()))
def test_bits(job, optimizer, stage, world, bucket_elems, threads, order, in_place, isa, weights):
    job.check(make_case(world, optimizer), {"order": order, "in_place": in_place}, isa=isa, stage=stage,
              bucket_elems=bucket_elems, threads=threads, weights=weights)


@pytest.mark.parametrize("optimizer, stage", list(zip(OPTIMIZERS, itertools.cycle((1, 2, 3)))))
def test_settings_of_the_configuration(job, optimizer, stage):
    """Steps without arguments: what counts is in the daemon's file."""
    case = make_case(2, optimizer, steps=6, max_norm=0.5, loss_scale=1, groups=[{}], nonfinite=[])
    case["optimizer"]["params"] = constants(case["optimizer"]["params"])
    for param in case["params"]:
        param["group"] = 0
    job.check(case, {"configured": True}, stage=stage, bucket_elems=500)


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


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("order", ORDERS)
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
@pytest.mark.parametrize("order", ("forward", "random"))
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
