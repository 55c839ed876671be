# SPDX-License-Identifier: Apache-2.0
"""
The golden numbers through a real daemon: a process per rank (tests/golden-client.c) pushes in its own order over the
socket, and reads norms, weights and state back.

With ZEROD_TIMING=1 no push may take longer than 50 ms; without, what the slowest took is only printed.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from golden_bits import BUILD, OPTIMIZERS, check_norms, differences, golden_run, make_case, read_results, wanted_state

ZEROD = BUILD / "daemon" / "zerod"
CLIENT = BUILD / "tests" / "golden-client"
ISAS = subprocess.run([BUILD / "tests" / "golden-driver", "--isas"], check=True, capture_output=True,
                      text=True).stdout.split()
TIMING = os.environ.get("ZEROD_TIMING", "0") == "1"
MOST_MS = 50
TIMEOUT = 100
ONE_EACH, EVERYTHING = 1, 10**9
ORDERS = ("forward", "reverse", "alternate", "random")


@pytest.fixture
def folder():
    """Short: the path of a socket has at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="golden-"))
    yield path
    shutil.rmtree(path)


def make_config(case, socket, *, stage, bucket_elems, threads=2, weights="shared"):
    params = {**case["optimizer"]["params"]}
    params = {k: v[0] if isinstance(v, list) and k != "betas" else v for k, v in params.items()}
    max_norm = case.get("max_norm", 0)
    config = {
        "job": "golden",
        "listen": {"socket": socket},
        "world": {"size": case["world_size"]},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket_elems},
        "optimizer": {"type": case["optimizer"]["type"], "params": params},
        "gradient_clipping": max_norm[0] if isinstance(max_norm, list) else max_norm,
        "gradient_allreduce_op": case.get("op", "mean"),
        "weights": weights,
        "threads": threads,
    }
    return json.dumps(config, indent=1)  # JSON is YAML


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


