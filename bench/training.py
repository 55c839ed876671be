# SPDX-License-Identifier: Apache-2.0
"""A whole training in PyTorch beside DistributedDataParallel and DeepSpeed: time and memory beyond the model alone."""

import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import threading
import time

from growth import memfd_bytes
from harness import (BUILD, EXTENSIONS, MI, ROOT, Daemon, Failure, Process, available_bytes, forget_broken_builds, in_turn,
                     median, row, say)

WORLD, BATCH, LENGTH = 2, 1, 128
TIME_GOAL, MEMORY_GOAL = 1.8, 1 / 0.6
NEEDED_BYTES = 17 << 30
# The settings that might be the fastest here; each family's fastest is measured.
DDP = {"DDP": "ddp", "DDP, gradients are views of buckets": "ddp:view",
       "DDP, gradients are views of buckets, static graph": "ddp:view:static",
       "DDP, gradients are views of buckets of 100 MiB": "ddp:view:cap=100"}
DEEPSPEED = {
    "DeepSpeed ZeRO-2": "deepspeed",
    "DeepSpeed ZeRO-2, overlap_comm, buckets of 25 M": "deepspeed:overlap:bucket=25000000",
    "DeepSpeed ZeRO-2, buckets of 25 M": "deepspeed:bucket=25000000",
    "DeepSpeed ZeRO-2, its CPU Adam": "deepspeed:offload",
    "DeepSpeed ZeRO-2, torch's fused AdamW": "deepspeed:torch",
}
# As the peers, which do not clip here: all sides then compute the same, and their losses are compared.
DAEMON = {"clipping": 0.0}
SAME_LOSS = 0.01


