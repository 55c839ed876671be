# SPDX-License-Identifier: Apache-2.0
"""
The programs in torch alone.

The reference runs all ranks as threads of one process, one at a time, because random numbers, warnings and MKL's choice
of functions are global. step() averages the gradients of all ranks, and one torch optimizer applies the result. Hooks
are counted as zerod would see them, to prove that a scenario's expectation is torch's behaviour.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .corpus import Scenario
from .trial import Base, Model, nothing

PATIENCE_S = 20  # a rank that does not reach the step ends the run for all


class Position(NamedTuple):
    step: int
    micro_batch: int = 0


@dataclass
class Hooks:
    """Calls of post-accumulate hooks: (step, micro-batch) -> parameter -> graph tasks, in order."""

    fired: dict[tuple[int, int], dict[str, list[int]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list)))

    def twice(self, step: int, micro_batch: int = 0) -> set[str]:
        return {name for name, tasks in self.fired[step, micro_batch].items() if len(tasks) > 1}

    def seen(self, step: int) -> set[str]:
        return {name for (s, _), fired in list(self.fired.items()) if s == step for name in fired}


def plain_optimizer(params: list[dict[str, Any]], config: dict[str, Any]) -> torch.optim.Optimizer:
    """Return: the torch optimizer for a daemon's configuration."""
    settings = config["optimizer"]
    return getattr(torch.optim, settings["type"])(params, **settings["params"])


class Exchange:
    """The meeting point of a reference's ranks."""

    def __init__(self, scenario: Scenario, stage: int, repaired: bool) -> None:
        self.config = scenario.config(stage, repaired)
        self.world = scenario.world
        self.barrier = threading.Barrier(self.world, timeout=PATIENCE_S)
        self.turn = threading.Lock()  # held by the rank that runs
        self.ranks: dict[int, RankOptimizer] = {}
        self.inner: torch.optim.Optimizer | None = None

    def meet(self) -> None:
        """Waits for all ranks, and then for this rank's turn."""
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def join(self, rank: int, opt: RankOptimizer) -> None:
        """All ranks get rank 0's weights."""
        self.ranks[rank] = opt
        self.meet()
        if rank == 0:
            groups = [dict(g) for g in opt.param_groups]
            self.inner = plain_optimizer([{"params": g["params"]} for g in groups], self.config)
        self._spread(rank)

    def _spread(self, rank: int) -> None:
        self.meet()
        with torch.no_grad():
            for mine, first in zip(self.ranks[rank].params(), self.ranks[0].params(), strict=True):
                mine.copy_(first)
        self.meet()

    def spread(self, rank: int) -> None:
        self._spread(rank)

    def step(self, rank: int) -> None:
        self.meet()
        if rank == 0:
            self._apply()
        self._spread(rank)

    def _sum(self, i: int) -> Tensor | None:
        grads = [self.ranks[r].params()[i].grad for r in range(self.world)]
        present = [g for g in grads if g is not None]
        if not present:
            return None
        total = present[0].clone()
        for g in present[1:]:
            total += g
        divisor = 1 if self.config.get("gradient_allreduce_op") == "sum" else self.world
        return total / (divisor * self.ranks[0].loss_scale())

    def _apply(self) -> None:
        assert self.inner is not None
        first = self.ranks[0]
        grads = [self._sum(i) for i in range(len(first.params()))]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads if g is not None))
        if not math.isfinite(norm):
            return  # all ranks skip the step
        limit = first.max_norm or self.config.get("gradient_clipping", 0)
        scale = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        for mine, inner in zip(first.param_groups, self.inner.param_groups, strict=True):
            inner["lr"] = mine["lr"]
        kept = [p.grad for p in first.params()]
        for p, g in zip(first.params(), grads, strict=True):
            p.grad = None if g is None else g * scale
        self.inner.step()
        for p, g in zip(first.params(), kept, strict=True):
            p.grad = g


