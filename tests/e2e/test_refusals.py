# SPDX-License-Identifier: Apache-2.0
"""
Every refusal that one node can produce, provoked by trainers that execute commands (tests/programs/refusals.c).

For each refusal: its text is that of refusals/NAME.txt, with masked times and pids. The same text is in the daemon's
log and in zerodctl's JSON. Master weights, moments, weights and the journal are unchanged, byte for byte. The refusal
persists until it is cleared. At the end the job has the bits of an undisturbed one. ZEROD_UPDATE_GOLDEN=1 writes the
texts.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from conftest import Build, Daemon, environment, merge, wait_for
from keeper import KeptDaemon
from puppet import (ABORTED, FROZEN, GOLDEN, REFUSED, RESUMED, Puppet, all_do, diagnostics, form, golden, mask, memory,
                    memory_cgroup, said_alike, segments, state, steps, trainers)
from test_hostile import as_nobody, open_daemon, run  # noqa: F401

pytestmark = [pytest.mark.quick, pytest.mark.threads]

BEFORE, AFTER = 2, 4  # steps before the refusal, steps in all
UNDISTURBED = {}


@pytest.fixture(scope="session")
def undisturbed(build, tmp_path_factory):
    """undisturbed(config) -> the digest after AFTER undisturbed steps."""

    def digest(config, micro=1):
        key = json.dumps([config, micro], sort_keys=True)
        if key not in UNDISTURBED:
            daemon = Daemon(build, tmp_path_factory.mktemp("undisturbed"), config)
            ranks = trainers(daemon)
            steps(ranks, AFTER, f"micro={micro}")
            UNDISTURBED[key] = state(ranks)
            for process in daemon.others:
                process.kill()
            daemon.stop()
        return UNDISTURBED[key]

    return digest


class Scene:
    """A job after BEFORE steps. Rank 1 is the guilty rank, and rank 0 has done nothing in the open step."""

    def __init__(self, daemon, config, undisturbed, options=(), micro=1):
        self.daemon, self.config, self.undisturbed, self.micro = daemon, config, undisturbed, micro
        self.ranks = [Puppet(daemon, r).attach(*(options if r == 1 else ())) for r in range(daemon.world_size)]
        form(self.ranks)
        steps(self.ranks, BEFORE, f"micro={micro}")
        self.before = memory(daemon)

    @property
    def guilty(self):
        return self.ranks[1]

    def untouched(self):
        assert memory(self.daemon) == self.before

    def refused(self, name, answer, code=None, sticky=True):
        """The answer must be a refusal with that golden text."""
        assert answer.r == REFUSED, answer
        self.told(name, answer, code)
        if sticky:
            assert self.guilty("read 0 0").get("error") == answer.error, "it does not stick"

    def aborted(self, name, answer, code=1302):
        assert answer.r == ABORTED, answer
        self.told(name, answer, code)

    def told(self, name, answer, code=None):
        code = code or int(name[1:5])
        assert answer.error["code"] == code and answer.text.startswith(f"E{code} "), answer.text
        golden(name, answer.text)
        said_alike(self.daemon, answer.text)
        self.untouched()

    def warned(self, name):
        """The last diagnostic must be the warning with that golden text, and it must be in the log."""
        last = wait_for("a warning", lambda: diagnostics(self.daemon)[-1:])[0]
        assert last["warning"] and last["code"] == name[:5].upper(), last["text"]
        golden(name, last["text"])
        wait_for("the log", lambda: last["text"].rstrip("\n") in self.daemon.log())

    def end_all(self):
        """Rank 0 does its micro-batch, and rank 1 ends its open micro-batch."""
        self.ranks[0].ok("begin")
        self.ranks[0].ok("pushes")
        assert [a.r for a in all_do(self.ranks, "end")] == [0] * len(self.ranks)

    def goes_on(self):
        """The job must end with the bits of an undisturbed one."""
        for p in self.ranks:
            p.tell("steps", AFTER - p.ok("user").position["step"], f"micro={self.micro}")
        answers = [p.answer() for p in self.ranks]
        assert [a.r for a in answers] == [0] * len(answers), answers
        assert state(self.ranks) == self.undisturbed(self.config, self.micro)

    def abort(self):
        """The guilty rank aborts. The other ranks get the abort with their next call."""
        self.guilty.ok("abort because")
        self.untouched()


@pytest.fixture
def scene(zerod, undisturbed):
    def make(config=None, options=(), micro=1):
        return Scene(zerod(config), config or {}, undisturbed, options, micro)

    return make


STAGES = [{"zero_optimization": {"stage": n}} for n in (1, 2, 3)]


def every_stage(f):
    return pytest.mark.parametrize("config", STAGES, ids=["stage1", "stage2", "stage3"])(f)


# ---- E1001 duplicates -------------------------------------------------------------------------------------------


@every_stage
def test_duplicate(scene, config):
    """The second push is not added. After clearing, the rest of the backward gives the undisturbed bits."""
    s = scene(config)
    s.guilty.ok("begin")
    s.guilty.ok("push 1 site=train.c:5")
    s.guilty.ok("push 1 site=train.c:6")
    s.refused("e1001-duplicate", s.guilty("end"))
    s.refused("e1001-duplicate", s.guilty("step"))
    s.guilty.ok("clear")
    s.guilty.ok("pushes but=1")
    s.end_all()
    s.goes_on()


def test_duplicates_join(scene):
    """If ten parameters are pushed twice, there is one diagnostic."""
    s = scene()
    s.guilty.ok("begin")
    s.guilty.ok("pushes segment=model task=3")
    s.guilty.ok("pushes segment=model task=4")
    n = len(diagnostics(s.daemon))
    answer = s.guilty("end")
    s.refused("e1001-joined", answer)
    assert answer.error["n_params"] == 10 and len(diagnostics(s.daemon)) == n + 1
    s.abort()
    s.goes_on()


def test_duplicate_of_other_bytes(scene):
    """If the first push is already reduced, the text says whether both pushes have the same gradient."""
    s = scene()
    s.ranks[0].ok("begin")
    s.ranks[0].ok("push 7")
    s.guilty.ok("begin")
    s.guilty.ok("push 7")
    await_reduction()
    s.guilty.ok("push 7 value=1.5 at=3")
    s.refused("e1001-other-bytes", s.guilty("end"))
    s.abort()
    s.goes_on()


def await_reduction():
    """Waits for the reduction of all ranks' pushes by time, because nothing reports its end."""
    time.sleep(2)


