# SPDX-License-Identifier: Apache-2.0
"""
Optimizer state in torch's form: its contents in files, loading it, and continuing with it. Gradients are the same on
all ranks and depend on the step's number, so that any two runs can be compared.
"""

import contextlib
import io
import os

import pytest
import torch
from conftest import free_ports, merge
from ranks import Crash
from test_optimizer import ADAM, BARE, TOLERANCE, distance, make_groups, make_model, torch_optimizer
from tiers import each_once, full
from torch import nn

HALF = 6  # steps before and after the state is moved


def readable(model):
    """Return: a context in which the model's weights are readable. Only a rank's model is zerod's."""
    if "RANK" not in os.environ:
        return contextlib.nullcontext()
    import zerod

    return zerod.gathered(model)


def train(model, opt, steps):
    """Does the steps with these numbers, with their gradients."""
    results = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        with readable(model):
            loss = sum((p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum() for p in model.parameters())
        loss.backward()
        opt.step()
        opt.zero_grad()
        results.append(getattr(opt, "result", None))
    return results


def weights_of(model):
    with readable(model):
        return [p.detach().clone() for p in model.parameters()]


def packed(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def unpacked(data):
    return torch.load(io.BytesIO(data), weights_only=True)


def worst(ours, theirs):
    return max(distance(a, b) for a, b in zip(ours, theirs, strict=True))


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def config(type_="AdamW", params=None, stage=2, **more):
    return {"optimizer": {"type": type_, "params": BARE | {"lr": 1e-3} | (params or {})}, "gradient_clipping": 0,
            "zero_optimization": {"stage": stage}, **more}


# ---- to and from torch ----------------------------------------------------------------------------------

KINDS = {
    "adamw": ("AdamW", "AdamW", {}, ADAM),
    "adam": ("AdamW", "Adam", {"adam_w_mode": True}, ADAM),
    "sgd": ("SGD", "SGD", {"momentum": 0.9}, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4}),
    "adagrad": ("Adagrad", "Adagrad", {}, {"lr": 0.02, "eps": 1e-10}),
}


def begins(hypers, form):
    """Runs one rank: trains, saves, trains on."""
    import zerod

    model = make_model()
    opt = zerod.Optimizer(make_groups(model), model=model, **hypers)
    train(model, opt, range(HALF))
    whole = {"model": model.state_dict(), "optimizer": getattr(opt, form)()}
    data = packed(whole)
    train(model, opt, range(HALF, 2 * HALF))
    return data, weights_of(model)


def goes_on(hypers, data, dtype=torch.float32, n_more=HALF):
    """Runs one rank: loads and trains on."""
    import zerod

    model = make_model(dtype)
    opt = zerod.Optimizer(make_groups(model), model=model, **hypers)
    whole = unpacked(data)
    model.load_state_dict(whole["model"])
    opt.load_state_dict(whole["optimizer"])
    train(model, opt, range(HALF, HALF + n_more))
    return weights_of(model), packed(opt.full_state_dict())


@pytest.mark.parametrize("name, form", each_once(tuple(KINDS), ("state_dict", "full_state_dict")))
def test_torch_goes_on(zerod, run, name, form):
    kind, type_, params, hypers = KINDS[name]
    daemon = zerod(config(type_, params))
    data, ours = run(daemon, begins, hypers=hypers, form=form)[1]  # from the rank that writes no files
    whole, model = unpacked(data), make_model()
    opt = torch_optimizer(kind, make_groups(model), hypers)
    model.load_state_dict(whole["model"])
    opt.load_state_dict(whole["optimizer"])
    train(model, opt, range(HALF, 2 * HALF))
    assert worst(ours, weights_of(model)) < TOLERANCE


@pytest.mark.parametrize("name, stage", each_once(tuple(KINDS), (2, 3)))
def test_goes_on_from_torch(zerod, run, name, stage):
    kind, type_, params, hypers = KINDS[name]
    model = make_model()
    opt = torch_optimizer(kind, make_groups(model), hypers)
    train(model, opt, range(HALF))
    data = packed({"model": model.state_dict(), "optimizer": opt.state_dict()})
    train(model, opt, range(HALF, 2 * HALF))
    for ours, full in run(zerod(config(type_, params, stage)), goes_on, hypers=hypers, data=data):
        assert worst(ours, weights_of(model)) < TOLERANCE
        for i, entry in unpacked(full)["state"].items():
            assert kind == "SGD" or entry["step"] == 2 * HALF
            for moment, value in opt.state_dict()["state"][i].items():
                if moment != "step":
                    assert distance(entry[moment], value) < TOLERANCE, (i, moment)


def starts_from(hypers, data):
    import zerod

    model = make_model()
    opt = zerod.Optimizer(make_groups(model), model=model, **hypers)
    opt.load_state_dict(unpacked(data))
    before = [opt.state[p]["sum"] for p in model.parameters()]
    train(model, opt, range(HALF))
    return before, weights_of(model)


@pytest.mark.parametrize("accumulated", [0.1, *full(0.0)])
def test_initial_accumulator_of_adagrad(zerod, run, accumulated):
    """Adagrad may have a moment that is not 0 before the first step."""
    _, type_, params, hypers = KINDS["adagrad"]
    model = make_model()
    opt = torch.optim.Adagrad(make_groups(model), **hypers, initial_accumulator_value=accumulated)
    data = packed(opt.state_dict())
    train(model, opt, range(HALF))
    for before, ours in run(zerod(config(type_, params)), starts_from, hypers=hypers, data=data):
        assert all(torch.equal(t, torch.full_like(t, accumulated)) for t in before)
        assert worst(ours, weights_of(model)) < TOLERANCE


# ---- files ----------------------------------------------------------------------------------------------


def interrupted(hypers, dtype):
    import zerod

    model = make_model(dtype)
    opt = zerod.Optimizer(make_groups(model), model=model, **hypers)
    train(model, opt, range(HALF))
    data = packed({"model": model.state_dict(), "optimizer": opt.state_dict()})
    train(model, opt, range(HALF, 2 * HALF))
    return data, weights_of(model), packed(opt.full_state_dict())


FP32, BF16 = {}, {"bf16": {"bf16_optimizer_states": True, "stochastic_rounding": True}}  # moments
EIGHT = {"optimizer": {"params": {"optim_bits": 8}}}
EIGHT_24 = {"optimizer": {"params": {"optim_bits": 8, "master_weight_bits": 24}}}


@pytest.mark.parametrize("name, dtype, moments", [
    ("adamw", torch.bfloat16, EIGHT_24), ("adamw", torch.float32, BF16), ("sgd", torch.float32, EIGHT),
    *full(("adamw", torch.bfloat16, FP32), ("adamw", torch.float32, FP32), ("adamw", torch.bfloat16, EIGHT), ("sgd", torch.float32, FP32), ("sgd", torch.bfloat16, BF16))])
def test_fresh_daemon_goes_on_bit_for_bit(zerod, run, name, dtype, moments):
    """
    A new daemon, also in another stage, continues bit for bit. 16-bit weights are loaded with their master weights.
    """
    _, type_, params, hypers = KINDS[name]
    data, wanted, state = run(zerod(merge(config(type_, params, 1), moments)), interrupted, hypers=hypers, dtype=dtype)[0]
    for stage in (2, 3):
        daemon = zerod(merge(config(type_, params, stage), moments))
        for ours, ours_state in run(daemon, goes_on, hypers=hypers, data=data, dtype=dtype):
            assert same(ours, wanted), f"stage {stage}"
            for i, entry in unpacked(state)["state"].items():
                for key, value in entry.items():
                    assert torch.equal(unpacked(ours_state)["state"][i][key], value), (stage, i, key)


def beside_other_weights(data):
    import zerod

    model = make_model(torch.bfloat16)
    opt = zerod.Optimizer(model)
    opt.load_state_dict(unpacked(data))
    before = weights_of(model)
    train(model, opt, [100])
    return before, weights_of(model)


def trained_bf16():
    import zerod

    model = make_model(torch.bfloat16)
    opt = zerod.Optimizer(model)
    train(model, opt, range(HALF))
    return packed(opt.state_dict())


def test_masters_of_other_weights_are_left_out(zerod, run):
    """A state that is loaded without its weights brings only moments, and leaves the weights unchanged."""
    data = run(zerod(config()), trained_bf16)[0]
    before, after = run(zerod(config()), beside_other_weights, data=data)[0]
    assert same(before, list(make_model(torch.bfloat16).parameters()))
    assert not same(before, after)


# ---- laziness -------------------------------------------------------------------------------------------


def counts_requests():
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    count, said = {"read_state": 0, "read_number": 0}, []
    for name in count:
        def counted(*args, name=name, real=getattr(opt._client, name)):
            count[name] += 1
            return real(*args)
        setattr(opt._client, name, counted)
    for _ in range(2):
        state_dict = opt.state_dict()
        assert len(opt.state) == len(state_dict["state"]) == len(list(model.parameters())) and all(opt.state.values())
        assert set(opt.state[next(model.parameters())]) == {"step", "exp_avg", "exp_avg_sq"}
        said.append(dict(count))
        train(model, opt, range(2))
    exp_avg = state_dict["state"][3]["exp_avg"]
    said.append(dict(count))
    plain = unpacked(packed(state_dict))["state"][3]
    return said, exp_avg, plain


def test_state_dict_reads_nothing_until_it_is_looked_at(zerod, run):
    for said, exp_avg, plain in run(zerod(config()), counts_requests):
        assert said == [{"read_state": 0, "read_number": 0}] * 2 + [{"read_state": 2, "read_number": 1}]
        assert torch.equal(exp_avg, plain["exp_avg"]) and exp_avg.abs().sum() > 0
        assert float(plain["step"]) == 4 and type(plain["exp_avg"]) is torch.Tensor


EDITS = {
    "in place": lambda opt, p: opt.state[p]["exp_avg"].zero_(),
    "in place, of a part": lambda opt, p: next(iter(opt.state.values()))["exp_avg_sq"][0].mul_(2),
    "of the step": lambda opt, p: opt.state[p]["step"].fill_(1),
    "assigned": lambda opt, p: opt.state[p].__setitem__("exp_avg", torch.zeros_like(p)),
    "a name of its own": lambda opt, p: opt.state[p].update(average=p.clone()),
    "deleted": lambda opt, p: opt.state[p].pop("exp_avg"),
    "entry cleared": lambda opt, p: opt.state[p].clear(),
    "entry deleted": lambda opt, p: opt.state.pop(p),
    "entry replaced": lambda opt, p: opt.state.update({p: {"step": torch.tensor(0.0)}}),
    "all cleared": lambda opt, p: opt.state.clear(),
    "all replaced": lambda opt, p: setattr(opt, "state", {}),
}


def edits_state():
    """Return: for each edit the next step's exception. load_state_dict() makes it valid, and the step succeeds."""
    import zerod

    model = make_model()
    opt = zerod.Optimizer(make_groups(model), model=model)
    said = {}
    for name, edit in EDITS.items():
        train(model, opt, [0])
        state = opt.state_dict()
        edit(opt, next(model.parameters()))
        said[name] = refusal_of_a_step(opt)
        state["state"][0]["exp_avg"].zero_()
        opt.load_state_dict(state)
        assert not opt.state[next(model.parameters())]["exp_avg"].any()
    groups = [group["params"] for group in opt.param_groups]
    groups[0].append(groups[1].pop())
    said["moved"] = refusal_of_a_step(opt)
    groups[1].append(groups[0].pop())
    # These are no edits: reading, putting back, changing a copy.
    train(model, opt, [1])
    opt.state.update({p: {k: v.to("cpu", copy=True) for k, v in entry.items()} for p, entry in opt.state.items()})
    opt.state[next(model.parameters())]["exp_avg"].clone().zero_()
    opt.state["own"] = 1
    train(model, opt, [2])
    opt.close()
    assert not opt.state
    return said


def refusal_of_a_step(opt):
    sum(p.sum() for group in opt.param_groups for p in group["params"]).backward()
    with pytest.raises(RuntimeError) as raised:
        opt.step()
    opt.abort_step()
    return str(raised.value)


def test_edits_of_the_state_are_refused(zerod, start):
    """The step after an edit is refused, with the edit's line. load_state_dict() makes the edit valid."""
    said = start(zerod(config() | {"world": {"size": 1}}), edits_state).result()
    for name, text in said.items():
        print(name, text, sep=": ")
        assert "test_optimizer_state.py:" in text and "opt.load_state_dict(state)" in text or name == "moved", (name, text)
    assert "exp_avg of 0.weight in opt.state was read at" in said["in place"] and "changed in place" in said["in place"]
    assert "param_groups[i]" in said["moved"] and "zerod.Optimizer(...)" in said["moved"]


def goes_back():
    """After some steps, loads the state from before the first step."""
    import copy

    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    first, lazy = copy.deepcopy(opt.full_state_dict()), copy.deepcopy(opt.state_dict())
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    train(model, opt, range(HALF))
    wanted = weights_of(model)
    results = []
    for state_dict in (first, lazy):
        model.load_state_dict(weights)
        opt.load_state_dict(state_dict)
        n_steps = [float(entry["step"]) for entry in opt.state.values()]
        train(model, opt, range(HALF))
        results.append((n_steps, same(weights_of(model), wanted)))
    return results


def test_state_without_entries_begins_anew(zerod, run):
    for results in run(zerod(config()), goes_back):
        for n_steps, as_first in results:
            assert set(n_steps) == {0.0} and as_first


# ---- refusals -------------------------------------------------------------------------------------------


def refused():
    import copy

    import zerod

    def text(change):
        state_dict = copy.deepcopy(good)
        change(state_dict)
        try:
            opt.load_state_dict(state_dict)
        except ValueError as e:
            return str(e)
        return "accepted"

    model = make_model()
    opt = zerod.Optimizer(model)
    train(model, opt, range(2))
    good = opt.state_dict()
    before = weights_of(model)
    texts = {
        "name": text(lambda s: s["names"].__setitem__(1, "encoder.weight")),
        "shape": text(lambda s: s["state"][1].__setitem__("exp_avg", torch.zeros(64, 25))),
        "kind": text(lambda s: [e.update(momentum_buffer=e.pop("exp_avg")) for e in s["state"].values()]),
        "half": text(lambda s: [e.pop("exp_avg_sq") for e in s["state"].values()]),
        "amsgrad": text(lambda s: s["param_groups"][0].update(amsgrad=True)),
        "groups": text(lambda s: s["param_groups"].append({"params": []})),
        "more": text(lambda s: s["param_groups"][0]["params"].append(6)),
        "strange": text(lambda s: s["state"].update(note="hello")),
        "good": text(lambda s: None),
    }
    unchanged = same(before, weights_of(model))
    train(model, opt, range(2, 4))
    opt.close()
    return texts, unchanged


def test_other_models_state_is_refused(zerod, run):
    daemon = zerod(config())
    for texts, unchanged in run(daemon, refused):
        assert "parameter 1 of the state is encoder.weight, here it is 1.weight" in texts["name"]
        assert "exp_avg of 1.weight has shape (64, 25), expected (64, 24)" in texts["shape"]
        assert "has exp_avg_sq, momentum_buffer: the daemon's AdamW (optimizer.type) keeps exp_avg, exp_avg_sq" in texts["kind"]
        assert "has exp_avg: the daemon's AdamW" in texts["half"]
        assert "amsgrad=True" in texts["amsgrad"]
        assert "groups of [6, 0] parameters, this optimizer of [6]" in texts["groups"]
        assert "groups of [7] parameters, this optimizer of [6]" in texts["more"]
        assert "an entry 'note'" in texts["strange"]
        assert texts["good"] == "accepted" and unchanged
    # Both ranks have the same gradients, and this is the only diagnostic.
    assert [d["code"] for d in daemon.json("diagnostics")] == ["E1111"] and daemon.status()["step"] == 4


def alone(loads):
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model)
    train(model, opt, range(2))
    if opt.rank == loads:
        opt.load_state_dict(opt.full_state_dict())
    train(model, opt, range(2, 4))


