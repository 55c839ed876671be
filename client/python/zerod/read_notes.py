# SPDX-License-Identifier: Apache-2.0
"""
An exception that follows from a .grad that is None gets a note that names zerod.

`p.grad.norm()` after backward() raises "'NoneType' object has no attribute 'norm'", which does not name the cause.
reads.py notes the last such read. When an exception ends the program, this module checks whether it came from that
read: the statement that raised it uses that .grad, or a variable that holds it. Until then, this module does nothing
more.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

from . import sites

_REMEDIES = (
    "  fix            opt.grad_norm() before opt.step() is the norm of all gradients, opt.grad_norm({name!r}) after it that of one "
    "parameter",
    "  or             torch.nn.utils.clip_grad_norm_(model.parameters(), x), or gradient_clipping in the daemon's configuration",
    "  or             no all_reduce: the daemon takes the mean over all ranks",
    "  or             param.register_hook(lambda grad: ...), before the backward, to change a gradient",
)


class Read(NamedTuple):
    """A read of .grad in the user's own code that found None, because the gradient had been pushed."""

    code: CodeType
    line: int
    name: str  # of the parameter


_last: Read | None = None


def note(frame: FrameType, name: str) -> None:
    """Keeps the read, and drops the previous read."""
    global _last
    _last = Read(frame.f_code, frame.f_lineno, name)


@functools.cache
def install() -> None:
    """Explains the exception that ends the program, before it is printed."""
    hook = sys.excepthook

    @functools.wraps(hook)
    def explained(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        explain(error)
        return hook(kind, error, trace)

    sys.excepthook = explained


def explain(error: BaseException) -> None:
    """Adds the note to the exception, or to an exception that caused it, if that exception came from the last read."""
    if _last is None:
        return
    for each in _chain(error):
        if isinstance(each, AttributeError | TypeError) and "NoneType" in str(each) and _came_from(_last, each):
            each.add_note(_text(_last))
            return


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _text(read: Read) -> str:
    lines = (
        f"  cause          {sites.site_at(read.code, read.line)} reads .grad of {read.name} between backward() and step(): it is "
        "None, because zerod has pushed the gradient",
        *_REMEDIES,
    )
    return "\n".join(lines).replace("{name!r}", repr(read.name))


# ---- did the exception come from the read? -----------------------------------------------------------------


def _came_from(read: Read, error: BaseException) -> bool:
    """True if the statement that raised uses .grad, or a variable that holds it, in a way that None does not allow."""
    found = _innermost_users(error.__traceback__)
    if found is None or found[0].f_code is not read.code:
        return False
    frame, line = found
    at_read, at_error = (_statement(read.code.co_filename, at) for at in (read.line, line))
    if at_read is None or at_error is None:
        return False
    variables = _targets(at_read) & {name for name, value in frame.f_locals.items() if value is None}
    attribute = error.name if isinstance(error, AttributeError) and _is_raised_in(frame, error) else None

    def is_read(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in variables
        return at_read is at_error and isinstance(node, ast.Attribute) and node.attr == "grad"

    return any(is_read(used) for used in _uses(at_error, attribute))


def _innermost_users(trace: TracebackType | None) -> tuple[FrameType, int] | None:
    found = None
    while trace is not None:
        if sites.is_users(trace.tb_frame):
            found = trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    return found


def _is_raised_in(frame: FrameType, error: BaseException) -> bool:
    """True if the frame itself raised; False if an installed package's function did, which the frame called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame is frame


@functools.lru_cache(maxsize=4)
def _pieces(filename: str) -> list[ast.stmt | ast.expr]:
    """Simple statements, and the expressions in the first lines of compound statements."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return []
    found: list[ast.stmt | ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While):
            found.append(node.test)
        elif isinstance(node, ast.For):
            found.append(node.iter)
        elif isinstance(node, ast.With):
            found += [item.context_expr for item in node.items]
        elif isinstance(node, ast.stmt) and not hasattr(node, "body"):
            found.append(node)
    return found


def _statement(filename: str, line: int) -> ast.stmt | ast.expr | None:
    return next((s for s in _pieces(filename) if s.lineno <= line <= (s.end_lineno or s.lineno)), None)


def _targets(statement: ast.AST) -> set[str]:
    """The variables that get .grad itself: g of `g = p.grad`."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Attribute):
        return set()
    is_grad = statement.value.attr == "grad"
    return {target.id for target in statement.targets if isinstance(target, ast.Name) and is_grad}


def _uses(statement: ast.AST, attribute: str | None) -> Iterator[ast.AST]:
    """
    The expressions whose attribute of that name is read. Without a name: the expressions that are arguments, operands
    or elements of a list, or that are compared, formatted or indexed.
    """
    for node in ast.walk(statement):
        if attribute is not None:
            if isinstance(node, ast.Attribute) and node.attr == attribute:
                yield node.value
        elif isinstance(node, ast.Call):
            yield from [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.BinOp):
            yield from (node.left, node.right)
        elif isinstance(node, ast.AugAssign):
            yield from (node.target, node.value)
        elif isinstance(node, ast.Compare) and not any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            yield from (node.left, *node.comparators)
        elif isinstance(node, ast.UnaryOp):
            yield node.operand
        elif isinstance(node, ast.FormattedValue):
            yield node.value
        elif isinstance(node, ast.Subscript):
            yield node.value
        elif isinstance(node, ast.List | ast.Tuple):
            yield from node.elts
        elif isinstance(node, ast.ListComp | ast.GeneratorExp):
            yield node.elt
