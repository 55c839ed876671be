# SPDX-License-Identifier: Apache-2.0
"""
overlap_update: the forward runs while the daemon still writes the weights. The bits are those of a run without overlap.
No old weight is read, however late the last weights come.
"""

import contextlib
import copy
import functools
import os
import pickle
import re
import signal
import time
import warnings

import late_cuda
import pytest
import torch
from tiers import full
from torch import nn

N_STEPS = 24
SLOW = {"ZEROD_FAILPOINT": "update:sleep:5@*"}  # each chunk takes 5 ms longer
STUCK = {"ZEROD_FAILPOINT": "update:sleep:60000@9"}  # the ninth chunk of the first step
CONFIG = {"gradient_clipping": 0.5, "zero_optimization": {"reduce_bucket_size": 100_000_000}}


class Model(nn.Module):
    """An embedding that shares the last layer's weight, attention (which reads a weight directly), dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(40, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def groups_of(model):
    """Return: typical groups: biases and norms, which share a bucket, without decay."""
    params = list(model.parameters())
    return [{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0}]


def loss_of(model, step, rank, scale=1.0):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 40, (4, 12), generator=generator)
    return scale * nn.functional.cross_entropy(model(tokens).view(-1, 40), tokens.roll(1, 1).view(-1))


def placed(function):
    """Adds an argument on_gpu: a stand-in for a GPU has the model, and the daemon's work is in host memory."""

    @functools.wraps(function)
    def run(*args, on_gpu=False, **kwargs):
        if on_gpu:
            late_cuda.install()
        result = function(*args, **kwargs)
        assert late_cuda.problems == []
        return result

    return run


@placed
def train(overlap, n_steps=N_STEPS, infinite=()):
    """Trains one rank. Return: loss, norm and whether it was applied for each step, and the final weights."""
    import zerod

    model = Model()
    opt = zerod.Optimizer(groups_of(model), model=model, lr=1e-2, overlap_update=overlap)
    seen = []
    for step in range(n_steps):
        loss = loss_of(model, step, opt.rank, float("inf") if step in infinite else 1.0)
        loss.backward()
        opt.step()
        opt.zero_grad()
        seen.append((loss.item(), opt.result.grad_norm, opt.result.applied, opt.epoch))
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    opt.close()
    return repr(seen), weights


def assert_same(runs, others):
    for (seen, weights), (other_seen, other_weights) in zip(runs, others, strict=True):
        assert seen == other_seen
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


PLACES = pytest.mark.parametrize("on_gpu", [False, True], ids=["host", "gpu"])


@PLACES
@pytest.mark.parametrize("env", [{}, SLOW], ids=["fast", "slow"])
def test_same_bits(zerod, run, env, on_gpu):
    """Clipped and skipped steps. Chunks take 5 ms, so a forward that did not wait would read old weights."""
    n_steps = 8 if env else N_STEPS
    infinite = (3, 5)
    with_it = run(zerod(CONFIG, env=env), train, overlap=True, n_steps=n_steps, infinite=infinite, on_gpu=on_gpu)
    without = run(zerod(CONFIG), train, overlap=False, n_steps=n_steps, infinite=infinite)
    assert_same(with_it, without)
    assert with_it[0][0].count("False") == len(infinite)


@pytest.mark.parametrize("config", [
    {"weights": "private"}, {"zero_optimization": {"stage": 3, "stage3_on_one_node": "gathered"}},
], ids=["private", "gathered"])
def test_waits_for_all(zerod, run, config):
    """In these configurations the forward waits for the whole step."""
    with_it = run(zerod(config, env=SLOW), train, overlap=True, n_steps=4)
    assert_same(with_it, run(zerod(config), train, overlap=False, n_steps=4))


@placed
def two_steps(overlap, after):
    """Does two steps on one rank, and `after` between them. Return: the result of `after`, and the final weights."""
    import zerod

    model = Model()
    opt = zerod.Optimizer(model, lr=1e-2, overlap_update=overlap)
    loss_of(model, 0, opt.rank).backward()
    opt.step()
    seen = after(zerod, opt, model)
    loss_of(model, 1, opt.rank).backward()
    opt.step()
    opt.close()  # ends with the weights of the last step
    return [] if seen is None else seen, {name: w.clone() for name, w in model.state_dict().items()}


def push_at_once(zerod, opt, model):
    """Pushes gradients that were known before, without a forward."""
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.01)
    opt.step()


def read_past_the_module(zerod, opt, model):
    zerod.wait(model.layers[3][1].weight)
    return [model.layers[3][1].weight.clone()]


