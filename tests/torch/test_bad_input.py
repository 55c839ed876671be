# SPDX-License-Identifier: Apache-2.0
"""
Bad input: the exception with its whole text, compared with tests/torch/texts (ZEROD_UPDATE_GOLDEN=1 writes them); the
other rank's error; and that training continues where it can. Every wait has a limit, in ranks.py and in the processes
here.
"""

import copy
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import wait_for
from tiers import full
from torch import nn
from torch.distributed.algorithms.join import Join

TEXTS = Path(__file__).with_name("texts")
EXITS = Path(__file__).with_name("programs") / "exits.py"
ONE = {"world": {"size": 1}}
LONG = 180  # seconds; a program with torch starts slowly on a busy machine


def caught(call, *args, **kwargs):
    """Return: class and text of the exception that a call raises, with its notes."""
    try:
        call(*args, **kwargs)
    except BaseException as e:
        return "\n".join([f"{type(e).__name__}: {e}", *getattr(e, "__notes__", [])])
    return "nothing was raised"


def same(name, text):
    """Compares the text with the file of that name, without parts that differ in each run."""
    text = re.sub(r"/\S*/(nobody|zerod|plain)\.sock", r"/run/\1.sock", text)
    text = re.sub(r"test_bad_input\.py:\d+", "test_bad_input.py:LINE", text)
    text = re.sub(r"pid \d+|kill \d+", lambda m: m[0].split()[0] + " PID", text)
    text = re.sub(r"attached [0-9.]+ s ago", "attached T ago", text)
    text = re.sub(r"\n  bytes .*", "", text)  # depends on whether the first push was already summed
    text = re.sub(r"\d+ ms ago", "T ago", text).rstrip() + "\n"
    path = TEXTS / f"{name}.txt"
    if os.environ.get("ZEROD_UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.exists(), f"{path} is missing; this was said:\n{text}"
    assert text == path.read_text()


def all_same(texts):
    for name, text in texts.items():
        same(name, text)


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))


def batch(seed=0):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def train(model, opt, n_steps=1):
    """Does steps that must succeed. Return: how many were committed."""
    before = opt.epoch
    for _ in range(n_steps):
        model(batch()).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
    return opt.epoch - before


# ---- models that cannot be attached ----------------------------------------------------------------------


def wrong_places(zerod, folder):
    """Wrong daemons, sockets, ranks and numbers of ranks."""
    model, said = make_model(), {}
    (folder / "plain.sock").write_text("")

    said["no-daemon"] = caught(zerod.Optimizer, model, socket=str(folder / "nobody.sock"))
    said["not-a-socket"] = caught(zerod.Optimizer, model, socket=str(folder / "plain.sock"))
    said["lr-for-socket"] = caught(zerod.Optimizer, model, 1e-3)
    socket = os.environ.pop("ZEROD_SOCKET")
    said["no-socket"] = caught(zerod.Optimizer, model)
    os.environ["ZEROD_SOCKET"] = socket
    said["rank-not-a-number"] = caught(zerod.Optimizer, model, rank="two")
    said["rank-negative"] = caught(zerod.Optimizer, model, rank=-1)
    said["rank-beyond"] = caught(zerod.Optimizer, model, rank=7)
    rank = os.environ.pop("RANK")
    said["no-rank"] = caught(zerod.Optimizer, model)
    os.environ.update(RANK=rank, WORLD_SIZE="4")
    said["world-size"] = caught(zerod.Optimizer, model)
    os.environ["WORLD_SIZE"] = "1"
    return said


def wrapped_models(zerod):
    from torch import distributed
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    said = {"wrapped-ddp": caught(zerod.Optimizer, DistributedDataParallel(make_model()))}
    inside = nn.ModuleDict({"student": DistributedDataParallel(make_model()), "head": nn.Linear(2, 2)})
    said["wrapped-inside"] = caught(zerod.Optimizer, inside)
    said["wrapped-fully-shard"] = caught(zerod.Optimizer, fully_shard(make_model()))
    said["wrapped-fsdp"] = caught(zerod.Optimizer, FullyShardedDataParallel(make_model(), device_id=torch.device("cpu")))
    return said


