# SPDX-License-Identifier: Apache-2.0
"""
Frozen parameters that zerod cannot store: quantized ones, other dtypes and layouts, other devices. They stay the
program's own and must be equal on all ranks. The other parameters are trained as by torch.
"""

import io
import os

import late_cuda
import pytest
import torch
from tiers import full
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

class Packed(nn.Parameter):
    """Like bitsandbytes' Params4bit: codes in a parameter's bytes, and their scale as an attribute."""

    scale: torch.Tensor | None = None


def pack(weight, dtype=torch.uint8):
    scale = weight.abs().max() / 7
    codes = (weight / scale).round().add(8).to(torch.uint8)
    packed = Packed((codes[..., ::2] * 16 + codes[..., 1::2]).contiguous().view(dtype), requires_grad=False)
    packed.scale = scale
    return packed


def unpack(packed):
    codes = packed.data.view(torch.uint8)
    both = torch.stack([codes // 16, codes % 16], -1).flatten(-2)
    return (both.float() - 8) * packed.scale


class Adapted(nn.Module):
    """A quantized layer with a trained adapter."""

    def __init__(self, dtype=torch.uint8):
        super().__init__()
        self.weight = pack(torch.randn(8, 8), dtype)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return nn.functional.linear(x, unpack(self.weight)) + self.up(self.down(x))


def frozen(tensor):
    return nn.Parameter(tensor, requires_grad=False)


class Model(nn.Module):
    """A model that uses a parameter of each kind that zerod cannot store."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = Adapted(), Adapted(torch.bfloat16)  # the second layer's codes look like bf16 weights
        self.int8, self.wide = frozen(torch.randint(-3, 3, (8,)).to(torch.int8)), frozen(torch.randn(8).double())
        self.fp8 = frozen(torch.randn(8, 8).to(torch.float8_e4m3fn))
        self.phase, self.sparse = frozen(torch.randn(8, dtype=torch.complex64)), frozen(torch.eye(8).to_sparse())
        self.rows = frozen(torch.eye(8).to_sparse_csr())
        self.pair = frozen(TwoTensor(torch.randn(8), torch.randn(8)))
        self.norm, self.bias = nn.LayerNorm(8).requires_grad_(False), nn.Parameter(torch.zeros(8))

    def forward(self, x):
        x = self.norm(self.second(self.first(x).tanh()) @ self.fp8.float()) + self.pair.a * self.pair.b
        return (self.sparse @ x.t()).t() * self.int8.float() + self.wide.float() * self.phase.abs() + self.bias


OWN = {"int8", "wide", "fp8", "phase", "sparse", "rows", "pair", "first.weight", "second.weight"}
PUBLISHED = {"norm.weight", "norm.bias"}


def batch(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def pieces(param):
    """Return: the tensors of a parameter."""
    if isinstance(param, TwoTensor):
        return [param.a, param.b]
    return [param.data.values() if param.layout == torch.sparse_csr else param.data._values() if param.is_sparse else param]


def train(publish=True, all_in_groups=True):
    """
    Return: the losses with zerod and with torch, and the addresses of the frozen parameters before, during and after.
    """
    import zerod

    model, twin = Model(), Model()
    where = [addresses(model)]
    groups = [param for param in model.parameters() if param.requires_grad or all_in_groups]
    opt = zerod.Optimizer(groups, model=model, lr=0.05, publish_frozen=publish)
    where.append(addresses(model))
    hypers = {k: opt.param_groups[0][k] for k in ("lr", "betas", "eps", "weight_decay")}
    plain = torch.optim.AdamW([param for param in twin.parameters() if param.requires_grad], **hypers)
    losses = []
    for step in range(4):
        ours = model(batch(step, opt.rank)).square().mean()
        ours.backward()
        theirs = [twin(batch(step, rank)).square().mean() for rank in range(opt.world_size)]
        (sum(theirs) / opt.world_size).backward()
        losses.append((ours.item(), theirs[opt.rank].item()))
        for each in opt, plain:
            each.step()
            each.zero_grad()
    with zerod.gathered(model.first.weight):
        pass  # nothing is gathered, and asking is allowed
    through_files(model, opt)
    opt.close()
    where.append(addresses(model))
    return losses, where


def addresses(model):
    return {name: [piece.data_ptr() for piece in pieces(param)] for name, param in model.named_parameters() if not param.requires_grad}


def through_files(model, opt):
    """Saves and loads both states, which must stay equal."""
    file = io.BytesIO()
    torch.save([model.state_dict(), opt.state_dict()], file)
    weights, state = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert set(weights) == {name for name, _ in model.named_parameters()}
    assert state["names"] == [n for n, p in model.named_parameters() if any(p is q for g in opt.param_groups for q in g["params"])]
    before = fingerprint(model)
    model.load_state_dict(weights)
    opt.load_state_dict(state)
    assert fingerprint(model) == before


def fingerprint(model):
    import zerod

    with zerod.gathered(model):
        return [piece.detach().reshape(-1).view(torch.uint8).tolist() for param in model.parameters() for piece in pieces(param)]


@pytest.mark.parametrize("stage, publish, all_in_groups", [(2, True, True), (3, True, True), *full((2, False, True), (3, False, False))])
def test_stay_the_programs_own(zerod, run, stage, publish, all_in_groups):
    daemon = zerod({"zero_optimization": {"stage": stage}})
    for losses, (before, during, after) in run(daemon, train, publish=publish, all_in_groups=all_in_groups):
        assert all(ours == pytest.approx(theirs, rel=1e-5) for ours, theirs in losses), losses
        stayed = {name for name in before if before[name] == during[name]}
        assert stayed == OWN | (set() if publish else PUBLISHED)
        # torch's load_state_dict() allocates new memory for a sparse tensor.
        assert {name for name in before if before[name] == after[name]} == stayed - {"sparse"}


def attach():
    import zerod

    late_cuda.install()
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    late_cuda.elsewhere[model[0].weight.data_ptr()] = torch.device("cuda:1")
    before = model[0].weight.data_ptr()
    opt = zerod.Optimizer(model)
    model(torch.randn(2, 4)).sum().backward()
    opt.step()
    opt.close()
    return model[0].weight.data_ptr() == before


def test_on_another_device(zerod, start):
    """A frozen parameter is on another device than the model, with the daemon in host memory."""
    daemon = zerod({"world": {"size": 1}})
    assert start(daemon, attach).result()
    assert [param["name"] for param in daemon.json("params")] == ["0.bias", "1.weight", "1.bias", "(frozen)"]


# ---- equal on all ranks -----------------------------------------------------------------------------------


def differ(names, folder=None):
    """Rank 1 has other values in these parameters. folder: of a process group. Return: the refusal, or the values."""
    import zerod

    rank = int(os.environ["RANK"])
    if folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    model = Model()
    for name in names if rank else ():
        pieces(model.get_parameter(name))[0].detach().view(torch.uint8).flatten()[-1] ^= 1
    try:
        opt = zerod.Optimizer(model)
    except ValueError as e:
        return str(e)
    opt.close()
    if folder:
        torch.distributed.destroy_process_group()
    return fingerprint_of(model, OWN)


def fingerprint_of(model, names):
    return {name: [piece.detach().reshape(-1).view(torch.uint8).tolist() for piece in pieces(model.get_parameter(name))] for name in names}


def test_ranks_differ(zerod, run):
    """The rank with other values is refused, and the text names the parameter."""
    said = run(zerod({}), differ, names=["fp8"])
    assert said[0] == fingerprint_of(Model(), OWN)
    assert said[1].startswith("fp8 is frozen, torch.float8_e4m3fn, and differs from rank 0's when the job began: "), said[1]


def test_ranks_with_a_group_have_rank_0s(zerod, run, tmp_path):
    dense = ["int8", "wide", "fp8", "phase", "first.weight"]
    assert run(zerod({}), differ, names=dense, folder=str(tmp_path)) == [fingerprint_of(Model(), OWN)] * 2


# ---- thawed -----------------------------------------------------------------------------------------------


def thaw():
    import zerod

    model = Model()
    opt = zerod.Optimizer(model)
    model(batch(0, 0)).sum().backward()
    opt.step()
    model.wide.requires_grad_(True)
    with pytest.raises(zerod.WrongGradient, match=r"^E1103 (?s:.*)wide\n  cause          it was frozen or in no group"):
        model(batch(1, 0)).sum().backward()
    model.wide.requires_grad_(False).grad = None
    opt.step()
    opt.close()
    return opt.result.epoch


def test_thawed(zerod, start):
    assert start(zerod({"world": {"size": 1}}), thaw).result() == 2
