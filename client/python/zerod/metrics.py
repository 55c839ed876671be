# SPDX-License-Identifier: Apache-2.0
"""The job's figures as plain numbers, for loggers: see Optimizer.metrics()."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Client

# Names of figures, and their places in the daemon's status (docs/schema/status.json). Values in _ns become seconds.
_ALWAYS = {
    "step": "step",
    "n_applied": "n_applied",
    "n_skipped": "n_skipped",
    "n_aborted": "counters.n_aborts",
    "n_missing_steps": "n_missing_steps",
    "n_missing_params": "n_missing_params",
    "n_warnings": "counters.n_warnings",
    "n_ranks_attached": "n_attached",
    "loss_scale": "loss_scale",
    "grad_norm": "grad_norm",
    "overlap_ratio": "overlap.ratio",
    "early_update_ratio": "early_updates.ratio",
    "slowest_rank": "slowest_rank.rank",
    "slowest_rank_behind_seconds": "slowest_rank.behind_ns",
    "memory_bytes": "memory.total.held_bytes",
    "checkpoint_step": "checkpoint.last.step",
    "checkpoint_age_seconds": "checkpoint.last.ago_ns",
}
# For these figures, 0 in the status means that there is no value.
_UNLESS_0 = {
    "steps_per_s": "steps_per_s",
    "last_step_seconds": "last_step_ns",
    "memory_planned_bytes": "memory.total.planned_bytes",
    "memory_limit_bytes": "limit_bytes",
    "gpu_memory_bytes": "memory.device_total.held_bytes",
}
# Figures of the last step, used only if a step was made.
_OF_A_STEP = {
    "wait_seconds": "time.wait.last_ns",
    "reduce_seconds": "time.reduce.last_ns",
    "update_seconds": "time.update.last_ns",
}


class Waits:
    """The time that this rank has waited in its calls for other ranks and the daemon."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since = time.perf_counter()

    def during(self, call: Callable[..., int], *args: Any) -> int:
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            self._seconds += time.perf_counter() - began

    def take_ratio(self) -> float:
        """Returns the waiting share of the time since the last call of this method, or since the attach."""
        now = time.perf_counter()
        ratio = min(self._seconds / max(now - self._since, 1e-9), 1.0)
        self._seconds, self._since = 0.0, now
        return ratio


def _find(status: Any, path: str) -> float | None:
    for key in path.split("."):
        status = status.get(key) if isinstance(status, dict) else None
    if isinstance(status, bool) or not isinstance(status, int | float):
        return None
    return status * 1e-9 if path.endswith("_ns") else status


def _rates(status: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The learning rates of the last step: lr is that of group 0, lr_1 of group 1, ..."""
    for i, group in enumerate(status.get("groups", [])):
        yield f"lr_{i}" if i else "lr", group["lr"]


def _of_status(status: dict[str, Any]) -> dict[str, float]:
    """Returns the figures of a status. status: {} if the daemon has not answered."""
    has_step = status.get("n_applied", 0) + status.get("n_skipped", 0) > 0
    places = _ALWAYS | (_OF_A_STEP if has_step else {})
    figures = {name: _find(status, path) for name, path in places.items()}
    figures |= {name: _find(status, path) or None for name, path in _UNLESS_0.items()}
    figures["n_refused"] = sum(refused["n"] for refused in status["refused"]) if "refused" in status else None
    return {name: value for name, value in figures.items() if value is not None} | dict(_rates(status))


def collect(client: Client, timeout: float) -> dict[str, float]:
    """Returns the figures of the last step's answer and, if the daemon answers in time, those of the daemon's
    status."""
    figures: dict[str, float] = {}
    if client.result is not None:
        step = client.result
        figures = {"step": step.epoch, "grad_norm": step.grad_norm, "loss_scale": step.loss_scale, "lr": step.lr,
                   "n_missing_params": step.n_missing}  # fmt: skip
    figures |= _of_status(client.status(timeout) or {})
    figures["waited_ratio"] = client.waits.take_ratio()
    return {name: value for name, value in figures.items() if math.isfinite(value)}
