# SPDX-License-Identifier: Apache-2.0
"""
Daemons that are killed at failpoints and at random moments, also while they take over, and started again by a service
manager; trainers go on, and the judge of kills.py says whether the run has the bits of an undisturbed one. Used by
test_daemon_kills.py; as a program (scripts/soak daemon-kills) the long campaign, 10,000 kills by default.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from conftest import Build, Daemon, ROOT, merge, wait_for
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
    "BeginBackward.log": (PER_BATCH, True), "EndBackward.log": (PER_BATCH, True),
    "EndBackward.judged": (PER_BATCH, True), "Step.log": (PER_STEP, True), "Step.judged": (PER_STEP, True),
    "Ready.log": (1, True), "answer": (PER_STEP * 4, True),
    "credit": (PER_BATCH * N_PARCELS, True), "posted": (PER_BATCH * N_PARCELS, False),
    "reduce": (PER_BATCH * N_CHUNKS, False),
    "stamp": (PER_BATCH * N_CHUNKS, False), "stamped": (PER_BATCH * N_CHUNKS, False),
    "reduced": (PER_BATCH * N_PARCELS, False), "summed": (PER_BATCH * N_PARCELS, False),
    "update": (PER_STEP * N_CHUNKS, False), "updated": (PER_STEP, False), "decided": (PER_STEP, False),
    "flip": (PER_STEP, False), "flipped": (PER_STEP, False), "committed": (PER_STEP, False),
    "transfer": (PER_STEP * 3, False), "forming": (2, False), "rewrite": (3, False), "writing": (3, False),
    "bringing": (3, False),
}
POINTS_OF_NODES = {"verdict": (PER_STEP, False), "combined": (PER_BATCH * N_PARCELS // 2, False)}  # verdict: of node 0
# While checkpoints are written.
POINTS_OF_SAVES = {"aside": 60, "save": 3, "disk.make_folder": 3, "disk.create": 6, "disk.write": 12,
                   "disk.truncate": 6, "disk.sync": 9, "disk.rename": 3, "disk.remove_folder": 2}
# While Muon updates matrices.
POINTS_OF_MUON = {"orthogonalize": PER_STEP * 4, "update": PER_STEP * 2 * N_CHUNKS}
# While a checkpoint is loaded: the one that undisturbed runs have left at this step.
POINTS_OF_LOADS = {"load": 3, "forming": 2, "flip": 1}
LOADED_STEP = 9
# While a job on several nodes is being formed.
POINTS_OF_FORMING = {
    "forming": (3, False), "reserve": (6, False), "flip": (2, False), "flipped": (2, False), "answer": (6, True),
    "Ready.log": (1, True), "Ready.judged": (1, True), "order": (4, False),
}
RECOVERY = ("adopt", "adopted")
IN_CHUNKS = ("update", "reduce")
FUSES_NS = {"update": 20_000, "reduce": 20_000, "bringing": 2_000_000}  # how long at most what begins there takes
MAX_LIFE_MS = 120  # of a daemon that is killed at a random moment: a run takes about so long
FORMING = 0.3  # of the lives of daemons of several nodes: as many end while the job is being formed


class Life:
    """How one daemon ends: at a failpoint, or so many seconds after its start."""

    def __init__(self, rng, n_ranks, first, several):
        self.point, self.seconds = None, None
        self.also = rng.choice((*[None] * 4, "trainer", *(["engine", "neighbour"] if several else [])))  # dies with it
        points = POINTS | POINTS_OF_NODES if several else POINTS
        if several and rng.random() < FORMING:
            points = POINTS_OF_FORMING
        name = rng.choice([*sorted(points), *[name for name in IN_CHUNKS * 3 if name in points],
                           *([] if first else RECOVERY * 3), *["random"] * (6 if several else 2)])
        if name == "random":
            self.seconds = rng.uniform(0, (5 if several else 1) * MAX_LIFE_MS / 1000)
        elif name in RECOVERY:
            self.point = f"{name}:kill"
        else:
            n, per_rank = points[name]
            n = max(1, n * (n_ranks if per_rank else 1) * (9 if first else 3) // 10)
            # Most of those who are to die at a chunk die inside of it.
            how = f"fuse:{rng.randint(0, FUSES_NS[name])}" if name in FUSES_NS and rng.random() < 0.7 else "kill"
            self.point = f"{name}:{how}@{rng.randint(1, n)}"

    @classmethod
    def at(cls, point):
        life = cls(random.Random(0), 1, first=True, several=False)
        life.point, life.seconds, life.also = point, None, None
        return life

    def __repr__(self):
        return (self.point or f"{self.seconds * 1000:.0f} ms") + (f" and a {self.also}" if self.also else "")


DEVICES = (*[""] * 10, "cuda", "cuda-offload")  # as ZEROD_DEVICE: GPUs take longer
TOPOLOGIES = {1: ((1,), (2,), (2,), (3,), (4,)), 2: ((1, 1), (1, 2), (2, 2)), 3: ((1, 1, 1), (2, 1, 1))}
ABORT = r"E1302 step aborted.*the daemon of node \d was replaced by another one in the midst of the step"
# A trainer on a GPU was killed inside a backward: only a part of a gradient was there.
TORN = r"E1302 step aborted.*or as much of that as the GPU had written when it died"


class Plan:
    """Configuration, environment, arguments of the trainers, and lives of each node's daemon."""

    def __init__(self, seed, n_nodes=None, device=None, optimizer=None):
        rng = random.Random(seed)
        self.seed, self.n_nodes = seed, n_nodes or rng.choice((1, 1, 1, 2, 3))
        self.ranks = rng.choice(TOPOLOGIES[self.n_nodes])
        self.accumulate = rng.random() < 0.25
        self.config, self.env = kills.options(rng, rng.choice(("mid-push", "pushed", "update", "gather")))
        self.config["limits"] = {"reattach_timeout": "20s"}
        self.optimizer = optimizer or rng.choice(("AdamW", *kills.OPTIMIZERS))
        self.lives = [self.draw_lives(rng, n) for n in self.ranks]
        self.victims = [[] for _ in range(self.world_size)]
        if rng.random() < 0.2:  # a trainer dies, too
            plan = kills.kill_plan(rng, rng.choice(("mid-push", "waiting", "committed")), 1)
            self.victims[rng.randrange(self.world_size)] = [p for p in plan if int(p.rsplit("@", 1)[1]) <= N_STEPS]
        self.device = rng.choice(DEVICES)
        self.engine_kills = [rng.uniform(0.3, 2) for _ in range(rng.choice((0, 0, 1, 3)))] if self.device else []
        self.device = self.device if device is None else device
        if self.optimizer == "Muon" and self.device == "cuda-offload":
            self.optimizer = "AdamW"
        self.config["optimizer"], self.moments = kills.OPTIMIZERS[self.optimizer]
        self.state = rng.choice(("fp32", *kills.STATES))
        self.config = merge(self.config, kills.STATES[self.state])
        self.saves = rng.random() < 0.7
        if self.saves:
            self.save_meanwhile(rng)
        self.loads = rng.random() < 0.2
        if self.loads:
            self.load_first(rng)
        if self.optimizer == "Muon":
            self.end_some_lives(rng, POINTS_OF_MUON)
        self.overlap = rng.random() < 0.5  # forwards begin while the update still writes weights

    def load_first(self, rng):
        """The run goes on with a checkpoint, and most daemons that are killed first are killed while they load it."""
        self.victims = [[] for _ in self.victims]  # they count on all steps
        for lives in self.lives:
            if lives and rng.random() < 0.7:
                name = rng.choice(sorted(POINTS_OF_LOADS))
                lives[0].point, lives[0].seconds = f"{name}:kill@{rng.randint(1, POINTS_OF_LOADS[name])}", None

    def save_meanwhile(self, rng):
        """Checkpoints are written all the time, and some lives end within that."""
        self.config["checkpoint"] = {"save_steps": rng.choice((1, 2, 5)), "save_total_limit": rng.choice((0, 1, 3)),
                                     "memory": rng.choice((1, 200_000, "auto"))}
        self.end_some_lives(rng, POINTS_OF_SAVES)

    def end_some_lives(self, rng, points):
        for life in itertools.chain(*self.lives):
            if rng.random() < 0.3:
                name = rng.choice(sorted(points))
                life.point, life.seconds = f"{name}:kill@{rng.randint(1, points[name])}", None

    def draw_lives(self, rng, n_ranks):
        n = rng.choice((1, 2, 3, 5, 8)) if self.n_nodes == 1 else rng.choice((0, 1, 1, 2, 4))
        return [Life(rng, n_ranks, first=i == 0, several=self.n_nodes > 1) for i in range(n)]

    @property
    def excuse(self):
        """What aborts of this run may be told of."""
        trainers_die = any(self.victims) or any(life.also == "trainer" for lives in self.lives for life in lives)
        excuses = [ABORT] * (self.n_nodes > 1) + [TORN] * bool(self.device and trainers_die)
        return "|".join(excuses) or None

    @property
    def world_size(self):
        return sum(self.ranks)

    def __repr__(self):
        return (f"seed {self.seed}: ranks {self.ranks}, {self.config}, {self.env}, accumulate {self.accumulate}, "
                f"overlap {self.overlap}, "
                f"loads {self.loads}, lives {self.lives}, trainers {self.victims}, {self.device} {self.engine_kills}")


