# SPDX-License-Identifier: Apache-2.0
"""
zerod.Optimizer compared with torch's optimizers. The gradients of a zerod run are recorded and replayed with torch, so
that both optimizers get the same numbers. The weights are compared element by element.
"""

import contextlib
import io
import re

import pytest
import torch
from tiers import full
from torch import nn
from torch.overrides import TorchFunctionMode

N_STEPS = 50
TOLERANCE = 5e-6  # after 50 steps, relative to max(|x|, rms of the tensor), docs/numerics.md


def make_model(dtype=torch.float32):
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Embedding(40, 24), nn.Linear(24, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 40, bias=False)
    ).to(dtype)


def make_groups(model):
    """Return: two typical groups, without decay for norms and biases."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 2e-3}]


def loss_of(model, step, micro_batch, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    tokens = torch.randint(0, 40, (4, 12), generator=generator)
    return nn.functional.cross_entropy(model(tokens).float().view(-1, 40), tokens.roll(1, 1).view(-1))


def torch_optimizer(kind, groups, hypers):
    classes = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}
    return classes[kind](groups, **hypers)


def replay(kind, hypers, n_micro=1, max_norm=None, use_groups=False, schedule=False, n_steps=N_STEPS, grad_dtype=None):
    """Trains one rank, and records its pushes: {step: [gradients of each micro-batch]}. grad_dtype None means fp32."""
    import zerod

    model = make_model()
    for p in model.parameters() if grad_dtype else ():
        p.grad_dtype = grad_dtype
    opt = zerod.Optimizer(make_groups(model) if use_groups else model, model=model, **hypers)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, n_steps) if schedule else None
    record = []
    originals = list(model.parameters())
    for step in range(n_steps):
        for micro_batch in range(n_micro):
            loss = loss_of(model, step, micro_batch, opt.rank)
            record.append([g.to(grad_dtype or g.dtype).float() for g in torch.autograd.grad(loss, originals)])
            loss_of(model, step, micro_batch, opt.rank).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        opt.step()
        opt.zero_grad()
        if scheduler:
            scheduler.step()
    weights = [p.detach().clone() for p in model.parameters()]
    opt.close()
    return record, weights


def feed(kind, hypers, records, n_micro=1, max_norm=None, use_groups=False, schedule=False, n_steps=N_STEPS, **_):
    """
    Runs torch's optimizer on the mean over two ranks of the summed micro-batches, added in the documented order. Where
    gradients nearly cancel, another order can change the sign, and Adam's first steps follow the sign.
    """
    model = make_model()
    opt = torch_optimizer(kind, make_groups(model) if use_groups else model.parameters(), hypers)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, n_steps) if schedule else None
    for step in range(n_steps):
        for i, p in enumerate(model.parameters()):
            total = torch.zeros_like(p)
            for m in range(n_micro):
                total += records[0][step * n_micro + m][i] + records[1][step * n_micro + m][i]
            p.grad = total * 0.5
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        opt.step()
        if scheduler:
            scheduler.step()
    return [p.detach() for p in model.parameters()]


def distance(a, b):
    """Return: the largest difference, relative to max(|x|, rms of the tensor)."""
    scale = torch.maximum(b.abs(), b.pow(2).mean().sqrt())
    return ((a - b).abs() / scale).max().item()


ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
BARE = {"betas": None, "weight_decay": None}  # removes keys of the tests' usual configuration
CASES = {
    "adamw": ("AdamW", "AdamW", {}, ADAM, {}),
    "adam": ("AdamW", "Adam", {"adam_w_mode": True}, ADAM, {}),
    "sgd": ("SGD", "SGD", {"momentum": 0.9}, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4}, {}),
    "nesterov": ("SGD", "SGD", {"momentum": 0.9, "nesterov": True}, {"lr": 0.05, "momentum": 0.9, "nesterov": True}, {}),
    "adagrad": ("Adagrad", "Adagrad", {}, {"lr": 0.02, "eps": 1e-10}, {}),
    "groups": ("AdamW", "AdamW", {}, ADAM, {"use_groups": True}),
    "scheduler": ("AdamW", "AdamW", {}, ADAM, {"schedule": True}),
    "clipping": ("AdamW", "AdamW", {}, ADAM, {"max_norm": 0.3}),
    "accumulation": ("AdamW", "AdamW", {}, ADAM, {"n_micro": 3}),
    "bf16-gradients": ("AdamW", "AdamW", {}, ADAM, {"grad_dtype": torch.bfloat16, "n_micro": 2}),
    "all-of-it": ("SGD", "SGD", {"momentum": 0.9}, {"lr": 0.05, "momentum": 0.9},
                  {"n_micro": 2, "max_norm": 0.5, "use_groups": True, "schedule": True}),
}  # fmt: skip
ALSO = ("adam", "nesterov", "groups", "scheduler", "clipping")  # all-of-it includes these, and adamw covers adam


@pytest.mark.parametrize("name", [name for name in CASES if name not in ALSO] + full(*ALSO))
def test_equals_torch(zerod, run, name):
    kind, type_, params, hypers, how = CASES[name]
    optimizer = {"type": type_, "params": BARE | {"lr": 1e-3} | params}
    daemon = zerod({"optimizer": optimizer, "zero_optimization": {"stage": 2}})  # no clipping, as in torch
    results = run(daemon, replay, kind=kind, hypers=hypers, **how)
    expected = feed(kind, hypers, [record for record, _ in results], **how)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(a, b), "ranks differ"
    worst = max(distance(a, b) for a, b in zip(results[0][1], expected, strict=True))
    assert worst < TOLERANCE


BAD = [["inf"], ["-inf"], ["inf", "-inf"], ["nan"], ["inf", "nan"], ["nan", "nan"]]


def norms_of_bad():
    """Does steps with bad gradient values on rank 1. Return: their norms, by zerod and by torch."""
    import zerod

    model = nn.Linear(4, 3)
    opt = zerod.Optimizer(model)
    found, expected = [], []
    for values in BAD:
        grads = [torch.ones_like(p) for p in model.parameters()]
        grads[0].view(-1)[: len(values)] = torch.tensor([float(value) for value in values])
        expected.append((nn.utils.get_total_norm(grads).item(),) * 3)
        if opt.rank == 0:
            grads = [torch.ones_like(p) for p in model.parameters()]
        sum((p * g).sum() for p, g in zip(model.parameters(), grads, strict=True)).backward()
        clipped = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        found.append((clipped.item(), opt.result.grad_norm, opt.grad_norm("weight")))
        assert not opt.result.applied and opt.grad_norm("bias") == pytest.approx(3**0.5)
    opt.close()
    return repr(found), repr(expected)


def test_norms_that_are_not_finite(zerod, run):
    for found, expected in run(zerod(), norms_of_bad):
        assert found == expected


@pytest.mark.parametrize("change", [
    {"momentum": 1.5}, {"momentum": -1}, {"nesterov": True, "momentum": 0}, {"nesterov": True, "dampening": 0.1},
    {"lr": -0.5}, {"lr": float("inf")}, {"weight_decay": -1}, {"dampening": float("nan")}])
def test_ranges_of_sgd(change):
    from zerod.optimizer import HYPERS, _check_hypers

    group = {"lr": torch.tensor(0.1), "momentum": 0.9, "dampening": 0, "nesterov": False, "weight_decay": 0}
    _check_hypers(HYPERS["SGD"], 0, group)
    with pytest.raises(ValueError, match=f"{next(iter(change))} of parameter group 0 "):
        _check_hypers(HYPERS["SGD"], 0, group | change)


def make_wide():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(24, 800), nn.GELU(), nn.Linear(800, 40))  # the first weight's push is a large one


def by_hooks(of_libzerod):
    """Trains with libzerod's hooks or in Python alone. Return: the number of pushes made in Python, and the weights."""
    import zerod
    from zerod import gradients

    gradients._HAVE_QUICK_HOOKS &= of_libzerod
    in_python, push = [], gradients.Gradients._push
    gradients.Gradients._push = lambda self, index, param: in_python.append(index) or push(self, index, param)
    model = make_wide()
    opt = zerod.Optimizer(model)
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + opt.rank)
        model(torch.randn(4, 24, generator=generator)).pow(2).mean().backward()
        assert all(p.grad is None for p in model.parameters())
        opt.step()
    weights = [p.detach().clone() for p in model.parameters()]
    opt.close()
    return len(in_python), weights


