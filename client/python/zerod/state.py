# SPDX-License-Identifier: Apache-2.0
"""
Optimizer state in torch's form, read from the daemon when the program accesses it.

opt.state[p] is a dict that is never empty, stores nothing and fetches a tensor at each access; the next step is refused
if the program has changed such a tensor (edits.py). The entries of state_dict() are fetched at the first access, or
when they are pickled, as torch.save() does. So state_dict() itself is free, and a file gets the whole state as plain
tensors.

16-bit weights have an entry that torch does not have, "master": the fp32 value that was rounded to the weight. torch's
optimizers keep it in their state and ignore it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.utils import _pytree

from . import _lib, compiled, settings
from .binding import Bound
from .registry import OpenOptimizer

# torch's names of the moments exp_avg and exp_avg_sq, for each optimizer of the daemon.
MOMENTS = {
    "AdamW": {"exp_avg": _lib.EXP_AVG, "exp_avg_sq": _lib.EXP_AVG_SQ},
    "Adam": {"exp_avg": _lib.EXP_AVG, "exp_avg_sq": _lib.EXP_AVG_SQ},
    "Lion": {"exp_avg": _lib.EXP_AVG},
    "SGD": {"momentum_buffer": _lib.EXP_AVG},
    "Adagrad": {"sum": _lib.EXP_AVG_SQ},
    "Muon": {"momentum_buffer": _lib.EXP_AVG},
}


def _moments(opt: OpenOptimizer, b: Bound) -> dict[str, int]:
    if opt.optimizer_type == "SGD" and not opt._client.job.hyper.momentum:
        return {}
    return MOMENTS["AdamW" if opt.optimizer_type == "Muon" and not b.muon else opt.optimizer_type]


def _kinds(opt: OpenOptimizer, b: Bound) -> dict[str, int]:
    """The names of a parameter's state entries, except its step."""
    return _moments(opt, b) | ({"master": _lib.MASTER} if b.param.dtype != torch.float32 else {})


def _steps(opt: OpenOptimizer, b: Bound) -> float:
    return opt._client.read_number(b.index, _lib.STEP_COUNT)


def _read_kind(opt: OpenOptimizer, b: Bound, kind: int) -> torch.Tensor:
    flat = torch.zeros(b.param.numel(), dtype=torch.float32)
    if b.n_bytes:
        opt._client.read_state(b.index, kind, flat.data_ptr())
    return b.view(flat) if b.n_bytes else flat.view(b.shape)


def _read(opt: OpenOptimizer, b: Bound, name: str) -> torch.Tensor:
    return torch.tensor(_steps(opt, b)) if name == "step" else _read_kind(opt, b, _kinds(opt, b)[name])


def _is_same(value: Any, ours: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == ours.shape and torch.equal(value.cpu(), ours.to(value.dtype))


def read_master(opt: OpenOptimizer, b: Bound) -> torch.Tensor:
    return _read_kind(opt, b, _lib.MASTER)


class Handle(dict[str, torch.Tensor]):
    """
    opt.state[p]: one parameter's state as of the last step, for reading. Moments exist before the first step too,
    because DCP loads only into existing entries.
    """

    def __new__(cls, *args: Any) -> Any:
        # Code that rebuilds nested dicts, as accelerate does, calls type(x)({...}): it gets a plain dict.
        return super().__new__(cls) if len(args) == 2 else dict(*args)

    def __init__(self, opt: OpenOptimizer, b: Bound) -> None:
        super().__init__()
        self._opt, self._bound, self._names = opt, b, ("step", *_kinds(opt, b))

    def lazy(self) -> LazyState:
        return LazyState(self._opt, self._bound)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        with torch.inference_mode(False):  # tensors of inference mode do not count edits
            value = _read(self._opt, self._bound, name)
        self._opt._edits.was_read(f"{name} of {self._bound.name} in opt.state", value)
        return value

    def _is(self, value: Any) -> bool:
        """True if this is the state as the daemon has it."""
        return (
            isinstance(value, Mapping)
            and value.keys() == set(self._names)
            and all(_is_same(value[name], _read(self._opt, self._bound, name)) for name in self._names)
        )

    def _edited(self, how: str) -> None:
        self._opt._edits.note(f"opt.state of {self._bound.name} was {how}")

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._names or not _is_same(value, _read(self._opt, self._bound, name)):
            self._edited(f"assigned to ({name})")

    def __delitem__(self, name: str) -> None:
        self._edited(f"deleted from ({name})")

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def clear(self) -> None:
        self._edited("cleared")

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self:
            return dict.pop(self, name, *default)
        self._edited(f"deleted from ({name})")
        return _read(self._opt, self._bound, name)

    def popitem(self) -> Any:
        return self._names[-1], self.pop(self._names[-1])

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self.get(name, default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def keys(self) -> Any:
        return dict.fromkeys(self).keys()

    def values(self) -> Any:
        return self.copy().values()

    def items(self) -> Any:
        return self.copy().items()

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: self[name] for name in self}

    def __repr__(self) -> str:
        return f"<state of {self._bound.name} in zerod: {', '.join(self)}>"

    def __deepcopy__(self, _memo: Any) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.items()}

    def __reduce_ex__(self, _protocol: Any) -> Any:
        # A type that torch.load(weights_only=True) knows.
        return OrderedDict, (), None, None, iter(list(self.items()))