def test_duplicate_nested(scene):
    """The records of pushes from nested graph tasks are diagnosed as reentrant checkpointing."""
    s = scene()
    s.guilty.ok("begin")
    s.guilty.ok("push 3 task=29 depth=1 flags=1 segment=h.0 call=2 site=model.py:98")
    s.guilty.ok("push 3 task=56 depth=1 flags=1 segment=h.0 call=1 site=model.py:98")
    s.refused("e1001-nested", s.guilty("end"))
    s.abort()
    s.goes_on()


def test_duplicate_accumulated(scene, zerod):
    """
    on_duplicate: accumulate. There is a warning, and the bits do not depend on the buckets and the order of the pushes.
    """
    digests = set()
    for size, order in ((2000, (3, 3)), (100, (3, 3)), (100000, (3,))):
        config = {"zero_optimization": {"reduce_bucket_size": size}, "diagnostics": {"on_duplicate": "accumulate"}}
        s = scene(config)
        s.guilty.ok("begin")
        for i in order:
            s.guilty.ok("push", i)
        s.guilty.ok("pushes but=3")
        if len(order) == 1:
            s.guilty.ok("push 3")
        s.end_all()
        assert [a.applied for a in all_do(s.ranks, "step")] == [True, True]
        if size == 2000:
            s.warned("e1001-accumulated")
        digests.add(state(s.ranks))
    assert len(digests) == 1


@pytest.mark.parametrize("where", ["configured", "asked"])
def test_duplicate_aborts_the_step(scene, where):
    config = {"diagnostics": {"on_duplicate": "abort_step"}} if where == "configured" else {}
    s = scene(config, options=["duplicate=abort_step"] if where == "asked" else [])
    s.ranks[0].tell("steps", AFTER - BEFORE)
    s.guilty.ok("begin")
    s.guilty.ok("push 1")
    s.guilty.ok("push 1")
    s.aborted("e1001-abort-step", s.guilty("end"))
    s.guilty.ok("steps", AFTER - BEFORE)
    assert s.ranks[0].answer().r == 0
    assert state(s.ranks) == s.undisturbed(s.config)


def test_more_micro_batches_than_configured(scene):
    s = scene({"gradient_accumulation_steps": 1})
    for _ in range(2):
        s.guilty.ok("begin")
        s.guilty.ok("pushes")
        s.end_all()
    s.refused("e1001-count", s.guilty("step"))
    s.abort()
    s.goes_on()


# ---- E1002, E1003, E1004: the wrong moment -------------------------------------------------------------------------


def test_stale_push(scene):
    """libzerod prevents a stale push, so this client speaks the protocol by hand."""
    s = scene()
    s.guilty.ok("close")
    text = run(s.daemon, "stale-push")
    golden("e1002-stale", text)
    said_alike(s.daemon, text)
    s.untouched()
    s.guilty.attach()
    assert s.guilty("form").r == RESUMED
    s.goes_on()


@pytest.mark.parametrize("name, calls", [
    ("e1003-push", ["push 1", "end"]),
    ("e1003-end", ["end"]),
    ("e1003-step", ["begin", "step"]),
    ("e1003-norm", ["begin", "norm"]),
    ("e1003-window", ["begin", "window"]),
    ("e1003-window-end", ["commit"]),
    ("e1003-window-state", ["put 1 1 0"]),
])
def test_early(zerod, undisturbed, name, calls):
    """The calls are refused before the first micro-batch and in the middle of one."""
    daemon = zerod()
    ranks = trainers(daemon)
    before = memory(daemon)
    for call in calls[:-1]:
        ranks[1].ok(call)
    answer = ranks[1](calls[-1])
    assert answer.r == REFUSED and answer.error["code"] == 1003, answer
    golden(name, answer.text)
    said_alike(daemon, answer.text)
    assert memory(daemon) == before
    assert ranks[1]("read 0 0").error == answer.error
    ranks[1].ok("clear")
    steps(ranks, AFTER)
    assert state(ranks) == undisturbed({})


def test_after_the_boundary(scene):
    s = scene(micro=2)
    s.guilty.ok("begin")
    s.guilty.ok("pushes")
    s.end_all()
    s.guilty.ok("push 1 site=train.c:7")
    s.guilty.ok("begin")
    s.refused("e1004-late", s.guilty("end"))
    s.guilty.ok("clear")
    s.guilty.ok("pushes")
    s.end_all()
    s.goes_on()


def test_after_the_step(scene):
    """A push after the step, as from a late hook, belongs to the last micro-batch."""
    s = scene()
    s.guilty.ok("push 1 site=train.c:7")
    s.refused("e1004-after-step", s.guilty("step"))
    s.guilty.ok("clear")
    s.goes_on()


# ---- E1005 missing ----------------------------------------------------------------------------------------------------


def test_missing(scene):
    """on_missing: error. The step is held and can be completed or aborted."""
    s = scene({"diagnostics": {"on_missing": "error"}})
    s.guilty.ok("begin")
    s.guilty.ok("pushes but=3")
    s.end_all()
    s.refused("e1005-missing", s.guilty("step"))
    s.abort()
    s.goes_on()


def test_missing_is_completed(scene):
    """The missing gradient is pushed in an additional micro-batch. Then the step succeeds."""
    s = scene({"diagnostics": {"on_missing": "error"}})
    s.guilty.ok("begin")
    s.guilty.ok("pushes but=3")
    s.end_all()
    s.refused("e1005-missing", s.guilty("step"))
    s.guilty.ok("clear")
    for p in s.ranks:
        p.ok("begin")
        p.ok("push 3")
    assert [a.r for a in all_do(s.ranks, "end")] == [0, 0]
    assert [(a.applied, a.missing) for a in all_do(s.ranks, "step")] == [(True, 0)] * 2


def test_missing_counts_for_nothing(scene):
    """on_missing: zero. A parameter without a push stays unchanged, as all ranks learn. Three steps cause a warning."""
    s = scene()
    before = [s.ranks[0](f"read 2 {kind}") for kind in (0, 1, 2)]
    for step in range(3):
        assert not diagnostics(s.daemon), f"after {step} steps"
        for p in s.ranks:
            p.ok("begin")
            p.ok("pushes but=2")
        for p in s.ranks:
            p.tell("end")
        assert [p.answer().r for p in s.ranks] == [0, 0]
        answers = all_do(s.ranks, "step")
        assert [(a.applied, a.missing) for a in answers] == [(True, 1)] * 2
    s.warned("e1005-zero")
    assert before == [s.ranks[0](f"read 2 {kind}") | {"position": before[0].position} for kind in (0, 1, 2)]


