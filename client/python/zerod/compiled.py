# SPDX-License-Identifier: Apache-2.0
"""
Models made by torch.compile. The wrapper around a module is not the model, and parameters keep the names that they have
without the wrapper. torch's compiler is imported only when it is used, so this module looks for it in sys.modules.
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
    """True if torch's compiler has made a graph in this process. Hooks of modules do not run in compiled code."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and any(utils.counters.values())