@pytest.mark.parametrize("loads", [0, 1])
def test_load_on_one_rank_only_ends(zerod, start, loads):
    """If only one rank loads a state, both ranks get an error that names the waiting rank and the late one."""
    daemon = zerod(config(diagnostics={"stall_warning": "500ms", "stall_timeout": "2s"}))
    ranks = [start(daemon, alone, rank, loads=loads) for rank in range(2)]
    texts = []
    for rank in ranks:
        with pytest.raises(Crash) as caught:
            rank.result()
        texts.append(str(caught.value))
    print("\n".join(texts))
    assert "write window" in texts[loads] and f"rank {1 - loads}" in texts[loads], texts


# ---- learning rates -------------------------------------------------------------------------------------

N_RATES = 12
L = torch.optim.lr_scheduler
SCHEDULERS = {
    "LambdaLR": lambda o: L.LambdaLR(o, lambda n: 0.9**n),
    "MultiplicativeLR": lambda o: L.MultiplicativeLR(o, lambda n: 0.8),
    "StepLR": lambda o: L.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: L.MultiStepLR(o, [2, 7], 0.1),
    "ConstantLR": lambda o: L.ConstantLR(o, 0.3, 4),
    "LinearLR": lambda o: L.LinearLR(o, 0.1, 1.0, 5),
    "ExponentialLR": lambda o: L.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: L.PolynomialLR(o, 10, 2.0),
    "CosineAnnealingLR": lambda o: L.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: L.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: L.CyclicLR(o, 1e-4, 1e-2, 3, cycle_momentum=False),
    "OneCycleLR": lambda o: L.OneCycleLR(o, 1e-2, total_steps=N_RATES + 1),
    "SequentialLR": lambda o: L.SequentialLR(o, [L.LinearLR(o, 0.1, 1.0, 3), L.ExponentialLR(o, 0.5)], [3]),
    "ChainedScheduler": lambda o: L.ChainedScheduler([L.ConstantLR(o, 0.5, 2), L.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: L.ReduceLROnPlateau(o, factor=0.5, patience=1),
}


def scheduled(opt, scheduler, step):
    """Does a step. Return: the hyperparameters of the first group in that step."""
    step()
    rate = float(opt.param_groups[0]["lr"])
    scheduler.step(1.0) if isinstance(scheduler, L.ReduceLROnPlateau) else scheduler.step()
    return rate, tuple(opt.param_groups[0]["betas"])


def with_schedulers(names):
    import warnings

    import zerod

    warnings.simplefilter("error")  # torch warns if a scheduler's step precedes the optimizer's
    model = make_model()
    opt = zerod.Optimizer(model, lr=2e-3)
    rates = {}
    for name in names:
        for group in opt.param_groups:
            group.update(lr=2e-3, betas=(0.9, 0.95))
            group.pop("initial_lr", None)
        scheduler = SCHEDULERS[name](opt)
        rates[name] = []
        for i in range(N_RATES):
            rates[name].append(scheduled(opt, scheduler, lambda i=i: train(model, opt, [i])))
            assert opt.result.lr == rates[name][-1][0], name
    return rates


def test_schedulers(zerod, run):
    """The daemon does every step with the rate and betas that torch's scheduler has set."""
    ours = run(zerod(config()), with_schedulers, names=list(SCHEDULERS))
    for name, make in SCHEDULERS.items():
        p = nn.Parameter(torch.zeros(1))
        opt = torch.optim.AdamW([p], lr=2e-3, betas=(0.9, 0.95))
        scheduler, rates = make(opt), []
        for _ in range(N_RATES):
            p.grad = torch.ones(1)
            rates.append(scheduled(opt, scheduler, opt.step))
        assert len(set(rates)) > 1
        for rank in ours:
            assert rank[name] == rates, name


def without_rates(lr=None):
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model, **({} if lr is None else {"lr": lr}))
    results = train(model, opt, range(4))
    state_dict = opt.state_dict()
    opt.load_state_dict(state_dict)  # unchanged values do not override the configuration
    return [r.lr for r in results + train(model, opt, range(4, 8))]


def test_daemons_scheduler(zerod, run):
    """The daemon's schedule applies as long as the program sets no rate."""
    more = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_min_lr": 0, "warmup_max_lr": 0.01,
                                                         "warmup_type": "linear"}}}
    ours, theirs = run(zerod(config(**more)), without_rates)
    assert ours == theirs and ours == sorted(ours) and len(set(ours)) >= 6, ours
    assert run(zerod(config(**more)), without_rates, lr=5e-4) == [[5e-4] * 8] * 2


