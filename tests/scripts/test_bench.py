# SPDX-License-Identifier: Apache-2.0
"""
The benchmarks of scripts/bench measure what they claim, tested on small models. The figures have no meaning. DeepSpeed
is not tested here; the benchmark itself checks its chains at each run.
"""

import os
import subprocess
import sys
from contextlib import closing

import pytest

from conftest import ROOT

sys.path.append(str(ROOT / "bench"))

import growth  # noqa: E402
import harness  # noqa: E402
import main  # noqa: E402
import narrow_state  # noqa: E402
import torch_hook  # noqa: E402
import traffic  # noqa: E402
import training  # noqa: E402
import whole_step  # noqa: E402
from peers import FIFTEEN, FIFTEEN_CLIP, SHM_CLIP  # noqa: E402

ELEMS = 1 << 21  # gradients of this size have a norm above 1, so that they are clipped


@pytest.fixture
def small(build, monkeypatch):
    """The benchmarks use the programs of this build."""
    monkeypatch.setattr(harness, "BUILD", build.folder)
    monkeypatch.setattr(whole_step, "ELEMS", ELEMS)


def test_both_orders():
    """Each job is measured first once, and closed. No job is measured alone."""
    made, open_jobs = [], set()

    class Job:
        def __init__(self, name):
            self.name = name
            made.append(name)
            open_jobs.add(name)

        def close(self):
            open_jobs.remove(self.name)

    def step(job):
        assert open_jobs == {"a", "b"}
        return job.name

    results = harness.in_both_orders({name: (lambda name=name: Job(name)) for name in "ab"}, step, 3)
    assert made == ["a", "b", "b", "a"] and not open_jobs
    assert results == {"a": ["a"] * 6, "b": ["b"] * 6}


# ---- narrow moments --------------------------------------------------------------------------------------------------


@pytest.mark.full  # 20 s
def test_narrow_state(small, monkeypatch):
    """Each kind has the state that it claims, and with equal seeds all kinds start equally."""
    monkeypatch.setattr(narrow_state, "N_STEPS", 6)
    monkeypatch.setattr(harness.ZerodJob.__init__, "__defaults__", (2, ELEMS, *harness.ZerodJob.__init__.__defaults__[2:]))
    rows, (head, *memory) = narrow_state.steps(quick=True)
    assert [row["name"].split(": ")[1] for row in rows] == [
        f"{part}, {model}, {kind}" for model, (_, kinds) in narrow_state.MODELS.items()
        for part in ("whole", "after the last push") for kind in list(kinds)[1:]]
    assert int(memory[1].pop()) == pytest.approx((1 + 2 * 68 / 64) * ELEMS / 2**20, abs=2) and memory[0].pop() == ""
    for model, *found in memory:
        wide, narrow, stochastic, eight = map(int, found)
        assert narrow == stochastic and wide - narrow == pytest.approx(4 * ELEMS / 2**20, abs=2)
        assert wide - eight == pytest.approx((8 - 2 * 68 / 64) * ELEMS / 2**20, abs=2)
    assert [row["peer_name"] for row in narrow_state.gradients(quick=True)] == ["fp32 gradients"]
    for kinds, train in (narrow_state.KINDS, narrow_state.losses), (narrow_state.TRAINED_IN_BF16, narrow_state.losses_in_bf16):
        first = [train(kind, seed=3) for kind in kinds]
        assert len({losses[0] for losses in first}) == 1 and len({tuple(losses) for losses in first}) == len(kinds)


# ---- peers of a whole step ------------------------------------------------------------------------------------------


def test_peers_train_the_same(small, monkeypatch):
    """
    The peers train the same. A peer with the gradients of another iteration is detected, and even one that never clips.
    """
    pytest.importorskip("torch")
    unclipped = whole_step.without_clipping(2)
    with closing(harness.ZerodJob(2, 2, ELEMS)) as job, closing(
            harness.TorchJob(2, ELEMS, families=("fifteen", "gloo"))) as torch:
        first = whole_step.first_steps({2: job}, torch, unclipped)
        assert len(first) == 5 and all(ms > 0 for ms in first.values())

        clipped = whole_step.zerod_sample(job)
        with pytest.raises(harness.Failure, match="rank 1 differs"):
            whole_step.compare("rank 1", unclipped, clipped)

        torch.iterations[FIFTEEN] = 1
        for _ in range(whole_step.CHECKED_STEPS):
            torch.step(FIFTEEN)
        with pytest.raises(harness.Failure, match="differs"):
            whole_step.compare(FIFTEEN, torch.ask(FIFTEEN, sample=whole_step.STRIDE)[0], unclipped)


