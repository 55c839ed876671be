# SPDX-License-Identifier: Apache-2.0
"""
zerod.observe() with real DDP: two ranks on gloo, no daemon. Each fault is reported with code, class, parameters and
rank. Its repaired twin trains like one process with both ranks' data. Correct programs get no report.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # because torchrun starts this file too

from conftest import free_ports  # noqa: E402
from tiers import full  # noqa: E402

N_STEPS = 4


# ---- programs -------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Three layers and a head. The program decides how they are used."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)
        self.run = run

    def forward(self, x: torch.Tensor, *where: int) -> Any:
        return self.run(self, x, *where)


def plain(net: Net, x: torch.Tensor, *_: int) -> torch.Tensor:
    for layer in net.layers:
        x = layer(x).tanh()
    return net.head(x)


def checkpointed(use_reentrant: bool, times: int = 1) -> Callable[..., torch.Tensor]:
    def run(net: Net, x: torch.Tensor, *_: int) -> torch.Tensor:
        for layer in net.layers:
            for _ in range(times):
                x = checkpoint(layer, x, use_reentrant=use_reentrant).tanh()
        return net.head(x)

    return run


def without_head(net: Net, x: torch.Tensor, *_: int) -> torch.Tensor:
    for layer in net.layers:
        x = layer(x)
    return x


def branching(since: int) -> Callable[..., torch.Tensor]:
    def run(net: Net, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        for i, layer in enumerate(net.layers):
            if not (i == 1 and rank == 1 and step >= since):
                x = layer(x)
        return net.head(x)

    return run


def cut_off(net: Net, x: torch.Tensor, *_: int) -> torch.Tensor:
    x = checkpoint(net.layers[0], x.detach(), use_reentrant=True)
    return net.head(net.layers[2](net.layers[1](x)))


def failing_backward(net: Net, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("out of memory (injected)")

    for i, layer in enumerate(net.layers):
        x = layer(x)
        if (i, rank, step) == (0, 1, 1):
            x.register_hook(fail)
    return net.head(x)


def failing_forward(net: Net, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    if (rank, step) == (1, 1):
        raise RuntimeError("shape is invalid (injected)")
    return plain(net, x)


def two_outputs(net: Net, x: torch.Tensor, *_: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = without_head(net, x)
    return x, net.head(x)


def tied(net: Net, x: torch.Tensor, *_: int) -> torch.Tensor:
    return plain(net, net.head(net.layers[0](net.layers[0](x))))


def backward(_model: Any, output: torch.Tensor) -> None:
    output.square().mean().backward()


def backward_outside(model: Any, output: torch.Tensor) -> None:
    getattr(model, "module", model).head(output).square().mean().backward()


def backward_twice(_model: Any, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    outputs[0].square().mean().backward(retain_graph=True)
    outputs[1].square().mean().backward()


def backward_of_sum(_model: Any, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    (outputs[0].square().mean() + outputs[1].square().mean()).backward()


class Program:
    def __init__(
        self, run: Callable[..., Any] = plain, backward: Callable[..., None] = backward, *, swallow: str = "",
        freeze: str = "", bypass: bool = False, accumulate: int = 1, evaluate: bool = False, closure: bool = False,
        compiled: str = "", **ddp: Any,
    ) -> None:  # fmt: skip
        self.run, self.backward, self.swallow, self.freeze, self.bypass = run, backward, swallow, freeze, bypass
        self.accumulate, self.evaluate, self.closure, self.ddp = accumulate, evaluate, closure, ddp
        self.compiled = compiled  # compiled "before" or "after" zerod.observe()

    def make(self) -> Net:
        torch.manual_seed(3)
        net = Net(self.run)
        if self.freeze:
            net.get_submodule(self.freeze).requires_grad_(False)
        return net

    def observed(self, **options: Any) -> Any:
        """Return: the object that the program calls, in DDP and watched."""
        import zerod

        model = nn.parallel.DistributedDataParallel(self.make(), **self.ddp)
        if self.compiled == "before":
            model = torch.compile(model, backend="eager")
        assert zerod.observe(model, **options) is model
        return torch.compile(model, backend="eager") if self.compiled == "after" else model


FAULTS = {
    "phantom": Program(checkpointed(True), find_unused_parameters=True),
    "reentrant": Program(checkpointed(True, times=2)),
    "outside": Program(without_head, backward_outside, find_unused_parameters=True),
    "two-losses": Program(two_outputs, backward_twice),
    "unused": Program(without_head),
    "unused-swallowed": Program(without_head, swallow="everything"),
    "unused-compiled": Program(without_head, compiled="before"),
    "branch": Program(branching(since=2)),
    "branch-first": Program(branching(since=0)),
    "cut-off": Program(cut_off),
    "half-way": Program(failing_backward, swallow="skip"),
    "half-way-find": Program(failing_backward, swallow="skip", find_unused_parameters=True),
    "half-way-step": Program(failing_backward, swallow="step"),
    "no-backward": Program(failing_forward, swallow="step"),
    "bypass": Program(bypass=True),
}

SOME_FAULTS = ("two-losses",)  # scripts/test runs these; the corpus observes faults of other causes

REPAIRED = {
    "phantom": Program(checkpointed(False), find_unused_parameters=True),
    "phantom, or": Program(checkpointed(True)),
    "reentrant": Program(checkpointed(False, times=2)),
    "reentrant, or": Program(checkpointed(True, times=2), static_graph=True),
    "outside": Program(plain, find_unused_parameters=True),
    "two-losses": Program(two_outputs, backward_of_sum),
    "unused": Program(without_head, freeze="head"),
    "branch": Program(branching(since=2), find_unused_parameters=True),
    "cut-off": Program(plain),
    "half-way, no-backward, bypass": Program(),
}

CLEAN = {
    "accumulation": Program(accumulate=3),
    "accumulation, not reentrant": Program(checkpointed(False, times=2), accumulate=2),
    "static graph": Program(static_graph=True),
    "not reentrant": Program(checkpointed(False)),
    "tied weights": Program(tied),
    "find unused": Program(branching(since=0), find_unused_parameters=True),
    "evaluation": Program(evaluate=True),
    "closure": Program(closure=True),
    "compiled": Program(compiled="before", accumulate=2),
    "compiled afterwards": Program(compiled="after"),
}


def batch(rank: int, step: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    return torch.randn(5, 4, generator=generator, requires_grad=True)


def one_step(program: Program, model: Any, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    called = model.module if program.bypass else model
    for micro_batch in range(program.accumulate):
        last = micro_batch + 1 == program.accumulate
        with contextlib.nullcontext() if last else model.no_sync():
            program.backward(model, called(batch(rank, step, micro_batch), rank, step))
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model: Any, rank: int, step: int) -> None:
    with torch.no_grad():
        model(batch(rank, step, 0), rank, step)
        model.module(batch(rank, step, 0), rank, step)
    model(batch(rank, step, 0), rank, step)  # a forward without no_grad


def step_with_closure(program: Program, model: Any, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch(rank, step, 0), rank, step).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def train(program: Program, model: Any, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(N_STEPS):
        try:
            (step_with_closure if program.closure else one_step)(program, model, optimizer, rank, step)
        except RuntimeError as error:
            mild = "(injected)" in str(error)  # handlers look for words such as "out of memory"
            if not program.swallow or not (mild or program.swallow == "everything"):
                raise
            if program.swallow in ("step", "everything"):
                optimizer.step()
            optimizer.zero_grad()
        if program.evaluate:
            evaluate(model, rank, step)


def reference(program: Program) -> dict[str, torch.Tensor]:
    """Trains in one process, with the mean of both ranks' gradients."""
    net = program.make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(N_STEPS):
        for rank in range(2):
            for micro_batch in range(program.accumulate):
                program.backward(net, net(batch(rank, step, micro_batch), rank, step))
        for param in net.parameters():
            if param.grad is not None:
                param.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


