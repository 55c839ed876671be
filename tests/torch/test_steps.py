# SPDX-License-Identifier: Apache-2.0
"""zerod.steps(): the documented loop, and its behaviour when a step is aborted."""

import contextlib
import io
import json
import time
from pathlib import Path

import pytest
import torch
from conftest import wait_for
from ranks import Crash
from tiers import full
from torch import nn

N_STEPS = 5


class Counter:
    """A rank's position in its data."""

    def __init__(self):
        self.at = 0

    def next(self):
        self.at += 1
        return self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def training(folder, held_at=None, n_micro=2):
    """Trains. In step held_at rank 1 stops in its second micro-batch, as long as the test wants."""
    import zerod

    folder = Path(folder)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
    opt = zerod.Optimizer(model)
    torch.manual_seed(100 + opt.rank)
    counter, drawn = Counter(), []
    zerod.user_state(opt, counter=counter)
    said = io.StringIO()
    for step in zerod.steps(opt, N_STEPS):
        with contextlib.redirect_stderr(said), step:
            for micro_batch in range(opt.position.micro_batch, n_micro):
                drawn.append((int(step), counter.next()))
                x = torch.randn(4, 6) * counter.at
                if step == held_at and micro_batch == 1 and opt.rank == 1 and not (folder / "go").exists():
                    (folder / "held").touch()
                    while not (folder / "go").exists():
                        time.sleep(0.01)
                model(x).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
    assert isinstance(step, int) and json.dumps([step, step + 1]) == f"[{N_STEPS - 1}, {N_STEPS}]"
    weights = [p.detach().clone() for p in model.parameters()]
    opt.close()
    return drawn, weights, said.getvalue()


def test_aborted_step_begins_again(zerod, start, run, tmp_path):
    """`zerodctl abort-step` costs only time: the ranks draw the same batches again and end with the same weights."""
    _, wanted, _ = run(zerod(), training, folder=tmp_path)[0]
    daemon = zerod()
    ranks = [start(daemon, training, rank, folder=str(tmp_path), held_at=2) for rank in range(2)]
    wait_for("rank 1 stands in step 2", (tmp_path / "held").exists)
    wait_for("rank 0 waits in step 2", lambda: daemon.json("ranks")[0]["micro_batch"] == 2)
    said = daemon.ctl("abort-step").stdout
    assert "loops over zerod.steps()" in said and "zerod.StepAborted" in said
    (tmp_path / "go").touch()
    for number, rank in enumerate(ranks):
        drawn, weights, said = rank.result()
        assert ("zerod: step 2 begins again: " in said) == (number == 0), said
        assert drawn == [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6), (2, 5), (2, 6), (3, 7), (3, 8), (4, 9), (4, 10)]
        assert all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True))


def odd_bodies():
    """Loop bodies that do no step, that abort the step themselves, and whose step is aborted each time."""
    import zerod

    model = nn.Linear(6, 6)
    opt = zerod.Optimizer(model)
    x, said, seen = torch.ones(2, 6), [], []

    def failed(body, **more):
        try:
            for step in zerod.steps(opt, opt.epoch + 1, **more):
                seen.append(int(step))
                with step:
                    body()
        except Exception as e:
            return f"{type(e).__name__}: {e}"

    said.append(failed(lambda: None))
    said.append(failed(lambda: 1 / 0))

    def give_up_once():
        model(x).mean().backward()
        opt.abort_step() if len(seen) == 3 else opt.step()

    said.append(failed(give_up_once))

    def twice():  # aborts the step each time, by a mistake
        loss = model(x).mean()
        loss.backward(retain_graph=True)
        loss.backward()

    said.append(failed(twice, n_retries=2))
    assert list(zerod.steps(opt, opt.epoch)) == []
    return said, seen


