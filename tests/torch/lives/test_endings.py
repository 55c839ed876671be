# SPDX-License-Identifier: Apache-2.0
"""
Changes of a model after training, before zerod.Optimizer is closed or without closing it: adapters are merged, norms
are folded, modules are added. The same changes during training are refused.
"""

import copy

import pytest
import torch
from conftest import free_ports
from tiers import each_once, full
from torch import nn

N_STEPS = 3


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))


def batch(step=0, rank=0):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model, opt, n_steps):
    while opt.epoch < n_steps:
        model(batch(opt.epoch, opt.rank)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


def caught(call):
    """Return: the exception that a call raises, or None."""
    try:
        call()
    except Exception as e:
        return e


# ---- writes to published weights -----------------------------------------------------------------------


def merge(through_trainer, folder):
    """
    Merges the adapters into the base weights, as after fine-tuning. Return: the saved weights, and the expected ones.
    """
    import peft
    import zerod

    model = peft.get_peft_model(make_model(), peft.LoraConfig(target_modules=["0", "2"], init_lora_weights=False))
    if through_trainer:
        trainer, opt = trained_by_trainer(model, folder)
        trainer.train()
    else:
        opt = zerod.Optimizer(model)
        train(model, opt, N_STEPS)
    x = batch(99)
    with torch.no_grad():
        wanted = copy.deepcopy(model).merge_and_unload()
    merged = model.merge_and_unload()
    with torch.no_grad():
        outputs = merged(x), wanted(x)
    return opt.epoch, merged.state_dict(), wanted.state_dict(), outputs, merged(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = make_model()

    def forward(self, x, labels=None):
        out = self.inside(x)
        return {"loss": (out - labels).pow(2).mean()} if labels is not None else out


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"x": batch(i)[0], "labels": batch(i)[1]}


def trained_by_trainer(model, folder):
    import transformers
    import zerod

    net = Net()
    net.inside = model
    opt = zerod.Optimizer(net)
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=N_STEPS, per_device_train_batch_size=4, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True)
    return transformers.Trainer(net, args, train_dataset=Rows(), optimizers=(opt, None)), opt


@pytest.mark.parametrize("through_trainer", [*full(False), True])
def test_merge_and_unload(zerod, start, tmp_path, through_trainer):
    """The processes end with status 0, and the saved weights are merged."""
    pytest.importorskip("peft")
    daemon = zerod({"zero_optimization": {"stage": 2}})
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    ranks = [start(daemon, merge, rank, group, through_trainer=through_trainer, folder=tmp_path) for rank in range(2)]
    results = [rank.result() for rank in ranks]
    for n_steps, merged, wanted, (output, wanted_output), with_gradients in results:
        assert n_steps == N_STEPS
        assert merged.keys() == wanted.keys() and all(torch.equal(merged[name], wanted[name]) for name in wanted)
        assert not torch.equal(output, torch.zeros_like(output)) and torch.equal(output, wanted_output)
        assert torch.equal(with_gradients, output)
    for rank in ranks:
        rank.join(30)
        assert rank.exitcode == 0
    # Processes of multiprocessing end without C's exit handlers, so the daemon considers them lost.
    assert {said["code"] for said in daemon.json("diagnostics")} <= {"E1302"}


def write_and_go_on(way):
    """Rank 1 writes to a weight after its second step. Return: its error, and the final weights."""
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    train(model, opt, 2)
    said = None
    if opt.rank == 1:
        published = model[2].weight.detach().clone()
        with torch.no_grad():
            model[2].weight[1].mul_(0.5)
            model[0].bias += 1
            assert torch.equal(model[2].weight[1], published[1] * 0.5), "the write did not happen"
        said = caught({"forward": lambda: model(batch()), "step": opt.step, "window": lambda: zerod.writable(model).__enter__(),
                       "evaluated": lambda: model.eval()(batch()).mean().backward()}[way])
        again = caught(lambda: model.train()(batch()))
        assert type(again) is type(said), again
        opt.abort_step() if way == "step" else opt.clear_fault()
        assert torch.equal(model[2].weight, published), "what was written is still there"
    model.train()
    if way == "step":
        with __import__("contextlib").suppress(zerod.StepAborted):
            train(model, opt, N_STEPS)
    train(model, opt, N_STEPS)
    weights = [p.detach().clone() for p in model.parameters()]
    opt.close()
    return said, weights