def test_hooks_of_libzerod(zerod, run):
    """libzerod's hooks leave a backward's first gradient to Python, which describes it, and push the other three."""
    quick, careful = (run(zerod(), by_hooks, of_libzerod=is_on) for is_on in (True, False))
    assert [n_in_python for n_in_python, _ in quick + careful] == [5, 5, 20, 20]
    for other in (quick[1], *careful):
        assert all(torch.equal(a, b) for a, b in zip(quick[0][1], other[1], strict=True))


class RaiseOnce(TorchFunctionMode):
    """Raises once when a hook asks whether its gradient is contiguous, where a signal's handler might run."""

    def __init__(self, error):
        self.error, self.n_asked = error, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.n_asked += function is torch.Tensor.is_contiguous
        if function is torch.Tensor.is_contiguous and self.n_asked == 1:
            raise self.error
        return function(*args, **(kwargs or {}))


def interrupted():
    import zerod

    model, outcomes = make_wide(), []
    opt = zerod.Optimizer(model)
    for error in (RuntimeError("as of a sparse gradient"), KeyboardInterrupt("stop")):
        mode = RaiseOnce(error)
        # torch disables modes in a backward, so the mode is entered there. It ends with the parameter's gradient.
        handle = model[0].weight.register_hook(lambda grad, mode=mode: mode.__enter__() and None)
        try:
            model(torch.ones(4, 24)).pow(2).mean().backward()
        except BaseException as e:
            outcomes.append(repr(e))
        handle.remove()
        outcomes.append(mode.n_asked)
    opt.close()
    return outcomes