def read_all(zerod, opt, model):
    zerod.wait()
    return [p.clone() for p in reversed(list(model.parameters()))]


def save(zerod, opt, model):
    return [w.clone() for w in model.layers[3].state_dict().values()]


def read_state(zerod, opt, model):
    state = opt.full_state_dict()["state"]
    return [value for i in sorted(state) for value in state[i].values() if isinstance(value, torch.Tensor)]


def evaluate(zerod, opt, model):
    model.eval()
    with torch.no_grad():
        out = model.layers[3][1](torch.ones(2, 32))
        last = model.head.weight[0].clone()
    model.train()
    return [out, last]


def write(zerod, opt, model):
    with zerod.writable(model), torch.no_grad():
        model.head.weight.mul_(0.5)
    return [model.head.weight.clone()]


@pytest.mark.parametrize("after", [push_at_once, read_past_the_module, read_all, save, read_state, evaluate, write],
                         ids=lambda after: after.__name__)
@PLACES
def test_between_steps(zerod, run, after, on_gpu):
    """Code before the next forward sees the weights of the step, or waits by itself."""
    config = {"world": {"size": 1}}
    (seen, weights), = run(zerod(config, env=SLOW), two_steps, overlap=True, after=after, on_gpu=on_gpu)
    (other_seen, other_weights), = run(zerod(config), two_steps, overlap=False, after=after)
    assert len(seen) == len(other_seen) and all(map(torch.equal, seen, other_seen))
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


class Lists(nn.Module):
    """Layers in containers that are never called. held: the model reads the layers by references from before."""

    def __init__(self, kind, held=False):
        super().__init__()
        if kind == "dict":
            self.weights = nn.ParameterDict({str(i): nn.Parameter(torch.randn(512, 512) / 16) for i in range(4)})
        else:
            self.weights = nn.ParameterList(torch.randn(512, 512) / 16 for _ in range(4))
        self.held = [list(self.weights.parameters())] if held else []

    def forward(self, x):
        weights = self.held[0] if self.held else self.weights.values() if isinstance(self.weights, nn.ParameterDict) else self.weights
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x


class Borrows(nn.Module):
    """Reads weights of linear layers without calling their forward, or before it. by: the way of reading."""

    def __init__(self, by):
        super().__init__()
        self.by = by
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x):
        if self.by == "forward":
            for layer in self.layers:
                x = layer.forward(x)
            return x
        x = nn.functional.linear(x, getattr(self.layers[3], "weight"))
        return self.layers[3](x) if self.by == "before its call" else x


READS = {
    "attention": lambda: nn.MultiheadAttention(512, 4, batch_first=True),  # reads out_proj.weight without calling out_proj
    "list": lambda: Lists("list"),
    "dict": lambda: Lists("dict"),
    "held list": lambda: Lists("list", held=True),
    "other's weight": lambda: Borrows("getattr"),
    "before its call": lambda: Borrows("before its call"),
    "forward": lambda: Borrows("forward"),
}


def reads(overlap, name):
    """Runs one rank. Return: this model's output after a step."""
    import zerod

    torch.manual_seed(7)
    model = READS[name]()
    opt = zerod.Optimizer(model, lr=1e-2, overlap_update=overlap)
    x = torch.ones(1, 2, 512)
    args = (x, x, x) if name == "attention" else (x,)
    out = model(*args)
    (out[0] if name == "attention" else out).sum().backward()
    opt.step()
    out = model(*args)
    opt.close()
    assert all(type(m._parameters) is dict for m in model.modules())
    return (out[0] if name == "attention" else out).detach().clone()


@pytest.mark.parametrize("name", ["attention", "list", "held list", "before its call",
                                  *full("dict", "other's weight", "forward")])
def test_weight_of_a_module_that_is_not_called(zerod, run, name):
    config = {"world": {"size": 1}, "threads": 1}
    late = zerod(config, env={"ZEROD_FAILPOINT": "update:sleep:20@*"})
    assert torch.equal(*run(late, reads, overlap=True, name=name), *run(zerod(config), reads, overlap=False, name=name))


def first_step(timeout=None):
    import zerod

    model = Model()
    opt = zerod.Optimizer(model, lr=1e-2, overlap_update=True, timeout=timeout)
    loss_of(model, 0, opt.rank).backward()
    opt.step()
    return zerod, opt, model


@placed
def copies_ahead():
    """Return: copies to the GPU in one hook, when all weights are written, and the number of trained parameters."""
    _, opt, model = first_step()
    while not all(opt._client.is_written(b.index) for b in opt._bound):
        time.sleep(0.01)
    before = late_cuda.counts["back"]
    model.embed(torch.zeros(1, dtype=torch.int64))
    n_copies = late_cuda.counts["back"] - before
    opt.close()
    return n_copies, len(list(model.parameters()))


