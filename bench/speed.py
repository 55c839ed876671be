# SPDX-License-Identifier: Apache-2.0
"""Kernels, whole steps, overlap, the update phase: each beside its peer."""

import json
import subprocess

from harness import (MI, Failure, Process, TorchJob, ZerodJob, in_turn, median, n_cores, program, row, say)

ELEMS = 64 * MI
STEP_GOALS = {2: (2.0, 3.5), 4: (3.0, 6.0)}


def kernels(quick):
    """Update and reduce kernels against bare streams of the same bytes; fp32 AdamW against torch's fused one."""
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
        sides.append(TorchJob(1, ELEMS, threads=threads))
        update, torch = sides
        update.receive()
        ms = in_turn({"zerod": lambda: in_process_update(update), "torch": lambda: torch.step(torch.chains[0])},
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


def slow_chains(torch):
    """Runs each chain twice. Those that take twice as long as the fastest need no further comparison."""
    first = {chain: min(torch.step(chain) for _ in range(2)) for chain in torch.chains}
    return {chain for chain, ms in first.items() if ms > 2 * min(first.values())}, first


def step_of(world, quick):
    jobs = []
    try:
        torch = TorchJob(world, ELEMS)
        jobs.append(torch)
        stages = {}
        for stage in (1, 2):
            stages[stage] = ZerodJob(world, stage, ELEMS)
            jobs.append(stages[stage])
        slow, first = slow_chains(torch)
        sides = {stage: job.step for stage, job in stages.items()}
        sides |= {chain: (lambda chain=chain: torch.step(chain)) for chain in torch.chains if chain not in slow}
        results = in_turn(sides, 4 if quick else 9)
    finally:
        for job in jobs:
            job.stop()
    chains = {chain: median(results[chain]) if chain not in slow else first[chain] for chain in torch.chains}
    fastest = min(chains, key=chains.get)
    rows = []
    for stage in stages:
        total, tail = (median([r[part] for r in results[stage]]) for part in ("total", "tail"))
        rows.append(row(f"step: whole, {world} ranks, stage {stage}", total, chains[fastest], fastest, "ms",
                        STEP_GOALS[world][0]))
        rows.append(row(f"step: after the last push, {world} ranks, stage {stage}", tail, chains[fastest], fastest,
                        "ms", STEP_GOALS[world][1]))
    table = [[f"{world} ranks, zerod, stage {stage}", *(f"{median([r[p] for r in results[stage]]):.1f}"
                                                      for p in ("push", "tail", "total"))] for stage in stages]
    table += [[f"{world} ranks, torch, {chain}" + (" (best of 2)" if chain in slow else ""), "", "", f"{ms:.1f}"]
              for chain, ms in chains.items()]
    return rows, table


def step(quick):
    """A whole step through the daemon against torch's chains on gloo; 64 Mi fp32 parameters, clipping on, pushes by copy."""
    rows, table = [], []
    for world in (2, 4):
        say(f"  {world} ranks")
        more_rows, more_table = step_of(world, quick)
        rows += more_rows
        table += more_table
    head = ["ms, medians", "until the last push", "after the last push", "whole"]
    return rows, {"each side": [head, *table]}


def overlap(quick):
    """Share of the bytes that is reduced before the last rank ends its backward."""
    rows = []
    for world in (2, 4):
        # Between two pushes a rank computes as long as a small layer's backward takes.
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
    """The daemon's update phase against the same kernels called in process."""
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
    """The update with the recorder and without it, in one process: few large parameters, and ten thousand small ones."""
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
