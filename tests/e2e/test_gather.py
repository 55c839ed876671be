# SPDX-License-Identifier: Apache-2.0
"""
Stage 3: gathering any number of parameters, and hints about later gathers, also at bad moments. A hint changes no bit,
keeps nothing gathered, and makes no parameter readable.
"""

import os
import signal
import time

import pytest

from conftest import wait_for
from puppet import ABORTED, N_PARAMS, REFUSED, RESUMED, Puppet, all_do, state, steps, trainers
from tiers import full

pytestmark = pytest.mark.threads

BIG = 7  # of tests/programs/puppet-model.h
PAGE = os.sysconf("SC_PAGESIZE")
STAGE3 = {"zero_optimization": {"stage": 3}}
# Makes each copy into the pool slow, in host memory and through it. On GPUs all operations are slower.
SLOW = {"ZEROD_FAILPOINT": "transfer:sleep:50@*,bounce:sleep:50@*", "ZEROD_SIM": "devices=16,delay-us=3000"}


def pool(daemon):
    return daemon.status()["memory"]["pool"]["held_bytes"]


@pytest.fixture(params=["host", *full("cuda"), "cuda-offload"])
def anywhere(request, monkeypatch):
    """One pool in host memory, or one on each rank's GPU, filled from a GPU or from the host (conftest.place)."""
    monkeypatch.setenv("ZEROD_DEVICE", request.param)


@pytest.fixture
def reference(zerod):
    """reference(n) -> the digest after n steps of a job without hints."""

    def digest(n, config=STAGE3):
        ranks = trainers(zerod(config))
        steps(ranks, n)
        return state(ranks)

    return digest


def test_a_hint_is_only_a_hint(zerod):
    """A prefetched parameter is ready when it is gathered, and not readable before."""
    daemon = zerod(STAGE3, env={"ZEROD_FAILPOINT": "transfer:sleep:6000@*"})
    ranks = trainers(daemon)
    before = time.monotonic()
    ranks[0].ok("prefetch", BIG, 0)
    assert time.monotonic() - before < 5.4, "it waited"
    wait_for("the pool holds both", lambda: pool(daemon) >= 4 * PAGE)
    ranks[1].ok("gather", BIG)  # ready for both ranks when the hint has been carried out
    before = time.monotonic()
    ranks[0].ok("gather", BIG, BIG, 0)
    ranks[0].ok("peek", BIG)
    assert time.monotonic() - before < 5.4, "it was copied again"
    ranks[0].ok("release", BIG, 0)
    assert ranks[0]("release", 0).r < 0  # a hint needs no release
    ranks[0].ok("release", BIG)
    ranks[1].ok("release", BIG)
    assert ranks[0]("prefetch", N_PARAMS).r < 0
    ranks[0].tell("peek", 0)
    assert ranks[0].popen.wait(20 * daemon.patience) in (-signal.SIGSEGV, 99)
    assert "E1110 read of a released weight: rank 0, step 0\n  parameter      embed.weight\n" in ranks[0].err()
    ranks[0].err_path.write_text("")


@pytest.mark.parametrize("moment", ["step", "leave", *full("abort", "window", "norm")])
def test_the_next_call_comes_while_a_hint_is_carried_out(zerod, anywhere, reference, moment):
    daemon = zerod(STAGE3, env=SLOW)
    ranks = trainers(daemon)
    steps(ranks, 1)
    for p in ranks:
        p.ok("prefetch", *range(N_PARAMS))
        p.ok("prefetch", 0)  # dropped
    if moment == "abort":
        ranks[0].ok("begin")
        ranks[0].ok("pushes")
        ranks[1].ok("abort")
        assert ranks[0]("gather", 0).r == ABORTED
        ranks[0].ok("gather", 0)
        ranks[0].ok("release", 0)
    elif moment == "window":
        all_do(ranks, "window")
        ranks[0].ok("write", BIG, 7)
        assert {a.r for a in all_do(ranks, "prefetch", BIG)} == {0}
        assert {a.r for a in all_do(ranks, "forget")} == {0}
    elif moment == "norm":
        assert {a.r for a in all_do(ranks, "norm")} == {0}
    elif moment == "leave":
        assert {a.r for a in all_do(ranks, "leave")} == {0}
        return
    steps(ranks, 1)
    assert state(ranks) == reference(2)


@pytest.mark.parametrize("dies", ["a rank", "all"])
def test_whoever_gave_a_hint_dies(zerod, anywhere, reference, dies):
    daemon = zerod(STAGE3, env=SLOW)
    ranks = trainers(daemon)
    steps(ranks, 1)
    for p in ranks:
        p.ok("prefetch", 0, BIG)
    for p in ranks if dies == "all" else ranks[:1]:
        p.kill()
        ranks[p.rank] = Puppet(daemon, p.rank).attach()
    forming = [p for p in ranks if dies == "all" or p.rank == 0]
    assert {a.r for a in all_do(forming, "form")} == {RESUMED}
    ranks[0].ok("prefetch", BIG, 0)
    steps(ranks, 1)
    assert state(ranks) == reference(2)


def test_the_daemon_ends_while_a_hint_is_carried_out(zerod, anywhere):
    daemon = zerod(STAGE3, env=SLOW | {"ZEROD_FAILPOINT": "transfer:sleep:1000@*"})
    ranks = trainers(daemon)
    ranks[0].ok("prefetch", 0)
    daemon.stop()
    answer = ranks[0]("gather", 0)
    assert answer.r == REFUSED and answer.error["code"] == 1305, answer
    assert ranks[0]("prefetch", 0).r < 0


def test_hints_make_no_room(zerod, reference):
    """A hint for a full pool is ignored. Released parameters make room for it."""
    config = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 3300}}
    daemon = zerod(config)
    ranks = trainers(daemon)
    allowed = daemon.status()["memory"]["pool"]["planned_bytes"]
    for p in ranks:
        p.ok("gather", BIG)
    for _ in range(20):
        ranks[0].ok("prefetch", 0, 1, 2, 3, 9)
        ranks[1].ok("prefetch", 9, 10, 6, 0)
        ranks[0].ok("gather", 6)
        ranks[0].ok("release", 6)
        assert pool(daemon) <= allowed
    all_do(ranks, "release", BIG)
    steps(ranks, 1)
    assert state(ranks) == reference(1)


def test_very_many(zerod):
    """More ids than fit into a packet work. If the last packet is refused, nothing stays gathered."""
    n = 60000
    daemon = zerod({"world": {"size": 1}, "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 3300}})
    rank = trainers(daemon)[0]
    rank.ok("prefetch", 0, BIG, f"times={n}")
    for _ in range(2):
        rank.ok("gather", 0, 2, f"times={n}")
        rank.ok("peek", 2)
        rank.ok("release", 0, f"times={n}")
        rank.ok("release", 2)
        refused = rank("gather", 0, BIG, f"times={n}")
        assert refused.r == REFUSED and refused.error["code"] == 1401, refused
        rank.ok("clear")
        assert rank("release", 0).r < 0
        rank.ok("gather", 1)
        assert rank("release", 1, f"times={n}").r < 0  # it was already released
    rank.ok("gather", BIG)
