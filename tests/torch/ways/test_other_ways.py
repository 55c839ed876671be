# SPDX-License-Identifier: Apache-2.0
"""
Other ways to a gradient than model(x) and backward(), compared with torch: torch.func, .grad set by the program, and a
GradScaler whose gradients are clipped without unscale_(). test_compiled.py tests torch.compile.
"""

import warnings

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
    """A model with zerod.Optimizer, and its twin with a torch optimizer."""

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
    """Transforms compute with separate tensors, so nothing is pushed."""
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
    """The step and clipping use the gradients that a program put into .grad."""
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
    """
    If .grad is set after a backward, there are two gradients. zerod cannot know which one is meant, and refuses them.
    """
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


# ---- the order of clip_grad_norm_ and zero_grad, and other optimizers --------------------------------------


class Halves(nn.Module):
    """A model with two halves, of which a step uses one or both."""

    def __init__(self):
        super().__init__()
        self.a, self.b = make_model(), make_model()

    def forward(self, x, used):
        return sum(half(x) for half in (self.a, self.b)[used])


def train_beside_torch(script):
    """Runs script(model, opt, step) with zerod and with torch's SGD. Return: the difference, and the warnings."""
    import zerod

    model, twin = Halves(), Halves()
    sgd = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    ours, theirs = zerod.Optimizer(model, type="SGD", **sgd), torch.optim.SGD(twin.parameters(), **sgd)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(6):
            for m, o in ((model, ours), (twin, theirs)):
                SCRIPTS[script](m, o, step)
    distance = max((a - b).abs().max().item() for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    ours.close()
    return distance, [str(w.message) for w in said if "torch" in str(w.message) or "zerod" in str(w.message)]


def clip_first(m, o, step):
    nn.utils.clip_grad_norm_(m.parameters(), 1e-3)
    m(batch(step), slice(0, 2)).pow(2).mean().backward()
    o.step()
    o.zero_grad()


def clip_and_drop(m, o, step):
    """A batch is dropped after it was clipped."""
    m(batch(step + 10), slice(0, 2)).pow(2).mean().backward()
    nn.utils.clip_grad_norm_(m.parameters(), 1e-3)
    o.zero_grad()
    m(batch(step), slice(0, 2)).pow(2).mean().backward()
    o.step()
    o.zero_grad()


def zeros(m, o, step):
    """The second half is used in every other step."""
    o.zero_grad(set_to_none=False)
    m(batch(step), slice(0, 2 - step % 2)).pow(2).mean().backward()
    o.step()


def zeros_by_the_model(m, o, step):
    """Two micro-batches. zero_grad() sets the first half's gradients to None, and the second half's to zeros."""
    m.a.zero_grad()
    m.b.zero_grad(set_to_none=False)
    m(batch(step), slice(step % 2, 2)).pow(2).mean().backward()
    m(batch(step + 10), slice(step % 2, 2 - step // 2 % 2)).pow(2).sum().backward() if step != 3 else None
    o.step()


def nones(m, o, step):
    """The gradients of an unused half stay None."""
    o.zero_grad()
    m(batch(step), slice(0, 2 - step % 2)).pow(2).mean().backward()
    o.step()


SCRIPTS = {call.__name__: call for call in (clip_first, clip_and_drop, zeros, zeros_by_the_model, nones)}


@pytest.mark.parametrize("script", ["clip_first", "clip_and_drop", "zeros", *full("zeros_by_the_model", "nones")])
def test_order_of_calls(zerod, start, script):
    distance, said = start(zerod(job(2) | {"optimizer": None}), train_beside_torch, script=script).result()
    assert distance < 1e-6 and said == []


def clip_between():
    """clip_grad_norm_ after each of two micro-batches, where torch behaves differently; and a correct step."""
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for n_clips in (1, 2, 2):
            for micro in range(2):
                loss_of(model, micro).backward()
                if micro == 1 or n_clips == 2:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            n_said = len(said) if n_clips == 1 else None
            assert n_said in (0, None)
    opt.close()
    return [str(w.message) for w in said]


def test_clip_before_the_last_backward_is_told_once(zerod, start):
    (said,) = start(zerod(job(2)), clip_between).result()
    assert said.startswith("clip_grad_norm_ at test_other_ways.py:") and "came before the last backward of its step" in said


def beside_another():
    """
    torch optimizers together with zerod's: for the same parameters, for other parameters, and as a wrapper of zerod's.
    """
    import zerod

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups[0]["params"], {})

        def step(self, closure=None):
            return self.inner.step()

    model, other = make_model(), make_model()
    opt = zerod.Optimizer(model)
    wrapper, same, others = Wrapper(opt), torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
    said = {}
    for name, one in (("wrapper", wrapper), ("others", others), ("same", same)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for step in range(2):
                (loss_of(model, step) + loss_of(other, step)).backward()
                one.step()
                opt.zero_grad() if name != "wrapper" else None
        said[name] = [str(w.message) for w in found]
    opt.close()
    return said


def test_an_optimizer_of_torchs_beside_it_is_told_once(zerod, start):
    said = start(zerod(job(2)), beside_another).result()
    assert said["wrapper"] == said["others"] == []
    (text,) = said["same"]
    assert text.startswith("SGD.step() at test_other_ways.py:")
    assert "does nothing for 0.weight, 0.bias, 2.weight and 1 more: zerod.Optimizer trains these parameters" in text


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
    """Without unscale_(), the limit applies to the true gradients. torch would clip the scaled ones."""
    (scaled, weights), (norms, expected) = (
        start(zerod(job(2)), clipped_scaled, unscale=unscale).result() for unscale in (False, True))
    assert scaled == pytest.approx([1024 * n for n in norms])
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
