# SPDX-License-Identifier: Apache-2.0
"""
Where findings appear in the status, also on several nodes. tests/faults/scenarios/findings.py tests which programs have
findings.
"""

import time

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, one_hot

TWO = {"world": {"size": 2}, "optimizer": {"params": {"lr": 1e-4}}}
N_STEPS = 104


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.body(x))


class Mixture(nn.Module):
    """The router sends all tokens to the first of four experts. The other experts get zero gradients."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 1) for _ in range(4))

    def forward(self, x):
        weights = one_hot(torch.zeros(len(x), dtype=torch.long), 4).float()
        return sum(w.unsqueeze(1) * expert(x) for w, expert in zip(weights.T, self.experts, strict=True))


def batch(step, rank):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return x, x.sum(1, keepdim=True).sin()


def train(make=Net, n_steps=N_STEPS, loss=mse_loss, after=None):
    """loss: one for all ranks, or one for each rank. after: called after the backward."""
    import zerod

    torch.manual_seed(1)
    model = make()
    opt = zerod.Optimizer(model)
    losses = loss if isinstance(loss, tuple) else (loss,) * opt.world_size
    for step in range(n_steps):
        x, y = batch(step, opt.rank)
        losses[opt.rank](model(x), y).backward()
        if after:
            after(opt.rank)
        opt.step()
        opt.zero_grad()
    opt.close()


def findings(zerod, start, world=2, **how):
    daemon = zerod(TWO | {"world": {"size": world}})
    ranks = [start(daemon, train, rank=r, **how) for r in range(world)]
    for rank in ranks:
        rank.result()
    return daemon


def named(daemon, *kinds):
    return [f for f in daemon.status()["findings"] if not kinds or f["kind"] in kinds]


def hundredfold(x, y):
    return 100 * mse_loss(x, y)


class Dead(Net):
    """The bias before the ReLU is so low that the ReLU never passes anything."""

    def __init__(self):
        super().__init__()
        nn.init.constant_(self.body[2].bias, -1000)


class Parts(Mixture):
    """A mixture whose names do not say that its parts are experts."""

    def __init__(self):
        super().__init__()
        self.parts = self._modules.pop("experts")

    @property
    def experts(self):
        return self.parts


@pytest.mark.full
def test_zero_gradients_of_parts(zerod, start):
    found = named(findings(zerod, start, make=Parts))
    assert [f["param"] for f in found] == [f"parts.{i}.{name}" for i in (1, 2, 3) for name in ("weight", "bias")]


def slow_rest(rank):
    time.sleep(0.05 * rank)


def test_slow_rank(zerod, start):
    """A slow rank is reported in the findings, the status, the metrics and the ranks' phases."""
    daemon = findings(zerod, start, n_steps=60, after=slow_rest)
    (found,) = named(daemon)
    assert (found["kind"], found["rank"], found["param"]) == ("slow-rank", 1, None)
    assert "mostly after its backward" in found["text"]
    assert f"\nfinding   {found['text']}\n" in daemon.ctl("status").stdout
    phases = [rank["phases"] for rank in daemon.json("ranks")]
    slower = {name: phases[1][name] - phases[0][name] for name in phases[0]}
    assert max(slower, key=slower.get) == "rest_ns" and slower["rest_ns"] > 1.2e9
    metrics = daemon.ctl("metrics").stdout
    assert 'kind="slow-rank"} 1\n' in metrics and 'rank="1",phase="rest"' in metrics


def test_on_two_nodes(zerod, start, monkeypatch):
    """Each daemon compares its own ranks, and names the parameters that are completely in its partitions."""
    monkeypatch.setenv("ZEROD_NODES", "2")
    daemons = findings(zerod, start, world=3, n_steps=54, loss=(mse_loss, hundredfold, mse_loss)).daemons
    assert [f["rank"] for f in named(daemons[0])] == [1] and not named(daemons[1])
    daemons = findings(zerod, start, world=3, make=Dead).daemons
    both = [[f["param"] for f in named(daemon, "zero-gradient")] for daemon in daemons]
    dead = {"body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias", "head.weight"}
    assert both[0] or both[1]
    assert set(both[0]) | set(both[1]) <= dead and not set(both[0]) & set(both[1])
