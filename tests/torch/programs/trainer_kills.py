# SPDX-License-Identifier: Apache-2.0
"""
Torch trainers under zerodrun --restarts are killed and continue. Their final weights, master weights and moments, and
all losses, must have the bits of an undisturbed run. A life is one process of a rank. Used by test_trainer_kills.py. As
a program (scripts/soak torch-kills) it runs the long campaign.

A rank's plan is a list of deaths, one for each life. A death is a failpoint (text: core/base/failpoint.h), or a kill
from outside: [steps, ms] that long after the life has done this many steps, or ["start", ms] after its process was
started.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TRAINER = Path(__file__).with_name("kill_trainer.py")
WORLD, N_MICRO, N_PUSHES = 2, 2, 6
STEPS_PER_KILL = 6  # a life is killed before it has done this many
TAIL = 10           # steps after the last kill

STARTING = ["connected", "Hello.send", "Hello.sent", "Hello.answered", "Declare.send", "Declare.sent", "Form.send",
            "Form.wait", "Form.answered", "formed", "Ready.wait", "Ready.answered"]
# How often a step passes each failpoint.
RUNNING = {"Push.send": N_MICRO * N_PUSHES, "Push.sent": N_MICRO * N_PUSHES, "copy": N_MICRO * N_PUSHES,
           "BeginBackward.sent": N_MICRO, "EndBackward.send": N_MICRO, "EndBackward.wait": N_MICRO,
           "EndBackward.answered": N_MICRO, "GradNorm.wait": 1, "GradNorm.answered": 1,
           "Step.send": 1, "Step.wait": 1, "Step.answered": 1}  # fmt: skip


def death(rng):
    kind = rng.random()
    if kind < 0.35:
        return [rng.randrange(STEPS_PER_KILL - 1), rng.randrange(40)]
    if kind < 0.4:
        return ["start", rng.randrange(3000)]
    if kind < 0.55:
        return f"{rng.choice(STARTING)}:kill"
    name = rng.choice(list(RUNNING))
    return f"{name}:kill@{rng.randint(1, (STEPS_PER_KILL - 1) * RUNNING[name])}"


def plans_of(rng, n_kills):
    plans = {str(rank): [] for rank in range(WORLD)}
    for _ in range(n_kills):
        plans[str(rng.randrange(WORLD))].append(death(rng))
    return plans


def configuration(folder, rng):
    """Return: a daemon's configuration. The bits do not depend on it."""
    return {
        "job": "kills",
        "listen": {"socket": str(folder / "zerod.sock"), "mode": "0600"},
        "world": {"size": WORLD},
        "zero_optimization": {"stage": rng.choice((1, 2, 3)), "reduce_bucket_size": rng.choice((1, 300, 50000))},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.01}},
        "threads": rng.choice((1, 2)),
    }


class Killer:
    """Kills trainers from outside. tend() must be called frequently."""

    def __init__(self, folder, plans):
        self.folder = folder
        self.waiting = [(rank, life, after, ms) for rank, lives in plans.items() for life, what in enumerate(lives)
                        if not isinstance(what, str) for after, ms in [what]]
        self.due = []

    def _lines(self, name):
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def _has_come(self, rank, life, after):
        """Return: whether the life has reached this point. It is formed after it has computed a loss."""
        stem = f"rank{rank}.life{life}"
        if after == "start":
            return bool(self._lines(f"{stem}.pid"))
        return len(self._lines(f"{stem}.formed")) > 0 and len(self._lines(f"{stem}.steps")) >= after

    def tend(self):
        now = time.monotonic()
        for entry in [e for e in self.waiting if self._has_come(*e[:3])]:
            self.waiting.remove(entry)
            self.due.append((now + entry[3] / 1000, *entry[:2]))
        for entry in [e for e in self.due if e[0] <= now]:
            self.due.remove(entry)
            pid = int(self._lines(f"rank{entry[1]}.life{entry[2]}.pid")[0])
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended; the judge will report that


