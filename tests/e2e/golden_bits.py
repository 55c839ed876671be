# SPDX-License-Identifier: Apache-2.0
"""
Cases for the golden numbers, and the comparison of result files (tests/programs/golden-case.h) with these numbers.
"""

import functools
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "golden"))

import golden  # noqa: E402

N_STEPS = 20
DTYPES = ("fp32", "bf16", "fp16")
PAIRS = [(g, w) for g in DTYPES for w in DTYPES]

_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
_RATES = [1e-3 * (1 + step % 7) for step in range(N_STEPS)]
OPTIMIZERS = {
    "AdamW": ("AdamW", {**_ADAM, "lr": _RATES}, {"weight_decay": 0, "betas": [0.8, 0.95]}),
    "Adam": ("Adam", {**_ADAM, "adam_w_mode": True}, {"lr": 3e-3, "eps": 1e-6}),
    "Adam-L2": ("Adam", {**_ADAM, "weight_decay": 0.01, "adam_w_mode": False}, {"lr": 3e-3, "weight_decay": 0}),
    "SGD": ("SGD", {"lr": 1e-2, "weight_decay": 0.01}, {"lr": _RATES, "weight_decay": 0}),
    "SGD-momentum": ("SGD", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}, {"momentum": 0}),
    "SGD-nesterov": ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, {"lr": 3e-3, "momentum": 0.5}),
    "Lion": ("Lion", {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1},
             {"weight_decay": 0, "betas": [0.95, 0.98]}),
    "Adagrad": ("Adagrad", {"lr": 1e-2, "eps": 1e-10, "lr_decay": 1e-2, "weight_decay": 0.01}, {"lr_decay": 0.5}),
}

# No element, one element, sizes around a run of 64, sizes around and above the middle bucket size.
SHAPES = [[0, 4], [], [63], [64], [65], [31, 33], [1], [200], [7, 3, 5], [129], [2, 0], [64, 3], [300], [63], [127],
          [1, 1], [513], [17], [40, 25], [64]]


def make_params(rng):
    """Return: parameters in two groups with each pair of dtypes at least twice. Some are frozen."""
    shapes, pairs = rng.sample(SHAPES, len(SHAPES)), rng.sample(PAIRS * 3, len(SHAPES) - 9) + PAIRS
    params = [{"shape": shape, "group": rng.randrange(2), "grad_dtype": g, "weight_dtype": w}
              for shape, (g, w) in zip(shapes, pairs)]
    for shape, dtype in ([70, 2], "fp32"), ([33], "bf16"), ([0], "fp16"):
        params.insert(rng.randrange(len(params)), {"shape": shape, "weight_dtype": dtype, "trainable": False})
    return params


def make_rules(rng, world, params):
    """Rules for gradients that are missing, pushed again, or not finite."""
    some = [i for i, p in enumerate(params) if p.get("trainable", True) and math.prod(p["shape"]) > 60]
    rng.shuffle(some)
    last = world - 1
    return {
        "missing": [{"param": some[0]},
                    {"param": some[1], "step": [0, 1, 5, 9]},
                    {"param": some[2:5], "rank": last, "micro": 0},
                    {"rank": 0, "step": 4, "micro": 1},
                    {"param": some[5], "rank": list(range(0, world, 2)), "step": list(range(2, 19, 3))}],
        "passes": [{"param": some[2:6] + some[-2:], "times": 2},
                   {"param": some[6], "rank": last, "step": [1, 8], "times": 3}],
        "nonfinite": [[6, last, 0, some[7], 59, "inf"], [13, 0, 1, some[8], 1, "nan"]],
    }