@contextlib.contextmanager
def daemon(folder, config, isa):
    (folder / "config.yaml").write_text(config)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ZEROD_")} | {"ZEROD_ISA": isa}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([ZEROD, "--config", folder / "config.yaml"], env=environment, stderr=log)
    try:
        wait_until(lambda: b"ready" in (folder / "log").read_bytes() or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield
        process.terminate()
        assert process.wait(TIMEOUT) == 0, (folder / "log").read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def run_ranks(folder, case, how):
    """Return: the ranks' exit codes, None of those that were still at work when one failed, and what they say."""
    (folder / "case.json").write_text(json.dumps(case))
    (folder / "how.json").write_text(json.dumps(how))
    ranks = [subprocess.Popen([CLIENT, folder / "case.json", folder / "how.json", str(rank), folder / str(rank)],
                              stderr=subprocess.PIPE, text=True) for rank in range(case["world_size"])]
    try:
        wait_until(lambda: all(r.poll() == 0 for r in ranks) or any(r.poll() for r in ranks))
        codes = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return codes, "".join(rank.communicate()[1] for rank in ranks)


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


def check_case(folder, case, how=None, isa=ISAS[-1], **config):
    how = {"socket": str(folder / "socket"), "order": "random", "seed": 1} | (how or {})
    with daemon(folder, make_config(case, how["socket"], **config), isa):
        codes, said = run_ranks(folder, case, how)
    assert set(codes) == {0}, said + (folder / "log").read_text()
    results = [read_results(folder / str(rank)) for rank in range(case["world_size"])]
    steps = golden_run(case)
    for rank in results:
        check_rank(case, steps, rank)
    slowest_ms = max(np.frombuffer(rank["slowest_push_ns.0"], np.uint64)[0] for rank in results) / 1e6
    print(f"slowest push {slowest_ms:.2f} ms")
    assert slowest_ms <= MOST_MS or not TIMING


# ---- every optimizer, every stage --------------------------------------------------------------------------


def draw():
    """Each optimizer in each stage, with the rest drawn so that each choice comes up. Stage 3 has no private weights."""
    rng = random.Random(4)

    def endless(choices):
        return itertools.chain.from_iterable(rng.sample(choices, len(choices)) for _ in itertools.count())

    rest = [endless(choices) for choices in (range(1, 9), (ONE_EACH, 64, 500, EVERYTHING), (1, 2, 3, 4), ORDERS,
                                             (False, True), ISAS)]
    weights = endless(("shared", "private"))
    for optimizer, stage in itertools.product(OPTIMIZERS, (1, 2, 3)):
        yield optimizer, stage, *map(next, rest), "shared" if stage == 3 else next(weights)


@pytest.mark.parametrize("optimizer, stage, world, bucket_elems, threads, order, in_place, isa, weights", list(draw()))
def test_bits(folder, optimizer, stage, world, bucket_elems, threads, order, in_place, isa, weights):
    check_case(folder, make_case(world, optimizer), {"order": order, "in_place": in_place}, isa, stage=stage,
               bucket_elems=bucket_elems, threads=threads, weights=weights)


@pytest.mark.parametrize("optimizer, stage", list(zip(OPTIMIZERS, itertools.cycle((1, 2, 3)))))
def test_settings_of_the_configuration(folder, optimizer, stage):
    """Steps without arguments: what counts is in the daemon's file."""
    case = make_case(2, optimizer, steps=6, max_norm=0.5, loss_scale=1, groups=[{}], nonfinite=[])
    case["optimizer"]["params"] = {name: value[0] if isinstance(value, list) and name != "betas" else value
                                   for name, value in case["optimizer"]["params"].items()}
    for param in case["params"]:
        param["group"] = 0
    check_case(folder, case, {"configured": True}, stage=stage, bucket_elems=500)


@pytest.mark.parametrize("optimizer, group, what", (
    ("SGD", {"momentum": 0.9}, "momentum buffer"),
    ("AdamW", {"betas": [0.9, 1.0]}, "betas"),
    ("Lion", {"betas": [-0.5, 0.9]}, "betas"),
    ("Adagrad", {"eps": 0}, "eps")))
def test_impossible_settings_are_refused(folder, optimizer, group, what):
    """A rank that asks for a step with them is told, and the daemon lives: it ends when it is asked to."""
    case = make_case(1, optimizer, groups=[{}, group])
    socket = str(folder / "socket")
    with daemon(folder, make_config(case, socket, stage=2, bucket_elems=500), ISAS[-1]):
        codes, said = run_ranks(folder, case, {"socket": socket, "order": "forward"})
    assert codes == [1]
    assert "E1403" in said and "Step.groups" in said and what in said


# ---- rings that are small for the order of pushes ------------------------------------------------------------


def plain_case(world, params, **changes):
    return {"world_size": world, "seed": 9, "steps": 3, "micro_batches": 2, "max_norm": 1.0, "params": params,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}}} | changes


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("order", ORDERS)
def test_two_buckets_fit_into_a_ring(folder, stage, order):
    """
    One parameter in each bucket, of 512 KiB, so that a ring holds two. The first bucket is never pushed, nor is
    the last by the last rank; rank 1 comes late, so that rank 0 fills its ring and goes on.
    """
    world = 2
    params = [{"shape": [2**17 - 5 * i]} for i in range(6)]
    case = plain_case(world, params, missing=[{"param": 5}, {"param": 0, "rank": world - 1}])
    check_case(folder, case, {"order": order, "sleep_ms": [0, 30]}, stage=stage, bucket_elems=ONE_EACH)


@pytest.mark.parametrize("order", ("forward", "random"))
def test_thousands_of_one_element(folder, order):
    """Buckets of one element, more than a ring holds, before the other rank has pushed any."""
    case = plain_case(2, [{"shape": []}] * 3000, steps=1, micro_batches=1)
    check_case(folder, case, {"order": order, "sleep_ms": [0, 500]}, stage=2, bucket_elems=ONE_EACH)


def test_accumulated_passes_beyond_the_ring(folder):
    """Second pushes take slots of their own: two in the ring, as many as there are parameters beyond it."""
    params = [{"shape": [2**17]}] * 3
    case = plain_case(2, params, steps=2, passes=[{"param": [0, 2], "times": 2}])
    check_case(folder, case, {"order": "reverse", "sleep_ms": [0, 30]}, stage=2, bucket_elems=ONE_EACH)
