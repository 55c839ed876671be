# SPDX-License-Identifier: Apache-2.0
"""16-bit parameters and GradScaler, compared with torch's optimizer on fp32 master weights."""

import pytest
import torch
from test_optimizer import ADAM, TOLERANCE, distance
from tiers import full
from torch import nn

N_STEPS = 50


def make_model(dtype):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 12)).to(dtype)


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 12, generator=generator)
    return x, x.flip(1) * 3


def train(dtype, init_scale):
    """
    Trains one rank. Return: the pushed scaled gradients, scales, whether steps were applied, master weights, weights.
    """
    import zerod

    model = make_model(dtype)
    opt = zerod.Optimizer(model, **ADAM)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=8)
    record, scales, applied = [], [], []
    for step in range(N_STEPS):
        x, y = batch(step, opt.rank)
        grads = [None] * 4
        handles = [
            p.register_hook(lambda g, i=i: grads.__setitem__(i, g.clone())) for i, p in enumerate(model.parameters())
        ]
        scales.append(scaler.get_scale())
        scaler.scale((model(x.to(dtype)).float() - y).pow(2).mean()).backward()
        for handle in handles:
            handle.remove()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        record.append([g.float() for g in grads])
        applied.append(not opt.step_was_skipped)
    weights = [p.detach().clone() for p in model.parameters()]
    masters = [opt.master(name) for name, _ in model.named_parameters()]
    opt.close()
    return record, scales, applied, masters, weights


def feed(dtype, records, scales):
    """
    Trains fp32 master weights with torch's AdamW and GradScaler's rule, on the sum of two ranks' recorded gradients.
    """
    params = [nn.Parameter(p.detach().float()) for p in make_model(dtype).parameters()]
    opt, applied, expected_scales = torch.optim.AdamW(params, **ADAM), [], []
    scale, good = scales[0], 0
    for step in range(N_STEPS):
        expected_scales.append(scale)
        sums = [records[0][step][i] + records[1][step][i] for i in range(len(params))]
        finite = all(torch.isfinite(s).all() for s in sums)
        applied.append(finite)
        if finite:
            for p, s in zip(params, sums, strict=True):
                p.grad = s * (0.5 / scale)
            opt.step()
        good = good + 1 if finite else 0
        scale, good = (scale * 2, 0) if good == 8 else (scale if finite else scale / 2, good)
    return [p.detach() for p in params], applied, expected_scales


@pytest.mark.parametrize(("dtype", "init_scale"), [(torch.float16, 2.0**16), *full((torch.bfloat16, 1.0), (torch.float32, 8.0))])
def test_scaled_training_equals_torch(zerod, run, dtype, init_scale):
    daemon = zerod({"gradient_clipping": 0, "zero_optimization": {"stage": 2}})
    results = run(daemon, train, dtype=dtype, init_scale=init_scale)
    masters, applied, scales = feed(dtype, [r[0] for r in results], results[0][1])
    for _, got_scales, got_applied, got_masters, weights in results:
        assert got_applied == applied
        assert got_scales == scales
        assert max(distance(a, b) for a, b in zip(got_masters, masters, strict=True)) < TOLERANCE
        for weight, master in zip(weights, got_masters, strict=True):
            assert torch.equal(weight, master.to(dtype)), "16-bit weights are the rounded masters"
    if dtype == torch.float16:
        assert not all(applied), "the scale is meant to overflow"
    assert "E1201" not in daemon.log(), "a skip under a trainer's own scale is no report"


# ---- the daemon's own loss scale --------------------------------------------------------------------------


def scaled(n_steps, overflow_at=None):
    """A rank that multiplies by opt.loss_scale. Return: the scale before each step, and the final weights."""
    import zerod

    model = make_model(torch.float16)
    opt = zerod.Optimizer(model, run_id="scaled", **ADAM)
    scales = []
    while opt.position.step < n_steps:
        step = opt.position.step
        scales.append(opt.loss_scale)
        x, y = batch(step, opt.rank)
        loss = (model(x.to(torch.float16)).float() - y).pow(2).mean()
        (loss * (float("inf") if step == overflow_at else opt.loss_scale)).backward()
        opt.step()
        opt.zero_grad()
    last = opt.loss_scale
    weights = [p.detach().clone() for p in model.parameters()]
    opt.close()
    return scales, last, weights


FP16 = {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 1}}


def test_loss_scale_is_known_before_the_first_step(zerod, run):
    """
    The loss scale is known before the first step, also after a restart: the bits are those of an uninterrupted run.
    """
    whole = run(zerod(FP16), scaled, n_steps=8, overflow_at=2)
    daemon = zerod(FP16)
    first = run(daemon, scaled, n_steps=4, overflow_at=2)
    second = run(daemon, scaled, n_steps=8)
    for rank in range(2):
        assert whole[rank][0] == [256.0] * 3 + [128.0] * 5
        assert first[rank][0] + second[rank][0] == whole[rank][0]
        assert first[rank][1] == second[rank][0][0] == 128.0
        assert all(torch.equal(a, b) for a, b in zip(second[rank][2], whole[rank][2], strict=True))


