# SPDX-License-Identifier: Apache-2.0
"""The lines that called a checkpointed segment, by which its runs can be told apart, without a daemon."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from zerod import watch  # noqa: E402


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=True)


class Silent:
    """A watcher that does nothing."""

    def backward_begins(self, roots: Any) -> None: ...
    def backward_ends(self, error: BaseException | None) -> None: ...


def from_three_lines(model: Encoder, x: torch.Tensor) -> torch.Tensor:
    queries = model.encode(x)
    passages = model.encode(2 * x)
    answers = model.encode(3 * x)
    return queries + passages + answers


def from_one_line(model: Encoder, x: torch.Tensor) -> torch.Tensor:
    return sum(model.encode(i * x) for i in range(3))


def sites_of(forward: Callable[[Encoder, torch.Tensor], torch.Tensor]) -> dict[int, str]:
    """Return: {call: site} of one backward's segments."""
    model, watcher, found = Encoder(), Silent(), {}
    watch.add(watcher, model)
    model.layer.weight.register_post_accumulate_grad_hook(
        lambda _: found.update({watch.now.segments[-1].call: watch.now.segments[-1].site.decode()})
    )
    try:
        forward(model, torch.ones(2, 3, requires_grad=True)).sum().backward()
    finally:
        watch.remove(watcher)
    return found


def line(function: Callable[..., Any], nth: int) -> str:
    return f"test_watch.py:{inspect.getsourcelines(function)[1] + nth}"


def test_runs_from_different_lines_are_told_apart() -> None:
    assert sites_of(from_three_lines) == {i: line(from_three_lines, i) for i in (1, 2, 3)}


def test_runs_from_one_line_have_the_segment_s_own() -> None:
    assert sites_of(from_one_line) == {i: line(Encoder.encode, 1) for i in (1, 2, 3)}


def test_a_forward_does_not_remember_the_one_before() -> None:
    for _ in range(2):
        assert set(sites_of(lambda model, x: model.encode(x))) == {1}
    assert not watch.now.firsts
