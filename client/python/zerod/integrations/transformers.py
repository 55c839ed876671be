# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer and its subclasses, with zerod's optimizer."""

from __future__ import annotations

import weakref
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback

from ..loops.trainer import create, resume
from ..observe import observe
from ..optimizer import Optimizer


class ZerodMixin:
    """
    Any Trainer with the optimizer that its arguments ask for, in zerod. A process that was started again continues where
    the job is.

        class ZerodSFTTrainer(ZerodMixin, SFTTrainer):
            pass

    zerod_options: further arguments of zerod.Optimizer, which override those of the TrainingArguments.
    """

    zerod_options: dict[str, Any] = {}  # noqa: RUF012

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        """Attaches to the daemon, unless the trainer has an optimizer already."""
        if self.optimizer is None:
            self.optimizer = create(self, self.zerod_options, lambda: super(ZerodMixin, self).create_optimizer(*args, **kwargs))
        return self.optimizer

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """resume_from_checkpoint counts in a new job; a job that has steps continues by itself, see zerod.resume()."""
        self.create_optimizer()
        return super().train(resume(self) or resume_from_checkpoint, *args, **kwargs)


class ZerodTrainer(ZerodMixin, Trainer):
    """Trainer, with zerod's optimizer: see ZerodMixin."""


class DaemonCheckpoint(TrainerCallback):
    """
    With this callback the daemon writes a checkpoint whenever a Trainer's arguments say that one is due (save_strategy,
    save_steps), while training goes on; the Trainer then writes none itself. The last one is on the disk when train()
    returns.

    opt: the trainer's zerod.Optimizer, if it has none when training begins.
    """

    def __init__(self, opt: Optimizer | None = None) -> None:
        self._opt = opt

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if not control.should_save:
            return
        control.should_save = False
        ours = self._opt or getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        if ours.rank == 0:
            ours.save_checkpoint(wait=control.should_training_stop)

    on_epoch_end = on_step_end


class Observe(TrainerCallback):
    """zerod.observe() for a Trainer under DDP, which wraps its model when it begins to train."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        trainer = self._trainer()
        if trainer is not None and isinstance(trainer.model_wrapped, DistributedDataParallel):
            observe(trainer.model_wrapped)
