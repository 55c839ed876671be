# SPDX-License-Identifier: Apache-2.0
"""
Buffers that a forward changes, such as the running statistics of BatchNorm: each rank changes its own. DDP broadcasts
rank 0's at each forward; zerod broadcasts them at each step, if the ranks have a process group. Without a group it
warns once that the buffers differ, and zerod.sync_buffers() sends rank 0's buffers to all ranks through the daemon.

A step broadcasts only the modules whose buffers rank 0 has changed since the last step. If one buffer of a module has a
new version, all its buffers are sent, because torch counts the batches of a BatchNorm in Python, but changes its
statistics without a new version. Only buffers of state_dict() are compared, because the others are caches.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn

from . import binding, compiled
from .errors import ZerodWarning


def _saved_buffers(model: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    found = ((m, [n for n in m._buffers if n not in m._non_persistent_buffers_set]) for m in model.modules())
    return [(module, names) for module, names in found if names]


def device_of_group(tensor: torch.Tensor) -> torch.device:
    """The device of tensors that the group can broadcast: host memory if the group supports it."""
    types = {device.type for device in getattr(dist.group.WORLD, "_device_types", ())}
    return torch.device("cpu") if "cpu" in types else tensor.device


def has_group(rank: int, world_size: int) -> bool:
    """True if there is a process group of exactly the job's ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    return (dist.get_rank(), dist.get_world_size()) == (rank, world_size)


class BufferSync:
    """The buffers that one model had when the job was formed. Buffers of modules that are added later are not made
    equal."""

    def __init__(self, model: nn.Module, rank: int, world_size: int, is_on: bool) -> None:
        self._owners = _saved_buffers(model) if is_on and world_size > 1 else []
        self._names = {module: compiled.plain(name) for name, module in model.named_modules()} if self._owners else {}
        self._rank, self._world_size = rank, world_size
        self._versions = [self._version(i) for i in range(len(self._owners))]

    def _tensors(self, i: int) -> list[torch.Tensor]:
        module, names = self._owners[i]
        return [buffer for name in names if (buffer := module._buffers.get(name)) is not None]

    def _version(self, i: int) -> list[tuple[int, int]]:
        return [(id(t), 0 if t.is_inference() else t._version) for t in self._tensors(i)]

    def _changed(self) -> list[bool]:
        versions = [self._version(i) for i in range(len(self._owners))]
        changed = [new != old for new, old in zip(versions, self._versions, strict=True)]
        self._versions = versions
        return changed

    @torch.no_grad()
    def after_step(self) -> None:
        """Broadcasts the changed buffers. A collective of the process group, if there is one."""
        tensors = [self._tensors(i) for i in range(len(self._owners))]
        if not any(tensors):
            return
        changed = self._changed()
        if not has_group(self._rank, self._world_size):
            self._say_once(changed)
            return
        device = device_of_group(next(ts[0] for ts in tensors if ts))
        mask = torch.tensor(changed, dtype=torch.uint8, device=device)
        dist.broadcast(mask, 0)
        self._broadcast([t for ts, wanted in zip(tensors, mask.tolist(), strict=True) if wanted for t in ts], device)

    def _broadcast(self, tensors: list[torch.Tensor], device: torch.device) -> None:
        if not tensors:
            return
        whole = torch.cat([binding.bytes_of(t).to(device) for t in tensors])
        dist.broadcast(whole, 0)
        if self._rank == 0:
            return
        with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
            start = 0
            for t in tensors:
                size = t.numel() * t.element_size()
                t.copy_(whole[start : start + size].clone().view(t.dtype).view(t.shape))
                start += size

    def _say_once(self, changed: list[bool]) -> None:
        which = [i for i, c in enumerate(changed) if c and any(t.is_floating_point() for t in self._tensors(i))]
        if which:
            module, names = self._owners[which[0]]
            if self._rank == 0:
                warnings.warn(
                    f"every forward changes {'.'.join(filter(None, (self._names.get(module), names[0])))} and other "
                    "buffers, and each rank has its own: there is no process group (torch.distributed) to broadcast "
                    "rank 0's at each step, as DDP does. zerod.sync_buffers(model) on all ranks does so where it matters, "
                    "before an evaluation or a save; zerod.Optimizer(..., sync_buffers=False), if they are to differ",
                    ZerodWarning,
                    stacklevel=2,
                )
            self._owners = []

