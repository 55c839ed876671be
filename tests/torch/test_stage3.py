# SPDX-License-Identifier: Apache-2.0
"""
Stage 3: a program for stages 1 and 2 runs unchanged with the same bits, and maps few weights at a time.

One model has a part for each known way of using weights. Every part has its own steps. Gradients are recorded before
they are pushed, and compared bit by bit between the stages.
"""

import contextlib
import copy
import hashlib
import io
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiers import full
from torch import nn
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[2]
D = 16


# ---- ways of using weights ------------------------------------------------------------------------------


class Nested(nn.Module):
    """A module with its own parameters around modules that have some too."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))
        self.inner = nn.Sequential(nn.Linear(D, 3 * D), nn.GELU(), nn.Sequential(nn.Linear(3 * D, D)))

    def forward(self, x):
        return self.inner(x * self.scale) * self.scale + self.shift


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(20, D), nn.Linear(D, D), nn.Linear(D, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        h = self.block(self.embedding(x.argmax(-1) % 20))
        return self.head(h) + F.linear(h.tanh(), self.embedding.weight)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.MultiheadAttention(D, 2, batch_first=True)
        self.two = nn.TransformerEncoderLayer(D, 2, 2 * D, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.two(self.one(x, x, x)[0])


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList([Nested() for _ in range(3)])
        self.weight, self.last = nn.Parameter(torch.eye(D)), nn.Linear(D, D)

    def by_hand(self, x):
        return F.linear(F.linear(x, self.weight).tanh(), self.last.weight)  # in no forward when it is recomputed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(checkpoint(self.by_hand, x, use_reentrant=self.reentrant))


class Both(torch.autograd.Function):
    """One autograd node that unpacks weights of two modules."""

    @staticmethod
    def forward(ctx, x, a, b):
        ctx.save_for_backward(x, a, b)
        return x @ a @ b

    @staticmethod
    def backward(ctx, grad):
        x, a, b = ctx.saved_tensors
        flat, out = x.flatten(0, -2), grad.flatten(0, -2)
        return grad @ b.t() @ a.t(), flat.t() @ (out @ b.t()), (flat @ a).t() @ out


class TwoOfOthers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return self.b(Both.apply(self.a(x), self.a.weight, self.b.weight))


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(D, D), nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x.to(self.down.weight.dtype)))


class Recovers(nn.Module):
    """A module that continues after a failure of one of its parts."""

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.deep = nn.Sequential(nn.Linear(D, D), nn.Bilinear(D, D, 3))  # the second gets wrong arguments

        def forward(self, x):
            return self.deep(x)

    def __init__(self):
        super().__init__()
        self.scale, self.part, self.other = nn.Parameter(torch.ones(D)), self.Fails(), nn.Linear(D, D)

    def forward(self, x):
        x = x * self.scale
        with contextlib.suppress(TypeError):
            x = self.part(x)
        return self.other(x) * self.scale


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.cell = nn.LSTM(D, D, batch_first=True), nn.GRUCell(D, D)

    def forward(self, x):
        h, _ = self.lstm(x)
        state = torch.zeros(x.shape[0], D)
        for t in range(h.shape[1]):
            state = self.cell(h[:, t], state)
        return state


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.eye(D) / (i + 1)) for i in range(2)])
        self.conv = nn.Conv1d(D, D, 3, padding=1)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))

    def forward(self, x):
        for weight in self.weights:
            x = x @ weight
        return self.normed(self.conv(x.transpose(1, 2)).transpose(1, 2))


def plain(part, x):
    return part(x).float().square().mean()


def twice(part, x):
    return part(part(x)).square().mean()


def autocast(part, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = part(x)
    return y.float().square().mean()


def penalty(part, x):
    """Return: a loss with the gradient of a gradient."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(part(x).tanh().sum(), x, create_graph=True)
    return grad.square().mean()


def offloaded(part, x):
    with torch.autograd.graph.save_on_cpu():
        return part(x).square().mean()


def mlp():
    return nn.Sequential(nn.Linear(D, 5 * D), nn.LayerNorm(5 * D), nn.GELU(), nn.Linear(5 * D, D), nn.Linear(D, 2))


