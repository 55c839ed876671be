# SPDX-License-Identifier: Apache-2.0
"""
Training with PyTorch on several nodes has the bits of one node. The trainers are spread over daemons that are connected
by gloo engines, on this machine's loopback and in network namespaces.
"""

import contextlib
import copy
import sys

import pytest
import torch
from test_examples import EXAMPLES, SMALL, environment
from test_optimizer import make_model
from test_optimizer_state import config, readable, weights_of

from network import Network, why_no_network
from nodes import Nodes
from tiers import full


def train(stage, steps):
    """Each rank has its own gradients, in two micro-batches. Between two steps the state is read and loaded again."""
    import os

    import zerod

    rank, model = int(os.environ["RANK"]), make_model()
    opt = zerod.Optimizer(model)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    norms = []
    if stage == 3:
        zerod.stage3(model)
    for step in range(steps):
        for micro in range(2):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            with readable(model):
                noise = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()]
                sum((p * n).sum() for p, n in zip(model.parameters(), noise, strict=True)).backward()
        opt.step()
        opt.zero_grad()
        norms.append(opt.result.grad_norm)
        norms += [opt.grad_norm(name) for name in names]  # each is shared by nodes, or owned by one of them
        if step == steps // 2:  # to torch's form and back, by a write window
            whole = copy.deepcopy(opt.full_state_dict())
            opt.load_full_state_dict(whole)
    state = opt.full_state_dict()
    weights = weights_of(model)
    opt.close()
    return norms, weights, [v for s in state["state"].values() for v in s.values() if isinstance(v, torch.Tensor)]


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("stage, n_nodes", [(2, 2), (3, 3), *full((1, 2), (1, 3), (2, 3), (3, 2))])
def test_bits(zerod, run, monkeypatch, stage, n_nodes):
    world = {"world": {"size": 4}}
    one = run(zerod(config(stage=stage, **world)), train, stage=stage, steps=6)
    monkeypatch.setenv("ZEROD_NODES", str(n_nodes))
    several = run(zerod(config(stage=stage, **world)), train, stage=stage, steps=6)
    for (norms, weights, state), (wanted_norms, wanted_weights, wanted_state) in zip(several, one, strict=True):
        assert norms == wanted_norms
        assert equal(weights, wanted_weights)
        assert equal(state, wanted_state)


@pytest.mark.skipif(why_no_network() is not None, reason=f"no network namespaces: {why_no_network()}")
@pytest.mark.full
@pytest.mark.parametrize("ranks", ((1, 1), (2, 1, 1)), ids=("2 nodes", "3 nodes"))
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_gpt_in_namespaces(zerod, tmp_path, stage, ranks):
    """The GPT example, with each node in its own network: all weights are those of one node."""
    train = ["--lr", "3e-3", *SMALL]
    settings = {"world": {"size": sum(ranks)}, "zero_optimization": {"stage": stage, "reduce_bucket_size": 5000}}

    def start(spawn, folder):
        folder.mkdir()
        return [spawn(sys.executable, EXAMPLES / "gpt/train.py", *train, "--out", folder, rank=r,
                      env=environment() | {"WORLD_SIZE": str(sum(ranks))}) for r in range(sum(ranks))]

    daemon = zerod(settings)
    for process in start(daemon.spawn, tmp_path / "one"):
        assert process.wait(120) == 0, process.err()
    with contextlib.closing(Network(len(ranks))) as network:
        nodes = Nodes(zerod, tmp_path, ranks, settings, network=network)
        nodes.wait(start(nodes.spawn, tmp_path / "several"), 120)
        wanted = (tmp_path / "one/rank0.weights").read_bytes()
        for rank in range(sum(ranks)):
            assert (tmp_path / f"several/rank{rank}.weights").read_bytes() == wanted, f"rank {rank}"
        for d in nodes.daemons:
            d.stop()
