# SPDX-License-Identifier: Apache-2.0
"""Two optimizers in one process, each with its own daemon: docs/pytorch.md, Two optimizers."""

import os

import pytest
import torch
from torch import nn

from tiers import full
from conftest import ROOT

ADAM = {"lr": 1e-2, "betas": (0.5, 0.9), "eps": 1e-8, "weight_decay": 0.01}
N_STEPS, N_RANKS, N_ROWS = 12, 2, 8


def make():
    torch.manual_seed(11)
    generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    return generator, nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def batch(step, rank):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(N_ROWS, 2, generator=g) * 0.5 + 1, torch.randn(N_ROWS, 4, generator=g)


def judge(discriminator, x, real):
    logits = discriminator(x)
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def losses(generator, discriminator, real, z):
    """Yields both losses. The generator's backward must not reach the discriminator's weights."""
    yield judge(discriminator, real, True) + judge(discriminator, generator(z).detach(), False)
    discriminator.requires_grad_(False)
    yield judge(discriminator, generator(z), True)
    discriminator.requires_grad_(True)


def gan(dies_at=None):
    """Trains one rank, which may die between the discriminator's step and the generator's. Return: its weights."""
    import zerod

    generator, discriminator = make()
    opt_g, opt_d = zerod.Optimizer(generator, **ADAM), zerod.Optimizer(discriminator, job=1, **ADAM)
    for step in range(opt_g.epoch, N_STEPS):
        for loss, opt in zip(losses(generator, discriminator, *batch(step, opt_g.rank)), (opt_d, opt_g), strict=True):
            if opt.epoch > step:
                continue
            loss.backward()
            if opt is opt_g and step == dies_at:
                os._exit(9)
            opt.step()
            opt.zero_grad()
    assert opt_g.epoch == opt_d.epoch == N_STEPS
    opt_g.close()
    opt_d.close()
    return [p.detach().clone() for m in (generator, discriminator) for p in m.parameters()]


def gan_of_torch():
    """Trains the GAN in one process, with the mean over the ranks' losses."""
    generator, discriminator = make()
    opts = torch.optim.AdamW(discriminator.parameters(), **ADAM), torch.optim.AdamW(generator.parameters(), **ADAM)
    for step in range(N_STEPS):
        ranks = [losses(generator, discriminator, *batch(step, rank)) for rank in range(N_RANKS)]
        for opt in opts:
            (sum(next(rank) for rank in ranks) / N_RANKS).backward()
            opt.step()
            opt.zero_grad()
        for rank in ranks:
            next(rank, None)
    return [p.detach() for m in (generator, discriminator) for p in m.parameters()]


@pytest.mark.parametrize("stage", [*full(2), 3])
def test_gan(zerod, run, stage):
    config = {"zero_optimization": {"stage": stage}}
    first, second = zerod(config), zerod(config)
    results = run(first, gan, {"ZEROD_SOCKET_1": str(second.socket)})
    for weights in results:
        for mine, torchs in zip(weights, gan_of_torch(), strict=True):
            assert torch.allclose(mine, torchs, rtol=1e-4, atol=1e-5)


def test_rank_that_is_started_again(zerod, start, run):
    """The restarted rank continues with the job that has not committed. The bits are those of an undisturbed run."""
    first, second = zerod(), zerod()
    variables = {"ZEROD_SOCKET_1": str(second.socket)}
    stays, dies = start(first, gan, 0, variables), start(first, gan, 1, variables, dies_at=5)
    dies.join(120)
    assert dies.exitcode == 9
    results = [stays, start(first, gan, 1, variables)]
    first, second = zerod(), zerod()
    undisturbed = run(first, gan, {"ZEROD_SOCKET_1": str(second.socket)})
    for rank, expected in zip(results, undisturbed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(rank.result(), expected, strict=True))


def two_on_one():
    """
    Return: the errors of a process that attaches twice to one daemon, and that asks for a second job without --jobs.
    """
    import zerod

    generator, discriminator = make()
    opt = zerod.Optimizer(generator)
    with pytest.raises(zerod.errors.RankTaken) as taken:
        zerod.Optimizer(discriminator)
    with pytest.raises(ValueError) as missing:
        zerod.Optimizer(discriminator, job=1)
    generator(torch.ones(1, 4)).sum().backward()  # the first optimizer still works
    opt.step()
    opt.close()
    return str(taken.value), str(missing.value)


def test_second_optimizer_on_one_daemon(zerod, run):
    daemon = zerod({"world": {"size": 1}})
    ((text, missing),) = run(daemon, two_on_one)
    assert "kill" not in text
    told = (ROOT / "tests/golden-texts/e1301-itself.txt").read_text().splitlines()
    assert text.splitlines()[2:] == told[2:]
    assert missing.startswith("job=1: the environment has no ZEROD_SOCKET_1. zerodrun --jobs 2 starts")
