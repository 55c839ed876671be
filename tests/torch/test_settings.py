# SPDX-License-Identifier: Apache-2.0
"""Which optimizer it is and with which settings: what the program says beside what the configuration says."""

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
    """Five steps with zerod and with torch's optimizer of that kind. Return: how far apart, and zerod's kind."""
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


def lines_of_attach(**kwargs):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        attach(**kwargs)
    return [line for line in said.getvalue().splitlines() if line.startswith("zerod: warning")]


def warned(zerod, start, config, **kwargs):
    return start(zerod(config), lines_of_attach, **kwargs).result()


def test_what_the_program_overrules_is_told(zerod, start):
    """Once, by rank 0, and only of what the configuration names: lr 1e-3, betas (0.9, 0.95), weight_decay 0.01."""
    lines = warned(zerod, start, ONE, lr=0.05, betas=(0.9, 0.999), weight_decay=0.01, eps=1e-6)
    assert lines == ["zerod: warning: the program overrules the daemon's configuration: lr 0.05 and not 0.001, "
                     "betas (0.9, 0.999) and not (0.9, 0.95)"]
    scheduler = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    lines = warned(zerod, start, ONE | scheduler, lr=1e-3)
    assert [line.partition(": lr")[2] for line in lines] == [" without the daemon's scheduler"]
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    for scheduler in ({"type": "WarmupLR", "params": params}, {"type": "WarmupLR"}):  # no number is the configuration's
        assert warned(zerod, start, ONE | {"scheduler": scheduler}, lr=1e-3) == []


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
