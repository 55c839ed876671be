# SPDX-License-Identifier: Apache-2.0
"""
Continues Lightning's Trainer in a process that was started again. The Trainer's loops can begin in the middle of an
epoch only from a checkpoint, and then they do not skip data. So this module sets the loops' counters and skips the
data.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
    from pytorch_lightning.strategies import DDPStrategy
else:
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import DDPStrategy

from ..loops.progress import Progress, group_is_done
from ..optimizer import Optimizer
from ..registry import when_attached
from ..scaling import scaled


class ZerodStrategy(DDPStrategy):
    """
    Lightning's processes, process group and samplers as under DDPStrategy; zerod reduces the gradients.

        trainer = Trainer(strategy=ZerodStrategy(), callbacks=[ZerodCallback()], accelerator="cpu", devices=N)
    """

    def configure_ddp(self) -> None:
        """Does not wrap the model in DistributedDataParallel."""

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Multiplies the loss by the daemon's loss scale, unless the precision plugin has a GradScaler."""
        return super().backward(scaled(closure_loss, "ZerodStrategy", self.precision_plugin), *args, **kwargs)


def _set(progress: Any, total: int, current: int) -> None:
    for tracker, n in ((progress.total, total), (progress.current, current)):
        for name in ("ready", "started", "processed", "completed"):
            if hasattr(tracker, name):
                setattr(tracker, name, n)


class ZerodMetrics(Callback):
    """
    A callback that sends the job's figures (Optimizer.metrics()) to all loggers of Lightning's Trainer, every
    log_every_n_steps steps, with the step number of the module's own figures. Rank 0 logs them.

    prefix: the beginning of each name in the log.
    """

    def __init__(self, prefix: str = "zerod/") -> None:
        self._prefix = prefix
        self._logged = 0  # the last step that was logged: a step may have several batches

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        step = trainer.global_step
        if step == self._logged or step % trainer.log_every_n_steps or not trainer.is_global_zero:
            return
        self._logged = step
        for opt in trainer.optimizers:
            if isinstance(opt, Optimizer):
                figures = opt.metrics(self._prefix)
                for logger in trainer.loggers:
                    logger.log_metrics(figures, step=step - 1)  # Lightning counts completed steps from 0


class ZerodCallback(Callback):
    """
    A callback with which Lightning's Trainer continues at the job's step, in a process that was started again. It skips
    the data of the committed steps, and continues with the Trainer's counters, scheduler and random number generators;
    an unfinished step begins again. It supports one optimizer, automatic optimization and a loader with a length. All
    ranks are started again together, because when one rank ends, the others end as well.
    """

    def __init__(self) -> None:
        self._progress: Any = None
        self._step = 0  # the step that this process begins with
        self._n_skipped = 0  # batches to skip in the first epoch
        self._waits = False  # the generators must be set at the first batch

    def setup(self, _trainer: Any, _module: Any, stage: str) -> None:
        """
        Called before the optimizer is made. _attached() runs with the attach, because other ranks may wait until this
        rank says where it begins.
        """
        if stage == "fit":
            when_attached.append(self._attached)

    def _attached(self, opt: Optimizer) -> None:
        if self._progress is not None:
            raise TypeError("zerod's ZerodCallback is for one zerod.Optimizer")
        self._progress = Progress(opt)
        self._step = self._progress.resume()

    def _forget(self) -> None:
        if self._attached in when_attached:
            when_attached.remove(self._attached)

    def on_exception(self, *_: Any) -> None:
        self._forget()

    def on_fit_start(self, _trainer: Any, module: Any) -> None:
        self._forget()
        if self._progress is None or not module.automatic_optimization:
            raise TypeError("zerod's ZerodCallback is for a zerod.Optimizer and automatic optimization")

    def on_train_start(self, trainer: Any, _module: Any) -> None:
        """Called when the loops have their loaders, and have not begun."""
        step, n_micro = self._step, trainer.accumulate_grad_batches
        if step and trainer.num_training_batches == float("inf"):
            raise TypeError("zerod's ZerodCallback needs a loader with a length")
        per_epoch = max(1, -(-trainer.num_training_batches // n_micro)) if step else 1
        self._restore_scheduler(trainer, per_epoch)
        if step:
            self._set_counters(trainer, step, *divmod(step, per_epoch))

    def _restore_scheduler(self, trainer: Any, per_epoch: int) -> None:
        configs = trainer.lr_scheduler_configs
        if len(configs) > 1:
            raise TypeError("zerod's ZerodCallback is for one scheduler")
        if not configs:
            self._progress.restore(None)
            return
        frequency = configs[0].frequency * (per_epoch if configs[0].interval == "epoch" else 1)
        self._progress.restore(configs[0].scheduler, lambda step: (step + 1) % frequency == 0)

    def _set_counters(self, trainer: Any, step: int, epoch: int, n_done: int) -> None:
        fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        n_batches = n_done * trainer.accumulate_grad_batches
        _set(fit.epoch_progress, epoch, epoch)
        _set(loop.batch_progress, epoch * int(trainer.num_training_batches) + n_batches, n_batches)
        _set(loop.automatic_optimization.optim_progress.optimizer.step, step, n_done)
        loop._batches_that_stepped = step
        self._n_skipped, self._waits = n_batches, True
        if n_batches:
            loop.restarting = True  # without this the loop would count its batches from 0
            loop._batches_that_stepped -= 1  # a restarting loop adds 1
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")

    def on_train_epoch_start(self, trainer: Any, _module: Any) -> None:
        """Called when the samplers have their epoch."""
        if self._waits and not self._n_skipped:
            self._waits = False
            self._progress.begin_next_epoch()
        fetcher, n_skipped, self._n_skipped = trainer.fit_loop._data_fetcher, self._n_skipped, 0
        is_first = trainer.current_epoch == 0  # its order was drawn when the loaders were made, by the program's seed
        self._progress.begin_epoch(goes_on=n_skipped > 0 and not is_first)
        if n_skipped and not is_first:
            iter(fetcher)
        for _ in range(n_skipped):
            next(fetcher)
        if n_skipped:
            fetcher.fetched = 0  # the loop adds what it has counted

    def on_train_batch_start(self, *_: Any) -> None:
        if self._waits:
            self._waits = False
            self._progress.set_generators()

    def on_train_end(self, *_: Any) -> None:
        group_is_done()
