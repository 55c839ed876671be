# SPDX-License-Identifier: Apache-2.0
"""
The benchmarks of scripts/bench --gpu measure what they claim, and detect what they look for, tested with stand-ins and
PyTorch on the CPU. The figures have no meaning.
"""

import json
import math
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from conftest import ROOT
from tiers import full

sys.path.append(str(ROOT / "bench"))

import gpu  # noqa: E402
import harness  # noqa: E402
import offload  # noqa: E402

PARAMS = 4
MANY = 1 << 23
# Gradients are uniformly distributed over +-2^-9, without their scale of 2. They are clipped to a norm of 1.
CLIPPED = 1 / math.sqrt(MANY / 3 * 2.0**-18)
CHAINS = ["fused AdamW", "unscale, clip_grad_norm_, fused AdamW, cast",
          "norm, fused AdamW that unscales and clips, cast"]


@pytest.fixture
def setup(build):
    class Here(gpu.StandIns):
        program = str(build.path("bench/bench-gpu-sim"))

    return Here


def environment(*faults):
    return dict(os.environ, ZEROD_SIM=",".join(["devices=1", *faults]))


@pytest.fixture
def kernels(setup):
    """kernels(name) -> the program's answer."""
    side = gpu.Side([setup.program, "kernels", "--elems", str(MANY), "--params", str(PARAMS)], env=environment())
    assert side.receive() == "ready"

    def answer(name):
        side.send(name)
        return json.loads(side.receive())

    yield answer
    side.stop()
    assert side.popen.returncode == 0


@pytest.mark.full
def test_kernels(setup):
    rows, details = gpu.gpu_kernels(True, setup)
    assert [row["goal"] for row in rows] == [0.9, 0.9, 1.0, 1.3, 0.95, 0.95, 0.9, 0.9, 0.9]
    assert all(row["zerod"] > 0 and row["peer"] > 0 for row in rows)
    [(title, (_, *table))] = details.items()
    assert title == "medians, 0.25 Mi parameters in 4 tensors"
    assert [name for name, _ in table] == ["copy-fp32", "adamw", "copy-bf16", "adamw-bf16", "adamw-imported",
                                           "adamw-undo", "sequence", "copy-bf16-moments", "adamw-bf16-moments", "copy-8bit",
                                           "adamw-8bit", "copy-8bit-24", "adamw-8bit-24", *CHAINS]


@pytest.mark.full
def test_offload(setup, build, monkeypatch):
    """Offload is measured with a real daemon in host memory, without DeepSpeed."""
    pytest.importorskip("torch")
    monkeypatch.setattr(harness, "BUILD", build.folder)
    rows, details = offload.gpu_offload(True, gpu.StandIns)
    [(title, (_, *table))] = details.items()
    assert [row["peer_name"] for row in rows] == [offload.TORCH] and rows[0]["goal"] is None
    assert title == "medians, 0.0 M parameters" and [name for name, *_ in table] == [offload.TORCH, offload.MASTERS, offload.HOST]
    assert all(float(ms) > 0 for _, ms, _ in table) and float(table[0][2]) == 0


def adamw(p, exp_avg, exp_avg_sq, grad, steps):
    """torch.optim.AdamW's formula, in double."""
    exp_avg = 0.9 * exp_avg + 0.1 * grad
    exp_avg_sq = 0.999 * exp_avg_sq + 0.001 * grad * grad
    denominator = math.sqrt(exp_avg_sq / (1 - 0.999**steps)) + 1e-8
    return p * (1 - 1e-3 * 0.01) - 1e-3 * exp_avg / (1 - 0.9**steps) / denominator


@pytest.mark.parametrize("name, factor, has_weight", [("adamw", 0.5, False), ("adamw-bf16", 0.5, True),
                                                      ("adamw-undo", 0.5, False), ("sequence", CLIPPED, True)])
def test_they_compute(kernels, name, factor, has_weight):
    """The kernels compute the last element of each array, which belongs to the last range, correctly."""
    before = kernels("sample")
    for step in (1, 2, 3):
        assert kernels(name)["ms"] > 0
        after = kernels("sample")
        assert after["steps"] == step and after["grad"] != before["grad"]
        used = (after["exp_avg"] - 0.9 * before["exp_avg"]) / 0.1
        assert used / after["grad"] == pytest.approx(factor, rel=0.01)
        expected = adamw(before["p"], before["exp_avg"], before["exp_avg_sq"], used, step)
        assert after["p"] == pytest.approx(expected, rel=1e-4)
        assert after["weight"] == (pytest.approx(after["p"], rel=2**-8) if has_weight else 0)
        before = after


@pytest.mark.parametrize("name, where", [("adamw-bf16-moments", "p"), ("adamw-8bit", "p"), ("adamw-8bit-24", "weight")])
def test_narrow_ones_compute(kernels, name, where):
    """The kernels with narrow moments compute a first step from zeros correctly. Moments are rounded after it."""
    assert kernels(name)["ms"] > 0
    after = kernels("sample")
    assert after[where] == pytest.approx(adamw(0, 0, 0, 0.5 * after["grad"], 1), rel=2**-8)
    assert after["exp_avg"] == 0 and {after["p"], after["weight"]} == {0, after[where]}