def test_weights_that_are_not_finite_are_not_the_same():
    with pytest.raises(harness.Failure):
        whole_step.compare("it", [float("nan")], [1.0])


def test_slow_chains_are_those_of_their_family():
    job = harness.TorchJob.__new__(harness.TorchJob)
    job.chains = {"a": {"family": "x"}, "b": {"family": "x"}, "c": {"family": "y"}}
    assert job.slow({"a": 1.0, "b": 2.1, "c": 9.0}) == {"b"}


def test_rows_of_a_step():
    peers = dict.fromkeys([*whole_step.GOALS, "ring"], 30.0)
    stages = {2: [{"total": 10.0, "tail": 5.0}]}
    rows = whole_step.rows_of(2, stages, peers, "ring")
    assert [(r["peer_name"], r["goal"], r["holds"]) for r in rows] == [
        (FIFTEEN_CLIP, 1.1, True), (FIFTEEN, 0.95, True), (SHM_CLIP, 3.0, True),
        ("ring", 4.0, False), ("ring", 3.5, True)]
    assert [r["goal"] for r in whole_step.rows_of(8, stages, peers, "ring")] == [1.1, 0.95, None, 8.0, None]


# ---- bytes of a step ------------------------------------------------------------------------------------------------


def test_bytes_of_a_step():
    """The bytes of a step with 2 ranks are the sums in docs/benchmarks.md."""
    assert traffic.read_and_written(2) == (8 + 8 + 16, 8 + 4 + 12)
    assert traffic.step_bytes(10, 2) == 560 and traffic.passes(2) == 2
    with pytest.raises(harness.Failure, match="another proportion"):
        traffic.passes(4)


def test_traffic(small, monkeypatch):
    monkeypatch.setattr(traffic, "ELEMS", ELEMS)
    [row], details = traffic.traffic(True)
    assert row["zerod"] > 0 and row["peer"] > 0 and row["goal"] == 0.92
    [(_, (_, step, stream))] = details.items()
    assert step[1:3] == stream[1:3] == ["64", "48"]


def test_a_stream_of_other_bytes(small, monkeypatch):
    monkeypatch.setattr(traffic, "ELEMS", ELEMS)
    monkeypatch.setattr(traffic, "passes", lambda world: 1)
    with pytest.raises(harness.Failure, match=f"moved {ELEMS * 28} bytes instead of {ELEMS * 56}"):
        traffic.traffic(True)


@pytest.mark.parametrize("arguments", [["--elems", "0"], ["--rows", "1"], ["1"]])
def test_usage_of_the_stream(build, arguments):
    run = subprocess.run([build.path("bench/bench-stream"), *arguments], capture_output=True, text=True,
                         stdin=subprocess.DEVNULL)
    assert run.returncode == 64 and "usage: bench-stream " in run.stderr


# ---- memory, growth, and how they are shown -------------------------------------------------------------------------


def test_memory(small, monkeypatch):
    """Each class has a line. A class that is further from the plan than allowed fails."""
    monkeypatch.setattr(growth, "MEMORY_ELEMS", 24 * 10000)
    monkeypatch.setattr(growth, "MEMORY_PARAMS", 24)
    rows = growth.memory_of(2, 2)
    names = [r["name"].removeprefix("memory: stage 2, 2 ranks, ") for r in rows]
    assert names == ["state", "gradient", "ring", "overflow", "staging", "weights", "pool", "fixed"]
    assert rows[0]["plan"] > 1 and rows[0]["held"] == pytest.approx(rows[0]["plan"], abs=0.05)
    assert all(r["holds"] for r in rows) and all(r["allowed"] == 16 for r in rows)
    monkeypatch.setattr(growth, "memfd_bytes", lambda pid: {"state": 32 * harness.MI})
    state, *_ = growth.memory_of(2, 2)
    assert state["held"] == 32 and not state["holds"]
    assert state["difference"] == pytest.approx(32 - state["plan"], abs=0.01)


