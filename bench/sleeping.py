# SPDX-License-Identifier: Apache-2.0
"""A rank that sleeps instead of computing, as the CPU does while a GPU computes: how much of the update is hidden."""

import json

from harness import MI, Failure, ZerodJob, available_bytes, in_turn, median, row, say

ELEMS, PARAMS = 96 * MI, 48  # bf16
NEEDED_BYTES = 6 << 30
COPY_MB_PER_S = 25_000  # each way; PCIe 4.0 with 16 lanes
SPIKE = 10  # each tenth step is clipped
RATIOS = {"half as long as": 0.5, "as long as": 1.0, "twice as long as": 2.0}  # time of the sleep / time of the update
FORWARD = 1 / 3  # share of the sleep
GOAL = 1.1  # times the longer of sleep and update


class SleepingJob(ZerodJob):
    """A job whose rank sleeps. sleep_ms: the sleep of a whole step, without copies."""

    def __init__(self, sleep_ms, clipping):
        options = ["--in-slot", "--sleeps", "--bf16", "--copy-mb-per-s", str(COPY_MB_PER_S), "--spike", str(SPIKE),
                   "--forward-us", str(round(1000 * sleep_ms * FORWARD))]
        super().__init__(1, elems=ELEMS, params=PARAMS, compute_us=round(1000 * sleep_ms * (1 - FORWARD) / PARAMS),
                         clipping=clipping, more=options)

    def step(self):
        rank = self.ranks[0]
        rank.send()
        rank.receive()  # its gradients are in their slots
        rank.send()
        times = json.loads(rank.receive())
        return {"total": (times["done"] - times["start"]) / 1e6, "step": (times["stepped"] - times["ended"]) / 1e6,
                "copy": (times["done"] - times["stepped"]) / 1e6}


def norm_bound():
    """Return: a norm above that of usual gradients and below that of each tenth step. Their elements are uniform in
    +-2**-9."""
    return 2 * 2**-9 * (ELEMS / 3) ** 0.5


def update_ms(n, clipping):
    """Return: the time of the daemon's work on a step, with a rank that computes in no time."""
    job = SleepingJob(0, clipping)
    try:
        return median([job.step()["step"] for _ in range(n + 2)][2:])
    finally:
        job.stop()


def sleeping(quick):
    """Whole steps of 96 Mi parameters whose rank sleeps in forward and backward, beside the longer of sleep and update."""
    if available_bytes() < NEEDED_BYTES:
        raise Failure(f"needs {NEEDED_BYTES >> 30} GiB")
    n = 10 if quick else 30
    rows, lines = [], []
    for clips, clipping in (("no clipping", 0.0), ("1 of 10 steps clipped", norm_bound())):
        update = update_ms(n, clipping)
        sides = {name: SleepingJob(ratio * update, clipping) for name, ratio in RATIOS.items()}
        try:
            results = in_turn({name: side.step for name, side in sides.items()}, n)
        finally:
            for side in sides.values():
                side.stop()
        for name, ratio in RATIOS.items():
            sleep, whole = ratio * update, median([r["total"] for r in results[name]])
            longer = max(sleep, update)
            say(f"    {clips}, sleep {name} the update: {whole:.0f} ms, sleep {sleep:.0f}, update {update:.0f}")
            rows.append(row(f"sleeping: {name} the update, {clips}", whole, longer, "the longer of sleep and update", "ms", 1 / GOAL))
            lines.append([clips, f"{sleep:.0f}", f"{update:.0f}",
                          *(f"{median([r[what] for r in results[name]]):.0f}" for what in ("total", "step", "copy"))])
    return rows, {"medians of ms": [["", "sleep", "update", "whole step", "step()", "weights' copy"], *lines]}