def over_one_memory(name):
    """Return: a model with two parameters, or a parameter and a buffer, that share memory."""
    model = nn.ModuleDict({"a": make_model(), "b": make_model()})
    if name == "shared-memory":
        model["b"][0].weight.data = model["a"][0].weight.data
    elif name == "shared-memory-view":
        model["b"].register_parameter("packed", nn.Parameter(torch.randn(3, 10, 6)))
        model["a"][0].weight.data = model["b"].packed.data[1]
    else:
        model["a"].register_buffer("anchor", model["b"][2].weight.detach().t())
    return model


def wrong_parameters(zerod):
    said = {}

    def refused(name, model, params=None, **kwargs):
        said[name] = caught(zerod.Optimizer, *([model] if params is None else [params]),
                            **({} if params is None else {"model": model}), **kwargs)

    with_complex, not_leaf, model = make_model(), make_model(), make_model()
    double_gradients = make_model()
    double_gradients[0].weight.grad_dtype = torch.float64
    with_complex.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    computed = not_leaf[0].weight * 2
    refused("float64", make_model().double())
    refused("complex", with_complex)
    refused("gradients-of-float64", double_gradients)
    refused("meta", make_model().to("meta"))
    refused("not-leaf", not_leaf, [computed])
    refused("sparse-parameter", nn.ParameterList([nn.Parameter(torch.eye(3).to_sparse())]))
    refused("sparse-gradient", nn.Sequential(nn.Embedding(5, 6, sparse=True), make_model()))
    refused("empty-list", model, [])
    refused("no-trainable", make_model().requires_grad_(False))
    refused("no-parameters", nn.Tanh())
    refused("lazy", nn.Sequential(nn.LazyLinear(8), nn.Tanh()))
    refused("torchscript", torch.jit.script(make_model()))
    refused("foreign", model, [make_model()[0].weight])
    refused("twice-in-groups", model, [{"params": [model[0].weight]}, {"params": [model[0].weight]}])
    refused("not-a-parameter", model, ["0.weight"])
    refused("one-tensor", model, model[0].weight)
    said["no-model"] = caught(zerod.Optimizer, list(model.parameters()))
    refused("unknown-hyper", model, momentum=0.9)
    refused("negative-lr", model, lr=-0.5)
    refused("huge-lr", model, lr=1e300)
    refused("lr-of-text", model, lr="1e-3")
    refused("negative-weight-decay", model, [{"params": list(model.parameters()), "weight_decay": -1}])
    refused("betas-of-1", model, betas=(0.9, 1.0))
    refused("eps-nan", model, eps=float("nan"))
    refused("amsgrad", model, [{"params": list(model.parameters()), "amsgrad": True}])
    refused("maximize", model, maximize=True)
    refused("on-duplicate", model, on_duplicate="add")
    for name in ("shared-memory", "shared-memory-view", "shared-memory-buffer"):
        refused(name, over_one_memory(name))
    return said


def cannot_attach(folder):
    """After each refusal the rank is free again, and at the end it trains."""
    import zerod

    said = wrong_places(zerod, folder) | wrapped_models(zerod) | wrong_parameters(zerod)
    model = make_model()
    opt = zerod.Optimizer(model)
    said["rank-taken"] = caught(zerod.Optimizer, make_model())
    said["two-optimizers"] = caught(zerod.Optimizer, nn.Sequential(model[0]))
    n_steps = train(model, opt, 2)
    opt.close()
    return said, n_steps


def test_what_cannot_be_attached(zerod, start, tmp_path):
    said, n_steps = start(zerod(ONE), cannot_attach, folder=tmp_path).result()
    assert n_steps == 2
    all_same(said)


