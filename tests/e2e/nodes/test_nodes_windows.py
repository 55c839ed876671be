# SPDX-License-Identifier: Apache-2.0
"""
Write windows of several nodes whose daemons and ranks are killed during the window. Afterwards either all nodes have
the written data, or no node has them. The state is compared after each window, because the next window could hide a
difference.
"""

import time

import pytest

from conftest import Daemon
from keeper import KeptDaemon
from nodes import Nodes
from puppet import ABORTED, REFUSED, RESUMED, Puppet
from tiers import full

pytestmark = pytest.mark.threads

HOW = ("written", "again", "forgotten", "aborted")  # the windows before each step, by how they end


class Job:
    """Puppets that act in turn. points: for each node, its successive daemons' failpoints. None: one node."""

    def __init__(self, build, folder, ranks, points=None, **config):
        self.build, self.folder, self.points, self.daemons = build, folder, points, []
        folder.mkdir(exist_ok=True)
        if points is None:
            self.daemons.append(Daemon(build, folder, config | {"world": {"size": sum(ranks)}}))
        else:
            self.nodes = Nodes(self.start, folder, ranks, config)
        self.puppets = [Puppet(self.daemon_of(rank), rank).attach() for rank in range(sum(ranks))]
        self.do("form", expected=(0, RESUMED))

    def start(self, config, env=None, prefix=()):
        where = self.folder / f"node{len(self.daemons)}"
        where.mkdir()
        self.daemons.append(KeptDaemon(self.build, where, config, env, [*self.points[len(self.daemons)], None]))
        return self.daemons[-1]

    def daemon_of(self, rank):
        return self.daemons[self.nodes.node_of(rank) if self.points is not None else 0]

    def tend(self):
        for daemon in self.daemons if self.points is not None else ():
            daemon.tend()

    def n_killed(self):
        return [len(daemon.lives) - 1 for daemon in self.daemons]

    def kill_daemon(self, node):
        self.daemons[node].signal(9)
        self.daemons[node].popen.wait()

    def await_answer(self, puppet, seconds=30):
        """Waits for the answer, and restarts killed daemons meanwhile."""
        deadline = time.monotonic() + seconds * puppet.patience
        while not puppet.has_answered():
            self.tend()
            assert time.monotonic() < deadline, f"rank {puppet.rank} waits for ever\n{self.logs()}" + "".join(d.ctl("status").stdout + d.ctl("ranks").stdout + str(d.life_env(len(d.lives) - 1)) for d in self.daemons)
            time.sleep(0.002)
        return puppet.answer()

    def do(self, *words, ranks=None, expected=(0,)):
        """All ranks, or these, make the same call at the same time. All results must be equal. Return: the result."""
        puppets = [self.puppets[rank] for rank in ranks or range(len(self.puppets))]
        for puppet in puppets:
            puppet.tell(*words)
        answers = [self.await_answer(puppet) for puppet in puppets]
        assert {answer.r for answer in answers} <= set(expected), f"{words}: {answers}\n{self.logs()}"
        return answers[0].r if len({answer.r for answer in answers}) == 1 else None

    def state(self):
        """Return: a digest of master weights, moments, step counts and weights, which must be equal on all ranks."""
        digests = {self.digest(puppet) for puppet in self.puppets}
        assert len(digests) == 1, f"{digests}, kills {self.n_killed()}\n{self.logs()}"
        return digests.pop()

    def digest(self, puppet):
        for _ in range(9):
            puppet.tell("state", "kinds=0124")
            answer = self.await_answer(puppet)
            if answer.r != ABORTED:  # the rank's next call reports the abort
                break
        assert answer.r == 0, answer
        return answer.digest

    def logs(self):
        return "".join(f"---- daemon {i}\n{daemon.log()}" for i, daemon in enumerate(self.daemons))

    def succeed(self, rank):
        """Kills that rank's process and starts a successor. Return: the successor's position."""
        self.puppets[rank].kill()
        self.puppets[rank] = successor = Puppet(self.daemon_of(rank), rank)
        for words in (["connect", f"rank={rank}"], ["declare"], ["form"]):
            successor.tell(*words)
            answer = self.await_answer(successor)
            assert answer.r in (0, RESUMED), answer
        return answer.position

    def end(self):
        for puppet in self.puppets:
            puppet.kill()
        for daemon in self.daemons:
            daemon.kill()