def test_missing_skips_the_step(scene):
    s = scene({"diagnostics": {"on_missing": "skip"}})
    weights = {k: v for k, v in memory(s.daemon).items() if k != "journal"}
    for p, words in zip(s.ranks, ("pushes", "pushes but=4")):
        p.ok("begin")
        p.ok(words)
    assert [a.r for a in all_do(s.ranks, "end")] == [0, 0]
    answers = all_do(s.ranks, "step")
    assert [(a.applied, a.position["step"]) for a in answers] == [(False, BEFORE + 1)] * 2
    s.warned("e1005-skipped")
    assert {k: v for k, v in memory(s.daemon).items() if k != "journal"} == weights


@pytest.mark.parametrize("name, words", [("e1005-nothing", ["begin", "end"]),
                                         ("e1005-abandoned", ["begin", "push 3", "abandon out-of-memory"])])
def test_nothing_was_pushed(scene, name, words):
    """A step without any push is refused, whatever on_missing is."""
    s = scene()
    for call in words:
        s.guilty.ok(call)
    s.refused(name, s.guilty("step"))
    s.abort()
    s.goes_on()


def test_fewer_micro_batches_than_configured(scene):
    s = scene({"gradient_accumulation_steps": 2}, micro=2)
    s.guilty.ok("begin")
    s.guilty.ok("pushes")
    s.end_all()
    s.refused("e1005-count", s.guilty("step"))
    s.guilty.ok("clear")
    s.goes_on()


# ---- E1006 a static graph ------------------------------------------------------------------------------------------------


def test_static_graph_extra(zerod, undisturbed):
    """The first step defines the set of parameters. A later push of another parameter is refused."""
    daemon = zerod({"diagnostics": {"static_graph": True}})
    ranks = trainers(daemon)
    for p in ranks:
        p.ok("begin")
        p.ok("pushes but=2")
    assert [a.r for a in all_do(ranks, "end")] == [0, 0]
    assert [a.r for a in all_do(ranks, "step")] == [0, 0]
    before = memory(daemon)
    ranks[1].ok("begin")
    ranks[1].ok("pushes")
    answer = ranks[1]("end")
    assert answer.r == REFUSED and answer.error["code"] == 1006, answer
    golden("e1006-extra", answer.text)
    said_alike(daemon, answer.text)
    assert memory(daemon) == before
    ranks[1].ok("clear")
    ranks[0].ok("begin")
    ranks[0].ok("pushes but=2")
    assert [a.r for a in all_do(ranks, "end")] == [0, 0]
    assert [(a.r, a.missing) for a in all_do(ranks, "step")] == [(0, 1)] * 2


def test_static_graph_missing(scene):
    s = scene({"diagnostics": {"static_graph": True}})
    s.guilty.ok("begin")
    s.guilty.ok("pushes but=2")
    s.end_all()
    s.refused("e1006-missing", s.guilty("step"))
    s.abort()
    s.goes_on()


# ---- E1007 abandoned ---------------------------------------------------------------------------------------------------------


def test_abandoned(scene):
    """A backward is abandoned before a push is reduced. Its pushes are dropped, and the micro-batch begins again."""
    s = scene()
    s.guilty.ok("begin")
    s.guilty.ok("push 3")
    s.guilty.ok("push 2")
    s.guilty.ok("abandon out-of-memory")
    s.warned("e1007-dropped")
    s.untouched()
    s.goes_on()


def test_abandoned_too_late(scene):
    """A backward is abandoned after a push was reduced. The step is aborted, and all texts name the guilty rank."""
    s = scene()
    for p in s.ranks:
        p.ok("begin")
        p.ok("push 7")
    await_reduction()
    s.aborted("e1007-aborted", s.guilty("abandon out-of-memory"))
    s.aborted("e1007-innocent", s.ranks[0]("end"))
    s.goes_on()


# ---- E1101 manifests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, options", [
    ("dtype", ["dtype=1"]), ("grad", ["grad=2"]), ("shape", ["shape=3"]), ("group", ["group=6"]), ("order", ["swap=0"]),
    ("name", ["name=7"]), ("longer", ["first=10"]), ("frozen", ["freeze=9"]), ("hole", ["skip=5"]),
])
def test_manifests_differ(zerod, undisturbed, name, options):
    """The job is not formed. After the different rank has come back with the right model, it is."""
    daemon = zerod({"world": {"size": 3}})
    ranks = [Puppet(daemon, r).attach(declare=("declare", *(options if r == 1 else ()))) for r in range(3)]
    answers = all_do(ranks, "form")
    assert {a.r for a in answers} == {REFUSED} and len({a.text for a in answers}) == 1
    golden(f"e1101-{name}", answers[0].text)
    said_alike(daemon, answers[0].text)
    assert daemon.status()["state"] == "waiting"
    ranks[1].attach()
    form(ranks)
    steps(ranks, AFTER)
    assert state(ranks) == undisturbed({"world": {"size": 3}})


@pytest.mark.parametrize("name, declare", [("e1101-twice", "declare"), ("e1101-twice-later", "param embed.weight 5")])
def test_declaring_twice(zerod, name, declare):
    """A name that is declared twice is refused, and is no second parameter."""
    daemon = zerod({"world": {"size": 1}})
    puppet = Puppet(daemon).attach()
    puppet.ok(declare)
    answer = puppet("form")
    assert answer.r == REFUSED, answer
    golden(name, answer.text)
    said_alike(daemon, answer.text)
    puppet.attach()
    form([puppet])


def test_declaring_nothing(zerod):
    daemon = zerod({"world": {"size": 1}})
    puppet = Puppet(daemon)
    puppet.ok("connect rank=0")
    answer = puppet("form")
    assert answer.r == REFUSED, answer
    golden("e1101-nothing", answer.text)
    said_alike(daemon, answer.text)
    puppet.ok("clear")
    puppet.ok("declare")
    form([puppet])


def test_another_model(scene):
    """A successor with another model than the run's is refused."""
    s = scene()
    s.guilty.attach(declare=("declare", "first=5"))
    answer = s.guilty("form")
    s.refused("e1101-other-model", answer, sticky=False)
    s.guilty.attach()
    assert s.guilty("form").r == RESUMED
    s.goes_on()


# ---- E1102, E1103: the wrong gradient ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, push, code", [
    ("e1102-size", "push 1 bytes=4", 1102), ("e1102-dtype", "push 1 dtype=2", 1102),
    ("e1103-unknown", "push 99", 1103), ("e1103-frozen", f"push {FROZEN}", 1103),
])
def test_wrong_gradient(scene, name, push, code):
    s = scene()
    s.guilty.ok("begin")
    s.guilty.ok("push 2")
    s.guilty.ok(push)
    s.refused(name, s.guilty("end"))
    s.guilty.ok("clear")
    s.guilty.ok("pushes but=2")
    s.end_all()
    s.goes_on()


