# SPDX-License-Identifier: Apache-2.0
"""What it costs that the daemon may die, and how long its death is felt."""

import os
import signal
import time

import loss_curve
from harness import MI, ZerodJob, available_bytes, in_turn, median, row

ELEMS = 64 * MI
BYTES_PER_ELEM = 24  # state, gradient and weights of fp32, and some room
GOAL_MS = 500        # from the kill to the first answer of the next daemon


def kill_to_answer(job):
    """Kills the daemon; milliseconds until the next one has answered, and it is another."""
    pid = job.status()["pid"]
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while True:
        try:
            status = job.status()
        except Exception:  # the connection was still the dead one's
            status = {"pid": pid}
        if status["pid"] != pid:
            assert status["n_daemons"] > 1 and not status["held"], status
            return (time.monotonic() - began) * 1e3


def recoveries(elems, n):
    job = ZerodJob(2, 2, elems, kept=True)
    times, pauses = [], []
    try:
        for _ in range(3):
            usual = job.step()["total"]
        for _ in range(n):
            times.append(kill_to_answer(job))
            pauses.append(job.step()["total"])
    finally:
        job.stop()
    return sorted(times), usual, pauses


def costs(quick):
    """A step whose state is kept, against one whose state is not."""
    jobs = {}
    try:
        for name, kept in (("kept", True), ("not kept", False)):
            jobs[name] = ZerodJob(2, 2, ELEMS, kept=kept)

        def one(job):
            result = job.step()
            result["update"] = job.status()["time"]["update"]["last_ns"] / 1e6
            return result

        results = in_turn({name: (lambda job=job: one(job)) for name, job in jobs.items()}, 5 if quick else 21)
    finally:
        for job in jobs.values():
            job.stop()
    goals = {"total": ("whole step", 1 / 1.03), "update": ("update", 1 / 1.05), "push": ("pushes of a step", 1 / 1.05)}
    return [row(f"survival: {what}, 2 ranks, stage 2", *(median([r[part] for r in results[name]])
                                                         for name in ("kept", "not kept")), "not kept", "ms", goal)
            for part, (what, goal) in goals.items()]


def survival(quick):
    """What it costs that the daemon may die, and how long its death is felt."""
    rows, table = costs(quick), [["elements", "kills", "p50 ms", "p99 ms", "usual step ms", "next step ms"]]
    for elems in (ELEMS, 8 * ELEMS, 16 * ELEMS):
        if elems * BYTES_PER_ELEM > available_bytes():
            continue
        times, usual, pauses = recoveries(elems, 5 if quick else 40)
        p99 = times[len(times) * 99 // 100]
        rows.append(row(f"survival: kill to answer, p99, {elems // MI} Mi", p99, GOAL_MS, "goal", "ms", 1.0))
        table.append([f"{elems // MI} Mi", str(len(times)), f"{median(times):.0f}", f"{p99:.0f}", f"{usual:.0f}",
                      f"{median(pauses):.0f}"])
    return rows, {"kill to answer, under zerodrun": table,
                  "plot": (loss_curve.draw, "loss-over-kills.png", "Losses and times of steps with two kills")}
