# SPDX-License-Identifier: Apache-2.0
"""
Optimizer state in torch's form, read from the daemon when somebody looks.

opt.state[p] is a LazyState: a dict that is never empty and fetches its tensors when they are asked for, or when it is
pickled, as torch.save(opt.state_dict()) does. So state_dict() costs nothing, and what lands in a file is whole and is
plain tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from . import _lib
from .binding import Bound

if TYPE_CHECKING:
    from .optimizer import Optimizer

# torch's names of the moments, for each optimizer of the daemon's: what exp_avg and exp_avg_sq hold.
MOMENTS = {
    "AdamW": {"exp_avg": _lib.EXP_AVG, "exp_avg_sq": _lib.EXP_AVG_SQ},
    "Adam": {"exp_avg": _lib.EXP_AVG, "exp_avg_sq": _lib.EXP_AVG_SQ},
    "Lion": {"exp_avg": _lib.EXP_AVG},
    "SGD": {"momentum_buffer": _lib.EXP_AVG},
    "Adagrad": {"sum": _lib.EXP_AVG_SQ},
}


def _read(opt: Optimizer, b: Bound, which: int) -> torch.Tensor:
    flat = torch.empty(b.param.numel(), dtype=torch.float32)
    opt._client.read_state(b.index, which, flat.data_ptr())
    return b.view(flat) if b.n_bytes else flat.view(b.shape)


def read_master(opt: Optimizer, b: Bound) -> torch.Tensor:
    return _read(opt, b, _lib.MASTER)


def read(opt: Optimizer, b: Bound) -> dict[str, torch.Tensor]:
    """A parameter's state as torch's optimizer has it. Before its first step there are no moments."""
    step = torch.tensor(opt._client.read_number(b.index, _lib.STEP_COUNT))
    if step == 0:
        return {"step": step}
    return {"step": step} | {name: _read(opt, b, which) for name, which in _moments(opt).items()}


def _moments(opt: Optimizer) -> dict[str, int]:
    if opt.optimizer_type == "SGD" and not opt._client.job.hyper.momentum:
        return {}
    return MOMENTS[opt.optimizer_type]


class LazyState(dict[str, torch.Tensor]):
    """One parameter's state as of the last step."""

    def __new__(cls, *args: Any) -> Any:
        # Those who rebuild nested dicts, as accelerate does, call type(x)({...}): what they get is a plain one.
        return super().__new__(cls) if len(args) == 2 else dict(*args)

    def __init__(self, opt: Optimizer, b: Bound) -> None:
        super().__init__()
        self._opt, self._bound, self._epoch = opt, b, -1

    def _fill(self) -> LazyState:
        if self._epoch != self._opt.epoch:
            super().clear()
            super().update(read(self._opt, self._bound))
            self._epoch = self._opt.epoch
        return self

    def belongs_to(self, opt: Optimizer) -> bool:
        return self._opt is opt

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return super(LazyState, self._fill()).__len__()

    def __iter__(self) -> Iterator[str]:
        return super(LazyState, self._fill()).__iter__()

    def __contains__(self, name: object) -> bool:
        return super(LazyState, self._fill()).__contains__(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        return super(LazyState, self._fill()).__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return super(LazyState, self._fill()).get(name, default)

    def keys(self) -> Any:
        return super(LazyState, self._fill()).keys()

    def values(self) -> Any:
        return super(LazyState, self._fill()).values()

    def items(self) -> Any:
        return super(LazyState, self._fill()).items()

    def copy(self) -> dict[str, torch.Tensor]:
        return dict(self.items())

    def __deepcopy__(self, _memo: Any) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.items()}

    def __reduce_ex__(self, _protocol: Any) -> Any:
        # A type that torch.load(weights_only=True) knows.
        return OrderedDict, (), None, None, iter(list(self.items()))


# ---- the whole ------------------------------------------------------------------------------------------


