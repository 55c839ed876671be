# SPDX-License-Identifier: Apache-2.0
"""
Kills trainers at failpoints and starts them again, and judges how such a run has ended. A life is one process of a
rank. Used by test_kills.py. As a program (scripts/soak kills) it runs the long campaign: every failpoint class 15
times, and 20 runs in which two ranks are killed.
"""

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from conftest import Build, Daemon, ROOT, merge

N_STEPS = 104
WINDOW = 8
N_MICRO = 2
N_PUSHES = 12  # per micro-batch; two more are sometimes missing
GATHERS = 3    # per step

# Where a trainer is killed: class -> {failpoint: how often a run passes it}.
PER_BATCH, PER_STEP, PER_WINDOW = N_STEPS * N_MICRO, N_STEPS, N_STEPS // WINDOW
CLASSES = {
    "connect": {"connected": 1, "Hello.send": 1, "Hello.sent": 1, "Hello.answered": 1},
    "declare": {"Declare.send": 1, "Declare.sent": 1},
    "form": {"Form.send": 1, "Form.wait": 1, "Form.answered": 1, "formed": 1, "Ready.wait": 1, "Ready.answered": 1,
             "Init.send": 14, "Init.wait": 14},
    "mid-push": {"Push.send": PER_BATCH * N_PUSHES, "Push.sent": PER_BATCH * N_PUSHES, "copy": PER_BATCH * N_PUSHES,
                 "slot": PER_BATCH * 4, "BeginBackward.sent": PER_BATCH},
    "pushed": {"EndBackward.send": PER_BATCH, "EndBackward.wait": PER_BATCH, "EndBackward.answered": PER_BATCH,
               "Step.send": PER_STEP, "GradNorm.wait": PER_STEP // 7, "GradNorm.answered": PER_STEP // 7},
    "waiting": {"Step.wait": PER_STEP},
    "update": {"Step.wait": PER_STEP},
    "committed": {"Step.answered": PER_STEP},
    "gather": {"Gather.send": PER_STEP * GATHERS, "Gather.wait": PER_STEP * GATHERS,
               "Gather.answered": PER_STEP * GATHERS, "Release.send": PER_STEP * GATHERS,
               "Release.sent": PER_STEP * GATHERS},
    "window": {"WriteBegin.send": PER_WINDOW, "WriteBegin.wait": PER_WINDOW, "WriteBegin.answered": PER_WINDOW,
               "window-mapped": PER_WINDOW, "WriteEnd.send": PER_WINDOW, "WriteEnd.wait": PER_WINDOW,
               "WriteEnd.answered": PER_WINDOW},
}
ABORTS = "abort"  # kills nothing: a rank aborts the step or abandons its backward, up to three times in a run
STARTING = ("connect", "declare", "form")  # a process passes these only once


class Failure(AssertionError):
    """A failed run. kind is one of KINDS."""

    def __init__(self, kind, text):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


# State was lost at a death; a gradient counted twice or not at all; another difference; a wait without end.
KINDS = ("lost", "twice", "other bits", "waits")
# What a run computes, in this order. The first difference decides the run's kind: a lost window shows in the state at
# once, a gradient that counted twice in the norm.
ORDER = {"state": "lost", "weights": "other bits", "gradnorm": "twice", "norm": "twice", "final": "other bits"}


class Lives:
    """
    A rank, as a sequence of processes. Its plan has an entry for each life: a failpoint (text), or further arguments (a
    list). Only the plan's last life may be one that is not killed.
    """

    def __init__(self, daemon, program, args, rank, plan):
        self.daemon, self.program, self.args, self.rank = daemon, program, args, rank
        self.plan = list(plan)
        self.n_kills = sum(is_deadly(life) for life in self.plan)
        self.processes = []
        self.start()

    def start(self):
        life = self.plan[len(self.processes)] if len(self.processes) < len(self.plan) else []
        point, more = (life, []) if isinstance(life, str) else (None, life)
        self.processes.append(self.daemon.spawn(self.program, *self.args, *more, rank=self.rank, failpoint=point))

    @property
    def last(self):
        return self.processes[-1]

    def tend(self):
        """Starts a killed process again. Return: whether this rank still runs."""
        status = self.last.poll()
        if status in KILLED and len(self.processes) <= self.n_kills:
            self.start()
            return True
        return status is None

    def lines(self):
        return [line.split(" ", 2) for p in self.processes for line in p.out().splitlines()]

    def is_to_die(self):
        """Return: whether the present life's plan kills it."""
        life = len(self.processes) - 1
        return life < len(self.plan) and is_deadly(self.plan[life])

    def problems(self):
        """Yields a text for each process that has ended in a wrong way."""
        for life, p in enumerate(self.processes):
            if p.poll() not in ((0,) if p is self.last else KILLED):
                yield f"rank {self.rank}, life {life}, ended with {p.poll()}"
        if len(self.processes) != self.n_kills + 1:
            yield f"rank {self.rank} was not killed by {self.plan[len(self.processes) - 1]}"


KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # SIGTERM by a launcher that restarts all ranks


def is_deadly(life):
    return ":kill" in life if isinstance(life, str) else any(":die" in str(word) for word in life)


def start(daemon, plans, args=(), n_steps=N_STEPS):
    """Starts one rank per plan. Return: Lives, by rank."""
    args = ["--steps", n_steps, "--window", WINDOW, "--micro", N_MICRO, *args]
    return [Lives(daemon, daemon.build.path("tests/kill-trainer"), args, r, plan) for r, plan in enumerate(plans)]


def finish(ranks, daemon, timeout=60):
    """Waits until all ranks have ended. Restarts killed processes."""
    deadline = time.monotonic() + timeout * daemon.patience
    while any([rank.tend() for rank in ranks]):  # a list, so that all ranks are tended
        if time.monotonic() > deadline:
            raise Failure("waits", f"the run did not end\n{describe(ranks, daemon)}")
        time.sleep(0.002)
    return ranks


def train(daemon, plans, args=(), n_steps=N_STEPS, timeout=60, begin=start):
    return finish(begin(daemon, plans, args, n_steps), daemon, timeout)


def describe(ranks, daemon):
    """Return: the last output of all processes of a failed run."""
    text = []
    for rank in ranks:
        for life, p in enumerate(rank.processes):
            special = rank.plan[life] if life < len(rank.plan) else "-"
            text.append(f"--- rank {rank.rank}, life {life} (pid {p.pid}, {special}): {p.poll()}\n"
                        + "\n".join(p.out().splitlines()[-6:]) + p.err()[-2000:])
    return "\n".join(text) + f"\n--- {daemon.describe()}"


def results(ranks):
    """
    Return: what the run computed, {("norm", 17): {"0x1p+3 1 ..."}, ...}, with the values of all ranks and lives. A
    state's key has the step and the number of windows: ("state", (17, 1)).
    """
    found = {}
    for rank in ranks:
        for word, *rest in rank.lines():
            if word in ("weights", "norm", "gradnorm"):
                found.setdefault((word, int(rest[0])), set()).add(rest[1])
            elif word == "state":
                found.setdefault((word, tuple(map(int, rest[0].split(".")))), set()).add(rest[1])
            elif word == "final":
                found.setdefault((word, rank.rank), set()).add(" ".join(rest))
    return found


def in_order(key):
    word, place = key
    step, windows = place if word == "state" else (10**9 if word == "final" else place, 0)
    return step, list(ORDER).index(word), windows, str(place)


def first_difference(ranks, reference, found):
    """Return: None, or the difference's kind and text. Results that no rank lived to print may be missing."""
    n_unheard = min(rank.n_kills for rank in ranks)
    for key in sorted(set(reference) | set(found), key=in_order):
        if key not in found and key[0] not in ("final", "state") and n_unheard > 0:
            n_unheard -= key[0] == "norm"
        elif found.get(key) != reference.get(key):
            return ORDER[key[0]], f"{key}: {found.get(key)}, undisturbed {reference.get(key)}"
    return None


def judge(ranks, daemon, reference, excuse=None):
    """
    Fails unless the run has the reference's bits, every rank has ended well, and no rank got an error. excuse: a
    pattern for texts of aborts that are allowed.
    """
    problems = [problem for rank in ranks for problem in rank.problems()]
    for rank in ranks:
        for line in rank.lines():
            if line[0] in ("refused", "fatal", "wrong") or (
                    line[0] == "aborted" and not (excuse and re.search(excuse, line[2]))):
                problems.append(f"rank {rank.rank}: {' '.join(line)}")
    kind, difference = first_difference(ranks, reference, results(ranks)) or ("lost", None)
    if problems:  # missing results are then no further fault
        kind = "lost"
    if problems or difference:
        text = "\n".join(filter(None, [*problems, difference]))
        raise Failure(kind, f"{text}\n{describe(ranks, daemon)}")


def kill_plan(rng, kind, rank):
    """Return: a plan for one rank: failpoints of its lives, the last one of that class."""
    if kind == ABORTS:
        words = []
        for step in sorted(rng.sample(range(N_STEPS), rng.randint(1, 3))):
            what = rng.choice(("abort", "abort", "abandon", "sleep=3"))
            where = "step" if what == "abort" and rng.random() < 0.3 else rng.choice(("end", *range(N_PUSHES)))
            if what == "abort" and rng.random() < 0.3:
                step, where = step // WINDOW * WINDOW, "window"
            words += ["--at", f"{step}.{rng.randrange(N_MICRO)}.{where}:{what}"]
        return [words]
    points = CLASSES[kind]
    name = rng.choice([p for p in points if rank == 0 or not p.startswith("Init.")])
    n_passed = points[name]
    point = f"{name}:kill@{rng.randint(1, max(1, n_passed * 9 // 10))}"
    if kind == "update":  # late enough that the update has begun; the daemon's updates are slow
        at = rng.randint(1, n_passed)
        point = f"{name}:sleep:{rng.randint(1, 12)}@{at},{name}:kill@{at}"
    if kind in STARTING and not name.startswith("Init.") and rng.random() < 0.7:
        # The successor is killed while it starts. Its predecessor may die anywhere.
        return [*kill_plan(rng, rng.choice([k for k in CLASSES if k not in STARTING + ("gather",)]), rank), point]
    return [point]


def options(rng, kind):
    """Return: a configuration for a run. The bits do not depend on it."""
    stage = 3 if kind == "gather" else rng.choice((1, 2, 3))
    config = {
        "zero_optimization": {"stage": stage, "reduce_bucket_size": rng.choice((1, 300, 2000, 50000)),
                              "overlap_comm": rng.random() < 0.7},
        "threads": rng.choice((1, 2, 4)),
        "gradient_clipping": 1.0,
    }
    if stage != 3:
        config["weights"] = rng.choice(("shared", "private"))
    env = {"ZEROD_FAILPOINT": "update:sleep:1@*"} if kind == "update" else {}
    if kind in ("mid-push", "pushed", ABORTS) and rng.random() < 0.5:
        env = {"ZEROD_FAILPOINT": "reduce:sleep:1@*,verify:sleep:2@*"}
    return config, env


# Name -> settings, and the moments that the optimizer has.
OPTIMIZERS = {
    "AdamW": ({"type": "AdamW"}, "mv"),
    "Adam": ({"type": "Adam", "params": {"adam_w_mode": False}}, "mv"),
    "SGD": ({"type": "SGD", "params": {"momentum": 0.9, "betas": None}}, "m"),
    "SGD without momentum": ({"type": "SGD", "params": {"momentum": 0, "betas": None}}, "none"),
    "Lion": ({"type": "Lion"}, "m"),
    "Adagrad": ({"type": "Adagrad", "params": {"betas": None}}, "v"),
    "Muon": ({"type": "Muon", "params": {"lr": 0.02}}, "muon"),
}


# Keys of the configuration that decide how the state is stored.
STATES = {
    "fp32": {},
    "bf16 moments": {"bf16": {"bf16_optimizer_states": True}},
    "stochastic": {"bf16": {"bf16_optimizer_states": True, "stochastic_rounding": True}},
    "8 bits": {"optimizer": {"params": {"optim_bits": 8}}},
    "24 bits": {"optimizer": {"params": {"optim_bits": 8, "master_weight_bits": 24}}},
}


class References:
    """The results of undisturbed runs, with which other runs are compared."""

    def __init__(self, build, folder):
        self.build, self.folder, self.known = build, Path(folder), {}

    def get(self, world_size, accumulate=False, n_steps=N_STEPS, window=WINDOW, optimizer="AdamW", state="fp32", args=(),
            begin=start, clipping=1.0):
        """
        args: further arguments of the trainers. begin: start(), or a similar function for other trainers. clipping: the
        norm to which gradients are clipped.
        """
        key = (world_size, accumulate, n_steps, window, optimizer, state, *args, begin, clipping, os.environ.get("ZEROD_DEVICE"))
        if key not in self.known:
            folder = Path(tempfile.mkdtemp(prefix="reference-", dir=self.folder))
            settings, moments = OPTIMIZERS[optimizer]
            config = {"world": {"size": world_size}, "gradient_clipping": clipping, "optimizer": settings}
            daemon = Daemon(self.build, folder, merge(config, STATES[state]))
            args = ["--window", window, "--moments", moments, *(["--accumulate"] if accumulate else []), *args]
            ranks = train(daemon, [[]] * world_size, args, n_steps, begin=begin)
            found = results(ranks)
            judge(ranks, daemon, found)
            for word in ("weights", "norm"):
                assert all(len(found[word, s]) == 1 for s in range(n_steps)), f"{word} differs between ranks"
            daemon.stop()
            self.known[key] = found
        return self.known[key]


def one_run(build, references, folder, seed, kind, double=False):
    """One run with kills of that class. double: two ranks are killed. A failure raises AssertionError."""
    rng = random.Random(f"{seed} {kind} {double}")
    world_size = rng.choice((2, 3, 4) if double else (2, 2, 3))
    accumulate = rng.random() < 0.25
    config, env = options(rng, kind)
    config["world"] = {"size": world_size}
    victims = rng.sample(range(world_size), 2 if double else 1)
    plans = [[] for _ in range(world_size)]
    plans[victims[0]] = kill_plan(rng, kind, victims[0])
    if kind == ABORTS and rng.random() < 0.5:
        plans[rng.choice([r for r in range(world_size) if r not in victims])] = (
            kill_plan(rng, rng.choice((ABORTS, "mid-push", "pushed", "form")), 1))
    if double:
        same = all(victims) or not any("Init." in life for life in plans[victims[0]])
        plans[victims[1]] = (plans[victims[0]] if same and rng.random() < 0.5
                             else kill_plan(rng, rng.choice(list(CLASSES)), victims[1]))
        if any("Gather." in p or "Release." in p for plan in plans for p in plan):
            config["zero_optimization"]["stage"] = 3
            config.pop("weights", None)
    reference = references.get(world_size, accumulate)
    daemon = Daemon(build, folder, config, env)
    try:
        ranks = train(daemon, plans, ["--accumulate"] if accumulate else [])
        judge(ranks, daemon, reference, "E1302 (warning, step begins again|step aborted)|E1007|no error" if kind == "abort" else None)
        daemon.stop()
        for process in daemon.others:
            process.check_sanitizers()
    except BaseException as error:
        error.args = (f"seed {seed}, {kind}, double {double}, config {config}, plans {plans}\n{error}",)
        raise
    finally:
        for process in daemon.others:
            process.kill()
        daemon.kill()
    return daemon


def campaign(arguments):
    """Runs the long campaign and prints a table. Return: the number of failed runs."""
    build = Build(os.environ.get("ZEROD_BUILD", ROOT / "build"))
    folder = Path(tempfile.mkdtemp(prefix="zerod-soak-"))
    references = References(build, folder)
    seed0 = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**9)
    rows = [(kind, False, arguments.rounds) for kind in [*CLASSES, ABORTS]] + [("any", True, arguments.doubles)]
    n_failed = 0
    print(f"seed {seed0}; each run commits {N_STEPS} steps\n\n{'killed at':<22}{'runs':>6}{'same bits':>11}{'seconds':>9}")
    for kind, double, n in rows:
        if arguments.only and kind not in arguments.only:
            continue
        began, n_good = time.monotonic(), 0
        for i in range(n):
            where = folder / f"{kind}-{i}"
            where.mkdir()
            try:
                chosen = kind if not double else random.Random(f"{seed0} {i}").choice(list(CLASSES))
                one_run(build, references, where, seed0 + i, chosen, double)
                n_good += 1
                shutil.rmtree(where)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                n_failed += 1
                (where / "failure.txt").write_text(str(error))
                print(f"FAILED, see {where}/failure.txt\n{str(error)[:3000]}", file=sys.stderr)
        print(f"{kind + (', two ranks' if double else ''):<22}{n:>6}{n_good:>11}{time.monotonic() - began:>9.1f}",
              flush=True)
    if n_failed == 0:
        shutil.rmtree(folder)
    return n_failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/soak kills", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="runs of each class (15)")
    parser.add_argument("--doubles", type=int, default=20, help="runs in which two ranks are killed (20)")
    parser.add_argument("--only", action="append", choices=[*CLASSES, ABORTS, "any"], help="only this class")
    parser.add_argument("--seed", type=int, help="repeats a campaign; random unless given")
    sys.exit(1 if campaign(parser.parse_args()) else 0)