# ---- ranks ----------------------------------------------------------------------------------------------


def told(fault: Any) -> dict[str, Any]:
    return {
        "kind": type(fault).__name__, "code": fault.code, "class": fault.cause_class, "rank": fault.rank,
        "step": fault.step, "params": fault.params, "n_params": fault.n_params, "fix": fault.fix, "text": fault.text,
        "str": str(fault), "notes": "\n".join(getattr(fault, "__notes__", [])),
        "of_ddp": isinstance(fault.__cause__, RuntimeError),
    }  # fmt: skip


def leave(out: Path, result: Any) -> None:
    """Writes the result completely or not at all, because the test reads the file as soon as it exists."""
    temporary = out.with_suffix(".part")
    temporary.write_text(json.dumps(result))
    temporary.rename(out)


def run_fault(name: str, rank: int, out: Path) -> None:
    import zerod

    program = FAULTS[name]
    model = program.observed(patience=60 if program.compiled else 4)  # compiling makes one rank slower than the other
    try:
        train(program, model, rank)
        result: dict[str, Any] = {"trained": True}
    except zerod.GradientFault as fault:
        result = told(fault)
    except RuntimeError as error:  # from gloo, when the other rank has ended
        result = {"other": str(error)}
    leave(out, result)


def run_good(rank: int, out: Path) -> None:
    """Runs all correct programs, one after the other. A report ends the process."""
    import zerod

    for name, program in [*REPAIRED.items(), *CLEAN.items()]:
        model = program.observed()
        try:
            train(program, model, rank)
        except RuntimeError as error:
            raise AssertionError(f"{name}: {error}") from error
        expected = reference(program)
        for key, value in model.module.state_dict().items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6, msg=lambda m, n=name, k=key: f"{n} {k} {m}")
        assert model.module._forward_pre_hooks
        zerod.unobserve(model)
        assert not model.module._forward_pre_hooks
    leave(out, sorted([*REPAIRED, *CLEAN]))


