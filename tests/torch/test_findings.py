# SPDX-License-Identifier: Apache-2.0
"""What zerod sees because it has all ranks' gradients and times: each finding once, and programs of which nothing is said."""

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
    """The router sends all tokens to the first expert of four; the others get gradients of zeros."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 1) for _ in range(4))

    def forward(self, x):
        weights = one_hot(torch.zeros(len(x), dtype=torch.long), 4).float()
        return sum(w.unsqueeze(1) * expert(x) for w, expert in zip(weights.T, self.experts, strict=True))


class Sparse(Mixture):
    """An expert without a token is not called."""

    def forward(self, x):
        return self.experts[0](x)


def batch(step, rank, n=8):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return x, x.sum(1, keepdim=True).sin()


def train(make=Net, n_steps=N_STEPS, loss=mse_loss, n=8, before=None, after=None, schedule=None, **hypers):
    """loss, n: of the rank, also one for each rank. before, after: called around the backward."""
    import zerod

    torch.manual_seed(1)
    model = make()
    opt = zerod.Optimizer(model, **hypers)
    scheduler = schedule(opt) if schedule else None
    losses, sizes = (each if isinstance(each, tuple) else (each,) * opt.world_size for each in (loss, n))
    for step in range(n_steps):
        x, y = batch(step, opt.rank, sizes[opt.rank])
        if before:
            before(model, opt.rank, step)
        losses[opt.rank](model(x), y).backward()
        if after:
            after(opt.rank, step)
        opt.step()
        opt.zero_grad()
        if scheduler:
            scheduler.step()
    opt.close()


def findings(zerod, start, config=None, world=2, **how):
    daemon = zerod(TWO | {"world": {"size": world}} | (config or {}))
    ranks = [start(daemon, train, rank=r, **how) for r in range(world)]
    for rank in ranks:
        rank.result()
    return daemon


def named(daemon, *kinds):
    return [f for f in daemon.status()["findings"] if not kinds or f["kind"] in kinds]


# ---- one of each -------------------------------------------------------------------------------------------


def hundredfold(x, y):
    return 100 * mse_loss(x, y)


def test_rank_norm(zerod, start):
    daemon = findings(zerod, start, n_steps=54, loss=(mse_loss, hundredfold))
    (found,) = named(daemon, "rank-norm")
    assert found["rank"] == 1 and found["param"] is None
    assert found["text"].startswith("the gradients of rank 1 were at least ")
    assert f"\nfinding   {found['text']}\n" in daemon.ctl("status").stdout
    assert 'kind="rank-norm"} 1\n' in daemon.ctl("metrics").stdout


class Dead(Net):
    """The bias of the ReLU's input is so low that it never passes anything."""

    def __init__(self):
        super().__init__()
        nn.init.constant_(self.body[2].bias, -1000)


def test_zero_gradient(zerod, start):
    daemon = findings(zerod, start, {"diagnostics": {"unused": ["body.0.*"]}}, make=Dead)
    found = named(daemon, "zero-gradient")
    assert [(f["param"], f["rank"]) for f in found] == [("body.2.weight", None), ("body.2.bias", None),
                                                        ("head.weight", None)]  # fmt: skip
    assert "exactly zero in the last 104 steps" in found[0]["text"]


class Parts(Mixture):
    """The same, and no name says that the parts are experts."""

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


def no_rate(opt):
    return torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.0)


def test_zero_lr(zerod, start):
    (found,) = named(findings(zerod, start, schedule=no_rate), "zero-lr")
    assert (found["rank"], found["param"]) == (None, None) and "in the last 104 steps" in found["text"]


def slow_forward(_model, rank, _step):
    time.sleep(0.03 * rank)


def slow_rest(rank, _step):
    time.sleep(0.03 * rank)


@pytest.mark.parametrize("how, phase", [({"before": slow_forward}, "forward"), ({"after": slow_rest}, "rest")],
                         ids=["forward", "rest"])  # fmt: skip
def test_slow_rank(zerod, start, how, phase):
    daemon = findings(zerod, start, n_steps=60, **how)
    (found,) = named(daemon, "slow-rank")
    assert found["rank"] == 1
    assert {"forward": "mostly in its forward", "rest": "mostly after its backward"}[phase] in found["text"]
    phases = [rank["phases"] for rank in daemon.json("ranks")]
    slower = {name: phases[1][name] - phases[0][name] for name in phases[0]}
    assert max(slower, key=slower.get) == f"{phase}_ns" and slower[f"{phase}_ns"] > 1.2e9
    assert f'rank="1",phase="{phase}"' in daemon.ctl("metrics").stdout


def test_on_two_nodes(zerod, start, monkeypatch):
    """Each daemon compares its own ranks, and names the parameters that lie in its partitions as a whole."""
    monkeypatch.setenv("ZEROD_NODES", "2")
    daemons = findings(zerod, start, world=3, n_steps=54, loss=(mse_loss, hundredfold, mse_loss)).daemons
    assert [f["rank"] for f in named(daemons[0])] == [1] and not named(daemons[1])
    daemons = findings(zerod, start, world=3, make=Dead).daemons
    both = [[f["param"] for f in named(daemon, "zero-gradient")] for daemon in daemons]
    dead = {"body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias", "head.weight"}
    assert both[0] or both[1]
    assert set(both[0]) | set(both[1]) <= dead and not set(both[0]) & set(both[1])


# ---- and none ----------------------------------------------------------------------------------------------


def warm_up(opt):
    return torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, step / 200))


def slow_once(_model, rank, step):
    time.sleep(2.0 if rank == 1 and step == 20 else 0.0)


class Gan(nn.Module):
    """Generator and critic; only one of them is trained in each step."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.critic(self.generator(x))


def take_turns(model, _rank, step):
    model.generator.requires_grad_(step % 2 == 0)
    model.critic.requires_grad_(step % 2 == 1)


@pytest.mark.parametrize("how", [
    {}, {"make": Mixture}, {"make": Sparse}, {"make": Gan, "before": take_turns}, {"schedule": warm_up, "lr": 1e-3},
    {"n": (4, 64)}, {"before": slow_once},
], ids=["plain", "mixture", "sparse", "gan", "warm-up", "batch-sizes", "slow-once"])  # fmt: skip
def test_nothing_is_said(zerod, start, how):
    assert named(findings(zerod, start, **how)) == []