class Job:
    """A daemon for each node, which a service manager of its own starts again, and the trainers."""

    def __init__(self, build, folder, plan, loads=None):
        """loads: the checkpoint that the run begins with."""
        self.build, self.folder, self.plan, self.daemons = build, folder, plan, []
        self.began, self.trains = time.monotonic(), False
        self.engine_kills = list(plan.engine_kills)
        config = plan.config
        if plan.saves:
            config = config | {"checkpoint": config["checkpoint"] | {"dir": str(folder / "checkpoints")}}
        if loads:
            config = config | {"checkpoint": config.get("checkpoint", {}) | {"load": str(loads)}}
        self.whole = (Nodes(self.daemon, folder, plan.ranks, config, plan.env) if plan.n_nodes > 1 else
                      self.daemon(config | {"world": {"size": plan.world_size}}, plan.env))
        args = ["--moments", plan.moments, *(["--accumulate"] if plan.accumulate else []),
                *(["--overlap"] if plan.overlap else [])]
        self.ranks = kills.start(self.whole, plan.victims, args, N_STEPS)

    def daemon(self, config, env=None, prefix=()):
        where = self.folder / f"node{len(self.daemons)}"
        where.mkdir()
        points = [life.point for life in self.plan.lives[len(self.daemons)]] + [None]
        self.daemons.append(KeptDaemon(self.build, where, config, env, points))
        return self.daemons[-1]

    def tend(self):
        """Return: whether trainers still run."""
        self.trains = self.trains or self.plan.n_nodes == 1 or "weights 0 " in self.ranks[0].last.out()
        for node, (daemon, lives) in enumerate(zip(self.daemons, self.plan.lives)):
            life = len(daemon.lives) - 1
            seconds = lives[life].seconds if life < len(lives) else None
            if seconds is not None and time.monotonic() - daemon.began > seconds:
                daemon.signal(signal.SIGKILL)
                daemon.popen.wait()
            if daemon.popen.poll() == -signal.SIGKILL and life < len(lives):
                self.kill_also(lives[life].also, node)
            daemon.tend()
        self.kill_engine()
        return any([rank.tend() for rank in self.ranks])

    def kill_engine(self):
        """Of GPUs, at the moments that the plan says, if it is not the first one that is not ready yet (E1502)."""
        if (self.engine_kills and time.monotonic() - self.began > self.engine_kills[0] and
                "weights 0 " in self.ranks[0].processes[0].out()):
            for pid in engines(self.daemons[0]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.engine_kills.pop(0)

    def kill_also(self, what, node):
        """While that node's daemon is dead: its first trainer, another node's engine, or another node's daemon."""
        other = (node + 1) % len(self.daemons)
        rank = self.ranks[sum(self.plan.ranks[:node])]
        has_own = any(kills.is_deadly(life) for life in rank.plan)
        if what == "trainer" and self.trains and not has_own and rank.last.poll() is None:
            rank.last.signal(signal.SIGKILL)
            rank.n_kills += rank.last.wait() == -signal.SIGKILL  # else it had just ended
        for pid in engines(self.daemons[other]) if what == "engine" else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if what == "neighbour" and self.trains and self.daemons[other].popen.poll() is None:
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


@contextlib.contextmanager
def on_device(device):
    """Daemons that are made meanwhile have their jobs there."""
    before = os.environ.get("ZEROD_DEVICE")
    os.environ["ZEROD_DEVICE"] = device
    try:
        yield
    finally:
        os.environ.pop("ZEROD_DEVICE")
        if before is not None:
            os.environ["ZEROD_DEVICE"] = before


def make_checkpoint(build, folder, plan):
    """That of an undisturbed run. Return: its path."""
    settings, moments = kills.OPTIMIZERS[plan.optimizer]
    folder.mkdir()
    config = {"world": {"size": plan.world_size}, "gradient_clipping": 1.0, "optimizer": settings,
              "checkpoint": {"dir": str(folder / "begun")}}
    daemon = Daemon(build, folder, merge(config, kills.STATES[plan.state]))
    args = ["--moments", moments, *(["--accumulate"] if plan.accumulate else [])]
    ranks = kills.train(daemon, [[]] * plan.world_size, args, LOADED_STEP)
    assert all(rank.last.poll() == 0 for rank in ranks), kills.describe(ranks, daemon)
    path = daemon.ctl("checkpoint", "save").stdout.strip()
    daemon.stop()
    return path


def one_run(build, references, folder, plan, timeout=60):
    """Return: how often daemons were killed. A failure raises AssertionError."""
    with on_device(plan.device if plan.optimizer == "Muon" else ""):  # Muon's products have other bits on GPUs
        reference = references.get(plan.world_size, plan.accumulate, N_STEPS, optimizer=plan.optimizer, state=plan.state)
        begun = make_checkpoint(build, folder / "before", plan) if plan.loads else None
    if begun:
        reference = {key: found for key, found in reference.items() if key[0] == "final" or key[1] >= LOADED_STEP}
    with on_device(plan.device):
        job = Job(build, folder, plan, begun)
    deadline = time.monotonic() + timeout * job.whole.patience
    try:
        while job.tend():
            assert time.monotonic() < deadline, f"the run did not end\n{job.describe()}"
            time.sleep(0.002)
        job.tend()
        kills.judge(job.ranks, job.whole, reference, plan.excuse)
        if plan.saves:
            for daemon in job.daemons:
                wait_for("the end of the save", lambda: not daemon.tend() and daemon.is_settled() and saves_not(daemon))
            # A run that is over before a daemon has the memory to save with leaves none.
            if any("]: saved " in log.read_text() for log in folder.rglob("zerod*.err")):
                job.daemons[0].ctl("checkpoint", "verify")
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


def saves_not(daemon):
    """No checkpoint is being written, and no daemon dies while it is asked."""
    answer = daemon.ctl("--json", "status", check=False)
    return answer.returncode == 0 and not json.loads(answer.stdout)["checkpoint"]["saving"]


class Runner:
    """Runs by their seeds, one after the other. Of a campaign's process."""

    def __init__(self, folder, n_nodes=None, device=None, optimizer=None):
        self.build = Build(os.environ.get("ZEROD_BUILD", ROOT / "build"))
        self.folder, self.n_nodes, self.device, self.optimizer = folder, n_nodes, device, optimizer
        self.references = kills.References(self.build, Path(tempfile.mkdtemp(dir=folder)))

    def run(self, seed):
        """Return: how often daemons were killed, and what failed or None."""
        where = self.folder / str(seed)
        where.mkdir()
        plan = Plan(seed, self.n_nodes, self.device, self.optimizer)
        try:
            n_killed = one_run(self.build, self.references, where, plan)
        except Exception as error:  # not the campaign's end, but a failed run
            (where / "failure.txt").write_text(str(error))
            return 0, f"FAILED, see {where}/failure.txt\n{str(error)[:3000]}"
        shutil.rmtree(where)
        return n_killed, None


runner = None  # of a process of a campaign in several


def begin_runs(*args):
    global runner
    runner = Runner(*args)


def run_seed(seed):
    return runner.run(seed)


def run_in_turn(seeds, n_jobs, *args):
    """The results of runs, n_jobs at a time."""
    if n_jobs == 1:
        yield from map(Runner(*args).run, seeds)
        return
    with concurrent.futures.ProcessPoolExecutor(n_jobs, initializer=begin_runs, initargs=args) as processes:
        under_way = {processes.submit(run_seed, seed) for seed in itertools.islice(seeds, n_jobs)}
        try:
            while under_way:
                done, under_way = concurrent.futures.wait(under_way, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    yield future.result()
                    under_way.add(processes.submit(run_seed, next(seeds)))
        finally:  # the caller has seen enough
            processes.shutdown(cancel_futures=True)


def campaign(n_kills, seed0, max_failures=3, say=print, n_nodes=None, device=None, optimizer=None, n_jobs=1):
    """
    Runs until the daemons were killed so often. n_nodes, device, optimizer: of all runs, random unless given. Return: how
    many runs failed.
    """
    folder = Path(tempfile.mkdtemp(prefix="zerod-daemon-kills-"))
    began, n_killed, n_runs, n_failed = time.monotonic(), 0, 0, 0
    for n, failure in run_in_turn(itertools.count(seed0), n_jobs, folder, n_nodes, device, optimizer):
        n_killed, n_runs = n_killed + n, n_runs + 1
        if failure:
            n_failed += 1
            say(failure)
        if n_runs % 100 == 0:
            say(f"{n_runs} runs, {n_killed} kills, {n_failed} failed, {time.monotonic() - began:.0f} s")
        if n_killed >= n_kills or n_failed >= max_failures:
            break
    say(f"seed {seed0}: {n_runs} runs of {N_STEPS} steps, {n_killed} kills of the daemon, {n_failed} runs failed, "
        f"{time.monotonic() - began:.0f} s")
    if n_failed == 0:
        shutil.rmtree(folder, ignore_errors=True)  # runs that nobody waited for may still be ending
    return n_failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/soak daemon-kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=10000, help="until the daemon was killed so often (10000)")
    parser.add_argument("--seed", type=int, help="repeats a campaign; random unless given")
    parser.add_argument("--nodes", type=int, choices=TOPOLOGIES, help="all runs on so many nodes; random unless given")
    parser.add_argument("--device", choices=("", "cuda", "cuda-offload"),
                        help="all runs in host memory (empty) or on stand-ins for GPUs; random unless given")
    parser.add_argument("--optimizer", choices=kills.OPTIMIZERS, help="of all runs; random unless given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (one for each processor)")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**9)
    sys.exit(1 if campaign(arguments.kills, seed, n_nodes=arguments.nodes, device=arguments.device,
                           optimizer=arguments.optimizer, n_jobs=arguments.jobs) else 0)
