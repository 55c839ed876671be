# SPDX-License-Identifier: Apache-2.0
"""
Where in the user's program something happened: "train.py:31".

Frames of torch, of this package and of other installed packages are skipped if a frame of the user's own is further
out. Sites are bytes and cached: libzerod sends each string once and compares by value.
"""

from __future__ import annotations

import ast
import linecache
import sys
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

_HERE = str(Path(__file__).parent) + "/"
_INSTALLED = ("site-packages/", "dist-packages/")
_PYTHON = str(Path(linecache.__file__).parent) + "/"

UNKNOWN = b""


@lru_cache(maxsize=None)
def _place(filename: str) -> tuple[int, str]:
    """(distance from the user's code: 0 the user's own, 1 an installed package, 2 machinery; the name to print)."""
    if filename.startswith(_HERE) or filename.startswith("<"):
        return 2, filename
    for folder in _INSTALLED:
        if folder in filename:
            inside = filename.rsplit(folder, 1)[1]
            return (2 if inside.startswith("torch/") else 1), inside
    return (2, filename) if filename.startswith(_PYTHON) else (0, Path(filename).name)


@lru_cache(maxsize=None)
def _site(code: CodeType, line: int) -> bytes:
    return f"{_place(code.co_filename)[1]}:{line}".encode()


def site_of(frame: FrameType) -> str:
    return site_at(frame.f_code, frame.f_lineno)


def site_at(code: CodeType, line: int) -> str:
    return _site(code, line).decode()


def is_users(frame: FrameType) -> bool:
    """True for the user's own code, which is not torch's, this package's or another installed one's."""
    return _place(frame.f_code.co_filename)[0] == 0


def user_site(frame: FrameType | None = None) -> bytes:
    """Return: the innermost frame of the user's own code; else of an installed package; else UNKNOWN. frame: default:
    the caller's."""
    frame = frame or sys._getframe(1)
    package: FrameType | None = None

    while frame is not None:
        distance = _place(frame.f_code.co_filename)[0]
        if distance == 0:
            return _site(frame.f_code, frame.f_lineno)
        if distance == 1 and package is None:
            package = frame
        frame = frame.f_back
    return _site(package.f_code, package.f_lineno) if package else UNKNOWN


def stack() -> list[tuple[CodeType, int]]:
    """The callers, innermost first, for find_swallower()."""
    frame: FrameType | None = sys._getframe(1)
    callers = []

    while frame is not None:
        callers.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return callers


def parting(one: list[tuple[CodeType, int]], other: list[tuple[CodeType, int]]) -> tuple[bytes, bytes] | None:
    """
    Compares the stack()s of two calls from one line. Returns the outermost callers whose lines differ, or None. If a
    model encodes queries and then passages, both segments run from one line, but these callers differ.
    """
    pairs = list(zip(reversed(one), reversed(other), strict=False))
    parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if parted is None:
        return None
    first, second = (
        next((_site(code, line) for code, line in stack[::-1][parted:] if _place(code.co_filename)[0] < 2), UNKNOWN)
        for stack in (one, other)
    )
    return (first, second) if UNKNOWN != first != second != UNKNOWN else None


@lru_cache(maxsize=64)
def _handled_lines(filename: str) -> list[tuple[int, int]]:
    """Ranges of lines inside a try whose handlers do not raise again."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return []
    return [
        (node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and any(not isinstance(h.body[-1], ast.Raise) for h in node.handlers)
    ]


def find_swallower(callers: list[tuple[CodeType, int]]) -> str:
    """The innermost caller in a try that swallows exceptions: "gliner/training/trainer.py:216 training_step"."""
    for code, line in callers:
        distance, name = _place(code.co_filename)
        if distance < 2 and any(first <= line <= last for first, last in _handled_lines(code.co_filename)):
            return f"{name}:{line} {code.co_name}"
    return ""


def raised_at(error: BaseException) -> str:
    """The innermost frame of the traceback that is not of torch or of this package, or the innermost of all."""
    trace, best = error.__traceback__, ""

    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if _place(filename)[0] < 2:
            best = f"{_place(filename)[1]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return best
