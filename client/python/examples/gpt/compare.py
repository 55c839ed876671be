# SPDX-License-Identifier: Apache-2.0
"""
Trains the GPT of train.py four times, two ranks each, same weights, same batches: with DistributedDataParallel and
AdamW, and with zerod in stages 1, 2 and 3. Draws the losses over each other and the memory side by side, and checks
that the losses agree. Needs matplotlib in addition to torch and zerod.

    compare.py --out FOLDER                 everything, then the plots
    compare.py --out FOLDER stage2          only this one again; what FOLDER holds of the others is used
    compare.py --out FOLDER none            only the plots and the checks

Exit status: 0 when every check holds, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
WORLD = 2
LR = "1e-3"
RUNS = {"ddp": "DDP + AdamW", "stage1": "zerod, stage 1", "stage2": "zerod, stage 2", "stage3": "zerod, stage 3"}
STAGES = [run for run in RUNS if run != "ddp"]
PARTS = {"rank 0": "tab:blue", "rank 1": "tab:cyan", "daemon": "tab:orange"}
LAST, MEAN_LIMIT, STEP_LIMIT = 100, 0.005, 0.02  # of the loss, relative
MB = 1e6


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="*", help=f"which to run: {', '.join(RUNS)} (all)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of reports and weights")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="of the two plots (as --out)")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="(%(default)s)")
    parser.add_argument("--build", type=Path, default=ROOT / "build", metavar="FOLDER", help="of zerod (%(default)s)")
    args = parser.parse_args()
    for run in args.run:
        if run not in [*RUNS, "none"]:
            parser.error(f"there is no run {run}")
    args.run = args.run or list(RUNS)
    args.plots = args.plots or args.out
    return args


def configuration(folder: Path, stage: int) -> Path:
    """Hyperparameters come with train.py's steps; the daemon needs the stage and the number of ranks."""
    path = folder / "zerod.yaml"
    path.write_text(
        json.dumps(
            {
                "job": f"gpt-stage{stage}",
                "listen": {"socket": str(folder / "zerod.sock"), "mode": "0600"},
                "world": {"size": WORLD},
                # A bucket has a twentieth of the model, because the buckets in work take memory too.
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 500000},
                "optimizer": {"type": "AdamW", "params": {}},
            },
            indent=2,
        ),
        encoding="utf-8",
    )  # YAML knows JSON
    return path


def command(args: argparse.Namespace, run: str, folder: Path) -> list[str]:
    if run == "ddp":
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)]
    else:
        config = configuration(folder, int(run.removeprefix("stage")))
        start = [
            str(args.build / "client/run/zerodrun"),
            "--zerod",
            str(args.build / "daemon/zerod"),
            "-n",
            str(WORLD),
            "--config",
            str(config),
            "--",
            sys.executable,
        ]
    return [
        *start,
        str(HERE / "train.py"),
        "--steps",
        str(args.steps),
        "--lr",
        LR,
        "--log-every",
        "20",
        "--out",
        str(folder),
        *(["--ddp"] if run == "ddp" else []),
    ]


# ---- what the processes hold ---------------------------------------------------------------------------------------


def events(report: Path, name: str) -> list[dict]:
    with report.open(encoding="utf-8") as lines:
        # A rank may be writing the last line now.
        return [
            event
            for event in map(json.loads, (line for line in lines if line.endswith("\n")))
            if event["event"] == name
        ]


def pss_bytes(pid: int) -> int:
    """
    Proportional set size: pages that several processes map count for each of them in part. Pages of files are not
    counted: programs and libraries are equal in all runs, and shared with other processes that run torch.
    """
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    return 1024 * sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+)", rollup, re.MULTILINE)))


class Memory:
    """Measures the ranks and the daemon while they train, and keeps the values of the largest sum."""

    def __init__(self, args: argparse.Namespace, run: str, folder: Path) -> None:
        self.folder, self.pids, self.most = folder, {}, {}
        self.socket = None if run == "ddp" else folder / "zerod.sock"
        self.zerodctl = args.build / "client/ctl/zerodctl"

    def find(self) -> bool:
        """Returns True if all processes are known and train."""
        reports = [self.folder / f"rank{rank}.json" for rank in range(WORLD)]
        if not all(report.exists() and events(report, "step") for report in reports):
            return False
        self.pids = {f"rank {rank}": events(report, "start")[0]["pid"] for rank, report in enumerate(reports)}
        if self.socket:
            status = subprocess.run(
                [self.zerodctl, "--socket", self.socket, "--json", "status"], capture_output=True, text=True, check=True
            )
            self.pids["daemon"] = json.loads(status.stdout)["pid"]
        return True

    def look(self) -> None:
        if not self.pids and not self.find():
            return
        try:
            held = {name: pss_bytes(pid) for name, pid in self.pids.items()}
        except (FileNotFoundError, ProcessLookupError):
            return  # they have ended
        if sum(held.values()) > sum(self.most.values()):
            self.most = held


