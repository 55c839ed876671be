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
    """value: numbers; of adjust_lr_fn one of ADJUST_LR_FNS."""
    if name in TUPLES:
        for field, item in zip(TUPLES[name], value, strict=True):
            setattr(hyper, field, item)
    elif name == "adjust_lr_fn":
        hyper.match_rms_adamw = value == "match_rms_adamw"
    else:
        setattr(hyper, name, int(value) if name == "ns_steps" else value)


def given(groups: list[Any], hypers: dict[str, Any]) -> dict[str, list[Any]]:
    """The values that the program gives for each hyperparameter, to all groups or to one."""
    values: dict[str, list[Any]] = {name: [value] for name, value in hypers.items()}
    for group in groups:
        for name, value in group.items() if isinstance(group, dict) else ():
            if name in _lib.CONFIGURED:
                values.setdefault(name, []).append(value)
    return values


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
    """A line that says where the program overrules the daemon's configuration; or none."""
    configured = {name: value_of(job.hyper, name) for name in values if name in _lib.CONFIGURED}
    other = [
        f"{name} {'/'.join(map(str, dict.fromkeys(map(_plain, mine))))} and not {_plain(configured[name])}"
        for name, mine in values.items()
        if job.configured & _lib.CONFIGURED.get(name, 0) and any(_plain(m) != _plain(configured[name]) for m in mine)
    ]
    if "lr" in values and job.configured & _lib.CONFIGURED_SCHEDULER:
        other.append("lr without the daemon's scheduler")
    return [f"zerod: warning: the program overrules the daemon's configuration: {', '.join(other)}"] if other else []


def _plain(value: Any) -> Any:
    """The form for comparing and printing: a tensor, a list and a number of another kind may have equal values."""
    if isinstance(value, tuple | list):
        return "(" + ", ".join(str(_plain(v)) for v in value) + ")"
    if value is None or isinstance(value, str):
        return value or "original"
    return f"{float(value):g}"
