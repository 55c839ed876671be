# SPDX-License-Identifier: Apache-2.0
"""The runner of the systems table, without the systems: selection of rows, and judgement of runs."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (scripts/faults installs it)")

from faults import judge, runner  # noqa: E402
from systems import run as systems  # noqa: E402


def row(name):
    return next(r for r in systems.ROWS if r.name == name)


def outcome(*ranks, hung=False):
    return systems.Outcome(Path("/nonexistent"), [{"rank": i, **r} for i, r in enumerate(ranks)], "", hung)


def failed(rank=1, cause_class="M4", code=1302, kind="StepAborted", text=""):
    text = text or "E1302 ...: CUDA out of memory (injected), caught by training_step"
    return {"outcome": "failed", "type": kind, "text": text, "fault_code": code, "fault_cause_class": cause_class,
            "fault_params": [], "fault_n_params": 0, "fault_rank": rank, "fault_step": 3}  # fmt: skip


def test_which_rows_are_meant():
    def names(*patterns):
        return [r.name for r in systems.choose(patterns)[0]]

    assert names("5a") == ["5a/stage1", "5a/stage2", "5a/stage3"]
    assert names("1a") == ["1a", "1a/old"] and names("1a'") == ["1a'"] and names("5b/stage2", "2") == ["2", "5b/stage2"]
    assert names("3*") == ["3a", "3b", "3c"] and len(names()) == len(systems.ROWS) == 18
    assert systems.choose(["2", "7", "1aa"])[1] == ["7", "1aa"]


def test_every_row_stands_beside_what_a_peer_said():
    for r in systems.ROWS:
        assert len(systems.recorded(r)) >= max(1, len(r.peers)), r.name
        assert len(systems.recorded(dataclasses.replace(r, beside=()))) == len(r.peers), r.name


def test_a_fault_is_judged_by_all_who_tell_it():
    echo = failed(rank=1, cause_class="")  # rank 0 only got the abort
    for ranks, verdict in [
        ((echo, failed()), "right"),
        ((failed(rank=0, kind="MissingGradient", code=1005), failed()), "wrong"),  # accuses rank 0
        ((echo, failed(cause_class="D1")), "wrong"),
        ((echo, failed(text="E1302 it was aborted")), "wrong"),
        ((echo, {"outcome": "failed", "type": "RuntimeError", "text": "of DDP's"}), "wrong"),
        (({"outcome": "trained"}, {"outcome": "trained"}), "silent"),
        ((), "wrong"),
    ]:
        assert systems.judge_fault(outcome(*ranks), row("1a").expected)[0] == verdict, ranks
    assert systems.judge_fault(outcome(hung=True), row("1a").expected)[0] == "silent"


def test_parameters_are_all_of_those_meant_and_no_other():
    assert systems.matches(["a.b", "a.c"], ("a.*",)) and not systems.matches(["a.b", "b.c"], ("a.*",))
    assert systems.matches(["y", "x"], ("x", "y")) and not systems.matches(["x"], ("x", "y"))


def test_a_skipped_row_does_not_hold(tmp_path, monkeypatch, capsys):
    """If its environment is missing, a row is printed as skipped, and the exit status is not 0."""
    monkeypatch.setattr(systems, "ENVIRONMENTS", tmp_path)
    found = systems.judge(systems.Bench(tmp_path, tmp_path), row("5c"), peers=False)
    assert found["verdict"] == "skipped" and "tests/systems/environments e2" in found["why"]

    monkeypatch.setattr(runner, "run_systems", lambda rows, keep: [runner.row_of_system(found) for _ in rows])
    monkeypatch.setattr("sys.argv", ["faults", "5c", "--systems"])
    assert runner.main() == 1
    assert "1 skipped" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["faults", "5c", "--systems", "--json"])
    assert runner.main() == 1
    assert [r["verdict"] for r in json.loads(capsys.readouterr().out)] == ["skipped"]


def test_rows_that_hold_are_told_as_such(monkeypatch, capsys):
    held = judge.Row("3a", "E1001 D4", "E1001 D4", "right", peers=["DDP over gloo: RuntimeError: ..."])
    monkeypatch.setattr(runner, "run_systems", lambda rows, keep: [held])
    monkeypatch.setattr("sys.argv", ["faults", "3a", "--systems"])
    assert runner.main() == 0
    assert "peer: DDP over gloo" in capsys.readouterr().out


ONE_SPACE = re.compile(r"\s+")
DOC = (systems.ROOT / "docs/faults.md").read_text()
BLOCKS = re.findall(r"<!-- texts: ([^>]+) -->\n```text\n(.*?)```", DOC, re.S)


@pytest.mark.parametrize(("rows", "block"), BLOCKS, ids=[f"{i}-{rows}" for i, (rows, _) in enumerate(BLOCKS)])
def test_docs_quote_what_was_said(rows, block):
    """A quotation in the documents may wrap lines differently, and [...] stands for omitted text."""
    for name in rows.split(", "):
        said = ONE_SPACE.sub(" ", (systems.HERE / "texts" / f"{name}.txt").read_text())
        for part in block.split("[...]"):
            assert ONE_SPACE.sub(" ", part).strip() in said, name


def test_docs_have_all_rows():
    assert [r.name for r in systems.ROWS if f"\n| {r.name} | " not in DOC] == [] and len(BLOCKS) > 10
