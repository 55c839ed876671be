# SPDX-License-Identifier: Apache-2.0
"""Tests of the judge: a row of the corpus is right only if everything about it is right."""

import ast
from dataclasses import dataclass, field
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("torch", reason="PyTorch is not installed (scripts/faults installs it)")

from faults import corpus, judge  # noqa: E402
from faults.models import names  # noqa: E402

TEXT = """E1001 duplicate gradient refused: rank 1, step 1, micro-batch 0
  parameter      h.0.fc.bias, h.0.fc.weight
  1st push       nested backward 3, h.0 call 2, forward at {site}
  2nd push       nested backward 4, h.0 call 1, forward at {site}
  cause          the module ran twice
  fix            torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
  or             diagnostics.on_duplicate: accumulate
  state          pid 4711 held it for 12.5 s""".format(site="/somewhere/tests/faults/scenarios/duplicates.py:45")

FAULT = {
    "code": 1001, "cause_class": "D1", "params": list(names("h.0.fc")), "n_params": 2, "rank": 1, "step": 1,
    "micro_batch": 0, "text": TEXT, "classes": ["DuplicateGradient", "GradientFault", "Error"], "warning": False,
    "fields": [["fix", "..."]],
}


@dataclass
class FakeOrder:
    rank: int


@dataclass
class FakeRank:
    rank: int
    facts: dict
    status: int | None = 0
    arrays: dict | None = None
    printed: str = ""

    @property
    def order(self):
        return FakeOrder(self.rank)

    def poll(self):
        return self.status

    def outcome(self):
        return {"faults": [], "error": None, "again": None, "done": False, "ended": True} | self.facts

    def err(self):
        return self.printed

    def parameters(self):
        return self.arrays


@dataclass
class FakeRun:
    scenario: corpus.Scenario
    ranks: list
    diagnostics: list = field(default_factory=list)
    findings: list = field(default_factory=list)
    logged: list = field(default_factory=list)
    complaint: str = ""


def faulty(fault=None, again=1001, others=None):
    """Return: a run of checkpoint-twice in which rank 1 got this fault."""
    told = {"faults": [FAULT | (fault or {})], "again": again}
    return FakeRun(corpus.load()["checkpoint-twice"], [FakeRank(0, others or {"done": True}), FakeRank(1, told)])


def test_right():
    verdict = judge.judge_faulty(faulty())
    assert (verdict.verdict, verdict.why) == ("right", [])


@pytest.mark.parametrize("change", [
    {"code": 1005}, {"cause_class": "D2"}, {"rank": 0}, {"step": 0}, {"micro_batch": 1}, {"params": ["h.0.fc.weight"]},
    {"params": ["h.0.fc.weight", "h.1.fc.weight"]}, {"n_params": 3}, {"classes": ["GradientFault", "Error"]},
    {"text": TEXT.replace("use_reentrant=False", "find_unused_parameters=True")},
    {"text": TEXT.replace("  fix            ", "  does not help  ")}, {"text": TEXT.replace("call 1", "call 2")},
], ids=str)
def test_wrong(change):
    verdict = judge.judge_faulty(faulty(change))
    assert verdict.verdict in ("wrong", "false_alarm") and verdict.why


def test_silent():
    run = FakeRun(corpus.load()["checkpoint-twice"], [FakeRank(0, {"done": True}), FakeRank(1, {"done": True})])
    assert judge.judge_faulty(run).verdict == "silent"


def test_told_to_another():
    run = faulty()
    run.ranks[0], run.ranks[1] = FakeRank(0, run.ranks[1].facts), FakeRank(1, {"done": True})
    assert judge.judge_faulty(run).verdict != "right"


def test_swallowed_for_good():
    verdict = judge.judge_faulty(faulty(again="nothing: step() went on"))
    assert verdict.verdict == "wrong" and "again" in verdict.why[0]


def test_an_exception_of_another_kind():
    error = {"classes": ["TypeError"], "text": "no", "trace": ""}
    assert judge.judge_faulty(faulty(others={"error": error})).verdict == "wrong"


def test_clean():
    guard = corpus.load()["plain"]
    run = FakeRun(guard, [FakeRank(0, {"done": True}), FakeRank(1, {"done": True})])
    assert judge.judge_clean(run).verdict == "right"
    run.ranks[1] = FakeRank(1, {"faults": [FAULT]})
    assert judge.judge_clean(run).verdict == "false_alarm"
    run.ranks[1] = FakeRank(1, {"done": False, "ended": False}, status=1)
    assert judge.judge_clean(run).verdict == "wrong"
    run.ranks[1] = FakeRank(1, {"done": True}, status=-9)
    assert judge.judge_clean(run).verdict == "wrong"


FINDING = {"kind": "rank-norm", "rank": 1, "param": None,
           "text": "the gradients of rank 1 were at least 900 times as large: its loss may be a sum and not a mean"}