def test_growth_is_measured_in_bytes():
    """Growth compares a point with the middle point. A comparison with itself would always pass."""

    def point(ranks, ms):
        return {"elems": 100, "ranks": ranks, "ms": ms}

    def label(c):
        return f"{c['ranks']} ranks"

    rows = growth.against_bytes(label, [point(1, 50.0), point(2, 56.0), point(4, 80.0)])
    assert [(r["name"], r["zerod"], r["peer"], r["holds"]) for r in rows] == [
        ("scaling: 1 ranks", 50.0, 44.0, True), ("scaling: 4 ranks", 80.0, 80.0, True)]
    assert rows[0]["peer_name"] == "its bytes at the speed of 2 ranks"
    slow, = growth.against_bytes(label, [point(1, 51.0), point(2, 56.0)])
    assert not slow["holds"] and growth.against_bytes(label, []) == []


ROWS = [harness.row("a", 2.0, 1.0, "b", "ms", 0.4), harness.row("c", 2.0, 1.0, "b", "ms", None),
        harness.allowance("d", "MiB", 10.0, 12.0, 2.0, 1.0)]


def test_ratios_and_allowances_are_two_tables(capsys):
    main.print_results(ROWS, {"more": [["x", "y"], ["1", "22"]], "plot": None})
    assert capsys.readouterr().out == """\
benchmark  zerod  peer   unit  peer is  ratio  goal  holds
a          2.000  1.000  ms    b        0.50   0.40  yes
c          2.000  1.000  ms    b        0.50   -     -

class  plan  held  difference  allowed  unit  holds
d      10.0  12.0  2.000       1.000    MiB   NO

More:
x  y
1  22

"""


def test_rows_that_were_not_run(monkeypatch, capsys):
    """They say why, and the exit status is not that of goals that hold."""
    lacking = harness.not_run("e", "f", "ms", 1.0, "no module f")

    def it(quick):
        """It."""
        return [ROWS[0], lacking], {}

    monkeypatch.setattr(main, "find_benchmarks", lambda on_gpu: {"it": it})
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert main.main() == main.NOT_RUN
    assert capsys.readouterr().out.splitlines()[2:6] == [
        "e          -      -      ms    f        -      1.00  not run", "", "not run      why", "e, beside f  no module f"]


def test_tables_of_the_page(small):
    page = "<!-- it: written by x -->\n<!-- end of it -->\n"
    text = main.write_section(page, "it", ROWS[2:], {"more": [["x"], ["1"]]})
    assert text.splitlines()[3:] == [
        "| class | plan | held | difference | allowed | unit | holds |", "|" + " --- |" * 7,
        "| d | 10.0 | 12.0 | 2.000 | 1.000 | MiB | NO |", "", "More:", "", "| x |", "| --- |", "| 1 |",
        "<!-- end of it -->"]


def test_results_come_one_by_one(monkeypatch, capsys):
    """The results of a benchmark are printed before the next one begins."""
    seen = []

    def first(quick):
        """The first."""
        return ROWS[:1], {}

    def second(quick):
        """The second."""
        seen.append(capsys.readouterr().out)
        return ROWS[2:], {}

    monkeypatch.setattr(main, "find_benchmarks", lambda on_gpu: {"first": first, "second": second})
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert main.main() == 1  # a missed allowance counts too
    assert "a          2.000" in seen[0]


# ---- hooks in PyTorch -----------------------------------------------------------------------------------------------


def test_hooks_are_measured(small, build, monkeypatch):
    """In a backward, our hooks on both sides of zerod's hook see each parameter once."""
    pytest.importorskip("torch")
    environment, names = training.rank_environment(), ("model alone", "DDP", "zerod")
    results, n_params = torch_hook.measure("some", names, 2, environment, probed=True)
    assert tuple(results) == names and n_params == 100
    for found in results.values():
        assert all(len(r["hooks"]) == 100 and r["both"] == r["forward"] + r["backward"] > 0 for r in found)
    alone, ddp, mine = (float(line[1]) for line in torch_hook.table_of_probes({"some": results})[1:])
    assert mine > alone and ddp >= 0


def test_a_parameter_is_a_share_of_the_whole():
    """The cost of a parameter is a share of the round's time beyond the model alone, not the time between two hooks."""
    results = {name: [{"forward": 0, "backward": ns, "both": ns}, {"forward": 0, "backward": 2 * ns, "both": 2 * ns}]
               for name, ns in {"model alone": 1e6, "empty hooks": 1.1e6, "DDP": 1.4e6, "zerod": 1.8e6}.items()}
    allowed, ddp, empty = torch_hook.rows_per_parameter(results, 100)
    assert (allowed["zerod"], allowed["peer"], allowed["holds"]) == (12.0, 4.0, False)
    assert (ddp["peer"], empty["peer"], ddp["goal"], empty["goal"]) == (6.0, 1.5, None, None)
    results["zerod"] = results["model alone"]
    with pytest.raises(harness.Failure, match="nothing was measured"):
        torch_hook.rows_per_parameter(results, 100)