def rank_environment():
    python_path = [str(ROOT / "client" / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1",
                MASTER_PORT="29500", PYTHONPATH=os.pathsep.join(python_path),
                ZEROD_LIBRARY=str(BUILD / "client" / "libzerod.so"),
                TORCH_EXTENSIONS_DIR=str(EXTENSIONS))


class Training:
    """The ranks of one side, and zerod's daemon."""

    def __init__(self, spec):
        self.spec, self.ranks, self.daemon = spec, [], None
        self.folder = tempfile.mkdtemp(prefix="zerod-bench-")
        try:
            if spec == "zerod":
                self.daemon = Daemon(WORLD, stage=2, **DAEMON)
            rendezvous = self.daemon.socket if self.daemon else f"{self.folder}/store"
            for rank in range(WORLD):
                argv = [sys.executable, str(ROOT / "bench" / "torch_side.py"), spec, rank, WORLD, rendezvous, BATCH,
                        LENGTH]
                self.ranks.append(Process(list(map(str, argv)), env=rank_environment()))
            for rank in self.ranks:
                rank.receive(600)  # DeepSpeed compiles its kernels when it is first used
        except BaseException:
            self.stop()
            raise

    def iterate(self):
        """Milliseconds until the last rank is done, and the mean loss."""
        for rank in self.ranks:
            rank.send()
        rows = [json.loads(rank.receive()) for rank in self.ranks]
        return {"ms": (max(r["done"] for r in rows) - min(r["start"] for r in rows)) / 1e6,
                "loss": statistics.fmean(r["loss"] for r in rows)}

    def pids(self):
        return [p.popen.pid for p in self.ranks + ([self.daemon] if self.daemon else [])]

    def held(self):
        """Proportional set size of all processes in MiB, with the pages of zerod's segments that nobody has touched."""
        sizes = [proportional_set(pid) for pid in self.pids()]
        shared = sum(s["Pss_Shmem"] for s in sizes)
        if self.daemon:
            shared = max(shared, sum(memfd_bytes(self.daemon.popen.pid).values()))
        return (sum(s["Pss"] - s["Pss_Shmem"] for s in sizes) + shared) / MI

    def stop(self):
        for rank in self.ranks:
            if rank.popen.poll() is None:
                rank.popen.stdin.close()
        for rank in self.ranks:
            rank.stop()
        if self.daemon:
            self.daemon.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def proportional_set(pid):
    lines = (line.split() for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return {name.rstrip(":"): int(kib) * 1024 for name, kib, *_ in lines}


# ---- time ---------------------------------------------------------------------------------------------------------


def rounds(sides, n, n_warm_up=2):
    """All sides in turn, n times. Says what each iteration took."""

    def iterate(name):
        result = sides[name].iterate()
        say(f"    {name}: {result['ms']:.0f} ms, loss {result['loss']:.3f}")
        return result

    return in_turn({name: lambda name=name: iterate(name) for name in sides}, n, n_warm_up)


def beyond(results, name):
    """Milliseconds beyond the model alone, round by round."""
    return [side["ms"] - alone["ms"] for side, alone in zip(results[name], results["model alone"])]


def quartiles(values):
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def fastest_of(family, alone, n):
    """The fastest setting of a peer, and lines for a table of each one's time beyond the model."""
    seen = {}
    for name, spec in family.items():
        say(f"  trying {name}")
        side = None
        try:
            side = Training(spec)
            seen[name] = median(beyond(rounds({"model alone": alone, name: side}, n), name))
        except Failure as failure:
            say(f"    does not run here: {failure}")
        finally:
            if side:
                side.stop()
    if not seen:
        raise Failure(f"no setting runs: {', '.join(family)}")
    fastest = min(seen, key=seen.get)
    return fastest, [[name, f"{seen[name]:.0f}" if name in seen else "does not run here"] for name in family]


def check_losses(results):
    """The sides train the same model on the same text, so they are as good as one another at each iteration."""
    losses = {name: [r["loss"] for r in rows] for name, rows in results.items() if name != "model alone"}
    expected = next(iter(losses.values()))
    for name, values in losses.items():
        off = max(abs(a - b) / b for a, b in zip(values, expected))
        if off > SAME_LOSS:
            raise Failure(f"{name} does not train the same: losses differ by {off:.1%}")


# ---- memory -------------------------------------------------------------------------------------------------------


def memory_of(side, n=8):
    """
    MiB between iterations, and the most in the course of one: medians of n, for what a C library keeps of memory that
    was freed varies by tens of MiB from one iteration to the next.
    """
    most, over = 0, threading.Event()

    def watch():
        nonlocal most
        while not over.is_set():
            most = max(most, side.held())
            time.sleep(0.02)

    between, at_most = [], []
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(n):
            most = 0
            side.iterate()
            at_most.append(most)
            between.append(side.held())
    finally:
        over.set()
        watcher.join()
    return {"between iterations": median(between), "at most": median(at_most)}


# ---- what is found ------------------------------------------------------------------------------------------------


def rows_of(results, memory, peers):
    rows = []
    for peer in peers:
        rows.append(row("torch: time beyond the model", median(beyond(results, "zerod")), median(beyond(results, peer)),
                        peer, "ms", TIME_GOAL))
    for when in memory["zerod"]:
        for peer in peers:
            mine, theirs = (memory[name][when] - memory["model alone"][when] for name in ("zerod", peer))
            ratio = theirs / max(mine, 1)  # the model alone keeps its gradients, zerod's ranks do not: may be negative
            rows.append(row(f"torch: memory beyond the model, {when}", mine, theirs, peer, "MiB", MEMORY_GOAL, ratio))
    return rows


def table_of(results, memory):
    table = [["", "iteration, ms", "beyond the model, ms", "quartiles", "MiB between iterations", "MiB at most"]]
    for name in results:
        low, high = quartiles(beyond(results, name))
        table.append([name, f"{median([r['ms'] for r in results[name]]):.0f}", f"{median(beyond(results, name)):.0f}",
                      f"{low:.0f} to {high:.0f}", *(f"{memory[name][when]:.0f}" for when in memory[name])])
    return table


def torch(quick):
    """Training of GPT-2's shape, 124 M, 2 ranks, beside DDP with fused AdamW and DeepSpeed ZeRO-2."""
    if available_bytes() < NEEDED_BYTES:
        raise Failure(f"{NEEDED_BYTES >> 30} GiB of memory are needed, for all sides are alive at the same time")
    forget_broken_builds()
    sides = {}
    try:
        sides["model alone"] = Training("none")
        tried, peers = [], {}
        for family in (DDP, DEEPSPEED):
            name, lines = fastest_of(family, sides["model alone"], 1 if quick else 5)
            peers[name] = family[name]
            tried += lines
        for name, spec in peers.items():
            sides[name] = Training(spec)
        sides["zerod"] = Training("zerod")
        say("  all sides in turn")
        results = rounds(sides, 3 if quick else 21)
        check_losses(results)
        memory = {name: memory_of(side) for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.stop()
    cells = {name: (beyond(results, name), {when: memory[name][when] - memory["model alone"][when]
                                           for when in memory[name]}) for name in [*peers, "zerod"]}
    return rows_of(results, memory, peers), {
        "each side": table_of(results, memory),
        "settings of the peers that were tried before": [["", "beyond the model, ms"], *tried],
        "plot": (lambda path: plot(cells, path), "benchmarks-torch.png", "Time and memory beyond the model"),
    }


def plot(cells, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name.replace(", ", ",\n") for name in cells]
    colours = ["tab:gray"] * (len(cells) - 1) + ["tab:blue"]
    figure, (times, sizes) = pyplot.subplots(1, 2, figsize=(11, 3.6), constrained_layout=True)
    middles = [median(ms) for ms, _ in cells.values()]
    spread = [[abs(middle - quartiles(ms)[side]) for middle, (ms, _) in zip(middles, cells.values())]
              for side in (0, 1)]
    times.barh(names, middles, xerr=spread, color=colours, capsize=4)
    times.set(xlabel="ms of an iteration beyond the model alone; median and quartiles")
    whens = list(next(iter(cells.values()))[1])
    for i, when in enumerate(whens):
        sizes.barh([k + 0.35 * i - 0.175 for k in range(len(cells))], [memory[when] for _, memory in cells.values()],
                   height=0.35, color=colours, alpha=1 - 0.4 * i, label=when, edgecolor="black", linewidth=0.5)
    sizes.set_yticks(range(len(cells)), names)
    sizes.set(xlabel="MiB of all processes beyond the model alone")
    sizes.legend(fontsize=8)
    for axes in (times, sizes):
        axes.invert_yaxis()
        axes.grid(True, axis="x", alpha=0.3)
    figure.savefig(path, dpi=100)