def found(*findings, diagnostics=()):
    """Return: the verdict on sum-on-one-rank with these findings of the status."""
    ranks = [FakeRank(r, {"done": True}) for r in range(3)]
    return judge.judge_faulty(FakeRun(corpus.load()["sum-on-one-rank"], ranks, list(diagnostics), list(findings)))


def test_found():
    assert (found(FINDING).verdict, found(FINDING).why) == ("right", [])
    assert found().verdict == "silent"


@pytest.mark.parametrize("change", [{"kind": "slow-rank"}, {"rank": 0}, {"param": "head.weight"}, {"text": "the gradients"}],
                         ids=str)  # fmt: skip
def test_found_otherwise(change):
    verdict = found(FINDING | change)
    assert verdict.verdict == "wrong" and verdict.why


def test_found_more():
    assert found(FINDING, FINDING | {"kind": "zero-lr", "rank": None}).verdict == "wrong"
    warning = {"code": "E1005", "cause_class": "M1", "params": [], "n_params": 0, "rank": -1, "step": 2, "micro_batch": -1,
               "fields": [], "text": "E1005 ...", "warning": True}  # fmt: skip
    assert found(FINDING, diagnostics=[warning]).verdict == "false_alarm"


def test_finding_of_another_scenario():
    """A finding that is not expected is a false alarm, with a fault, with a refusal and without both."""
    run = faulty()
    run.findings = [FINDING]
    assert judge.judge_faulty(run).verdict == "false_alarm"
    guard = FakeRun(corpus.load()["plain"], [FakeRank(r, {"done": True}) for r in range(2)], findings=[FINDING])
    assert judge.judge_clean(guard).verdict == "false_alarm"


WARNING = "train.py:7: ZerodWarning: clip_grad_norm_ at train.py:7 came before the last backward of its step\n  clip()\n"
LOGGED = "zerod[faults]: there is not enough memory for what is not kept"


def quiet_guard():
    run = FakeRun(corpus.load()["plain"], [FakeRank(r, {"done": True}) for r in range(2)])
    run.ranks[0].printed = "train.py:7: UserWarning: of torch\nzerod: AdamW, stage 2 (train.py)\n"
    return run


@pytest.mark.parametrize("printed, logged", [(WARNING, []), ("", [LOGGED])], ids=["warning", "log"])
def test_asides(printed, logged):
    """A warning without a code is a false alarm, beside the expected fault and in a program without one."""
    for run, judged in ((faulty(), judge.judge_faulty), (quiet_guard(), judge.judge_clean)):
        assert judged(run).verdict == "right"
        run.ranks[0].printed += printed
        run.logged += logged
        assert judged(run).verdict == "false_alarm"


def test_code_in_an_output():
    """A code in an output that is in no exception and no diagnostic is a false alarm."""
    run = quiet_guard()
    run.ranks[1].printed = "zerod: step 3 begins again: E1302 a rank has left\n"
    assert judge.judge_clean(run).verdict == "false_alarm"
    run = faulty()
    run.logged = ["zerod[faults]: " + TEXT.splitlines()[0]]
    assert judge.judge_faulty(run).verdict == "right"


def test_every_warning_has_the_category():
    """Every warning of the package has the category by which quiet.py finds it."""
    package = Path(__file__).resolve().parents[2] / "client/python/zerod"
    calls = [(path.name, call) for path in package.rglob("*.py") for call in ast.walk(ast.parse(path.read_text()))
             if isinstance(call, ast.Call) and ast.unparse(call.func) == "warnings.warn"]  # fmt: skip
    assert len(calls) > 5
    for name, call in calls:
        assert [ast.unparse(category) for category in call.args[1:]] == ["ZerodWarning"], f"{name}:{call.lineno}"


def test_numbers():
    want = {"w": np.array([1.0, 1e-3], dtype=np.float32)}
    alone, guard = FakeRank(-1, {}, arrays=want), corpus.load()["plain"]

    def worst(**changes):
        run = FakeRun(guard, [FakeRank(0, {}, arrays=changes or None)])
        return judge.judge_numbers(run, alone)

    assert worst(w=want["w"]) == []
    assert worst(w=want["w"] + np.float32(1e-6)) == []
    assert worst(w=want["w"] + np.float32(1e-5))
    assert worst(w=np.array([1.0, np.nan], dtype=np.float32))
    assert worst(v=want["w"])
    assert worst()


def test_mask():
    assert judge.mask(TEXT).splitlines()[-1] == "  state          pid PID held it for TIME"
    assert "forward at tests/faults/scenarios/duplicates.py:45" in judge.mask(TEXT)


def test_every_expectation_can_be_met():
    """Expected fragments of fix and text do not contradict never_says, and a rank in `told` exists."""
    for scenario in corpus.load().values():
        expect = scenario.expect
        if isinstance(expect, corpus.Expect):
            assert not set(expect.says) & set(expect.never_says)
        if expect is not None:
            assert all(0 <= r < scenario.world for r in expect.ranks(scenario.world)), scenario.name