# ---- GradScaler -----------------------------------------------------------------------------------------

N_SCALED = 14
SCALER = {"init_scale": 2.0**8, "growth_interval": 3, "growth_factor": 2.0, "backoff_factor": 0.5}


def scaled_gradients(model, step, scale, spoilt):
    """Return: a gradient for each parameter, as from a backward in that precision."""
    generator = torch.Generator().manual_seed(500 + step)
    result = []
    for p in model.parameters():
        g = (torch.randn(p.shape, generator=generator).to(p.dtype) * torch.tensor(scale).to(p.dtype))
        result.append(g * float("inf") if spoilt else g)
    return result


def scaled(dtype, unscale, max_norm, spoilt):
    import zerod

    model = make_model(dtype)
    opt = zerod.Optimizer(model, **ADAM)
    scaler = torch.amp.GradScaler("cpu", **SCALER)
    course = []
    for step in range(N_SCALED):
        scale = scaler.get_scale()
        loss = sum((p * g).sum() for p, g in zip(
            model.parameters(), scaled_gradients(model, step, 1.0, [opt.rank, step] in spoilt), strict=True))
        scaler.scale(loss.float()).backward()
        norm = None
        if unscale:
            scaler.unscale_(opt)
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        course.append((scale, scaler.get_scale(), opt.step_was_skipped, norm))
    state = unpacked(packed(opt.state_dict()))["state"]
    masters = [state[i]["master"] if "master" in state[i] else p.detach().clone() for i, p in enumerate(model.parameters())]
    return course, masters


