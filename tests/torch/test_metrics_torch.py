# SPDX-License-Identifier: Apache-2.0
"""
Optimizer.metrics(): which figures it returns at which time, that they are the daemon's, and its behaviour when the
daemon does not answer.
"""

import math
import os
import re
import signal
import time

import torch
from conftest import wait_for
from test_bad_input import ONE
from torch import nn

OWN = {"step", "grad_norm", "loss_scale", "lr", "n_missing_params", "waited_ratio"}  # without the daemon's status


def make_model(n_unused=0):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    for i in range(n_unused):
        model.register_parameter(f"unused{i}", nn.Parameter(torch.zeros(3)))
    return model


def take_step(model, opt, factor=1.0):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(opt.rank))
    (model(x).pow(2).mean() * factor).backward()
    opt.step()
    opt.zero_grad()


def check_plain(figures):
    assert figures and all(type(value) in (int, float) and math.isfinite(value) for value in figures.values()), figures


def documented():
    import zerod

    names = re.findall(r"^        ((?:\w+, )*[\w.]+)  ", zerod.Optimizer.metrics.__doc__, re.MULTILINE)
    return {name for group in names for name in group.split(", ")}


def train(n_steps=6, pause=0.0):
    import zerod

    model = make_model()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 5e-4}]
    opt = zerod.Optimizer(groups, model=model)
    found = [opt.metrics()]
    for _ in range(n_steps):
        time.sleep(pause * opt.rank)
        take_step(model, opt)
        found.append(opt.metrics())
    prefixed = opt.metrics("zerod/")
    status = opt._client.status(10)
    opt.close()
    return found, prefixed, status, opt.metrics()


def test_figures_of_a_job(zerod, run, tmp_path):
    for found, prefixed, status, closed in run(zerod({"limits": {"memory": "1GiB"}}), train):
        for figures in found:
            check_plain(figures)
            assert set(figures) <= documented() | {"lr_1"}
        first, last = found[0], found[-1]
        assert first["step"] == 0 and not {"grad_norm", "lr", "wait_seconds", "steps_per_s"} & set(first)
        assert [figures["step"] for figures in found] == list(range(7))
        assert (last["n_applied"], last["n_skipped"], last["n_aborted"], last["n_missing_params"]) == (6, 0, 0, 0)
        assert (last["lr"], last["lr_1"]) == (1e-3, 5e-4) and last["loss_scale"] == 1
        assert last["grad_norm"] == status["grad_norm"] > 0
        assert last["memory_bytes"] == status["memory"]["total"]["held_bytes"] and last["memory_limit_bytes"] == 1 << 30
        assert last["slowest_rank"] in (0, 1) and last["n_ranks_attached"] == 2
        for name in ("wait", "reduce", "update"):
            assert 0 <= last[f"{name}_seconds"] < 60
        assert last["steps_per_s"] > 0 and last["last_step_seconds"] > 0
        assert "checkpoint_step" not in last and "gpu_memory_bytes" not in last
        assert {name.removeprefix("zerod/") for name in prefixed} == set(last) and all(n.startswith("zerod/") for n in prefixed)
        assert OWN <= set(closed) and closed["step"] == 6


def test_all_names_are_documented():
    from zerod import metrics

    names = {*metrics._ALWAYS, *metrics._UNLESS_0, *metrics._OF_A_STEP, *OWN, "n_refused", "lr_1", "lr_2", "..."}
    assert names == documented()


def test_who_waits_for_whom(zerod, run):
    """Rank 1 is 50 ms late in each step, so rank 0 waits most of the time."""
    (fast, *_), (slow, *_) = run(zerod({}), train, pause=0.05)
    ratios = [sum(figures["waited_ratio"] for figures in rank[2:]) / 5 for rank in (fast, slow)]
    assert ratios[0] > 0.5 and ratios[1] < 0.4, ratios


def skip_and_miss():
    import zerod

    model = make_model(n_unused=2)
    opt = zerod.Optimizer(model)
    take_step(model, opt)
    before = opt.metrics()
    take_step(model, opt, factor=math.inf)
    return before, opt.metrics()


def test_skipped_steps_and_missing_gradients(zerod, start):
    before, after = start(zerod(ONE), skip_and_miss).result()
    assert (before["n_missing_steps"], before["n_missing_params"], before["n_skipped"]) == (1, 2, 0)
    assert (after["n_missing_steps"], after["n_skipped"], after["n_applied"]) == (2, 1, 1)
    check_plain(after)
    assert "grad_norm" in before and "grad_norm" not in after  # not finite


def ask_a_silent_daemon(folder):
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    take_step(model, opt)
    folder.joinpath("ready").write_text("")
    wait_for("the daemon was not stopped", folder.joinpath("stopped").exists)
    began = time.monotonic()
    silent = opt.metrics(timeout=0.2)
    took = time.monotonic() - began
    folder.joinpath("asked").write_text("")
    take_step(model, opt)  # waits until the daemon continues
    answered = opt.metrics(timeout=10)
    opt.close()
    return silent, took, answered


def test_a_daemon_that_does_not_answer(zerod, start, tmp_path):
    daemon = zerod(ONE)
    rank = start(daemon, ask_a_silent_daemon, folder=tmp_path)
    wait_for("no step", tmp_path.joinpath("ready").exists)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        tmp_path.joinpath("stopped").write_text("")
        wait_for("metrics() does not return", tmp_path.joinpath("asked").exists)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    silent, took, answered = rank.result()
    # Limits count whole milliseconds of the clock, so a wait may end up to one millisecond early.
    assert set(silent) == OWN and silent["step"] == 1 and 0.199 <= took < 2
    assert answered["step"] == 2 and "memory_bytes" in answered


def ignore_where_it_stands():
    """A restarted rank that logs its figures and trains without asking for the job's position."""
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    figures = opt.metrics()
    try:
        take_step(model, opt)
    except zerod.ResumeIgnored:
        return figures["step"]
    return "it trains"


def die_after_a_step():
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    take_step(model, opt)
    os._exit(1)


def test_figures_are_no_position(zerod, start):
    """A rank that only logs has not read the job's position, and still gets the error."""
    daemon = zerod(ONE)
    start(daemon, die_after_a_step).join()
    assert start(daemon, ignore_where_it_stands).result() == 1
