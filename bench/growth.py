# SPDX-License-Identifier: Apache-2.0
"""Compares memory with the plan, and measures how cost grows with the work."""

import json
import pathlib
import subprocess

from harness import MI, Failure, ZerodJob, allowance, available_bytes, median, program, row, say
from traffic import step_bytes

MEMORY_PARAMS = 24
MEMORY_ELEMS = MEMORY_PARAMS * 2000000  # parameters of a bucket's size, which the plan assumes
MEMORY_SHARE, MEMORY_BYTES = 0.02, 16 * MI
# The memfds of each class of memory. "fixed" is the heap. A job on one node has no "staging".
SEGMENTS = {"state": ["state"], "gradient": ["gradient"], "ring": ["ring"], "overflow": ["overflow"],
            "weights": ["weights"], "pool": ["pool"]}
GROWTH_GOAL = 1 / 1.15  # at most 15 % longer than the bytes predict


def plan(elems, world, stage, config=None):
    command = [program("zerodctl"), "plan", "--params", str(elems), "--ranks", str(world), "--stage", str(stage),
               "--json"]
    run = subprocess.run(command + (["--config", config] if config else []), capture_output=True, text=True, timeout=60)
    if run.returncode != 0:
        raise Failure(f"zerodctl plan: {run.stderr.strip()}")
    return json.loads(run.stdout)


def memfd_bytes(pid):
    """Return: the bytes allocated for the memfds of a process, by the first part of a memfd's name."""
    held, seen = {}, set()
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            target, stat = fd.readlink(), fd.stat()
        except FileNotFoundError:  # closed after the folder was read
            continue
        if not str(target).startswith("/memfd:zerod."):
            continue
        if stat.st_ino in seen:
            continue
        seen.add(stat.st_ino)
        name = str(target).removeprefix("/memfd:zerod.").split(" ")[0].split(".")[0]
        held[name] = held.get(name, 0) + stat.st_blocks * 512
    return held


