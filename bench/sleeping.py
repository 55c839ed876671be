# SPDX-License-Identifier: Apache-2.0
"""A rank that sleeps instead of computing, as the CPU does while a GPU computes: how much of the update is hidden."""

import json

from harness import MI, Failure, ZerodJob, available_bytes, in_turn, median, row, say

ELEMS, PARAMS = 96 * MI, 48  # bf16
NEEDED_BYTES = 12 << 30
BUCKET_ELEMS = 4 * MI  # a 24th of the model, as a model of 1.2 G parameters has them with the usual size
CHUNK_ELEMS = 64 * 1024
COPY_MB_PER_S = 25_000  # each way; PCIe 4.0 with 16 lanes
SPIKE = 11  # each so many steps one is clipped; odd, because each second step is measured
RATIOS = {"half as long as": 0.5, "as long as": 1.0, "twice as long as": 2.0}  # time of the sleep / time of the update
FORWARD = 1 / 3  # share of the sleep
GOAL = 1.1  # times the longer of sleep and update


class SleepingJob(ZerodJob):
    """A job whose rank sleeps. sleep_ms: the sleep of a whole step, without copies."""

    def __init__(self, sleep_ms, clipping, early="auto"):
        options = ["--in-slot", "--sleeps", "--bf16", "--copy-mb-per-s", str(COPY_MB_PER_S), "--spike", str(SPIKE),
                   "--forward-us", str(round(1000 * sleep_ms * FORWARD))]
        zero = f", reduce_bucket_size: {BUCKET_ELEMS}, speculative_update: {early}"
        super().__init__(1, elems=ELEMS, params=PARAMS, compute_us=round(1000 * sleep_ms * (1 - FORWARD) / PARAMS),
                         clipping=clipping, zero=zero, more=options)

    def iterate(self):
        rank = self.ranks[0]
        rank.send()
        rank.receive()  # its gradients are in their slots
        rank.send()
        return json.loads(rank.receive())

    def step(self):
        """Return: ms of the second of two steps. Its forward waits for what the first one has left of the update."""
        self.iterate()
        times = self.iterate()
        self.ranks[0].send("wait")  # so that the rest does not disturb other jobs
        times |= json.loads(self.ranks[0].receive())
        return {"total": (times["forward"] + times["done"] - times["start"]) / 1e6, "forward": times["forward"] / 1e6,
                "step": (times["done"] - times["ended"]) / 1e6, "update": (times["there"] - times["ended"]) / 1e6}

    def early_share(self):
        """Return: the share of chunks that were updated before the decision, of all in the steps so far."""
        status = self.status()
        return status["counters"]["n_early_updates"] / (status["n_applied"] * ELEMS / CHUNK_ELEMS)


def norm_bound():
    """Return: a norm above that of usual gradients and below that of each SPIKE-th step. Their elements are uniform in
    +-2**-9."""
    return 2 * 2**-9 * (ELEMS / 3) ** 0.5


def update_ms(n, clipping):
    """Return: the time of the daemon's work on a step, with a rank that computes in no time."""
    job = SleepingJob(0, clipping, early="false")
    try:
        return median([job.step()["update"] for _ in range(n + 2)][2:])
    finally:
        job.stop()


def sleeping(quick):
    """Whole steps of 96 Mi parameters whose rank sleeps in forward and backward, beside the longer of sleep and update."""
    if available_bytes() < NEEDED_BYTES:
        raise Failure(f"needs {NEEDED_BYTES >> 30} GiB")
    n = 10 if quick else 30
    rows, lines = [], []
    for clips, clipping in (("no clipping", 0.0), (f"1 of {SPIKE} steps clipped", norm_bound())):
        update = update_ms(n, clipping)
        sides = {name: SleepingJob(ratio * update, clipping) for name, ratio in RATIOS.items()}
        try:
            results = in_turn({name: side.step for name, side in sides.items()}, n)
            early = {name: side.early_share() for name, side in sides.items()}
        finally:
            for side in sides.values():
                side.stop()
        for name, ratio in RATIOS.items():
            sleep, whole = ratio * update, median([r["total"] for r in results[name]])
            longer = max(sleep, update)
            say(f"    {clips}, sleep {name} the update: {whole:.0f} ms, sleep {sleep:.0f}, update {update:.0f}")
            rows.append(row(f"sleeping: {name} the update, {clips}", whole, longer, "the longer of sleep and update", "ms", 1 / GOAL))
            lines.append([clips, f"{sleep:.0f}", f"{update:.0f}",
                          *(f"{median([r[what] for r in results[name]]):.0f}" for what in ("total", "forward", "step")),
                          f"{100 * early[name]:.0f} %"])
    return rows, {"medians of ms": [["", "sleep", "update", "whole step", "forward", "step()", "updated early"], *lines]}
