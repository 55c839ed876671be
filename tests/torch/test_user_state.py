# SPDX-License-Identifier: Apache-2.0
"""zerod.user_state() with a model whose buffers change. test_trainer_kills.py tests the other contents."""

import pytest
import torch
from tiers import full
from torch import nn

ONE = {"world": {"size": 1}, "zero_optimization": {"stage": 2}}
N_STEPS, N_MICRO = 5, 2


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8), nn.Linear(8, width), nn.BatchNorm1d(width))
        self.register_buffer("cache", torch.zeros(50000), persistent=False)  # too large for the state
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return self.body(x)


def train(n_micro_batches, keep):
    """
    Trains up to this number of the run's micro-batches. A process that returns without close() is like one that died.
    """
    import zerod

    torch.manual_seed(3)
    model = Net()
    opt = zerod.Optimizer(model)
    if keep:
        assert zerod.user_state(opt, buffers=zerod.buffers(model)) == (opt.position[:2] != (0, 0))
    while opt.epoch < N_STEPS:
        for micro_batch in range(opt.position.micro_batch, N_MICRO):
            place = N_MICRO * opt.epoch + micro_batch
            if place == n_micro_batches:
                return
            generator = torch.Generator().manual_seed(place)
            model(torch.randn(16, 6, generator=generator) + place).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("dies_before", [4, *full(0, 3)])
def test_buffers(zerod, start, dies_before):
    alone = start(zerod(ONE), train, n_micro_batches=99, keep=True).result()
    ends = {}
    for keep in (True, False):
        daemon = zerod(ONE)
        assert start(daemon, train, n_micro_batches=dies_before, keep=keep).result() is None
        ends[keep] = start(daemon, train, n_micro_batches=99, keep=keep).result()
    assert alone["seen"] == N_STEPS * N_MICRO
    # The unfinished backward was not stored, so the successor repeats it.
    assert ends[True] == alone
    assert (ends[False] == alone) == (dies_before == 0)


def others(message):
    import zerod

    opt = zerod.Optimizer(Net(7))
    with pytest.raises(ValueError, match=message):
        zerod.user_state(opt, buffers=zerod.buffers(Net(6)))
    opt.close()


def test_buffers_of_another_model(zerod, start):
    """The state of a model of another width is refused with both sizes."""
    daemon = zerod(ONE)

    start(daemon, width_seven).result()
    start(daemon, others, message=r"\d+ bytes of buffers were stored, this model has \d+").result()


def width_seven():
    import zerod

    model = Net(7)
    opt = zerod.Optimizer(model)
    zerod.user_state(opt, buffers=zerod.buffers(model))
    model(torch.randn(16, 7)).pow(2).mean().backward()
    opt.step()
