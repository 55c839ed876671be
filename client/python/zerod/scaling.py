# SPDX-License-Identifier: Apache-2.0
"""
The daemon's loss scale (fp16 in its configuration), and the code that multiplies the loss by it. The step divides the
gradients by the scale, so exactly one of these must multiply:

    the program        (loss * opt.loss_scale).backward()
    an integration     Accelerator.backward(), which the Trainer calls, Lightning's and Fabric's ZerodStrategy: scaled()
    a GradScaler       by a scale of its own, which the step then divides by

The first step refuses a program in which no code multiplies, and a program that has read opt.loss_scale although an
integration or a GradScaler multiplies.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from . import sites
from .client import Client
from .errors import LossScaleIgnored
from .registry import open_optimizers

# The line that a program with each of these libraries needs, most specific library first.
_FIXES = {
    "transformers": "self.accelerator.backward(loss)   (in a training_step() of your own)",
    "accelerate": "accelerator.backward(loss)",
    "lightning.fabric": "fabric.backward(loss), with strategy=ZerodStrategy()",
    "lightning.pytorch": "self.manual_backward(loss), or automatic optimization, with strategy=ZerodStrategy()",
    "pytorch_lightning": "self.manual_backward(loss), or automatic optimization, with strategy=ZerodStrategy()",
}
_PLAIN_FIX = "(loss * opt.loss_scale).backward()"
_LOG = 'opt.metrics()["loss_scale"], to log it'


def _ignored(scale: float) -> LossScaleIgnored:
    fixes = [_PLAIN_FIX] + list(dict.fromkeys(fix for module, fix in _FIXES.items() if module in sys.modules))
    return LossScaleIgnored(
        "\n".join(
            [
                f"fp16 is enabled in the daemon's configuration, and no loss was multiplied by its scale of {scale:g}",
                f"  cause          the step divides the gradients by the scale: they would be {scale:g} times too small",
                *(f"  {'or' if i else 'fix':<15}{fix}" for i, fix in enumerate(fixes)),
                "  or             fp16: {enabled: false}   (fp32 and bf16 need no scale)",
                "  state          the step was not asked for; nothing of it is in weights or optimizer state",
            ]
        )
    )


def _twice(read_at: str, by: str) -> LossScaleIgnored:
    return LossScaleIgnored(
        "\n".join(
            [
                f"two loss scales: {by} multiplies the loss, and the program has read opt.loss_scale",
                f"  read at        {read_at}",
                "  cause          if the program multiplies as well, the gradients are too large by the scale",
                f"  fix            leave opt.loss_scale out: {by} multiplies",
                f"  or             {_LOG}",
                "  state          the step was not asked for; nothing of it is in weights or optimizer state",
            ]
        )
    )


class LossScale:
    """The loss scale of one optimizer."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._read_at = ""  # where the program has read the scale first
        self._by: str | None = None  # the integration that multiplies
        self._is_known = not client.job.fp16  # True if the multiplying code is known

    @property
    def value(self) -> float:
        return self._client.loss_scale

    def read(self) -> float:
        """Returns the scale to the program, and notes the place of the read."""
        if not self._is_known and not self._read_at:
            self._read_at = sites.user_site().decode() or "an unknown place"
        return self.value

    def applied_by(self, by: str) -> None:
        """Notes that an integration is about to multiply a loss. Raises if the program has read the scale."""
        if not self._is_known and self._read_at:
            raise _twice(self._read_at, by)
        self._by = by

    def check(self, has_scaler: bool) -> None:
        """
        Called before a step is requested, unless only a predecessor of this process has gradients in the step.

        has_scaler: a GradScaler has multiplied its losses.
        """
        if self._is_known or self.value == 1:
            return
        if has_scaler and self._read_at:
            raise _twice(self._read_at, "a GradScaler")
        if not (has_scaler or self._read_at or self._by):
            raise _ignored(self.value)
        self._is_known = True


def scaled(loss: Any, by: str, owner: Any) -> Any:
    """
    The loss that an integration calls backward with. by: the integration's name for texts. owner: the object that has
    the library's GradScaler; if the GradScaler is enabled, it multiplies, and the loss stays as it is.
    """
    scaler = getattr(owner, "scaler", None)
    scales = {opt: opt.scaling.value for opt in open_optimizers}
    if scaler is not None and scaler.is_enabled() or set(scales.values()) <= {1.0} or not isinstance(loss, torch.Tensor):
        return loss
    if len(set(scales.values())) > 1:
        raise ValueError(
            f"the loss scales of this process's optimizers differ ({', '.join(f'{s:g}' for s in scales.values())}), and "
            f"{by} does not know which of them trains by this loss: call {_PLAIN_FIX} with its own optimizer's"
        )
    for opt in scales:
        opt.scaling.applied_by(by)
    return loss.float() * next(iter(scales.values()))  # fp16 cannot represent 2^16
