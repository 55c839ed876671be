# SPDX-License-Identifier: Apache-2.0
"""
Compares the C ledger with its model (ledger_model.py). Also proves that the campaign detects errors: drivers and models
with one changed rule are detected, and their scripts are short after shrinking.

ZEROD_LEDGER_DRIVER is the ledger-driver to test, by default the one in build/. ZEROD_LEDGER_OPS is the number of
operations, 1000000 in scripts/test --full. ZEROD_LEDGER_SEED is the seed.
"""

import os
import pathlib
from functools import partial

import pytest

import ledger_model as model
from tiers import FULL

BUILT = pathlib.Path(__file__).resolve().parents[3] / "build" / "tests" / "ledger-driver"
DRIVER = os.environ.get("ZEROD_LEDGER_DRIVER", str(BUILT))
N_OPS = int(os.environ.get("ZEROD_LEDGER_OPS", "1000000" if FULL else "200000"))
SEED = int(os.environ.get("ZEROD_LEDGER_SEED", "1"))

# Each of these pairs of operation and verdict must be at least one percent of all operations, so that every rule is
# tested.
KINDS = {
    "init": "ok", "attach": "new same", "next": "", "begin": "ok E1002 E1003 E1004",
    "push": "admitted again redo retry dropped E1001 E1002 E1003 E1004 E1103", "post": "ok none",
    "sum": "ok none", "findsum": " none", "end": "ok retry E1002 E1003 incomplete", "forget": "ok",
    "abandon": "ok must_abort", "ask": "ok retry E1003", "abort": "ok", "commit": "ok",
    "state": "", "entry": ""}


def listing(script):
    return "\n".join(" ".join(map(str, op)) for op in script or ())


def test_the_ledger_agrees_with_its_model(capsys):
    assert os.access(DRIVER, os.X_OK), "no ledger-driver at %s" % DRIVER
    counts, script = model.campaign(partial(model.program, DRIVER), N_OPS, SEED)
    assert script is None, "they differ in the last verdict of\n%s\nthe model says %s, the driver %s" % (
        listing(script), model.replay(script)[-1], model.program(DRIVER, script)[-1])
    percent = {kind: 100 * n / counts.total() for kind, n in counts.items()}
    with capsys.disabled():
        print()
        for kind in sorted(counts):
            print("%-20s %9d  %5.2f %%" % (kind, counts[kind], percent[kind]))
    wanted = {(op + " " + word).strip() for op, verdicts in KINDS.items() for word in verdicts.split(" ")}
    assert {kind for kind in wanted | set(counts) if percent.get(kind, 0) < 1} == set()


def test_a_parameter_has_a_limited_number_of_passes():
    n_passes = 65535
    start = [("init", 1, 1, 1, "1"), ("attach", 0, 7), ("begin", 0, 0, 0)]
    pushes = [("push", 0, 7, 0, 0, 0, k + 1, 0) for k in range(n_passes + 2)]
    late = [("post", 0, 0), ("sum", 0, 0, 5), ("findsum", 0, 0, 0), ("entry", 0, 0), ("state", 0)]
    verdicts = model.program(DRIVER, start + pushes + late)
    assert verdicts[3:3 + n_passes] == ["admitted %d" % k for k in range(n_passes)]
    assert verdicts[3 + n_passes:] == ["E1001", "E1001", "ok", "ok", "5", "%d 1 1 0" % n_passes,
                                       "1 0 0 1 1 %d -" % n_passes]


# The driver with one change, made by a filter around it.
@pytest.mark.full
@pytest.mark.parametrize("mutation, shortest", [
    pytest.param("exec %s | sed 's/^E1001$/admitted 1/'", 5, id="a duplicate is admitted"),
    pytest.param("exec %s | sed 's/^must_abort$/ok/'", 6, id="what is posted can be abandoned"),
    pytest.param("sed 's/^\\(init [0-9]* [0-9]*\\) 1/\\1 0/' | %s", 5, id="the policy is not heeded"),
    pytest.param("sed 's/^end .*/abandon 0/' | %s", 2, id="a boundary is taken for another call"),
    pytest.param("head -n 2000 | %s", None, id="the driver dies"),
])
def test_a_changed_driver_is_caught(tmp_path, mutation, shortest):
    driver = tmp_path / "driver"
    driver.write_text("#!/bin/sh\n" + mutation % ("'%s'" % DRIVER) + "\n")
    driver.chmod(0o755)
    _, script = model.campaign(partial(model.program, str(driver)), 20000, SEED)
    assert script, "not noticed"
    if shortest:
        assert shortest <= len(script) <= 10, listing(script)


