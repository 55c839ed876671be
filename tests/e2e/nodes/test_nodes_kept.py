# SPDX-License-Identifier: Apache-2.0
"""
Replaced daemons of several nodes: their messages, and for what they wait. The campaign is in test_daemon_kills.py.
"""

import signal
import time

import pytest

from conftest import wait_for
from daemon_kills import ABORT, Job, Life, Plan, reference_of
import kills


@pytest.fixture
def start(build, tmp_path):
    """start(points) starts a job of two nodes. points: failpoints at which node 0's and node 1's daemons die, once."""
    jobs = []

    def start_job(*points):
        plan = Plan(1, 2, device="", only=())
        plan.ranks, plan.victims, plan.accumulate, plan.moments = (1, 1), [[], []], False, "mv"
        plan.config, plan.env, plan.optimizer = {"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}, {}, "AdamW"
        plan.saves = plan.loads = False
        plan.lives = [[Life.at(point)] if point else [] for point in points]
        jobs.append(Job(build, tmp_path, plan))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end()


def finish(job, build, tmp_path, excuse):
    deadline = time.monotonic() + 60 * job.whole.patience
    while job.tend():
        assert time.monotonic() < deadline, job.describe()
        time.sleep(0.002)
    kills.judge(job.ranks, job.whole, reference_of(kills.References(build, tmp_path), job.plan)[1], excuse)


def n_aborts(job):
    return sum(daemon.log().count("E1302 step aborted") for daemon in job.daemons)


@pytest.mark.parametrize("points, n", [
    ((None, "summed:kill@60"), [2]),       # during a step
    (("verdict:kill@9", None), [0]),       # node 0 has decided, and no other node has received the decision
    (("committed:kill@9", None), [0, 2]),  # the other node may have begun the next step
    ((None, "decided:kill@9"), [0]),
    ((None, "updated:kill@9"), [0]),
    (("updated:kill@9", "updated:kill@9"), [0]),
], ids=["open", "verdict", "committed", "decided", "updated", "both"])
def test_a_decided_step_stands(start, build, tmp_path, points, n):
    """The daemons are killed around a decision. A decided step stays decided; an open one is aborted on all nodes."""
    job = start(*points)
    finish(job, build, tmp_path, ABORT if any(n) else None)
    assert n_aborts(job) in n
    assert job.n_killed() == sum(point is not None for point in points)


def test_a_node_that_holds_stays_apart(start, build, tmp_path):
    """
    A daemon holds a run that it cannot continue, because a part is missing. The other nodes do not treat it as a new
    daemon, but wait until it can continue.
    """
    job = start(None, "summed:kill@60")
    daemon = job.daemons[1]
    assert daemon.popen.wait(30 * daemon.patience) == -signal.SIGKILL
    daemon.store.settle()
    good = list(daemon.store.kept)
    daemon.store.kept = [k for k in good if k[0] != "counts"]
    daemon.start_again()
    wait_for(daemon.log, lambda: '"counts" is missing' in daemon.log())
    time.sleep(1)
    assert "E1503" not in job.daemons[0].log()
    assert daemon.ctl("status").stdout.count("this daemon holds a run, and stays apart") == 1
    daemon.signal(signal.SIGKILL)
    daemon.popen.wait()
    daemon.store.kept = good
    finish(job, build, tmp_path, ABORT)
    assert "E1503" not in job.daemons[0].log()