def shared_without_harm():
    """Shared memory that does no harm: column blocks of one tensor, frozen parameters, one parameter with two names."""
    import zerod

    packed, model = torch.randn(6, 20, generator=torch.Generator().manual_seed(1)), make_model()
    model.left, model.right = nn.Parameter(packed[:, :10]), nn.Parameter(packed[:, 10:])
    model.frozen = nn.Parameter(packed[0].clone(), requires_grad=False)
    model.frozen_too = nn.Parameter(model.frozen.data, requires_grad=False)
    model.again = model.left
    opt = zerod.Optimizer(model)
    before = model.left.detach().clone(), model.right.detach().clone()
    (model(batch()).sum() + (model.left - model.right).square().sum()).backward()
    opt.step()
    moved = [(a - b.detach()).abs().min().item() for a, b in zip(before, (model.left, model.right), strict=True)]
    opt.close()
    return moved


def test_memory_that_may_be_shared(zerod, start):
    assert min(start(zerod(ONE), shared_without_harm).result()) > 1e-4


def nobody(folder):
    """
    Becomes a user who may not connect. That user may not enter the folders above the socket's, so it starts inside.
    """
    import zerod

    os.chdir(folder)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    with pytest.raises(zerod.NotAllowed) as refused:
        zerod.Optimizer(make_model())
    assert refused.value.code == 1402
    return {"not-allowed": f"{type(refused.value).__name__}: {refused.value}"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user(zerod, start):
    daemon = zerod(ONE | {"listen": {"mode": "0666"}})
    os.chmod(daemon.socket.parent, 0o755)
    all_same(start(daemon, nobody, folder=daemon.socket.parent, variables={"ZEROD_SOCKET": daemon.socket.name}).result())


def test_old_torch():
    program = "import torch; torch.__version__ = '2.5.1+cpu'; import zerod"
    package = Path(__file__).resolve().parents[2] / "client" / "python"
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(package)},
                          capture_output=True, text=True, check=False)
    assert done.returncode == 1
    same("torch-version", done.stderr.splitlines()[-1])


# ---- misuse of an attached model -------------------------------------------------------------------------


def copies(zerod, model, opt, said):
    said["deepcopy-optimizer"] = caught(copy.deepcopy, opt)
    said["pickle-optimizer"] = caught(pickle.dumps, opt)
    other = copy.deepcopy(model)
    ordinary = torch.optim.SGD(other.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        other(batch()).pow(2).mean().backward()
        ordinary.step()
        ordinary.zero_grad()
    assert not opt.has_gradients, "the copy's gradients were pushed"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "the copy wrote to the model"
    assert not any(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True)), "the copy did not train"
    again = pickle.loads(pickle.dumps(model))
    again(batch()).pow(2).mean().backward()
    assert not opt.has_gradients and again[0].weight.grad is not None


def additions(model, opt, said):
    """Parameters that are added after the job was formed."""
    said["group-added"] = caught(opt.add_param_group, {"params": [nn.Parameter(torch.zeros(2))]})
    model[0].register_parameter("scale", nn.Parameter(torch.ones(1)))
    model[0].register_parameter("frozen", nn.Parameter(torch.ones(1), requires_grad=False))
    model.append(nn.Linear(6, 2))
    said["module-added"] = caught(lambda: model(batch()).pow(2).mean().backward())
    opt.abort_step()
    del model[3], model[0].frozen
    model[0].scale.grad = torch.ones(1)
    said["parameter-added"] = caught(lambda: model(batch()).pow(2).mean().backward())
    del model[0].scale
    opt.abort_step()
    weight = model[0].weight
    model[0].weight = nn.Parameter(torch.zeros(10, 6))
    said["parameter-replaced"] = caught(lambda: model(batch()).pow(2).mean().backward())
    opt.abort_step()
    model[0].weight = weight


