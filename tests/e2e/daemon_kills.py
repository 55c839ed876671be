# SPDX-License-Identifier: Apache-2.0
"""
Daemons that are killed at failpoints and at random moments, also while they take over, and started again by a service
manager; trainers go on, and the judge of kills.py says whether the run has the bits of an undisturbed one. Used by
test_daemon_kills.py; as a program (scripts/soak daemon-kills) the long campaign, 10,000 kills by default.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from conftest import Build, ROOT
from keeper import KeptDaemon
import kills
from node_faults import engines
from nodes import Nodes

N_STEPS = 24
N_MICRO = kills.N_MICRO
PER_BATCH, PER_STEP = N_STEPS * N_MICRO, N_STEPS
N_CHUNKS, N_PARCELS = 15, 4  # about: they depend on the bucket size

# A failpoint of the daemon: how often it is passed in a run, for each rank (True) or in all.
POINTS = {
    "Push.log": (PER_BATCH * kills.N_PUSHES, True), "Push.judged": (PER_BATCH * kills.N_PUSHES, True),
    "BeginBackward.log": (PER_BATCH, True), "EndBackward.log": (PER_BATCH, True), "EndBackward.judged": (PER_BATCH, True),
    "Step.log": (PER_STEP, True), "Step.judged": (PER_STEP, True), "Ready.log": (1, True), "answer": (PER_STEP * 4, True),
    "posted": (PER_BATCH * N_PARCELS, False), "reduce": (PER_BATCH * N_CHUNKS, False),
    "stamp": (PER_BATCH * N_CHUNKS, False), "stamped": (PER_BATCH * N_CHUNKS, False),
    "reduced": (PER_BATCH * N_PARCELS, False), "summed": (PER_BATCH * N_PARCELS, False),
    "update": (PER_STEP * N_CHUNKS, False), "updated": (PER_STEP, False), "decided": (PER_STEP, False),
    "flip": (PER_STEP, False), "flipped": (PER_STEP, False), "committed": (PER_STEP, False),
    "transfer": (PER_STEP * 3, False), "forming": (2, False), "rewrite": (3, False), "writing": (3, False),
}
POINTS_OF_NODES = {"verdict": (PER_STEP, False)}  # of node 0
WHILE_FORMED = ("Ready.log", "forming")  # of several nodes: a job that is being formed is formed anew
RECOVERY = ("adopt", "adopted")
MAX_LIFE_MS = 120  # of a daemon that is killed at a random moment: a run takes about so long


class Life:
    """How one daemon ends: at a failpoint, or so many seconds after its start; of several nodes, after the job's."""

    def __init__(self, rng, n_ranks, first, several):
        self.point, self.seconds = None, None
        self.also = rng.choice((*[None] * 4, "trainer", *(["engine", "neighbour"] if several else [])))  # dies with it
        points = POINTS if not several else (POINTS | POINTS_OF_NODES).keys() - set(WHILE_FORMED)
        name = rng.choice([*sorted(points), *([] if first else RECOVERY * 3), *["random"] * (6 if several else 2)])
        if name == "random":
            self.seconds = rng.uniform(0, (5 if several else 1) * MAX_LIFE_MS / 1000)
        elif name in RECOVERY:
            self.point = f"{name}:kill"
        else:
            n, per_rank = (POINTS | POINTS_OF_NODES)[name]
            n = max(1, n * (n_ranks if per_rank else 1) * (9 if first else 3) // 10)
            least = {"answer": 30 * n_ranks, "flip": 3, "flipped": 3}.get(name, 1) if several else 1  # once it is formed
            self.point = f"{name}:kill@{rng.randint(least, max(n, least))}"

    @classmethod
    def at(cls, point):
        life = cls(random.Random(0), 1, first=True, several=False)
        life.point, life.seconds, life.also = point, None, None
        return life

    def __repr__(self):
        return (self.point or f"{self.seconds * 1000:.0f} ms") + (f" and a {self.also}" if self.also else "")


TOPOLOGIES = {1: ((1,), (2,), (2,), (3,), (4,)), 2: ((1, 1), (1, 2), (2, 2)), 3: ((1, 1, 1), (2, 1, 1))}
ABORT = r"E1302 step aborted.*the daemon of node \d was replaced by another one in the midst of the step"


class Plan:
    """Configuration, environment, arguments of the trainers, and lives of each node's daemon."""

    def __init__(self, seed, n_nodes=None):
        rng = random.Random(seed)
        self.seed, self.n_nodes = seed, n_nodes or rng.choice((1, 1, 1, 2, 3))
        self.ranks = rng.choice(TOPOLOGIES[self.n_nodes])
        self.accumulate = rng.random() < 0.25
        self.config, self.env = kills.options(rng, rng.choice(("mid-push", "pushed", "update", "gather")))
        self.config["limits"] = {"reattach_timeout": "20s"}
        self.optimizer = rng.choice(("AdamW", *kills.OPTIMIZERS))
        self.config["optimizer"], self.moments = kills.OPTIMIZERS[self.optimizer]
        self.lives = [self.draw_lives(rng, n) for n in self.ranks]
        self.victims = [[] for _ in range(self.world_size)]
        if rng.random() < 0.2:  # a trainer dies, too
            plan = kills.kill_plan(rng, rng.choice(("mid-push", "waiting", "committed")), 1)
            self.victims[rng.randrange(self.world_size)] = [p for p in plan if int(p.rsplit("@", 1)[1]) <= N_STEPS]

    def draw_lives(self, rng, n_ranks):
        n = rng.choice((1, 2, 3, 5, 8)) if self.n_nodes == 1 else rng.choice((0, 1, 1, 2, 4))
        return [Life(rng, n_ranks, first=i == 0, several=self.n_nodes > 1) for i in range(n)]

    @property
    def world_size(self):
        return sum(self.ranks)

    def __repr__(self):
        return (f"seed {self.seed}: ranks {self.ranks}, {self.config}, {self.env}, accumulate {self.accumulate}, "
                f"lives {self.lives}, trainers {self.victims}")


class Job:
    """A daemon for each node, which a service manager of its own starts again, and the trainers."""

    def __init__(self, build, folder, plan):
        self.build, self.folder, self.plan, self.daemons = build, folder, plan, []
        self.began = None  # the training
        self.whole = Nodes(self.daemon, folder, plan.ranks, plan.config, plan.env) if plan.n_nodes > 1 else self.alone()
        args = ["--moments", plan.moments, *(["--accumulate"] if plan.accumulate else [])]
        self.ranks = kills.start(self.whole, plan.victims, args, N_STEPS)

    def daemon(self, config, env=None, prefix=()):
        where = self.folder / f"node{len(self.daemons)}"
        where.mkdir()
        points = [life.point for life in self.plan.lives[len(self.daemons)]] + [None]
        self.daemons.append(KeptDaemon(self.build, where, config, env, points))
        return self.daemons[-1]

    def alone(self):
        return self.daemon(self.plan.config | {"world": {"size": self.plan.world_size}}, self.plan.env)

    def tend(self):
        """Return: whether trainers still run."""
        if self.began is None and (self.plan.n_nodes == 1 or "weights 0 " in self.ranks[0].last.out()):
            self.began = time.monotonic()
        for node, (daemon, lives) in enumerate(zip(self.daemons, self.plan.lives)):
            life = len(daemon.lives) - 1
            seconds = lives[life].seconds if life < len(lives) else None
            if seconds is not None and self.began and time.monotonic() - max(daemon.began, self.began) > seconds:
                daemon.signal(signal.SIGKILL)
                daemon.popen.wait()
            if daemon.popen.poll() == -signal.SIGKILL and life < len(lives):
                self.kill_also(lives[life].also, node)
            daemon.tend()
        return any([rank.tend() for rank in self.ranks])

    def kill_also(self, what, node):
        """While that node's daemon is dead: its first trainer, another node's engine, or another node's daemon."""
        other = (node + 1) % len(self.daemons)
        rank = self.ranks[sum(self.plan.ranks[:node])]
        if what == "trainer" and self.began and not rank.plan and rank.last.poll() is None:
            rank.n_kills += 1
            rank.last.signal(signal.SIGKILL)
        for pid in engines(self.daemons[other]) if what == "engine" else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if what == "neighbour" and self.began and self.daemons[other].popen.poll() is None:
            self.daemons[other].signal(signal.SIGKILL)
            self.daemons[other].popen.wait()

    def describe(self):
        return kills.describe(self.ranks, self.whole)

    def n_killed(self):
        return sum(len(daemon.lives) - 1 for daemon in self.daemons)

    def others(self):
        return [process for daemon in self.daemons for process in daemon.others]

    def end(self):
        for process in self.others():
            process.kill()
        for daemon in self.daemons:
            daemon.kill()


def one_run(build, references, folder, plan, timeout=60):
    """Return: how often daemons were killed. A failure raises AssertionError."""
    reference = references.get(plan.world_size, plan.accumulate, N_STEPS, optimizer=plan.optimizer)
    job = Job(build, folder, plan)
    deadline = time.monotonic() + timeout * job.whole.patience
    try:
        while job.tend():
            assert time.monotonic() < deadline, f"the run did not end\n{job.describe()}"
            time.sleep(0.002)
        job.tend()
        kills.judge(job.ranks, job.whole, reference, ABORT if plan.n_nodes > 1 else None)
        for daemon in job.daemons:
            daemon.stop()
        for process in job.others():
            process.check_sanitizers()
    except BaseException as error:
        error.args = (f"{plan}\n{error}",)
        raise
    finally:
        job.end()
    return job.n_killed()


def campaign(n_kills, seed0, max_failures=3, say=print, n_nodes=None):
    """Runs until the daemons were killed so often; n_nodes: all on so many. Return: how many runs failed."""
    build = Build(os.environ.get("ZEROD_BUILD", ROOT / "build"))
    folder = Path(tempfile.mkdtemp(prefix="zerod-daemon-kills-"))
    references = kills.References(build, folder)
    began, n_killed, n_runs, n_failed = time.monotonic(), 0, 0, 0
    while n_killed < n_kills and n_failed < max_failures:
        where = folder / str(n_runs)
        where.mkdir()
        try:
            n_killed += one_run(build, references, where, Plan(seed0 + n_runs, n_nodes))
            shutil.rmtree(where)
        except AssertionError as error:
            n_failed += 1
            (where / "failure.txt").write_text(str(error))
            say(f"FAILED, see {where}/failure.txt\n{str(error)[:3000]}")
        n_runs += 1
        if n_runs % 100 == 0:
            say(f"{n_runs} runs, {n_killed} kills, {n_failed} failed, {time.monotonic() - began:.0f} s")
    say(f"seed {seed0}: {n_runs} runs of {N_STEPS} steps, {n_killed} kills of the daemon, {n_failed} runs failed, "
        f"{time.monotonic() - began:.0f} s")
    if n_failed == 0:
        shutil.rmtree(folder)
    return n_failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/soak daemon-kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=10000, help="until the daemon was killed so often (10000)")
    parser.add_argument("--seed", type=int, help="repeats a campaign; random unless given")
    parser.add_argument("--nodes", type=int, choices=TOPOLOGIES, help="all runs on so many nodes; random unless given")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**9)
    sys.exit(1 if campaign(arguments.kills, seed, n_nodes=arguments.nodes) else 0)
