# SPDX-License-Identifier: Apache-2.0
"""Trainings in PyTorch compared with DistributedDataParallel and DeepSpeed: time and memory beyond the model alone."""

import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field

from growth import memfd_bytes
from harness import (MI, ROOT, Daemon, Failure, Process, available_bytes, deepspeed_environment, forget_broken_builds,
                     in_turn, median, program, remove_deepspeed_segments, row, say, stop_all)

WORLD, BATCH, LENGTH = 2, 1, 128
NEEDED_BYTES = 17 << 30
BETWEEN, AT_MOST = "between iterations", "at most"


@dataclass(frozen=True)
class Family:
    """Settings of a peer, by name; the fastest of them is measured. time, memory: goals against that setting."""

    settings: dict
    time: float | None = None
    memory: dict = field(default_factory=dict)


DDP = Family({"DDP": "ddp", "DDP, gradients are views of buckets": "ddp:view",
              "DDP, gradients are views of buckets, static graph": "ddp:view:static",
              "DDP, gradients are views of buckets of 100 MiB": "ddp:view:cap=100"}, 2.5)
DEEPSPEED = Family({
    "DeepSpeed ZeRO-2": "deepspeed",
    "DeepSpeed ZeRO-2, overlap_comm, buckets of 25 M": "deepspeed:overlap:bucket=25000000",
    "DeepSpeed ZeRO-2, buckets of 25 M": "deepspeed:bucket=25000000",
    "DeepSpeed ZeRO-2, its CPU Adam": "deepspeed:offload",
    "DeepSpeed ZeRO-2, torch's fused AdamW": "deepspeed:torch",
}, 10.0, {BETWEEN: 1 / 0.6, AT_MOST: 1 / 0.55})
FSDP2 = Family({
    "FSDP2": "fsdp2",
    "FSDP2, each block": "fsdp2:blocks",
    "FSDP2, each block, gathered until the backward": "fsdp2:blocks:keep",
}, 8.0)
ZEROD, STAGE_3, NARROW = "zerod", "zerod, stage 3", "zerod, bf16 moments"
# The families are measured one after another, because memory does not suffice for all. Each has a new zerod.
FAMILIES = (DDP, DEEPSPEED, FSDP2, Family({STAGE_3: "zerod:stage=3"}))
STAGE_3_TIME, STAGE_3_MEMORY = 1 / 1.2, 1.0  # compared with stage 2
NARROW_MEMORY = 2.0  # compared with DeepSpeed's memory
# The peers do not clip, so the daemon does not clip either: all sides compute the same, and their losses are compared.
DAEMON = {"clipping": 0.0}
SAME_LOSS = 0.01
# While time is measured, the C library neither returns freed memory to the kernel nor maps large pieces separately.
# Otherwise trainers pay for page faults that depend on when a side frees memory, which is not a cost of
# synchronisation.
STEADY_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 40)}