# ---- E1106: writes to published weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, weights, param, call", [
    ("e1106-shared", "shared", 1, "step"), ("e1106-private", "private", 3, "begin"), ("e1106-frozen", "shared", FROZEN, "begin"),
])
def test_written_weights(scene, name, weights, param, call):
    """The write succeeds, but the rank gets an error before the job does. After clearing it has the job's weights."""
    s = scene({"weights": weights})
    s.guilty.ok(f"touch {param}")
    s.refused(name, s.guilty(call))
    s.guilty.ok("clear")
    s.guilty.ok("begin")
    s.guilty.ok("pushes")
    s.end_all()
    s.goes_on()


def test_write_before_a_window(scene):
    """A window is refused if weights were written before, because these writes would be lost."""
    s = scene()
    s.guilty.ok("touch 1")
    answer = s.guilty("window")
    assert answer.r == REFUSED and answer.error["code"] == 1106
    s.guilty.ok("clear")
    s.goes_on()


# ---- E1106, E1110: what ends the process --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, stage, weights, call", [
    ("e1110-read", 3, "shared", "peek 1"), ("e1106-gathered", 3, "shared", "touch 0"),
])
def test_weights_are_guarded(scene, name, stage, weights, call):
    """The process dies as without zerod, but its last message names the parameter. A successor continues."""
    s = scene({"zero_optimization": {"stage": stage}, "weights": weights})
    s.guilty.ok("gather 0")
    s.guilty.tell(call)
    assert s.guilty.popen.wait(20 * s.daemon.patience) in (-signal.SIGSEGV, 99)  # 99: a sanitizer's own handler
    text = s.guilty.err()
    text = text[text.index("E11"):]
    golden(name, text[:text.index("  call site\n")])
    assert "refusals" in text, "no call site"
    s.untouched()
    s.guilty.err_path.write_text("")
    s.ranks[1] = Puppet(s.daemon, 1).attach()
    assert s.guilty("form").r == RESUMED
    s.goes_on()


# ---- E1108 arguments of the step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, first, second", [
    ("e1108-lr", "step lr=0.001", "step lr=0.002"), ("e1108-norm", "step norm=1", "step norm=2"),
    ("e1108-no-norm", "step norm=1", "step"), ("e1108-scale", "step", "step scale=8"),
    ("e1108-groups", "step", "step lr=0.001"),
])
def test_step_arguments_differ(scene, name, first, second):
    s = scene()
    for p in s.ranks:
        p.ok("begin")
        p.ok("pushes")
    assert [a.r for a in all_do(s.ranks, "end")] == [0, 0]
    s.ranks[0].tell(first)
    wait_for("rank 0 asks", lambda: s.daemon.json("ranks")[0]["state"] == "step")
    s.refused(name, s.guilty(second))
    s.guilty.ok("abort because")
    answer = s.ranks[0].answer()
    assert answer.r == ABORTED
    s.goes_on()


def test_step_arguments_agree_after_all(scene):
    """The text describes a remedy, and the remedy works."""
    s = scene()
    for p in s.ranks:
        p.ok("begin")
        p.ok("pushes")
    assert [a.r for a in all_do(s.ranks, "end")] == [0, 0]
    s.ranks[0].tell("step")
    wait_for("rank 0 asks", lambda: s.daemon.json("ranks")[0]["state"] == "step")
    assert s.guilty("step norm=2").r == REFUSED
    s.untouched()
    s.guilty.ok("clear")
    s.guilty.ok("step")
    assert s.ranks[0].answer().r == 0
    s.goes_on()


# ---- E1109 another run ---------------------------------------------------------------------------------------------------------------


def test_another_run(scene):
    s = scene(options=["run=pretrain-7b"])
    s.guilty.ok("close")
    answer = s.guilty("connect rank=1 run=pretrain-8b")
    s.refused("e1109-other-run", answer, sticky=False)
    s.guilty.ok("close")
    s.guilty.attach("run=pretrain-7b")
    assert s.guilty("form").r == RESUMED
    s.goes_on()
    for p in s.ranks:
        p.ok("close")
    wait_for("they are gone", lambda: s.daemon.status()["n_attached"] == 0)
    assert s.daemon.status()["run_id"] == "pretrain-7b"
    s.daemon.ctl("drop")
    for p in s.ranks:
        p.attach("run=pretrain-8b")
    form(s.ranks)
    steps(s.ranks, AFTER)
    assert state(s.ranks) == s.undisturbed(s.config)


def test_no_state_no_run(zerod):
    """A run that never formed leaves no name behind."""
    daemon = zerod({"world": {"size": 2}})
    puppet = Puppet(daemon)
    puppet.ok("connect rank=0 run=one")
    puppet.ok("close")
    wait_for("it is gone", lambda: daemon.status()["n_attached"] == 0)
    assert puppet("connect rank=0 run=two").r == 0


# ---- E1201, E1202 values -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, value", [("nan", "nan"), ("inf", "inf"), ("negative", "-inf")])
def test_nonfinite_is_skipped(scene, kind, value):
    """on_nonfinite: skip. All ranks skip the step, and state and weights are unchanged."""
    s = scene()
    before = {k: v for k, v in s.before.items() if k != "journal"}
    for p, word in zip(s.ranks, ("pushes", "pushes but=1")):
        p.ok("begin")
        p.ok(word)
    s.guilty.ok(f"push 1 value={value} at=17")
    assert [a.r for a in all_do(s.ranks, "end")] == [0, 0]
    answers = all_do(s.ranks, "step")
    assert [(a.applied, a.position["step"]) for a in answers] == [(False, BEFORE + 1)] * 2
    s.warned(f"e1201-{kind}")
    assert {k: v for k, v in memory(s.daemon).items() if k != "journal"} == before
    steps(s.ranks)


def provoke(s, value="nan", param=3):
    """Makes a step with a value that is not finite. Rank 0 waits in the step."""
    for p, word in zip(s.ranks, ("pushes", f"pushes but={param}")):
        p.ok("begin")
        p.ok(word)
    s.guilty.ok(f"push {param} value={value} at=5")
    assert [a.r for a in all_do(s.ranks, "end")] == [0, 0]
    s.ranks[0].tell("step")
    wait_for("rank 0 asks", lambda: s.daemon.json("ranks")[0]["state"] == "step")


@every_stage
def test_nonfinite_is_held(scene, config):
    s = scene(merge(config, {"diagnostics": {"on_nonfinite": "error"}}))
    provoke(s)
    s.refused("e1201-held", s.guilty("step"))
    assert not s.ranks[0].has_answered()
    s.guilty.ok("abort because")
    assert s.ranks[0].answer().r == ABORTED
    s.goes_on()


