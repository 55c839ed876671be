# SPDX-License-Identifier: Apache-2.0
"""Lightning Fabric, which LitGPT is made with, over a model whose gradients zerod reduces."""

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


class _NoSync:
    """Fabric's no_backward_sync(): zerod sums each backward by itself, so there is nothing to leave out."""

    def no_backward_sync(self, _module: nn.Module, _enabled: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


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

    Make the optimizer before fabric.setup(). When one process ends too early, the others end as well, because they share a
    process group: start all of them again, for example by zerodrun --restarts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _NoSync()

    def setup_environment(self) -> None:
        super().setup_environment()
        watch_group()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """The module itself: not in DistributedDataParallel."""
        return module