def scaled_reference(dtype, unscale, max_norm, spoilt):
    """Runs torch's AdamW and GradScaler on fp32 weights with the same gradients."""
    model, seen = make_model(dtype).float(), make_model(dtype)
    opt = torch.optim.AdamW(model.parameters(), **ADAM)
    scaler = torch.amp.GradScaler("cpu", **SCALER)
    scaler.scale(torch.zeros(1))
    course = []
    for step in range(N_SCALED):
        scale = scaler.get_scale()
        bad = any(step == s for _, s in spoilt)
        for p, g in zip(model.parameters(), scaled_gradients(seen, step, scale, bad), strict=True):
            p.grad = g.float()
        norm = None
        if unscale:
            scaler.unscale_(opt)
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
        scaler.step(opt)
        scaler.update()
        course.append((scale, scaler.get_scale(), bad, norm))
    return course, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("unscale, dtype", each_once((False, True), (torch.float32, torch.float16)))
def test_grad_scaler(zerod, run, dtype, unscale):
    """Growth, backoff and skips are torch's. If one rank must skip a step, all ranks skip it."""
    how = {"dtype": dtype, "unscale": unscale, "max_norm": 5.0, "spoilt": [[1, 4], [0, 9], [1, 10]]}
    daemon = zerod(config())
    ours = run(daemon, scaled, **how)
    course, wanted = scaled_reference(**how)
    for rank_course, masters in ours:
        for mine, theirs in zip(rank_course, course, strict=True):
            assert mine[:3] == theirs[:3], (mine, theirs)
            if unscale and not theirs[2]:
                assert mine[3] == pytest.approx(theirs[3], rel=1e-5)
            elif unscale:
                assert not mine[3] < float("inf")  # inf or nan
        assert worst(masters, wanted) < TOLERANCE


