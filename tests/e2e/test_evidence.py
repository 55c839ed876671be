# SPDX-License-Identifier: Apache-2.0
"""
A client's additions to a refusal: evidence of why gradients are missing, faults that only the client can detect, and
waits that a signal ends. These clients name torch in their Hello, so the texts are those for a PyTorch program.
"""

import errno
import os
import re
import signal
import time

import pytest

from conftest import wait_for
from puppet import REFUSED, RESUMED, Puppet, all_do, diagnostics, golden, trainers
from test_refusals import scene, undisturbed  # noqa: F401

pytestmark = [pytest.mark.quick, pytest.mark.threads]

TORCH = ["client=zerod-torch"]
ERROR = {"diagnostics": {"on_missing": "error"}}
SWALLOWED = "swallowed=gliner/training/trainer.py:216_training_step"


# ---- E1005 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, words", [
    ("e1005-forward-failed", ["evidence exception=RuntimeError:_shape_'[8,_17]'_is_invalid raised=model.py:98 "
                              f"{SWALLOWED} forward=1 forwards=1"]),
    ("e1005-detached", ["evidence forwards=2"]),
    ("e1005-detached-later", ["begin", "end", "evidence forwards=2"]),
    ("e1005-backward-failed", ["begin", "push 3", "abandon RuntimeError",
                               "evidence exception=RuntimeError:_CUDA_out_of_memory_(injected) raised=trainer.py:12 "
                               f"{SWALLOWED} forwards=1 backwards=1"]),
    ("e1005-given-up", ["begin", "push 3", "abandon optimizer.zero_grad()-came-before-the-step"]),
])
def test_no_backward_or_half_of_one(scene, name, words):  # noqa: F811
    s = scene(options=TORCH)
    for call in words:
        s.guilty.ok(call)
    s.refused(name, s.guilty("step"))
    s.abort()
    s.goes_on()


@pytest.mark.parametrize("name, evidence", [
    ("e1005-dead-segment", "segment=h.0.attn segments=2 site=model.py:41 forwards=1 backwards=1 called=1,2"),
    ("e1005-frozen-later", "grad=1 forwards=1 backwards=1"),
    ("e1005-data-dependent", "forwards=1 backwards=1 not_called=1,2"),
])
def test_some_are_missing(scene, name, evidence):  # noqa: F811
    s = scene(ERROR, TORCH)
    s.guilty.ok("begin")
    s.guilty.ok("pushes but=1,2")
    s.end_all()
    s.guilty.ok(f"evidence {evidence}")
    s.refused(name, s.guilty("step"))
    s.abort()
    s.goes_on()


def test_never_used(zerod):
    """All ranks miss the same gradients from the first step on. The text says which modules ran."""
    ranks = trainers(zerod(ERROR), options=TORCH)
    for words in ("begin", "pushes but=1,2,9,10", "end", "evidence not_called=9,10 called=1,2 forwards=1 backwards=1"):
        assert [a.r for a in all_do(ranks, words)] == [0, 0]
    answer = ranks[1]("step")
    assert (answer.r, answer.error["class"], answer.error["n_params"]) == (REFUSED, "M1", 4)
    golden("e1005-never-used", answer.text)


def test_warning(scene):  # noqa: F811
    """
    on_missing: zero. A warning reports a rank's evidence at once, and gradients without evidence after three steps.
    """
    s = scene(options=TORCH)
    s.ranks[0].ok("close")  # the ranks of a real job run one program
    s.ranks[0].attach(*TORCH)
    s.ranks[0].tell("form")
    assert s.ranks[0].answer().r == RESUMED
    segment = "evidence segment=h.0.attn segments=1 site=model.py:41"
    for name, but, evidence in (("e1005-dead-segment-warning", "1,2", segment), (None, "4", "user"), (None, "4", "user"),
                                ("e1005-next-step", "4", "user")):
        n = len(diagnostics(s.daemon))
        for p, words in zip(s.ranks, ("pushes", f"pushes but={but}")):
            p.ok("begin")
            p.ok(words)
        assert [a.r for a in all_do(s.ranks, "end")] == [0, 0]
        s.guilty.ok(evidence)
        assert [a.applied for a in all_do(s.ranks, "step")] == [True, True]
        if name is None:
            assert len(diagnostics(s.daemon)) == n
        else:
            s.warned(name)