def test_loss_scale_doubles_as_in_deepspeed(zerod, run):
    """
    docs/configuration.md: with a window of 3, the fourth step without overflow doubles the scale, then every third one.
    """
    fp16 = {"fp16": FP16["fp16"] | {"loss_scale_window": 3}}
    expected, scale = [], 256.0
    iteration, last_overflow = 0, -1  # deepspeed/runtime/fp16/loss_scaler.py of 0.19.8, with its variable names
    for step in range(16):
        expected.append(scale)
        stable = iteration - last_overflow - 1
        if step == 5:
            scale, last_overflow = scale / 2, iteration
        elif stable > 0 and stable % 3 == 0:
            scale *= 2
        iteration += 1
    for scales, last, _ in run(zerod(fp16), scaled, n_steps=16, overflow_at=5):
        assert scales == expected and last == scale
        assert [i for i in range(1, 16) if scales[i] > scales[i - 1]] == [4, 10, 13]


# ---- multiplication of the loss ---------------------------------------------------------------------------


def said_of(way):
    """Runs one rank. Return: the first step's text, and whether a second step succeeds after a read of the scale."""
    import zerod

    model = make_model(torch.float32)
    opt = zerod.Optimizer(model, **ADAM)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled="scaler" in way)
    x, y = batch(0, opt.rank)
    loss = (model(x) - y).pow(2).mean()
    if "program" in way:
        loss = loss * opt.loss_scale
    scaler.scale(loss).backward()
    try:
        scaler.step(opt)
        said = ""
    except zerod.LossScaleIgnored as e:
        said = str(e)
    norm = opt.result.grad_norm if opt.result else None
    opt.close()
    return said, norm


def test_somebody_multiplies_the_loss_once(zerod, run):
    """Without a multiplication gradients would be divided by 256. The norm shows that there was exactly one."""
    (unscaled, norm), _ = run(zerod(), said_of, way="nobody")
    assert not unscaled
    for way in ("program", "scaler"):
        for said, got in run(zerod(FP16), said_of, way=way):
            assert not said and got == pytest.approx(norm, rel=1e-6), way
    daemon = zerod(FP16)
    for said, got in run(daemon, said_of, way="nobody"):
        assert said.startswith("fp16 is enabled in the daemon's configuration, and no loss was multiplied by its scale of 256\n")
        assert "  fix            (loss * opt.loss_scale).backward()\n" in said and got is None
    assert daemon.status()["step"] == 0
    for said, got in run(zerod(FP16), said_of, way="program and scaler"):
        assert said.startswith("two loss scales: a GradScaler multiplies the loss, and the program has read opt.loss_scale\n")
        assert "  read at        test_amp.py:" in said and got is None
    assert run(zerod({"fp16": {"enabled": True, "loss_scale": 1}}), said_of, way="nobody") == [("", norm)] * 2


def ends_a_micro_batch():
    """Rank 1, which dies before the step."""
    import os

    import zerod

    model = make_model(torch.float32)
    opt = zerod.Optimizer(model, run_id="left", **ADAM)
    x, y = batch(0, opt.rank)
    ((model(x) - y).pow(2).mean() * opt.loss_scale).backward()
    opt._gradients.end_micro_batch()
    os._exit(1)


def asks_for_the_step():
    """Rank 1's successor, which has no loss to multiply in that step."""
    import zerod

    model = make_model(torch.float32)
    opt = zerod.Optimizer(model, run_id="left", **ADAM)
    position = opt.position
    if position.micro_batch == 0:
        x, y = batch(0, opt.rank)
        ((model(x) - y).pow(2).mean() * opt.loss_scale).backward()
    opt.step()
    opt.close()
    return position.micro_batch


def test_a_successor_without_gradients_of_its_own(zerod, start):
    daemon = zerod(FP16 | {"limits": {"reattach_timeout": "2min"}})
    first, gone = start(daemon, asks_for_the_step, rank=0), start(daemon, ends_a_micro_batch, rank=1)
    gone.join(120)
    assert (start(daemon, asks_for_the_step, rank=1).result(), first.result()) == (1, 0)


def forgets(guilty, n_steps=3):
    """All ranks read the scale, but the guilty rank does not use it. The first step overflows."""
    import zerod

    model = make_model(torch.float32)
    opt = zerod.Optimizer(model, **ADAM)
    for step in range(n_steps):
        x, y = batch(step, opt.rank)
        scale = opt.loss_scale * (1 if step else float("inf"))
        ((model(x) - y).pow(2).mean() * (1 if step and opt.rank in guilty else scale)).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@pytest.mark.parametrize("guilty", [[1], *full([0], [0, 2])])
def test_ranks_that_forget_the_scale_are_named(zerod, run, guilty):
    """
    Ranks that forget the scale are named at the first step that can be compared, because the one before overflowed.
    """
    daemon = zerod(FP16 | {"world": {"size": 3}, "diagnostics": {"on_nonfinite": "skip"}})
    run(daemon, forgets, guilty=guilty)
    found = [d for d in daemon.json("diagnostics") if d["code"] == "E1203"]
    assert len(found) == 1 and found[0]["step"] == 1, daemon.log()
    assert f"the gradients of rank{'s' if len(guilty) > 1 else ''} {', '.join(map(str, guilty))} are about" in daemon.log()


def test_nobody_is_named_who_multiplies(zerod, run):
    daemon = zerod(FP16 | {"world": {"size": 3}})
    run(daemon, forgets, guilty=())
    assert not any(d["code"] == "E1203" for d in daemon.json("diagnostics"))


def test_loss_scale_of_a_job_without_one(zerod, run):
    assert all(set(scales) == {1.0} for scales, _, _ in run(zerod(), scaled, n_steps=2))
