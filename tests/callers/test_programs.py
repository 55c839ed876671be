# SPDX-License-Identifier: Apache-2.0
"""
Programs as people write them, for each caller that zerod supports, trained with zerod and with torch's optimizer under
DistributedDataParallel. The loss curves must agree. The daemon's steps must have the settings of torch's optimizer,
group by group, and zerod must print nothing (quiet.py). timm needs a torchvision, which needs another torch;
scripts/test --part timm makes an environment for it.
"""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import quiet
from conftest import environment

ROOT = Path(__file__).resolve().parents[2]
WORLD = 2
# Relative limits of the loss, those of the GPT example (client/python/examples/gpt/compare.py).
MEAN_LIMIT, STEP_LIMIT = 0.005, 0.02
# Limit of an averaged weight, relative to the larger of its absolute value and its parameter's root mean square.
AVERAGE_LIMIT = 1e-4
CONFIG = quiet.CONFIG | {"zero_optimization": {"stage": 2}, "optimizer": None, "gradient_clipping": None}
# torch 2.13 on gloo, without zerod, once ended with this text. The run without zerod is then repeated.
TORCH_ABORTS = "terminate called without an active exception"
PROGRAMS = ["trainer", "trainer lion", "kfold", "sft", "sft peft", "qlora", "qlora bf16", "qlora int8", "dpo", "sentence", "accelerated",
            "lightning_module", "fabric_loop", "nanogpt", "cnn", "compiled whole", "compiled layers", "compiled trainer"]  # fmt: skip
TIMM_PROGRAMS = ["timm_images", "timm_images layers"]

pytestmark = pytest.mark.full


@pytest.fixture
def launch(build, tmp_path):
    def go(program, daemon=None, is_quiet=True):
        """Runs a program. Return: the reports of its ranks. is_quiet: zerod must print nothing."""
        socket = daemon and daemon.socket
        out = tmp_path / ("zerod" if socket else "torch")
        out.mkdir()
        name, *words = program.split()
        starts = [build.path("client/run/zerodrun"), "--socket", socket, "-n", WORLD, "--", sys.executable] if socket else [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", WORLD]
        variables = {"PYTHONPATH": ROOT / "client/python", "ZEROD_LIBRARY": build.path("client/libzerod.so"), "HF_HUB_OFFLINE": 1,
                     "OMP_NUM_THREADS": 1, "PYTHONDONTWRITEBYTECODE": 1, "CALLERS_OUT": out}
        command = [str(word) for word in [*starts, Path(__file__).with_name(f"{name}.py"), *words]]
        for _ in range(1 if socket else 3):
            result = subprocess.run(command, env=environment(variables), text=True, timeout=600, stdin=subprocess.DEVNULL,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
            if TORCH_ABORTS not in result.stdout:
                break
        assert result.returncode == 0, result.stdout[-8000:]
        assert not is_quiet or quiet.said_in(result.stdout) == [], result.stdout[-8000:]
        return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(WORLD)]

    return go


def arrived(daemon):
    """Return: the groups of the daemon's last step, with the names of their parameters."""
    groups = daemon.json("status")["groups"]
    for group in groups:
        group["params"] = []
    for param in daemon.json("params"):
        if param["trainable"]:
            groups[param["group"]]["params"].append(param["name"])
    return groups


def check_groups(ours, theirs):
    theirs = [group for group in theirs if group["params"]]  # the Trainer makes one even for no biases
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert sorted(mine["params"]) == other["params"]
        for name in ("lr", "eps", "weight_decay", "momentum", "dampening", "nesterov"):
            assert name not in other or mine[name] == pytest.approx(other[name], rel=1e-12), name
        assert "betas" not in other or [mine["beta1"], mine["beta2"]] == list(other["betas"])


def compare(zerod, launch, program):
    """Trains a program with zerod and with torch's optimizer, and compares both. Return: the ranks' reports of each."""
    daemon = zerod(CONFIG)
    ours, theirs = launch(program, daemon), launch(program)
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine["losses"]) == len(other["losses"]) >= 12
        assert mine["losses"] == pytest.approx(other["losses"], rel=STEP_LIMIT)
        assert sum(mine["losses"]) == pytest.approx(sum(other["losses"]), rel=MEAN_LIMIT)
    assert sum(theirs[0]["losses"][-4:]) < sum(theirs[0]["losses"][:4]), "nothing was learnt"
    check_groups(arrived(daemon), theirs[0]["groups"])
    assert quiet.said_by(daemon) == []
    return ours, theirs