def rank_main(name: str, out: str) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    if name == "good":
        run_good(rank, Path(out))
        torch.distributed.destroy_process_group()  # otherwise gloo's threads may end the process with SIGABRT
    else:
        run_fault(name, rank, Path(out))
        os._exit(0)  # DDP is in the middle of a reduction and cannot be freed in order


class Pair:
    """Two ranks of a program. Leaving the context kills them."""

    def __init__(self, name: str, folder: Path) -> None:
        build = Path(os.environ.get("ZEROD_BUILD", ROOT / "build"))
        environment = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_ports(1)[0]), WORLD_SIZE="2",
                           OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT / "client/python"))  # fmt: skip
        environment.setdefault("ZEROD_LIBRARY", str(build / "client/libzerod.so"))
        self.outs = [folder / f"rank{rank}.json" for rank in range(2)]
        self.logs = [folder / f"rank{rank}.log" for rank in range(2)]
        self.ranks = []
        for rank, (out, log) in enumerate(zip(self.outs, self.logs, strict=True)):
            with log.open("w") as file:
                self.ranks.append(
                    subprocess.Popen([sys.executable, __file__, name, out], stdout=file, stderr=file,
                                     env=dict(environment, RANK=str(rank)))
                )  # fmt: skip

    def result(self, rank: int, timeout: float = 120) -> Any:
        deadline = time.monotonic() + timeout
        while not self.outs[rank].exists():
            gone = self.ranks[rank].poll() is not None and not self.outs[rank].exists()
            assert not gone and time.monotonic() < deadline, f"rank {rank}:\n{self.logs[rank].read_text()}"
            time.sleep(0.05)
        return json.loads(self.outs[rank].read_text())

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()


# ---- tests ----------------------------------------------------------------------------------------------

NOT_REENTRANT = "torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)"
FIND = "DistributedDataParallel(model, find_unused_parameters=True)"
LAYERS = [f"layers.{i}.{p}" for i in range(3) for p in ("weight", "bias")]
HEAD = ["head.weight", "head.bias"]

SECOND = backward_twice.__code__.co_firstlineno + 2

