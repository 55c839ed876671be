# SPDX-License-Identifier: Apache-2.0
"""zerodctl trace with PyTorch: a slow rank is visible, and torch.profiler's events have the same times as zerod's."""

import json
import os
import subprocess
import time
from pathlib import Path

import torch

import zerod as package

SLOW_STEP, PAUSE_S = 12, 0.05
N_STEPS = 16


def ask_for_trace(folder, *args):
    program = Path(os.environ["ZEROD_LIBRARY"]).parent / "ctl" / "zerodctl"
    file = Path(folder) / "trace.json"
    subprocess.run([program, "trace", "--steps", "20", "--output", file, *args], check=True)
    return json.loads(file.read_text())


def train(folder, profile):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    opt = package.Optimizer(model, lr=0.01)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    for step in package.steps(opt, N_STEPS):
        with step:
            if profile and opt.rank == 0 and step == 2:
                profiler.start()
            if opt.rank == 1 and step == SLOW_STEP:
                time.sleep(PAUSE_S)
            with torch.profiler.record_function("our backward"):
                model(torch.randn(32, 64)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    trace = None
    if opt.rank == 0:
        more = []
        if profile:
            profiler.stop()
            profiler.export_chrome_trace(f"{folder}/torch.json")
            more = ["--merge", f"{folder}/torch.json"]
        trace = ask_for_trace(folder, *more)
    opt.close()
    return trace


def spans(trace, name, pid=None):
    return [e for e in trace["traceEvents"]
            if e.get("ph") == "X" and e["name"] == name and pid in (None, e["pid"])]


def test_a_slow_rank_is_seen(zerod, run, tmp_path):
    trace = run(zerod({"zero_optimization": {"stage": 2}}), train, folder=str(tmp_path), profile=False)[0]
    (slow,) = (e for e in spans(trace, "forward") if e["tid"] == 101 and e["args"]["step"] == SLOW_STEP)
    assert slow["dur"] >= PAUSE_S * 1e6
    (wait,) = (e for e in spans(trace, "waits: end of the micro-batch") if e["tid"] == 100 and e["args"]["step"] == SLOW_STEP)
    assert wait["dur"] >= PAUSE_S * 1e6 * 0.5  # rank 0 waited for it


def test_torch_profiler_lies_where_zerod_does(zerod, run, tmp_path):
    trace = run(zerod({"zero_optimization": {"stage": 2}}), train, folder=str(tmp_path), profile=True)[0]
    theirs = sorted(spans(trace, "our backward"), key=lambda e: e["ts"])
    ours = sorted((e for e in spans(trace, "backward") if e["tid"] == 100 and e["args"]["step"] >= 3), key=lambda e: e["ts"])
    assert len(theirs) >= len(ours) >= N_STEPS - 4
    for a, b in zip(theirs[-len(ours):], ours):  # the daemon sees it within torch's, except for a message's delay
        assert a["ts"] - 20e3 <= b["ts"] and b["ts"] + b["dur"] <= a["ts"] + a["dur"] + 20e3
