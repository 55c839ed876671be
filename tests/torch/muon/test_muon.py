# SPDX-License-Identifier: Apache-2.0
"""
Muon compared with torch.optim.Muon, which computes the iterations in bf16: with the original, and with a variant that
computes them in fp32. Then equal bits in every stage, with any number of ranks and threads, and after a checkpoint.
"""

import io
import shutil
import subprocess
from unittest import mock

import pytest
import torch
from conftest import merge
from ranks import Crash
from tiers import each_once, full
from torch import nn

SETTINGS = {"lr": 0.02, "weight_decay": 0.1}
BARE = {"betas": None, "weight_decay": None}  # removes keys of the tests' usual configuration
TOLERANCE = 5e-6  # as for other optimizers, docs/numerics.md
N_STEPS = 6


class Model(nn.Module):
    """Wide, tall and square matrices; an embedding and vectors; a head with the name that Transformers models use."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(40, 24), nn.Linear(24, 130), nn.Linear(130, 24)
        self.square, self.norm, self.head = nn.Linear(24, 24, bias=False), nn.LayerNorm(24), nn.Linear(24, 40, bias=False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens):
        return self.head(self.norm(self.square(self.down(torch.relu(self.up(self.embed(tokens)))))))


MATRICES = ("up.weight", "down.weight", "square.weight")


def make_model(dtype=torch.float32):
    torch.manual_seed(7)
    return Model().to(dtype)


def config(stage=2, ranks=2, params=None, **more):
    return merge({"optimizer": {"type": "Muon", "params": BARE | SETTINGS | (params or {})}, "world": {"size": ranks},
                  "zero_optimization": {"stage": stage}}, more)


def weights_of(model):
    import zerod

    with zerod.gathered(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def loss_of(model, step):
    """Return: a loss with the same gradients on all ranks, whose sums over 1, 2 or 4 ranks are exact."""
    import zerod

    with zerod.gathered(model):
        exact = [torch.randint(-8, 9, p.shape, generator=torch.Generator().manual_seed(100 * step + i)) / 16
                 for i, p in enumerate(model.parameters())]
        return sum((p * g.to(p.dtype)).sum() for p, g in zip(model.parameters(), exact, strict=True))


def train(steps, model, opt):
    for step in steps:
        loss_of(model, step).backward()
        opt.step()
        opt.zero_grad()


def distance(a, b):
    """Return: the largest difference, relative to max(|x|, rms of the tensor)."""
    scale = torch.maximum(b.abs(), b.pow(2).mean().sqrt())
    return ((a - b).abs() / scale).max().item()


# ---- against torch ------------------------------------------------------------------------------------------


def beside_torch(settings, in_fp32):
    """Return: for each parameter the difference after some steps, relative to the weights, and to their change."""
    import zerod

    theirs, model = make_model(), make_model()
    opt = zerod.Optimizer(model, type="Muon", **settings)
    matrices = [p for name, p in theirs.named_parameters() if name in MATRICES]
    known = {id(p) for p in matrices}
    muon = torch.optim.Muon(matrices, **settings)
    adamw = torch.optim.AdamW([p for p in theirs.parameters() if id(p) not in known], lr=settings["lr"],
                              weight_decay=settings["weight_decay"])
    for step in range(N_STEPS):
        tokens = torch.randint(0, 40, (4, 12), generator=torch.Generator().manual_seed(step))
        for m in (model, theirs):
            nn.functional.cross_entropy(m(tokens).view(-1, 40), tokens.roll(1, 1).view(-1)).backward()
        rounds = mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone) if in_fp32 else mock.MagicMock()
        with rounds:
            muon.step()
        adamw.step()
        opt.step()
        for each in (muon, adamw, opt):
            each.zero_grad()
    begun = dict(make_model().named_parameters())
    ours = dict(model.named_parameters())
    return {name: (distance(ours[name], p), ((ours[name] - p).norm() / (p - begun[name]).norm()).item())
            for name, p in theirs.named_parameters()}


CASES = {
    "usual": SETTINGS,
    "plain": SETTINGS | {"nesterov": False, "momentum": 0.8, "weight_decay": 0.0},
    "as AdamW": SETTINGS | {"adjust_lr_fn": "match_rms_adamw", "lr": 1e-3},
    "other iterations": SETTINGS | {"ns_steps": 3, "ns_coefficients": (1.5, -0.5, 0.0)},
}


@pytest.mark.parametrize("name", ["usual", "as AdamW", *full("plain", "other iterations")])
def test_equals_torch(zerod, start, name):
    """The weights agree, relative to their size and to their change."""
    for in_fp32, bound, way in ((True, TOLERANCE, 1e-4), (False, 1, 0.05)):
        found = start(zerod(config(ranks=1)), beside_torch, settings=CASES[name], in_fp32=in_fp32).result()
        assert all(a < bound and b < way for a, b in found.values()), (in_fp32, found)


# ---- the same bits ------------------------------------------------------------------------------------------


def run_steps(steps, dtype=torch.float32, load=None, clip=False):
    """Trains one rank. Return: weights and the whole state."""
    import zerod

    model = make_model(dtype)
    opt = zerod.Optimizer(model)
    if load is not None:
        whole = torch.load(io.BytesIO(load), weights_only=True)
        model.load_state_dict(whole["model"])
        opt.load_state_dict(whole["optimizer"])
    assert opt.epoch in (0, steps[0])
    for step in steps:
        loss_of(model, step).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    file = io.BytesIO()
    torch.save({"model": weights_of(model), "optimizer": opt.full_state_dict()}, file)
    weights = weights_of(model)
    opt.close()
    return weights, file.getvalue()


def unpacked(data):
    return torch.load(io.BytesIO(data), weights_only=True)


def assert_same(a, b):
    """Compares two results of run_steps()."""
    assert all(torch.equal(a[0][name], b[0][name]) for name in a[0])
    a, b = unpacked(a[1])["optimizer"]["state"], unpacked(b[1])["optimizer"]["state"]
    assert all(torch.equal(torch.as_tensor(a[i][k]), torch.as_tensor(b[i][k])) for i in a for k in a[i])
    assert [set(e) for e in a.values()] == [set(e) for e in b.values()]


KINDS = [("fp32", {}), ("bf16", {}), ("bf16", {"bf16": {"enabled": True, "bf16_optimizer_states": True}}),
         ("bf16", {"optimizer": {"params": {"optim_bits": 8, "master_weight_bits": 24}}})]
OTHERS = [  # (number of nodes, configuration)
    (1, {"zero_optimization": {"stage": 1}, "world": {"size": 2}, "threads": 1}),
    (1, {"zero_optimization": {"stage": 2, "reduce_bucket_size": 500}, "world": {"size": 4}, "threads": 3}),
    (1, {"zero_optimization": {"stage": 3}, "world": {"size": 2}}),
    (1, {"zero_optimization": {"stage": 3, "stage3_on_one_node": "gathered"}, "world": {"size": 4}, "weights": "shared"}),
    (2, {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5000}, "world": {"size": 4}}),
    (2, {"zero_optimization": {"stage": 2}, "world": {"size": 2}}),  # one bucket, so a node owns no matrix
    (3, {"zero_optimization": {"stage": 2, "reduce_bucket_size": 500}, "world": {"size": 4}}),
    (3, {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5000}, "world": {"size": 4}, "threads": 3}),
]


@pytest.mark.parametrize("kind, other", each_once(range(len(KINDS)), range(len(OTHERS))))
def test_same_bits(zerod, run, monkeypatch, kind, other):
    """Stages, ranks, nodes, buckets and threads do not change the bits if all ranks push the same gradients."""
    name, changes = KINDS[kind]
    n_nodes, more = OTHERS[other]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    how = {"steps": range(N_STEPS), "dtype": dtype, "clip": kind % 2 == 0}
    (expected,) = run(zerod(config(ranks=1, **changes)), run_steps, **how)
    if n_nodes > 1:
        monkeypatch.setenv("ZEROD_NODES", str(n_nodes))
    for got in run(zerod(merge(config(**changes), more)), run_steps, **how):
        assert_same(got, expected)


@pytest.mark.parametrize("n_nodes", [1, 2])
def test_state_goes_on(zerod, run, monkeypatch, n_nodes):
    """A run that continues in another job from state_dict() has the bits of an uninterrupted one."""
    (whole,) = run(zerod(config(ranks=1)), run_steps, steps=range(N_STEPS))
    (half,) = run(zerod(config(ranks=1)), run_steps, steps=range(N_STEPS // 2))
    monkeypatch.setenv("ZEROD_NODES", str(n_nodes))
    for got in run(zerod(config(stage=3)), run_steps, steps=range(N_STEPS // 2, N_STEPS), load=half[1]):
        assert_same(got, whole)


@pytest.mark.parametrize("before, after", [(1, 1), (3, 2)])
def test_checkpoint_into_other_ranks(zerod, run, tmp_path, monkeypatch, before, after):
    """A checkpoint is loaded on another number of nodes. before, after: numbers of nodes."""
    (whole,) = run(zerod(config(ranks=1)), run_steps, steps=range(N_STEPS))
    monkeypatch.setenv("ZEROD_NODES", str(before))
    daemon = zerod(config(ranks=3, checkpoint={"dir": str(tmp_path), "save_steps": N_STEPS // 2}))
    run(daemon, run_steps, steps=range(N_STEPS // 2))
    daemon.stop()
    monkeypatch.setenv("ZEROD_NODES", str(after))
    loads = {"dir": str(tmp_path), "load": "latest"}
    for got in run(zerod(config(stage=1, ranks=4, checkpoint=loads)), run_steps, steps=range(N_STEPS // 2, N_STEPS)):
        assert_same(got, whole)


def test_resize(zerod, run):
    (whole,) = run(zerod(config(ranks=1)), run_steps, steps=range(N_STEPS))
    daemon = zerod(config(ranks=2))
    run(daemon, run_steps, steps=range(N_STEPS // 2))
    daemon.ctl("resize", 4)
    daemon.world_size = 4
    for got in run(daemon, run_steps, steps=range(N_STEPS // 2, N_STEPS)):
        assert_same(got, whole)


def run_one_matrix(steps):
    """Trains a model that is one matrix. Return: all values of its state."""
    import zerod

    torch.manual_seed(7)
    model = nn.Linear(24, 24, bias=False)
    opt = zerod.Optimizer(model)
    assert opt.epoch in (0, steps[0])
    train(steps, model, opt)
    (state,) = opt.full_state_dict()["state"].values()
    opt.close()
    return [model.weight.detach().clone(), *map(torch.as_tensor, state.values())]


def test_node_without_elements(zerod, run, monkeypatch, tmp_path):
    """A node that owns no element reads the state, and loads a checkpoint."""
    (whole,) = run(zerod(config(ranks=1)), run_one_matrix, steps=range(N_STEPS))
    monkeypatch.setenv("ZEROD_NODES", "2")
    checkpoint = {"dir": str(tmp_path), "save_steps": N_STEPS // 2}
    daemon = zerod(config(checkpoint=checkpoint))
    run(daemon, run_one_matrix, steps=range(N_STEPS // 2))
    daemon.stop()
    loads = zerod(config(checkpoint={"dir": str(tmp_path), "load": "latest"}))
    for got in run(loads, run_one_matrix, steps=range(N_STEPS // 2, N_STEPS)):
        assert len(got) == len(whole) == 3 and all(map(torch.equal, got, whole))


def keys():
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    train(range(1), model, opt)
    return {name: set(opt.state[p]) for name, p in model.named_parameters()}


def test_keys_of_the_state(zerod, run):
    """The state's keys are those of torch."""
    matrices, others = {"step", "momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}
    for found in run(zerod(config()), keys):
        assert found == {name: matrices if name in MATRICES else others for name in found}


# ---- groups --------------------------------------------------------------------------------------------------


def who(groups):
    """Return: the parameters that Muon updates, in groups of (names, use_muon)."""
    import zerod

    model = make_model()
    of = dict(model.named_parameters())
    for name, param in of.items():
        param.requires_grad_(any(name in names for names, _ in groups))
    opt = zerod.Optimizer([{"params": [of[name] for name in names]} | more for names, more in groups], model=model)
    train(range(2), model, opt)
    return [b.name for b in opt._bound if b.muon]


def test_groups(zerod, start):
    """A group may ask for Muon or for AdamW."""
    groups = [(["embed.weight", "head.weight"], {"use_muon": True}), (["up.weight"], {"use_muon": False}),
              (["up.bias", "down.weight"], {})]
    found = start(zerod(config(ranks=1)), who, groups=groups).result()
    assert found == ["embed.weight", "down.weight", "head.weight"]


@pytest.mark.parametrize("more, text", [
    ({"use_muon": True}, "up.bias of shape .130,. is in a group with use_muon=True: Muon is for contiguous matrices; put "
                         "it into a group with use_muon=False"),
    ({"adjust_lr_fn": "rms"}, "adjust_lr_fn of parameter group 0 is 'rms'; expected None or one of original, match_rms"),
    ({"ns_steps": 100}, "ns_steps of parameter group 0 is 100; expected a whole number from 1 to 99"),
    ({"ns_coefficients": (1, 2)}, "ns_coefficients of parameter group 0 are .1, 2.; expected 3 numbers"),
    ({"momentum": 1.0}, "momentum of parameter group 0 is 1.0; expected a finite number of at least 0 and below 1"),
])  # fmt: skip
def test_wrong_settings(zerod, start, more, text):
    with pytest.raises(Crash, match=text):
        start(zerod(config(ranks=1)), who, groups=[(["up.weight", "up.bias"], more)]).result()


# ---- OpenBLAS ------------------------------------------------------------------------------------------------


def attach(**more):
    import zerod

    return zerod.Optimizer(make_model(), **more).optimizer_type


def test_without_openblas(zerod, start, build, tmp_path):
    """Only jobs with Muon need OpenBLAS. In this test another library has OpenBLAS's name."""
    shutil.copy(build.path("client/libzerod.so"), tmp_path / "libopenblas.so.0")
    file, env = tmp_path / "muon.yaml", {"LD_LIBRARY_PATH": str(tmp_path)}
    file.write_text(f"listen: {{socket: {tmp_path}/s}}\nworld: {{size: 1}}\noptimizer: {{type: Muon}}\n")
    text = "Muon needs OpenBLAS for POSIX threads (Debian: libopenblas0-pthread): libopenblas.so.0: it is another library"
    for more in (["--check"], []):
        result = subprocess.run([build.path("daemon/zerod"), "-c", file, *more], env=env, capture_output=True, text=True)
        assert result.returncode == 78 and text in result.stderr, result
    daemon = zerod({"optimizer": None, "world": {"size": 1}}, env)
    with pytest.raises(Crash, match="type is 'Muon', and the daemon's optimizer is AdamW"):
        start(daemon, attach, type="Muon").result()
    assert text in daemon.err()
    assert start(daemon, attach).result() == "AdamW"