def make_case(world, optimizer="AdamW", **changes):
    """Return: a case of 20 steps with all features. The model and the rules depend only on the world size."""
    kind, params, group = OPTIMIZERS[optimizer]
    rng = random.Random(world)
    case = {
        "world_size": world, "seed": 7000 + world, "steps": N_STEPS,
        "optimizer": {"type": kind, "params": params}, "groups": [{}, group],
        "micro_batches": [1 + step % 3 for step in range(N_STEPS)],
        "max_norm": [(1.0, 0, 0.25, 1e6)[step % 4] for step in range(N_STEPS)],
        "loss_scale": [2.0 ** (step % 5) for step in range(N_STEPS)],
        "op": "mean" if world % 3 else "sum",
    }
    case["params"] = make_params(rng)
    case |= make_rules(rng, world, case["params"])
    return case | changes


# ---- the golden numbers --------------------------------------------------------------------------------


_SUMS = {}
_SUM_WORDS = ("world_size", "seed", "micro_batches", "missing", "passes", "nonfinite", "params", "wire")


@functools.lru_cache(maxsize=2)
def _golden_run(text):
    case = json.loads(text)
    kept = _SUMS.setdefault(json.dumps([case.get(word) for word in _SUM_WORDS]), {})
    compute = golden.accumulate

    def accumulate(case, step, param):
        if (step, param) not in kept:
            acc = kept[step, param] = compute(case, step, param)
            if acc is not None:
                acc.flags.writeable = False
        return kept[step, param]

    with mock.patch.object(golden, "accumulate", accumulate):
        return golden.run(case)


def golden_run(case):
    """golden.run(). Keeps the accumulators, which no optimizer changes, for the next case with the same gradients."""
    return _golden_run(json.dumps(case))


@functools.cache
def list_isas(driver):
    """Return: the instruction sets of this machine, the narrowest first."""
    return subprocess.run([driver, "--isas"], check=True, capture_output=True, text=True).stdout.split()


# ---- result files --------------------------------------------------------------------------------------


def read_results(path):
    """Return: the named arrays of a result file, as bytes."""
    results = {}
    with open(path, "rb") as f:
        while line := f.readline():
            name, n_bytes = line.split()
            data = f.read(int(n_bytes))
            assert len(data) == int(n_bytes), f"{path} ends within {name}"
            assert name.decode() not in results, f"{path} has two {name}"
            results[name.decode()] = data
    return results


def _differ(name, got, want):
    """Return: a text that names the elements that differ."""
    size = want.dtype.itemsize
    got = np.frombuffer(got, dtype=f"u{size}")
    want = want.reshape(-1).view(f"u{size}")
    if got.shape != want.shape:
        return f"{name} has {got.size} elements instead of {want.size}"
    where = np.flatnonzero(got != want)
    return f"{name} differs in {where.size} of {want.size} elements, first in element {where[0]}: " \
           f"{got[where[0]]:#x} instead of {want[where[0]]:#x}"


def differences(results, wanted):
    """Yields a text for each array of wanted (name to array) that is missing or differs in a bit."""
    for name, want in wanted.items():
        if name not in results:
            yield f"{name} is missing"
        elif results[name] != want.tobytes():
            yield _differ(name, results[name], want)


def wanted_state(case, last, weights=("weights",)):
    """Return: golden.py's state after the step, by the names of a result file."""
    wanted = {}
    for i, param in enumerate(case["params"]):
        for name in weights:
            wanted[f"{name}.{i}"] = last["weights"][i]
        for name in ("master", "exp_avg", "exp_avg_sq") if param.get("trainable", True) else ():
            if last[name][i] is not None:
                wanted[f"{name}.{i}"] = last[name][i]
    return wanted


def check_norms(results, steps):
    """Checks the norm of every applied step. The norm of a step that is not applied must only be not finite."""
    for i, step in enumerate(steps):
        norm = np.frombuffer(results[f"norm.{i}"])
        if step["applied"]:
            assert norm.tobytes() == np.float64(step["norm"]).tobytes(), \
                f"norm of step {i}: {norm[0]!r} instead of {step['norm']!r}"
        else:
            assert not np.isfinite(norm[0]), f"norm of step {i}: {norm[0]!r} of gradients that are not finite"