def write(job, value):
    """Rank 0 writes weights and state of parameters of both nodes. Return: false after an abort."""
    for words in (("write", 0, value), ("write", 9, -value), ("put", 1, 1, value), ("put", 9, 2, value / 2),
                  ("put", 7, 4, value), ("put", 7, 0, -value), ("put", 2, 4, value + 9), ("put", 3, 1, value / 4)):
        if job.do(*words, ranks=[0], expected=(0, ABORTED)) == ABORTED:
            return False
    return True


def window(job, how, value):
    """Does one window. Return: false if an abort has ended it on all ranks, so that it must be repeated."""
    if job.do("window", expected=(0, ABORTED)) != 0:
        return False
    if not write(job, value) or how == "aborted":
        return job.do("abort", "window") == 0 and how == "aborted"
    return job.do("forget" if how == "forgotten" else "commit", expected=(0, ABORTED)) == 0


def windows_and_steps(job, n):
    """Return: the state after each window and each step."""
    states = []
    for step in range(n):
        for i, how in enumerate(HOW):
            for _ in range(9):
                if window(job, how, 4 * step + i + 1):
                    break
            states.append((step, how, job.state()))
        job.do("steps", 1)
        states.append((step, "step", job.state()))
    return states


@pytest.fixture(scope="module")
def undisturbed(build, tmp_path_factory):
    """The states of an undisturbed run on one node."""
    job = Job(build, tmp_path_factory.mktemp("undisturbed"), (1, 1))
    yield windows_and_steps(job, max(map(len, (BEGUN, WRITTEN, OVER, SAID))))
    job.end()


@pytest.fixture
def start(build, tmp_path):
    jobs = []

    def start_job(ranks, points=None, **config):
        jobs.append(Job(build, tmp_path / str(len(jobs)), ranks, points, **config))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end()


# The phases of a window. Node 0 sends orders (said), a node receives them (heard) and executes them (obeyed). Nodes
# send reports (reported) to node 0.
BEGUN = ("WINDOW.reported", "OPEN.heard", "OPEN.obeyed", "writing", "WINDOW_END.reported")
WRITTEN = ("WRITE.heard", "WRITE.obeyed", "STORE.heard", "rewrite", "stored", "STORED.reported")
OVER = ("GATHER.heard", "GATHER.obeyed", "CLOSED.heard", "CLOSED.obeyed", "ABORTED.heard", "ABORTED.obeyed")
SAID = ("OPEN.said", "WRITE.said", "STORE.said", "GATHER.said", "CLOSED.said", "ABORTED.said")  # only on node 0


def points_of(phases, node, stage):
    """
    Return: the failpoints of these phases for the node's successive daemons. Rank 0 is on node 0. In stage 3 no weights
    are gathered at the end.
    """
    return [f"{point}:kill" for point in phases if not (node > 0 and (point == "writing" or point in SAID)) and
            not (stage == 3 and point.startswith("GATHER"))]


@pytest.mark.parametrize("victims, stage, phases", (
    ((0,), 2, BEGUN), ((0,), 2, WRITTEN), ((0,), 2, OVER), ((0,), 2, SAID), ((1,), 3, WRITTEN), ((1,), 3, OVER),
    *full(*(((1,), 2, phases) for phases in (BEGUN, WRITTEN, OVER)), *(((0,), 1, phases) for phases in (WRITTEN, OVER)),
          *(((0,), 3, phases) for phases in (BEGUN, WRITTEN, OVER, SAID)), *(((0, 1), 2, phases) for phases in (BEGUN, WRITTEN, OVER)))),
    ids=lambda value: value[0].split(".")[0].lower() if value in (BEGUN, WRITTEN, OVER, SAID) else None)