class LazyState(Handle):
    """A Handle in a state_dict(): fetched once, at the first access; from then on the program may write to it."""

    _filled = False

    def _fill(self) -> None:
        if not self._filled:
            dict.update(self, {name: _read(self._opt, self._bound, name) for name in self._names})
            self._filled = True

    def is_untouched(self, opt: OpenOptimizer) -> bool:
        return self._opt is opt and not self._filled

    def __len__(self) -> int:
        return dict.__len__(self) if self._filled else super().__len__()

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self) if self._filled else super().__iter__()

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, name) if self._filled else super().__contains__(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        self._fill()
        return dict.__getitem__(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._fill()
        dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        self._fill()
        dict.__delitem__(self, name)

    def pop(self, name: str, *default: Any) -> Any:
        self._fill()
        return dict.pop(self, name, *default)

    def popitem(self) -> Any:
        self._fill()
        return dict.popitem(self)

    def clear(self) -> None:
        self._fill()
        dict.clear(self)

    def setdefault(self, name: str, default: Any = None) -> Any:
        self._fill()
        return dict.setdefault(self, name, default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._fill()
        dict.update(self, *args, **kwargs)


# DCP maps functions over trees of dicts, and treats unknown types as leaves.
_pytree.register_pytree_node(
    LazyState,
    lambda state: (list(state.values()), list(state)),
    lambda values, names: dict(zip(names, values, strict=True)),
)


class States(defaultdict[torch.Tensor, Any]):
    """opt.state. An entry may be replaced by one that is equal: Lightning moves entries to a device and puts them back."""

    def __init__(self, opt: OpenOptimizer) -> None:
        super().__init__(dict)
        self._edits = opt._edits
        for b in opt._bound:
            if b.trainable:
                super().__setitem__(b.param, Handle(opt, b))

    def _is_ours(self, key: Any) -> bool:
        return isinstance(super().get(key), Handle)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self._is_ours(key):
            super().__setitem__(key, value)
        elif value is not self[key] and not self[key]._is(value):
            self[key]._edited("replaced")

    def __delitem__(self, key: Any) -> None:
        if self._is_ours(key):
            self[key]._edited("deleted")
        else:
            super().__delitem__(key)

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def pop(self, key: Any, *default: Any) -> Any:
        if not self._is_ours(key):
            return super().pop(key, *default)
        self[key]._edited("deleted")
        return self[key]

    def popitem(self) -> Any:
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        self._edits.note("opt.state was cleared")

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def close(self) -> None:
        super().clear()


# ---- the whole state ------------------------------------------------------------------------------------


def _packed_groups(opt: OpenOptimizer) -> list[dict[str, Any]]:
    start, groups = 0, []
    for group in opt.param_groups:
        n = len(group["params"])
        groups.append({k: v for k, v in group.items() if k != "params"} | {"params": list(range(start, start + n))})
        start += n
    return groups


def _in_order(opt: OpenOptimizer) -> list[Any]:
    """Parameters as state_dict() counts them, Bound or Own: group by group."""
    by_param = {b.param: b for b in [*opt._bound, *opt._own]}
    return [by_param[p] for group in opt.param_groups for p in group["params"]]


def finish_state_dict(opt: OpenOptimizer, state_dict: dict[str, Any]) -> None:
    """A hook: replaces the handles that torch's Optimizer.state_dict() has put into the result."""
    state_dict["state"] = {i: entry.lazy() for i, entry in state_dict["state"].items() if isinstance(entry, Handle)}
    state_dict["names"] = [b.name for b in _in_order(opt)]


def full_state_dict(opt: OpenOptimizer) -> dict[str, Any]:
    """Returns the whole state, as torch has it: a parameter that never took a step has no state."""
    trained = {i: b for i, b in enumerate(_in_order(opt)) if b.trainable and _steps(opt, b) > 0}
    return {
        "state": {i: Handle(opt, b).copy() for i, b in trained.items()},
        "param_groups": _packed_groups(opt),
        "names": [b.name for b in _in_order(opt)],
    }


# ---- loading --------------------------------------------------------------------------------------------


def _entries(opt: OpenOptimizer, state_dict: dict[str, Any]) -> list[tuple[Bound, dict[str, Any]]]:
    """
    Every trainable parameter with its state, {} for none. As in torch, the n-th saved group is the n-th group of this
    optimizer, whatever its name is, although DCP uses names.
    """
    order, groups = _in_order(opt), state_dict["param_groups"]
    sizes, ours = [len(g["params"]) for g in groups], [len(g["params"]) for g in opt.param_groups]
    if sizes != ours:
        raise ValueError(
            f"the state has groups of {sizes} parameters, this optimizer of {ours}: another model, or other groups"
        )
    for i, name in enumerate(state_dict.get("names", [])):
        if compiled.plain(name) != order[i].name:
            raise ValueError(
                f"parameter {i} of the state is {name}, here it is {order[i].name}: another model, or another order"
            )
    keys = list(chain.from_iterable(g["params"] for g in groups))
    strange = [key for key in state_dict["state"] if key not in set(keys)]
    if strange:
        raise ValueError(
            f"the state has an entry {strange[0]!r}, which is in none of its groups: it is not one of an optimizer"
        )
    return [(b, state_dict["state"].get(key, {})) for b, key in zip(order, keys, strict=True) if b.trainable]


def _check_entry(opt: OpenOptimizer, b: Bound, entry: dict[str, Any]) -> None:
    wanted = set(_moments(opt, b))
    there = {name for name, value in entry.items() if value is not None} - {"step", "master"}
    # SGD's buffer exists from its first step on; torch's SGD does not count steps.
    if there - wanted or (there != wanted and float(entry.get("step", 0)) > 0 and opt.optimizer_type != "SGD"):
        raise ValueError(
            f"the state of {b.name} has {', '.join(sorted(there)) or 'no moments'}: the daemon's {opt.optimizer_type} "
            f"(optimizer.type) keeps {', '.join(sorted(wanted)) or 'none'}"
        )
    for name in there | ({"master"} & set(entry)):
        if tuple(entry[name].shape) != b.shape:
            raise ValueError(
                f"{name} of {b.name} has shape {tuple(entry[name].shape)}, expected {b.shape}: another model"
            )


def check_groups(opt: OpenOptimizer, groups: list[dict[str, Any]]) -> None:
    for i, group in enumerate(groups):
        settings.without_switches(f" of parameter group {i}", group)
    if opt.optimizer_type != "Muon" and any(group.get("use_muon") for group in groups):
        raise ValueError(f"use_muon=True is for Muon, and the daemon's optimizer is {opt.optimizer_type}")


def _load_groups(opt: OpenOptimizer, groups: list[dict[str, Any]]) -> None:
    """Changes groups in place, so that schedulers and other holders of a group see the change."""
    for group, saved in zip(opt.param_groups, groups, strict=True):
        # Which parameters Muon updates was decided when the job was formed.
        group.update({k: v for k, v in saved.items() if k not in ("params", "use_muon")})


def _write_tensor(opt: OpenOptimizer, b: Bound, which: int, value: torch.Tensor) -> None:
    if b.n_bytes:
        flat = b.flatten(value.detach().to("cpu", torch.float32))
        opt._client.write_state(b.index, which, flat.data_ptr())


def _is_rounded(opt: OpenOptimizer, b: Bound, master: torch.Tensor) -> bool:
    """True if the weight is this master, rounded. A state may be loaded with other weights than it was saved with."""
    with opt._client.gathered([b.index]):
        return torch.equal(b.param.detach().cpu(), master.detach().to("cpu", b.param.dtype))


def _write(opt: OpenOptimizer, b: Bound, entry: dict[str, Any]) -> None:
    moments = {which: entry.get(name) for name, which in _moments(opt, b).items()}
    steps = float(entry.get("step", 1 if any(v is not None for v in moments.values()) else 0))
    master = entry.get("master")

    if steps != 0 or _steps(opt, b) != 0:
        opt._client.write_number(b.index, _lib.STEP_COUNT, steps)
        moments = {which: torch.zeros(b.shape) if value is None else value for which, value in moments.items()}
    # Before the first step a moment need not be 0 (Adagrad's initial_accumulator_value), and may have been loaded.
    for which, value in moments.items():
        if value is not None:
            _write_tensor(opt, b, which, value)
    if master is not None and b.param.dtype != torch.float32 and _is_rounded(opt, b, master):
        _write_tensor(opt, b, _lib.MASTER, master)


def _entries_by_name(opt: OpenOptimizer, state_dict: dict[str, Any]) -> list[tuple[Bound, dict[str, Any]]]:
    """The trainable parameters that the state has under their names, with their shapes."""
    if "names" not in state_dict:
        raise ValueError("strict=False: the state has no names of parameters, as full_state_dict() of zerod has them")
    keys = chain.from_iterable(g["params"] for g in state_dict["param_groups"])
    states = {name: state_dict["state"].get(key, {}) for name, key in zip(state_dict["names"], keys, strict=True)}
    found = [(b, states[b.name]) for b in _in_order(opt) if b.trainable and states.get(b.name)]
    return [(b, entry) for b, entry in found if _have_shape(entry, b.shape)]


def _have_shape(entry: dict[str, Any], shape: tuple[int, ...]) -> bool:
    return all(value is None or name == "step" or tuple(value.shape) == shape for name, value in entry.items())


def load_full_state_dict(opt: OpenOptimizer, state_dict: dict[str, Any], strict: bool = True) -> None:
    entries = _entries(opt, state_dict) if strict else _entries_by_name(opt, state_dict)
    for b, entry in entries:
        _check_entry(opt, b, entry)
    check_groups(opt, state_dict["param_groups"])
    with opt.window():
        for b, entry in entries:
            _write(opt, b, entry)
    opt._unread.read()  # a checkpoint says where the program continues
    opt._edits.forget()
    if strict:
        _load_groups(opt, state_dict["param_groups"])


def load_state_dict(opt: OpenOptimizer, state_dict: dict[str, Any]) -> None:
    for hook in opt._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(opt, state_dict)
        state_dict = changed if changed is not None else state_dict
    if _is_own(opt, state_dict):
        check_groups(opt, state_dict["param_groups"])
        _load_groups(opt, state_dict["param_groups"])
    else:
        load_full_state_dict(opt, state_dict)
    for hook in opt._optimizer_load_state_dict_post_hooks.values():
        hook(opt)


def _is_blank(entry: dict[str, Any]) -> bool:
    """True if no step was taken and all moments are 0; Adagrad's may begin with another value."""
    moments = [value for name, value in entry.items() if name not in ("step", "master") and value is not None]
    return float(entry.get("step", len(entry))) == 0 and not any(bool(value.any()) for value in moments)


def _is_own(opt: OpenOptimizer, state_dict: dict[str, Any]) -> bool:
    """True for handles of this optimizer's own state, and for a copy of a state that is still empty."""
    entries = [entry for _, entry in _entries(opt, state_dict)]
    if all(isinstance(e, LazyState) and e.is_untouched(opt) for e in entries):
        return True
    position = opt._client.position  # opt.position would count as read by the program
    untouched = position.step == 0 and position.n_windows == 0
    return untouched and all(_is_blank(e) for e in entries)