def _packed_groups(opt: Optimizer) -> list[dict[str, Any]]:
    start, groups = 0, []
    for group in opt.param_groups:
        n = len(group["params"])
        groups.append({k: v for k, v in group.items() if k != "params"} | {"params": list(range(start, start + n))})
        start += n
    return groups


def _in_order(opt: Optimizer) -> list[Bound]:
    """Parameters as state_dict() counts them: group by group."""
    by_param = {b.param: b for b in opt._bound}
    return [by_param[p] for group in opt.param_groups for p in group["params"]]


def full_state_dict(opt: Optimizer) -> dict[str, Any]:
    states = {i: read(opt, b) for i, b in enumerate(_in_order(opt)) if b.trainable}
    return {
        "state": {i: s for i, s in states.items() if s["step"] > 0},
        "param_groups": _packed_groups(opt),
        "names": [b.name for b in _in_order(opt)],
    }


def _check(opt: Optimizer, state_dict: dict[str, Any]) -> None:
    """torch matches by order alone; shapes are checked here, and names where there are any."""
    order = _in_order(opt)
    sizes = [len(g["params"]) for g in state_dict["param_groups"]]
    if sizes != [len(g["params"]) for g in opt.param_groups]:
        raise ValueError(
            f"the state has groups of {sizes} parameters, this optimizer of {[len(g['params']) for g in opt.param_groups]}"
        )
    for i, name in enumerate(state_dict.get("names", [])):
        if name != order[i].name:
            raise ValueError(f"parameter {i} of the state is {name}, here it is {order[i].name}: another model, or another order")
    for i, entry in state_dict["state"].items():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and tuple(value.shape) != order[int(i)].shape:
                raise ValueError(
                    f"{name} of {order[int(i)].name} has shape {tuple(value.shape)}, expected {order[int(i)].shape}"
                )


def _load_groups(opt: Optimizer, groups: list[dict[str, Any]]) -> None:
    """In place, so that schedulers and whoever else holds a group see it."""
    for group, saved in zip(opt.param_groups, groups, strict=True):
        group.update({k: v for k, v in saved.items() if k != "params"})


def _write(opt: Optimizer, b: Bound, entry: dict[str, Any]) -> None:
    # torch's SGD does not count; its buffer is there from the first step on.
    opt._client.write_number(b.index, _lib.STEP_COUNT, float(entry.get("step", 1)))
    for name, which in _moments(opt).items():
        value = entry.get(name)
        if value is not None and b.n_bytes:
            flat = b.flatten(value.detach().to("cpu", torch.float32))
            opt._client.write_state(b.index, which, flat.data_ptr())


def load_full_state_dict(opt: Optimizer, state_dict: dict[str, Any]) -> None:
    _check(opt, state_dict)
    order = _in_order(opt)
    opt._client.write_begin()
    try:
        for i, entry in state_dict["state"].items():
            if order[int(i)].trainable:
                _write(opt, order[int(i)], entry)
    except BaseException:
        opt._client.write_forget()
        raise
    opt._client.write_end()
    _load_groups(opt, state_dict["param_groups"])


def load_state_dict(opt: Optimizer, state_dict: dict[str, Any]) -> None:
    for hook in opt._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(opt, state_dict)
        state_dict = changed if changed is not None else state_dict
    if _is_own(opt, state_dict):
        _load_groups(opt, state_dict["param_groups"])
    else:
        load_full_state_dict(opt, state_dict)
    for hook in opt._optimizer_load_state_dict_post_hooks.values():
        hook(opt)


def _is_own(opt: Optimizer, state_dict: dict[str, Any]) -> bool:
    """Handles of this optimizer's own state, or what a copy of them looks like before the first step."""
    entries = list(state_dict["state"].values())
    if all(isinstance(e, LazyState) and e.belongs_to(opt) for e in entries):
        return True
    return opt.epoch == 0 and all(set(e) == {"step"} and float(e["step"]) == 0 for e in entries)