def test_nonfinite_goes_on(scene):
    """on_nonfinite: error. After it is cleared and asked for again, the step is skipped."""
    s = scene({"diagnostics": {"on_nonfinite": "error"}})
    provoke(s)
    assert s.guilty("step").r == REFUSED
    s.guilty.ok("clear")
    assert not s.guilty.ok("step").applied
    assert not s.ranks[0].answer().applied


def test_overflow_of_the_sum(scene):
    """Each rank's gradient is finite, but their sum is not."""
    s = scene({"diagnostics": {"on_nonfinite": "error"}})
    for p in s.ranks:
        p.ok("begin")
        p.ok("pushes but=1")
        p.ok("push 1 value=3e38 at=9")
    assert [a.r for a in all_do(s.ranks, "end")] == [0, 0]
    s.ranks[1].tell("step")
    wait_for("rank 1 asks", lambda: s.daemon.json("ranks")[1]["state"] == "step")
    s.ranks[0].tell("step")
    wait_for("somebody is told", lambda: s.ranks[0].has_answered() or s.ranks[1].has_answered())
    told, other = (s.ranks if s.ranks[0].has_answered() else s.ranks[::-1])
    answer = told.answer()
    assert answer.r == REFUSED
    s.told("e1201-overflow", answer)
    told.ok("abort because")
    assert other.answer().r == ABORTED
    s.goes_on()


AT_MINIMUM = {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 0, "hysteresis": 1}}


@pytest.mark.parametrize("name, value, asked", [("e1202-minimum", "inf", "step"), ("e1202-found-inf", "0.1", "step inf=1")])
def test_loss_scale_at_its_minimum(scene, name, value, asked):
    """With a dynamic loss scale of 1, which cannot be lowered, the step is skipped on all ranks."""
    s = scene(AT_MINIMUM)
    before = {k: v for k, v in s.before.items() if k != "journal"}
    provoke(s, value)
    answers = [s.guilty(asked), s.ranks[0].answer()]
    assert [(a.r, a.get("applied"), a.get("scale")) for a in answers] == [(0, False, 1)] * 2, answers
    s.warned(name)
    assert {k: v for k, v in memory(s.daemon).items() if k != "journal"} == before
    steps(s.ranks)


def test_loss_scale_holds_the_step(scene):
    """on_nonfinite: error. At the minimum of the loss scale a skipped step would not help, so it is refused."""
    s = scene(AT_MINIMUM | {"diagnostics": {"on_nonfinite": "error"}})
    provoke(s, "inf")
    s.refused("e1202-held", s.guilty("step"))
    s.guilty.ok("clear")
    assert [s.guilty.ok("step").applied, s.ranks[0].answer().applied] == [False, False]


def test_loss_scale_is_lowered_before(scene):
    """Above its minimum, a dynamic loss scale skips the step without a message, whatever on_nonfinite is."""
    s = scene({"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 3, "hysteresis": 1},
               "diagnostics": {"on_nonfinite": "error"}})
    n = len(diagnostics(s.daemon))
    provoke(s, "inf")
    answers = [s.guilty("step"), s.ranks[0].answer()]
    assert [(a.r, a.get("applied"), a.get("scale")) for a in answers] == [(0, False, 4)] * 2, answers
    assert len(diagnostics(s.daemon)) == n and s.daemon.status()["n_skipped"] == 1


# ---- E1301, E1302, E1303: ranks -------------------------------------------------------------------------------------------------------------


def test_rank_taken(scene):
    s = scene()
    second = Puppet(s.daemon, 1)
    answer = second("connect rank=1")
    assert answer.r == REFUSED, answer
    s.told("e1301-taken", answer)
    assert second("declare").r < 0  # only closing is allowed now
    s.goes_on()


def test_rank_lost(scene):
    """A rank dies. The surviving ranks wait without an error, and the successor ends with the same bits."""
    s = scene()
    s.ranks[0].tell("steps", AFTER - BEFORE)
    s.guilty.ok("begin")
    s.guilty.ok("push 3")
    s.guilty.kill()
    wait_for("its end is noticed", lambda: "E1302" in s.daemon.log())
    s.warned("e1302-lost")
    s.ranks[1] = Puppet(s.daemon, 1).attach()
    assert s.guilty("form").r == RESUMED
    s.guilty.ok("steps", AFTER - BEFORE)
    assert s.ranks[0].answer().r == 0
    assert state(s.ranks) == s.undisturbed(s.config)


def test_nobody_comes_back(scene):
    s = scene({"limits": {"reattach_timeout": "1s"}})
    s.ranks[0].ok("begin")
    s.ranks[0].ok("pushes")
    s.ranks[0].tell("end")
    s.guilty.kill()
    s.aborted("e1302-given-up", s.ranks[0].answer())
    s.ranks[1] = Puppet(s.daemon, 1).attach()
    assert s.guilty("form").r == RESUMED
    s.goes_on()


def test_successor_differs(scene):
    """A successor must push the same gradients as its predecessor."""
    s = scene()
    for p in s.ranks:
        p.ok("begin")
        p.ok("pushes")
    await_reduction()
    s.guilty.kill()
    s.ranks[1] = Puppet(s.daemon, 1).attach()
    assert s.guilty("form").r == RESUMED
    s.guilty.ok("begin")
    s.guilty.ok("push 1 value=0.25 at=700")
    wait_for("it is compared", lambda: s.daemon.status()["counters"]["n_aborts"] == 1)
    s.aborted("e1302-differs", s.guilty("end"))
    s.aborted("e1302-differs-innocent", s.ranks[0]("end"))
    s.goes_on()


def test_rank_left(zerod):
    """on_leave: stop. The other rank gets an error after a rank has left."""
    daemon = zerod()
    ranks = trainers(daemon)
    steps(ranks, 2)
    before = memory(daemon)
    ranks[0].tell("steps 1")
    ranks[1].ok("leave")
    answer = ranks[0].answer()
    assert answer.r == REFUSED and answer.error["code"] == 1302
    golden("e1302-left", answer.text)
    said_alike(daemon, answer.text)
    assert memory(daemon) == before
    ranks[0].ok("leave")


def test_aborted_by_an_administrator(scene):
    s = scene()
    s.ranks[0].ok("begin")
    s.ranks[0].ok("pushes")
    s.ranks[0].tell("end")
    wait_for("rank 0 waits", lambda: s.daemon.json("ranks")[0]["waiting_for"])
    said = s.daemon.ctl("abort-step").stdout
    n = len(s.ranks)
    assert said.startswith(f"the step is aborted, which the next call of each rank says ({n} attached to this daemon): "
                           "loops over zerod.steps() begin it again, others end with zerod.StepAborted, ")
    s.aborted("e1302-administrator", s.ranks[0].answer())
    assert s.guilty("norm").r == ABORTED
    s.goes_on()


