# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer and its subclasses, with zerod's optimizer."""

from __future__ import annotations

import copy
import functools
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback

from .. import compiled
from ..errors import CheckpointNotSaved, ZerodWarning
from ..loops.trainer import create, resume
from ..observe import observe
from ..optimizer import Optimizer


class ZerodMixin:
    """
    Any Trainer, with the optimizer of its arguments in zerod. A process that was started again continues at the job's
    step.

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
        """Trains. resume_from_checkpoint is for a new job; a job with steps continues by itself, see zerod.resume()."""
        self.create_optimizer()
        return super().train(resume(self) or resume_from_checkpoint, *args, **kwargs)


class ZerodTrainer(ZerodMixin, Trainer):
    """Trainer, with zerod's optimizer: see ZerodMixin."""


def identity(folder: Path) -> int | None:
    """A number that changes when another folder replaces this one; None if there is no folder."""
    try:
        return folder.stat().st_ino
    except OSError:
        return None


class DaemonCheckpoint(TrainerCallback):
    """
    A callback with which the daemon writes a Trainer's checkpoints while training continues: whenever the Trainer's
    arguments require one (save_strategy, save_steps). The Trainer then writes no checkpoints itself. The last
    checkpoint is on the disk when train() returns. If a checkpoint cannot be written, there is a warning and training
    continues. Training does not begin if the daemon has no folder for checkpoints.

    The callback adds the model's config.json, which from_pretrained needs, to each checkpoint. If another user's daemon
    owns the folder and this is not allowed, one warning says how to allow it.

    opt: the zerod.Optimizer, for a trainer that has no optimizer when training begins.
    """

    def __init__(self, opt: Optimizer | None = None) -> None:
        self._opt = opt
        self._folder = Path()  # the folder of the job's checkpoints
        self._without_config: dict[Path, int | None] = {}  # requested checkpoint -> identity() of its folder before
        self._has_warned = False

    def _ours(self, optimizer: Any) -> Optimizer:
        return self._opt or getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it

    def on_train_begin(self, args: Any, _state: Any, _control: Any, optimizer: Any = None, **_: Any) -> None:
        """Refuses a daemon without a folder for checkpoints now, not when the first checkpoint is due."""
        status = self._ours(optimizer)._client.status(5.0) if args.save_strategy != "no" else None
        if status is not None and status["checkpoint"] is None:
            raise ValueError(
                "DaemonCheckpoint: the daemon's configuration has no checkpoint.dir, so the daemon can write no checkpoint: "
                "add checkpoint: {dir: PATH} to the file that zerodrun --config or zerod --config reads, or leave this "
                "callback out"
            )
        if status is not None:
            self._folder = Path(status["checkpoint"]["dir"])

    def on_step_end(
        self, _args: Any, _state: Any, control: Any, optimizer: Any = None, model: Any = None, **_: Any
    ) -> None:
        self._add_configs(model)
        if not control.should_save:
            return
        control.should_save = False
        ours = self._ours(optimizer)
        if ours.rank == 0:
            folder = self._folder / f"step-{ours.epoch:08}"
            before = identity(folder)
            try:
                ours.save_checkpoint(wait=control.should_training_stop)
            except CheckpointNotSaved as e:
                warnings.warn(f"training goes on without this checkpoint: {e}", ZerodWarning, stacklevel=2)
            else:
                self._without_config[folder] = before

    on_epoch_end = on_step_end

    def on_train_end(
        self, _args: Any, _state: Any, _control: Any, optimizer: Any = None, model: Any = None, **_: Any
    ) -> None:
        """Waits for a checkpoint that is almost written, so that the checkpoint gets its config.json as well."""
        deadline = time.monotonic() + 10
        while self._without_config and self._is_being_written(optimizer) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._add_configs(model)

    def _is_being_written(self, optimizer: Any) -> bool:
        status = self._ours(optimizer)._client.status(5.0)["checkpoint"]
        return bool(status["wanted"] or status["saving"])

    def _add_configs(self, model: Any) -> None:
        """Adds config.json to complete checkpoints, whose folders have their final names."""
        config = getattr(model, "config", None)
        if not self._without_config or not hasattr(config, "save_pretrained"):
            self._without_config.clear()
            return
        config = copy.deepcopy(config)
        config.architectures = [type(compiled.unwrapped(model)).__name__]
        for folder in [f for f, before in self._without_config.items() if identity(f) not in (None, before)]:
            del self._without_config[folder]
            try:
                config.save_pretrained(folder)
            except OSError as e:
                self._warn_of_config(folder, e)

    def _warn_of_config(self, folder: Path, error: OSError) -> None:
        if not self._has_warned:
            warnings.warn(
                f"from_pretrained needs config.json beside the weights, and this process cannot write it ({error}): call "
                f"model.config.save_pretrained() for a copy of {folder} that is yours. No later checkpoint is warned of",
                ZerodWarning,
                stacklevel=2,
            )
        self._has_warned = True


class ZerodMetrics(TrainerCallback):
    """
    A callback that adds the job's figures to the Trainer's log, next to the loss, so that every logger of the Trainer
    gets them: TensorBoard, W&B, the console, log_history. Rank 0 logs them.

    names: the figures of Optimizer.metrics() to be logged; default: all. prefix: the beginning of each name in the log.
    """

    def __init__(self, trainer: Trainer, names: Iterable[str] | None = None, prefix: str = "zerod/") -> None:
        self._trainer = weakref.ref(trainer)
        self._names = None if names is None else tuple(names)
        self._prefix = prefix

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Wraps log(). on_log() would be too late, because loggers' callbacks run first, and log_history has its
        copy."""
        trainer = self._trainer()
        if trainer is not None and "log" not in vars(trainer):
            trainer.log = functools.partial(self._log, trainer.log)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        trainer = self._trainer()
        if trainer is not None:
            vars(trainer).pop("log", None)

    def _log(self, log: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        trainer = self._trainer()
        if trainer is not None and "loss" in logs:  # not an evaluation, nor the end of the training
            logs = {**logs, **self._figures(trainer.optimizer)}
        log(logs, *args, **kwargs)

    def _figures(self, optimizer: Any) -> dict[str, float]:
        ours = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        figures = ours.metrics() if ours.rank == 0 else {}
        return {self._prefix + n: v for n, v in figures.items() if self._names is None or n in self._names}


class Observe(TrainerCallback):
    """zerod.observe() for a Trainer under DDP, which wraps its model when it begins to train."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        trainer = self._trainer()
        if trainer is not None and isinstance(compiled.unwrapped(trainer.model_wrapped), DistributedDataParallel):
            observe(trainer.model_wrapped)
