# SPDX-License-Identifier: Apache-2.0
"""Settings of the optimizer that the program gives, compared with those of the daemon's configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import _lib


ADJUST_LR_FNS = (None, "original", "match_rms_adamw")
TUPLES = {"betas": ("beta1", "beta2"), "ns_coefficients": ("ns_a", "ns_b", "ns_c")}  # their fields of _lib.Hyper


def value_of(hyper: _lib.Hyper, name: str) -> Any:
    """A hyperparameter under torch's name."""
    if name in TUPLES:
        return tuple(getattr(hyper, field) for field in TUPLES[name])
    return ADJUST_LR_FNS[1 + hyper.match_rms_adamw] if name == "adjust_lr_fn" else getattr(hyper, name)


def set_value(hyper: _lib.Hyper, name: str, value: Any) -> None:
    """Sets a hyperparameter under torch's name. value: numbers; for adjust_lr_fn one of ADJUST_LR_FNS."""
    if name in TUPLES:
        for field, item in zip(TUPLES[name], value, strict=True):
            setattr(hyper, field, item)
    elif name == "adjust_lr_fn":
        hyper.match_rms_adamw = value == "match_rms_adamw"
    else:
        setattr(hyper, name, int(value) if name == "ns_steps" else value)


def names_given(groups: list[Any], hypers: dict[str, Any]) -> list[set[str]]:
    """For each group the names of the hyperparameters that the program gives: to all groups or to this one."""
    if not any(isinstance(group, dict) for group in groups):
        return [set(hypers)]  # one group of parameters
    return [set(hypers) | set(group) for group in groups]


class Given:
    """
    The hyperparameters of each group that the program sets: those that it has given, and those that it has changed
    since. The daemon sets the other hyperparameters. If the daemon has a schedule, the schedule sets the learning
    rates, starting from the rate that a group was given. If the program sets a rate itself, as torch's schedulers do,
    the schedule ends for that group.

    values: the hyperparameters of each group when it was made.
    """

    def __init__(self, job: _lib.Job, names: list[set[str]], values: list[dict[str, Any]]) -> None:
        self._has_schedule = bool(job.has_scheduler)
        self._starts_from_lr = self._has_schedule and not job.configured & _lib.CONFIGURED_MAX_LR
        self._names, self._values = names, values
        self._sets_rate = [False] * len(names)  # for each group: True if the program sets its learning rate
        self._is_said = not self._starts_from_lr and any("lr" in given for given in names)  # by differences()

    def bits(self, i: int, group: dict[str, Any], values: dict[str, Any]) -> int:
        """The bits of group i for Hyper.given; 0: all, and no schedule. values: its present hyperparameters."""
        if not self._has_schedule:
            return 0
        changed = {name for name, value in values.items() if value != self._values[i][name]}
        self._names[i] |= changed
        self._sets_rate[i] |= "lr" in changed or "initial_lr" in group  # from torch's schedulers
        bits = sum(_lib.CONFIGURED[name] for name in self._names[i] & values.keys()) | _lib.CONFIGURED_OPTIMIZER
        if self._sets_rate[i]:
            return bits | _lib.CONFIGURED["lr"]
        return bits | (_lib.CONFIGURED_SCHEDULER if self._starts_from_lr and "lr" in self._names[i] else 0)

    def replaced(self) -> str:
        """The line that reports, once, that the program sets learning rates itself; or ""."""
        if self._is_said or not any(self._sets_rate):
            return ""
        self._is_said = True
        groups = [str(i) for i, sets in enumerate(self._sets_rate) if sets]
        whose = "" if all(self._sets_rate) else f" of parameter group{'s' if len(groups) > 1 else ''} {', '.join(groups)}"
        return (
            f"zerod: warning: the program sets the learning rate{whose} itself, so the scheduler of the daemon's "
            "configuration has no effect on it"
        )


# Arguments of torch's optimizers that choose how the same step is computed, and those that select another step when on.
_SAME_STEP = ("fused", "foreach", "capturable")
_OTHER_STEP = ("amsgrad", "maximize", "differentiable")


def without_switches(where: str, values: dict[str, Any]) -> dict[str, Any]:
    """
    Returns the hyperparameters without torch's switches that change no number. where: "" or "of parameter group 1".
    Raises ValueError for a switch that is on and asks for a step that zerod does not have.
    """
    for name in _OTHER_STEP:
        if values.get(name):
            raise ValueError(
                f"{name}={values[name]!r}{where} asks for a step that zerod does not have: {name}=False, or leave it out"
            )
    return {name: value for name, value in values.items() if name not in (*_SAME_STEP, *_OTHER_STEP)}


def given(groups: list[Any], hypers: dict[str, Any]) -> dict[str, list[Any]]:
    """For each hyperparameter that the program gives, the groups' values: a group's own value, or the value for all
    groups."""
    dicts = [group for group in groups if isinstance(group, dict)]
    if len(dicts) < len(groups) or not dicts:
        dicts.append({})  # all parameters that are given without a group
    names = dict.fromkeys([*hypers, *(name for group in dicts for name in group if name in _lib.CONFIGURED)])
    return {
        name: [group.get(name, hypers.get(name)) for group in dicts if name in hypers or name in group] for name in names
    }


def momentum(wanted: str | None, values: dict[str, list[Any]]) -> float:
    """SGD's largest momentum: if it is above 0, SGD has a buffer. Ignores wrong values: a later check refuses them."""
    numbers = [value for value in values.get("momentum", []) if isinstance(value, int | float) and 0 <= value < 1]
    return float(max(numbers, default=0.0)) if wanted == "SGD" else 0.0


def check_type(wanted: str | None, known: Iterable[str]) -> None:
    """Raises ValueError if the wanted type is not known. known: all types, or the daemon's."""
    names = list(known)
    if wanted is None or wanted in names:
        return
    if len(names) > 1:
        raise ValueError(f"type is {wanted!r}; it may be {', '.join(names)}")
    raise ValueError(
        f"type is {wanted!r}, and the daemon's optimizer is {names[0]}: optimizer: {{type: {wanted}}} in its "
        f"configuration, or type={names[0]!r} here"
        + ("; Muon needs one node, device: cpu and OpenBLAS (Debian: libopenblas0-pthread)" if wanted == "Muon" else "")
    )


def differences(job: _lib.Job, values: dict[str, list[Any]]) -> list[str]:
    """Returns a line that says where the program overrules the daemon's configuration, or no line."""
    configured = {name: value_of(job.hyper, name) for name in values if name in _lib.CONFIGURED}
    other = [
        f"{name} {'/'.join(map(str, dict.fromkeys(map(_plain, mine))))} and not {_plain(configured[name])}"
        for name, mine in values.items()
        if job.configured & _lib.CONFIGURED.get(name, 0) and any(_plain(m) != _plain(configured[name]) for m in mine)
    ]
    if "lr" in values and job.configured & _lib.CONFIGURED_MAX_LR:
        other.append("lr without the daemon's scheduler")
    return [f"zerod: warning: the program overrules the daemon's configuration: {', '.join(other)}"] if other else []


def _plain(value: Any) -> Any:
    """The form for comparing and printing: a tensor, a list and a number of another kind may have equal values."""
    if isinstance(value, tuple | list):
        return "(" + ", ".join(str(_plain(v)) for v in value) + ")"
    if value is None or isinstance(value, str):
        return value or "original"
    return f"{float(value):g}"