STALLS = {"diagnostics": {"stall_warning": "300ms"}}


def test_stalled(scene):
    """A warning names the waiting rank and the late one. It is repeated, and has no other effect."""
    s = scene(STALLS)
    s.ranks[0].tell("steps", AFTER - BEFORE)
    wait_for("it is said twice", lambda: s.daemon.log().count("E1303") >= 2)
    s.warned("e1303-stalled")
    s.guilty.ok("steps", AFTER - BEFORE)
    assert s.ranks[0].answer().r == 0
    assert state(s.ranks) == s.undisturbed(s.config)


def test_stalled_for_too_long(scene):
    s = scene({"diagnostics": {"stall_warning": "300ms", "stall_timeout": "1s"}})
    s.ranks[0].ok("begin")
    s.ranks[0].ok("pushes")
    s.ranks[0].tell("end")
    s.aborted("e1303-given-up", s.ranks[0].answer())
    assert s.guilty("norm").r == ABORTED
    s.goes_on()


def test_waiting_for_each_other(scene):
    """Ranks call different collectives, so no call could ever be answered. All are refused."""
    s = scene({"diagnostics": {"stall_warning": "300ms", "stall_timeout": "3s"}})
    s.ranks[0].ok("begin")
    s.ranks[0].ok("pushes")
    s.ranks[0].tell("end")
    s.guilty.tell("window")
    wait_for("it is said", lambda: "E1303" in s.daemon.log(), 3 * s.daemon.patience)
    s.warned("e1303-different-calls")
    s.aborted("e1303-different-calls-aborted", s.ranks[0].answer())
    assert s.guilty.answer().r == ABORTED
    s.goes_on()


def test_a_world_that_does_not_come_together(zerod, undisturbed):
    """E1303 names the missing ranks. After the time-out the waiting ranks are refused, and may try again."""
    daemon = zerod({"world": {"size": 3}, "diagnostics": {"stall_warning": "300ms", "stall_timeout": "2s"}})
    ranks = [Puppet(daemon, r) for r in range(3)]
    ranks[0].attach()
    ranks[2].ok("connect rank=2")
    ranks[0].tell("form")
    wait_for("it is said", lambda: "E1303" in daemon.log())
    assert "rank 1 (never attached); rank 2 (pid" in daemon.log()
    last = diagnostics(daemon)[-1]
    golden("e1303-forming", last["text"])
    answer = ranks[0].answer()
    assert answer.r == REFUSED and answer.error["code"] == 1303
    golden("e1303-not-formed", answer.text)
    said_alike(daemon, answer.text)
    ranks[1].attach()
    ranks[2].ok("declare")
    form(ranks)
    steps(ranks, AFTER)
    assert state(ranks) == undisturbed({"world": {"size": 3}})


SGD = {"type": "SGD", "params": {"lr": 1e-3, "betas": None, "momentum": 0.9}}


@pytest.mark.parametrize("name, put, config", [
    ("e1403-state-frozen", f"put {FROZEN} 0 1", {}),
    ("e1403-state-moment", "put 1 2 1", {"optimizer": SGD}),
])
def test_state_that_is_none(scene, name, put, config):
    """A wrong state is refused on every rank, although only rank 0's counts. The window can end, or be forgotten."""
    s = scene(config)
    all_do(s.ranks, "window")
    assert s.ranks[0](put).error["code"] == 1403
    answer = s.guilty(put)
    assert answer.r == REFUSED and s.guilty("commit").error == answer.error
    s.told(name, answer)
    for p in s.ranks:
        p.ok("clear")
    all_do(s.ranks, "forget")
    steps(s.ranks, AFTER - BEFORE)


# ---- E1401 limits -----------------------------------------------------------------------------------------------------------------------------


def fill_slots(s, param):
    """Pushes passes of a bucket that no other rank pushes, until there is no slot for another one."""
    s.guilty.ok("begin")
    for _ in range(400):
        answer = s.guilty("push", param)
        if answer.r != 0:
            return answer
    raise AssertionError("slots without end")


def test_slots_are_used_up(scene):
    s = scene({"diagnostics": {"on_duplicate": "accumulate"}})
    s.refused("e1401-slots", fill_slots(s, 7))
    s.abort()
    s.goes_on()


@pytest.mark.parametrize("name, param", (("e1401-overflow", 1), ("e1401-late", 0)))
def test_ring_and_overflow_are_full(zerod, name, param):
    """The ring has room for few parameters. Gradients behind parameter 1's bucket, the first, use the overflow."""
    daemon = zerod({"diagnostics": {"on_duplicate": "accumulate"}})
    s = Scene.__new__(Scene)
    s.daemon, s.ranks = daemon, trainers(daemon, declare=("many", 2, "elems=300000"))
    steps(s.ranks)
    s.before = memory(daemon)
    s.refused(name, fill_slots(s, param))
    assert daemon.log().count("E1401") == 1, "as long as there is memory, nothing is wrong"
    s.abort()
    steps(s.ranks)


def test_live_parameters(scene):
    """Stage 3: a gather above stage3_max_live_parameters is refused at once, and nothing of it stays gathered."""
    s = scene({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 3300}})
    s.guilty.ok("gather 7")
    s.refused("e1401-live", s.guilty("gather 0"))
    s.guilty.ok("clear")
    s.guilty.ok("gather 2")
    s.guilty.ok("release 7")
    s.guilty.ok("gather 0")
    s.guilty.ok("release 0")
    s.guilty.ok("release 2")
    s.goes_on()


def refused_forming(daemon, puppet, name):
    before = segments(daemon)
    answer = puppet("form")
    assert answer.r == REFUSED and answer.error["code"] == 1401, answer
    golden(name, answer.text if "limits" in name else re.sub(r"(?m)^(  allowed        |.* by )\d+ bytes", r"\1N bytes", answer.text))
    said_alike(daemon, answer.text)
    assert segments(daemon) == before, "memory was taken"
    assert daemon.status()["state"] == "waiting"


def test_memory_over_the_limit(zerod):
    """A model above limits.memory is refused with the sum for each class. A smaller model is accepted."""
    daemon = zerod({"world": {"size": 1}, "limits": {"memory": "20MiB"}})
    puppet = Puppet(daemon).attach(declare=("param", "huge", 4 << 20))
    refused_forming(daemon, puppet, "e1401-limits-memory")
    puppet.attach()
    form([puppet])
    steps([puppet])


