# SPDX-License-Identifier: Apache-2.0
"""
Models that torch.compile has made. The wrapper around a module is not the model: parameters have the names that they have
without it. torch's compiler is imported only when it is used, so its modules are looked up.
"""

from __future__ import annotations

import sys
from typing import Any

_WRAPPED = "_orig_mod"  # torch's name of the module inside its wrapper


def unwrapped(model: Any) -> Any:
    """The module inside torch.compile(module); any other object as it is."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    while dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        model = model._orig_mod
    return model


def plain(name: str) -> str:
    """The name of a module, a parameter or a buffer without torch's wrappers."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED) if _WRAPPED in name else name


def is_used() -> bool:
    """Has torch's compiler made a graph in this process? Hooks of modules do not run in what it has compiled."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and any(utils.counters.values())
