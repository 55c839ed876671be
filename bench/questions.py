# SPDX-License-Identifier: Apache-2.0
"""The cost of zerodctl's questions for the trainers."""

import time

from harness import MI, Process, ZerodJob, median, program, row, say

LOADS = {
    "1 connection, report, never read": ("--command", "report", "--never-read"),
    "60 connections, 8 status in flight each": ("--connections", "60", "--in-flight", "8"),
    "4 connections, report": ("--connections", "4", "--command", "report"),
    "16 connections, status": ("--connections", "16"),
}
MOST = 1.1  # times the undisturbed step
PARAMS = 200


def block(job, n_steps, load=()):
    """Milliseconds of each step, and answers in a second."""
    asker = Process([program("bench-asker"), "--socket", job.daemon.socket, *load]) if load else None
    try:
        if asker:
            asker.receive()
            job.step()
        begin = time.monotonic()
        steps = [job.step()["total"] for _ in range(n_steps)]
        seconds = time.monotonic() - begin
        return steps, int(asker.finish()) / seconds if asker else 0
    finally:
        if asker:
            asker.stop()


def questions(quick):
    """A small step while clients ask questions without end, against the same job's undisturbed step."""
    rows, table = [], []
    job = ZerodJob(2, 2, elems=MI, params=PARAMS)
    try:
        block(job, 20)
        for name, load in LOADS.items():
            quiet, loaded, rates = [], [], []
            for _ in range(6 if quick else 20):
                quiet += block(job, 20)[0]
                steps, rate = block(job, 20, load)
                loaded += steps
                rates.append(rate)
            say(f"  {name}: {median(loaded):.2f} ms, {median(quiet):.2f} undisturbed")
            rows.append(row(f"questions: {name}", median(loaded), median(quiet), "undisturbed", "ms", 1 / MOST))
            table.append([name, *(f"{v:.2f}" for v in (median(quiet), median(loaded))),
                          f"{median(loaded) / median(quiet):.2f}", f"{median(rates):.0f}"])
    finally:
        job.stop()
    head = ["load", "step, undisturbed, ms", "step, loaded, ms", "loaded / undisturbed", "answers in a second"]
    return rows, {"each load": [head, *table]}
