# SPDX-License-Identifier: Apache-2.0
"""
Classes for the loops of other libraries. Each module imports its library, so import only the one that you use:

    from zerod.integrations.transformers import ZerodTrainer        # or ZerodMixin, for SFTTrainer and its like
    from zerod.integrations.transformers import ZerodMetrics        # the job's figures in the Trainer's log
    from zerod.integrations.lightning import ZerodCallback, ZerodMetrics, ZerodStrategy
    from zerod.integrations.fabric import ZerodMetrics, ZerodStrategy

accelerate needs no class: zerod.Optimizer and zerod.epochs() work with its Accelerator.
"""

from typing import Any


def resume_lightning() -> Any:
    """
    Returns zerod.integrations.lightning.ZerodCallback(), with which Lightning's Trainer continues in a process that was
    started again:

        trainer = Trainer(callbacks=[zerod.resume_lightning(), ...], strategy=ZerodStrategy(), ...)
    """
    from .lightning import ZerodCallback

    return ZerodCallback()
