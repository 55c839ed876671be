# SPDX-License-Identifier: Apache-2.0
"""
The benchmarks of scripts/bench --gpu measure what they claim, and detect what they look for, tested with stand-ins and
PyTorch on the CPU. The figures have no meaning.
"""

import importlib.util
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


@pytest.fixture
def tiny(build, monkeypatch):
    """The benchmarks with a model use the programs of this build, and stand-ins instead of torch.cuda."""
    for module in ("torch", "transformers"):
        pytest.importorskip(module)
    monkeypatch.setattr(harness, "BUILD", build.folder)
    return offload.Tiny


def test_sides_train_the_same(tiny):
    """torch, a daemon in host memory and one on a GPU reach the same loss and norm, at each size."""
    names = (offload.HOST, offload.ON_GPU, offload.MASTERS)
    with offload.Sides(tiny) as sides:
        sides.start(*names)
        answers = sides.measure(1)
        assert all(figure > 0 for figure in sides.updates(offload.HOST))
    assert sides.why == {} and list(answers) == [(name, size) for size in tiny.sizes for name in names]
    for size in tiny.sizes:
        ours, device, torch = (answers[name, size][0] for name in names)
        assert len(ours["ms"]) == offload.N_MEASURED and min(ours["ms"]) > 0
        assert ours["steps"] == torch["steps"] and ours["norm"] < 1
        for side in (ours, device):
            assert side["loss"] == pytest.approx(torch["loss"], rel=1e-3) and side["norm"] == pytest.approx(torch["norm"], rel=0.01)


def check_rows(rows, n, lacking=()):
    """Each row has a goal, and figures or a reason."""
    assert len(rows) == n
    for row in rows:
        assert row["goal"] > 0 and row["name"].startswith("gpu: all ")
        assert row["not_run"] and not row["holds"] if "not_run" in row else row["ratio"] > 0
    reasons = {row["not_run"] for row in rows if "not_run" in row}
    assert len(reasons) == len(lacking) and all(any(name in reason for reason in reasons) for name in lacking), reasons


@pytest.mark.full
def test_offload(tiny):
    rows, details = offload.gpu_offload(True, tiny)
    check_rows(rows, 9)
    table, updates = details.values()
    assert len(table) == 1 + 3 * 3 * 2 and [name for name, *_ in updates[1:]] == [offload.HOST, offload.NARROW, offload.PLAIN]


@pytest.mark.full
def test_peers(tiny):
    """Peers that are not installed, or have no GPU, have rows that were not run."""
    lacking = [module for module in ("deepspeed", "torchao") if importlib.util.find_spec(module) is None]
    if lacking != ["deepspeed", "torchao"]:
        pytest.skip("a peer is installed, and DeepSpeed would compile its kernels")
    rows, details = offload.gpu_peers(True, tiny)
    assert [row["peer_name"] for row in rows] == [offload.MASTERS] + [offload.ZERO_2] * 3 + [offload.ZERO_3] * 3 + [offload.TORCHAO] * 3
    assert "not_run" not in rows[0]
    check_rows(rows, 10, [offload.ZERO_2, offload.ZERO_3, offload.TORCHAO])
    assert f"No module named '{lacking[0]}'" in rows[1]["not_run"]
    [(_, *table)] = details.values()
    assert {name for _, name, *_ in table} == {offload.HOST, offload.MASTERS}


def test_no_room(tiny, monkeypatch):
    monkeypatch.setattr(offload, "available_bytes", lambda: 20 << 30)
    with offload.Sides(offload.Llama) as sides:
        sides.start(offload.ZERO_2)
        ours = {(offload.HOST, size): 1.0 for size in sides.llama.sizes}
        rows = offload.compare(sides, ours, offload.HOST, offload.ZERO_2, (2.0, None, 1.0))
    assert [row["name"] for row in rows] == [f"gpu: all in host memory, {size} tokens" for size in ("4 x 1024", "16 x 2048")]
    needs = "no room: it needs 26 GiB of host memory, and 20 GiB are available"
    assert {row["not_run"] for row in rows} == {f"{offload.ZERO_2}: {needs}"} and not any(row["holds"] for row in rows)


def test_side_that_ends(tiny):
    """It has no figures, and the others go on."""
    with offload.Sides(tiny) as sides:
        sides.start(offload.ALONE)
        trainer = sides.running[offload.ALONE]
        sides.llama = type("Wrong", (tiny,), {"sizes": (tiny.sizes[0], (1, -1))})
        answers = sides.measure(1)
        rows = offload.compare(sides, {}, offload.HOST, offload.BOUND, (1.0, 1.0))
    assert {row["not_run"] for row in rows} == {f"{offload.ALONE}: {sides.why[offload.ALONE]}"}
    assert list(answers) == [(offload.ALONE, tiny.sizes[0])] and trainer.popen.returncode is not None
    assert sides.why[offload.ALONE].startswith("llama_rank.py: ended early: RuntimeError: ") and not sides.running


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
