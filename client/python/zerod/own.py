# SPDX-License-Identifier: Apache-2.0
"""
Frozen parameters that zerod does not publish: they stay in the program's own memory. These are the frozen parameters
whose type, layout or device zerod does not support, such as the quantized ones of QLoRA; with publish_frozen=False,
zerod publishes no frozen parameter.

All ranks need the same values. So rank 0's fingerprints are declared, in one frozen parameter, with a few bytes for
each, and every rank compares its own fingerprints when the job is formed. If the ranks have a process group, rank 0's
values are broadcast where they differ, as under DDP; without a group the rank is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

FINGERPRINTS = "(frozen)"
N_BYTES = 16  # of a fingerprint: 8 of the kind of the parameter, 8 of its values
_CHUNK = 1 << 22  # words that are multiplied at a time


class Own(NamedTuple):
    name: str
    param: nn.Parameter
    trainable: bool = False  # as in Bound


def is_plain(param: torch.Tensor) -> bool:
    """True for a dense tensor of no subclass: a subclass, such as bitsandbytes' Params4bit, interprets its bytes."""
    return type(param) is nn.Parameter and _is_dense(param)


def _is_dense(param: torch.Tensor) -> bool:
    return type(param.data) is torch.Tensor and param.layout == torch.strided and not param.is_quantized


# ---- fingerprints ---------------------------------------------------------------------------------------


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The strided tensors that hold a tensor's values."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _pieces(getattr(tensor, name))
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.is_quantized:
        yield tensor.int_repr()
    else:
        yield tensor if tensor.layout == torch.strided else tensor.to_dense()


def _bytes_of(piece: torch.Tensor) -> torch.Tensor:
    return piece.detach().contiguous().reshape(-1).view(torch.uint8)


def _sum_of(piece: torch.Tensor) -> int:
    """
    Adds up 64-bit words with odd factors, modulo 2**64. The result is equal on all devices, and differs if one word
    differs.
    """
    flat, total = _bytes_of(piece), 0
    for start in range(0, flat.numel(), 8 * _CHUNK):
        chunk = flat[start : start + 8 * _CHUNK]
        words = nn.functional.pad(chunk, (0, -chunk.numel() % 8)).view(torch.int64)
        factors = torch.arange(words.numel(), device=words.device).mul_(2).add_(1)
        total = (total * 0x9E3779B97F4A7C15 + int((words * factors).sum())) % 2**64
    return total


def _fingerprint(own: Own) -> bytes:
    kind = zlib.crc32(f"{own.name} {own.param.dtype} {own.param.layout} {tuple(own.param.shape)}".encode())
    values = 0
    for piece in _pieces(own.param.detach()):
        if piece.device.type == "meta":
            raise ValueError(
                f"{own.name} is on the meta device, and zerod does not publish it: the model has to be real there, on every rank"
            )
        values = (values * 31 + _sum_of(piece)) % 2**64
    return kind.to_bytes(8, "little") + values.to_bytes(8, "little")


@torch.no_grad()
def fingerprints(owns: Sequence[Own]) -> torch.Tensor:
    """The bytes of all fingerprints."""
    found = b"".join(map(_fingerprint, owns))
    return torch.frombuffer(bytearray(found), dtype=torch.uint8) if found else torch.empty(0, dtype=torch.uint8)


# ---- equal on all ranks -----------------------------------------------------------------------------------


def _refuse(own: Own) -> None:
    raise ValueError(
        f"{own.name} is frozen, {own.param.dtype}, and differs from rank 0's when the job began: zerod does not publish it, so "
        "every rank needs the same file, or the same seed, before zerod.Optimizer(model). With a process group "
        "(torch.distributed) rank 0's values are broadcast, as under DDP"
    )


def _broadcast(param: torch.Tensor, device: torch.device) -> None:
    values = _bytes_of(param).to(device)
    dist.broadcast(values, 0)
    param.copy_(values.view(param.dtype).view(param.shape))


@torch.no_grad()
def make_equal(owns: Sequence[Own], ours: torch.Tensor, first: torch.Tensor, device: torch.device | None) -> None:
    """
    Makes the values equal to rank 0's, or raises. ours, first: fingerprints of this rank and of rank 0. device: where a
    process group of the job's ranks can broadcast tensors; None: there is no such group. A collective of that group.
    """
    differs = (ours != first).view(-1, 2, N_BYTES // 2).any(2)  # in kind, in values
    for own, (in_kind, in_values) in zip(owns, differs.tolist(), strict=True):
        if in_kind or in_values and (device is None or not _is_dense(own.param)):
            _refuse(own)
    if device is None:
        return
    everywhere = differs[:, 1].to(device, torch.uint8)
    dist.all_reduce(everywhere, dist.ReduceOp.MAX)
    for own, differ in zip(owns, everywhere.tolist(), strict=True):
        if differ and _is_dense(own.param):
            _broadcast(own.param.detach(), device)
