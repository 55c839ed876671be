# SPDX-License-Identifier: Apache-2.0
"""
zero_optimization.speculative_update with PyTorch: a schedule of learning rates is known in time, and whatever the
program does between its last backward and step(), the numbers are those of a run without it.
"""

import pytest
import torch
from torch import nn

N_STEPS = 12


def training(what):
    import zerod

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 8)).bfloat16()
    opt = zerod.Optimizer(model, lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    torch.manual_seed(100 + opt.rank)

    def backward(factor=1.0):
        (model(torch.randn(4, 64, dtype=torch.bfloat16)).float().pow(2).mean() * factor).backward()

    group = opt.param_groups[0]
    for step in range(N_STEPS):
        rate = group["lr"]
        if what == "impossible rate" and step % 3 == 2:
            group["lr"] = (float("inf"), "high", -1)[step % 9 // 3]
        backward()
        backward()
        group["lr"] = rate
        if what == "another micro-batch" and step % 3 == 2:
            backward()
        if what == "another rate" and step % 3 == 2:
            group["lr"] *= 2
        if what == "dropped" and step % 3 == 2:
            opt.zero_grad()
            backward()
            backward()
        if what == "clipped" and step % 3 == 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if what == "not a number" and step % 3 == 2:
            backward(float("nan"))
        opt.step()
        opt.zero_grad()
        schedule.step()
    weights = [p.detach().clone() for p in model.parameters()]
    exp_avg = [opt.state[p]["exp_avg"].clone() for p in model.parameters()]
    opt.close()
    return weights, exp_avg


@pytest.mark.parametrize("what", [
    "as expected", "another micro-batch", "another rate", "impossible rate", "dropped", "clipped", "not a number"])
def test_numbers(zerod, run, what):
    config = {"gradient_clipping": 0, "diagnostics": {"on_leave": "continue"}}
    if what == "dropped":  # zero_grad() begins the step again for all ranks, which would have to expect it
        config |= {"world": {"size": 1}}
    early = zerod(config | {"zero_optimization": {"stage": 2, "speculative_update": True}})
    found, usual = run(early, training, what=what), run(zerod(config | {"zero_optimization": {"stage": 2}}), training, what=what)
    assert all(torch.equal(a, b) for ours, theirs in zip(found, usual) for some, others in zip(ours, theirs)
               for a, b in zip(some, others))
    counters = early.status()["counters"]
    assert counters["n_early_updates"] > 0
    if what == "as expected":
        assert counters["n_early_updates_dropped"] == 0


def trains_matrices():
    import zerod

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 8))
    opt = zerod.Optimizer(model)
    for _ in range(2):
        model(torch.ones(4, 64)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    status = opt._client.status(10)
    opt.close()
    return status


def test_matrices_of_muon(zerod, run):
    config = {"optimizer": {"type": "Muon", "params": {"betas": None, "weight_decay": None}}}
    status = run(zerod(config | {"zero_optimization": {"stage": 2, "speculative_update": True}}), trains_matrices)[0]
    early, n_matrices = status["early_updates"], 64 * 96 + 96 * 8
    assert (early["prevented_by"], early["elems"]) == ("muon", n_matrices + 96 + 8)
    assert early["why"] == f"Muon updates matrices after the decision: {n_matrices} of {n_matrices + 96 + 8} elements"
    assert early["early_elems"] <= 96 + 8


def expects_nonsense():
    import zerod
    from zerod import _lib

    torch.manual_seed(3)
    model = nn.Linear(64, 96)
    opt = zerod.Optimizer(model, lr=0.01)
    for step in range(N_STEPS):
        if step % 2:
            wrong = _lib.Hyper(lr=-1 if step % 4 == 1 else 0.01, momentum=0.9, beta1=5, weight_decay=-1e300)
            opt._client.expect([wrong])
        model(torch.ones(4, 64) * step).square().mean().backward()
        opt.step()
        opt.zero_grad()
    weights = model.weight.detach().clone()
    opt.close()
    return weights


def test_wrong_expectations(zerod, run):
    """A rank announces hyperparameters that no step may have, such as a momentum without a buffer for it."""
    config = {"gradient_clipping": 0, "optimizer": {"type": "SGD", "params": {"lr": 0.01, "betas": None}},
              "diagnostics": {"on_leave": "continue"}}
    early = zerod(config | {"zero_optimization": {"stage": 2, "speculative_update": True}})
    found, usual = run(early, expects_nonsense), run(zerod(config), expects_nonsense)
    assert torch.equal(found[0], usual[0]) and early.status()["counters"]["n_early_updates"] > 0