def test_evidence_of_what_came(scene):  # noqa: F811
    """Evidence alone refuses no step: if all gradients were pushed, the step is applied."""
    s = scene(ERROR, TORCH)
    for p in s.ranks:
        p.ok("begin")
        p.ok("pushes")
    assert [a.r for a in all_do(s.ranks, "end")] == [0, 0]
    n = len(diagnostics(s.daemon))
    s.guilty.ok("evidence exception=ValueError segment=h.0 grad=1 not_called=1")
    assert [a.applied for a in all_do(s.ranks, "step")] == [True, True]
    assert len(diagnostics(s.daemon)) == n
    s.goes_on()


def test_evidence_is_cut(scene):  # noqa: F811
    """A very long exception and a call with too many parameters are cut, and the connection stays open."""
    s = scene(options=TORCH)
    s.guilty.ok(f"evidence exception={'x' * 1019}\u00e9\u00e9{'y' * 5000} forwards=1")
    answer = s.guilty("step")
    assert answer.r == REFUSED and f" {'x' * 1019} ...\n" in answer.text, "cut inside a character"
    assert s.guilty("evidence called=1,11").error["text"] == "zerod_evidence: no parameter 11"
    s.abort()
    s.guilty.ok("begin")
    s.guilty.ok(f"abandon {'z' * 5000}")
    s.goes_on()


# ---- reports ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, call", [
    ("e1102-torch", "report 1102 params=3 detail=a_gradient_that_is_torch.sparse_coo"),
    ("e1104-torch", "report 1104 params=3,9 detail=data_ptr_of_h.0.mlp.weight_is_not_where_zerod_publishes_it"),
    ("e1105-torch", "report 1105 params=3 detail=the_checksum_differs_from_rank_0's"),
    ("e1106-torch", "report 1106 params=3"), ("e1107-torch", "report 1107"), ("e1110-torch", "report 1110 params=1"),
])
def test_reports(scene, name, call):  # noqa: F811
    """The step is refused before anything is applied. After clearing, it succeeds."""
    s = scene(options=TORCH)
    for p in s.ranks:
        p.ok("begin")
        p.ok("pushes")
    assert [a.r for a in all_do(s.ranks, "end")] == [0, 0]
    s.guilty.ok(call)
    s.refused(name, s.guilty("step"))
    s.guilty.ok("clear")
    s.goes_on()


def test_report_before_forming(zerod):
    """E1107: the wrapped model is reported before zerod_form()."""
    daemon = zerod({"world": {"size": 1}})
    p = Puppet(daemon).attach(*TORCH)
    assert p("report 1107 params=1").error["text"] == "zerod_report: no parameter 1, as zerod_form was not called"
    p.ok("report 1107 detail=DistributedDataParallel")
    assert [(p("form").r, p("form").error["code"]) for _ in range(2)] == [(REFUSED, 1107)] * 2
    p.ok("clear")
    assert p("form").r == 0


def test_report_of_another_code(scene):  # noqa: F811
    s = scene()
    assert s.guilty("report 1001").error["text"] == "zerod_report: 1001, expected 1102 to 1107 or 1110"
    assert s.guilty("report 1104 params=11").r == -errno.EINVAL
    s.goes_on()


@pytest.mark.parametrize("name, stage, call", [("e1106-handler-torch", 3, "touch 1"),
                                               ("e1110-handler-torch", 3, "peek 1")])
def test_handler_speaks_python(scene, name, stage, call):  # noqa: F811
    s = scene({"zero_optimization": {"stage": stage}}, TORCH)
    if call == "touch 1":
        s.guilty.ok("gather 1")
    s.guilty.tell(call)
    assert s.guilty.popen.wait(20 * s.daemon.patience) in (-signal.SIGSEGV, 99)
    text = s.guilty.err()
    text = text[text.index("E11"):]
    golden(name, text[:text.index("  call site\n")])
    s.guilty.err_path.write_text("")


# ---- the job's configuration ----------------------------------------------------------------------------------------


def test_job(zerod):
    params = {"lr": 0.25, "betas": [0.5, 0.75], "eps": 1e-3, "weight_decay": 0.125}
    daemon = zerod({"world": {"size": 3}, "zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4,
                    "gradient_clipping": 0.5, "weights": "private", "optimizer": {"type": "AdamW", "params": params},
                    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}, "fp16": {"enabled": True}})
    p = Puppet(daemon)
    p.ok("connect rank=2 duplicate=accumulate run=r-7")
    job = p.ok("job")
    assert {k: v for k, v in job.items() if k not in ("r", "position", "max_live_elems")} == {
        "world_size": 3, "stage": 2, "private_weights": 1, "on_duplicate": 2, "run_id": "r-7", "optimizer": "AdamW",
        "lr": 0.25, "beta1": 0.5, "beta2": 0.75, "eps": 1e-3, "weight_decay": 0.125, "momentum": 0, "nesterov": 0,
        "has_scheduler": 1, "max_norm": 0.5, "mean": 1, "fp16": 1, "accumulation": 4}
    assert p("connect rank=3").r == REFUSED
    assert p("job").error["text"] == "zerod_job: zerod_connect was refused"