def heap_bytes(pid):
    for line in open(f"/proc/{pid}/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def memory_of(world, stage):
    job = ZerodJob(world, stage, MEMORY_ELEMS, MEMORY_PARAMS, gather=stage == 3)
    try:
        for _ in range(3):
            job.step()
        status = job.status()
        memfds, heap = memfd_bytes(status["pid"]), heap_bytes(status["pid"])
        planned = plan(MEMORY_ELEMS, world, stage, job.daemon.config)["bytes_by_class"]
    finally:
        job.stop()
    rows = []
    for name, expected in planned.items():
        if name not in status["memory"] or name == "total":
            continue
        said = status["memory"][name]["held_bytes"]
        held = sum(memfds.get(s, 0) for s in SEGMENTS[name]) if name in SEGMENTS else said
        if name == "fixed":
            held = heap
        if name == "overflow":  # the plan is an upper bound; only granted parts are held
            off = max(0, held - expected, abs(held - said))
        else:
            off = max(abs(held - expected), abs(said - expected))
        rows.append(allowance(f"memory: stage {stage}, {world} ranks, {name}", "MiB",
                              *(n / MI for n in (expected, held, off, max(MEMORY_BYTES, MEMORY_SHARE * expected)))))
    return rows


def memory(quick):
    """Memory held in each class, and the daemon's own figures, compared with the plan: within 2 % or 16 MiB."""
    return [line for stage in (1, 2, 3) for world in (2, 4) for line in memory_of(world, stage)], {}


# ---- growth -------------------------------------------------------------------------------------------------------


def cell(elems, params, world, n):
    """Measures one point: the ms of a step, and the bytes held by the daemon. Return: None if the memory does not
    suffice."""
    buffer_elems = min(elems, 32 * MI)
    needed = plan(elems, world, 2)["needed_bytes"] + world * buffer_elems * 4
    if needed * 1.1 > available_bytes():
        return None
    job = ZerodJob(world, 2, elems, params, buffer_elems, extra="limits: {memory: 1TiB}\n")
    try:
        for _ in range(2):
            job.step()
        steps = [job.step() for _ in range(n)]
        held = job.status()["memory"]
    finally:
        job.stop()
    return {"elems": elems, "params": params, "ranks": world, "ms": median([s["total"] for s in steps]),
            "tail_ms": median([s["tail"] for s in steps]),
            "bytes": sum(v["held_bytes"] for k, v in held.items() if k != "total")}


def against_bytes(label, cells):
    """Return: rows that compare each point's time with the time for its bytes at the speed of the middle point."""
    if not cells:
        return []
    middle = cells[len(cells) // 2]

    def n_bytes(c):
        return step_bytes(c["elems"], c["ranks"])

    return [row(f"scaling: {label(c)}", c["ms"], middle["ms"] * n_bytes(c) / n_bytes(middle),
                f"its bytes at the speed of {label(middle)}", "ms", GROWTH_GOAL) for c in cells if c is not middle]


def scaling(quick):
    """Time per step against its bytes, and memory, for growing models, numbers of tensors, and numbers of ranks."""
    sizes = [1, 4, 16, 64] if quick else [1, 4, 16, 64, 256, 512]
    n = 3 if quick else 7
    by_size, by_params, by_ranks = [], [], []
    for size in sizes:
        say(f"  {size} Mi parameters")
        one = cell(size * MI, 64, 2, n)
        if not one:
            say("  that is as far as this machine's memory goes")
            break
        by_size.append(one)
    for params in (10, 100, 1000, 10000):
        say(f"  {params} tensors")
        by_params.append(cell(64 * MI, params, 2, n))
    for world in (1, 2, 4, 8, 16):
        say(f"  {world} ranks")
        by_ranks.append(cell(16 * MI, 64, world, n))
    by_params, by_ranks = ([c for c in cells if c] for cells in (by_params, by_ranks))
    rows = against_bytes(lambda c: f"{c['elems'] // MI} Mi parameters", by_size)
    rows += against_bytes(lambda c: f"{c['params']} tensors", by_params)
    rows += against_bytes(lambda c: f"{c['ranks']} ranks", by_ranks)
    table = [["parameters", "tensors", "ranks", "step, ms", "after the last push, ms", "daemon holds, MiB"]]
    table += [[f"{c['elems'] / MI:.0f} Mi", str(c["params"]), str(c["ranks"]), f"{c['ms']:.1f}", f"{c['tail_ms']:.1f}",
               f"{c['bytes'] / MI:.0f}"] for c in by_size + by_params + by_ranks]
    cells = [by_size, by_params, by_ranks]
    return rows, {"growth": table, "plot": (lambda path: plot(cells, path), "benchmarks-scaling.png",
                                            "Time and memory as the work grows")}


def plot(cells, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_size, by_params, by_ranks = cells
    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.6), constrained_layout=True)
    panels = [
        (axes[0], by_size, "elems", "ms", "parameters, 2 ranks", "ms per step"),
        (axes[1], by_size, "elems", "bytes", "parameters, 2 ranks", "bytes held by the daemon"),
        (axes[2], by_params, "params", "ms", "tensors, 64 Mi parameters, 2 ranks", "ms per step"),
        (axes[3], by_ranks, "ranks", "ms", "ranks, 16 Mi parameters", "ms per step"),
    ]
    for ax, points, x, y, x_label, y_label in panels:
        ax.plot([p[x] for p in points], [p[y] for p in points], marker="o")
        if y == "ms":
            ax.plot([p[x] for p in points], [p["tail_ms"] for p in points], marker=".", linestyle="--")
            ax.legend(["whole step", "after the last push"], fontsize=8)
        ax.set(xscale="log", xlabel=x_label, ylabel=y_label)
        if x == "ranks":
            ax.set_xscale("log", base=2)
            ax.set_xticks([p[x] for p in points], [str(p[x]) for p in points])
        if x == "elems":
            ax.set_yscale("log")
        else:
            ax.set_ylim(bottom=0)
        ax.grid(True, alpha=0.3)
    figure.savefig(path, dpi=100)
