# SPDX-License-Identifier: Apache-2.0
"""A whole step through the daemon compared with peers that run as many processes with the same gradients."""

import json

from harness import (MI, Failure, TorchJob, ZerodJob, available_bytes, forget_broken_builds, in_turn, median, row,
                     say)
from peers import FIFTEEN, FIFTEEN_CLIP, SHM_CLIP

ELEMS = 64 * MI
STAGES = {2: (1, 2), 4: (1, 2), 8: (2,)}
FAMILIES = ("fifteen", "deepspeed", "gloo")
# chain -> number of ranks -> goal. "gloo" is the fastest of gloo's chains.
GOALS = {FIFTEEN_CLIP: dict.fromkeys(STAGES, 1.1), FIFTEEN: dict.fromkeys(STAGES, 0.95), SHM_CLIP: {2: 3.0, 4: 4.0},
         "gloo": {2: 4.0, 4: 6.0, 8: 8.0}}
TAIL_GOALS = {2: 3.5, 4: 6.0}

# ---- check that all sides compute equal weights ---------------------------------------------------------------------

CHECKED_STEPS = 2
STRIDE = 16381  # distance of the compared weights; no chain divides its work by a factor of this number
LR = 1e-3
MEAN_OFF, MOST_OFF = 1e-5 * LR, 1e-2 * LR  # limits for weights that have moved by about LR in each step


def zerod_sample(job):
    job.ranks[0].send(f"sample {STRIDE}")
    return json.loads(job.ranks[0].receive())


def without_clipping(world):
    """Return: the weights that zerod computes from the same gradients without clipping."""
    job = ZerodJob(world, 2, ELEMS, clipping=0.0)
    try:
        for _ in range(CHECKED_STEPS):
            job.step()
        return zerod_sample(job)
    finally:
        job.stop()


def compare(name, weights, expected):
    off = [abs(a - b) for a, b in zip(weights, expected, strict=True)]
    mean, most = sum(off) / len(off), max(off)
    if not (mean <= MEAN_OFF and most <= MOST_OFF):
        raise Failure(f"{name} differs from zerod after {CHECKED_STEPS} steps: by {mean / LR:.1e} of a step's change in "
                      f"the mean, {most / LR:.1e} at most")
    return mean, most


def first_steps(stages, torch, unclipped):
    """Makes each side's first steps, after which all weights must be equal. Return: ms of the faster step, by chain."""
    clipped = None
    for stage, job in stages.items():
        for _ in range(CHECKED_STEPS):
            job.step()
        weights = zerod_sample(job)
        clipped = clipped or weights
        compare(f"stage {stage}", weights, clipped)
    first = {}
    for chain, facts in torch.chains.items():
        torch.reset(chain)
        first[chain] = min(torch.step(chain) for _ in range(CHECKED_STEPS))
        for rank, weights in enumerate(torch.ask(chain, sample=STRIDE)):
            off = compare(f"rank {rank} of {chain}", weights, clipped if facts["clips"] else unclipped)
        say(f"    {chain}: {first[chain]:.0f} ms; weights are zerod's but for {off[0] / LR:.0e} of a step's change")
    return first


# ---- measurement ----------------------------------------------------------------------------------------------------


def needed_bytes(world):
    """Return: the bytes of gradients, weights and state that all sides hold at once, see peers/ and
    docs/benchmarks.md."""
    model, process = ELEMS * 4, 390 * MI
    torch = (6 * world + 9) * model + world * process
    zerod = (world + 4.5) * model + world * 40 * MI
    return int(torch + len(STAGES[world]) * zerod)


def measure(world, quick):
    """Return: in_turn()'s results of each stage; ms by chain; the slow chains, which only first_steps() ran; the
    fastest of gloo's chains."""
    unclipped = without_clipping(world)
    jobs = []
    try:
        torch = TorchJob(world, ELEMS, families=FAMILIES)
        jobs.append(torch)
        stages = {}
        for stage in STAGES[world]:
            stages[stage] = ZerodJob(world, stage, ELEMS)
            jobs.append(stages[stage])
        first = first_steps(stages, torch, unclipped)
        gloo = {chain for chain, facts in torch.chains.items() if facts["family"] == "gloo"}
        slow = torch.slow(first) & gloo
        sides = {stage: job.step for stage, job in stages.items()}
        sides |= {chain: (lambda chain=chain: torch.step(chain)) for chain in torch.chains if chain not in slow}
        results = in_turn(sides, 4 if quick else 9)
    finally:
        for job in jobs:
            job.stop()
    chains = {chain: first[chain] if chain in slow else median(results[chain]) for chain in first}
    return {stage: results[stage] for stage in stages}, chains, slow, min(gloo, key=chains.get)


def rows_of(world, stages, chains, fastest_gloo):
    rows = []
    for stage, results in stages.items():
        total, tail = (median([r[part] for r in results]) for part in ("total", "tail"))
        for peer, goals in GOALS.items():
            peer = fastest_gloo if peer == "gloo" else peer
            rows.append(row(f"step: whole, {world} ranks, stage {stage}", total, chains[peer], peer, "ms",
                            goals.get(world)))
        rows.append(row(f"step: after the last push, {world} ranks, stage {stage}", tail, chains[fastest_gloo],
                        fastest_gloo, "ms", TAIL_GOALS.get(world)))
    return rows


def table_of(world, stages, chains, slow):
    table = [[f"{world} ranks, zerod, stage {stage}", *(f"{median([r[part] for r in results]):.1f}"
                                                      for part in ("push", "tail", "total"))]
             for stage, results in stages.items()]
    return table + [[f"{world} ranks, {chain}" + (" (best of 2)" if chain in slow else ""), "", "", f"{ms:.1f}"]
                    for chain, ms in chains.items()]


def step(quick):
    """A whole step of 64 Mi fp32 parameters, clipped, pushed by copy, compared with DeepSpeed, torch, and fifteen
    lines."""
    forget_broken_builds()
    rows, table = [], []
    for world in STAGES:
        say(f"  {world} ranks")
        if available_bytes() < needed_bytes(world):
            say(f"  left out: {needed_bytes(world) / 2**30:.1f} GiB of memory are needed, "
                f"{available_bytes() / 2**30:.1f} are available")
            continue
        stages, chains, slow, fastest_gloo = measure(world, quick)
        rows += rows_of(world, stages, chains, fastest_gloo)
        table += table_of(world, stages, chains, slow)
    head = ["ms, medians", "until the last push", "after the last push", "whole"]
    return rows, {"each side": [head, *table]}