@pytest.mark.parametrize("optimizer, name", [
    ({"type": "SGD", "params": {"lr": 0.5, "momentum": 0.75, "nesterov": True}}, "SGD"),
    ({"type": "Adam", "params": {"adam_w_mode": False}}, "Adam"), ({"type": "Adam"}, "AdamW"),
    ({"type": "Lion"}, "Lion"), ({"type": "Adagrad"}, "Adagrad"),
])
def test_optimizer_of_job(zerod, optimizer, name):
    optimizer["params"] = {"betas": None, "weight_decay": None} | optimizer.get("params", {})
    p = Puppet(zerod({"world": {"size": 1}, "optimizer": optimizer, "gradient_allreduce_op": "sum"}))
    p.ok("connect")
    job = p.ok("job")
    assert (job.optimizer, job.has_scheduler, job.fp16, job.mean) == (name, 0, 0, 0)
    assert (job.accumulation, job.on_duplicate) == (0, 1)
    assert (job.momentum, job.nesterov) == ((0.75, 1) if name == "SGD" else (0, 0))


# ---- waits that a signal ends -----------------------------------------------------------------------------------------


def asks_for_step(s):
    s.guilty.ok("begin")
    s.guilty.ok("pushes")
    s.ranks[0].ok("begin")
    s.ranks[0].ok("pushes")
    assert [a.r for a in all_do(s.ranks, "end")] == [0, 0]
    s.guilty.tell("step")
    wait_for("rank 1 asks", lambda: s.daemon.json("ranks")[1]["state"] == "step")


def test_signal_ends_a_wait(scene):  # noqa: F811
    """A signal ends a wait with -EINTR, and the handle cannot be used again. The job continues with a successor."""
    s = scene(options=["interrupt=1000"])
    asks_for_step(s)
    for _ in range(998):  # each interrupts a poll(), unless it arrives between two polls
        os.kill(s.guilty.pid, signal.SIGUSR1)
        time.sleep(0.001)
        if s.guilty.has_answered():
            break
    while not s.guilty.has_answered():
        os.kill(s.guilty.pid, signal.SIGUSR1)
        time.sleep(0.01)
    answer = s.guilty.answer()
    assert (answer.r, answer.text) == (-errno.EINTR, "interrupted while waiting for zerod's answer to Step")
    assert s.guilty("begin").r == -errno.EINTR, "it does not stick"
    s.guilty.ok("close")
    s.ranks[1] = Puppet(s.daemon, 1).attach()
    s.guilty.tell("form")
    s.ranks[0].ok("step")  # its predecessor had asked
    assert s.guilty.answer().r == RESUMED
    s.goes_on()


def test_wait_is_looked_after_without_a_signal(scene):  # noqa: F811
    """A signal that another thread handled, or that arrived before the wait, is noticed within a second."""
    s = scene(options=["interrupt=2"])
    asks_for_step(s)
    answer = s.guilty.answer(timeout=10)
    assert (answer.r, answer.text) == (-errno.EINTR, "interrupted while waiting for zerod's answer to Step")


@pytest.mark.parametrize("options", [(), ("interrupt=0",)])
def test_signal_that_nobody_minds(scene, options):  # noqa: F811
    s = scene(options=options)
    asks_for_step(s)
    for _ in range(50):
        os.kill(s.guilty.pid, signal.SIGUSR1)
        time.sleep(0.01)
    assert not s.guilty.has_answered()
    s.ranks[0].ok("step")
    assert s.guilty.answer().r == 0
    s.goes_on()


def test_timeout_holds_while_being_asked(zerod):
    """The interrupt callback, which is called once a second, does not change the timeout."""
    daemon = zerod({"world": {"size": 2}})
    p = Puppet(daemon).attach("interrupt=0", "timeout=2500")
    start = time.monotonic()
    answer = p("form")
    assert answer.r == -errno.ETIMEDOUT and re.match(r"zerod did not answer within 2500 ms", answer.text)
    assert 2.4 < time.monotonic() - start < 10 * daemon.patience
