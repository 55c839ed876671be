# SPDX-License-Identifier: Apache-2.0
"""Lightning Fabric, on which LitGPT is built, with a model whose gradients zerod reduces."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

if "lightning_fabric" in sys.modules and "lightning.fabric" not in sys.modules:
    from lightning_fabric.strategies import DDPStrategy
else:
    from lightning.fabric.strategies import DDPStrategy

from torch import nn

from ..loops.progress import watch_group
from ..scaling import scaled


class _NoSync:
    """Replaces Fabric's no_backward_sync(). zerod sums each backward by itself, so there is no synchronisation to
    omit."""

    def no_backward_sync(self, _module: nn.Module, _enabled: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class ZerodMetrics:
    """
    A callback that sends the job's figures (Optimizer.metrics()) to all loggers of a Fabric, every `every` steps:

        fabric = Fabric(strategy=ZerodStrategy(), loggers=[...], callbacks=[ZerodMetrics(every=50)])
        ...
        opt.step()
        fabric.call("on_step_end", fabric=fabric, optimizer=opt)

    Rank 0 logs them. prefix: the beginning of each name in the log.
    """

    def __init__(self, every: int = 50, prefix: str = "zerod/") -> None:
        if every < 1:
            raise ValueError(f"every is {every}; expected a number of steps from 1 on")
        self._every, self._prefix = every, prefix

    def on_step_end(self, fabric: Any, optimizer: Any) -> None:
        result = getattr(optimizer, "optimizer", optimizer).result  # Fabric wraps it
        if fabric.is_global_zero and result is not None and result.epoch % self._every == 0:
            fabric.log_dict(optimizer.metrics(self._prefix), step=result.epoch)


class ZerodStrategy(DDPStrategy):
    """
    Fabric's processes, process group and samplers as under DDPStrategy; zerod reduces the gradients.

        fabric = Fabric(accelerator="cpu", devices=N, strategy=ZerodStrategy())
        fabric.launch()
        model = Model()
        model, opt = fabric.setup(model, zerod.Optimizer(model, lr=1e-3))
        for step in zerod.steps(opt.optimizer, n_steps):
            with step:
                fabric.backward(model(batch_of(step)))
                opt.step()
                opt.zero_grad()

    Make the optimizer before fabric.setup(). When one process ends too early, the others end as well, because they
    share a process group. Start all of them again, for example by zerodrun --restarts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _NoSync()

    def setup_environment(self) -> None:
        super().setup_environment()
        watch_group()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Returns the module itself, without DistributedDataParallel."""
        return module

    def backward(self, tensor: Any, *args: Any, **kwargs: Any) -> None:
        """Multiplies the loss by the daemon's loss scale, unless the precision plugin has a GradScaler."""
        super().backward(scaled(tensor, "ZerodStrategy", self.precision), *args, **kwargs)