def check_averages(ours, theirs):
    assert len(ours) > 30 and ours.keys() == theirs.keys()
    for name, values in theirs.items():
        rms = math.sqrt(sum(x * x for x in values) / len(values))
        off = max(abs(x - y) / max(abs(y), rms) for x, y in zip(ours[name], values, strict=True))
        assert off < AVERAGE_LIMIT, f"{name}: {off}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(zerod, launch, program):
    compare(zerod, launch, program)


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("timm", "torchvision"))),
    reason="timm and torchvision are not installed here: scripts/test --part timm",
)
@pytest.mark.parametrize("program", TIMM_PROGRAMS)
def test_timm(zerod, launch, program):
    """Losses and groups agree as in test_program, and each rank's average of the weights agrees too."""
    for mine, other in zip(*compare(zerod, launch, program), strict=True):
        check_averages(mine["averages"], other["averages"])


def test_early_on_one_rank(zerod, launch):
    """Both ranks end because of on_leave: stop, and the steps before that agree with torch's."""
    daemon = zerod(CONFIG)
    ours, theirs = launch("early", daemon, is_quiet=False), launch("early")
    for mine, other in zip(ours, theirs, strict=True):
        assert len(other["losses"]) == 6 and mine["losses"] == pytest.approx(other["losses"], rel=STEP_LIMIT)
    (said,) = daemon.json("diagnostics")
    assert said["text"].startswith("E1302 a rank has left, the others stop: rank 0, step 6") and daemon.status()["step"] == 6


def test_loss_with_parameters(zerod, launch):
    """The loss's parameters are trained from all ranks' gradients. Under DDP no reducer has them, and they differ."""
    daemon = zerod(CONFIG)
    ours = launch("sentence loss", daemon)
    assert sum(ours[0]["losses"][-4:]) < sum(ours[0]["losses"][:4])
    names = [name for group in arrived(daemon) for name in group["params"]]
    assert {"classifier.weight", "classifier.bias"} <= set(names) and len(names) > 30
    assert quiet.said_by(daemon) == []


def scalars(folder):
    """Return: {tag: {step: value}} of TensorBoard's files, read by TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return found


@pytest.mark.parametrize("kind, where, shift", [("trainer", "train/", 0), ("lightning", "", -1), ("fabric", "", 0), ("plain", "", 0)])
def test_figures_are_logged(zerod, launch, tmp_path, kind, where, shift):
    """TensorBoard has the job's figures every three steps, at the steps at which the framework logs."""
    daemon = zerod(CONFIG)
    launch(f"logged {kind}", daemon)
    found = scalars(tmp_path / "zerod" / "logs")
    steps = found[f"{where}zerod/step"]
    assert steps == {step + shift: step for step in (3, 6, 9, 12)}, steps
    for name in ("grad_norm", "loss_scale", "lr", "steps_per_s", "wait_seconds", "waited_ratio", "memory_bytes"):
        assert set(found[f"{where}zerod/{name}"]) == set(steps), name
    assert all(value > 0 for value in found[f"{where}zerod/grad_norm"].values())
    if kind == "trainer":
        assert found["train/zerod/grad_norm"] == pytest.approx(found["train/grad_norm"], rel=1e-5)
    if kind in ("trainer", "lightning"):
        assert set(found[f"{where}loss"]) == set(steps)
