# SPDX-License-Identifier: Apache-2.0
"""
What zerod's hooks cost a backward when there is next to nothing to copy.

The function torch_hook is one of scripts/bench's. As a program this is one rank: torch_hook.py SHAPE SOCKET, where an
empty SOCKET means the model alone. It makes a forward and a backward for each line of standard input and prints how
long both took, and at each parameter how long it was from one hook of ours to another, with zerod's between them.
"""

import json
import os
import sys
import time

from harness import ROOT, Daemon, Failure, Process, in_turn, median, row, say

# 30 M parameters; its twin has as many modules and parameters, but next to nothing in them.
SHAPES = {"30 M": {"layers": 6, "heads": 8, "width": 512, "vocabulary": 20000, "positions": 256},
          "twin": {"layers": 6, "heads": 1, "width": 8, "vocabulary": 16, "positions": 16}}
LENGTHS = {"30 M": 128, "twin": 8}
HOOK_US, SHARE = 5.0, 0.005


# ---- the rank -----------------------------------------------------------------------------------------------------


def serve(shape, socket):
    import gpt2
    import torch

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = gpt2.GPT2(**SHAPES[shape])
    batches = gpt2.Batches(SHAPES[shape]["vocabulary"], 0, 1, 1, LENGTHS[shape])
    before, after = [], []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: before.append(time.perf_counter_ns()))
    if socket:
        import zerod

        optimizer = zerod.Optimizer(model, socket=socket, rank=0, lr=1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: after.append(time.perf_counter_ns()))
    print(len(list(model.parameters())), file=out, flush=True)
    for _ in sys.stdin:
        tokens = batches.next()
        before.clear()
        after.clear()
        start = time.perf_counter_ns()
        model(tokens).backward()
        took = time.perf_counter_ns() - start
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"ns": took, "hooks": [b - a for a, b in zip(before, after, strict=True)]}), file=out,
              flush=True)
    if socket:
        optimizer.close()


# ---- the benchmark ------------------------------------------------------------------------------------------------


class Rank:
    """One rank and, if it is zerod's, its daemon; on a core each, else it is the scheduler that is measured."""

    def __init__(self, shape, with_zerod, environment):
        self.daemon, self.process = None, None
        cores = sorted(os.sched_getaffinity(0))
        try:
            self.daemon = Daemon(1, cores={cores[-1]}) if with_zerod else None
            self.process = Process([sys.executable, str(ROOT / "bench" / "torch_hook.py"), shape,
                                    self.daemon.socket if self.daemon else ""], env=environment)
            os.sched_setaffinity(self.process.popen.pid, {cores[0]})
            self.n_params = int(self.process.receive())
        except BaseException:
            self.stop()
            raise

    def iterate(self):
        self.process.send()
        return json.loads(self.process.receive())

    def stop(self):
        if self.process:
            self.process.stop()
        if self.daemon:
            self.daemon.stop()


def percentiles(values):
    values = sorted(values)
    return [values[len(values) * q // 100] for q in (50, 90, 99)]


def measure(quick, environment):
    sides = {}
    try:
        for shape in SHAPES:
            for with_zerod in (False, True):
                sides[shape, with_zerod] = Rank(shape, with_zerod, environment)
        results = {}
        for shape, n in (("30 M", 5 if quick else 21), ("twin", 50 if quick else 500)):
            results |= in_turn({side: sides[side].iterate for side in sides if side[0] == shape}, n, 3)
            for side in sides:
                if side[0] == shape:
                    say(f"    {shape}, {'zerod' if side[1] else 'model alone'}: "
                        f"{median([r['ns'] for r in results[side]]) / 1e6:.3f} ms forward and backward")
        return results, sides["twin", True].n_params
    finally:
        for side in sides.values():
            side.stop()


def torch_hook(quick):
    """What hook, evidence and push cost without the copy: per parameter, and in an iteration of a 30 M transformer."""
    from training import rank_environment

    results, n_params = measure(quick, rank_environment())
    hooks = {side: percentiles([ns for r in results[side] for ns in r["hooks"]]) for side in results}
    # Two readings of the clock and two calls of our own hooks are in both.
    hook_us = (hooks["twin", True][0] - hooks["twin", False][0]) / 1e3
    if hook_us <= 0:
        raise Failure("zerod's hooks do not stand between ours: nothing was measured")
    extra_ms = median([a["ns"] - b["ns"] for a, b in zip(results["twin", True], results["twin", False])]) / 1e6
    iteration_ms = median([r["ns"] for r in results["30 M", False]]) / 1e6
    share = extra_ms / iteration_ms
    rows = [row("torch-hook: hook, evidence and push, p50", hook_us, HOOK_US, "allowed", "us", 1.0),
            row("torch-hook: all of it in an iteration", share * 100, SHARE * 100, "allowed", "% of 30 M", 1.0)]
    table = [["us at a parameter", "p50", "p90", "p99"]]
    table += [[f"{shape}, {'zerod' if with_zerod else 'model alone'}", *(f"{ns / 1e3:.1f}" for ns in values)]
              for (shape, with_zerod), values in hooks.items()]
    whole = [["forward and backward", "ms"]]
    whole += [[f"{shape}, {'zerod' if with_zerod else 'model alone'}", f"{median([r['ns'] for r in rows]) / 1e6:.3f}"]
              for (shape, with_zerod), rows in results.items()]
    whole.append([f"twin, zerod beyond the model alone ({n_params} parameters)", f"{extra_ms:.3f}"])
    return rows, {"from a hook before zerod's to a hook after it": table, "the whole": whole}


if __name__ == "__main__":
    serve(*sys.argv[1:3])
