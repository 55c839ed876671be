# SPDX-License-Identifier: Apache-2.0
"""
scripts/test --gpu and scripts/bench --gpu on a machine that lacks something: they print one sentence, and their status
does not look like a success.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("ZEROD_SOURCE_ROOT", Path(__file__).resolve().parents[2]))
SKIPPED = 77
# Programs that the script calls before it looks for GPUs.
TOOLS = ["bash", "dirname", "grep", "nproc"]

ONE_GPU = "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'"
NO_DRIVER = "echo 'NVIDIA-SMI has failed'; exit 9"


def run(tmp_path, *arguments, script="test", **programs):
    """Runs the script with a PATH that has only these programs: name, and its shell text."""
    for tool in TOOLS:
        (tmp_path / tool).symlink_to(shutil.which(tool))
    for name, body in programs.items():
        program = tmp_path / name.replace("_", "-")
        program.write_text(f"#!{shutil.which('bash')}\n{body}\n")
        program.chmod(0o755)
    return subprocess.run(
        [ROOT / "scripts" / script, "--gpu", *arguments],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("script", ["test", "bench"])
@pytest.mark.parametrize(
    "programs, missing",
    [
        ({}, "there is no GPU (nvidia-smi lists none)"),
        ({"nvidia_smi": NO_DRIVER}, "there is no GPU (nvidia-smi lists none)"),
        ({"nvidia_smi": ONE_GPU}, "there is no nvcc on PATH"),
        ({"nvidia_smi": ONE_GPU, "nvcc": "exit 0", "cc": "exit 1"},
         "there is no NCCL (nccl.h is not found, python3 has no module nvidia.nccl, and NCCL_DIR is not set)"),
    ],
)
def test_missing(tmp_path, programs, missing, script):
    result = run(tmp_path, script=script, **programs)
    assert result.stdout == ""
    assert result.stderr == f"scripts/{script} --gpu: {missing}; nothing was run\n"
    assert result.returncode == SKIPPED


def test_torch_is_missing(tmp_path):
    result = run(tmp_path, script="bench", nvidia_smi=ONE_GPU, nvcc="exit 0", cc="exit 0", python3="exit 1")
    assert result.stderr == "scripts/bench --gpu: python3 has no PyTorch that sees the GPU; nothing was run\n"
    assert (result.returncode, result.stdout) == (SKIPPED, "")


def test_all_there(tmp_path):
    """With everything installed the script continues, here until the first tool that is not on the PATH."""
    result = run(tmp_path, nvidia_smi=ONE_GPU, nvcc="exit 0", cc="exit 0")
    assert "nothing was run" not in result.stderr
    assert result.returncode not in (0, SKIPPED)


def test_nccl_of_a_wheel(tmp_path):
    """If the compiler does not find nccl.h, the folder of python3's wheel is used."""
    result = run(tmp_path, nvidia_smi=ONE_GPU, nvcc="exit 0", cc="exit 1", python3="echo /env/nvidia/nccl")
    assert "nothing was run" not in result.stderr
    assert result.returncode not in (0, SKIPPED)


def test_alone(tmp_path):
    result = run(tmp_path, "--quick")
    assert (result.returncode, result.stderr) == (1, "test: --gpu goes with nothing else\n")