def environment(build):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ZEROD_", "LOCAL_")) and k not in ("RANK", "WORLD_SIZE")}
    return env | {"PYTHONPATH": str(ROOT / "client/python"), "ZEROD_LIBRARY": str(build / "client/libzerod.so"),
                  "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def train(build, folder, plans, n_steps, seed=0, timeout=900):
    """Does one run under zerodrun. Return: the results. A failure raises AssertionError."""
    config = folder / "zerod.json"
    config.write_text(json.dumps(configuration(folder, random.Random(seed))))
    (folder / "plan.json").write_text(json.dumps(plans))
    command = [build / "client/run/zerodrun", "--zerod", build / "daemon/zerod", "-n", WORLD, "--config", config,
               "--restarts", max(map(len, plans.values())), "--run-id", "kills", "--", sys.executable, TRAINER, folder,
               n_steps]
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, env=environment(build))
    killer, deadline = Killer(folder, plans), time.monotonic() + timeout
    try:
        while process.poll() is None and time.monotonic() < deadline:
            killer.tend()
            time.sleep(0.002)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, f"zerodrun ended with {process.returncode}\n{said(folder, plans)}"
    return judge_lives(folder, plans)


def said(folder, plans):
    return f"{plans}\n" + (folder / "output").read_text(errors="replace")[-6000:]


def judge_lives(folder, plans):
    """
    Checks that all planned deaths have happened and that all lives computed the same. Return: {"final": ..., (0, step,
    micro-batch): loss}.
    """
    results = {}
    for rank, lives in plans.items():
        n_lives = len(list(folder.glob(f"rank{rank}.life*.pid")))
        assert n_lives == len(lives) + 1, f"rank {rank}: {n_lives} lives\n{said(folder, plans)}"
        finals = set((folder / f"rank{rank}.final").read_text().splitlines())
        assert len(finals) == 1, f"rank {rank} ended with different bits: {finals}"
        results["final", rank] = finals.pop()
        for line in (folder / f"rank{rank}.steps").read_text().splitlines():
            step, micro_batch, loss = line.split()
            known = results.setdefault((rank, int(step), int(micro_batch)), loss)
            assert known == loss, f"rank {rank}, step {step}.{micro_batch}: {known}, then {loss}\n{said(folder, plans)}"
    assert results["final", "0"] == results["final", "1"], "ranks differ"
    return results


def differences(found, reference):
    keys = sorted(set(found) | set(reference), key=lambda key: (key[0] == "final", key[1:]))  # in the order of the run
    return [f"{key}: {found.get(key)}, undisturbed {reference.get(key)}"
            for key in keys if found.get(key) != reference.get(key)][:5]


def reference(build, folder, n_steps):
    folder.mkdir()
    return train(build, folder, {str(rank): [] for rank in range(WORLD)}, n_steps)


def killed(build, folder, seed, n_kills, expected, n_steps):
    """Does a run with this many deaths. Raises AssertionError if the bits are not the expected ones."""
    folder.mkdir()
    plans = plans_of(random.Random(seed), n_kills)
    found = train(build, folder, plans, n_steps, seed)
    wrong = differences(found, expected)
    assert not wrong, "\n".join(wrong) + f"\n{said(folder, plans)}"
    return plans


def n_steps_of(n_kills):
    return STEPS_PER_KILL * n_kills + TAIL


def campaign(arguments):
    build = Path(os.environ.get("ZEROD_BUILD", ROOT / "build")).resolve()
    folder = Path(tempfile.mkdtemp(prefix="zerod-torch-kills-"))
    seed0 = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    n_steps = n_steps_of(arguments.per_run)
    print(f"seed {seed0}; {WORLD} ranks, {n_steps} steps of {N_MICRO} micro-batches in a run", flush=True)
    expected = reference(build, folder / "reference", n_steps)
    n_killed = n_good = n_runs = 0
    while n_killed < arguments.kills:
        n, where, began = min(arguments.per_run, arguments.kills - n_killed), folder / str(n_runs), time.monotonic()
        try:
            plans = killed(build, where, seed0 + n_runs, n, expected, n_steps)
            n_good += n
            print(f"run {n_runs}: {n} kills, same bits, {time.monotonic() - began:.0f} s, {json.dumps(plans)}", flush=True)
            shutil.rmtree(where)
        except AssertionError as error:
            (where / "failure.txt").write_text(str(error))
            print(f"run {n_runs}: FAILED, see {where}/failure.txt\n{str(error)[:3000]}", flush=True)
        n_killed, n_runs = n_killed + n, n_runs + 1
    print(f"{n_good} of {n_killed} kills, in {n_runs} runs, ended bit-equal")
    if n_good == n_killed:
        shutil.rmtree(folder)
    return n_good == n_killed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/soak torch-kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="how many in all (50)")
    parser.add_argument("--per-run", type=int, default=5, help="how many in one run of two ranks (5)")
    parser.add_argument("--seed", type=int, help="repeats a campaign; random unless given")
    sys.exit(0 if campaign(parser.parse_args()) else 1)
