# SPDX-License-Identifier: Apache-2.0
"""Hooks of this package on the modules of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def nothing(*_: Any) -> None:
    """The function that replaces a Hook in a copy."""


def _get_nothing() -> Callable[..., None]:
    return nothing


class Hook:
    """A callable. In a copy of its module, and in a pickled one, it does nothing: those belong to no optimizer."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, _memo: Any) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> Any:
        return _get_nothing, ()
