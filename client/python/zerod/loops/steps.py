# SPDX-License-Identifier: Apache-2.0
"""A training loop that continues where the job is, and begins a step again that was aborted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ..errors import StepAborted
from ..optimizer import Optimizer


class Step(int):
    """The number of a step, which is an int, and the context manager in which the step runs."""

    _opt: Optimizer
    _left: int  # how often it may still be aborted
    _before: bytes | None = None  # user state at its beginning
    aborted = False

    def __enter__(self) -> Step:
        if self._opt.user_state is not None and self._opt.position.micro_batch == 0:
            self._before = self._opt.user_state.pack()
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> bool:
        if not isinstance(error, StepAborted) or self._left == 0:
            return False
        self.aborted = True
        if self._before is not None:
            self._opt.user_state.unpack(self._before)
        if self._opt.rank == 0:
            print(f"zerod: step {self} begins again: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return True


def steps(opt: Optimizer, n_steps: int, n_retries: int = 10) -> Iterator[Step]:
    """
    The steps from opt.epoch up to n_steps, one opt.step() each. A step that is aborted inside its `with`, by
    zerodctl or because a rank was lost, comes once more:

        for step in zerod.steps(opt, 1000):
            with step:
                model(batch(step)).backward()
                opt.step()

    With zerod.user_state() the generators and objects are put back to where the step began, so that it draws the same
    batches again. n_retries: after so many aborts in a row StepAborted is raised, because the cause is likely to abort
    the next attempt, too. Every rank has to loop this way. A rank that was started again in the middle of a step begins
    at opt.position.micro_batch.
    """
    n_aborted = 0
    while (at := opt.position).step < n_steps:
        step = Step(at.step)
        step._opt, step._left = opt, n_retries - n_aborted
        yield step
        if opt.position.step > at.step:
            n_aborted = 0
        elif step.aborted or opt.position.attempt != at.attempt:
            n_aborted += 1
        else:
            raise RuntimeError(f"step {step} was not taken: the body of zerod.steps() calls opt.step() once each time")
