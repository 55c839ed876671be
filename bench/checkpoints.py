# SPDX-License-Identifier: Apache-2.0
"""The cost of a checkpoint for the steps, and how fast a checkpoint is written and read."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from harness import MI, Failure, ZerodJob, median, row, say

ELEMS = 64 * MI
STEPS = 20  # steps of a block; a checkpoint may begin with the first step of a block
TORCH = """
import json, os, sys, time
import torch
import torch.distributed.checkpoint as dcp
folder, elems, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
tensors = {f"{kind}.{i}": torch.rand(elems // n) for kind in ("p", "exp_avg", "exp_avg_sq") for i in range(n)}

def synced(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

def timed(f):
    began = time.monotonic()
    f()
    return time.monotonic() - began

def save():
    torch.save(tensors, f"{folder}/torch")
    synced(f"{folder}/torch")

def dcp_save():
    dcp.async_save(tensors, checkpoint_id=f"{folder}/dcp").result()
    for name in os.listdir(f"{folder}/dcp"):
        synced(f"{folder}/dcp/{name}")

for line in sys.stdin:
    what = {"save": save, "load": lambda: torch.load(f"{folder}/torch"), "dcp": dcp_save}[line.strip()]
    print(json.dumps(timed(what)), flush=True)
"""


class Saver(ZerodJob):
    """A job that has a folder for checkpoints."""

    def __init__(self, folder, load="never", world=2, **more):
        self.dir = pathlib.Path(folder) / "checkpoints"
        config = f"checkpoint: {{dir: {self.dir}, load: {load}, save_total_limit: 1}}\n"
        super().__init__(world, 2, ELEMS, extra=config, **more)

    def begin_save(self):
        self.daemon.ctl("checkpoint", "save", "--no-wait")

    def wait_until_saved(self):
        while (said := self.status()["checkpoint"])["saving"] or said["wanted"]:
            time.sleep(0.01)
        if self.status()["checkpoint"]["why"]:
            raise Failure(self.status()["checkpoint"]["why"])

    def last(self):
        return self.status()["checkpoint"]["last"]

    def log(self):
        return pathlib.Path(self.daemon.folder, "log").read_text()


def block(job, saves):
    """Makes a block of steps. saves: a checkpoint begins before the first step and is complete on return. Return: the
    times."""
    if saves:
        job.begin_save()
    times = [job.step()["total"] for _ in range(STEPS)]
    if saves:
        job.wait_until_saved()
    return times


def steps(job, quick):
    """Measures blocks with a checkpoint and blocks without a checkpoint, in turn."""
    block(job, True)
    times = {True: [], False: []}
    waited = []
    for _ in range(2 if quick else 6):
        for saves in times:
            times[saves].append(block(job, saves))
        waited.append(job.last()["waited_ns"] / 1e6)
    update = job.status()["time"]["update"]["last_ns"] / 1e6
    all_of = {saves: [t for b in blocks for t in b] for saves, blocks in times.items()}
    longest = {saves: median([max(b) for b in blocks]) for saves, blocks in times.items()}
    say(f"  updates waited for the disk in a checkpoint: {median(waited):.0f} ms; an update takes {update:.0f} ms")
    return [row("checkpoints: median step, one save in 20 steps", median(all_of[True]), median(all_of[False]), "no save",
                "ms", 1 / 1.05),
            row("checkpoints: longest of 20 steps", longest[True], longest[False] + update,
                "no save, and an update more", "ms", 1.0)]


def write_plainly(folder, n_bytes):
    """Return: the seconds that dd needs to write n_bytes."""
    path, n = folder / "plain", -(-n_bytes // (8 << 20))
    path.unlink(missing_ok=True)  # the time of zerod, too, ends before the old files are removed
    began = time.monotonic()
    subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=8M", f"count={n}", "conv=fsync", "oflag=direct"],
                   check=True, capture_output=True)
    return (time.monotonic() - began) * n_bytes / (n * (8 << 20))


def forget_pages(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(folder):
    """Return: the seconds that dd needs to read all files when no file is in the page cache."""
    forget_pages(folder)
    began = time.monotonic()
    for path in folder.rglob("*.safetensors"):
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=8M", "iflag=direct"], check=True, capture_output=True)
    return time.monotonic() - began


def loaded_in(folder, world):
    """Return: the seconds that a daemon needs to load the newest checkpoint for `world` ranks."""
    forget_pages(folder)
    job = Saver(folder, "latest", world)
    try:
        return float(re.search(r"loaded .* in ([0-9.]+) s", job.log())[1])
    finally:
        job.stop()


@contextlib.contextmanager
def torch_side(folder):
    with subprocess.Popen([sys.executable, "-c", TORCH, str(folder), str(ELEMS), "64"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        def ask(what):
            process.stdin.write(f"{what}\n")
            process.stdin.flush()
            return float(process.stdout.readline())

        yield ask
        process.stdin.close()


def writing(job, folder, quick):
    """Measures how fast a checkpoint is written. Call it when the job is idle."""
    times = {"zerod": [], "dd": [], "save": [], "dcp": []}
    with torch_side(folder) as ask:
        for _ in range(2 if quick else 5):
            job.step()
            job.begin_save()
            job.wait_until_saved()
            times["zerod"].append(job.last()["ns"] / 1e9)
            times["dd"].append(write_plainly(folder, job.last()["bytes"]))
            times["save"].append(ask("save"))
            times["dcp"].append(ask("dcp"))
        loads = []
        for _ in range(2 if quick else 5):
            forget_pages(folder)
            loads.append(ask("load"))
    zerod, dd, save, dcp = (median(times[name]) for name in times)
    say(f"  written at {job.last()['bytes'] / zerod / 1e6:.0f} MB/s, dd at {job.last()['bytes'] / dd / 1e6:.0f} MB/s")
    return median(loads), [
        row("checkpoints: written, 64 Mi, AdamW", zerod * 1e3, dd * 1e3, "dd oflag=direct", "ms", 0.9),
        row("checkpoints: written, 64 Mi, AdamW", zerod * 1e3, save * 1e3, "torch.save, fsync", "ms", 1.5),
        row("checkpoints: written, 64 Mi, AdamW", zerod * 1e3, dcp * 1e3, "DCP async_save to its end, fsync", "ms",
            1.5)]


def reading(folder, torch_load, quick):
    n = 2 if quick else 5
    times = {2: [], 1: [], 4: [], "dd": []}
    for _ in range(n):
        times["dd"].append(read_plainly(folder / "checkpoints"))
        for world in (2, 1, 4):
            times[world].append(loaded_in(folder, world))
    zerod, one, four, dd = (median(times[k]) for k in (2, 1, 4, "dd"))
    return [row("checkpoints: loaded, 64 Mi, AdamW", zerod * 1e3, dd * 1e3, "dd iflag=direct", "ms", 0.9),
            row("checkpoints: loaded, 64 Mi, AdamW", zerod * 1e3, torch_load * 1e3, "torch.load", "ms", 2.0),
            row("checkpoints: loaded, 2 ranks to 1", one * 1e3, zerod * 1e3, "2 ranks to 2", "ms", 1 / 1.2),
            row("checkpoints: loaded, 2 ranks to 4", four * 1e3, zerod * 1e3, "2 ranks to 2", "ms", 1 / 1.2)]


def checkpoints(quick):
    """The cost of a checkpoint for the steps, and how fast a checkpoint is written and read."""
    with tempfile.TemporaryDirectory(prefix="zerod-bench-") as name:
        folder = pathlib.Path(name)
        with contextlib.closing(Saver(folder)) as job:
            rows = steps(job, quick)
            torch_load, more = writing(job, folder, quick)
        return rows + more + reading(folder, torch_load, quick), {}
