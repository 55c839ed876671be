# SPDX-License-Identifier: Apache-2.0
"""The type and settings of the optimizer, when the program and the configuration both give some."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import environment, wait_for
from test_bad_input import ONE, batch, caught, make_model
from tiers import full

ROOT = Path(__file__).resolve().parents[2]
NO_OPTIMIZER = ONE | {"optimizer": None}
KINDS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.3}),
    "Adam": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.3}),
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}


def train_beside_torch(kind):
    """Does five steps with zerod and with torch's optimizer of that type. Return: the difference, and zerod's type."""
    import zerod

    cls, settings = KINDS[kind]
    theirs, model = make_model(), make_model()
    their_opt, opt = cls(theirs.parameters(), **settings), zerod.Optimizer(model, type=cls.__name__, **settings)
    for i in range(5):
        for m, o in ((theirs, their_opt), (model, opt)):
            m(batch(i)).pow(2).mean().backward()
            o.step()
            o.zero_grad()
    distance = max((a - b).abs().max().item() for a, b in zip(model.parameters(), theirs.parameters(), strict=True))
    kind = opt.optimizer_type
    opt.close()
    return distance, kind


@pytest.mark.parametrize("kind", ["AdamW", "SGD with momentum", *full("Adam", "SGD", "Adagrad")])
def test_a_configuration_without_an_optimizer_takes_the_programs(zerod, start, kind):
    distance, zerods = start(zerod(NO_OPTIMIZER), train_beside_torch, kind=kind).result()
    assert zerods == KINDS[kind][0].__name__ and distance < 1e-6


def attach(**kwargs):
    import zerod

    model = make_model()
    opt = zerod.Optimizer(model, **kwargs)
    model(batch()).pow(2).mean().backward()
    opt.step()
    return opt.optimizer_type


def test_all_ranks_have_what_the_first_one_wants(zerod, start):
    daemon = zerod({"world": {"size": 2}, "optimizer": None})
    first = start(daemon, attach, type="SGD", lr=0.1)
    wait_for("rank 0 is there", lambda: daemon.json("ranks")[0]["attached"], 60)
    second = start(daemon, attach, rank=1, lr=0.1)
    assert first.result() == second.result() == "SGD"


def refused_type():
    import zerod

    return caught(zerod.Optimizer, make_model(), type="SGD", lr=0.1)


def test_a_configured_optimizer_stays(zerod, start):
    daemon = zerod(ONE)
    said = start(daemon, refused_type).result()
    assert said == ("ValueError: type is 'SGD', and the daemon's optimizer is AdamW: optimizer: {type: SGD} in its "
                    "configuration, or type='AdamW' here")
    assert start(daemon, attach, lr=0.1).result() == "AdamW"


def attach_groups_of_torch():
    import zerod

    model = make_model()
    opt = zerod.Optimizer(torch.optim.AdamW(model.parameters(), fused=True).param_groups, model=model)
    names = list(opt.param_groups[0])
    opt.close()
    return names


def lines_of_attach(**kwargs):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        attach(**kwargs)
    return [line for line in said.getvalue().splitlines() if line.startswith("zerod: warning")]


def warned(zerod, start, config, **kwargs):
    return start(zerod(config), lines_of_attach, **kwargs).result()


def test_switches_of_torch_that_change_no_number(zerod, start):
    """
    Options of torch's AdamW without an effect on numbers are accepted, also in groups taken from a torch optimizer.
    """
    off = dict.fromkeys(("amsgrad", "maximize", "differentiable"), False)
    assert start(zerod(ONE), attach, lr=0.1, fused=True, foreach=None, capturable=False, **off).result() == "AdamW"
    assert not {"fused", "amsgrad"} & set(start(zerod(ONE), attach_groups_of_torch).result())


def test_what_the_program_overrules_is_told(zerod, start):
    """
    Rank 0 reports once which configured settings the program overrides: lr 1e-3, betas (0.9, 0.95), weight_decay 0.01.
    """
    lines = warned(zerod, start, ONE, lr=0.05, betas=(0.9, 0.999), weight_decay=0.01, eps=1e-6)
    assert lines == ["zerod: warning: the program overrules the daemon's configuration: lr 0.05 and not 0.001, "
                     "betas (0.9, 0.999) and not (0.9, 0.95)"]


# ---- the configuration's schedule -------------------------------------------------------------------------

WARMUP = {"warmup_num_steps": 8, "warmup_type": "linear"}
N_STEPS = 12


def schedule(kind="WarmupLR", **params):
    return ONE | {"optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
                  "scheduler": {"type": kind, "params": WARMUP | params}}


def warmed(lr):
    """Return: the rates of WarmupLR by docs/configuration.md. The first step comes before the schedule."""
    return [pytest.approx(lr * min(max(step - 1, 0) / 8, 1)) for step in range(N_STEPS)]


def rates_of(first=None, second=None, change=None, torchs=False):
    """
    Trains two groups. Return: the rates of both in each step, the lines about them, and the groups of the last step.
    """
    import zerod

    model = make_model()
    groups = [{"params": list(model[0].parameters())} | (first or {}), {"params": list(model[2].parameters())} | (second or {})]
    rates = []
    with contextlib.redirect_stderr(io.StringIO()) as said:
        opt = zerod.Optimizer(groups, model=model)
        theirs = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0) if torchs else None
        for step in range(N_STEPS):
            if step == 4:
                opt.param_groups[1].update(change or {})
            model(batch(step)).pow(2).mean().backward()
            opt.step()
            if theirs:
                theirs.step()
            opt.zero_grad()
            figures = opt.metrics(timeout=10)
            rates.append((figures["lr"], figures["lr_1"]))
    groups = opt._client.status(10)["groups"]
    opt.close()
    return [*zip(*rates, strict=True)], [s for s in said.getvalue().splitlines() if s.startswith("zerod: warning")], groups


@pytest.mark.parametrize("how", [{"second": {"weight_decay": 0.1}}, *full(
    {}, {"second": {"betas": (0.8, 0.99)}}, {"first": {"weight_decay": 0.1}, "second": {"eps": 1e-6}},
    {"change": {"weight_decay": 0.1}})], ids=str)  # fmt: skip
def test_other_settings_leave_the_schedule_on(zerod, start, how):
    """Other settings of the program do not disable the configured schedule."""
    rates, lines, groups = start(zerod(schedule()), rates_of, **how).result()
    assert [list(r) for r in rates] == [warmed(0.05)] * 2
    assert not any("rate" in line or "scheduler" in line for line in lines)
    given = [how.get("first", {}), how.get("second", {}) | how.get("change", {})]
    for group, mine in zip(groups, given, strict=True):
        assert group["weight_decay"] == mine.get("weight_decay", 0.01) and group["eps"] == mine.get("eps", 1e-8)
        assert [group["beta1"], group["beta2"]] == list(mine.get("betas", (0.9, 0.95)))


def test_the_schedule_starts_from_each_groups_own_rate(zerod, start):
    """
    The schedule starts from each group's own rate. DeepSpeed's WarmupLR used the first group's for all until #8171.
    """
    (first, second), lines, _ = start(zerod(schedule()), rates_of, second={"lr": 0.02}).result()
    assert list(first) == warmed(0.05) and list(second) == warmed(0.02)
    assert lines == ["zerod: warning: the program overrules the daemon's configuration: lr 0.02 and not 0.05"]
    (first, second), _, _ = start(zerod(schedule("WarmupCosineLR", total_num_steps=20) | {"scheduler": {
        "type": "WarmupCosineLR", "params": {"warmup_num_steps": 4, "total_num_steps": 20}}}), rates_of, second={"lr": 0.02}).result()
    assert list(second) == [pytest.approx(0.4 * lr) for lr in first] and first[6] > first[-1] > 0


def test_a_rate_that_the_program_sets_itself(zerod, start):
    """One line reports that the program sets the rate: at once if the schedule starts elsewhere, or when noticed."""
    (first, second), lines, _ = start(zerod(schedule(warmup_max_lr=0.1)), rates_of, second={"lr": 0.02}).result()
    assert list(first) == warmed(0.1) and set(second) == {0.02}
    assert lines == ["zerod: warning: the program overrules the daemon's configuration: lr 0.02 and not 0.05, lr without "
                     "the daemon's scheduler"]
    (first, second), lines, _ = start(zerod(schedule()), rates_of, change={"lr": 0.03}).result()
    assert list(first) == warmed(0.05) and list(second) == warmed(0.05)[:4] + [0.03] * 8
    assert lines == ["zerod: warning: the program sets the learning rate of parameter group 1 itself, so the scheduler of the "
                     "daemon's configuration has no effect on it"]


@pytest.mark.parametrize("params", [{"warmup_num_steps": 8}, *full({"warmup_num_steps": "auto", "warmup_max_lr": "auto"})], ids=str)
def test_a_scheduler_of_torchs_replaces_it(zerod, start, params):
    """A torch scheduler replaces the configured one, even a constant one, and even if all is `auto`."""
    config = schedule() | {"scheduler": {"type": "WarmupLR", "params": params}}
    rates, lines, _ = start(zerod(config), rates_of, torchs=True).result()
    assert set(rates[0]) == set(rates[1]) == {0.05}
    assert lines == ["zerod: warning: the program sets the learning rate itself, so the scheduler of the daemon's configuration "
                     "has no effect on it"]


def trained_by_a_trainer(folder):
    import test_for_trainer
    import zerod
    from transformers import Trainer

    test_for_trainer.alone()
    model, args = test_for_trainer.make_model(), test_for_trainer.arguments(folder, logging_steps=1)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        opt = zerod.for_trainer(model, args, rank=0)
        trainer = Trainer(model=model, args=args, train_dataset=test_for_trainer.Text(), optimizers=(opt, None))
        trainer.train()
    used = opt.result.lr
    opt.close()
    logged = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
    return [line for line in said.getvalue().splitlines() if "scheduler" in line], logged, used


def test_a_trainers_schedule_replaces_it(zerod, start, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    config = ONE | {"optimizer": None, "scheduler": {"type": "WarmupLR", "params": params}}
    lines, logged, used = start(zerod(config), trained_by_a_trainer, folder=tmp_path).result()
    assert len(lines) == 1 and "the program sets the learning rate itself" in lines[0]
    assert used == logged[-1] > 0 and len(set(logged)) == len(logged)


def test_nothing_is_told_where_they_agree(zerod, start):
    assert warned(zerod, start, ONE, lr=torch.tensor(1e-3), betas=[0.9, 0.95]) == []
    assert warned(zerod, start, ONE) == []
    assert warned(zerod, start, NO_OPTIMIZER, lr=0.05, weight_decay=0.5) == []


PROGRAM = """
import torch, zerod
model = torch.nn.Linear(4, 4)
opt = zerod.Optimizer(model, type="SGD", lr=0.05, momentum=0.9)
model(torch.ones(2, 4)).sum().backward()
opt.step()
print(opt.optimizer_type)
opt.close()
"""


def test_zerodrun_without_a_configuration(build, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    variables = {"PYTHONPATH": ROOT / "client/python", "ZEROD_LIBRARY": build.path("client/libzerod.so"),
                 "PYTHONDONTWRITEBYTECODE": 1}
    command = [build.path("client/run/zerodrun"), "--zerod", build.path("daemon/zerod"), "-n", 2, "--", sys.executable,
               tmp_path / "train.py"]
    result = subprocess.run([str(word) for word in command], env=environment(variables), text=True, timeout=300,
                            stdin=subprocess.DEVNULL, capture_output=True)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split("\n")) == ["", "[0] SGD", "[1] SGD"] and "warning" not in result.stderr
