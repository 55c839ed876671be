# SPDX-License-Identifier: Apache-2.0
"""A restarted program is refused until it has asked for the job's position. test_resume.py tests programs that ask."""

import pytest
import torch
from test_bad_input import ONE, all_same, batch, caught, make_model
from tiers import full


def die_after(n_steps, n_micro_batches=0):
    """Trains this long and returns without close(), like a process that died."""
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    for i in range(n_steps):
        model(batch(i)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
    for i in range(n_micro_batches + 1):  # the next forward ends a micro-batch
        loss = model(batch(i)).pow(2).mean()
        if i < n_micro_batches:
            loss.backward()


def look(how):
    """Asks for the position in this way, then does one step. Return: the exception, the step, and the weights."""
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    ways = {
        "nothing": lambda: None,
        "position": lambda: opt.position,
        "epoch": lambda: opt.epoch,
        "resumed": lambda: opt.resumed,
        "anew": opt.begin_anew,
        "checkpoint": lambda: opt.load_full_state_dict(opt.full_state_dict()),
    }
    ways[how]()

    def step():
        model(batch(9)).pow(2).mean().backward()
        opt.step()

    said = caught(step)
    return said, opt.epoch, list(model.state_dict().values())


def ignore():
    """
    Neither a backward nor a step succeeds, and nothing of them is left after the program has asked for the position.
    """
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    said = {"resume-ignored": caught(lambda: model(batch(1)).pow(2).mean().backward())}
    assert all(p.grad is None for p in model.parameters()) and not opt.has_gradients
    assert caught(opt.step) == said["resume-ignored"]
    with pytest.raises(zerod.ResumeIgnored):
        model[0].weight.grad = torch.ones(10, 6)  # set by the program
        opt.step()
    model[0].weight.grad = None
    opt.begin_anew()
    model(batch(9)).pow(2).mean().backward()
    opt.step()
    return said, opt.epoch, list(model.state_dict().values())


@pytest.mark.parametrize("stage", [1, *full(3)])
def test_a_program_that_does_not_look(zerod, start, stage):
    daemons = {how: zerod(ONE | {"zero_optimization": {"stage": stage}}) for how in ("ignores", "epoch")}
    for daemon in daemons.values():
        start(daemon, die_after, n_steps=2).result()
    texts, step, weights = start(daemons["ignores"], ignore).result()
    all_same(texts)
    said, other_step, others = start(daemons["epoch"], look, how="epoch").result()
    assert said == "nothing was raised" and step == other_step == 3
    assert all(map(torch.equal, weights, others)), "a refused backward left something"


@pytest.mark.parametrize("how", ["position", "checkpoint", *full("resumed", "anew")])
def test_ways_to_look(zerod, start, how):
    daemon = zerod(ONE)
    start(daemon, die_after, n_steps=1).result()
    assert start(daemon, look, how=how).result()[:2] == ("nothing was raised", 2)


def test_a_new_job_has_nothing_to_look_at(zerod, start):
    daemon = zerod(ONE)
    start(daemon, die_after, n_steps=0).result()
    assert start(daemon, look, how="nothing").result()[:2] == ("nothing was raised", 1)


def test_a_step_that_was_begun(zerod, start):
    """A job in the middle of a step is refused too. After begin_anew() the step begins with its first micro-batch."""
    daemon = zerod(ONE)
    start(daemon, die_after, n_steps=0, n_micro_batches=2).result()
    said, step, _ = start(daemon, look, how="nothing").result()
    assert said.startswith("ResumeIgnored: the job is at step 0, micro-batch 2, ") and step == 0
    assert start(daemon, look, how="anew").result()[:2] == ("nothing was raised", 1)
    assert daemon.status()["step"] == 1
    assert sum("E1007" in line or "begins again" in line for line in daemon.log().splitlines()) > 0