def orders(model, opt, said):
    """step() and backward() in unusual orders."""
    said["step-without-backward"] = caught(opt.step)
    opt.abort_step()
    model(batch()).pow(2).mean().backward()
    loss = model(batch(1)).pow(2).mean()
    loss.backward(retain_graph=True)
    said["backward-twice"] = caught(loss.backward)
    said["backward-twice-again"] = caught(opt.step)
    opt.abort_step("the test wants it")
    model(batch()).pow(2).mean().backward()
    said["zero-grad-between"] = caught(opt.zero_grad)
    opt.clear_fault()
    model(batch()).pow(2).mean().backward()
    model(batch(1)).pow(2).mean().backward()
    said["zero-grad-after-micro-batch"] = caught(model.zero_grad)


def clips(model, opt, said):
    model(batch()).pow(2).mean().backward()
    said["clip-part"] = caught(nn.utils.clip_grad_norm_, model[0].parameters(), 1.0)
    said["clip-value"] = caught(nn.utils.clip_grad_value_, model.parameters(), 1.0)
    said["clip-infinity-norm"] = caught(nn.utils.clip_grad_norm_, model.parameters(), 1.0, norm_type=float("inf"))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    opt.step()
    assert norm > 1e-3 and abs(opt.result.grad_norm - norm.item()) < 1e-6


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("out of luck")


def fail(*_):
    raise ArithmeticError("out of luck")


def exceptions(model, opt, said):
    """
    The caller gets its own exception unchanged. The step then reports the incomplete backward. A step that is asked for
    too early is an error too.
    """
    import zerod

    handle = model[2].register_forward_hook(fail)
    said["in-forward"] = caught(model, batch())
    handle.remove()
    train(model, opt)

    said["in-backward"] = caught(lambda: model[2](Fails.apply(model[:2](batch()))).pow(2).mean().backward())
    said["in-backward-step"] = caught(opt.step)
    opt.clear_fault()
    train(model, opt)

    handle = model[0].weight.register_hook(fail)
    said["in-hook"] = caught(lambda: model(batch()).pow(2).mean().backward())
    said["in-hook-next"] = caught(lambda: model(batch()).pow(2).mean().backward())
    handle.remove()
    opt.abort_step("the test wants it")
    train(model, opt)

    model(batch()).pow(2).mean().backward()
    said["window-in-step"] = caught(zerod.writable(model).__enter__)
    opt.clear_fault()
    opt.step()


class Waits(torch.autograd.Function):
    """An autograd function whose backward signals that it was reached, and waits."""

    reached, go_on = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Waits.reached.set()
        assert Waits.go_on.wait(LONG)
        return grad


def beside_a_backward(model, call):
    """Makes the call in the middle of another thread's backward. Return: both exceptions."""
    loss, raised = model[2](Waits.apply(model[:2](batch()))).pow(2).mean(), []
    Waits.reached.clear(), Waits.go_on.clear()
    thread = threading.Thread(target=lambda: raised.append(caught(loss.backward)))
    thread.start()
    assert Waits.reached.wait(LONG)
    said = caught(call)
    Waits.go_on.set()
    thread.join()
    return said, raised[0]


def threads(model, opt, said):
    """No step uses half of a backward, or two backwards that ran at the same time."""
    said["step-beside-a-backward"], backward = beside_a_backward(model, opt.step)
    assert backward == "nothing was raised"
    opt.step()
    other = model(batch()).pow(2).mean()
    said["two-backwards"], backward = beside_a_backward(model, other.backward)
    assert said["two-backwards"] == backward
    assert "two backwards run at the same time" in caught(opt.step)
    opt.abort_step("the test wants it")
    train(model, opt)


def types(model, opt, said):
    """Gradients with another dtype than the declared one."""
    model[0].weight.grad_dtype = torch.bfloat16
    said["grad-dtype-changed"] = caught(lambda: model(batch()).pow(2).mean().backward())
    model[0].weight.grad = None
    model[0].weight.grad_dtype = torch.float32
    opt.abort_step("the test wants it")
    train(model, opt)