def test_state_over_the_limit(zerod):
    """A window accepts as much state as there is room for. The rest needs another window."""
    daemon = zerod({"world": {"size": 1}, "limits": {"memory": "24MiB"}})
    puppet = Puppet(daemon).attach(declare=("param", "large", 1 << 20))
    form([puppet])
    steps([puppet])
    before = memory(daemon)
    puppet.ok("window")
    answer = puppet("put 0 1 1")
    assert answer.r == REFUSED and answer.error["code"] == 1401, answer
    golden("e1401-state", re.sub(r"(?m)^(  held           )\d+ bytes", r"\1N bytes", answer.text))
    said_alike(daemon, answer.text)
    assert memory(daemon) == before
    assert puppet("commit").error == answer.error
    puppet.ok("clear")
    puppet.ok("put 0 4 5")
    puppet.ok("commit")
    assert puppet.ok("read 0 4").value == 5
    steps([puppet])


def test_memory_over_what_is_free(zerod):
    daemon = zerod({"world": {"size": 1}})
    puppet = Puppet(daemon)
    puppet.ok("connect rank=0")
    puppet.ok("huge")
    refused_forming(daemon, puppet, "e1401-machine")
    puppet.attach()
    form([puppet])


def test_memory_over_the_address_space(zerod, build):
    """The text blames the daemon's own limit, not the machine."""
    if build.sanitize:
        pytest.skip("sanitizers need more address space than any limit leaves")
    daemon = zerod({"world": {"size": 1}}, prefix=["sh", "-c", 'ulimit -v 2000000; exec "$@"', "sh"])
    puppet = Puppet(daemon).attach(declare=("param", "huge", 128 << 20))
    refused_forming(daemon, puppet, "e1401-address-space")
    puppet.attach()
    form([puppet])
    steps([puppet])


def test_memory_over_the_cgroup(zerod):
    """A memfd beyond a cgroup's limit causes an OOM kill instead of an error, so the daemon checks the limit before."""
    with memory_cgroup(64 << 20) as cgroup:
        daemon = zerod({"world": {"size": 1}})
        cgroup.take(daemon.pid)
        puppet = Puppet(daemon).attach(declare=("param", "huge", 8 << 20))
        refused_forming(daemon, puppet, "e1401-cgroup")
        puppet.attach()
        form([puppet])
        steps([puppet])
        daemon.stop()


@pytest.mark.parametrize("words, name", [
    ("lr=nan", "lr"), ("lr=inf", "lr"), ("lr=-0.5", "lr"), ("lr=1e300", "lr"), ("norm=nan", "max_norm"),
    ("norm=-1", "max_norm"), ("norm=inf", "max_norm"), ("scale=nan", "loss_scale"), ("scale=-2", "loss_scale")])
def test_wrong_arguments_of_a_step(scene, words, name):
    """
    The library refuses the arguments. Nothing is sent, the weights stay readable, and the step can be asked for again.
    """
    s = scene()
    answer = s.guilty("step", words)
    assert answer.r == REFUSED and f"{name}" in answer.text and "expected" in answer.text, answer
    s.guilty.ok("peek 0")
    s.guilty.ok("clear")
    s.goes_on()


# ---- E1402, E1403: who and what -------------------------------------------------------------------------------------------------------------------


def test_not_allowed(open_daemon):  # noqa: F811
    daemon = open_daemon(allow_users=["65533"])
    text = as_nobody(daemon, "foreign", 1)
    golden("e1402-connect", text)
    said_alike(daemon, text)


def test_not_an_administrator(open_daemon):  # noqa: F811
    daemon = open_daemon(allow_users=["65534"])
    code, answer = as_nobody(daemon, "admin", 2).split(" ", 1)
    text = json.loads(answer)["error"]
    golden("e1402-admin", text)
    said_alike(daemon, text)


def test_draining(scene):
    """While the daemon drains, no rank may attach, and the attached ranks continue."""
    s = scene()
    s.guilty.ok("close")
    s.daemon.ctl("drain")
    answer = s.guilty("connect rank=1")
    s.refused("e1402-draining", answer, sticky=False)
    s.ranks[0].ok("close")
    assert s.daemon.wait(20) == 0
    assert "drained" in s.daemon.log()


@pytest.mark.parametrize("attack", ["other-version", "rank-beyond-world", "oversized", "descriptors", "control-pushes",
                                    "ticket-range", "offset-unaligned", "large-blob", "wrong-count", "late-init"])
def test_bad_message(scene, attack):
    s = scene()
    s.guilty.ok("close")
    text = re.split(r"(?<=\n)\n", run(s.daemon, attack))[0]
    golden(f"e1403-{attack}", text)
    said_alike(s.daemon, text)
    s.untouched()
    s.guilty.attach()
    assert s.guilty("form").r == RESUMED
    s.goes_on()


# ---- forming ------------------------------------------------------------------------------------------------------------------------------------------


def test_ten_thousand_parameters(zerod):
    daemon = zerod({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5000}})
    ranks = trainers(daemon, declare=("many", 10000, "elems=3"))
    steps(ranks, 2)
    params = daemon.json("params")
    assert len(params["params"] if isinstance(params, dict) else params) == 10000
    assert daemon.status()["step"] == 2


@pytest.mark.parametrize("elems", [0, 1])
def test_parameters_of_nothing(zerod, elems):
    """A model whose parameters have no element, or one each, works."""
    daemon = zerod()
    ranks = trainers(daemon, declare=("many", 5, f"elems={elems}"))
    steps(ranks, 3)
    state(ranks)


def test_names_of_odd_bytes(zerod):
    """Names may contain any bytes, and are shown exactly."""
    names = ["%00", "%00%00", "a%20b", "%0a%0d%09", "%ff%fe", "%22%5c", "%1b[31m", "\u00fc", "x" * 1024]
    daemon = zerod()
    ranks = [Puppet(daemon, r) for r in range(2)]
    for p in ranks:
        p.ok("connect", f"rank={p.rank}")
        for name in names:
            p.ok("param", name, 70)
    form(ranks)
    steps(ranks, 2)
    params = daemon.json("params")
    shown = [p["name"] for p in (params["params"] if isinstance(params, dict) else params)]
    assert len(set(shown)) == len(names) and all(c.isprintable() for name in shown for c in name), shown
    ranks[1].ok("begin")
    for i in range(len(names)):
        ranks[1].ok("push", i)
        ranks[1].ok("push", i)
    answer = ranks[1]("end")
    golden("e1001-odd-names", answer.text)
    said_alike(daemon, answer.text)
    assert daemon.ctl("diagnostics").stdout.isprintable() or "\x1b" not in daemon.ctl("diagnostics").stdout