def test_copies_ahead(zerod, run):
    """The first hook orders the copies of all weights that are written, so that they run beside the forward."""
    [(n_copies, n_params)] = run(zerod(CONFIG | {"world": {"size": 1}}), copies_ahead, on_gpu=True)
    assert n_copies == n_params


def forward_is_early():
    _, opt, model = first_step()
    began = time.monotonic()
    model.embed(torch.zeros(1, dtype=torch.int64))
    first = time.monotonic() - began
    opt.wait()
    return opt.epoch, first, time.monotonic() - began


def test_forward_does_not_wait_for_the_last_layer(zerod, run):
    """The forward begins before the last of about 60 chunks, which take 20 ms each. The first layer has one."""
    daemon = zerod({"world": {"size": 1}, "threads": 1}, env={"ZEROD_FAILPOINT": "update:sleep:20@*"})
    (epoch, first, whole), = run(daemon, forward_is_early)
    assert epoch == 1
    assert first < whole / 3


@placed
def wait_in_vain(pid, number, timeout):
    zerod, opt, model = first_step(timeout)
    model.embed(torch.zeros(1, dtype=torch.int64))  # these weights are already there
    os.kill(pid, number)
    said = []
    for call in (lambda: model(torch.zeros(1, 1, dtype=torch.int64)), opt.wait, opt.step):
        try:
            call()
        except (zerod.ConnectionLost, TimeoutError) as error:
            said.append((type(error).__name__, str(error)))
    return said


@PLACES
@pytest.mark.parametrize("number, kind, text", [
    (signal.SIGSTOP, "TimeoutError", "zerod did not answer within 1000 ms"),
    (signal.SIGKILL, "ConnectionLost", "zerod was stopped or killed|has closed the connection"),
], ids=["stopped", "killed"])
def test_daemon_does_not_go_on(zerod, start, number, kind, text, on_gpu):
    """The daemon dies or stops in the update for good. The forward raises the error that step() would raise."""
    daemon = zerod({"world": {"size": 1}, "threads": 1}, env=STUCK)
    said = start(daemon, wait_in_vain, pid=daemon.pid, number=number, timeout=1.0, on_gpu=on_gpu).result()
    with contextlib.suppress(ProcessLookupError):
        daemon.signal(signal.SIGCONT)
    daemon.kill()
    assert [name for name, _ in said] == [kind] * 3
    assert all(re.search(text, words) for _, words in said), said


def closes(pid):
    _, opt, model = first_step()
    os.kill(pid, signal.SIGKILL)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        opt.close()
    with torch.no_grad():
        model.embed.weight.fill_(1)  # is now this process's private memory
    return [str(w.message) for w in said], model.embed.weight.sum().item() == model.embed.weight.numel()


def test_close_without_the_daemon(zerod, start):
    """
    The daemon dies inside the update and is not restarted. close() returns the weights as they are, with a warning.
    """
    daemon = zerod({"world": {"size": 1}, "threads": 1}, env=STUCK)
    said, is_ours = start(daemon, closes, pid=daemon.pid).result()
    daemon.kill()
    assert is_ours and any("some weights may lack the last step" in text for text in said), said


def copies():
    zerod, opt, model = first_step()
    zerod.wait()
    expected = model.embed.weight.detach().clone()
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    opt.close()
    for other in (copied, pickled):
        other(torch.zeros(1, 1, dtype=torch.int64))
        other.eval()(torch.zeros(1, 1, dtype=torch.int64))
        assert torch.equal(other.embed.weight, expected) and other.state_dict()


def test_copies(zerod, start):
    """Copies of a model belong to no optimizer."""
    start(zerod({"world": {"size": 1}}), copies).result()


def interrupted():
    import signal as signals
    import threading

    # Tests started in the background of a shell inherit an ignored SIGINT.
    signals.signal(signals.SIGINT, signals.default_int_handler)
    zerod, opt, model = first_step()
    threading.Timer(0.3, lambda: signals.raise_signal(signals.SIGINT)).start()
    began = time.monotonic()
    try:
        opt.wait(model.layers[3].parameters())
    except KeyboardInterrupt:
        return time.monotonic() - began
    return None


def test_interrupted(zerod, start):
    daemon = zerod({"world": {"size": 1}, "threads": 1}, env=STUCK)
    assert start(daemon, interrupted).result() < 20 * daemon.patience
    daemon.kill()