def test_a_killed_daemon_loses_nothing(start, undisturbed, victims, stage, phases):
    """
    Daemons are killed in each phase. No written data are lost, and nothing of a forgotten or aborted window is stored.
    """
    points = [points_of(phases, node, stage) if node in victims else [] for node in (0, 1)]
    n = max(map(len, points))
    job = start((1, 1), points, zero_optimization={"stage": stage})
    found = windows_and_steps(job, n)
    assert found == undisturbed[:len(found)], job.logs()
    assert job.n_killed() == [len(of_node) for of_node in points], "not all points were reached"


# A rank has ended the window and dies while one node is slow: (rank, slow node, place).
BEHIND = [(0, 1, "WRITE.heard"), (0, 0, "STORE.heard"), (1, 1, "WRITE.heard"), (1, 0, "WINDOW_END.reported")]


@pytest.mark.parametrize("rank, slow, where", BEHIND)
def test_an_end_outlives_its_rank(start, rank, slow, where):
    """
    A rank has ended a window and dies. Its successor neither begins the window again nor changes the data being stored,
    but continues after the window.
    """
    points = [[], []]
    points[slow] = [f"{where}:sleep:1000"]
    job = start((1, 1), points)
    job.do("window")
    assert write(job, 7)
    for puppet in job.puppets:
        puppet.tell("commit")
    time.sleep(0.3)
    assert job.succeed(rank)["windows"] == 1
    assert job.await_answer(job.puppets[1 - rank]).r == 0
    states = [job.state(), job.do("steps", 1), job.state()]
    other = start((1, 1))
    other.do("window")
    assert write(other, 7)
    other.do("commit")
    assert states == [other.state(), other.do("steps", 1), other.state()]


def test_a_rank_dies_with_its_daemon(start):
    """
    A rank and its daemon die after the rank has ended the window. Nobody knows of that end any more, and the successor
    ends the window again.
    """
    job = start((1, 1), [["WRITE.said:sleep:300@1,WRITE.said:sleep:700@2"], ["WRITE.heard:kill"]])
    job.do("window")
    assert write(job, 7)
    for puppet in job.puppets:
        puppet.tell("commit")
    job.daemons[1].popen.wait()
    assert job.succeed(1)["windows"] == 0
    time.sleep(1)  # the window stays open meanwhile
    job.do("window", ranks=[1])
    job.do("commit", ranks=[1])
    assert job.await_answer(job.puppets[0]).r == 0
    states = [job.state(), job.do("steps", 1), job.state()]
    assert len(set(states)) == 3


def test_a_successor_writes_less(start):
    """Rank 0 and its daemon die when node 1 has the data. Node 1 stores only what the successor writes too."""
    job = start((1, 1), [["MOVED.reported:kill@2"], []])  # MOVED 1 is for the initial weights
    job.do("window")
    assert write(job, 7)
    for puppet in job.puppets:
        puppet.tell("commit")
    job.daemons[0].popen.wait()
    assert job.succeed(0)["windows"] == 0
    job.do("window", ranks=[0])
    job.do("put", 7, 0, 3, ranks=[0])
    job.do("commit", ranks=[0])
    assert job.await_answer(job.puppets[1]).r == 0
    other = start((1, 1))
    other.do("window")
    other.do("put", 7, 0, 3, ranks=[0])
    other.do("commit")
    assert job.state() == other.state(), job.logs()


@pytest.mark.parametrize("node", (0, *full(1, 2)))
def test_a_node_without_ranks(start, node):
    """All ranks of node 2 have left. Even a leader that adopts the window does not wait for node 2."""
    job = start((1, 1, 1), [[], [], []], diagnostics={"on_leave": "continue"})
    job.do("steps", 1)
    job.do("leave", ranks=[2])
    del job.puppets[2]
    job.do("steps", 1)
    before = job.state()
    job.do("window")
    assert write(job, 7)
    job.kill_daemon(node)
    job.do("commit")
    assert job.state() != before
    job.do("steps", 1)