# ---- torch.distributed.checkpoint -----------------------------------------------------------------------


def dcp_saves(folder, full):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import zerod
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    dist.init_process_group("gloo")
    model = make_model()
    opt = zerod.Optimizer(make_groups(model), model=model, **ADAM)
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    get_state_dict(model, opt, options=options)  # this call must not do a first step
    epochs = [opt.epoch]
    train(model, opt, range(HALF))
    weights, state = get_state_dict(model, opt, options=options)
    epochs.append(opt.epoch)
    if not full:
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    elif opt.rank == 0:
        torch.save({"model": weights, "optimizer": state}, folder)
    train(model, opt, range(HALF, 2 * HALF))
    dist.barrier()
    dist.destroy_process_group()
    return epochs, weights_of(model)


def dcp_loads(folder, full, broadcast):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import zerod
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    dist.init_process_group("gloo")
    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    opt = zerod.Optimizer(make_groups(model), model=model, **ADAM)
    if full:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        whole = torch.load(folder, weights_only=True) if opt.rank == 0 or not broadcast else {"model": {}, "optimizer": {}}
    else:
        options = StateDictOptions()
        weights, state = get_state_dict(model, opt)
        whole = {"model": weights, "optimizer": state}  # the published weights themselves, because dcp writes into them
        dcp.load(whole, checkpoint_id=folder)
    set_model_state_dict(model, whole["model"], options=options)
    set_optimizer_state_dict(model, opt, whole["optimizer"], options=options)
    epoch = opt.epoch
    train(model, opt, range(HALF, 2 * HALF))
    dist.destroy_process_group()
    return epoch, weights_of(model)


@pytest.mark.parametrize("form, stage", each_once(("sharded", "full", "broadcast"), (2, 3)))
def test_dcp(zerod, run, tmp_path, form, stage):
    whole, broadcast = form != "sharded", form == "broadcast"
    folder = tmp_path / "checkpoint"
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    saved = run(zerod(config(stage=stage)), dcp_saves, variables=address, folder=folder, full=whole)
    address["MASTER_PORT"] = str(free_ports(1)[0])
    loaded = run(zerod(config(stage=5 - stage)), dcp_loads, variables=address, folder=folder, full=whole,
                 broadcast=broadcast)
    for (epochs, wanted), (epoch, ours) in zip(saved, loaded, strict=True):
        assert epochs == [0, HALF] and epoch == 0  # none of these calls has done a step
        assert same(ours, wanted)
