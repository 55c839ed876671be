# SPDX-License-Identifier: Apache-2.0
"""Kernels, overlap and the update phase, each compared with a peer."""

import json
import subprocess

from harness import (MI, Failure, Process, TorchJob, ZerodJob, in_turn, median, n_cores, program, row)

ELEMS = 64 * MI


def kernels(quick):
    """Update and reduce kernels compared with bare streams of the same bytes; fp32 AdamW compared with torch's fused
    AdamW."""
    threads = min(2, n_cores())
    run = subprocess.run([program("bench-kernels"), "--json", "--threads", str(threads), "--pairs",
                          "5" if quick else "9"], capture_output=True, text=True, timeout=300)
    if run.returncode != 0:
        raise Failure(f"bench-kernels: {run.stderr.strip()}")
    rows = json.loads(run.stdout)
    for r in rows:
        r["name"] = f"kernel: {r['name']}"
    sides = []
    try:
        sides.append(Process([program("bench-update"), "--elems", str(ELEMS), "--threads", str(threads)]))
        sides.append(TorchJob(1, ELEMS, threads=threads, families=["alone"]))
        update, torch = sides
        update.receive()
        ms = in_turn({"zerod": lambda: in_process_update(update), "torch": lambda: torch.step(*torch.chains)},
                     5 if quick else 31)
    finally:
        for side in sides:
            side.stop()
    rows.append(row("kernel: adamw, fp32, all of 64 Mi", median(ms["zerod"]), median(ms["torch"]),
                    "torch.optim.AdamW(fused=True)", "ms", 1.0))
    return rows, {}


def in_process_update(update, line=""):
    update.send(line)
    return json.loads(update.receive())["ns"] / 1e6


def overlap(quick):
    """Share of the bytes that is reduced before the last rank ends its backward."""
    rows = []
    for world in (2, 4):
        # Between two pushes, a rank computes as long as the backward of a small layer takes.
        job = ZerodJob(world, 2, ELEMS, compute_us=2000)
        try:
            shares = []
            for i in range(3 if quick else 6):
                job.step()
                shares.append(job.status()["overlap"]["ratio"])
        finally:
            job.stop()
        rows.append(row(f"overlap: {world} ranks", median(shares[1:]), 1.0, "all bytes", "share", 0.80,
                        median(shares[1:])))
    return rows, {}


def update(quick):
    """The daemon's update phase compared with the same kernels called in process."""
    jobs = []
    try:
        job = ZerodJob(2, 2, ELEMS)
        jobs.append(job)
        peer = Process([program("bench-update"), "--elems", str(ELEMS), "--threads", str(n_cores())])
        jobs.append(peer)
        peer.receive()

        def daemon_update():
            job.step()
            return job.status()["time"]["update"]["last_ns"] / 1e6

        ms = in_turn({"zerod": daemon_update, "peer": lambda: in_process_update(peer)}, 5 if quick else 13)
    finally:
        for j in jobs:
            j.stop()
    return [row("update: phase of the daemon, 2 ranks", median(ms["zerod"]), median(ms["peer"]),
                "step_update in process", "ms", 0.95)], {}


def recorder(quick):
    """The update with and without the recorder, in one process: few large parameters, and ten thousand small
    parameters."""
    rows = []
    for params, elems in ((64, ELEMS), (10000, 10 * MI)):
        side = Process([program("bench-update"), "--elems", str(elems), "--params", str(params), "--threads", str(n_cores())])
        try:
            side.receive()
            ms = in_turn({"zerod": lambda: in_process_update(side, "record"), "peer": lambda: in_process_update(side)},
                         9 if quick else 301)
        finally:
            side.stop()
        rows.append(row(f"recorder: update of {params} parameters, {elems // MI} Mi elements", median(ms["zerod"]),
                        median(ms["peer"]), "without it", "ms", 0.995))
    return rows, {}