def test_steps_that_are_not_taken(zerod, start):
    daemon = zerod({"world": {"size": 1}, "diagnostics": {"on_duplicate": "abort_step"}})
    said, seen = start(daemon, odd_bodies).result()
    assert said[:3] == ["RuntimeError: step 0 was not taken: the body of zerod.steps() calls opt.step() once each time",
                        "ZeroDivisionError: division by zero", None]
    assert said[3].startswith("StepAborted: E1302 step aborted") and "E1001" in said[3]
    assert seen == [0, 0, 0, 0, 1, 1, 1]


def accumulates(loop="steps", dies=False, leaves=False):
    """
    Two micro-batches per step. dies: ends after it has begun the second one of step 2. leaves: leaves its loop at this
    place by an exception, and enters it again. Return: the weights, and the micro-batches that were computed.
    """
    import zerod

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
    opt = zerod.Optimizer(model, lr=0.01)
    print(opt.position)  # reading the position does not count as resuming
    counter = Counter()
    if loop == "user state":
        zerod.user_state(opt, counter=counter)
    done = []

    def body(step):
        for micro_batch in range(opt.position.micro_batch if loop == "micro-batch" else 0, 2):
            place = counter.next() if loop == "user state" else 2 * step + micro_batch + 1
            loss = model(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * place + opt.rank))).pow(2).mean()
            if (step, micro_batch) == (2, 1) and (dies or leaves and len(done) == 5):
                raise InterruptedError
            loss.backward()
            done.append((step, micro_batch))
        opt.step()

    def train():
        if loop == "epoch":
            for step in range(opt.epoch, N_STEPS):
                body(step)
            return
        for step in zerod.steps(opt, N_STEPS):
            with step:
                body(int(step))

    try:
        train()
    except InterruptedError:
        if dies:
            return None  # without close(), like a process that died
        train()
    weights = [p.detach().clone() for p in model.parameters()]
    opt.close()
    return weights, done


WHOLE = [(step, micro_batch) for step in range(N_STEPS) for micro_batch in range(2)]


@pytest.mark.parametrize("loop, lost", [("steps", 2), ("steps", 1), ("micro-batch", 1), *full(("epoch", 2))])
def test_step_is_not_counted_twice_after_a_restart(zerod, start, run, loop, lost):
    """A program that does not resume at the micro-batch aborts the step on all ranks. Otherwise it continues."""
    wanted = run(zerod(), accumulates)[0][0]
    daemon = zerod()
    first = [start(daemon, accumulates, rank, loop=loop, dies=rank >= 2 - lost) for rank in range(2)]
    for rank in first[2 - lost:]:
        assert rank.result() is None
    last = first[:2 - lost] + [start(daemon, accumulates, rank, loop=loop) for rank in range(2 - lost, 2)]
    for rank, (weights, done) in enumerate(rank.result() for rank in last):
        assert all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True))
        if rank >= 2 - lost:
            assert done == WHOLE[5 if loop == "micro-batch" else 4:]
        else:  # a survivor may already have done both micro-batches
            assert list(dict.fromkeys(done)) == WHOLE and (len(done) > len(WHOLE)) == (loop != "micro-batch")


def test_user_state_of_a_step_that_is_taken_back(zerod, start):
    """The successor cannot draw the first data again, and aborts the step. The next process repeats the step."""
    one = {"world": {"size": 1}}
    wanted = start(zerod(one), accumulates, loop="user state").result()[0]
    daemon = zerod(one)
    assert start(daemon, accumulates, loop="user state", dies=True).result() is None
    with pytest.raises(Crash, match=r"StepAborted: E1302 step aborted.* did not read opt.position.micro_batch"):
        start(daemon, accumulates, loop="user state").result()
    weights, done = start(daemon, accumulates, loop="user state").result()
    assert all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True)) and done == WHOLE[4:]


def test_loop_left_in_the_middle_of_a_step(zerod, run):
    """A loop left by a caught exception and entered again begins the step again on all ranks."""
    wanted = run(zerod(), accumulates)[0][0]
    for weights, done in run(zerod(), accumulates, leaves=True):
        assert all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True)) and done == WHOLE[:5] + WHOLE[4:]
