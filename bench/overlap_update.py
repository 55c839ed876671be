# SPDX-License-Identifier: Apache-2.0
"""Measures what a trainer gains when the update runs during its next forward."""

import json
import os
import sys

from harness import ROOT, Daemon, Failure, Process, available_bytes, in_turn, median, row, say, stop_all
from training import STEADY_HEAP, quartiles, rank_environment

NEEDED_BYTES = 8 << 30
# case -> (what the forward does, number of ranks)
CASES = {
    "forward on another device": ("wait", 1),
    "forward on one core of two": ("compute", 1),
    "forward on both cores": ("compute", 2),
}
WHOLE, BEHIND = "step() waits for all weights", "update behind the forward"


class Side:
    """The daemon and the ranks, which train a model of 64 Mi parameters in 16 layers."""

    def __init__(self, forward, world, overlap):
        self.ranks, self.daemon = [], Daemon(world, stage=1, clipping=0.0)
        try:
            for rank in range(world):
                argv = [sys.executable, str(ROOT / "bench" / "overlap_rank.py"), forward, str(rank), str(world),
                        self.daemon.socket, str(int(overlap))]
                self.ranks.append(Process(argv, env=rank_environment() | STEADY_HEAP))
            for rank in self.ranks:
                rank.receive(120)
        except BaseException:
            self.stop()
            raise

    def iterate(self):
        """Return: ms from step() to the end of the last rank's backward, the times of its parts, and the loss."""
        for rank in self.ranks:
            rank.send()
        rows = [json.loads(rank.receive()) for rank in self.ranks]
        return {"ms": (max(r["done"] for r in rows) - min(r["start"] for r in rows)) / 1e6,
                "step": median([r["stepped"] - r["start"] for r in rows]) / 1e6,
                "forward": median([r["forward"] - r["stepped"] for r in rows]) / 1e6,
                "loss": rows[0]["loss"]}

    def stop(self):
        stop_all(self.ranks)
        self.daemon.stop()


def measure(forward, world, n):
    sides = {}
    try:
        for name in (WHOLE, BEHIND):
            sides[name] = Side(forward, world, name == BEHIND)
        results = in_turn({name: side.iterate for name, side in sides.items()}, n, 3)
    finally:
        for side in sides.values():
            side.stop()
    if [r["loss"] for r in results[WHOLE]] != [r["loss"] for r in results[BEHIND]]:
        raise Failure("the sides do not train the same, to the last bit")
    return results


def overlap_update(quick):
    """A step whose update runs during the next forward, compared with a step that waits for its update; 64 Mi
    parameters."""
    if available_bytes() < NEEDED_BYTES:
        raise Failure(f"needs {NEEDED_BYTES >> 30} GiB")
    if len(os.sched_getaffinity(0)) < 2:
        raise Failure("needs two cores")
    rows, lines = [], []
    for case, (forward, world) in CASES.items():
        results = measure(forward, world, 6 if quick else 20)
        gained = [a["ms"] - b["ms"] for a, b in zip(results[WHOLE], results[BEHIND])]
        whole, behind = (median([r["ms"] for r in results[name]]) for name in (WHOLE, BEHIND))
        say(f"    {case}: {whole:.0f} and {behind:.0f} ms, {median(gained):.0f} gained")
        rows.append(row(f"overlap-update: {case}", behind, whole, WHOLE, "ms", None))
        for name in (WHOLE, BEHIND):
            lines.append([case, name, *(f"{median([r[what] for r in results[name]]):.0f}" for what in
                                        ("ms", "step", "forward")),
                          "" if name == WHOLE else f"{median(gained):.0f} ({' to '.join(f'{q:.0f}' for q in quartiles(gained))})"])
    head = ["", "", "all", "step()", "forward", "gained, quartiles"]
    return rows, {"from step() to the end of the next backward, medians of ms": [head, *lines]}
