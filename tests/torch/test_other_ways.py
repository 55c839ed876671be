# SPDX-License-Identifier: Apache-2.0
"""
Other ways to a gradient than model(x) and backward(), against torch doing the same: torch.compile, torch.func, .grad
set by hand, and a GradScaler whose gradients are clipped without unscale_().
"""

import pytest
import torch
from tiers import full
from torch import nn
from torch.func import functional_call, grad, vmap

STAGES = [2, 3]


def job(stage, **changes):
    return {"world": {"size": 1}, "zero_optimization": {"stage": stage}, "gradient_clipping": 0} | changes


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))


def batch(number):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def loss_of(call, number):
    return call(batch(number)).pow(2).mean()


class Both:
    """A model with zerod.Optimizer, and its twin with torch's."""

    def __init__(self):
        import zerod

        self.zerod = zerod
        self.model, self.twin = make_model(), make_model()
        self.opt = zerod.Optimizer(self.model)
        hypers = {k: self.opt.param_groups[0][k] for k in ("lr", "betas", "eps", "weight_decay")}
        self.plain = torch.optim.AdamW(self.twin.parameters(), **hypers)

    def step(self):
        for opt in (self.opt, self.plain):
            opt.step()
            opt.zero_grad()

    def check(self):
        with self.zerod.gathered(self.model):
            for ours, theirs in zip(self.model.parameters(), self.twin.parameters(), strict=True):
                assert torch.allclose(ours, theirs, rtol=5e-6, atol=1e-7)


# ---- torch.compile ---------------------------------------------------------------------------------------


def compiled(backend, n_micro, before):
    """before: the model is compiled before it is attached."""
    import zerod

    model, twin = make_model(), make_model()
    call = torch.compile(model, backend=backend) if before else None
    opt = zerod.Optimizer(model)
    call = call or torch.compile(model, backend=backend)
    hypers = {k: opt.param_groups[0][k] for k in ("lr", "betas", "eps", "weight_decay")}
    plain = torch.optim.AdamW(twin.parameters(), **hypers)
    for step in range(3):
        for run, optimizer in ((call, opt), (twin, plain)):
            for micro_batch in range(n_micro):
                loss_of(run, 10 * step + micro_batch).backward()
                assert opt.position.micro_batch == (micro_batch if optimizer is opt else 0)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        assert torch.allclose(call(batch(1)), twin(batch(1)), rtol=1e-5, atol=1e-6)
    with zerod.gathered(model):
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=5e-6, atol=1e-7)
    opt.close()


@pytest.mark.parametrize("stage, before", [(2, True), *full((2, False), (3, False), (3, True))])
def test_compile(zerod, start, stage, before):
    start(zerod(job(stage)), compiled, backend="aot_eager", n_micro=2, before=before).result()


@pytest.mark.full  # the first call makes C++ and compiles it
@pytest.mark.parametrize("stage", STAGES)
def test_inductor(zerod, start, stage):
    start(zerod(job(stage)), compiled, backend="inductor", n_micro=2, before=False).result(600)


# ---- torch.func ------------------------------------------------------------------------------------------


def weights_of(both, model):
    with both.zerod.gathered(both.model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def functional(both):
    for number in (1, 2):  # two micro-batches
        for model in (both.model, both.twin):
            functional_call(model, dict(model.named_parameters()), (batch(number),)).pow(2).mean().backward()
    both.step()
    both.check()


def transformed(both):
    """Transforms compute with tensors of their own: nothing is pushed."""
    found = []
    for model in (both.model, both.twin):
        weights = weights_of(both, model)

        def loss(w, x, model=model):
            return functional_call(model, w, (x,)).pow(2).mean()

        found.append((grad(loss)(weights, batch(3)), vmap(grad(loss), (None, 0))(weights, batch(3)[:, None])))
    for ours, theirs in zip(*found, strict=True):
        assert all(torch.allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-7) for name in theirs)
    assert not both.opt.has_gradients


def transformed_in_stage_3(both):
    with pytest.raises(RuntimeError, match=r"stage 3: .* with zerod.gathered\(model\): weights = "):
        grad(lambda x: both.model(x).sum())(batch(3))


def by_hand(both):
    """The step takes what a program put into .grad; so does clipping."""
    for max_norm in (None, 0.01):
        for model in (both.model, both.twin):
            weights = weights_of(both, model)
            found = grad(lambda w, m=model: functional_call(m, w, (batch(4),)).pow(2).mean())(weights)
            for name, param in model.named_parameters():
                param.grad = found[name]
        if max_norm:
            norms = [nn.utils.clip_grad_norm_(m.parameters(), max_norm) for m in (both.model, both.twin)]
            assert torch.allclose(*norms, rtol=1e-5)
        both.step()
        both.check()
    for model in (both.model, both.twin):
        found = torch.autograd.grad(loss_of(model, 5), list(model.parameters()))
        for param, gradient in zip(model.parameters(), found, strict=True):
            param.grad = gradient
    both.step()
    both.check()


def by_hand_too(both):
    """On top of a backward there are two gradients, and which of them is meant nobody can know."""
    loss_of(both.model, 6).backward()
    both.model[0].bias.grad = torch.ones(10)
    with pytest.raises(both.zerod.DuplicateGradient) as caught:
        both.opt.step()
    assert caught.value.params == ["0.bias"] and caught.value.cause_class == "D2"
    both.opt.abort_step()


def ways():
    both = Both()
    for way in (functional, transformed, by_hand, by_hand_too):
        way(both)
    if both.opt.stage == 3:
        transformed_in_stage_3(both)
    loss_of(both.model, 8).backward()
    loss_of(both.twin, 8).backward()
    both.step()
    both.check()
    both.opt.close()


@pytest.mark.parametrize("stage", STAGES)
def test_ways(zerod, start, stage):
    start(zerod(job(stage)), ways).result()


# ---- GradScaler ------------------------------------------------------------------------------------------


def clipped_scaled(unscale):
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms = []
    for step in range(3):
        scaler.scale(loss_of(model, step)).backward()
        if unscale:
            scaler.unscale_(opt)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]
    opt.close()
    return norms, weights


def test_clip_without_unscale(zerod, start):
    """The limit is meant for the gradients: torch would clip the scaled ones, and unscale what is left of them."""
    (scaled, weights), (norms, expected) = (
        start(zerod(job(2)), clipped_scaled, unscale=unscale).result() for unscale in (False, True))
    assert scaled == pytest.approx([1024 * n for n in norms])
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
