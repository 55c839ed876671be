# SPDX-License-Identifier: Apache-2.0
"""Hooks of this package on the modules of a program."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch


def nothing(*_: Any) -> None:
    """The function that replaces a Hook in a copy."""


def _get_nothing() -> Callable[..., None]:
    return nothing


class Hook:
    """
    A callable. In a copy of its module, and in a pickled one, it does nothing, because these belong to no optimizer.
    torch.compile leaves the call out, so that the module is one graph, as without zerod.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = torch.compiler.disable(call)

    def __call__(self, *args: Any) -> Any:
        # True where torch's compiler traces a module that calls this.
        return None if torch.compiler.is_compiling() else self._call(*args)

    def __deepcopy__(self, _memo: Any) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> Any:
        return _get_nothing, ()


def _skip(code: CodeType) -> None:
    """
    Does what torch._dynamo.eval_frame.skip_code() does, without importing the compiler, which takes seconds. A torch
    that has neither function compiles such a call separately, which is useless.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):
        frames.skip_code(code)
    elif hasattr(frames, "_FrameExecStrategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, frames._FrameAction.DEFAULT))


# If a module's call is not traced, as is often so for the outermost module, the hook runs, and is not compiled
# separately.
_skip(Hook.__call__.__code__)


class BreakingHook(Hook):
    """A Hook that must always run: torch.compile ends a graph at its call, and begins the next graph after it."""

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)
