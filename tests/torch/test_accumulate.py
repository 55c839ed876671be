# SPDX-License-Identifier: Apache-2.0
"""
`on_duplicate: accumulate`, for a model that other systems refuse: a tower that runs twice in a forward under reentrant
checkpoints, like MiniCPM-V's with more than 16 slices. Each of its gradients is pushed twice, with use_reentrant=False
once.
"""

import pytest
import torch
from test_optimizer import BARE
from tiers import full
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS, SLICES, CHUNK, WIDTH = 10, 20, 16, 24


class Slices(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(12, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
                                    for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def tower(self, x, reentrant):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=reentrant)
        return x

    def forward(self, x, reentrant):
        return self.head(torch.cat([self.tower(self.embed(chunk), reentrant) for chunk in x.split(CHUNK)]))


def trained(reentrant):
    import zerod

    torch.manual_seed(5)
    model = Slices()
    opt = zerod.Optimizer(model)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + opt.rank)
        x, y = torch.randn(SLICES, 12, generator=generator), torch.randn(SLICES, 4, generator=generator)
        nn.functional.mse_loss(model(x, reentrant), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    return [p.detach().clone() for p in model.parameters()]


def job(world_size, stage, on_duplicate):
    return {"world": {"size": world_size}, "zero_optimization": {"stage": stage}, "gradient_clipping": 0,
            "optimizer": {"type": "SGD", "params": BARE | {"lr": 0.05}}, "diagnostics": {"on_duplicate": on_duplicate}}


@pytest.mark.parametrize("world_size", [2, *full(1, 4)])
def test_two_pushes_are_their_sum(zerod, run, world_size):
    """Two pushes are summed. With one rank the bits are equal, because two terms have no order."""
    wanted = run(zerod(job(world_size, 2, "reject")), trained, reentrant=False)[0]
    results = [weights for stage in (1, 2, 3)
               for weights in run(zerod(job(world_size, stage, "accumulate")), trained, reentrant=True)]
    for weights in results:
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0], strict=True))
        if world_size == 1:
            assert all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True))
        off = sum((a - b).square().sum() for a, b in zip(weights, wanted, strict=True)).sqrt()
        assert off <= 1e-5 * sum(b.square().sum() for b in wanted).sqrt()


# ---- numbers of micro-batches -----------------------------------------------------------------------------


def tokens(numbers):
    """
    Runs a rank's steps, with these numbers of micro-batches. The loss is a sum divided by the tokens of all ranks.
    """
    import zerod

    torch.manual_seed(5)
    model = nn.Linear(12, 4)
    opt = zerod.Optimizer(model)
    for step, of_ranks in enumerate(numbers):
        for micro in range(of_ranks[opt.rank]):
            x = torch.randn(3, 12, generator=torch.Generator().manual_seed(100 * step + 10 * micro + opt.rank))
            (model(x).square().sum() * opt.world_size / (3 * sum(of_ranks))).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


def test_numbers_of_micro_batches_are_a_fact(zerod, run):
    """Different numbers of micro-batches cause one line of the log. If the number is configured, they are refused."""
    daemon = zerod(job(3, 2, "reject"))
    run(daemon, tokens, numbers=[(1, 1, 1), (1, 2, 1), (2, 1, 3)])
    assert daemon.json("diagnostics") == []
    said = [line.partition("step 1: ")[2] for line in daemon.log().splitlines() if "micro-batches" in line]
    assert said == ["the ranks' numbers of micro-batches differ: 2 on rank 1; 1 on ranks 0, 2; gradient_accumulation_steps in the "
                    "configuration refuses such steps (said once)"]
