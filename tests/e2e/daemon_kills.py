# SPDX-License-Identifier: Apache-2.0
"""
Kills daemons at failpoints and at random moments, also while they adopt the run. A service manager or zerodrun starts
the next daemon, and the trainers continue. The judge of kills.py then compares each step and each write window with an
undisturbed run. A life is one process of a daemon or rank. Used by test_daemon_kills.py. As a program (scripts/soak
daemon-kills) it runs the long campaign, 10,000 kills by default. DIMENSIONS lists what else a run may do.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from conftest import Build, Daemon, ROOT, merge, wait_for
from keeper import KeptDaemon, RunNode
import kills
from kills import Failure
import loop_trainer
from node_faults import engines
from nodes import Nodes

N_STEPS = 24
N_MICRO = kills.N_MICRO
N_CHUNKS, N_PARCELS = 15, 4  # approximate, because they depend on the bucket size


def at_messages(orders, reports, n):
    """Return: {failpoint: n} for messages between nodes. A run passes each about n times."""
    names = [f"{order}.{where}" for order in orders for where in ("said", "heard", "obeyed")]
    return dict.fromkeys([*names, *(f"{report}.reported" for report in reports)], n)


# failpoint of the daemon: (how often a step passes it, True for each rank or False in all)
POINTS = {
    "Push.log": (N_MICRO * kills.N_PUSHES, True), "Push.judged": (N_MICRO * kills.N_PUSHES, True),
    "BeginBackward.log": (N_MICRO, True), "EndBackward.log": (N_MICRO, True), "EndBackward.judged": (N_MICRO, True),
    "Step.log": (1, True), "Step.judged": (1, True), "answer": (4, True), "credit": (N_MICRO * N_PARCELS, True),
    "posted": (N_MICRO * N_PARCELS, False), "reduce": (N_MICRO * N_CHUNKS, False),
    "stamp": (N_MICRO * N_CHUNKS, False), "stamped": (N_MICRO * N_CHUNKS, False),
    "reduced": (N_MICRO * N_PARCELS, False), "summed": (N_MICRO * N_PARCELS, False),
    "update": (N_CHUNKS, False), "updated": (1, False), "decided": (1, False),
    "flip": (1, False), "flipped": (1, False), "committed": (1, False), "transfer": (3, False),
}
POINTS_OF_NODES = {"verdict": (1, False), "combined": (N_MICRO * N_PARCELS // 2, False)}  # verdict: only on node 0
# Other failpoints: how often a run passes them.
ONCE = {"Ready.log": (1, True), "forming": (2, False), "rewrite": (3, False), "writing": (3, False), "bringing": (3, False)}
# Failpoints while a job on several nodes is formed.
POINTS_OF_FORMING = {
    "forming": (3, False), "reserve": (6, False), "flip": (2, False), "flipped": (2, False), "answer": (6, True),
    "Ready.log": (1, True), "Ready.judged": (1, True), "order": (4, False),
}
# Failpoints for some lives of runs with this dimension, and how often a run usually passes them.
POINTS_OF_SAVES = {"aside": 60, "save": 3, "disk.make_folder": 3, "disk.create": 6, "disk.write": 12,
                   "disk.truncate": 6, "disk.sync": 9, "disk.rename": 3, "disk.remove_folder": 2}
POINTS_OF_MUON = {"orthogonalize": N_STEPS * 4, "update": N_STEPS * 2 * N_CHUNKS}
POINTS_OF_LOADS = {"load": 3, "forming": 2, "flip": 1}  # of the checkpoint that undisturbed runs leave at this step
LOADED_STEP = 9
POINTS_OF_WINDOWS = {"WriteBegin.log": 6, "WriteBegin.judged": 6, "WriteState.log": 60, "WriteState.judged": 60,
                     "WriteEnd.log": 6, "WriteEnd.judged": 6, "writing": 40, "rewrite": 40, "bringing": 3,
                     "transfer": 20, "flip": 3, "kept": 4, "stored": 3}
POINTS_OF_WINDOWS_OF_NODES = at_messages(("OPEN", "WRITE", "STORE", "CLOSED"), ("WINDOW", "WINDOW_END", "STORED"), 5)
POINTS_OF_ATTACHING_AGAIN = {"Leave.log": 6, "Leave.judged": 6, "BeginBackward.log": 8, "Form.log": 3, "Ready.log": 3,
                             "forming": 6, "flip": 6, "answer": 60}
POINTS_OF_SPECULATION = {"speculate": N_STEPS * N_CHUNKS, "speculated": N_STEPS * N_CHUNKS,
                         "accept": N_STEPS * N_CHUNKS // 3, "turn": N_STEPS * N_CHUNKS // 3}
POINTS_OF_EARLY_COPIES = {"early": N_STEPS * N_PARCELS, "copied": N_STEPS * N_PARCELS}  # offload_optimizer on GPUs
POINTS_OF_GATHERS = {"Gather.log": 60, "Gather.judged": 60, "Release.log": 60, "Release.judged": 60, "Held.judged": 2}
# Failpoints in and after the last step: (how often a step passes them, how often the end of the run passes them).
POINTS_OF_THE_END = {"Leave.log": (0, 2), "Leave.judged": (0, 2), "Step.judged": (2, 0), "verdict": (1, 0), "decided": (1, 0),
                     "update": (N_CHUNKS, 0), "updated": (1, 0), "flip": (1, 3), "flipped": (1, 3), "committed": (1, 0),
                     "answer": (6, 10)}
MESSAGES_OF_THE_END = at_messages(("DECIDED", "COMMIT"), ("ASKED", "READY", "UPDATED"), (1, 0))
POINTS_OF_SAVES_OF_NODES = at_messages(("SAVE", "PUBLISH", "SAVE_END"), ("WANT_SAVE", "SAVED"), 1)
RECOVERY = ("adopt", "adopted")
IN_CHUNKS = ("update", "reduce")
FUSES_NS = {"update": 20_000, "speculate": 20_000, "accept": 5_000, "reduce": 20_000, "bringing": 2_000_000}  # most ns after such a failpoint
MAX_LIFE_MS = 120  # for a daemon killed at a random moment: about the duration of a run
FORMING = 0.3  # share of the lives, on several nodes, that end while the job is formed


class Life:
    """
    How one daemon ends: at a failpoint, or some seconds after its start, some milliseconds after it was asked to stop,
    or some milliseconds after a trainer's planned death.
    """

    def __init__(self, rng, n_ranks, first, several, n_steps=N_STEPS):
        self.point, self.seconds, self.stopping, self.follows = None, None, None, None
        self.also = rng.choice((*[None] * 4, "trainer", *(["engine", "neighbour"] if several else [])))  # killed too
        points = POINTS | POINTS_OF_NODES if several else POINTS
        points = ONCE | {name: (n * n_steps, each) for name, (n, each) in points.items()}
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
            self.end_at(rng, name, max(1, n * (n_ranks if per_rank else 1) * (9 if first else 3) // 10))

    def end_at(self, rng, name, n, n_before=0):
        """Ends the life at one of the n passes of a failpoint that follow the first n_before passes."""
        # Most daemons that die at a chunk die while it is processed.
        how = f"fuse:{rng.randint(0, FUSES_NS[name])}" if name in FUSES_NS and rng.random() < 0.7 else "kill"
        self.point, self.stopping, self.follows = f"{name}:{how}@{n_before + rng.randint(1, n)}", None, None
        self.seconds = rng.uniform(0.1, 0.4)  # if the life does not reach the failpoint

    def follow(self, rng):
        """Ends the life within 80 ms after a trainer's death, about when its successor attaches."""
        self.point, self.seconds, self.stopping, self.follows = None, 2, None, rng.randrange(80)

    @classmethod
    def at(cls, point):
        life = cls(random.Random(0), 1, first=True, several=False)
        life.point, life.seconds, life.stopping, life.follows, life.also = point, None, None, None, None
        return life

    def __repr__(self):
        when = f"{self.stopping} ms after the stop" if self.seconds is None else f"{self.seconds * 1000:.0f} ms"
        when = when if self.follows is None else f"{self.follows} ms after a trainer"
        where = f"{self.point} or {when}" if self.point and self.seconds else self.point or when
        return where + (f" and {self.also}" if self.also else "")