def train(args: argparse.Namespace, run: str) -> None:
    folder = args.out / run
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"== {RUNS[run]}", flush=True)
    memory, began = Memory(args, run, folder), time.monotonic()
    process = subprocess.Popen(command(args, run, folder), env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while process.poll() is None:
            memory.look()
            time.sleep(0.5)
    finally:
        process.terminate()
        process.wait()
    if process.returncode != 0:
        raise SystemExit(f"{RUNS[run]}: exit status {process.returncode}")
    if not memory.most:
        raise SystemExit(f"{RUNS[run]}: nobody saw its memory")
    result = {"memory": memory.most, "seconds": time.monotonic() - began}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


# ---- what came out -------------------------------------------------------------------------------------------------


def losses(args: argparse.Namespace, run: str) -> list[float]:
    """The mean over the ranks, by step."""
    steps = [events(args.out / run / f"rank{rank}.json", "step") for rank in range(WORLD)]
    if any([s["step"] for s in rank] != list(range(args.steps)) for rank in steps):
        raise SystemExit(f"{args.out / run}: not the steps 0 to {args.steps - 1}")
    return [sum(s["loss"] for s in at) / WORLD for at in zip(*steps, strict=True)]


def differences(ours: list[float], ddp: list[float]) -> list[float]:
    return [(o - d) / d for o, d in zip(ours, ddp, strict=True)]


def check(curves: dict[str, list[float]], args: argparse.Namespace) -> bool:
    holds = True

    def say(sentence: str, ok: bool) -> None:
        nonlocal holds
        holds = holds and ok
        print(f"{'ok' if ok else 'FAILED':<8}{sentence}")

    for run in STAGES:
        off = [abs(d) for d in differences(curves[run], curves["ddp"])]
        mean = sum(off[-LAST:]) / LAST
        say(
            f"{RUNS[run]}: the loss is {100 * mean:.4f} % off DDP's in the mean of the last {LAST} steps (limit "
            f"{100 * MEAN_LIMIT} %), {100 * max(off):.4f} % at the worst step (limit {100 * STEP_LIMIT} %)",
            mean < MEAN_LIMIT and max(off) < STEP_LIMIT,
        )
    weights = {(args.out / run / f"rank{rank}.weights").read_bytes() for run in STAGES for rank in range(WORLD)}
    say("the stages' losses are the same, bit for bit", all(curves[run] == curves["stage1"] for run in STAGES))
    say("so are the final weights of all ranks in all stages", len(weights) == 1)
    return holds


def plot_loss(curves: dict[str, list[float]], path: Path) -> None:
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1))
    styles = {
        "ddp": ("black", 3.0, "-"),
        "stage1": ("tab:orange", 2.0, "-"),
        "stage2": ("tab:blue", 1.4, "--"),
        "stage3": ("tab:green", 1.4, ":"),
    }
    for run, name in RUNS.items():
        color, width, line = styles[run]
        above.plot(curves[run], color=color, linewidth=width, linestyle=line, label=name)
        if run != "ddp":
            below.plot(
                [100 * d for d in differences(curves[run], curves["ddp"])], color=color, linewidth=width, linestyle=line
            )
    above.set_ylabel("loss, mean of the ranks")
    above.legend()
    below.set_ylabel("off DDP's (%)")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def plot_memory(held: dict[str, dict[str, int]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    base = dict.fromkeys(RUNS, 0.0)
    for part, color in PARTS.items():
        heights = [held[run].get(part, 0) / MB for run in RUNS]
        bars = axes.bar(list(RUNS.values()), heights, bottom=list(base.values()), color=color, label=part, width=0.6)
        axes.bar_label(bars, [f"{h:.0f}" if h else "" for h in heights], label_type="center")
        base = {run: base[run] + h for run, h in zip(RUNS, heights, strict=True)}
    axes.set_ylabel("proportional set size without files, MB")
    axes.set_ylim(top=1.15 * max(base.values()))
    axes.legend(loc="upper center", ncols=len(PARTS))
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> int:
    args = arguments()
    for run in args.run:
        if run != "none":
            train(args, run)
    if missing := [run for run in RUNS if not (args.out / run / "result.json").exists()]:
        raise SystemExit(f"{args.out} has no {', '.join(missing)} to compare with")
    curves = {run: losses(args, run) for run in RUNS}
    results = {run: json.loads((args.out / run / "result.json").read_text(encoding="utf-8")) for run in RUNS}
    print(f"\n{'MB at the most':<20}" + "".join(f"{name:>10}" for name in (*PARTS, "sum", "steps/s", "last loss")))
    for run, name in RUNS.items():
        held = results[run]["memory"]
        cells = [held.get(part, 0) / MB for part in PARTS]
        steps = events(args.out / run / "rank0.json", "step")
        pace = (len(steps) - 1) / (steps[-1]["seconds"] - steps[0]["seconds"])
        print(
            f"{name:<20}"
            + "".join(f"{c:>10.1f}" for c in [*cells, sum(cells)])
            + f"{pace:>10.2f}{sum(curves[run][-20:]) / 20:>10.4f}"
        )
    args.plots.mkdir(parents=True, exist_ok=True)
    plot_loss(curves, args.plots / "gpt-loss.png")
    plot_memory({run: result["memory"] for run, result in results.items()}, args.plots / "gpt-memory.png")
    return 0 if check(curves, args) else 1


if __name__ == "__main__":
    sys.exit(main())