class RankOptimizer(torch.optim.Optimizer):
    """One rank's optimizer in the reference."""

    _step_supports_amp_scaling = True  # makes GradScaler pass the scale instead of dividing

    def __init__(self, groups: Any, exchange: Exchange, rank: int) -> None:
        super().__init__(groups, {"lr": exchange.config["optimizer"]["params"]["lr"]})
        self.exchange, self.rank = exchange, rank
        self.max_norm = 0.0
        self.n_steps, self.n_backwards = 0, 0
        exchange.join(rank, self)

    def params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def position(self) -> Position:
        return Position(self.n_steps)

    def loss_scale(self) -> float:
        """GradScaler sets grad_scale during step()."""
        return float(getattr(self, "grad_scale", 1.0))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure else None
        self.exchange.step(self.rank)
        self.n_steps += 1
        return loss

    def close(self) -> None:
        pass


class PlainTrial(Base):
    real = False

    def __init__(self, scenario: Scenario, rank: int, faulty: bool, stage: int, exchange: Exchange) -> None:
        super().__init__(scenario, rank, faulty, stage)
        self.exchange = exchange
        self.hooks = Hooks()
        self.opt: RankOptimizer | None = None

    def model(self, make: Callable[[], Model]) -> Model:
        torch.manual_seed(100 + self.rank)
        self.trained = make()
        return self.trained

    def attach(self, first: Any, model: nn.Module | None = None, **_options: Any) -> RankOptimizer:
        model = model if isinstance(model, nn.Module) else first
        groups = model.parameters() if first is model else first
        self.opt = RankOptimizer(groups, self.exchange, self.rank)
        self._watch(model)
        return self.opt

    def _watch(self, model: nn.Module) -> None:
        """Counts hooks. A forward after a backward begins the next micro-batch."""
        opt, state = self.opt, {"micro": 0, "pushed": False, "step": 0}

        def forward(*_: Any) -> None:
            if state["step"] != opt.n_steps:
                state.update(step=opt.n_steps, micro=0, pushed=False)
            elif state["pushed"] and torch.is_grad_enabled():
                state.update(micro=state["micro"] + 1, pushed=False)

        def fired(name: str) -> Callable[[Tensor], None]:
            def hook(p: Tensor) -> None:
                if p.grad is None:
                    return
                if state["step"] != opt.n_steps:
                    state.update(step=opt.n_steps, micro=0)
                state["pushed"] = True
                task = torch._C._current_graph_task_id()
                self.hooks.fired[opt.n_steps, state["micro"]][name].append(task)

            return hook

        model.register_forward_pre_hook(forward)
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(fired(name))

    def scaler(self, **options: Any) -> Any:
        return torch.amp.GradScaler("cpu", **options)

    def clip(self, _model: nn.Module, max_norm: float) -> None:
        self.opt.max_norm = max_norm

    def writable(self, _model: nn.Module) -> AbstractContextManager[Any]:
        return Window(self.exchange, self.rank)

    def gathered(self, _model: nn.Module) -> AbstractContextManager[Any]:
        return nothing()

    def mark(self, word: str) -> None:
        pass

    def await_mark(self, word: str, seconds: float = 60) -> None:
        pass

    def marked(self, word: str) -> bool:
        return True


class Window:
    """At the end of the window all ranks get rank 0's weights."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank = exchange, rank

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: Any) -> None:
        self.exchange.spread(self.rank)


def run(scenario: Scenario, faulty: bool, stage: int = 2) -> list[PlainTrial]:
    """Runs a program on all ranks. Raises the first exception of a rank."""
    exchange = Exchange(scenario, stage, not faulty)
    trials = [PlainTrial(scenario, r, faulty, stage, exchange) for r in range(scenario.world)]
    errors: list[BaseException] = []

    def body(trial: PlainTrial) -> None:
        try:
            with exchange.turn:
                scenario.program(trial)
        except BaseException as error:  # other ranks must not wait for this rank, whatever it raises
            if not isinstance(error, threading.BrokenBarrierError):
                errors.insert(0, error)
            else:
                errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=body, args=(t,)) for t in trials]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return trials
