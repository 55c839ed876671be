# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu-run: its judgement of the steps' ends, and the whole kit of scripts/gpu-pack with the stand-ins."""

import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import ROOT

NOT_RUN = 77


def load():
    loader = importlib.machinery.SourceFileLoader("gpu_run", str(ROOT / "scripts/gpu-run"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_run", loader))
    sys.modules["gpu_run"] = module  # dataclasses look there
    loader.exec_module(module)
    return module


gpu_run = load()


# ---- a step ------------------------------------------------------------------------------------------------------

CMOCKA = """[ RUN      ] test_one
[       OK ] test_one
needs 2 GPUs, and here is 1
[  SKIPPED ] test_two
[==========] 2 test(s) run.
[  PASSED  ] 1 test(s).
[  SKIPPED ] 1 test(s), listed below:
[  SKIPPED ] test_two
"""


@pytest.mark.parametrize("status, output, outcome, detail", [
    (0, "33 passed in 57.94s\n", "passed", "33 passed"),
    (0, "2 passed, 3 skipped in 1s\n", "passed", "2 passed, 3 not run (they say what they need)"),
    (0, "3 skipped in 1s\n", "not run", "no test ran"),
    (5, "4 deselected in 1s\n", "failed", "4 deselected in 1s"),
    (1, "FAILED tests/a.py::test_b - assert\n1 failed, 2 passed in 1s\n", "failed", "tests/a.py::test_b"),
    (0, CMOCKA, "passed", "1 passed, 1 not run (they say what they need)"),
    (1, "[  FAILED  ] test_b\n[  PASSED  ] 3 test(s).\n[  FAILED  ] 1 test(s), listed below:\n", "failed", "test_b"),
    (-11, "[ RUN      ] test_b\n", "failed", "[ RUN      ] test_b"),
    (77, "no GPU: none is visible\n", "failed", "no GPU: none is visible"),
])  # fmt: skip
def test_tests(status, output, outcome, detail):
    result = gpu_run.judge_tests(status, output)
    assert (result.outcome, result.detail) == (outcome, detail)


ROW = {"name": "gpu: adamw", "ratio": 0.8, "goal": 0.9, "holds": False}


def test_figures():
    """A missed goal is printed. Without figures a step has not passed."""
    said = "gpu-kernels: the kernels\n  3 s\n"
    output = said + json.dumps([ROW, ROW | {"holds": True}], indent=2) + "\nRatio\n"
    assert gpu_run.judge_figures(1, said + json.dumps([ROW], indent=2)).detail == "1 figures; missed: gpu: adamw: 0.80, goal 0.90"
    assert gpu_run.judge_facts(1, said + json.dumps([ROW], indent=2)).outcome == "failed"
    assert gpu_run.judge_facts(0, said + json.dumps([ROW | {"holds": True}], indent=2)).outcome == "passed"
    for judge in (gpu_run.judge_figures, gpu_run.judge_facts):
        assert judge(1, "gpu-kernels: failed: no GPU\n").detail == "gpu-kernels: failed: no GPU"
        assert judge(1, output[:-40]).outcome == "failed"


def test_rows_that_were_not_run():
    """They do not count as figures. Without figures the step was not run."""
    lacking = {"name": "gpu: a step", "goal": 1.0, "holds": False, "not_run": "no module deepspeed"}
    judge = lambda *rows: gpu_run.judge_figures(77, "gpu-peers: steps\n" + json.dumps(rows, indent=2))
    assert vars(judge(ROW | {"holds": True}, lacking, lacking)) == {
        "outcome": "passed", "detail": "1 figures; 2 not run: no module deepspeed", "seconds": 0.0}  # fmt: skip
    assert (judge(lacking).outcome, judge(lacking).detail) == ("not run", "no module deepspeed")


def run_step(tmp_path, *command, seconds=60.0, check=lambda: None):
    step = gpu_run.Step(1, "step", list(command), check, gpu_run.judge_tests)
    return gpu_run.run_step(step, SimpleNamespace(environment=dict(os.environ)), tmp_path / "log", seconds)


def test_step_that_takes_too_long(tmp_path):
    """A step that takes too long fails, and its children are killed."""
    result = run_step(tmp_path, "sh", "-c", f"echo begun; (sleep 30; touch {tmp_path}/late) & sleep 30", seconds=0.5)
    assert (result.outcome, result.detail) == ("failed", "not done after 0 s: begun")
    left = subprocess.run(["pgrep", "-f", f"touch {tmp_path}/late"], capture_output=True, text=True).stdout
    assert left == "", left


def test_step_that_lacks_something(tmp_path):
    def check():
        raise gpu_run.Missing("there is no GPU driver")

    assert vars(run_step(tmp_path, "false", check=check)) == {"outcome": "not run", "detail": "there is no GPU driver", "seconds": 0.0}
    assert run_step(tmp_path, "false", seconds=0).detail == "the stage's time was up"


# ---- the program --------------------------------------------------------------------------------------------------


@pytest.fixture
def kit(tmp_path):
    """kit(*arguments) runs gpu-run in a folder without programs, on a machine without a driver."""
    folder = tmp_path / "zerod-gpu"
    (folder / "build").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/gpu-run", folder)
    (folder / "COMMIT").write_text("abc\n")
    return lambda *arguments: subprocess.run([folder / "gpu-run", "--out", tmp_path / "out", *arguments], capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have a GPU")
def test_without_a_gpu(kit, tmp_path):
    began = time.monotonic()
    result = kit()
    assert result.returncode == NOT_RUN, result.stdout + result.stderr
    assert "\n0 passed, 0 failed, 13 not run; logs: " in result.stdout
    assert result.stdout.count("there is no GPU driver: libcuda.so.1 is not found") == 13
    first, *steps = map(json.loads, (tmp_path / "out/results.jsonl").read_text().splitlines())
    assert first["commit"] == "abc" and first["machine"]["gpu"] is None
    assert [step["stage"] for step in steps] == [1, 1, 1, 1, 1, 1, 2, 2, 3, 4, 4, 4, 4]
    assert {step["outcome"] for step in steps} == {"not run"}
    assert time.monotonic() - began < 20
    assert "\n0 passed, 0 failed, 2 not run; logs: " in kit("2").stdout
    assert "\n0 passed, 0 failed, 2 not run; logs: " in kit("--step", "kills", "--step", "facts").stdout


def test_stage_that_does_not_exist(kit):
    result = kit("5")
    assert result.returncode == 2 and "there is no stage 5, but 1, 2, 3, 4" in result.stderr


def test_step_that_does_not_exist(kit):
    result = kit("--step", "kill")
    assert result.returncode == 2 and "gpu-run: there is no step kill, but device, engine, engine-failures, " in result.stderr


def test_step_of_another_stage(kit):
    """If no step runs, the result is not "passed"."""
    result = kit("2", "--step", "facts")
    assert result.returncode == NOT_RUN and "\n0 passed, 0 failed, 0 not run; logs: " in result.stdout


def test_outside_its_folder():
    result = subprocess.run([ROOT / "scripts/gpu-run"], capture_output=True, text=True)
    assert result.returncode == 2 and "gpu-run runs in the folder that scripts/gpu-pack makes" in result.stderr


# ---- all of it ----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.alone
def test_kit(tmp_path):
    """The kit is packed, unpacked in another folder, and run without network, compiler and home. All stages end."""
    packed = subprocess.run([ROOT / "scripts/gpu-pack"], capture_output=True, text=True)
    assert packed.returncode == 0, packed.stdout + packed.stderr
    with tarfile.open(ROOT / "build/gpu-pack/zerod-gpu.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    tools, home = tmp_path / "bin", tmp_path / "home"
    tools.mkdir()
    home.mkdir()
    for tool in ("env", "sh", "ip", "tr"):  # started by name, by the kit or the tests
        (tools / tool).symlink_to(shutil.which(tool))
    (tools / "python3").symlink_to(Path(sys.executable).resolve())
    line = f"ip link set lo up && exec {tmp_path}/zerod-gpu/gpu-run --out {tmp_path}/out --minutes 15 --python {sys.executable} "
    inside = lambda more: subprocess.run([shutil.which("unshare"), "-rn", "sh", "-c", line + more], capture_output=True, text=True,
                                         env={"PATH": str(tools), "HOME": str(home)}, cwd=home)  # fmt: skip
    result = inside("--stand-ins")
    assert result.returncode == 0 and "\n11 passed, 0 failed, 0 not run; logs: " in result.stdout, result.stdout + result.stderr
    if shutil.which("nvidia-smi") is None:
        assert inside("").returncode == NOT_RUN
