# SPDX-License-Identifier: Apache-2.0
"""Compares the losses of a training whose daemon is killed with those of an undisturbed training. They are equal."""

import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

from harness import Failure, program

N_STEPS = 200
KILLS = (70, 140)  # the daemon is killed when rank 0 has reported these steps


def read_steps(report):
    """Return: (step, loss, seconds) of rank 0 for the steps reported so far."""
    lines = report.read_text().splitlines() if report.exists() else []
    return [(e["step"], e["loss"], e["seconds"]) for e in map(json.loads, lines) if e["event"] == "step"]


def children(pid):
    """Return: the processes that the process has started."""
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, rest = (entry / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            except OSError:
                continue
            if int(rest.split()[1]) == pid:
                yield int(entry.name), name


def kill_daemon(run):
    for pid, name in children(run.pid):
        if name == "zerod":
            os.kill(pid, signal.SIGKILL)


def train(kills):
    """Return: (step, loss, seconds) for each step of a run of the example trainer on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "rank0.json"
        trainer = f"exec {program('zerod-example')} --steps {N_STEPS} --report {folder}/rank$RANK.json"
        with open(pathlib.Path(folder) / "log", "w+") as log:
            run = subprocess.Popen([program("zerodrun"), "-n", "2", "--zerod", program("zerod"), "--",
                                    "sh", "-c", trainer], stdout=log, stderr=log)
            for step in kills:
                while run.poll() is None and len(read_steps(report)) <= step:
                    time.sleep(0.005)
                kill_daemon(run)
            run.wait()
            log.seek(0)
            said = log.read()
            if run.returncode != 0 or said.count("took over the job from the daemon before") != len(kills):
                raise Failure(f"the run ended with {run.returncode}: {said[-2000:]}")
        return read_steps(report)


def draw(path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    alone, killed = train(()), train(KILLS)
    if [s[:2] for s in alone] != [s[:2] for s in killed]:
        raise Failure("the run whose daemon was killed has other losses")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.4), constrained_layout=True)
    left.plot(*zip(*(s[:2] for s in alone)), color="0.75", linewidth=5, label="left alone")
    left.plot(*zip(*(s[:2] for s in killed)), linewidth=1.2, label="daemon killed twice")
    left.set(xlabel="step", ylabel="loss of rank 0")
    for steps, style in ((alone, {"color": "0.75", "linewidth": 3}), (killed, {"linewidth": 1.2})):
        right.plot([s[0] for s in steps[1:]], [(b[2] - a[2]) * 1e3 for a, b in zip(steps, steps[1:])], **style)
    right.set(xlabel="step", ylabel="ms per step")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        for step in KILLS:
            axes.axvline(step + 1, color="tab:red", linestyle="--", linewidth=1,
                         label="kill -9 of zerod" if step == KILLS[0] else None)
    left.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
