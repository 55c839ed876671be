# SPDX-License-Identifier: Apache-2.0
"""Buffers that a forward changes. Rank 0's values count, as under DistributedDataParallel."""

import warnings

import pytest
import torch
import torch.distributed as dist
from conftest import free_ports
from tiers import full
from torch import nn

N_STEPS = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 6))
        self.register_buffer("constant", torch.arange(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.cache.add_(x.sum().detach())
        return self.body(x)


def make_model():
    torch.manual_seed(3)
    return Net()


def batch(step, rank):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank)) + rank


def train(model, opt, rank):
    for step in range(N_STEPS):
        model(batch(step, rank)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


def with_zerod(group, explicit=False, **more):
    """Return: the state after training, the caches, and the warnings."""
    import zerod

    if group:
        dist.init_process_group("gloo")
    model = make_model()
    opt = zerod.Optimizer(model, lr=0.1, **more)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(model, opt, opt.rank)
        if explicit:
            before = {name: value.clone() for name, value in model.state_dict().items() if "weight" in name}
            zerod.sync_buffers(model)
            after = model.state_dict()
            assert all(torch.equal(before[name], after[name]) for name in before)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    opt.close()
    if group:
        dist.destroy_process_group()
    return state, model.cache.clone(), [str(w.message) for w in said if "buffers" in str(w.message)]


wrapped = []  # never freed, because gloo's group may be freed with the GIL held while its thread needs the GIL


def with_ddp():
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(make_model())
    wrapped.append(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, opt, dist.get_rank())
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    dist.destroy_process_group()
    return state


def group_variables():
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}


def running(state):
    return state["body.1.running_mean"]


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "betas": None, "weight_decay": None}}}


def test_with_a_process_group(zerod, run):
    """Buffers are as under DDP, whose rank 0 has the same statistics; caches are each rank's own. No warning."""
    job = SGD | {"zero_optimization": {"stage": 2}}
    (ours, cache, said), (other, other_cache, _) = run(zerod(job), with_zerod, group_variables(), group=True)
    ddp = run(zerod(job), with_ddp, group_variables())
    assert all(torch.equal(ours[name], other[name]) for name in ours) and said == []
    assert not torch.equal(cache, other_cache)
    assert not torch.equal(running(ours), torch.zeros(10)) and ours["body.1.num_batches_tracked"] == N_STEPS
    for name in ours:
        assert torch.allclose(ours[name].float(), ddp[0][name].float(), atol=1e-5), name


def test_without_a_process_group(zerod, run):
    """Without a process group, rank 0 warns once and names a way to equal buffers."""
    (ours, _, said), (other, _, nothing) = run(zerod(SGD), with_zerod, group=False)
    assert not torch.equal(running(ours), running(other)), "the test is of no use"
    assert len(said) == 1 and nothing == []
    assert said[0].startswith("every forward changes body.1.running_mean and other buffers") and "sync_buffers" in said[0]
    (_, _, said), _ = run(zerod(SGD), with_zerod, group=False, sync_buffers=False)
    assert said == []


@pytest.mark.parametrize("stage", [*full(1), 2, 3])
def test_sync_through_the_daemon(zerod, run, stage):
    """zerod.sync_buffers() needs no process group and changes nothing except these buffers."""
    job = SGD | {"zero_optimization": {"stage": stage}}
    (ours, cache, _), (other, other_cache, _) = run(zerod(job), with_zerod, group=False, explicit=True)
    assert all(torch.equal(ours[name], other[name]) for name in ours) and torch.equal(cache, other_cache)
    assert not torch.equal(running(ours), torch.zeros(10)) and torch.equal(ours["constant"], torch.arange(3))
