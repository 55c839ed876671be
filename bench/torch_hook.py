# SPDX-License-Identifier: Apache-2.0
"""The cost of a parameter in a backward with zerod, with DistributedDataParallel, and with an empty hook."""

import json
import os
import shutil
import sys
import tempfile

from harness import ROOT, Daemon, Failure, Process, in_turn, median, row, say, stop_all
from training import rank_environment

HOOK_US, SHARE, MANY_TIMES = 4.0, 0.005, 1.3  # allowed limits
PER_PARAMETER = ("model alone", "empty hooks", "DDP", "zerod")


class Side:
    """The ranks of one side and, for zerod, the daemon. A single rank and its daemon each have a core of their own;
    otherwise the scheduler would be measured."""

    def __init__(self, name, shape, environment, world=1, probed=False):
        self.ranks, self.daemon = [], None
        self.folder = tempfile.mkdtemp(prefix="zerod-bench-")
        cores = sorted(os.sched_getaffinity(0))
        try:
            if name == "zerod":
                self.daemon = Daemon(world, cores={cores[-1]} if world == 1 else None)
            rendezvous = self.daemon.socket if self.daemon else f"{self.folder}/store"
            for rank in range(world):
                argv = [sys.executable, str(ROOT / "bench" / "torch_hook_rank.py"), name, shape, str(int(probed)),
                        str(rank), str(world), rendezvous]
                self.ranks.append(Process(argv, env=environment))
                if world == 1:
                    os.sched_setaffinity(self.ranks[0].popen.pid, {cores[0]})
            self.n_params = [int(rank.receive()) for rank in self.ranks][0]
        except BaseException:
            self.stop()
            raise

    def iterate(self):
        """Return: the times of the slowest rank; "both" is forward and backward."""
        for rank in self.ranks:
            rank.send()
        answer = max((json.loads(rank.receive()) for rank in self.ranks), key=lambda a: a["backward"])
        return answer | {"both": answer["forward"] + answer["backward"]}

    def stop(self):
        stop_all(self.ranks)
        if self.daemon:
            self.daemon.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def measure(shape, names, n, environment, world=1, probed=False):
    """Return: the results of each side's iterations; the number of parameters."""
    sides = {}
    try:
        for name in names:
            sides[name] = Side(name, shape, environment, world, probed)
        results = in_turn({name: side.iterate for name, side in sides.items()}, n, 3)
        for name, found in results.items():
            say(f"    {shape}, {name}{', probed' if probed else ''}: {median_of(found, 'both') / 1e6:.3f} ms "
                f"forward and backward")
        return results, sides[names[0]].n_params
    finally:
        for side in sides.values():
            side.stop()


def median_of(found, what):
    return median([r[what] for r in found])


def beyond(results, name, what):
    """Return: the median of the ns beyond the model alone, computed round by round."""
    return median([a[what] - b[what] for a, b in zip(results[name], results["model alone"])])


def percentiles(values):
    values = sorted(values)
    return [values[len(values) * q // 100] for q in (50, 90, 99)]


def rows_per_parameter(results, n_params):
    us = {name: beyond(results, name, "both") / n_params / 1e3 for name in PER_PARAMETER[1:]}
    name = f"torch-hook: a parameter's share of forward and backward, {n_params} parameters"
    if us["zerod"] <= 0:
        raise Failure("a backward with zerod takes no longer than without: nothing was measured")
    return [row(name, us["zerod"], HOOK_US, "allowed", "us", 1.0),
            row(name, us["zerod"], us["DDP"], "DDP, gradients are views of buckets, 1 rank", "us", None),
            row(name, us["zerod"], us["empty hooks"], "a Python hook that does nothing", "us", None)]


def table_per_parameter(results, n_params):
    table = [["us for each parameter beyond the model alone", "forward", "backward", "both"]]
    return table + [[name, *(f"{beyond(results, name, what) / n_params / 1e3:.1f}"
                             for what in ("forward", "backward", "both"))] for name in PER_PARAMETER[1:]]


def table_of_probes(shapes):
    table = [["us at a parameter", "p50", "p90", "p99"]]
    for shape, results in shapes.items():
        for name, found in results.items():
            values = percentiles([ns for r in found for ns in r["hooks"]])
            table.append([f"{shape}, {name}", *(f"{ns / 1e3:.1f}" for ns in values)])
    return table


def table_of_times(all_results):
    table = [["ms", "forward", "backward"]]
    return table + [[f"{shape}, {name}", *(f"{median_of(found, what) / 1e6:.3f}" for what in ("forward", "backward"))]
                    for shape, results in all_results.items() for name, found in results.items()]


def torch_hook(quick, many="many"):
    """The cost of a parameter's hook, evidence and push in a backward, compared with DDP's hooks; 10,000 small
    parameters."""
    environment = rank_environment()
    twin, n_params = measure("twin", PER_PARAMETER, 50 if quick else 500, environment)
    large, _ = measure("30 M", ("model alone", "zerod"), 5 if quick else 21, environment)
    probed = {shape: measure(shape, ("model alone", "zerod"), n, environment, probed=True)[0]
              for shape, n in (("30 M", 3 if quick else 11), ("twin", 20 if quick else 200))}
    small, n_small = measure(many, ("model alone", "DDP", "zerod"), 5 if quick else 31, environment, world=2)
    rows = rows_per_parameter(twin, n_params)
    share = beyond(twin, "zerod", "both") / median_of(large["model alone"], "both")
    rows.append(row("torch-hook: all of it in an iteration", share * 100, SHARE * 100, "allowed", "% of 30 M", 1.0))
    rows.append(row(f"torch-hook: backward, {n_small} parameters of 64 elements, 2 ranks",
                    median_of(small["zerod"], "backward") / 1e6, median_of(small["DDP"], "backward") / 1e6,
                    "DDP, gradients are views of buckets", "ms", 1 / MANY_TIMES))
    return rows, {"what a parameter costs": table_per_parameter(twin, n_params),
                  "from a hook before zerod's to a hook after it": table_of_probes(probed),
                  "the whole": table_of_times({"twin": twin, "30 M": large, f"{n_small} of 64": small})}