def storage(zerod, model, opt, said):
    said["assign"] = caught(model.load_state_dict, make_model().state_dict(), assign=True)
    train(model, opt)
    model.load_state_dict(make_model().state_dict())
    assert torch.equal(model[0].weight, make_model()[0].weight)
    model.to(memory_format=torch.channels_last)  # changes nothing for matrices
    train(model, opt)
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    said["ddp-afterwards"] = caught(DistributedDataParallel, model)
    said["fully-shard-afterwards"] = caught(fully_shard, model)
    said["data-parallel-afterwards"] = caught(nn.DataParallel, model)
    train(model, opt)
    model.half()
    said["half"] = caught(lambda: model(batch().half()).pow(2).mean().backward())
    said["half-again"] = caught(opt.step)


class SparseWeight(nn.Module):
    """A module with a sparse gradient that it does not declare."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 6))

    def forward(self, x):
        return nn.functional.embedding(torch.tensor([0, 1, 2, 3]), self.weight, sparse=True) * x


def sparse_gradient():
    """Both calls raise the same text, until it is cleared. Then the step succeeds without the sparse gradients."""
    import zerod

    model = nn.ModuleList([SparseWeight(), SparseWeight(), make_model()])
    opt = zerod.Optimizer(model)

    def backward():
        return (model[2](model[0](batch()) * model[1](batch()))).sum().backward()

    said, before = {"sparse-gradient-pushed": caught(backward)}, [p.clone() for p in model.parameters()]
    assert caught(opt.step) == caught(opt.step) == said["sparse-gradient-pushed"]
    opt.clear_fault()
    opt.step()
    assert [torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True)] == [True] * 2 + [False] * 4
    assert caught(backward).replace("step 1", "step 0") == said["sparse-gradient-pushed"]
    opt.abort_step()
    train(model[2], opt)
    opt.close()
    return said


def test_sparse_gradient(zerod, start):
    all_same(start(zerod(ONE), sparse_gradient).result())


def misuse():
    """Steps between the misuses show that training continues."""
    import zerod

    said, model = {}, make_model()
    opt = zerod.Optimizer(model)
    for what in (lambda: copies(zerod, model, opt, said), lambda: additions(model, opt, said),
                 lambda: orders(model, opt, said), lambda: clips(model, opt, said),
                 lambda: exceptions(model, opt, said), lambda: threads(model, opt, said),
                 lambda: types(model, opt, said), lambda: storage(zerod, model, opt, said)):
        assert train(model, opt, 2) == 2
        what()
    opt.close()
    return said


def test_misuse(zerod, start):
    all_same(start(zerod(ONE), misuse).result())


def in_no_group():
    """Every other parameter is trained. The parameters left out keep their values, and a text says why."""
    import zerod

    model = make_model()
    opt = zerod.Optimizer([{"params": model[2].parameters()}], model=model)
    before = [p.clone() for p in model.parameters()]
    model(batch()).pow(2).mean().backward()
    said = {"in-no-group": caught(opt.step)}
    assert caught(opt.step) == said["in-no-group"], "it stands until it is cleared"
    opt.clear_fault()
    opt.step()
    assert [torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True)] == [True] * 2 + [False] * 2
    model[0].requires_grad_(False)  # as the text advises
    assert train(model, opt, 2) == 2
    model[0].requires_grad_(True)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    assert caught(opt.step).startswith("WrongGradient: E1103")
    opt.close()
    return said


def test_parameter_in_no_group(zerod, start):
    all_same(start(zerod(ONE), in_no_group).result())


def join():
    import zerod

    opt = zerod.Optimizer(make_model())
    said = {"join": caught(Join, [opt])}
    opt.close()
    return said


def test_join(zerod, start):
    all_same(start(zerod(ONE), join).result())


# ---- models of other shapes ------------------------------------------------------------------------------


class Oddities(nn.Module):
    """Parameters without elements and without dimensions, tied ones, channels_last; buffers of any size."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(50 + rank)  # only rank 0's values count
        self.conv = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)  # BatchNorm's counter is an int64
        self.scale = nn.Parameter(torch.tensor(1.5 + rank))
        self.nothing = nn.Parameter(torch.zeros(0, 7))
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.down.weight = self.up.weight
        self.register_buffer("flags", torch.rand(5) < 0.5)
        self.register_buffer("counts", torch.randint(0, 99, (3,)))
        self.register_buffer("odd", torch.randint(0, 99, (7,), dtype=torch.uint8))
        self.register_buffer("unsaved", torch.randn(2), persistent=False)

    def forward(self, x):
        x = self.norm(self.conv(x)).mean((2, 3))
        return self.down(torch.tanh(self.up(x)) * self.scale) + self.nothing.sum()


