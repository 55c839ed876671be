# SPDX-License-Identifier: Apache-2.0
"""
Jobs on GPUs whose optimizer is in host memory: before the step is decided, sums are copied to the host, and on one node
chunks are updated in spare places. All numbers are those of a job without that, whatever comes after a copy, and whenever
a daemon dies.
"""

import re
import time

import pytest

import kills
from conftest import wait_for
from daemon_kills import Life, Plan, one_run
from puppet import RESUMED, Puppet, all_do, state, steps, trainers
from tiers import full

pytestmark = pytest.mark.threads


@pytest.fixture
def start(zerod, monkeypatch):
    """start(early, stage, env, **config) -> a daemon whose job is on GPUs, with its optimizer in host memory."""
    monkeypatch.setenv("ZEROD_DEVICE", "cuda-offload")

    def begin(early, stage=2, env=None, bucket=300, **config):
        zero = {"stage": stage, "reduce_bucket_size": bucket, "speculative_update": early}
        return zerod({"world": {"size": 2}, "zero_optimization": zero, "gradient_clipping": 0, **config}, env)

    return begin


def early_updates(daemon):
    """Return: the numbers of chunks that were updated before the decision, and accepted or dropped."""
    counters = daemon.status()["counters"]
    return counters["n_early_updates"], counters["n_early_updates_dropped"]


def micro_batch(ranks, *options):
    """A micro-batch, after which sums have the time to be copied."""
    for words in (("begin",), ("pushes", *options), ("end",)):
        assert [a.r for a in all_do(ranks, *words)] == [0] * len(ranks)
    time.sleep(0.2)


def step(ranks, *options):
    assert [a.r for a in all_do(ranks, "step", *options)] == [0] * len(ranks)


def plain(ranks):
    for _ in range(3):
        micro_batch(ranks)
        step(ranks)


def one_more_micro_batch(ranks):
    micro_batch(ranks)
    micro_batch(ranks)
    step(ranks)


def one_less_micro_batch(ranks):
    steps(ranks, 2, "micro=3")
    micro_batch(ranks)
    micro_batch(ranks)
    step(ranks)


def aborted(ranks):
    """The sums of the first attempt are copied, and count in no other attempt."""
    micro_batch(ranks, "from=5")
    all_do(ranks, "abort", "no-reason")
    micro_batch(ranks)
    step(ranks)


def aborted_at_once(ranks):
    """The copies of the first attempt may still be under way."""
    for _ in range(5):
        all_do(ranks, "begin"), all_do(ranks, "pushes", "from=5"), all_do(ranks, "abort", "no-reason")
        steps(ranks)


def left_out(ranks):
    """A parcel without gradients keeps the sums of the step before, in accumulators and in the copy."""
    micro_batch(ranks, "but=0,1,2")
    step(ranks)
    micro_batch(ranks, "only=3")
    step(ranks)


def skipped(ranks):
    micro_batch(ranks)
    step(ranks, "inf=1")
    micro_batch(ranks)
    step(ranks, "norm=0.01")


def other_rate(ranks):
    micro_batch(ranks)
    step(ranks, "lr=0.5")


def window(ranks):
    for _ in range(2):
        micro_batch(ranks)
        step(ranks)
        all_do(ranks, "window")
        ranks[0].ok("put", 0, 1, 5)
        ranks[0].ok("put", 7, 0, 3)
        all_do(ranks, "commit")


def check_early(daemon, what, before, early):
    """Asserts that chunks were updated early, and accepted or dropped as this case wants it."""
    accepted, dropped = (after - n for after, n in zip(early_updates(daemon), before))
    if not early:
        assert (accepted, dropped) == (0, 0)
    elif what is other_rate:
        assert accepted < dropped  # one group keeps its rate
    elif what is one_more_micro_batch:
        assert accepted == 0 and dropped > 0
    elif what in (plain, window, left_out):
        assert accepted > 0 and dropped == 0


@pytest.mark.parametrize("stage", [2, *full(1, 3)])
@pytest.mark.parametrize("what", [plain, one_more_micro_batch, one_less_micro_batch, aborted, aborted_at_once, left_out,
                                  skipped, other_rate, window])
def test_same(start, what, stage):
    found = []
    for early in (True, False):
        daemon = start(early, stage)
        ranks = trainers(daemon)
        steps(ranks, 2)  # so that the number of micro-batches is known
        before = early_updates(daemon)
        what(ranks)
        check_early(daemon, what, before, early and stage < 3)
        found.append(state(ranks))
        steps(ranks, 2)
        found.append(state(ranks))
        assert daemon.status()["device"]["n_failures"] == 0, daemon.log()
    assert found[:2] == found[2:]


