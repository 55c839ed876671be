# SPDX-License-Identifier: Apache-2.0
"""
The interface of a program. Trial runs the program against zerod, one process for each rank. plain.PlainTrial has the
same interface and runs the program in torch alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .corpus import N_STEPS, Scenario
from .models import N_IN

Model = TypeVar("Model", bound=nn.Module)


class Base:
    """The part of a trial that does not depend on the optimizer."""

    real = True  # with zerod

    def __init__(self, scenario: Scenario, rank: int, faulty: bool, stage: int, life: int = 0) -> None:
        self.scenario, self.rank, self.world = scenario, rank, scenario.world
        self.faulty, self.stage, self.life = faulty, stage, life
        self.trained: nn.Module | None = None

    def goes_wrong(self, step: int | None = None) -> bool:
        """Return: whether to make the mistake now. Only the faulty program makes it, on the expected rank and step."""
        expect = self.scenario.expect
        if not self.faulty or expect is None:
            return False
        rank, at = getattr(expect, "rank", None), getattr(expect, "step", None)
        return (rank is None or rank in (-1, self.rank)) and (step is None or at is None or step == at)

    def batch(self, step: int, micro_batch: int = 0, n: int = 4, width: int = N_IN) -> tuple[Tensor, Tensor]:
        """Return: data that differ for each rank, step and micro-batch, and are the same in every run."""
        generator = torch.Generator().manual_seed(1000 * self.rank + 10 * step + micro_batch + 1)
        x = torch.randn(n, width, generator=generator)
        return x, x.sum(1, keepdim=True).sin()

    def steps(self, opt: Any, n: int = N_STEPS) -> Iterator[int]:
        """Yields the remaining steps."""
        while opt.position.step < n:
            yield opt.position.step


class Trial(Base):
    def __init__(self, scenario: Scenario, rank: int, faulty: bool, stage: int, folder: Path, life: int = 0) -> None:
        super().__init__(scenario, rank, faulty, stage, life)
        self.folder = folder
        self.opt: Any = None

    def model(self, make: Callable[[], Model]) -> Model:
        """Makes the model, with other initial weights on each rank, because all ranks must get rank 0's."""
        torch.manual_seed(100 + self.rank)
        self.trained = make()
        return self.trained

    def attach(self, first: Any, **options: Any) -> Any:
        import zerod

        self.opt = zerod.Optimizer(first, **options)
        return self.opt

    def scaler(self, **options: Any) -> Any:
        return torch.amp.GradScaler("cpu", **options)

    def clip(self, model: nn.Module, max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def writable(self, model: nn.Module) -> AbstractContextManager[Any]:
        import zerod

        return zerod.writable(model)

    def gathered(self, model: nn.Module) -> AbstractContextManager[Any]:
        import zerod

        return zerod.gathered(model)

    # For ranks, or a rank and the runner, that wait for each other.

    def mark(self, word: str) -> None:
        (self.folder / f"mark-{word}").touch()

    def await_mark(self, word: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not (self.folder / f"mark-{word}").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody came to {word}")
            time.sleep(0.005)

    def marked(self, word: str) -> bool:
        return (self.folder / f"mark-{word}").exists()


@contextmanager
def nothing() -> Iterator[None]:
    yield