def odd_shapes(stage):
    import zerod

    rank = int(os.environ["RANK"])
    model = Oddities(rank)
    expected = [Oddities(0).state_dict()[n] for n in ("flags", "counts", "odd")] + [Oddities(0).unsaved]
    opt = zerod.Optimizer(model, lr=0.1)
    for buffer, value in zip((model.flags, model.counts, model.odd, model.unsaved), expected, strict=True):
        assert buffer.dtype == value.dtype and torch.equal(buffer, value), "buffers are rank 0's"
    assert model.up.weight is model.down.weight
    reference = Oddities(0)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        for m, o in ((model, opt), (reference, plain)):
            m(x).pow(2).mean().backward()
            o.step()
            o.zero_grad()
        model.to(memory_format=torch.channels_last)  # it has this format already
    with zerod.gathered(model):
        assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6), name
    said = caught(model.to, memory_format=torch.contiguous_format) if stage < 3 else ""
    moved = caught(lambda: model(torch.randn(2, 3, 5, 5)).mean().backward()) if stage < 3 else ""
    return {"contiguous": said, "contiguous-backward": moved} if stage < 3 and rank == 0 else {}


@pytest.mark.parametrize("stage", [3, *full(1)])
def test_odd_shapes(zerod, run, stage):
    daemon = zerod({"zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD", "params": {"betas": None, "weight_decay": None}}})
    all_same(run(daemon, odd_shapes, stage=stage)[0])


# ---- effects on the other rank ---------------------------------------------------------------------------


def guilty():
    """Rank 1: drops a step in several ways."""
    import zerod

    model, said = make_model(), {}
    opt = zerod.Optimizer(model)
    model(batch()).pow(2).mean().backward()
    model(batch(1)).pow(2).mean().backward()
    opt.zero_grad()  # the first micro-batch is summed already, so all ranks abort
    train(model, opt)
    model(batch()).pow(2).mean().backward()
    said["asked-for-abort"] = caught(opt.abort_step, "the batch was bad")
    train(model, opt)
    handle = model[0].weight.register_hook(fail)
    said["hook-of-two"] = caught(lambda: model(batch()).pow(2).mean().backward())
    handle.remove()
    train(model, opt)  # repeats the micro-batch; the other rank is not affected
    opt.close()
    return said


def innocent():
    """Rank 0: repeats aborted steps."""
    import zerod

    model, said = make_model(), {}
    opt = zerod.Optimizer(model)

    def one_step(n_micro):  # the next call reports the abort
        for i in range(n_micro):
            model(batch(i)).pow(2).mean().backward()
        opt.step()

    for name in ("told-of-zero-grad", "told-of-abort", "told-of-exception"):
        said[name] = caught(one_step, 2 if name == "told-of-zero-grad" else 1)
        if said[name] != "nothing was raised":
            train(model, opt)
    n_steps = opt.epoch
    opt.close()
    return said, n_steps