def changed(**methods):
    return type("Changed", (model.Rank,), methods)


def attach_keeps_what_is_not_posted(self, incarnation):
    passes, pushed = dict(self.passes), set(self.pushed)
    verdict = model.Rank.attach(self, incarnation)
    self.passes, self.pushed = passes, pushed
    return verdict


def attach_takes_the_request_back(self, incarnation):
    verdict = model.Rank.attach(self, incarnation)
    self.asked = self.asked and verdict == "same"
    return verdict


def attach_goes_on_with_the_sequence(self, incarnation):
    last_sequence = self.last_sequence
    verdict = model.Rank.attach(self, incarnation)
    self.last_sequence = last_sequence
    return verdict


def attach_owes_nothing_a_second_time(self, incarnation):
    passes = [x for passes in self.passes.values() for x in passes]
    paid = [x for x in passes if getattr(x, "was_owed", False) and not x.owed]
    verdict = model.Rank.attach(self, incarnation)
    for x in passes:
        x.was_owed = getattr(x, "was_owed", False) or x.owed
        x.owed = x.owed and x not in paid
    return verdict


def begin_clears_what_stands(self, *position):
    was_open, passes = self.is_open, self.passes
    verdict = model.Rank.begin(self, *position)
    if verdict == "ok" and not was_open and passes:
        self.passes = {}
    return verdict


def end_asks_for_no_second_push(self, *position):
    verdict = model.Rank.end(self, *position)
    if verdict == "incomplete":
        self.ended.append(position)
        self.is_open = False
        return "ok"
    return verdict


def abandon_takes_back_the_sequence(self):
    was_open = self.is_open
    verdict = model.Rank.abandon(self)
    self.last_sequence = 0 if was_open and verdict == "ok" else self.last_sequence
    return verdict


def push_that_is_refused_raises_the_sequence(self, *args):
    verdict = model.Rank.push(self, *args)
    self.last_sequence = max(self.last_sequence, args[4]) if verdict == "E1001" else self.last_sequence
    return verdict


def push_of_an_older_attempt_is_early(self, *args):
    verdict = model.Rank.push(self, *args)
    return "E1003" if verdict == "dropped" else verdict


def push_checks_position_before_sequence(self, incarnation, attempt, *args):
    verdict = model.Rank.push(self, incarnation, attempt, *args)
    position = self.classify(args[:2], self.home if self.is_open else None)
    return position if verdict == "retry" and position != "ok" else verdict


def forget_clears_what_stands(self):
    if not self.is_open:
        self.passes = {}
    return "ok"


def ask_overlooks_what_stands(self):
    if self.asked or self.is_open:
        return "retry" if self.asked else "E1003"
    self.asked = True
    return "ok"


def close_step_forgets_the_last_ended(self):
    model.Rank.close_step(self)
    self.ended = self.ended[:1]


def close_step_keeps_the_request(self):
    asked = getattr(self, "asked", False)
    model.Rank.close_step(self)
    self.asked = asked


def close_step_begins_new_sequences(self):
    model.Rank.close_step(self)
    self.last_sequence = 0


@pytest.mark.full
@pytest.mark.parametrize("change", [
    changed(attach=attach_keeps_what_is_not_posted), changed(attach=attach_takes_the_request_back),
    changed(attach=attach_goes_on_with_the_sequence), changed(attach=attach_owes_nothing_a_second_time),
    changed(begin=begin_clears_what_stands), changed(end=end_asks_for_no_second_push),
    changed(abandon=abandon_takes_back_the_sequence), changed(push=push_that_is_refused_raises_the_sequence),
    changed(push=push_of_an_older_attempt_is_early), changed(push=push_checks_position_before_sequence),
    changed(forget=forget_clears_what_stands), changed(ask=ask_overlooks_what_stands),
    changed(close_step=close_step_forgets_the_last_ended), changed(close_step=close_step_keeps_the_request),
    changed(close_step=close_step_begins_new_sequences),
], ids=lambda change: next(f.__name__ for f in vars(change).values() if callable(f)))
def test_a_changed_rule_is_caught(change):
    _, script = model.campaign(partial(model.replay, rank=change), 100000, SEED)
    assert script, "not noticed"
    successors = sum(op[0] == "attach" for op in script) - 1
    assert len(script) <= 10 + max(0, successors), listing(script)
