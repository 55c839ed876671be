# SPDX-License-Identifier: Apache-2.0
"""Measures the time of a message, and whether other clients are answered while an update runs."""

import json
import os
import subprocess
import time

from harness import Daemon, Failure, Process, ZerodJob, program, row

UPDATE_MS = 4.0


def alternating(kind, quick):
    # Pins the trainer to one core, and the daemon and the bare reader to another. Otherwise the scheduler would be
    # measured.
    cores = sorted(os.sched_getaffinity(0))
    own, other = cores[0], cores[-1]
    daemon = Daemon(1, cores={other})
    try:
        run = subprocess.run([program("bench-latency"), kind, "--socket", daemon.socket, "--rounds",
                              "4" if quick else "16", "--cores", f"{own},{other}"], capture_output=True, text=True,
                             timeout=120)
    finally:
        daemon.stop()
    if run.returncode != 0:
        raise Failure(run.stderr.strip())
    return json.loads(run.stdout)


def figures(name, result):
    return [[f"{name}, {side}", *(f"{result[side][q] / 1e3:.1f}" for q in ("p50", "p90", "p99"))]
            for side in ("zerod", "peer")]


def p99(values):
    return sorted(values)[len(values) * 99 // 100]


def probe_updates(quick):
    """Return: the times of answers in ms: while the job is idle, and for questions that were asked during updates."""
    job = ZerodJob(2, 2)
    probe = None
    try:
        job.step()
        probe = Process([program("bench-latency"), "probe", "--socket", job.daemon.socket])
        probe.receive()
        begin = time.monotonic_ns()
        time.sleep(1 if quick else 3)
        end = time.monotonic_ns()
        updates = []
        for _ in range(8 if quick else 25):
            rows = job.step()["rows"]
            updates.append((max(r["ended"] for r in rows), max(r["done"] for r in rows)))
        answers = [tuple(map(int, line.split())) for line in probe.finish().splitlines()]
    finally:
        if probe:
            probe.stop()
        job.stop()
    idle = [ns / 1e6 for at, ns in answers if begin <= at < end]
    busy = [ns / 1e6 for at, ns in answers if any(a <= at < b for a, b in updates)]
    if len(idle) < 100 or len(busy) < 100:
        raise Failure(f"only {len(idle)} answers when idle and {len(busy)} during updates")
    return idle, busy


def push(quick):
    """A push and a round trip compared with a bare socket; answers to other clients while an update runs."""
    one_way, there_and_back = alternating("push", quick), alternating("round", quick)
    idle, busy = probe_updates(quick)
    allowed = p99(idle) + UPDATE_MS
    rows = [
        row("push: one way, p50", one_way["zerod"]["p50"] / 1e3, one_way["peer"]["p50"] / 1e3,
            f"send of {one_way['n_bytes']} bytes", "us", 0.80),
        row("push: round trip, p50", there_and_back["zerod"]["p50"] / 1e3, there_and_back["peer"]["p50"] / 1e3,
            "socketpair ping-pong under epoll", "us", 0.714),
        row("push: answer during an update, p99", p99(busy), allowed, f"idle p99 + {UPDATE_MS:.0f} ms", "ms", 1.0),
    ]
    table = [["us", "p50", "p90", "p99"], *figures("one way", one_way), *figures("round trip", there_and_back)]
    return rows, {"each side": table}