def test_the_other_rank_is_told(zerod, start):
    daemon = zerod()
    ranks = [start(daemon, innocent, 0), start(daemon, guilty, 1)]
    said, n_steps = ranks[0].result()
    assert n_steps == 3
    told = said.pop("told-of-exception")  # only if a part of the abandoned backward was summed already
    assert told == "nothing was raised" or ("rank 1" in told and "out of luck" in told), told
    all_same(said | ranks[1].result())


# ---- how programs end ------------------------------------------------------------------------------------


def go_on(until):
    """Another rank, which trains up to step `until`. Return: the text of its next step."""
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    try:
        while opt.epoch < until:
            train(model, opt)
        model(batch()).pow(2).mean().backward()
        return caught(opt.step)
    except zerod.Error as e:
        return f"{type(e).__name__}: {e}"


def ends(daemon, build, rank, how, world_size=2):
    """Starts exits.py as a separate program."""
    root = TEXTS.parents[2]
    env = {"PYTHONPATH": root / "client/python", "ZEROD_LIBRARY": build.path("client/libzerod.so"), "OMP_NUM_THREADS": 1,
           "WORLD_SIZE": world_size}
    return daemon.spawn(sys.executable, EXITS, how, rank=rank, env=env)


@pytest.mark.parametrize("how", ["early", *full("backward", "done", "exits")])
def test_a_rank_that_ends_early_has_left(zerod, start, build, how):
    daemon = zerod()
    other = start(daemon, go_on, 0, until=4)
    program = ends(daemon, build, 1, how)
    assert program.wait(LONG) == 0, program.err()
    assert ("saved tensor(2.)" if how == "exits" else "the end") in program.out() and program.err() == ""
    said = other.result(LONG)
    if how == "backward":  # rank 0 gets the abort or the leave, whichever is first
        assert "rank 1" in said and ("E1007 left before the step" in said or "a rank has left" in said), said
    else:
        same("others-left", re.sub("micro-batch [01]", "micro-batch M", said))


@pytest.mark.parametrize("how, status, last_words", [
    ("raises", 1, "ArithmeticError: out of luck\n"), *full(("fails", 3, ""))])
def test_a_rank_that_fails_comes_back(zerod, start, build, how, status, last_words):
    daemon = zerod()
    other = start(daemon, go_on, 0, until=3)
    program = ends(daemon, build, 1, how)
    assert program.wait(LONG) == status
    assert program.err().endswith(last_words) and (last_words or not program.err())
    wait_for("the loss is noticed", lambda: "E1302 warning, rank lost" in daemon.log())
    assert "or             opt.close() before the process ends" in daemon.log()
    successor = ends(daemon, build, 1, "successor")
    assert successor.wait(LONG) == 0, successor.err()
    assert other.result(LONG) == "nothing was raised"


def never_asks(folder):
    """Does two steps, waits for the file `go`, then does the third."""
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    train(model, opt, 2)
    wait_for("go", (folder / "go").exists, 2 * LONG)
    for step in zerod.steps(opt, 4):
        with step:  # the other rank's successor withdraws its predecessor's pushes of the third step
            train(model, opt)
    opt.close()
    return opt.epoch


def test_interrupted_in_a_step(zerod, start, build, tmp_path):
    """
    Ctrl-C interrupts a call that waits for a rank that never asks. The rank has not left, so a successor may attach.
    """
    daemon = zerod()
    other = start(daemon, never_asks, 0, folder=tmp_path)
    program = ends(daemon, build, 1, "waits")
    wait_for(program.err, lambda: "waits" in program.out(), LONG)
    time.sleep(0.5)  # the signal must work before and after step() has begun to wait
    began = time.monotonic()
    program.signal(signal.SIGINT)
    assert program.wait(60) in (130, -signal.SIGINT), program.err()
    assert time.monotonic() - began < 15 * build.patience
    assert program.err().rstrip().endswith("KeyboardInterrupt")
    wait_for("the loss is noticed", lambda: "E1302 warning, rank lost" in daemon.log())
    successor = ends(daemon, build, 1, "successor")
    (tmp_path / "go").touch()
    assert successor.wait(LONG) == 0, successor.err()
    assert other.result(LONG) == 4


