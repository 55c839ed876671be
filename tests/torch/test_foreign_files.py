# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's and accelerate's files train as they are, as torch does with their settings; those that cannot are refused in one read."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import foreign_files
import pytest
import torch
from conftest import Daemon, Process, environment, wait_for
from tiers import FULL

ROOT = Path(__file__).resolve().parents[2]
RANKS, STEPS, MICRO_BATCHES = 2, 7, 2
LIMIT = 2e-6
# Where the file leaves a setting to the program ("auto", or nothing at all).
PROGRAM = {"lr": 0.03, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.02}
CLIP = 0.2
KINDS = {"adamw": torch.optim.AdamW, "adam": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
# Those with which scripts/test trains: one of each optimizer and schedule, and of each way to say less. The others are read.
TRAINED = ["stage 3, names without stage3_, and zeros", "stage 0", "fp16 and WarmupLR", "Adam with L2", "SGD", "Adagrad",
           "WarmupDecayLR", "WarmupDecayLR, all auto", "WarmupCosineLR", "fp16 with a fixed scale, any minimum", "accelerate",
           "accelerate that names a DeepSpeed file"]  # fmt: skip


class FileDaemon(Daemon):
    """zerod with a file as it is; what the file lacks is on the command line, as from zerodrun."""

    def __init__(self, build, folder, file):
        self.build, self.folder, self.env, self.private = build, folder, {}, None
        self.socket, self.world_size, self.others, self.checked = folder / "zerod.sock", RANKS, [], False
        self.config_path = foreign_files.write(folder, file)
        Process.__init__(self, [build.path("daemon/zerod"), "--config", self.config_path, "--socket", self.socket, "--ranks",
                                RANKS], folder, {}, build.patience, "zerod")  # fmt: skip
        wait_for(lambda: self.err(), lambda: not self.running() or self.listens(), 20 * self.patience)
        assert self.running(), self.err()


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
    """DeepSpeed's formula: the rate of a step, from its number and the group's rate; None: the program's schedule."""
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
    """Of the programs whose file leaves the schedule to them."""
    return 1 - step / (2 * STEPS)


def train(settings):
    """A rank: what the file says, it does not say again. Return: the weights, and the norms of the gradients."""
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
    """One process of torch, with the batches of all ranks."""
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
    weights, norms = reference(settings)
    for their_weights, their_norms in results:
        assert their_norms == pytest.approx(norms, rel=1e-4)
        far = max((torch.as_tensor(a) - b).abs().max().item() for a, b in zip(their_weights, weights, strict=True))
        assert far < LIMIT, far


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in TRAINED else pytest.mark.full)
                                  for kind in foreign_files.TRAINS])  # fmt: skip
def test_trains_as_torch(build, tmp_path, run, kind):
    file = foreign_files.TRAINS[kind]
    settings = foreign_files.settings_of(file)
    daemon = FileDaemon(build, tmp_path, file)
    try:
        compare(run(daemon, train, settings=settings), settings)
        daemon.stop()
    finally:
        daemon.kill()
    assert "E1" not in daemon.err()


def check(build, tmp_path, file):
    """zerod's own check. Return: status, and the lines about keys."""
    path = foreign_files.write(tmp_path, file)
    result = subprocess.run([build.path("daemon/zerod"), "--config", path, "--socket", tmp_path / "s", "--ranks", "2", "--check"],
                            capture_output=True, text=True, timeout=60, env=environment())  # fmt: skip
    return result.returncode, [line for line in result.stderr.splitlines() if " config: " in line]


def test_all_are_taken(build, tmp_path):
    """Each with at most one line for each key; one that says why a key does nothing does not end the run."""
    assert len(foreign_files.TRAINS) >= 25
    for kind, file in foreign_files.TRAINS.items():
        status, lines = check(build, tmp_path, file)
        assert status == 0, (kind, lines)
        keys = [line.split(": ")[2] for line in lines]
        assert all(line.startswith("note") for line in lines) and len(keys) == len(set(keys)), (kind, lines)


def test_the_others_say_why_in_one_read(build, tmp_path):
    for kind, (file, keys) in foreign_files.REFUSED.items():
        status, lines = check(build, tmp_path, file)
        refused = [line.split(": ")[2] for line in lines if line.startswith("E1601")]
        assert status == os.EX_CONFIG and sorted(refused) == sorted(keys), (kind, lines)


@pytest.mark.parametrize("kind", ["stage 2, all auto", *([k for k in foreign_files.TRAINS if k != "stage 2, all auto"] if FULL else
                                  ["accelerate that names a DeepSpeed file"])])  # fmt: skip
def test_one_command(build, tmp_path, kind):
    """zerodrun, and the same program for all files. Of an accelerate file it has the number of ranks, too."""
    file = foreign_files.TRAINS[kind]
    settings = foreign_files.settings_of(file)
    ranks = [] if "num_processes" in file else ["-n", RANKS]
    program = [sys.executable, Path(__file__), json.dumps(settings), tmp_path]
    command = [build.path("client/run/zerodrun"), *ranks, "--config", foreign_files.write(tmp_path, file), "--zerod",
               build.path("daemon/zerod"), "--", *program]  # fmt: skip
    path = os.pathsep.join(str(ROOT / folder) for folder in ("client/python", "tests"))
    variables = {"PYTHONPATH": path, "ZEROD_LIBRARY": build.path("client/libzerod.so"), "OMP_NUM_THREADS": 1}
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120 * build.patience,
                            env=environment(variables))  # fmt: skip
    assert result.returncode == 0, result.stderr
    compare([json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(RANKS)], settings)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trained, their_norms = train(json.loads(sys.argv[1]))
    Path(sys.argv[2], f"rank{os.environ['RANK']}.json").write_text(json.dumps([[p.tolist() for p in trained], their_norms]))
