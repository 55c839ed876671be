# SPDX-License-Identifier: Apache-2.0
"""
A program that is started again attaches to a job that has committed steps. If it does not read the job's position, it
would train its first batches again, on top of those steps. So its gradients are refused until it has read the position,
or has called begin_anew().

The job may be inside a step: micro-batches that an earlier process of the rank has ended count. A program that has not
read position.micro_batch does the whole step again, so at its first gradient the step is aborted for all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

import torch

from .client import Position
from .errors import ResumeIgnored

# The line that a program with each of these libraries needs, most specific library first.
_FIXES = {
    "transformers": "trainer.train(resume_from_checkpoint=zerod.resume(trainer))",
    "lightning": "Trainer(callbacks=[zerod.resume_lightning()], ...)",
    "pytorch_lightning": "Trainer(callbacks=[zerod.resume_lightning()], ...)",
    "accelerate": "for epoch, batches in zerod.epochs(accelerator, optimizer, loader, n_epochs):",
}
_PLAIN_FIX = "for step in zerod.steps(opt, n_steps):   (opt.position has the micro-batch, too)"


def _text(position: Position) -> str:
    fixes = list(dict.fromkeys(fix for module, fix in _FIXES.items() if module in sys.modules)) + [_PLAIN_FIX]
    micro_batch = f", micro-batch {position.micro_batch}" if position.micro_batch else ""
    lines = [
        f"the job is at step {position.step}{micro_batch}, and this program trains without having asked where it is",
        "  cause          the program was started again: data and learning rate would begin anew on top of what is committed",
        *(f"  {'or' if i else 'fix':<15}{fix}" for i, fix in enumerate(fixes)),
        "  or             opt.begin_anew()   (knowingly: the weights as they are, the data from their beginning)",
        "  state          nothing of this program is in the sums; weights and optimizer state are those of the job",
    ]
    return "\n".join(lines)


class _InsideStep(Position):
    """A position in the middle of a step. Calls read() when the program reads the micro-batch; printing does not."""

    read: Callable[[], None]

    @property
    def micro_batch(self) -> int:  # type: ignore[override]
        return self[1]

    def __getitem__(self, at: SupportsIndex | slice) -> Any:
        self.read()
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[int]:
        self.read()
        return super().__iter__()

    def __reduce__(self) -> Any:
        return Position, tuple(super().__iter__())


_InsideStep.__name__ = Position.__name__  # the name that is printed


class Unread:
    """
    Notes whether the program has read the job's position. Until then its gradients are refused before they are pushed.

    position: this rank's position when the process attached. params: the trainable parameters; the hooks that push
    their gradients are registered later, so they run after the hooks of this object. take_back: a weak reference to the
    method that aborts the step; called at the first gradient, unless the program has read the micro-batch.
    """

    def __init__(self, position: Position, params: Iterable[torch.Tensor], take_back: Callable[[], Any]) -> None:
        self._position, self._take_back = position, take_back
        self._is_known = position.step == 0 and position.micro_batch == 0
        self._is_inside = position.micro_batch > 0  # and the program has not read the micro-batch
        self._handles = [] if self._is_known else [p.register_post_accumulate_grad_hook(self._refuse) for p in params]

    def _refuse(self, param: torch.Tensor) -> None:
        """Raises at the first gradient of a backward, and clears it, so that the next backward does not add to it."""
        grad, param.grad = param.grad, None
        self.check()
        if self._is_inside:
            self._read_micro_batch()
            take_back = self._take_back()
            if take_back is not None:
                take_back()
        param.grad = grad

    def read(self) -> None:
        """Called when the program has read the step."""
        self._is_known = True
        if not self._is_inside:
            self._remove_hooks()

    def _read_micro_batch(self) -> None:
        self._is_inside = False
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def position(self, position: Position) -> Position:
        """Returns the present position to the program."""
        self.read()
        if not self._is_inside:
            return position
        inside = _InsideStep(*position)
        inside.read = self._read_micro_batch
        return inside

    def check(self) -> None:
        if not self._is_known:
            raise ResumeIgnored(_text(self._position))

    def close(self) -> None:
        self._is_known, self._is_inside = True, False
        self._remove_hooks()
