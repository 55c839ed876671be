# SPDX-License-Identifier: Apache-2.0
"""
Loops with Hugging Face Trainer, accelerate and Lightning: their ranks are killed, restarted, and end with the bits of
an undisturbed run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment
from test_bad_input import ONE, all_same, caught, make_model

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORLD = 2


def resume_without_zerod(folder):
    """resume() in a Trainer with another optimizer, and in a process without a job."""
    import zerod
    from transformers import Trainer, TrainingArguments

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
    return {"trainer-not-zerods": caught(zerod.resume, Trainer(model=make_model(), args=args))}


def test_a_trainer_without_zerod(zerod, start, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    all_same(start(zerod(ONE), resume_without_zerod, folder=tmp_path).result())


def train_twice(folder):
    """
    Calls train() twice with resume(). Return: steps of the trainer and of the job after each, and the first rates.
    """
    import test_for_trainer
    import zerod
    from transformers import Trainer

    test_for_trainer.alone()
    model, args = test_for_trainer.make_model(), test_for_trainer.arguments(folder, logging_steps=1)
    opt = zerod.for_trainer(model, args, rank=0)
    trainer = Trainer(model=model, args=args, train_dataset=test_for_trainer.Text(), optimizers=(opt, None))
    ends = []
    for _ in range(2):
        assert zerod.resume(trainer) is None
        trainer.train()
        ends.append((trainer.state.global_step, opt.epoch, trainer.state.log_history[0]["learning_rate"]))
    opt.close()
    return ends


def test_the_second_training_of_a_process_begins_anew(zerod, start, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    first, second = start(zerod(ONE), train_twice, folder=tmp_path).result()
    assert first == (3, 3, 5e-3) and second[:2] == (3, 6)


@pytest.fixture
def launch(build, tmp_path):
    """launch(runs, n_restarts) runs two ranks under zerodrun. Return: the results of each run, by its name."""

    def go(runs, n_restarts):
        file = tmp_path / "runs.json"
        file.write_text(json.dumps(runs))
        command = [build.path("client/run/zerodrun"), "--socket", next(iter(runs.values()))["socket"], "-n", WORLD,
                   "--restarts", n_restarts, "--", sys.executable, HERE / "programs/run_resume.py", file]
        variables = {"PYTHONPATH": ROOT / "client/python", "ZEROD_LIBRARY": build.path("client/libzerod.so"),
                     "OMP_NUM_THREADS": 1, "PYTHONDONTWRITEBYTECODE": 1, "HF_HUB_OFFLINE": 1}
        result = subprocess.run([str(word) for word in command], env=environment(variables), text=True, timeout=900,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert result.returncode == 0, result.stdout[-8000:]
        return {name: [torch.load(tmp_path / f"{name}.rank{rank}.pt", weights_only=True) for rank in range(WORLD)]
                for name in runs}

    return go


def check(results, name, lives):
    """Compares a run that was killed with the same run without kills."""
    for killed, whole in zip(results[name], results[f"{name}-whole"], strict=True):
        assert killed["resumed"] and not whole["resumed"] and killed["lives"] == lives
        assert killed["committed"] == whole["committed"] == 20
        for what in killed.keys() - {"weights", "lives", "resumed"}:
            assert killed[what] == whole[what], what
        assert killed["weights"].keys() == whole["weights"].keys()
        for key, value in killed["weights"].items():
            assert torch.equal(value, whole["weights"][key]), f"{key} of {name}"


def runs_of(zerod, way, **kills):
    """Return: runs that are killed, then the same runs without kills, each with its own daemon."""
    stages = {"step": 2, "micro": 3, "boundary": 1}
    runs = {name: how | {"with": way} for name, how in kills.items()}
    runs |= {f"{name}-whole": {k: v for k, v in how.items() if k != "kill"} for name, how in runs.items()}
    for name, how in runs.items():
        fp16 = {"enabled": name == "boundary", "initial_scale_power": 8}  # the bits are those of a run without a loss scale
        daemon = zerod({"zero_optimization": {"stage": stages[name.removesuffix("-whole")]}, "fp16": fp16})
        how["socket"] = str(daemon.socket)
    return runs


@pytest.mark.full
@pytest.mark.parametrize("way", ["accelerate", "trainer", "lightning", "fabric"])
def test_loops_go_on(zerod, launch, way):
    """
    Rank 1 is killed before its seventh step, while rank 0 waits in the daemon. Later rank 0 is killed inside a step,
    and rank 1 between two epochs. Each time both ranks are restarted.
    """
    for name in {"trainer": ("transformers", "accelerate"), "fabric": ("lightning",)}.get(way, (way,)):
        pytest.importorskip(name, reason=f"{name} is not installed")
    results = launch(runs_of(zerod, way, step={"kill": [0, 1, "begin", 7]},
                             micro={"kill": [1, 0, "micro", 11], "micro": 2},
                             boundary={"kill": [2, 1, "end", 8]}), n_restarts=3)
    for life, name in enumerate(("step", "micro", "boundary")):
        check(results, name, lives=life + 1)
