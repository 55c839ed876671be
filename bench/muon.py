# SPDX-License-Identifier: Apache-2.0
"""Compares the step of Muon with torch.optim.Muon."""

import json
import sys

from harness import ROOT, Daemon, Process, in_turn, median, row, say, stop_all
from training import STEADY_HEAP, rank_environment

OPTIMIZER = "optimizer: {type: Muon, params: {lr: 0.02, weight_decay: 0.1}}\n"
TORCH, IN_FP32 = "torch.optim.Muon", "torch.optim.Muon, iterations in fp32"
SIDES = {"zerod": "zerod", TORCH: "torch", IN_FP32: "torch-fp32"}


def muon(quick):
    """step() with the matrices of four layers of width 256, 3.1 million elements, compared with torch's; both on all
    cores."""
    daemon, ranks = Daemon(1, clipping=0.0, optimizer=OPTIMIZER), {}
    try:
        for name, how in SIDES.items():
            ranks[name] = Process([sys.executable, str(ROOT / "bench" / "muon_rank.py"), how, daemon.socket],
                                  env=rank_environment() | STEADY_HEAP)

        def step(rank):
            rank.send()
            return json.loads(rank.receive(600))["ms"]

        results = in_turn({name: lambda rank=rank: step(rank) for name, rank in ranks.items()}, 2 if quick else 5, 1)
    finally:
        stop_all(ranks.values())
        daemon.stop()
    times = {name: median(found) for name, found in results.items()}
    say("    " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in times.items()))
    return [row("muon: step()", times["zerod"], times[peer], peer, "ms", 1.0) for peer in (TORCH, IN_FP32)], {}
