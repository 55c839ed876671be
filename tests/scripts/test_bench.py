# SPDX-License-Identifier: Apache-2.0
"""
The benchmarks of scripts/bench, on small models: that they measure what they say they do. The figures mean nothing.
DeepSpeed is not here; its chains are checked by the benchmark itself, each time it runs.
"""

import subprocess
import sys
from contextlib import closing

import pytest

from conftest import ROOT

sys.path.append(str(ROOT / "bench"))

import harness  # noqa: E402
import traffic  # noqa: E402
import whole_step  # noqa: E402
from peers import FIFTEEN, FIFTEEN_CLIP, SHM_CLIP  # noqa: E402

ELEMS = 1 << 21  # whose gradients have a norm above 1, so that they are clipped


@pytest.fixture
def small(build, monkeypatch):
    """The programs of this build."""
    monkeypatch.setattr(harness, "BUILD", build.folder)
    monkeypatch.setattr(whole_step, "ELEMS", ELEMS)


# ---- peers of a whole step ----------------------------------------------------------------------------------------------


def test_peers_train_the_same(small, monkeypatch):
    """And it is seen if one does not: if it has the gradients of another iteration, and, hardly, if it does not clip."""
    pytest.importorskip("torch")
    unclipped = whole_step.without_clipping(2)
    with closing(harness.ZerodJob(2, 2, ELEMS)) as job, closing(
            harness.TorchJob(2, ELEMS, families=("fifteen", "gloo"))) as torch:
        first = whole_step.first_steps({2: job}, torch, unclipped)
        assert len(first) == 5 and all(ms > 0 for ms in first.values())

        clipped = whole_step.zerod_sample(job)
        with pytest.raises(harness.Failure, match="rank 1 differs"):
            whole_step.compare("rank 1", unclipped, clipped)

        torch.iterations[FIFTEEN] = 1
        for _ in range(whole_step.CHECKED_STEPS):
            torch.step(FIFTEEN)
        with pytest.raises(harness.Failure, match="differs"):
            whole_step.compare(FIFTEEN, torch.ask(FIFTEEN, sample=whole_step.STRIDE)[0], unclipped)


def test_weights_that_are_not_finite_are_not_the_same():
    with pytest.raises(harness.Failure):
        whole_step.compare("it", [float("nan")], [1.0])


def test_slow_chains_are_those_of_their_family():
    job = harness.TorchJob.__new__(harness.TorchJob)
    job.chains = {"a": {"family": "x"}, "b": {"family": "x"}, "c": {"family": "y"}}
    assert job.slow({"a": 1.0, "b": 2.1, "c": 9.0}) == {"b"}


def test_rows_of_a_step():
    peers = dict.fromkeys([*whole_step.GOALS, "ring"], 30.0)
    stages = {2: [{"total": 10.0, "tail": 5.0}]}
    rows = whole_step.rows_of(2, stages, peers, "ring")
    assert [(r["peer_name"], r["goal"], r["holds"]) for r in rows] == [
        (FIFTEEN_CLIP, 1.1, True), (FIFTEEN, 0.95, True), (SHM_CLIP, 3.0, True),
        ("ring", 4.0, False), ("ring", 3.5, True)]
    assert [r["goal"] for r in whole_step.rows_of(8, stages, peers, "ring")] == [1.1, 0.95, None, 8.0, None]


# ---- bytes of a step ----------------------------------------------------------------------------------------------------


def test_bytes_of_a_step():
    """Of 2 ranks: docs/benchmarks.md adds them up."""
    assert traffic.read_and_written(2) == (8 + 8 + 16, 8 + 4 + 12)
    assert traffic.step_bytes(10, 2) == 560 and traffic.passes(2) == 2
    with pytest.raises(harness.Failure, match="another proportion"):
        traffic.passes(4)


def test_traffic(small, monkeypatch):
    monkeypatch.setattr(traffic, "ELEMS", ELEMS)
    [row], details = traffic.traffic(True)
    assert row["zerod"] > 0 and row["peer"] > 0 and row["goal"] == 0.92
    [(_, (_, step, stream))] = details.items()
    assert step[1:3] == stream[1:3] == ["64", "48"]


def test_a_stream_of_other_bytes(small, monkeypatch):
    monkeypatch.setattr(traffic, "ELEMS", ELEMS)
    monkeypatch.setattr(traffic, "passes", lambda world: 1)
    with pytest.raises(harness.Failure, match=f"moved {ELEMS * 28} bytes instead of {ELEMS * 56}"):
        traffic.traffic(True)


@pytest.mark.parametrize("arguments", [["--elems", "0"], ["--rows", "1"], ["1"]])
def test_usage_of_the_stream(build, arguments):
    run = subprocess.run([build.path("bench/bench-stream"), *arguments], capture_output=True, text=True,
                         stdin=subprocess.DEVNULL)
    assert run.returncode == 64 and "usage: bench-stream " in run.stderr