def test_write_to_a_published_weight(zerod, start, build):
    """A finished program ends with status 0. If it trains on, it is refused; its successor has the job's weights."""
    daemon = zerod(ONE)
    done = ends(daemon, build, 0, "trains-on", world_size=1)
    assert done.wait(LONG) == 1
    said = done.err()
    assert re.search(r'exits\.py", line \d+, in train', said), said
    same("write", said[said.rindex("zerod.errors.WeightsWritten"):])
    assert ends(daemon, build, 0, "writes", world_size=1).wait(LONG) == 0


# ---- forks -----------------------------------------------------------------------------------------------


class Data(torch.utils.data.Dataset):
    """Workers of this data set inherit the connection, and use the optimizer."""

    def __init__(self, opt):
        self.opt, self.main = opt, os.getpid()

    def __len__(self):
        return 6

    def __getitem__(self, i):
        said = caught(self.opt.abort_step) if os.getpid() != self.main else "not in a worker"
        return torch.full((6,), i / 6.0), said


def in_child(call):
    """Return: the text of the exception that the call raises in a forked child."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(theirs, caught(call).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0
    return said


def forks():
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    train(model, opt)
    said = {
        "fork-backward": in_child(lambda: model(batch()).pow(2).mean().backward()),
        "fork-step": in_child(opt.step),
    }
    assert in_child(opt.close) == "nothing was raised"
    train(model, opt)
    opt.zero_grad()
    for x, from_worker in torch.utils.data.DataLoader(
        Data(opt), batch_size=2, num_workers=2, multiprocessing_context="fork"
    ):
        said["fork-worker"] = from_worker[0]
        model(x).pow(2).mean().backward()
        opt.step()
    n_steps = opt.epoch
    opt.close()
    return said, n_steps


def test_forked_children(zerod, start):
    said, n_steps = start(zerod(ONE), forks).result()
    assert n_steps == 5
    all_same(said)


def with_lingering_child(folder):
    """A child keeps the socket, like a worker whose parent was killed."""
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    train(model, opt)
    if os.fork() == 0:
        for _ in range(600):
            if (folder / "enough").exists():
                break
            time.sleep(0.1)
        os._exit(0)
    (folder / "forked").touch()
    time.sleep(600)


def succeed():
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    train(model, opt)
    n_steps = opt.epoch
    opt.close()
    return n_steps


def test_killed_while_a_worker_holds_the_socket(zerod, start, tmp_path):
    daemon = zerod(ONE)
    killed = start(daemon, with_lingering_child, folder=tmp_path)
    wait_for("forked", (tmp_path / "forked").exists, LONG)
    killed.kill()
    wait_for("the loss is noticed", lambda: "E1302 warning, rank lost" in daemon.log())
    assert start(daemon, succeed).result() == 2
    (tmp_path / "enough").touch()


@pytest.mark.parametrize("label", ("exception", "reason"))
@pytest.mark.parametrize("quote", ("RuntimeError: CUDA out of memory", "out of memory, says the program"))
def test_handlers_find_no_words_of_other_exceptions_in_a_fault(label, quote):
    """
    Handlers that search exceptions for words find none in a fault that quotes another exception, of this rank or of
    another one. Text and notes stay complete, also in copies.
    """
    import zerod

    text = f"E1302 step aborted\n  guilty         rank 1\n  cause          E1007\n                   {label:<14} {quote}\n  {label:<14} {quote}"
    fault = zerod.StepAborted(text)
    for one in (fault, pickle.loads(pickle.dumps(fault)), copy.copy(fault)):
        assert "out of memory" not in str(one) and one.text == text
        assert str(one).count("\n") == text.count("\n") and str(one).count("quoted below") == 2
        assert one.__notes__ == [f"  quoted         {quote}"] * 2