def test_exceptions_in_hooks(zerod, run):
    """
    After a RuntimeError the gradient is pushed in Python, which asks again. Any other exception ends the backward.
    """
    assert run(zerod(), interrupted) == [[2, "KeyboardInterrupt('stop')", 1]] * 2


def emptied(where):
    """A program frees a gradient's memory: the first parameter's or the last one's, where backward begins."""
    import zerod

    def empty(param):
        param.grad.untyped_storage().resize_(0)

    model = make_wide()
    list(model.parameters())[where].register_post_accumulate_grad_hook(empty)
    opt = zerod.Optimizer(model)
    with pytest.raises(zerod.Error, match="data is NULL"):
        model(torch.ones(4, 24)).pow(2).mean().backward()
    opt.close()


@pytest.mark.parametrize("where", [0, -1])
def test_gradients_without_memory(zerod, run, where):
    run(zerod(), emptied, where=where)


def attaches():
    import zerod

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        model = make_model()
        opt = zerod.Optimizer(make_groups(model), model=model, weight_decay=0.05)
    opt.close()
    return said.getvalue()


def test_one_line_says_what_it_trains_with(zerod, run):
    daemon = zerod({"gradient_clipping": 0.5, "zero_optimization": {"stage": 3}})
    first, second = run(daemon, attaches)
    assert re.fullmatch(r"zerod: AdamW, stage 3, 2 ranks, lr [\d./]+, weight_decay [\d./]+, clipping to 0.5; "
                        rf"from the daemon at {daemon.socket}\n"
                        r"zerod: warning: the program overrules the daemon's configuration: .*weight_decay 0.1/0 and not .*\n", first), \
        first  # no group has 0.05
    assert second == ""
