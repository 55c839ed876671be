# SPDX-License-Identifier: Apache-2.0
"""Loops over a loader that accelerate has prepared, which continue in a process that was started again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .progress import Progress, group_is_done

if TYPE_CHECKING:
    import accelerate


def _batches(progress: Progress, loader: Any) -> Iterator[Any]:
    """Yields the rest of an epoch. At the first batch, sets the generators to the state that the last step left."""
    for i, batch in enumerate(loader):
        if i == 0:
            progress.set_generators()
        yield batch


def epochs(
    accelerator: accelerate.Accelerator, optimizer: Any, loader: Any, n_epochs: int, scheduler: Any = None
) -> Iterator[tuple[int, Any]]:
    """
    The remaining epochs, each with its remaining batches: in a new job all of them, and in a process that was started
    again those after the committed steps.

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for epoch, batches in zerod.epochs(accelerator, optimizer, loader, n_epochs, scheduler):
            for batch in batches:
                with accelerator.accumulate(model):
                    ...

    All arguments are objects that prepare() has returned. The scheduler and the random number generators continue as
    well; an unfinished step begins again. One epoch is one pass over the loader. All ranks are started again together,
    because when one rank ends, the others end as well.
    """
    opt, n_micro = getattr(optimizer, "optimizer", optimizer), accelerator.gradient_accumulation_steps
    progress = Progress(opt, sampler=getattr(loader, "synchronized_generator", None))
    first, n_done = divmod(progress.resume(), -(-len(loader) // n_micro))
    progress.restore(scheduler)
    for epoch in range(first, n_epochs):
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        goes_on = epoch == first and n_done > 0
        if epoch == first and not goes_on:
            progress.begin_next_epoch()
        progress.begin_epoch(goes_on)
        if goes_on:
            yield epoch, _batches(progress, accelerator.skip_first_batches(loader, n_done * n_micro))
        else:
            yield epoch, loader
    group_is_done()
