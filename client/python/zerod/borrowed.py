# SPDX-License-Identifier: Apache-2.0
"""Notices reads of a module's parameters as attributes, `module.weight`, by its own forward or by other code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Parameters(dict[str, Any]):
    """A module's _parameters, which calls read() with a parameter before the program gets it."""

    def __init__(self, parameters: dict[str, Any], read: Callable[[torch.Tensor], None]) -> None:
        super().__init__(parameters)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if param is not None:
            self._read(param)
        return param

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy of the module belongs to no optimizer


def watch(module: nn.Module, read: Callable[[torch.Tensor], None]) -> None:
    """From now on, each read of a module's own parameter as an attribute calls read() with the parameter."""
    module._parameters = Parameters(module._parameters, read)


def unwatch(module: nn.Module) -> None:
    if isinstance(module._parameters, Parameters):
        module._parameters = dict(module._parameters)