def test_imported_memory_is_another(kernels):
    assert kernels("adamw-imported")["ms"] > 0
    sample = kernels("sample")
    assert sample["p"] == sample["grad"] == 0


def test_facts(setup):
    rows, details = gpu.gpu_facts(True, setup)
    assert len(rows) == 4 and all(row["holds"] for row in rows), details
    [(_, (_, *table))] = details.items()
    asked = {what for what, *_ in table}
    assert asked == set(gpu.FACTS.values())
    # The table shows that the stand-ins lack a function.
    assert [gpu.FACTS["handles-legacy"], "ended", "bench-gpu: the GPU driver has no cuIpcGetMemHandle"] in table


@pytest.mark.parametrize("fault, row", [("cuMemImportFromShareableHandle:error=CUDA_ERROR_INVALID_VALUE", 0),
                                        ("ncclAllGather:error=ncclSystemError", 3),
                                        ("sim_launch:error=cudaErrorInvalidValue", 2)])
def test_facts_that_do_not_hold(setup, fault, row):
    answers = {command: gpu.ask(setup, command, environment(fault)) for command in ("killed", "ranks", "updates")}
    rows = gpu.taken_for_granted(answers, "")
    assert not rows[row]["holds"]
    assert [r["holds"] for r in rows].count(False) in (1, 3)


def test_unknown_kernel(setup):
    run = subprocess.run([setup.program, "kernels", "--elems", str(gpu.StandIns.elems), "--params", str(PARAMS)], input="adam\n",
                         capture_output=True, text=True, env=environment())
    assert (run.returncode, run.stderr) == (1, "bench-gpu: no kernel is called adam\n")


@pytest.mark.parametrize("arguments", [[], ["kernel"], ["kernels", "--elems", "100"], ["kernels", "--rows", "1"]])
def test_usage(setup, arguments):
    run = subprocess.run([setup.program, *arguments], capture_output=True, text=True, env=environment())
    assert run.returncode == 64 and "usage: bench-gpu " in run.stderr


@pytest.fixture
def fake_mps(tmp_path, monkeypatch):
    """fake_mps(answers of get_server_list) -> the file to which it writes the commands that it gets."""

    def make(servers):
        program, log = tmp_path / gpu.MPS, tmp_path / "log"
        program.write_text(f"""#!/bin/sh
[ "$1" = -d ] && echo "-d $CUDA_MPS_PIPE_DIRECTORY" >>{log} && exit
while read -r line; do
    echo "$line" >>{log}
    [ "$line" != get_server_list ] || echo "{servers}"
done
""")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return log

    return make


def test_mps_is_started_and_ended(fake_mps):
    log = fake_mps("4711")
    (plain, alone), (name, together) = gpu.Setup.modes()
    assert (plain, name) == ("", ", MPS")
    with alone() as environment:
        assert environment is None
    with together() as environment:
        folder = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.path.isdir(folder)
    assert not os.path.exists(folder)
    assert log.read_text() == f"-d {folder}\nget_server_list\nquit -t 5\n"


def test_mps_that_nobody_used(fake_mps):
    log = fake_mps("")
    with pytest.raises(gpu.Failure, match="what ran did not use it"):
        with gpu.mps():
            pass
    assert log.read_text().endswith("quit -t 5\n")


def test_there_is_no_mps(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [name for name, _ in gpu.Setup.modes()] == [""]
    assert "there are no figures with MPS: " in capsys.readouterr().err


@pytest.mark.parametrize("measure, n_rows", [*full(("gpu_kernels", 9)), ("gpu_facts", 8)])
def test_without_mps_stays(setup, measure, n_rows):
    """If the measurements with MPS fail, the rows without MPS are still shown."""

    @contextmanager
    def broken():
        raise gpu.Failure("no server")
        yield

    class Both(setup):
        @staticmethod
        def modes():
            yield from setup.modes()
            yield ", MPS", broken

    rows, _ = getattr(gpu, measure)(True, Both)
    assert len(rows) == n_rows
    assert all(row["holds"] for row in rows[:4]) or measure == "gpu_kernels"
    assert not any(row["holds"] for row in rows[4:]) or measure == "gpu_kernels"


def test_chains_of_torch_do_the_same():
    """Both chains of torch, with which zerod's sequence is compared, compute the same."""
    torch = pytest.importorskip("torch")
    import gpu_torch

    weights = []
    for name in CHAINS[1:]:
        torch.manual_seed(0)
        chains = gpu_torch.Chains("cpu", gpu.StandIns.elems, PARAMS)
        with torch.no_grad():
            for iteration in range(3):
                chains.refill(iteration)
                chains.run[name]()
        assert list(chains.run) == CHAINS
        weights.append(torch.cat(chains.weights).float())
    assert weights[0].abs().max() > 1e-3
    torch.testing.assert_close(weights[0], weights[1], rtol=2**-7, atol=0)