@pytest.mark.parametrize("way, weights", each_once(("forward", "step", "window", "evaluated"), ("shared", "private")))
def test_write_in_the_midst(zerod, run, way, weights):
    """E1106 names all written parameters. Without the writes, training ends with the undisturbed weights."""
    job = {"zero_optimization": {"stage": 2}, "weights": weights}
    (_, other), (said, weights) = run(zerod(job), write_and_go_on, way=way)
    assert type(said).__name__ == "WeightsWritten" and said.code == 1106, said
    assert said.params == ["0.bias", "2.weight"] and "zerod.writable(model)" in said.fix, said
    assert "opt.close()" in said.field("or") and "write to its byte 0" in said.field("got"), said
    _, undisturbed = run(zerod(job), undisturbed_run)[1]
    for a, b, c in zip(weights, other, undisturbed, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def undisturbed_run():
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    train(model, opt, N_STEPS)
    weights = [p.detach().clone() for p in model.parameters()]
    opt.close()
    return None, weights


def write_the_same():
    """Writes equal values, like a broadcast of rank 0's weights, which all ranks already have."""
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    train(model, opt, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.clone())
    train(model, opt, N_STEPS)
    address, before = model[0].weight.data_ptr(), model[0].weight.detach().clone()
    train(model, opt, N_STEPS + 1)
    assert model[0].weight.data_ptr() == address and not torch.equal(model[0].weight, before), "the pages are not shared"
    with torch.no_grad():
        model[0].weight.zero_()
    opt.close()  # the program is done, so its writes stay
    return model[0].weight.abs().sum().item(), model[2].weight.abs().sum().item()


@pytest.mark.parametrize("weights", ["shared", *full("private")])
def test_write_of_the_same_values(zerod, run, weights):
    daemon = zerod({"zero_optimization": {"stage": 1}, "weights": weights})
    for written, other in run(daemon, write_the_same):
        assert written == 0 and other > 0
    assert daemon.json("diagnostics") == []


def write_in_threads():
    """Many threads write to many pages at the same time. No thread loses another one's writes."""
    import zerod

    torch.manual_seed(3)
    model = nn.Linear(1024, 2048, bias=False)
    opt = zerod.Optimizer(model)
    torch.set_num_threads(8)
    wanted = model.weight.detach() * 2 + 1
    with torch.no_grad():
        model.weight.mul_(2).add_(1)
    return torch.equal(model.weight, wanted), opt.epoch


def test_threads_write_at_once(zerod, run):
    assert run(zerod({"world": {"size": 1}}), write_in_threads) == [(True, 0)]


# ---- modules that are added later -----------------------------------------------------------------------


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.use_late = make_model(), False

    def forward(self, x):
        out = self.net(x)
        return self.late["more"](out) if self.use_late else out


def add_late():
    """A moving average and a reference model are added during training, and later one of them is trained."""
    import zerod

    model = Tower()
    opt = zerod.Optimizer(model)
    train(model, opt, 1)
    model.average = copy.deepcopy(model.net)  # a moving average
    model.late = nn.ModuleDict()
    model.late["more"] = nn.Linear(6, 6)  # in a module that was added later itself
    model.net[0].register_parameter("scale", nn.Parameter(torch.ones(1)))
    train(model, opt, 3)
    assert all(param.grad is None for param in model.average.parameters())
    model.use_late = True
    said = [caught(lambda: train(model, opt, 4)), caught(opt.step)]
    opt.abort_step()
    model.zero_grad()
    model.late.requires_grad_(False)
    train(model, opt, 5)
    model.late.requires_grad_(True)
    del model.late["more"]
    model.use_late = False
    train(model, opt, 6)
    n_steps = opt.epoch
    opt.close()
    return [f"{type(e).__name__}: {e}" for e in said], n_steps


def test_late_modules(zerod, start):
    """
    Late modules are allowed as long as they are not trained. Their first gradient raises an error, and the step too.
    """
    said, n_steps = start(zerod({"world": {"size": 1}}), add_late).result()
    assert n_steps == 6
    for text in said:
        assert text.startswith("WrongGradient: E1103 ") and "late.more.weight" in text, text
        assert "it came after zerod.Optimizer(model)" in text, text


def replace():
    """remove_weight_norm() after training; and a replaced weight during training."""
    import zerod

    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 6))
    opt = zerod.Optimizer(model)
    train(model, opt, 2)
    original = model[1].weight
    model[1].weight = nn.Parameter(torch.zeros(6, 4))
    said = [caught(lambda: train(model, opt, 3)), caught(opt.step)]
    opt.abort_step()
    model[1].weight = original
    model.zero_grad()
    train(model, opt, 4)
    wanted = model[0](batch())
    nn.utils.remove_weight_norm(model[0])
    assert torch.allclose(model[0](batch()), wanted) and "0.weight" in model.state_dict()
    n_steps = opt.epoch
    opt.close()
    return said, n_steps


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_replaced_parameters(zerod, start):
    said, n_steps = start(zerod({"world": {"size": 1}}), replace).result()
    assert n_steps == 4 and [fault.code for fault in said] == [1104, 1104]
    assert said[0].params == ["1.weight"] and "another parameter has taken the place of 1.weight" in said[0].field("got")


def reference_adapter():
    """
    As in DPO trainers, a second adapter, made after the optimizer, is the reference. Only the first adapter is trained.
    """
    import peft
    import zerod

    config = peft.LoraConfig(target_modules=["0", "2"])
    model = peft.get_peft_model(make_model(), config)
    opt = zerod.Optimizer(model)
    model.add_adapter("reference", config)
    for step in range(N_STEPS):
        model.set_adapter("reference")
        with torch.no_grad():
            wanted = model(batch(step, opt.rank))
        model.set_adapter("default")
        (model(batch(step, opt.rank)) - wanted - 1).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
    n_steps = opt.epoch
    opt.close()
    return n_steps, [p.detach().clone() for n, p in model.named_parameters() if "lora_B.default" in n]


def test_reference_adapter(zerod, run):
    pytest.importorskip("peft")
    (n_steps, ours), (_, theirs) = run(zerod({"zero_optimization": {"stage": 2}}), reference_adapter)
    assert n_steps == N_STEPS and len(ours) == 2
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(ours, theirs, strict=True))


def leaves(n_steps):
    import torch
    import zerod

    opt = zerod.Optimizer(torch.nn.Linear(4, 1), lr=0.1)
    applied = []
    for _ in range(n_steps if opt.rank == 0 else 1):
        opt.model(torch.ones(2, 4)).sum().backward()
        opt.step()
        applied.append(opt.result.applied)
    opt.close()
    return applied


def test_a_rank_that_left_misses_nothing(zerod, run):
    """The gradients of a rank that has left are not missing: there is no E1005, and on_missing skips no step."""
    daemon = zerod({"diagnostics": {"on_leave": "continue", "on_missing": "skip"}, "world": {"size": 2}})
    assert run(daemon, leaves, n_steps=6) == [[True] * 6, [True]]
    assert daemon.json("diagnostics") == []
