# SPDX-License-Identifier: Apache-2.0
"""
Edits of opt.state and of param_groups[i]["params"]. torch's optimizers would use such edits. With zerod an edit has no
effect, because the daemon has the state and the groups. So the next step is refused, with an error that names the line
of the edit.

A read of a moment returns a copy, which the program may edit in place. torch counts the edits of a tensor. A view
without memory shows the count, too, so this module keeps only such a view, and the copy can be freed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import sites


class _Read(NamedTuple):
    """An entry that the program has read."""

    what: str
    site: str
    count: torch.Tensor  # without memory; its _version is that of the tensor that the program got
    version: int


def _read_of(what: str, tensor: torch.Tensor) -> _Read:
    count = tensor.view(-1)
    count.set_(torch.empty(0, dtype=tensor.dtype))
    return _Read(what, sites.user_site().decode(), count, count._version)


class Edits:
    """The edits since the last step or the last load of state."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._reads: list[_Read] = []
        self._first = ""  # the first edit, as text; "": no edit is known
        self._params = self._params_of(groups)

    @staticmethod
    def _params_of(groups: list[dict[str, Any]]) -> list[list[int]]:
        return [[id(param) for param in group["params"]] for group in groups]

    def was_read(self, what: str, tensor: torch.Tensor) -> None:
        self._reads.append(_read_of(what, tensor))

    def note(self, what: str) -> None:
        self._first = self._first or f"{what} at {sites.user_site().decode()}"

    def forget(self) -> None:
        """Call it after a step, and after a load of state, which shows the program's intention."""
        self._reads, self._first = [], ""

    def check(self, groups: list[dict[str, Any]]) -> None:
        """Raises RuntimeError if the program has edited something."""
        if not self._first:
            changed = next((read for read in self._reads if read.count._version != read.version), None)
            self._first = f"{changed.what} was read at {changed.site} and then changed in place" if changed else ""
        if self._first:
            raise RuntimeError(
                f"{self._first}: the daemon has the state, so this has no effect. Write to opt.state_dict() and load it, on "
                'all ranks: state = opt.state_dict(); state["state"][0]["exp_avg"].zero_(); opt.load_state_dict(state)'
            )
        if self._params_of(groups) != self._params:
            raise RuntimeError(
                "the parameters of the groups are others than when the job was formed (param_groups[i][\"params\"]), and "
                "the daemon has those of then: pass the groups to zerod.Optimizer(...), with lr=0 for parameters that are "
                "to be trained later, and close() the optimizer before another one with other groups"
            )