def test_pushed_twice(start):
    """A second pass adds to sums that are copied."""
    found = []
    for early in (True, False):
        ranks = trainers(start(early), options=("duplicate=accumulate",))
        steps(ranks, 2)
        all_do(ranks, "begin"), all_do(ranks, "pushes"), all_do(ranks, "flush")
        time.sleep(0.2)
        all_do(ranks, "push", 0), all_do(ranks, "push", 7), all_do(ranks, "end")
        step(ranks)
        found.append(state(ranks))
    assert found[0] == found[1]


def test_window_over_what_a_dead_rank_has_left(start):
    """A rank dies when its gradients are copied. Its successor writes moments in a window, and pushes the same."""
    found = []
    for early in (True, False):
        daemon = start(early, world={"size": 1})
        ranks = trainers(daemon)
        steps(ranks, 2)
        ranks[0].ok("begin"), ranks[0].ok("pushes")
        time.sleep(0.2)
        ranks[0].kill()
        ranks = [Puppet(daemon, 0).attach()]
        assert ranks[0]("form").r == RESUMED
        ranks[0].ok("window"), ranks[0].ok("put", 0, 1, 5), ranks[0].ok("commit")
        steps(ranks)
        found.append(state(ranks))
    assert found[0] == found[1]


@pytest.mark.parametrize("early", [True, False])
def test_before_the_decision(build, start, early):
    """Sums are copied although no rank has asked for the step. The daemon dies at the first copy, if there is one."""
    if not build.options.get("failpoints"):
        pytest.skip("a build without failpoints: meson setup -Dfailpoints=true")
    daemon = start(early, env={"ZEROD_FAILPOINT": "copied:kill"})
    ranks = trainers(daemon)
    steps(ranks)
    for words in (("begin",), ("pushes",)):
        all_do(ranks, *words)
    for rank in ranks:
        rank.tell("end")
    if early:
        wait_for("the copy", lambda: not daemon.running())
        daemon.checked = True  # it was killed
        return
    assert [rank.answer().r for rank in ranks] == [0, 0]
    step(ranks)


@pytest.mark.parametrize("more_bytes, early, spare", [(1_500_000, "[1-9]", None), (2_500_000, "16", "[1-9]")])
def test_short_memory(start, more_bytes, early, spare):
    """limits.memory leaves room for some buckets, a write window and a reading. The others are copied after the decision."""

    def run(early, **config):
        daemon = start(early, bucket=20000, **config)
        ranks = trainers(daemon, declare=("many", 48, "elems=5000"))
        steps(ranks, 4)
        return daemon, state(ranks)

    daemon, expected = run(False)
    memory = daemon.status()["memory"]
    needed = sum(memory[kind]["planned_bytes"] for kind in ("state", "staging", "fixed"))
    daemon, found = run("auto", limits={"memory": needed + more_bytes})
    assert found == expected
    assert re.search(f"the sums of {early} of 16 buckets are copied", daemon.err()), daemon.err()
    assert (early_updates(daemon)[0] > 0) == (spare is not None)
    if spare:
        assert re.search(f"the update of {spare} of 16 buckets begins in the backward", daemon.err()), daemon.err()


# ---- kills ------------------------------------------------------------------------------------------------------------


COPIES = ("copied:kill@3", "early:kill@2", "copied:kill@11", "update:kill@4")
MIXED = ("early:fuse:200000@4", "decided:kill@2", "update:fuse:20000@7", "copied:fuse:50000@5")
UPDATES = ("speculate:fuse:20000@9", "accept:kill@5", "turn:kill@11", "speculated:kill@20", "accept:fuse:5000@7", "stamp:kill@30")


@pytest.mark.parametrize("n_nodes, points", [(1, COPIES), (1, MIXED), (1, UPDATES), (2, COPIES), *full((2, MIXED))])
def test_daemon_killed(build, tmp_path, n_nodes, points):
    """Daemons die while sums are copied, and while chunks are updated from the copies. No bit changes."""
    plan = Plan(2, n_nodes=n_nodes, device="cuda-offload", only=())
    plan.victims = [[] for _ in plan.victims]
    plan.config["zero_optimization"] |= {"speculative_update": True, "stage": 2}
    plan.config["gradient_clipping"] = plan.clipping = 1e9 if points is UPDATES else 25
    plan.lives = [[Life.at(point) for point in points] for _ in range(n_nodes)]
    assert one_run(build, kills.References(build, tmp_path), tmp_path, plan) > 0