# ---- training in PyTorch --------------------------------------------------------------------------------------------

TINY = {"layers": 1, "heads": 1, "width": 8, "vocabulary": 50, "positions": 16}


@pytest.fixture
def torch_side():
    """Return: torch_side.py, and a function that makes the same small model each time."""
    torch = pytest.importorskip("torch")
    import gpt2
    import torch_side

    def model():
        torch.manual_seed(0)
        return gpt2.GPT2(**TINY)

    torch_side.make_model = model
    torch_side.tokens = torch.arange(16).view(1, 16)
    return torch_side


def test_the_model_alone_frees_gradients_one_by_one(torch_side):
    model = torch_side.make_model()
    held = []

    def count(_):
        held.append(sum(p.grad is not None for p in model.parameters()))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)  # before the hooks that free gradients
    side = torch_side.Alone(model, {}, 0, 1, "")
    side.iterate(torch_side.tokens)
    assert held == [1] * len(list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())


def test_fsdp2_trains_the_same(torch_side, tmp_path):
    """FSDP2 trains like torch's AdamW alone, in each setting, on one rank, where nothing is summed."""
    import torch

    def losses(side):
        return [side.iterate(torch_side.tokens).item() for _ in range(3)]

    class Plain(torch_side.Ddp):
        def __init__(self, model):
            self.model = model
            self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **torch_side.ADAMW)

    expected = losses(Plain(torch_side.make_model()))
    for i, (name, spec) in enumerate(training.FSDP2.settings.items()):
        _, *options = spec.split(":")
        try:
            side = torch_side.Fsdp2(torch_side.make_model(), dict.fromkeys(options, ""), 0, 1, tmp_path / f"store{i}")
            assert losses(side) == pytest.approx(expected, rel=1e-5), name
        finally:
            torch.distributed.destroy_process_group()
    assert expected[2] < expected[0]


def training_results(**ms):
    return {name.replace("_", " "): [{"ms": value, "loss": 1.0}] * 3 for name, value in ms.items()}


def test_rows_of_a_training():
    """
    Rows show memory and time beyond the model alone. Stage 3 is compared with stage 2, other rows with their peers.
    """
    memory = {name: dict(zip((training.BETWEEN, training.AT_MOST), held)) for name, held in {
        "model alone": (100, 200), "zerod": (160, 255), "peer": (200, 300), training.STAGE_3: (161, 255),
        training.NARROW: (130, 260)}.items()}
    results = training_results(model_alone=1000, peer=2000, zerod=1100) | {training.STAGE_3: [{"ms": 1120}] * 3}
    rows = training.rows_of("peer", training.DEEPSPEED, results, memory)
    assert [(r["zerod"], r["peer"], r["goal"], r["holds"]) for r in rows] == [
        (100, 1000, 10.0, True), (60, 100, 1 / 0.6, True), (55, 100, 1 / 0.55, True), (30, 100, 2.0, True), (60, 100, 2.0, False)]
    rows = training.rows_of(training.STAGE_3, training.FAMILIES[-1], results, memory)
    assert [(r["zerod"], r["peer"], r["peer_name"], r["goal"], r["holds"]) for r in rows] == [
        (120, 100, "zerod", 1 / 1.2, True), (61, 60, "zerod", 1.0, False), (55, 55, "zerod", 1.0, True)]
    assert all(r["name"].endswith(", zerod, stage 3") for r in rows)


COUNT_FAULTS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory = [libc.malloc(n << 20) for n in (1, 40)]
    for at, n in zip(memory, (1, 40)):
        ctypes.memset(at, 1, n << 20)
        libc.free(at)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("heap, least, most", [({}, 1000, 1 << 20), (training.STEADY_HEAP, 0, 50)])
def test_a_steady_heap_costs_no_page_faults(heap, least, most):
    run = subprocess.run([sys.executable, "-c", COUNT_FAULTS], env=dict(os.environ, **heap), capture_output=True,
                         text=True, check=True)
    assert least <= int(run.stdout) <= most