DEVICES = (*[""] * 10, "cuda", "cuda-offload")  # values of ZEROD_DEVICE; GPUs are rare because they are slow
TOPOLOGIES = {1: ((1,), (2,), (2,), (3,), (4,)), 2: ((1, 1), (1, 2), (2, 2)), 3: ((1, 1, 1), (2, 1, 1))}
ABORT = r"E1302 step aborted.*the daemon of node \d was replaced by another one in the midst of the step"
# The abort after a trainer on a GPU was killed in a backward: the GPU had written only a part of a gradient.
TORN = r"E1302 step aborted.*or as much of that as the GPU had written when it died"


class Plan:
    """The configuration, environment, trainers' arguments and daemons' lives of a run."""

    def __init__(self, seed, n_nodes=None, device=None, optimizer=None, only=None):
        """only: the dimensions of the run; None draws them at random."""
        rng = random.Random(seed)
        self.seed, self.n_nodes = seed, n_nodes or rng.choice((1, 1, 1, 2, 3))
        self.ranks = rng.choice(TOPOLOGIES[self.n_nodes])
        self.accumulate = rng.random() < 0.25
        self.config, self.env = kills.options(rng, rng.choice(("mid-push", "pushed", "update", "gather")))
        self.config["limits"] = {"reattach_timeout": "20s"}
        self.optimizer = optimizer or rng.choice(("AdamW", *kills.OPTIMIZERS))
        self.lives = [self.draw_lives(rng, n) for n in self.ranks]
        self.victims = [[] for _ in range(self.world_size)]
        self.n_steps = N_STEPS
        self.args, self.own_args = [], []  # arguments of all trainers; arguments that undisturbed runs lack
        if rng.random() < 0.2:  # a trainer dies too
            self.kill_a_trainer(rng, ("mid-push", "waiting", "committed"))
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
        self.restarts = []  # of all ranks; "victim": see kill_ranks()
        self.by_zerodrun = self.saves_on_stop = False
        self.speculate(random.Random(f"{seed} speculation"))
        self.begin = kills.start  # starts the trainers
        self.n_killed = 0  # known after the run
        drawn = self.draw_dimensions(rng) if only is None else only
        left_out = IN_HOST_MEMORY if device else ()
        self.dimensions = [name for name in DIMENSIONS if name in drawn and name not in left_out]
        for name in self.dimensions:
            DIMENSIONS[name](self, random.Random(f"{seed} {name}"))

    @staticmethod
    def draw_dimensions(rng):
        if rng.random() < 0.04:  # rare, because a Python trainer starts as slowly as ten other trainers
            return ("loop",)
        return rng.choice(((), *[(name,) for name in DIMENSIONS if name != "loop"], ("windows", "restarts"),
                           ("windows", "last step"), ("windows", "save_on_stop"), ("windows", "gathered"),
                           ("gathered", "restarts"), ("gathered", "last step"), ("again", "restarts"), ("again", "gathered"),
                           ("again", "windows")))

    def speculate(self, rng):
        """Half of the runs are updated before the decision. In most of them, about half of the steps are clipped."""
        self.clipping = 25 / self.world_size ** 0.5 if rng.random() < 0.7 else 1.0
        self.config["gradient_clipping"] = self.clipping
        self.config["zero_optimization"]["speculative_update"] = rng.random() < 0.5
        if self.device == "cuda-offload" and self.config["zero_optimization"]["speculative_update"]:
            self.end_some_lives(rng, POINTS_OF_EARLY_COPIES)
        if self.n_nodes == 1 and self.config["zero_optimization"]["speculative_update"]:
            self.end_some_lives(rng, POINTS_OF_SPECULATION)
            if rng.random() < 0.4:
                self.env = {"ZEROD_FAILPOINT": "speculate:sleep:1@*"}  # so that the decision meets unfinished chunks

    def kill_a_trainer(self, rng, kinds):
        plan = kills.kill_plan(rng, rng.choice(kinds), 1)
        self.victims[rng.randrange(self.world_size)] = [
            p for p in plan if int(p.rsplit("@", 1)[1]) <= self.n_steps and not p.startswith("GradNorm")]  # rarely passed

    def load_first(self, rng):
        """The run starts from a checkpoint. Most of the first daemons that are killed die while they load it."""
        self.victims = [[] for _ in self.victims]  # their plans need all steps
        for lives in self.lives:
            if lives and rng.random() < 0.7:
                name = rng.choice(sorted(POINTS_OF_LOADS))
                lives[0].end_at(rng, name, POINTS_OF_LOADS[name])

    def save_meanwhile(self, rng):
        """Checkpoints are saved all the time, and some lives end during a save."""
        self.config["checkpoint"] = {"save_steps": rng.choice((1, 2, 5)), "save_total_limit": rng.choice((0, 1, 3)),
                                     "memory": rng.choice((1, 200_000, "auto")),
                                     "save_on_stop": False}  # the failpoints must be passed in the run, not at the stop
        self.end_some_lives(rng, POINTS_OF_SAVES)

    def end_some_lives(self, rng, points, share=0.3):
        for life in itertools.chain(*self.lives):
            if rng.random() < share:
                name = rng.choice(sorted(points))
                life.end_at(rng, name, points[name])

    def write_windows(self, rng):
        """Write windows write weights and state. Some are opened again, or abandoned at a death or by a rank."""
        every = rng.choice((1, 3))
        self.args += ["--window", every, "--windows", rng.choice((1, 3)), "--writes"]
        points = POINTS_OF_WINDOWS | (POINTS_OF_WINDOWS_OF_NODES if self.n_nodes > 1 else {})
        self.end_some_lives(rng, points, 0.6)
        if self.loads or rng.random() < 0.4:
            return
        rank = rng.choice((0, rng.randrange(self.world_size)))
        step = rng.randrange(self.n_steps) // 3 * 3
        follower = rng.choice(self.lives)  # they map none
        if follower and rng.random() < 0.6:
            follower[0].follow(rng)
        names = [name for name in kills.CLASSES["window"] if name != "window-mapped" or not self.device]  # GPUs map none
        self.victims = [[] for _ in self.victims]
        self.victims[rank] = rng.choice((
            [["--at", f"{step}.0.window:scribble", "--at", f"{step}.0.window:die"]],
            [["--at", f"{step}.0.window:scribble", "--at", f"{step}.0.window:die"]] * 2,
            [f"{rng.choice(names)}:kill@{rng.randint(1, -(-self.n_steps // every))}"],
            [f"WriteState.{rng.choice(('send', 'wait', 'answered'))}:kill@{rng.randint(1, 20)}"],
        ))

    def hold_gathered(self, rng):
        self.config["zero_optimization"]["stage"] = 3
        self.config.pop("weights", None)
        self.own_args += ["--hold"]
        self.end_some_lives(rng, POINTS_OF_GATHERS, 0.5)
        for life in itertools.chain(*self.lives):
            if rng.random() < 0.5:  # during the trainers' computation
                life.point, life.seconds = None, rng.uniform(0.02, 0.4)

    def attach_again(self, rng):
        """All ranks leave and attach again from the same processes, to continue or to train the same run again."""
        if self.begin is not kills.start or self.by_zerodrun:
            return
        self.victims = [[] for _ in self.victims]  # a single successor could not know whether its predecessor has left
        self.end_some_lives(rng, POINTS_OF_ATTACHING_AGAIN, 0.6)
        for life in itertools.chain(*self.lives):
            life.also = None if life.also == "trainer" else life.also
        if rng.random() < 0.7:
            self.own_args += ["--again", rng.choice((1, 2, 5, 12))]
        if "--again" not in self.own_args or rng.random() < 0.3:
            self.own_args += ["--anew"]
            self.saves = self.loads = False
            self.config.pop("checkpoint", None)

    def restart_all(self, rng):
        """All ranks are restarted as by a launcher: after one rank has died, at random moments, or with a daemon."""
        how = rng.choice(("victim", "moments", "daemon"))
        if how == "victim" and not self.loads and not self.by_zerodrun:
            if not any(self.victims):
                self.kill_a_trainer(rng, ("mid-push", "pushed", "waiting", "committed"))
            self.restarts = ["victim"]
        elif how == "daemon" and any(self.lives):
            rng.choice([lives for lives in self.lives if lives])[0].also = "all"
        else:
            self.restarts = sorted(rng.uniform(0, 0.02 + 0.3 * self.n_steps / N_STEPS) for _ in range(rng.choice((1, 2))))

    def end_early(self, rng):
        """A run of few steps, in which each daemon ends with its ranks. Most lives end during the last step."""
        self.by_zerodrun, self.device, self.engine_kills = True, "", []
        self.loads = self.saves = False
        self.config.pop("checkpoint", None)
        self.n_steps = rng.choice((1, 2, 3))
        self.own_args += ["--leave"] if self.n_nodes > 1 else []
        self.victims = [[life for life in plan if not isinstance(life, str)] for plan in self.victims]
        victim = rng.choice((None, *range(self.n_nodes), *range(self.n_nodes)))  # often only one node
        self.lives = [[Life(rng, n, i == 0, self.n_nodes > 1, self.n_steps) for i in range(rng.choice((1, 1, 2)))]
                      if victim in (None, node) else [] for node, n in enumerate(self.ranks)]
        for life in itertools.chain(*self.lives):
            if rng.random() < 0.8:
                points = POINTS_OF_THE_END | (MESSAGES_OF_THE_END if self.n_nodes > 1 else {})
                name = rng.choice((*sorted(points), *["flip"] * 6))  # another node may then have the whole step
                n, n_more = points[name]
                life.end_at(rng, name, n + n_more, n * (self.n_steps - 1) + (name == "flip"))
            life.seconds = rng.uniform(0, 0.2) if not life.point or rng.random() < 0.2 else None

    def save_last(self, rng):
        """The daemon dies while it saves the last checkpoint, or the disk is full at that moment."""
        if not self.by_zerodrun:
            self.end_early(rng)
        self.saves_on_stop = True
        self.config["checkpoint"] = {"save_on_stop": True, "memory": rng.choice((1, 200_000, "auto"))}
        if rng.random() < 0.1:
            self.lives = [[] for _ in self.lives]
            self.env = {"ZEROD_FAILPOINT": f"disk.{rng.choice(('write', 'sync', 'rename'))}:error@*"}
            return
        points = POINTS_OF_SAVES | (POINTS_OF_SAVES_OF_NODES if self.n_nodes > 1 else {})
        for life in itertools.chain(*self.lives):
            if rng.random() < 0.7:
                name = rng.choice(sorted(points))
                life.end_at(rng, name, -(-points[name] // 3))
            elif rng.random() < 0.5:
                life.point, life.seconds, life.stopping = None, None, rng.randrange(20)

    def loop_as_readme(self, rng):
        """All ranks are restarted in the middle of a step, and do not ask zerod for the position within the step."""
        if self.device or self.optimizer == "Muon":
            return
        self.begin, self.accumulate, self.overlap, self.loads = loop_trainer.start, False, False, False
        self.victims = [[] for _ in self.victims]
        where = rng.choice(("EndBackward.wait", "EndBackward.answered", "BeginBackward.sent"))
        self.victims[rng.randrange(self.world_size)] = [f"{where}:kill@{rng.randint(1, N_MICRO * self.n_steps)}"]
        self.restarts = ["victim"]

    def draw_lives(self, rng, n_ranks):
        n = rng.choice((1, 2, 3, 5, 8)) if self.n_nodes == 1 else rng.choice((0, 1, 1, 2, 4))
        return [Life(rng, n_ranks, first=i == 0, several=self.n_nodes > 1) for i in range(n)]

    @property
    def excuse(self):
        """Return: a pattern for the texts of aborts that this run may have, or None."""
        trainers_die = (any(self.victims) or self.restarts or
                        any(life.also in ("trainer", "all") for lives in self.lives for life in lives))
        excuses = [ABORT] * (self.n_nodes > 1) + [TORN] * bool(self.device and trainers_die)
        return "|".join(excuses) or None

    @property
    def first_step(self):
        return LOADED_STEP if self.loads else 0

    @property
    def world_size(self):
        return sum(self.ranks)

    def __repr__(self):
        return (f"seed {self.seed}: {self.dimensions}, ranks {self.ranks}, {self.n_steps} steps, {self.config}, {self.env}, "
                f"{self.trainer_args()}, loads {self.loads}, lives {self.lives}, trainers {self.victims}, restarts "
                f"{self.restarts}, {self.device} {self.engine_kills}")

    def trainer_args(self):
        return ["--state", "--moments", self.moments, *(["--accumulate"] if self.accumulate else []), *self.args,
                *self.own_args, *(["--overlap"] if self.overlap else [])]


DIMENSIONS = {"windows": Plan.write_windows, "gathered": Plan.hold_gathered, "last step": Plan.end_early,
              "save_on_stop": Plan.save_last, "again": Plan.attach_again, "restarts": Plan.restart_all, "loop": Plan.loop_as_readme}
IN_HOST_MEMORY = ("last step", "save_on_stop", "loop")  # dimensions that need a job in host memory


class Job:
    """A daemon for each node, each with its own service manager that restarts it, and the trainers."""

    def __init__(self, build, folder, plan, loads=None):
        """loads: the checkpoint that the run loads."""
        self.build, self.folder, self.plan, self.daemons = build, folder, plan, []
        self.began = time.monotonic()
        self.trains = self.broken = self.victim_died = None  # times of these events
        self.engine_kills, self.restarts = list(plan.engine_kills), list(plan.restarts)
        config = plan.config
        if "checkpoint" in config:
            config = config | {"checkpoint": config["checkpoint"] | {"dir": str(folder / "checkpoints")}}
        if loads:
            config = config | {"checkpoint": config.get("checkpoint", {}) | {"load": str(loads)}}
        self.whole = (Nodes(self.daemon, folder, plan.ranks, config, plan.env) if plan.n_nodes > 1 else
                      self.daemon(config | {"world": {"size": plan.world_size}}, plan.env))
        self.ranks = self.start_ranks()

    def start_ranks(self):
        return self.plan.begin(self.whole, self.plan.victims, self.plan.trainer_args(), self.plan.n_steps)

    def make_folder(self):
        where = self.folder / f"node{len(self.daemons)}"
        where.mkdir()
        return where

    def daemon(self, config, env=None, prefix=()):
        points = [life.point for life in self.plan.lives[len(self.daemons)]] + [None]
        self.daemons.append(KeptDaemon(self.build, self.make_folder(), config, env, points))
        return self.daemons[-1]

    def tend(self):
        """Kills and restarts what is due. Return: whether trainers still run."""
        self.see_training()
        for node, (daemon, lives) in enumerate(zip(self.daemons, self.plan.lives)):
            life = len(daemon.lives) - 1
            if life < len(lives) and self.is_due(lives[life], daemon):
                daemon.signal(signal.SIGKILL)
                daemon.popen.wait()
            if daemon.popen.poll() == -signal.SIGKILL and life < len(lives):
                self.kill_also(lives[life].also, node)
            daemon.tend()
        self.kill_engine()
        self.kill_ranks()
        runs = [rank.tend() for rank in self.ranks]
        return any(runs) and not self.is_broken(rank.last.poll() for rank in self.ranks)

    def is_broken(self, statuses):
        """Return: whether a rank failed for good, a second ago or more, in which other ranks report errors."""
        if self.broken is None and any(status not in (None, 0, *kills.KILLED) for status in statuses):
            self.broken = time.monotonic()
        return self.broken is not None and time.monotonic() - self.broken > 1

    def is_due(self, life, daemon):
        """Return: whether it is time to kill this life of the daemon."""
        if life.stopping is not None:
            return daemon.stops_for() * 1000 > life.stopping
        if life.follows is not None and self.victim_died:
            return (time.monotonic() - self.victim_died) * 1000 > life.follows
        return life.seconds is not None and daemon.age() > life.seconds

    def see_training(self):
        if not self.trains and f"weights {self.plan.first_step} " in self.ranks[0].last.out():
            self.trains = time.monotonic()
        if not self.victim_died and any(len(rank.processes) > 1 for rank in self.ranks):
            self.victim_died = time.monotonic()

    def kill_engine(self):
        """
        Kills the engine of the GPUs at the planned moments. The first engine is not killed before it is ready, because
        that would end the run (E1502).
        """
        if (self.engine_kills and time.monotonic() - self.began > self.engine_kills[0] and
                "weights 0 " in self.ranks[0].processes[0].out()):
            for pid in engines(self.daemons[0]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.engine_kills.pop(0)

    def kill_ranks(self):
        """Restarts all ranks if it is time."""
        if not self.restarts or not self.trains:
            return
        if self.restarts[0] == "victim":
            is_time = any(self.has_died(rank) for rank in self.ranks)
        else:
            is_time = time.monotonic() - self.trains > self.restarts[0]
        if is_time:
            self.restarts.pop(0)
            self.restart_all()

    @staticmethod
    def has_died(rank):
        return len(rank.processes) > 1 or rank.last.poll() == -signal.SIGKILL  # its successor may have started already

    def restart_all(self):
        """Restarts all ranks like torchrun: SIGTERM, SIGKILL, start. Does nothing if a rank is done."""
        if any(rank.last.poll() == 0 for rank in self.ranks):
            return
        alive = [rank for rank in self.ranks if rank.last.poll() is None]
        for rank in alive:
            rank.last.signal(signal.SIGTERM)
        for rank in alive:
            rank.last.signal(signal.SIGKILL)
        for rank in alive:
            if rank.last.wait() in kills.KILLED:  # otherwise it had just ended
                rank.n_kills += not rank.is_to_die()

    def kill_also(self, what, node):
        """Kills another process while that node's daemon is dead. what: "trainer", "all", "engine" or "neighbour"."""
        other = (node + 1) % len(self.daemons)
        rank = self.ranks[sum(self.plan.ranks[:node])]
        has_own = any(kills.is_deadly(life) for life in rank.plan)
        if what == "trainer" and self.trains and not has_own and rank.last.poll() is None:
            rank.last.signal(signal.SIGKILL)
            rank.n_kills += rank.last.wait() == -signal.SIGKILL  # otherwise it had just ended
        if what == "all" and self.trains:
            self.restart_all()
        for pid in engines(self.daemons[other]) if what == "engine" else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if what == "neighbour" and self.trains and self.daemons[other].running():
            self.daemons[other].signal(signal.SIGKILL)
            self.daemons[other].popen.wait()

    def finish(self):
        """Checks and stops the daemons after the trainers' end. A problem raises an error."""
        if self.plan.saves:
            for daemon in self.daemons:
                wait_for("the end of the save", lambda: not daemon.tend() and daemon.is_settled() and saves_not(daemon))
            # The run leaves no checkpoint if it ends before a daemon has enough memory to save.
            if any("]: saved " in log.read_text() for log in self.folder.rglob("zerod*.err")):
                self.daemons[0].ctl("checkpoint", "verify")
        for daemon in self.daemons:
            daemon.stop()
        for process in self.others():
            process.check_sanitizers()

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


class RunJob(Job):
    """On each node zerodrun starts and restarts the daemon and the trainers, and stops the daemon at the end."""

    def daemon(self, config, env=None, prefix=()):
        node, plan = len(self.daemons), self.plan
        first = sum(plan.ranks[:node])
        self.daemons.append(RunNode(
            self.build, self.make_folder(), config, env, points=[life.point for life in plan.lives[node]], first=first,
            plans=plan.victims[first:first + plan.ranks[node]],
            args=["--steps", plan.n_steps, "--window", kills.WINDOW, "--micro", N_MICRO, *plan.trainer_args()]))
        self.n_seen = [1] * len(self.daemons)
        return self.daemons[-1]

    def start_ranks(self):
        return [rank for daemon in self.daemons for rank in daemon.ranks]

    def tend(self):
        self.see_training()
        for node, (daemon, lives) in enumerate(zip(self.daemons, self.plan.lives)):
            daemon.tend()
            life = len(daemon.lives) - 1
            if life < len(lives) and self.is_due(lives[life], daemon):
                daemon.signal(signal.SIGKILL)
            if life >= self.n_seen[node]:
                self.n_seen[node] = life + 1
                if life <= len(lives):
                    self.kill_also(lives[life - 1].also, node)
        self.kill_ranks()
        statuses = [daemon.popen.poll() for daemon in self.daemons]
        return None in statuses and not self.is_broken(statuses) and not self.is_over_elsewhere(statuses)

    def is_over_elsewhere(self, statuses):
        """
        Return: whether only late successors still run. All ranks had left, and the other nodes have ended the run. But
        one rank died with its daemon while it left, and its successor waits for the other nodes until stall_timeout.
        """
        for rank in self.ranks:
            rank.is_late = len(rank.processes) > 1 and not rank.last.out()
        late = [rank.is_late for daemon, status in zip(self.daemons, statuses) if status is None for rank in daemon.ranks
                if "done" not in rank.last.out()]
        return (statuses[0] == 0 and set(statuses) == {0, None} and late and all(late)
                and "stopping: all nodes have ended what was decided" in self.daemons[0].log())

    @staticmethod
    def has_died(rank):
        return len(rank.processes) > 1

    def restart_all(self):
        for rank in self.ranks:
            if "done" not in rank.last.out():
                rank.last.signal(signal.SIGTERM)

    def kill_also(self, what, node):
        if what == "trainer" and self.trains:
            self.ranks[sum(self.plan.ranks[:node])].last.signal(signal.SIGKILL)
        elif what == "all" and self.trains:
            self.restart_all()
        elif what == "neighbour" and self.trains:  # then the neighbour already listens
            self.daemons[(node + 1) % len(self.daemons)].signal(signal.SIGKILL)

    def finish(self):
        """The last checkpoint must exist and be complete. If it is missing, zerodrun must have ended with an error."""
        statuses = [daemon.popen.poll() for daemon in self.daemons]
        path = self.folder / "checkpoints" / f"step-{self.plan.n_steps:08}"
        is_missing = self.plan.saves_on_stop and not path.exists()
        if any(statuses) != is_missing:  # None: only a late successor runs, see is_over_elsewhere()
            raise Failure("lost", f"zerodrun ended with {statuses}, and {path} is {'not ' * is_missing}there\n"
                                  f"{self.describe()}")
        if path.exists():
            check_checkpoint(self.build, self.folder / "after", self.plan, path, self.reference)

    def n_killed(self):
        return sum(daemon.n_killed() for daemon in self.daemons)


@contextlib.contextmanager
def on_device(device):
    """Jobs of daemons that are created in this context are on this device."""
    before = os.environ.get("ZEROD_DEVICE")
    os.environ["ZEROD_DEVICE"] = device
    try:
        yield
    finally:
        os.environ.pop("ZEROD_DEVICE")
        if before is not None:
            os.environ["ZEROD_DEVICE"] = before


def make_checkpoint(build, folder, plan):
    """Runs an undisturbed job that saves a checkpoint. Return: the checkpoint's path."""
    settings, moments = kills.OPTIMIZERS[plan.optimizer]
    folder.mkdir()
    config = {"world": {"size": plan.world_size}, "gradient_clipping": plan.clipping, "optimizer": settings,
              "checkpoint": {"dir": str(folder / "begun")}}
    daemon = Daemon(build, folder, merge(config, kills.STATES[plan.state]))
    args = ["--moments", moments, *(["--accumulate"] if plan.accumulate else []), *plan.args]
    ranks = kills.train(daemon, [[]] * plan.world_size, args, LOADED_STEP)
    assert all(rank.last.poll() == 0 for rank in ranks), kills.describe(ranks, daemon)
    path = daemon.ctl("checkpoint", "save").stdout.strip()
    daemon.stop()
    return path


def check_checkpoint(build, folder, plan, path, reference):
    """Checks that a daemon on one node can load the checkpoint, and that it contains the run's final state."""
    settings, moments = kills.OPTIMIZERS[plan.optimizer]
    folder.mkdir()
    config = {"world": {"size": plan.world_size}, "optimizer": settings, "checkpoint": {"load": str(path)}}
    daemon = Daemon(build, folder, merge(config, kills.STATES[plan.state]))
    try:
        ranks = kills.train(daemon, [[]] * plan.world_size, ["--state", "--moments", moments], plan.n_steps)
        last = (("state", (plan.n_steps, 0)), ("weights", plan.n_steps))
        kills.judge(ranks, daemon, {key: value for key, value in reference.items() if key in last or key[0] == "final"})
        daemon.stop()
    finally:
        daemon.kill()


def reference_of(references, plan):
    """Return: the results() of an undisturbed run, all of them, and only those that this run must compute."""
    found = references.get(plan.world_size, plan.accumulate, plan.n_steps, optimizer=plan.optimizer, state=plan.state,
                           args=("--state", *plan.args), begin=plan.begin, clipping=plan.clipping)
    leaves = "--leave" in plan.own_args  # at the end no data of other nodes are read
    last = [("state", (plan.n_steps, 0))]
    last += [("weights", plan.n_steps)] if plan.config["zero_optimization"]["stage"] == 3 else []

    def is_computed(word, place):
        if word == "final" or (word, place) in last:
            return not leaves
        return (place[0] if word == "state" else place) >= plan.first_step

    return found, {key: value for key, value in found.items() if is_computed(*key)}


def one_run(build, references, folder, plan, timeout=40):
    """Runs a plan. Return: the number of killed daemons. A failure raises AssertionError."""
    with on_device(plan.device if plan.optimizer == "Muon" else ""):  # Muon's products have other bits on GPUs
        undisturbed, reference = reference_of(references, plan)
        begun = make_checkpoint(build, folder / "before", plan) if plan.loads else None
    with on_device(plan.device):
        job = (RunJob if plan.by_zerodrun else Job)(build, folder, plan, begun)
    job.reference = undisturbed
    deadline = time.monotonic() + timeout * job.whole.patience
    try:
        while job.tend():
            if time.monotonic() > deadline:
                raise Failure("waits", f"the run did not end\n{job.describe()}")
            time.sleep(0.002)
        job.tend()
        kills.judge(job.ranks, job.whole, reference, plan.excuse)
        job.finish()
    except BaseException as error:
        error.args = (f"{plan}\n{error}",)
        raise
    finally:
        plan.n_killed = job.n_killed()
        job.end()
    return plan.n_killed


def saves_not(daemon):
    """Return: whether no checkpoint is being saved. False if the daemon dies before it answers."""
    answer = daemon.ctl("--json", "status", check=False)
    return answer.returncode == 0 and not json.loads(answer.stdout)["checkpoint"]["saving"]


def kind_of(error):
    """Return: one of kills.KINDS."""
    return getattr(error, "kind", "waits" if re.search("did not end|waited in vain|timed out", str(error)) else "lost")


class Runner:
    """Runs plans by their seeds, one after the other, in one process of a campaign."""

    def __init__(self, folder, options):
        self.build = Build(os.environ.get("ZEROD_BUILD", ROOT / "build"))
        self.folder, self.options = folder, options
        self.references = kills.References(self.build, Path(tempfile.mkdtemp(dir=folder)))

    def run(self, seed):
        """Return: the number of killed daemons, and (kind, text) of a failure or None."""
        where = self.folder / str(seed)
        where.mkdir()
        plan = Plan(seed, **self.options)
        try:
            n_killed = one_run(self.build, self.references, where, plan)
        except (Exception, pytest.fail.Exception) as error:  # a failed run does not end the campaign
            (where / "failure.txt").write_text(str(error))
            kind = kind_of(error)
            return plan.n_killed, (kind, f"FAILED ({kind}), see {where}/failure.txt, again: "
                                         f"{command_of(seed, self.options)}\n{str(error)[:3000]}")
        shutil.rmtree(where)
        return n_killed, None


def command_of(seed, options):
    """Return: a command that repeats one run. Because moments of kills vary, several attempts may be necessary."""
    words = [f"--{name.removeprefix('n_')}={one}" for name, value in options.items() if value is not None
             for one in (value if name == "only" else [value])]
    return shlex.join(["scripts/soak", "daemon-kills", "--run", str(seed), *words])


runner = None  # in each process of a campaign with several processes


def begin_runs(*args):
    global runner
    runner = Runner(*args)


def run_seed(seed):
    return runner.run(seed)


def run_in_turn(seeds, n_jobs, *args):
    """Yields the results of runs, with n_jobs runs at a time."""
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
                    under_way |= {processes.submit(run_seed, seed) for seed in itertools.islice(seeds, 1)}
        finally:  # the caller has stopped early
            processes.shutdown(cancel_futures=True)


def campaign(n_kills, seeds, max_failures=3, say=print, n_jobs=1, **options):
    """
    Runs plans with these seeds until n_kills daemons were killed. options: arguments of Plan for all runs. Return: the
    number of failed runs.
    """
    folder = Path(tempfile.mkdtemp(prefix="zerod-daemon-kills-"))
    began, n_killed, n_runs, failed = time.monotonic(), 0, 0, dict.fromkeys(kills.KINDS, 0)
    first = next(seeds)

    def sum_up():
        return (f"{n_runs} runs, {n_killed} kills of the daemon; runs that failed: " +
                ", ".join(f"{n} {kind}" for kind, n in failed.items()) + f"; {time.monotonic() - began:.0f} s")

    for n, failure in run_in_turn(itertools.chain([first], seeds), n_jobs, folder, options):
        n_killed, n_runs = n_killed + n, n_runs + 1
        if failure:
            failed[failure[0]] += 1
            say(failure[1])
        if n_runs % 100 == 0:
            say(sum_up())
        if n_killed >= n_kills or sum(failed.values()) >= max_failures:
            break
    say(f"from seed {first}: {sum_up()}")
    if not any(failed.values()):
        shutil.rmtree(folder, ignore_errors=True)  # unfinished runs may still use the folder
    return sum(failed.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/soak daemon-kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=10000, help="until the daemon was killed so often (10000)")
    parser.add_argument("--seed", type=int, help="repeats a campaign; random unless given")
    parser.add_argument("--run", type=int, metavar="SEED", help="repeats one run of a campaign")
    parser.add_argument("--nodes", type=int, choices=TOPOLOGIES, help="all runs on so many nodes; random unless given")
    parser.add_argument("--device", choices=("", "cuda", "cuda-offload"),
                        help="all runs in host memory (empty) or on stand-ins for GPUs; random unless given")
    parser.add_argument("--optimizer", choices=kills.OPTIMIZERS, help="of all runs; random unless given")
    parser.add_argument("--only", action="append", choices=DIMENSIONS,
                        help="of all runs; may be given several times; random unless given")
    parser.add_argument("--failures", type=int, default=3, help="ends the campaign (3)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (one for each processor)")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**9)
    seeds = iter([arguments.run]) if arguments.run is not None else itertools.count(seed)
    n_failed = campaign(arguments.kills, seeds, arguments.failures, n_jobs=arguments.jobs, n_nodes=arguments.nodes,
                        device=arguments.device, optimizer=arguments.optimizer, only=arguments.only)
    sys.exit(1 if n_failed else 0)
