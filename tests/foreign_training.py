# SPDX-License-Identifier: Apache-2.0
"""
A small program that trains with zerod by any configuration file (foreign_files.py), and the same training with torch
alone. As a program, python foreign_training.py SETTINGS FOLDER runs one rank, which writes its results to the folder.
"""

import json
import math
import os
import sys
from pathlib import Path

import torch

RANKS, STEPS, MICRO_BATCHES = 2, 7, 2
LIMIT = 2e-6
# The program's values for settings that the file leaves open ("auto" or missing).
PROGRAM = {"lr": 0.03, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.02}
CLIP = 0.2
KINDS = {"adamw": torch.optim.AdamW, "adam": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}


def make_model():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def loss_of(model, rank, step, micro_batch):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    x = torch.randn(4, 6, generator=generator)
    return (model(x) - x[:, :3].sin()).square().mean() / MICRO_BATCHES


def micro_batches(settings):
    n = settings.get("gradient_accumulation_steps", "auto")
    return MICRO_BATCHES if n == "auto" else n


def leaves_open(settings, key):
    return settings.get("optimizer", {}).get("params", {}).get(key, "auto") == "auto"


def schedule_of(settings):
    """DeepSpeed's formulas. Return: a function of the step and the group's rate, or None for the program's schedule."""
    schedule = settings.get("scheduler")
    if not schedule or schedule["params"].get("total_num_steps") == "auto":
        return None
    params = schedule["params"]
    warmup = max(2, params["warmup_num_steps"])

    def gamma(i):
        if params.get("warmup_type", "log") == "linear":
            return i / warmup
        return math.log(i + 1) / math.log(warmup)

    def warmup_lr(step, lr):
        low, high, i = params["warmup_min_lr"], params["warmup_max_lr"], step - 1
        if step == 0:
            return low
        total = params.get("total_num_steps")
        after = 1 if total is None else max(0, (total - i) / max(1, total - warmup))
        return low + (high - low) * (gamma(i) if i < warmup else after)

    def cosine(step, lr):
        low, i, least = params["warmup_min_ratio"], step - 1, params["cos_min_ratio"]
        if step == 0:
            return 0
        x = min(1, (i - warmup + 1) / max(1, params["total_num_steps"] - warmup))
        return lr * (low + (1 - low) * gamma(i) if i < warmup else least + (1 - least) * (1 + math.cos(math.pi * x)) / 2)

    return cosine if schedule["type"] == "WarmupCosineLR" else warmup_lr


def program_schedule(step):
    """The schedule of programs whose file leaves it to the program."""
    return 1 - step / (2 * STEPS)


def train(settings):
    """Runs a rank. It does not repeat settings of the file. Return: the weights, and the norms of the gradients."""
    import zerod

    model = make_model()
    given = {} if "optimizer" in settings else {"type": "AdamW"}
    given |= {key: value for key, value in PROGRAM.items() if leaves_open(settings, key)}
    if settings.get("optimizer", {}).get("type", "AdamW").lower() not in ("adamw", "adam"):
        given = {}
    opt = zerod.Optimizer(model, **given)
    own_schedule = settings.get("scheduler") and not schedule_of(settings)
    norms = []
    for step in range(STEPS):
        for group in opt.param_groups if own_schedule else []:
            group["lr"] = PROGRAM["lr"] * program_schedule(step)
        for micro_batch in range(micro_batches(settings)):
            (loss_of(model, opt.rank, step, micro_batch) * opt.loss_scale).backward()
        if settings.get("gradient_clipping") == "auto":
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        opt.step()
        opt.zero_grad()
        norms.append(opt.result.grad_norm)
    weights = [p.detach().clone() for p in model.parameters()]
    opt.close()
    return weights, norms


def reference(settings):
    """Trains in one process of torch, with the batches of all ranks."""
    model, optimizer = make_model(), settings.get("optimizer", {"type": "AdamW", "params": {}})
    cls = KINDS[optimizer["type"].lower()]
    if optimizer["params"].get("adam_w_mode") is False:
        cls = torch.optim.Adam
    known = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")
    params = {key: optimizer["params"][key] for key in known if not leaves_open(settings, key)}
    if optimizer["type"].lower() in ("adamw", "adam"):
        params = PROGRAM | params
    opt, schedule, norms = cls(model.parameters(), **params), schedule_of(settings), []
    for step in range(STEPS):
        lr = schedule(step, params["lr"]) if schedule else params["lr"]
        if settings.get("scheduler") and not schedule:
            lr *= program_schedule(step)
        opt.param_groups[0]["lr"] = lr
        for rank in range(RANKS):
            for micro_batch in range(micro_batches(settings)):
                (loss_of(model, rank, step, micro_batch) / RANKS).backward()
        clip = settings.get("gradient_clipping") or math.inf
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP if clip == "auto" else clip).item())
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()], norms


def compare(results, settings):
    """Compares all ranks' results with the reference."""
    weights, norms = reference(settings)
    for their_weights, their_norms in results:
        assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(their_norms, norms, strict=True)), (their_norms, norms)
        far = max((torch.as_tensor(a) - b).abs().max().item() for a, b in zip(their_weights, weights, strict=True))
        assert far < LIMIT, far


if __name__ == "__main__":
    torch.set_num_threads(1)
    trained, their_norms = train(json.loads(sys.argv[1]))
    Path(sys.argv[2], f"rank{os.environ['RANK']}.json").write_text(json.dumps([[p.tolist() for p in trained], their_norms]))