PARTS = {
    "mlp": (mlp, plain), "nested": (Nested, plain), "twice": (Nested, twice), "tied": (Tied, plain),
    "attention": (Attention, plain), "checkpoint": (lambda: Checkpointed(False), plain),
    "reentrant": (lambda: Checkpointed(True), plain), "two-of-others": (TwoOfOthers, plain), "lora": (Lora, plain),
    "recovers": (Recovers, plain), "recurrent": (Recurrent, plain), "lists": (Lists, plain),
    "autocast": (mlp, autocast), "penalty": (mlp, penalty),
    "offloaded": (Nested, offloaded), "retained": (Nested, plain),
    "bf16": (lambda: mlp().bfloat16(), lambda part, x: plain(part, x.bfloat16())),
}  # fmt: skip


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleDict({name: make() for name, (make, _) in PARTS.items()})
        self.register_buffer("seen", torch.arange(5.0))


def batch(step, micro_batch, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    return torch.randn(2, 4, D, generator=generator, requires_grad=True)


def digest(tensor):
    return hashlib.sha1(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


# ---- mapped weights -------------------------------------------------------------------------------------


def pool_bytes(resident=False):
    """Return: the bytes of the pool of gathered weights in this process, mapped or resident (slow to count)."""
    total, inside = 0, False
    with open("/proc/self/smaps" if resident else "/proc/self/maps") as file:
        for line in file:
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = "/memfd:zerod.pool" in line
                if inside and not resident:
                    total += int(match[2], 16) - int(match[1], 16)
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


def nothing_left(opt):
    """No weight may be mapped, and autograd's hooks must be as before."""
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    if opt.stage < 3:
        return
    assert pool_bytes() == 0 and (opt.sharding is None or not any(opt.sharding._n_held))


def count_gathers(opt):
    """Return: [number of gather messages, number of hints], which is updated."""
    client, counts = opt._client, [0, 0]
    for i, name in enumerate(("gather", "prefetch")):
        def counted(*args, call=getattr(client, name), i=i):
            counts[i] += 1
            return call(*args)

        setattr(client, name, counted)
    return counts


# ---- bits -----------------------------------------------------------------------------------------------


def use_parts(names):
    """Runs one rank: two steps of two micro-batches with every part. Return: its results, as {name: digest}."""
    import zerod

    model, seen = Parts(), {}
    where = ["", 0]
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.__setitem__((*where, name, len(seen)), digest(p.grad)))
    opt = zerod.Optimizer(model, lr=1e-2, on_duplicate="accumulate")
    for step, name in enumerate(names):
        loss_of = PARTS[name][1]
        for round_ in range(2):
            for micro_batch in range(2):
                where[:] = name, 2 * round_ + micro_batch
                loss = loss_of(model.parts[name], batch(step, micro_batch, opt.rank))
                if name == "retained":
                    loss.backward(retain_graph=True)
                loss.backward()
                seen[name, where[1], "loss"] = loss.item()
            nothing_left(opt)
            with torch.no_grad():
                if name != "penalty":
                    seen[name, round_, "eval"] = loss_of(model.parts[name], batch(step, 9, 0)).item()
            nothing_left(opt)
            opt.step()
            nothing_left(opt)
    seen.update({("weights", name): digest(value) for name, value in model.state_dict().items()})
    opt.close()
    seen.update({("closed", name): digest(p) for name, p in model.named_parameters()})
    return seen


@pytest.mark.parametrize("world, names", [(2, ["tied", "lora", "reentrant"]), *full((1, list(PARTS)), (4, ["nested"]))])
def test_the_same_bits_in_all_stages(zerod, run, world, names):
    results = {}
    mapped = {"stage": 3, "stage3_on_one_node": "mapped"}
    for stage, zero in ((1, {"stage": 1}), (2, {"stage": 2}), (3, {"stage": 3}), ("3, mapped", mapped)):
        daemon = zerod({"world": {"size": world}, "zero_optimization": zero | {"reduce_bucket_size": 500}})
        results[stage] = run(daemon, use_parts, names=names)
    for rank in range(world):
        assert len(results[2][rank]) > 30 * len(names)
        for stage in (1, 3, "3, mapped"):
            assert list(results[stage][rank]) == list(results[2][rank])
            differing = [what for what, value in results[2][rank].items() if results[stage][rank][what] != value]
            assert not differing, f"stage {stage}, rank {rank}: {differing[:10]}"
    assert all(r[key] == results[2][0][key] for r in results[3] for key in r if key[0] in ("weights", "closed"))


# ---- the bound ------------------------------------------------------------------------------------------


class Unequal(nn.Module):
    """Modules of 0.25 to 4 MiB. Some are inside modules with their own parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.wide = nn.Linear(256, 1024), nn.Linear(1024, 1024)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(256, 4, 512, batch_first=True) for _ in range(2)])
        self.back, self.last, self.scale = nn.Linear(1024, 256), nn.Linear(256, 256), nn.Parameter(torch.ones(256))

    def forward(self, x, checkpointed=False):
        x = self.back(F.gelu(self.wide(self.first(x))))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return self.last(x * self.scale)


def measure(prefetch):
    """
    Runs one rank. Return: the largest module's bytes, the most mapped bytes, and gathers and hints in the last step.
    """
    import zerod

    model = Unequal()
    opt = zerod.Optimizer(model, lr=1e-3)
    zerod.stage3(model, prefetch=prefetch)
    peak = {"forward": 0, "backward": 0, "eval": 0}
    phase = ["forward"]

    def look(*_):
        if step == 1:
            peak[phase[0]] = max(peak[phase[0]], pool_bytes(resident=True))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(look)
            module.weight.register_post_accumulate_grad_hook(look)
    counts, gather = count_gathers(opt), opt._client.gather

    def gather_and_look(*args):
        gather(*args)
        peak[phase[0]] = max(peak[phase[0]], pool_bytes())

    opt._client.gather = gather_and_look
    for step in range(2):
        counts[:] = 0, 0
        for checkpointed in (False, True):
            phase[0] = "forward"
            loss = model(torch.randn(2, 4, 256), checkpointed).square().mean()
            phase[0] = "backward"
            loss.backward()
        opt.step()
    phase[0] = "eval"
    with torch.no_grad():
        model.eval()(torch.randn(2, 4, 256))
    largest = max(sum(p.numel() * 4 for p in m._parameters.values() if p is not None) for m in model.modules())
    opt._client.gather = gather
    with zerod.gathered(model):
        assert pool_bytes(resident=True) >= sum(p.numel() * 4 for p in model.parameters())  # the measurement works
    nothing_left(opt)
    opt.close()
    return largest, peak, counts


@pytest.mark.parametrize("prefetch", [*full(0, 2), 1])
def test_few_weights_are_mapped(zerod, run, prefetch):
    daemon = zerod({"world": {"size": 1}, "zero_optimization": {"stage": 3}})
    largest, peak, (n_gathers, n_hints) = run(daemon, measure, prefetch=prefetch)[0]
    assert largest > 4e6
    # Prefetched weights are not mapped, so the limit is one module's weights, however much is prefetched.
    assert largest <= peak["forward"] <= 1.05 * largest, peak
    assert largest <= peak["backward"] <= 1.05 * largest, peak
    assert largest <= peak["eval"] <= 1.05 * largest, peak
    assert (n_hints > n_gathers / 2) == (prefetch > 0), (n_gathers, n_hints)


# ---- reading and writing outside of the forward ---------------------------------------------------------


def outside():
    """Runs one of two ranks. Rank 1's model is on the meta device."""
    import zerod

    rank = int(os.environ["RANK"])
    with torch.device("meta" if rank else "cpu"):
        model = Parts()
    opt = zerod.Optimizer(model, lr=1e-2)
    assert torch.equal(model.seen, torch.arange(5.0))
    nothing_left(opt)

    whole = model.state_dict()
    tied = "parts.tied.embedding.weight", "parts.tied.head.weight"
    assert whole[tied[0]].data_ptr() == whole[tied[1]].data_ptr()  # still tied
    assert model.parts["tied"].state_dict(prefix="a.")["a.head.weight"].shape == (20, D)
    kept = model.state_dict(keep_vars=True)
    assert kept[tied[0]] is model.parts["tied"].embedding.weight
    nothing_left(opt)
    seen = {name: digest(value) for name, value in whole.items()}

    with zerod.gathered(model.parts["tied"]):
        copied = copy.deepcopy(model.parts["tied"])
    with zerod.gathered(model):
        file = io.BytesIO()
        torch.save(model.parts["nested"], file)
    nothing_left(opt)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for m, name in ((copied, "tied"), (loaded, "nested")):
        assert all(torch.equal(v, whole[f"parts.{name}.{k}"]) for k, v in m.state_dict().items())
        plain(m, batch(0, 0, 0)).backward()  # an ordinary module
        assert all(p.grad is not None for p in m.parameters())
    assert not opt.has_gradients

    changed = {name: value + 1 for name, value in whole.items()}
    model.load_state_dict(changed)
    nothing_left(opt)
    for name, value in model.state_dict().items():
        assert torch.equal(value, changed[name]), name
    with zerod.writable(model), torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    with zerod.gathered(model.parts["nested"].scale):
        assert torch.equal(model.parts["nested"].scale, changed["parts.nested.scale"] * 0.5)
    plain(model.parts["nested"], batch(0, 0, rank)).backward()
    opt.step()
    nothing_left(opt)
    seen.update({f"after {name}": digest(value) for name, value in model.state_dict().items()})

    class Interrupts(nn.Module):  # torch calls no hooks for a BaseException that is no Exception
        def forward(self, x):
            raise KeyboardInterrupt

    model.parts["nested"].inner[1] = Interrupts()
    with contextlib.suppress(KeyboardInterrupt):
        plain(model.parts["nested"], batch(0, 0, rank))
    plain(model.parts["mlp"], batch(0, 0, rank)).backward()
    opt.step()
    nothing_left(opt)
    opt.close()
    assert type(model.parts["nested"]._parameters) is dict
    return seen


def test_outside_of_the_forward(zerod, run):
    results = {}
    for stage in (2, 3):
        results[stage] = run(zerod({"zero_optimization": {"stage": stage}}), outside)
    assert results[3] == results[2] and results[3][0] == results[3][1]


# ---- refusals -------------------------------------------------------------------------------------------


def over_the_bound():
    import zerod

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 8)), nn.Linear(8, 8))
    opt = zerod.Optimizer(model, lr=1e-2)
    faults = []
    for call in (lambda: model(torch.ones(2, 8)), lambda: opt.step()):  # the error persists until it is cleared
        try:
            call()
        except zerod.OverQuota as fault:
            faults.append(fault)
    nothing_left(opt)
    opt.clear_fault()
    for _ in range(2):
        model[2](model[0](torch.ones(2, 8))).sum().backward()
        opt.step()
    nothing_left(opt)
    epoch = opt.epoch
    opt.close()
    return [(f.code, str(f)) for f in faults], epoch