def rank_environment():
    python_path = [str(ROOT / "client" / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
                PYTHONPATH=os.pathsep.join(python_path), ZEROD_LIBRARY=program("libzerod.so"))


class Training:
    """The ranks of one side and, for zerod, the daemon."""

    def __init__(self, spec, heap=STEADY_HEAP):
        self.ranks, self.daemon = [], None
        self.folder = tempfile.mkdtemp(prefix="zerod-bench-")
        try:
            name, *options = spec.split(":")
            if name == "zerod":
                narrow = "bf16: {bf16_optimizer_states: true}\n" if "bf16-moments" in options else ""
                self.daemon = Daemon(WORLD, stage=3 if "stage=3" in options else 2, extra=narrow, **DAEMON)
            rendezvous = self.daemon.socket if self.daemon else f"{self.folder}/store"
            environment = rank_environment() | deepspeed_environment(WORLD, self.name()) | heap
            for rank in range(WORLD):
                argv = [sys.executable, str(ROOT / "bench" / "torch_side.py"), spec, rank, WORLD, rendezvous, BATCH,
                        LENGTH]
                self.ranks.append(Process(list(map(str, argv)), env=environment))
            for rank in self.ranks:
                rank.receive(600)  # DeepSpeed compiles its kernels when they are first used
        except BaseException:
            self.stop()
            raise

    def name(self):
        return pathlib.Path(self.folder).name

    def iterate(self):
        """Makes one iteration. Return: the milliseconds until the last rank has ended it, and the mean loss."""
        for rank in self.ranks:
            rank.send()
        rows = [json.loads(rank.receive()) for rank in self.ranks]
        return {"ms": (max(r["done"] for r in rows) - min(r["start"] for r in rows)) / 1e6,
                "loss": statistics.fmean(r["loss"] for r in rows)}

    def pids(self):
        return [p.popen.pid for p in self.ranks + ([self.daemon] if self.daemon else [])]

    def held(self):
        """Return: the proportional set size of all processes in MiB, including untouched pages of zerod's segments."""
        sizes = [proportional_set(pid) for pid in self.pids()]
        shared = sum(s["Pss_Shmem"] for s in sizes)
        if self.daemon:
            shared = max(shared, sum(memfd_bytes(self.daemon.popen.pid).values()))
        return (sum(s["Pss"] - s["Pss_Shmem"] for s in sizes) + shared) / MI

    def stop(self):
        stop_all(self.ranks)
        if self.daemon:
            self.daemon.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        remove_deepspeed_segments(self.name())


def proportional_set(pid):
    lines = (line.split() for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return {name.rstrip(":"): int(kib) * 1024 for name, kib, *_ in lines}


# ---- time ---------------------------------------------------------------------------------------------------------


def rounds(sides, n, n_warm_up=2):
    """Iterates all sides in turn, n times, and prints the time of each iteration."""

    def iterate(name):
        result = sides[name].iterate()
        say(f"    {name}: {result['ms']:.0f} ms, loss {result['loss']:.3f}")
        return result

    return in_turn({name: lambda name=name: iterate(name) for name in sides}, n, n_warm_up)


def beyond(results, name):
    """Return: the milliseconds beyond the model alone, round by round."""
    return [side["ms"] - alone["ms"] for side, alone in zip(results[name], results["model alone"])]


def quartiles(values):
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def fastest_of(family, alone, n):
    """Return: the peer's fastest setting, and table lines with each setting's time beyond the model. A single setting
    is not tried."""
    if len(family.settings) == 1:
        return next(iter(family.settings)), []
    seen = {}
    for name, spec in family.settings.items():
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
        raise Failure(f"no setting runs: {', '.join(family.settings)}")
    fastest = min(seen, key=seen.get)
    return fastest, [[name, f"{seen[name]:.0f}" if name in seen else "does not run here"] for name in family.settings]


def check_losses(results):
    """Checks that all sides have equal losses at each iteration, because they train the same model on the same text."""
    losses = {name: [r["loss"] for r in rows] for name, rows in results.items() if name != "model alone"}
    expected = next(iter(losses.values()))
    for name, values in losses.items():
        off = max(abs(a - b) / b for a, b in zip(values, expected))
        if off > SAME_LOSS:
            raise Failure(f"{name} does not train the same: losses differ by {off:.1%}")


# ---- memory -------------------------------------------------------------------------------------------------------


def memory_of(spec, n=8):
    """
    Return: the MiB held between iterations, and the most during an iteration, with the C library's default settings.
    Both are medians of n, because the amount of freed memory that the C library keeps varies by tens of MiB between
    iterations.
    """
    side = Training(spec, heap={})
    try:
        for _ in range(2):
            side.iterate()
        return watched(side, n)
    finally:
        side.stop()


def watched(side, n):
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
    return {BETWEEN: median(between), AT_MOST: median(at_most)}


# ---- results ------------------------------------------------------------------------------------------------------


def of(side):
    return "" if side == ZEROD else f", {side}"


def beside(mine, theirs, results, time_goal):
    return [row(f"torch: time beyond the model{of(mine)}", median(beyond(results, mine)), median(beyond(results, theirs)),
                theirs, "ms", time_goal)]


def memory_beside(mine, theirs, memory, goals):
    rows = []
    for when in (BETWEEN, AT_MOST):
        held, peer = (memory_beyond(memory, name)[when] for name in (mine, theirs))
        ratio = peer / max(held, 1)  # the memory beyond the model may be 0 or negative
        rows.append(row(f"torch: memory beyond the model, {when}{of(mine)}", held, peer, theirs, "MiB", goals.get(when),
                        ratio))
    return rows


def rows_of(name, family, results, memory):
    """Return: the rows of a family. name: the setting of the family that was measured."""
    if name == STAGE_3:
        return beside(STAGE_3, ZEROD, results, STAGE_3_TIME) + memory_beside(
            STAGE_3, ZEROD, memory, dict.fromkeys((BETWEEN, AT_MOST), STAGE_3_MEMORY))
    rows = beside(ZEROD, name, results, family.time) + memory_beside(ZEROD, name, memory, family.memory)
    if family is DEEPSPEED:
        rows += memory_beside(NARROW, name, memory, dict.fromkeys((BETWEEN, AT_MOST), NARROW_MEMORY))
    return rows


def memory_beyond(memory, name):
    return {when: memory[name][when] - memory["model alone"][when] for when in (BETWEEN, AT_MOST)}


def table_of_times(all_results):
    table = [["", "iteration, ms", "beyond the model, ms", "quartiles"]]
    for results in all_results:
        for name in results:
            low, high = quartiles(beyond(results, name))
            table.append([name, f"{median([r['ms'] for r in results[name]]):.0f}",
                          f"{median(beyond(results, name)):.0f}", f"{low:.0f} to {high:.0f}"])
    return table


def table_of_memory(memory):
    return [["MiB", BETWEEN, AT_MOST], *([name, *(f"{held[when]:.0f}" for when in (BETWEEN, AT_MOST))]
                                         for name, held in memory.items())]


def measure_times(family, quick):
    """Return: the name of the family's fastest setting; table lines of the settings tried; results of all sides."""
    sides = {}
    try:
        sides["model alone"] = Training("none")
        name, tried = fastest_of(family, sides["model alone"], 1 if quick else 5)
        sides[name], sides[ZEROD] = Training(family.settings[name]), Training("zerod")
        say(f"  {name}, in turn with zerod")
        results = rounds(sides, 3 if quick else 21)
    finally:
        for side in sides.values():
            side.stop()
    check_losses(results)
    return name, tried, results


def torch(quick):
    """Training of GPT-2's shape, 124 M, 2 ranks, compared with DDP with fused AdamW, DeepSpeed ZeRO-2, FSDP2; stage
    3."""
    if available_bytes() < NEEDED_BYTES:
        raise Failure(f"{NEEDED_BYTES >> 30} GiB of memory are needed, for several sides are alive at the same time")
    forget_broken_builds()
    measured, tried = {}, []  # measured: setting -> (family, results)
    for family in FAMILIES:
        name, lines, results = measure_times(family, quick)
        measured[name] = family, results
        tried += lines
    specs = {"model alone": "none"} | {name: family.settings[name] for name, (family, _) in measured.items()}
    memory = {}
    for name, spec in (specs | {ZEROD: "zerod", NARROW: "zerod:bf16-moments"}).items():
        say(f"  memory of {name}")
        memory[name] = memory_of(spec, 3 if quick else 8)
    rows = [line for name, (family, results) in measured.items() for line in rows_of(name, family, results, memory)]
    cells = {name: (beyond(results, name), memory_beyond(memory, name)) for name, (_, results) in measured.items()}
    cells[ZEROD] = beyond(next(iter(measured.values()))[1], ZEROD), memory_beyond(memory, ZEROD)
    return rows, {
        "each side, peer after peer": table_of_times(results for _, results in measured.values()),
        "memory": table_of_memory(memory),
        "settings of the peers that were tried before": [["", "beyond the model, ms"], *tried],
        "plot": (lambda path: plot(cells, path), "benchmarks-torch.png", "Time and memory beyond the model"),
    }


def plot(cells, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name.replace(", ", ",\n") for name in cells]
    colours = ["tab:blue" if name.startswith(ZEROD) else "tab:gray" for name in cells]
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
