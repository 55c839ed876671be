# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of surviving a daemon's death, and how long the death interrupts a job."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time

import loss_curve
from harness import (BUILD, MI, ROOT, Failure, Process, ZerodJob, available_bytes, in_both_orders, median, program, row,
                     say, stop_all)
from nodes import NodesJob, make_key

sys.path.append(str(ROOT / "tests" / "e2e"))
from network import Network, why_no_network  # noqa: E402
from private_systemd import PrivateSystemd  # noqa: E402

ELEMS = 64 * MI
GOALS_MS = {"zerodrun": 500, "systemd": 1000}  # from the kill to the first answer of the next daemon
RESIZE_GOAL_MS = 5000
ADAMW, SGD = {"type": "AdamW", "params": {"lr": 1e-3}}, {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0}}
# Elements, optimizer, bytes per element: state, gradient and weights of fp32, slots, the trainers' gradients. Of rows
# with equal numbers of elements, only the first that fits is measured.
SIZES = ((ELEMS, ADAMW, 19), (8 * ELEMS, ADAMW, 19), (16 * ELEMS, ADAMW, 19), (16 * ELEMS, SGD, 11))
SHARE = 16  # a trainer has gradients for 1/16 of the model, and pushes them repeatedly


class Tree:
    """The build, with the attributes that PrivateSystemd reads."""

    folder = BUILD

    def __init__(self):
        options = json.loads((BUILD / "meson-info" / "intro-buildoptions.json").read_text())
        self.options = {option["name"]: option["value"] for option in options}

    def path(self, name):
        return BUILD / name


