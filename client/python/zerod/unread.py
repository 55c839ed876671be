# SPDX-License-Identifier: Apache-2.0
"""
A program that is started again attaches to a job that has committed steps. If it does not read the job's position, it
would train its first batches again, on top of those steps. So its gradients are refused until it has read the position,
or has called begin_anew().
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

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
_PLAIN_FIX = "for step in range(opt.epoch, n_steps):   (opt.position has the micro-batch, too)"


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


class Unread:
    """
    Has the program read where the job stands? Until it has, its gradients are refused before they are pushed.

    position: this rank's position when the process attached. params: the trainable parameters; the hooks that push
    their gradients are registered later, so they run after this one.
    """

    def __init__(self, position: Position, params: Iterable[torch.Tensor]) -> None:
        self._position = position
        self._is_known = position.step == 0 and position.micro_batch == 0
        self._handles = [] if self._is_known else [p.register_post_accumulate_grad_hook(self._refuse) for p in params]

    def _refuse(self, param: torch.Tensor) -> None:
        """Raises at the first gradient of a backward, and clears it, so that the next backward does not add to it."""
        param.grad = None
        self.check()

    def read(self) -> None:
        """Called when the program has read the position."""
        self._is_known = True
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def check(self) -> None:
        if not self._is_known:
            raise ResumeIgnored(_text(self._position))
