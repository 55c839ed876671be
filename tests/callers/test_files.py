# SPDX-License-Identifier: Apache-2.0
"""
Each kind of configuration file of DeepSpeed and accelerate that trains (tests/foreign_files.py) runs with one command.
A plain program is compared with torch. If the file leaves all settings to the Trainer, a Trainer is compared with the
Trainer under DistributedDataParallel. zerod prints nothing (quiet.py) except the keys that it ignores.
"""

import json
import subprocess
import sys
from pathlib import Path

import foreign_files
import foreign_training
import pytest
import quiet
from conftest import environment
from test_programs import MEAN_LIMIT, STEP_LIMIT

ROOT = Path(__file__).resolve().parents[2]
RANKS = foreign_training.RANKS
# Files whose settings are all "auto" or absent.
OF_THE_TRAINER = ["stage 2, all auto", "stage 3, names without stage3_, and zeros", "stage 1, compiled",
                  "WarmupDecayLR, all auto", "accelerate with FSDP"]  # fmt: skip

pytestmark = pytest.mark.full


def command_of(build, folder, kind):
    file = foreign_files.TRAINS[kind]
    ranks = [] if "num_processes" in file else ["-n", RANKS]
    return [build.path("client/run/zerodrun"), *ranks, "--config", foreign_files.write(folder, file), "--zerod",
            build.path("daemon/zerod"), "--"]  # fmt: skip


def run(build, command, folder):
    variables = {"PYTHONPATH": ROOT / "client/python", "ZEROD_LIBRARY": build.path("client/libzerod.so"), "OMP_NUM_THREADS": 1,
                 "PYTHONDONTWRITEBYTECODE": 1, "HF_HUB_OFFLINE": 1, "CALLERS_OUT": folder}
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL,
                            env=environment(variables))  # fmt: skip
    assert result.returncode == 0, result.stderr[-8000:]
    assert quiet.said_in(result.stdout + result.stderr) == [], result.stderr[-8000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("kind", foreign_files.TRAINS)
def test_one_command(build, tmp_path, kind):
    settings = foreign_files.settings_of(foreign_files.TRAINS[kind])
    program = [sys.executable, foreign_training.__file__, json.dumps(settings), tmp_path]
    foreign_training.compare(run(build, [*command_of(build, tmp_path, kind), *program], tmp_path), settings)


@pytest.fixture(scope="module")
def trainer_under_ddp(build, tmp_path_factory):
    starts = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
    return run(build, [*starts, Path(__file__).with_name("trainer.py")], tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("kind", OF_THE_TRAINER)
def test_trainer(build, tmp_path, trainer_under_ddp, kind):
    """The Trainer's settings, schedule and clipping count, as if Hugging Face had filled them in."""
    program = [sys.executable, Path(__file__).with_name("trainer.py")]
    for ours, theirs in zip(run(build, [*command_of(build, tmp_path, kind), *program], tmp_path), trainer_under_ddp, strict=True):
        assert len(ours["losses"]) == len(theirs["losses"]) >= 12
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=STEP_LIMIT)
        assert sum(ours["losses"]) == pytest.approx(sum(theirs["losses"]), rel=MEAN_LIMIT)
