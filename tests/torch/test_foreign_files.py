# SPDX-License-Identifier: Apache-2.0
"""
Files of DeepSpeed and accelerate train unchanged, like torch with their settings. Unusable files are refused with all
reasons at once. tests/callers/test_files.py runs each with one command.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import foreign_files
import foreign_training
import pytest
import quiet
from conftest import Daemon, Process, environment, wait_for
from foreign_training import RANKS, compare, train

ROOT = Path(__file__).resolve().parents[2]
# Files with which scripts/test trains: one for each optimizer, each schedule and each form of short files. The other
# files are only read.
TRAINED = ["stage 3, names without stage3_, and zeros", "stage 0", "fp16 and WarmupLR", "Adam with L2", "SGD", "Adagrad",
           "WarmupDecayLR, all auto", "WarmupCosineLR", "accelerate"]  # fmt: skip


class FileDaemon(Daemon):
    """zerod with an unchanged file. Settings that the file lacks are on the command line, as from zerodrun."""

    def __init__(self, build, folder, file):
        self.build, self.folder, self.env, self.private = build, folder, {}, None
        self.socket, self.world_size, self.others, self.checked = folder / "zerod.sock", RANKS, [], False
        self.config_path = foreign_files.write(folder, file)
        Process.__init__(self, [build.path("daemon/zerod"), "--config", self.config_path, "--socket", self.socket, "--ranks",
                                RANKS], folder, {}, build.patience, "zerod")  # fmt: skip
        wait_for(lambda: self.err(), lambda: not self.running() or self.listens(), 20 * self.patience)
        assert self.running(), self.err()


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in TRAINED else pytest.mark.full)
                                  for kind in foreign_files.TRAINS])  # fmt: skip
def test_trains_as_torch(build, tmp_path, run, kind):
    file = foreign_files.TRAINS[kind]
    settings = foreign_files.settings_of(file)
    daemon = FileDaemon(build, tmp_path, file)
    try:
        compare(run(daemon, train, settings=settings), settings)
        assert quiet.findings_of(daemon) == []
        daemon.stop()
    finally:
        daemon.kill()
    assert quiet.said_in(daemon.err()) == []


def check(build, tmp_path, file):
    """Runs zerod --check. Return: the exit status, and the lines about keys."""
    path = foreign_files.write(tmp_path, file)
    result = subprocess.run([build.path("daemon/zerod"), "--config", path, "--socket", tmp_path / "s", "--ranks", "2", "--check"],
                            capture_output=True, text=True, timeout=60, env=environment())  # fmt: skip
    return result.returncode, [line for line in result.stderr.splitlines() if " config: " in line]


def test_all_are_taken(build, tmp_path):
    """
    All files are accepted, with at most one line for each key. A line about a key without effect does not end the run.
    """
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


def test_one_command(build, tmp_path):
    """zerodrun with accelerate's file, which has the number of ranks and names the file with the settings."""
    file = foreign_files.TRAINS["accelerate that names a DeepSpeed file"]
    settings = foreign_files.settings_of(file)
    program = [sys.executable, foreign_training.__file__, json.dumps(settings), tmp_path]
    command = [build.path("client/run/zerodrun"), "--config", foreign_files.write(tmp_path, file), "--zerod",
               build.path("daemon/zerod"), "--", *program]  # fmt: skip
    variables = {"PYTHONPATH": ROOT / "client/python", "ZEROD_LIBRARY": build.path("client/libzerod.so"), "OMP_NUM_THREADS": 1}
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120 * build.patience,
                            env=environment(variables))  # fmt: skip
    assert result.returncode == 0, result.stderr
    compare([json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(RANKS)], settings)