def test_over_the_bound(zerod, run):
    daemon = zerod({"world": {"size": 1}, "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 330}})
    faults, epoch = run(daemon, over_the_bound)[0]
    assert [code for code, _ in faults] == [1401, 1401] and epoch == 2
    text = faults[0][1]
    assert "live parameters (stage3_max_live_parameters)" in text and "360" in text and "330" in text
    assert "raise zero_optimization.stage3_max_live_parameters" in text


READS_RELEASED = """
import torch, zerod
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
opt = zerod.Optimizer(model, lr=1e-2)
model(torch.ones(1, 4)).sum().backward()
def peeks():
    return [p.sum() for p in model.parameters()]
peeks()
print("it was read")
"""


def test_mapped_on_one_node(zerod, run):
    """On one node all weights are mapped, as in stage 2: no gather, no hook, and not more memory."""
    held = {}
    for name, zero in {"stage 2": {"stage": 2}, "stage 3": {"stage": 3, "stage3_on_one_node": "mapped"}}.items():
        daemon = zerod({"world": {"size": 1}, "zero_optimization": zero})
        held[name], sharding = run(daemon, read_everything)[0]
        assert sharding is None
        assert daemon.status()["stage"] == zero["stage"]
    assert held["stage 3"] == held["stage 2"]


def read_everything():
    """Runs one rank. Return: the classes of the daemon's memory, and the result of zerod.stage3()."""
    import zerod

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    opt = zerod.Optimizer(model, lr=1e-2)
    model(torch.ones(1, 64)).sum().backward()
    assert all(torch.isfinite(p).all() for p in model.parameters())  # with gathered weights this would end the process
    opt.step()
    sharding = zerod.stage3(model, prefetch=2)
    memory = {name: use for name, use in opt._client.status(10)["memory"].items() if name != "total"}
    opt.close()
    return memory, sharding


def test_a_released_weight_is_read(zerod, build, tmp_path):
    daemon = zerod({"world": {"size": 1}, "zero_optimization": {"stage": 3}})
    script = tmp_path / "peek.py"
    script.write_text(READS_RELEASED)
    process = daemon.spawn(sys.executable, script, rank=0, env={
        "PYTHONPATH": ROOT / "client" / "python", "ZEROD_LIBRARY": build.path("client/libzerod.so"),
        "OMP_NUM_THREADS": "1"})
    assert process.wait(120) == -signal.SIGSEGV, process.err()
    assert "it was read" not in process.out()
    text = process.err()
    assert "E1110 read of a released weight: rank 0, step 0\n  parameter      0.weight\n" in text
    assert "with zerod.gathered(model): ..." in text
    assert re.search(r'File ".*peek\.py", line 7 in (peeks|<listcomp>)', text), text
