# SPDX-License-Identifier: Apache-2.0
"""
torch.compile with zerod, compared with torch alone. scripts/test --part torches runs this file with other versions of
torch, because their compilers differ most.
"""

from functools import partial

import pytest
import torch
from test_other_ways import batch, job, loss_of, make_model
from tiers import full
from torch import nn

STAGE_3 = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason=f"zerod.Optimizer refuses stage 3 with torch {torch.__version__}: it needs a newer one"
)


class Net(nn.Module):
    """The program's own class: torch's compiler runs the hooks of such a model itself, but not those of its layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(6, 10), nn.Linear(10, 6)])

    def forward(self, x):
        return self.layers[1](self.layers[0](x).tanh())


MADE = {"net": Net, "sequential": make_model}


class Counting:
    """A backend that counts its graphs."""

    def __init__(self, backend):
        self.backend, self.n_graphs = backend, 0

    def __call__(self, graph, inputs):
        self.n_graphs += 1
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)


def compile_layers(model, compile):
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, compile(child))
    return model


def compile_in(way, model, compile):
    """Compiles the model in this way. Return: the object to call."""
    if way.startswith("layers"):
        return compile_layers(model, compile)
    if way == "in place":
        model.compile(**compile.keywords)
        return model
    return compile(model)


def attach_compiled(model, way, compile):
    """Attaches and compiles the model. Return: the optimizer, and the object to call."""
    import zerod

    if way.endswith("after"):
        return zerod.Optimizer(model), compile_in(way, model, compile)
    call = compile_in(way, model, compile)
    return zerod.Optimizer(call), call


def graphs_without_zerod(made, way, counting):
    torch._dynamo.reset()
    call = compile_in(way, MADE[made](), partial(torch.compile, backend=counting, fullgraph=True))
    loss_of(call, 0).backward()
    with torch.no_grad():
        call(batch(1))
    return counting.n_graphs


def compiled(made, way, backend="aot_eager", n_micro=2, fullgraph=False):
    """Trains, and compares with torch. Return: the number of graphs with zerod, and with torch alone."""
    import zerod

    model, twin, counting = MADE[made](), MADE[made](), Counting(backend)
    opt, call = attach_compiled(model, way, partial(torch.compile, backend=counting, fullgraph=fullgraph))
    hypers = {k: opt.param_groups[0][k] for k in ("lr", "betas", "eps", "weight_decay")}
    plain = torch.optim.AdamW(twin.parameters(), **hypers)
    for step in range(5):
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
    names = [name for name, _ in twin.named_parameters()]
    assert opt.state_dict()["names"] == names
    assert opt.grad_norm(next(name for name, _ in call.named_parameters())) == opt.grad_norm(names[0])
    opt.close()
    return counting.n_graphs, graphs_without_zerod(made, way, Counting(backend))


WAYS = ["before", "after", "in place", "layers before", "layers after"]


# torch makes no graph for a Sequential that is compiled in place.
COMBINATIONS = [(made, way) for made in MADE for way in WAYS if (made, way) != ("sequential", "in place")]
OFTEN = [("net", "before"), ("net", "layers before")]


@pytest.mark.parametrize("made, way", [*OFTEN, *full(*(each for each in COMBINATIONS if each not in OFTEN))])
def test_compile(zerod, start, made, way):
    """
    Each micro-batch counts once, names are the model's, and zerod's hooks are not in a graph and do not split one.
    """
    daemon = zerod(job(2))
    ours, theirs = start(daemon, compiled, made=made, way=way, fullgraph=True).result()
    assert ours == theirs
    assert [param["name"] for param in daemon.json("params")] == [name for name, _ in MADE[made]().named_parameters()]


@STAGE_3
@pytest.mark.parametrize("way", full(*WAYS))
def test_compile_in_stage_3(zerod, start, way):
    """Weights are gathered between the graphs."""
    start(zerod(job(3)), compiled, made="net", way=way).result()


def compiled_twice(way):
    """Does a second backward without a forward, where no forward hook runs. Return: the refusal."""
    import zerod

    opt, call = attach_compiled(Net(), way, partial(torch.compile, backend="eager"))
    loss_of(call, 0).backward()
    opt.step()
    loss = loss_of(call, 1)
    loss.backward(retain_graph=True)
    with pytest.raises(zerod.DuplicateGradient) as caught:
        loss.backward()
    opt.abort_step()
    opt.close()
    return caught.value.cause


@pytest.mark.parametrize("way", ["in place", *full("before", "layers before")])
def test_second_backward_of_a_compiled_model(zerod, start, way):
    cause = start(zerod(job(2)), compiled_twice, way=way).result()
    assert cause.startswith("backward 2 followed backward 1 without a forward in between"), cause


class Spare(Net):
    """A model with a layer whose output does not reach the loss."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(6, 6)

    def forward(self, x):
        return super().forward(x) + self.spare(x).detach()


def with_spare(way):
    opt, call = attach_compiled(Spare(), way, partial(torch.compile, backend="aot_eager"))
    for step in range(6):
        loss_of(call, step).backward()
        opt.step()
    opt.close()


@pytest.mark.parametrize("way", ["in place", *full("before", "after")])
def test_missing_gradients_of_a_compiled_model(zerod, start, way):
    """Compiled code does not show whether a layer was called, so the text does not mention it."""
    daemon = zerod(job(2))
    start(daemon, with_spare, way=way).result()
    (said,) = daemon.json("diagnostics")
    assert "spare.weight" in said["text"] and "called" not in said["text"], said["text"]


@pytest.mark.full  # the first call generates and compiles C++
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=STAGE_3)])
def test_inductor(zerod, start, stage):
    start(zerod(job(stage)), compiled, made="net", way="after", backend="inductor").result(600)
