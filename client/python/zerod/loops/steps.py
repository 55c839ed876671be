# SPDX-License-Identifier: Apache-2.0
"""A training loop that continues at the job's step, and begins an aborted step again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ..client import Position
from ..errors import StepAborted
from ..optimizer import Optimizer


class Step(int):
    """The number of a step, which is an int, and the context manager in which the step runs."""

    _opt: Optimizer
    _left: int  # how many aborts are still allowed
    aborted = False

    def __enter__(self) -> Step:
        self._opt.step_begins()
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> bool:
        if not isinstance(error, StepAborted) or self._left == 0 or not self._opt.rewind():
            return False
        self.aborted = True
        if self._opt.rank == 0:
            print(f"zerod: step {self} begins again: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return True


def _position(opt: Optimizer) -> Position:
    """opt.position; the program does not count as having read the micro-batch."""
    opt._unread.read()
    return opt._client.position


def _leave_begun_step(opt: Optimizer) -> None:
    """Aborts an unfinished step of an earlier loop of this process, because the next loop computes its gradients
    again."""
    if opt.has_gradients and opt._gradients.fault is None:
        opt.abort_step("its program left zerod.steps() in the middle of the step, and begins it again")
        opt.rewind()


def steps(opt: Optimizer, n_steps: int, n_retries: int = 10) -> Iterator[Step]:
    """
    The steps from opt.epoch up to n_steps, one opt.step() each. A step that is aborted inside its `with`, by zerodctl
    or because a rank was lost, is yielded once more:

        for step in zerod.steps(opt, 1000):
            with step:
                model(batch(step)).backward()
                opt.step()

    With zerod.user_state() the generators and objects are restored as they were at the begin of the step, so that the
    step draws the same batches again. n_retries: after this many aborts in a row StepAborted is raised, because the
    cause will probably abort the next attempt too. Every rank must loop this way.

    A rank may be started again in the middle of a step. A body that loops over micro-batches continues at the rank's
    micro-batch:

                for micro_batch in range(opt.position.micro_batch, n_micro):

    If the body does not read opt.position.micro_batch before its first backward, all ranks begin the step again. They
    also begin it again if this process left a loop in the middle of a step, by an exception, and calls zerod.steps()
    again.
    """
    n_aborted = 0
    _leave_begun_step(opt)
    while (at := _position(opt)).step < n_steps:
        step = Step(at.step)
        step._opt, step._left = opt, n_retries - n_aborted
        yield step
        if _position(opt).step > at.step:
            n_aborted = 0
        elif step.aborted or _position(opt).attempt != at.attempt:
            n_aborted += 1
        else:
            raise RuntimeError(f"step {step} was not taken: the body of zerod.steps() calls opt.step() once each time")
