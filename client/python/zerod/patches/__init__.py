# SPDX-License-Identifier: Apache-2.0
"""
Functions of torch and of other libraries that zerod wraps, because they have no hook for it. Each is wrapped once per
process, and only parameters of a zerod.Optimizer are affected.

    torch         clipping, GradScaler, methods of nn.Module, broadcasts of a module's state
    accelerate    its DDP is left out, its optimizer wrapper leaves the state alone; the Trainer of transformers uses it
    wrappers      DDP, FSDP and DataParallel around a model that zerod owns are refused
"""

from __future__ import annotations

from typing import Any

from ..registry import OpenOptimizer
from . import accelerate as _accelerate
from . import torch as _torch
from . import wrappers as _wrappers


def attach(opt: OpenOptimizer) -> list[Any]:
    """Installs the process-wide patches, and the guards of the model. Returns handles that remove the guards."""
    _torch.install()
    handles = _torch.guard_loads(opt)
    _wrappers.install()
    _accelerate.install()
    return handles