class SystemdJob(ZerodJob):
    """A job under a real systemd, in namespaces of its own."""

    def __init__(self, folder, elems, optimizer):
        self.ranks, self.unit, self.systemd = [], "zerod@bench.service", None
        self.systemd = PrivateSystemd(Tree(), folder)
        try:
            shutil.copy(program("bench-rank"), f"{self.systemd.folder}/installed{self.systemd.bin}")
            self.systemd.configure("bench", {"world": {"size": 2}, "zero_optimization": {"stage": 2},
                                             "optimizer": optimizer, "gradient_clipping": 1.0})
            self.systemd.ctl("start", self.unit)
            for rank in (0, 1):
                self.ranks.append(Process(self.systemd.command(
                    ["env", f"LD_LIBRARY_PATH={self.systemd.lib}", self.systemd.bin / "bench-rank", "--rank", rank,
                     "--socket", "/run/zerod/bench.sock", "--elems", elems, "--params", 64, "--buffer-elems",
                     elems // SHARE, "--on-demand"])))
            for rank in self.ranks:
                rank.receive()
        except BaseException:
            self.stop()
            raise

    def status(self):
        ctl = self.systemd.zerodctl("bench", "--json", "status", check=False)
        if ctl.returncode != 0:
            raise Failure(ctl.stderr)
        return json.loads(ctl.stdout)

    def daemon_pid(self):
        return self.systemd.main_pid_outside(self.unit)

    def stop(self):
        for rank in self.ranks:
            rank.stop()
        if self.systemd:
            self.systemd.stop()


def kill_to_answer(job):
    """Kills the daemon. Return: the milliseconds until another daemon has answered."""
    pid, n_daemons = job.daemon_pid(), job.status()["n_daemons"]
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while True:
        try:
            status = job.status()
        except Failure:  # the connection still belonged to the dead daemon
            continue
        if status["n_daemons"] > n_daemons:
            assert not status["held"], status
            return (time.monotonic() - began) * 1e3


def kills_between_steps(job, n):
    """Return: the time of a usual step; the times from a kill to an answer; the times of the steps after a kill."""
    usual = median([job.step()["total"] for _ in range(7)][2:])
    answers, nexts = [], []
    for _ in range(n):
        answers.append(kill_to_answer(job))
        nexts.append(job.step()["total"])
    return usual, sorted(answers), nexts


def kills_in_steps(job, n):
    """Return: the times of steps during which the daemon is killed."""
    usual, times = median([job.step()["total"] for _ in range(3)]), []
    for _ in range(n):
        pid = job.daemon_pid()
        job.begin_step()
        time.sleep(usual / 2e3)
        os.kill(pid, signal.SIGKILL)
        times.append(job.end_step()["total"])
    return times


def recoveries(make, quick):
    """Measures kills with two jobs, because zerodrun starts a daemon again at most 100 times in 10 minutes."""
    with contextlib.closing(make()) as job:
        usual, answers, nexts = kills_between_steps(job, 10 if quick else 100)
    with contextlib.closing(make()) as job:
        hits = kills_in_steps(job, 3 if quick else 20)
    return answers, answers[min(len(answers) - 1, len(answers) * 99 // 100)], usual, median(nexts), median(hits)


def costs(quick):
    """Compares a step of a job whose state is kept with a step of a job whose state is not kept."""

    def step(job):
        return job.step() | {"update": job.status()["time"]["update"]["last_ns"] / 1e6}

    make = {name: (lambda kept=name == "kept": ZerodJob(2, 2, ELEMS, kept=kept)) for name in ("kept", "not kept")}
    results = in_both_orders(make, step, 5 if quick else 21)
    goals = {"total": ("whole step", 1 / 1.03), "update": ("update", 1 / 1.05), "push": ("pushes of a step", 1 / 1.05)}
    return [row(f"survival: {what}, 2 ranks, stage 2", *(median([r[part] for r in results[name]])
                                                         for name in ("kept", "not kept")), "not kept", "ms", goal)
            for part, (what, goal) in goals.items()]


def sizes():
    """Yields the entries of SIZES that fit into the memory."""
    done = set()
    for elems, optimizer, n_bytes in SIZES:
        if elems not in done and elems * n_bytes <= available_bytes():
            done.add(elems)
            yield f"{elems // MI} Mi, {optimizer['type']}", elems, optimizer


def keepers(folder):
    """Yields a name, a keeper (what starts the next daemon), and a function that makes the job."""
    for what, elems, optimizer in sizes():
        yield what, "zerodrun", lambda elems=elems, optimizer=optimizer: ZerodJob(
            2, 2, elems, buffer_elems=elems // SHARE, optimizer=f"optimizer: {json.dumps(optimizer)}\n", kept=True)
    os.environ["PATH"] = f"{ROOT}/build/venv/bin:{os.environ['PATH']}"  # has meson, which installs for systemd
    if why := PrivateSystemd.missing():
        say(f"not under systemd: {why}")
    else:
        for what, elems, optimizer in sizes():
            yield what, "systemd", lambda elems=elems, optimizer=optimizer: SystemdJob(
                pathlib.Path(tempfile.mkdtemp(dir=folder)), elems, optimizer)
    if why := why_no_network():
        say(f"not on several nodes: {why}")
    else:
        with contextlib.closing(Network(2)) as network:
            yield (f"{ELEMS // MI} Mi, AdamW, two nodes", "zerodrun",
                   lambda: NodesJob(network, make_key(folder), 2, kept=True))


def peak_bytes(pid):
    """Return: the most memory that the daemon has held so far, shared memory included."""
    for line in open(f"/proc/{pid}/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def resizes(quick):
    """Resizes a held job, from 2 ranks to 3 to 5 to 2, and so on."""
    rows = []
    for what, elems, optimizer in sizes():
        with contextlib.closing(ZerodJob(2, 2, elems, buffer_elems=elems // SHARE,
                                         optimizer=f"optimizer: {json.dumps(optimizer)}\n", kept=True)) as job:
            job.step()
            stop_all(job.ranks)
            times, peak = [], peak_bytes(job.daemon_pid())
            for n_ranks in (3, 5, 2) * (2 if quick else 10):
                began = time.monotonic()
                job.daemon.ctl("resize", str(n_ranks))
                times.append((time.monotonic() - began) * 1e3)
            grown = peak_bytes(job.daemon_pid()) - peak
        say(f"  {what}: another number of ranks in {median(times):.1f} ms (longest {max(times):.1f}); the daemon's peak "
            f"memory grew by {grown / 2**20:.1f} MiB")
        rows.append(row(f"survival: another number of ranks, longest, {what}", max(times), RESIZE_GOAL_MS, "goal", "ms", 1.0))
    return rows


def survival(quick):
    """The cost of surviving a daemon's death, and how long the death interrupts a job."""
    rows = costs(quick) + resizes(quick)
    table = [["elements", "keeper", "kills", "p50 ms", "p99 ms", "usual step ms", "step after a kill ms",
              "step with a kill in it ms"]]
    with tempfile.TemporaryDirectory(prefix="zerod-bench-") as folder:
        for what, keeper, make in keepers(pathlib.Path(folder)):
            answers, p99, *steps = recoveries(make, quick)
            rows.append(row(f"survival: kill to answer, p99, {what}, {keeper}", p99, GOALS_MS[keeper], "goal", "ms",
                            1.0))
            table.append([what, keeper, str(len(answers)), f"{median(answers):.0f}", f"{p99:.0f}",
                          *(f"{step:.0f}" for step in steps)])
    return rows, {"kill to answer": table,
                  "plot": (loss_curve.draw, "loss-over-kills.png", "Losses and times of steps with two kills")}