# ---- E1601 and the start ----------------------------------------------------------------------------------------------------------------------------------


GOOD = "job: test\nlisten: {socket: SOCKET}\nworld: {size: 1}\n"


@pytest.mark.parametrize("name, text", [
    ("unknown-key", GOOD + "zero_optimisation: {stage: 2}\n"),
    ("duplicate-key", GOOD + "threads: 1\nthreads: 2\n"),
    ("wrong-type", GOOD.replace("1}", "two}")),
    ("out-of-range", GOOD + "zero_optimization: {stage: 4}\n"),
    ("syntax", GOOD + "threads: [1\n"),
    ("long-path", GOOD.replace("SOCKET", "/" + "d" * 107)),
    ("several", GOOD.replace("1}", "0}") + "gradient_clipping: -1\nlimits: {clients: many}\n"),
])
def test_configuration(build, tmp_path, name, text):
    """
    zerod --check reports every problem at once with its place, and exits with 78. The daemon does not start either.
    """
    path = tmp_path / "zerod.yaml"
    path.write_text(text.replace("SOCKET", str(tmp_path / "s")))
    for more in (["--check"], []):
        result = subprocess.run([build.path("daemon/zerod"), "--config", path, *more], capture_output=True, text=True,
                                timeout=20 * build.patience, env=environment())
        assert (result.returncode, result.stdout) == (os.EX_CONFIG, ""), result
        golden(f"e1601-{name}", result.stderr.replace(str(tmp_path), "FOLDER"))


def start(build, folder, socket_path, setpriv=()):
    """Starts a daemon that must fail. Return: its exit status and standard error."""
    path = Path(folder) / "other.yaml"
    path.write_text(GOOD.replace("SOCKET", str(socket_path)))
    path.chmod(0o644)
    result = subprocess.run([*setpriv, build.path("daemon/zerod"), "--config", path], capture_output=True, text=True,
                            timeout=20 * build.patience, env=environment())
    return result.returncode, result.stderr.replace(str(folder), "FOLDER")


def test_missing_file(build, tmp_path):
    result = subprocess.run([build.path("daemon/zerod"), "--config", tmp_path / "none.yaml"], capture_output=True, text=True,
                            timeout=20 * build.patience, env=environment())
    assert result.returncode == os.EX_CONFIG, result
    golden("start-missing-file", result.stderr.replace(str(tmp_path), "FOLDER"))


def test_stale_socket_file(zerod, build, tmp_path):
    """The socket file of a killed daemon does not keep the next one from starting."""
    first = zerod()
    first.kill()
    assert first.socket.exists()
    second = Daemon(build, first.folder)
    ranks = trainers(second)
    steps(ranks)
    for p in ranks:
        p.kill()
    second.stop()


def test_second_daemon(zerod, build):
    """A second daemon reports the first one and exits. The first one is not disturbed."""
    daemon = zerod()
    ranks = trainers(daemon)
    ranks[0].tell("steps 1")
    status, text = start(build, daemon.folder, daemon.socket)
    assert status == os.EX_UNAVAILABLE
    golden("start-second", text)
    ranks[1].ok("steps 1")
    assert ranks[0].answer().r == 0


def test_a_file_that_is_no_socket(build, tmp_path):
    (tmp_path / "s").write_text("precious")
    status, text = start(build, tmp_path, tmp_path / "s")
    assert status == os.EX_UNAVAILABLE
    golden("start-file", text)
    assert (tmp_path / "s").read_text() == "precious"


def test_a_socket_of_another_kind(build, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()
        status, text = start(build, tmp_path, tmp_path / "s")
    assert status == os.EX_UNAVAILABLE
    golden("start-other-socket", text)
    assert (tmp_path / "s").exists()


def test_no_directory(build, tmp_path):
    status, text = start(build, tmp_path, tmp_path / "none" / "s")
    assert status == os.EX_CONFIG
    golden("start-no-directory", text)


def test_directory_not_writable(build):
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        program = shutil.copy(build.path("daemon/zerod"), folder)

        class Copy:
            patience = build.patience
            path = staticmethod(lambda name: program)

        status, text = start(Copy, folder, Path(folder) / "s", ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"])
        assert status == os.EX_NOPERM, text
        golden("start-not-writable", text)


# ---- E1305: the daemon is stopped --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number, formed, name", [
    (signal.SIGTERM, True, "e1305-not-kept"), (signal.SIGINT, True, "e1305-kept"), (signal.SIGINT, False, "e1305-forming")])
def test_daemon_is_stopped(build, tmp_path, number, formed, name):
    """All ranks get an error, whether they wait in a call or compute, and the socket is removed."""
    kind = Daemon if name == "e1305-not-kept" else KeptDaemon
    daemon = kind(build, tmp_path)
    try:
        ranks = [Puppet(daemon, r).attach() for r in range(2)]
        if formed:
            form(ranks)
            steps(ranks, BEFORE)
        ranks[0].tell("steps 1" if formed else "form")
        wait_for("rank 0 waits", lambda: daemon.json("ranks")[0]["waiting_for"])
        daemon.signal(number)
        answers = [ranks[0].answer(5), ranks[1]("steps 1" if formed else "form")]
        assert [a.error["code"] for a in answers] == [1305] * 2, answers
        golden(name, answers[0].text)
        assert answers[1].text == answers[0].text
        wait_for("the end", lambda: not daemon.running())
        assert answers[0].text.rstrip("\n") in daemon.log() and daemon.log().count("E130") == 1, daemon.log()
        assert "the next daemon goes on with it" not in daemon.log()
        daemon.stop()  # exit status 0, and the socket is removed
    finally:
        daemon.kill()


# ---- nothing is forgotten ------------------------------------------------------------------------------------------------------------------------------------


def test_every_code_and_every_text():
    """Each code that one node can produce has a text here or in test_evidence.py, and each text is used."""
    names = [path.stem for path in GOLDEN.glob("*.txt")]
    codes = {name[1:5] for name in names if name[0] == "e"}
    # E1501 to E1503 need several nodes.
    assert codes == {"1001", "1002", "1003", "1004", "1005", "1006", "1007", "1101", "1102", "1103", "1104", "1105", "1106",
                     "1107", "1108", "1109", "1110", "1201", "1202", "1301", "1302", "1303", "1305", "1401", "1402", "1403", "1601"}
    source = "".join(Path(__file__).with_name(name).read_text() for name in ("test_refusals.py", "test_evidence.py"))
    for name in names:
        code, _, rest = name.partition("-")
        assert f'"{name}"' in source or f'"{rest}"' in source or f'"{code}-{{' in source, f"{name}.txt is left over"