# name: (ranks that get a fault, exception, code, class, step, parameters, raised from DDP's error, in fix, in text)
EXPECTED = {
    "phantom": ([0, 1], "DuplicateGradient", 1001, "D4", 0, ["layers.2.bias"], True, NOT_REENTRANT,
                "none: exactly 1 gradient arrived"),
    "reentrant": ([0, 1], "DuplicateGradient", 1001, "D1", 0, ["layers.2.bias"], True, NOT_REENTRANT, "layers.2 call 1"),
    "outside": ([0, 1], "DuplicateGradient", 1001, "D4", 0, ["head.bias"], True, "use it inside forward",
                "none: exactly 1 gradient arrived"),
    "two-losses": ([0, 1], "DuplicateGradient", 1001, "D2", 0, ["layers.2.bias"], True, "(loss_a + loss_b).backward()",
                   f"1st push       backward 1, called at test_observe.py:{SECOND - 1}\n"
                   f"  2nd push       backward 2, called at test_observe.py:{SECOND}\n"),
    "unused": ([0, 1], "MissingGradient", 1005, "M1", 0, HEAD, True, "requires_grad_(False)", "never called: head"),
    "unused-swallowed": ([0, 1], "MissingGradient", 1005, "M1", 0, HEAD, True, "requires_grad_(False)",
                         "never called: head"),
    "unused-compiled": ([0, 1], "MissingGradient", 1005, "M1", 0, HEAD, True, "requires_grad_(False)",
                        "the loss does not use them"),
    "branch": ([1], "MissingGradient", 1005, "M2", 2, LAYERS[2:4], True, FIND, "differs between"),
    "branch-first": ([1], "MissingGradient", 1005, "M2", 0, LAYERS[2:4], True, FIND, "differs between ranks"),
    "cut-off": ([0, 1], "MissingGradient", 1005, "M5", 0, LAYERS[:2], True, NOT_REENTRANT, "no input of the checkpointed"),
    "half-way": ([1], "MissingGradient", 1005, "M4", 1, LAYERS[:2], True, "let the exception through",
                 "RuntimeError: out of memory (injected)"),
    "half-way-find": ([1], "MissingGradient", 1005, "M4", 1, LAYERS[:2], True, "let the exception through",
                      "swallowed by test_observe.py"),
    "half-way-step": ([1], "MissingGradient", 1005, "M4", 1, LAYERS[:2], False, "let the exception through",
                      "and DDP says nothing"),
    "no-backward": ([1], "MissingGradient", 1005, "M3", 1, LAYERS + HEAD, False, "let the exception through",
                    "RuntimeError: shape is invalid (injected)"),
    "bypass": ([0, 1], "RanksDrifted", 1105, "X1", 0, [], False, "call the model that the trainer hands in",
               "no forward of the DDP wrapper"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*SOME_FAULTS, *full(*(name for name in FAULTS if name not in SOME_FAULTS))])
def test_fault(name: str, tmp_path: Path) -> None:
    ranks, kind, code, cause_class, step, params, of_ddp, fix, text = EXPECTED[name]
    with Pair(name, tmp_path) as pair:
        for rank in ranks:
            got = pair.result(rank)
            assert got.get("class") == cause_class, got
            print(got["text"])
            assert (got["kind"], got["code"], got["rank"], got["step"]) == (kind, code, rank, step), got["text"]
            assert sorted(got["params"]) == sorted(params)[:5] or len(params) > 5, got["text"]
            assert (got["n_params"], got["of_ddp"]) == (len(params), of_ddp), got["text"]
            assert fix in got["fix"] and text in got["text"], got["text"]
            assert "(injected)" not in got["str"] and ("(injected)" in got["text"]) == ("(injected)" in got["notes"])
            log = pair.logs[rank].read_text()  # it is printed near a handler, and train() always has one
            assert log.count(got["text"]) == 1, log
        # The other rank may wait forever or get an error of gloo. It is never accused.
        for rank in set(range(2)) - set(ranks):
            if pair.outs[rank].exists():
                assert "class" not in pair.result(rank), pair.result(rank)


def test_repaired_and_clean_programs_train(tmp_path: Path) -> None:
    with Pair("good", tmp_path) as pair:
        for rank in range(2):
            assert pair.result(rank, timeout=300) == sorted([*REPAIRED, *CLEAN]), pair.logs[rank].read_text()


def test_every_fault_has_a_repaired_twin() -> None:
    repaired = {word for names in REPAIRED for word in names.split(", ")}
    variants = re.compile("-(first|find|step|swallowed|compiled)$")
    assert {variants.sub("", name) for name in FAULTS} <= repaired


def test_only_ddp_is_observed() -> None:
    import zerod

    with pytest.raises(TypeError, match="not Linear"):
        zerod.observe(nn.Linear(2, 2))  # type: ignore[arg-type]


if __name__ == "__main__":
    rank_main(*sys.argv[1:])
