# SPDX-License-Identifier: Apache-2.0
"""Measures narrow moments and gradients: the speed of steps compared with fp32, and the losses of trainings."""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from harness import ADAMW, ROOT, Failure, ZerodJob, in_both_orders, median, program, row, say
from training import rank_environment

# kind -> (parameters of the optimizer, further configuration)
FP32, EIGHT, EIGHT_24 = "fp32 moments", "8-bit moments", "8-bit moments, 24-bit masters"
KINDS = {FP32: ("", ""), "bf16 moments": ("", "bf16: {bf16_optimizer_states: true}\n"),
         "bf16 moments, stochastic": ("", "bf16: {bf16_optimizer_states: true, stochastic_rounding: true}\n"),
         EIGHT: (", optim_bits: 8", "")}
KINDS_OF_BF16 = KINDS | {EIGHT_24: (", optim_bits: 8, master_weight_bits: 24", "")}
MODELS = {"fp32 model": ("", KINDS), "bf16 model": ("--bf16", KINDS_OF_BF16)}
TRAINED_IN_BF16 = (FP32, EIGHT, EIGHT_24)
GOAL = 1.2  # for whole steps of a bf16 model, except with 8-bit moments, which only save memory

SEEDS = range(1, 6)
N_STEPS, N_LAST = 500, 100  # steps of a training; the last steps, whose mean loss is compared
BETAS = (0.9, 0.999)  # a larger second beta makes smaller changes, which rounding may lose


def step(job):
    return job.step() | {"state": job.status()["memory"]["state"]["held_bytes"]}


def steps(quick):
    """Measures steps of 64 Mi parameters on 2 ranks, all kinds in turn. Return: rows, and a table of memory."""
    rows, table = [], [["state of 64 Mi parameters, MiB", *KINDS_OF_BF16]]
    for model, (types, kinds) in MODELS.items():
        make = {kind: (lambda params=params, extra=extra: ZerodJob(
                    2, extra=extra, types=types, optimizer=ADAMW.replace("}}", params + "}}")))
                for kind, (params, extra) in kinds.items()}
        results = in_both_orders(make, step, 5 if quick else 15)
        states = [found[0]["state"] for found in results.values()]
        table.append([model, *(f"{n_bytes / 2**20:.0f}" for n_bytes in states), *[""] * (len(KINDS_OF_BF16) - len(kinds))])
        for part, name in (("total", "whole"), ("tail", "after the last push")):
            times = {kind: median([r[part] for r in found]) for kind, found in results.items()}
            for kind in list(kinds)[1:]:
                rows.append(row(f"narrow state: {name}, {model}, {kind}", times[kind], times[FP32], FP32, "ms",
                                GOAL if part == "total" and types and "8-bit" not in kind else None))
    return rows, table


def gradients(quick):
    """Compares steps of an fp32 model whose ranks push bf16 gradients with steps whose ranks push fp32 gradients."""
    make = {"wide": lambda: ZerodJob(2), "narrow": lambda: ZerodJob(2, types="--bf16-gradients")}
    results = in_both_orders(make, lambda job: job.step(), 5 if quick else 15)
    wide, narrow = (median([r["total"] for r in found]) for found in results.values())
    return [row("narrow state: whole, fp32 model, bf16 gradients", narrow, wide, "fp32 gradients", "ms", None)]


def train(kind, trainer):
    """Runs the trainer under zerodrun, with a daemon of that kind."""
    params, extra = KINDS_OF_BF16[kind]
    config = (f"job: curve\nlisten: {{socket: SOCKET}}\nworld: {{size: 1}}\ngradient_clipping: 1.0\n"
              f"optimizer: {{type: AdamW, params: {{lr: 1.0e-3, betas: {list(BETAS)}{params}}}}}\n{extra}")
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "zerod.yaml").write_text(config.replace("SOCKET", f"{folder}/s"))
        run = subprocess.run([program("zerodrun"), "-n", "1", "--zerod", program("zerod"), "--config",
                              f"{folder}/zerod.yaml", "--", *trainer], capture_output=True, text=True,
                             env=rank_environment())
    if run.returncode != 0:
        raise Failure(f"the training ended with {run.returncode}: {run.stderr[-2000:]}")


def losses(kind, seed):
    """Return: the loss of each step of the example on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        train(kind, [program("zerod-example"), "--steps", str(N_STEPS), "--seed", str(seed), "--beta2", str(BETAS[1]),
                     "--report", str(report)])
        return [e["loss"] for e in map(json.loads, report.read_text().splitlines()) if e["event"] == "step"]


def losses_in_bf16(kind, seed):
    """Return: the loss of each step of a bf16 model on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "losses.json"
        train(kind, [sys.executable, str(ROOT / "bench" / "narrow_rank.py"), str(seed), str(N_STEPS), str(report)])
        return json.loads(report.read_text())


def smooth(values, n=25):
    return [statistics.fmean(values[max(0, i - n + 1):i + 1]) for i in range(len(values))]


def draw(curves, path):
    """Draws the losses. curves: kind -> a list of losses per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.4), constrained_layout=True)
    means = {kind: smooth([statistics.fmean(at) for at in zip(*found)]) for kind, found in curves.items()}
    for kind in curves:
        left.plot(means[kind], label=kind, **({"color": "0.7", "linewidth": 5} if kind == FP32 else {"linewidth": 1.5}))
        if kind != FP32:
            right.plot([a - b for a, b in zip(means[kind], means[FP32])], label=kind, linewidth=1.5,
                       color=left.lines[-1].get_color())
    noise = [statistics.stdev(at) / len(SEEDS) ** 0.5 for at in zip(*(smooth(found) for found in curves[FP32]))]
    right.fill_between(range(len(noise)), [-n for n in noise], noise, color="0.85",
                       label="standard error of fp32's mean")
    left.set(xlabel="step", ylabel="loss, mean of 5 seeds")
    right.set(xlabel="step", ylabel="loss beyond fp32's")
    for axes in (left, right):
        axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def trainings(quick, kinds, losses):
    """Return: a table of the last losses, and a function that draws the plot to a path."""
    curves = {kind: [losses(kind, seed) for seed in (SEEDS[:2] if quick else SEEDS)] for kind in kinds}
    last = {kind: [statistics.fmean(found[-N_LAST:]) for found in seeds] for kind, seeds in curves.items()}
    table = [[f"loss of the last {N_LAST} of {N_STEPS} steps", *(f"seed {seed}" for seed in SEEDS[:len(last[FP32])]),
              "mean", "off fp32's, mean", "standard error of that"]]
    for kind, found in last.items():
        off = [a - b for a, b in zip(found, last[FP32])]
        table.append([kind, *(f"{loss:.4f}" for loss in found), f"{statistics.fmean(found):.4f}",
                      f"{statistics.fmean(off):+.4f}", f"{statistics.stdev(off) / len(off) ** 0.5:.4f}"])
        say(f"  {kind}: {table[-1][-3]}, off fp32's by {table[-1][-2]}, standard error {table[-1][-1]}")
    return table, lambda path: draw(curves, path)


def narrow_state(quick):
    """Steps with narrow moments or bf16 gradients compared with fp32, and the losses of trainings."""
    rows, memory = steps(quick)
    table, plot = trainings(quick, KINDS, losses)
    bf16_table, _ = trainings(quick, TRAINED_IN_BF16, losses_in_bf16)
    return rows + gradients(quick), {"memory of the state": memory, "losses": table, "losses of a bf16 model": bf16_table,
                  "plot": (plot, "narrow-moments-loss.png", "Losses with narrow moments beside fp32 ones")}
