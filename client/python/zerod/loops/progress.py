# SPDX-License-Identifier: Apache-2.0
"""
Progress of a loop of another library, so that the loop continues in a process that was started again: the step, the
learning rate scheduler, and the random number generators as the last step left them. The daemon keeps the progress with
each micro-batch and step of the rank (zerod.user_state). trainer.py, accelerator.py and lightning.py use it.

Such loops begin at whole steps, so an unfinished step is aborted. Their ranks share a process group, which a single new
rank cannot join, so when one process of the group ends, the others end as well.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .. import _lib, sites
from ..errors import StepAborted
from ..optimizer import Optimizer
from ..registry import open_optimizers
from ..userstate import UserState, user_state

_WATCH_TIMEOUT = datetime.timedelta(days=365)
_LOOK_S = 0.2  # interval at which a rank checks its position
_SOON, _LATE = 3, 50  # numbers of looks. Picked: a collective, or a step, in which all ranks take part ends within 10 s
# Keys in the store: a rank that has gradients of a step; a rank that waits in a collective after a step, and where.
_IN_STEP, _IN_GROUP = "in step", "in group"
_gone_on: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers whose first loop has begun


def generators() -> dict[str, Any]:
    """The states of the generators, under the names that transformers uses in its checkpoints."""
    numpy = sys.modules.get("numpy")
    states = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generators(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


class Progress:
    """
    The progress of one rank. The owner of the loop calls resume() once, restore() when there is a scheduler, and
    begin_epoch() before the loop draws the order of its data; the owner restores the generators where a method says so.

    more: returns further data of the owner, which the next process reads from the property `more`. sampler: the
    generator that draws the order of the data, if it is not the process's generator. needs_all: see watch_group().
    """

    def __init__(
        self,
        opt: Optimizer,
        more: Callable[[], Any] = lambda: None,
        sampler: torch.Generator | None = None,
        needs_all: bool = False,
    ) -> None:
        self.opt, self._more, self._sampler, self._scheduler = opt, more, sampler, None
        self._needs_all = needs_all
        self._sampler_state: torch.Tensor | None = None  # as the last step left it
        self._generators: dict[str, Any] | None = None  # as they were when the last step was asked for
        self._epoch: dict[str, Any] | None = None  # generators and sampler as they were when the epoch began
        self._begin = 0  # step of the first loop in a process that was started again
        self._n_applied = 0  # steps that were not skipped, as the daemon counts
        self.kept: dict[str, Any] | None = None  # the progress that the predecessor stored

    # ---- storing -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.opt.epoch,
            "generators": self._generators,
            "sampler": self._sampler_state,
            "epoch": self._epoch,
            "n_applied": self._n_applied,
            "scheduler": self._scheduler.state_dict() if self._scheduler is not None else None,
            "rates": [float(group["lr"]) for group in self.opt.param_groups],
            "more": self._more(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept, self._generators, self._epoch = state, state["generators"], state["epoch"]
        self._sampler_state = state["sampler"]

    # ---- continuing ----------------------------------------------------------------------------------

    def resume(self) -> int:
        """
        Loads the progress that a predecessor stored. A collective of the process group, if there is one. Returns the
        step that this rank begins with, in the daemon's count; 0 for a loop that does not continue another process's
        loop, such as a second loop in this process.
        """
        if self.opt.resumed and not self.opt.goes_on and self.opt not in _gone_on:
            own = generators()
            user_state(self.opt, progress=self)
            set_generators(own)  # the predecessor's states are set later, at the right place of the loop
            self._begin_step()
            self._begin = self.opt.epoch
        else:
            self.opt.set_user_state(UserState(self.opt, {"progress": self}))
        _gone_on.add(self.opt)
        watch_group(self._needs_all)
        self.opt.before_commit(self._before_commit)
        self.opt.register_step_post_hook(self._after_step)
        return self._begin

    def _begin_step(self) -> None:
        """
        Brings all ranks to micro-batch 0. Each rank requests the abort before it waits for the other ranks, because a
        rank that attaches may be waiting for micro-batches of this rank.
        """
        self.opt.abort_step("its program goes on with whole steps, after a restart or from a checkpoint")
        if _has_group():
            distributed.barrier()
        with contextlib.suppress(StepAborted):  # the abort of another rank
            self.opt.clear_fault()

    @property
    def more(self) -> Any:
        return self.kept["more"] if self.kept else None

    @property
    def generators(self) -> dict[str, Any] | None:
        """The generators' states as the last step left them."""
        return self._generators

    def set_generators(self) -> None:
        """Sets the generators as the last step left them, if they were stored."""
        if self._generators is not None:
            set_generators(self._generators)

    def begin_epoch(self, goes_on: bool = False) -> None:
        """Called before the data's order is drawn. goes_on: the loop continues inside an epoch, so the order stays."""
        if goes_on and self._epoch is not None:
            set_generators(self._epoch["generators"])
            self._set_sampler(self._epoch["sampler"])
        else:
            self._epoch = {"generators": generators(), "sampler": self._get_sampler()}

    def begin_next_epoch(self) -> None:
        """Called in a process that was started again, when the last step ended an epoch."""
        self.set_generators()
        self._set_sampler(self._sampler_state)

    def _get_sampler(self) -> torch.Tensor | None:
        return self._sampler.get_state() if self._sampler is not None else None

    def _set_sampler(self, state: torch.Tensor | None) -> None:
        if self._sampler is not None and state is not None:
            self._sampler.set_state(state)

    def restore(self, scheduler: Any, n_calls: Callable[[int], int] = lambda _step: 1) -> None:
        """
        Restores the scheduler, and stores it from now on. Calls of scheduler.step() after the last step were stored
        only if a micro-batch followed; otherwise they are repeated. n_calls: the number of calls after a given step.
        """
        self._scheduler = scheduler
        self._n_applied = self._count_applied()
        end, self._begin = self._begin, 0  # not again for a second training
        if scheduler is None or end == 0:
            return
        if self.kept is None or self.kept["scheduler"] is None:
            steps = range(end)  # the predecessor stored nothing
        else:
            scheduler.load_state_dict(self.kept["scheduler"])
            for group, rate in zip(self.opt.param_groups, self.kept["rates"], strict=True):
                group["lr"] = rate
            was_applied = self._n_applied > self.kept["n_applied"]
            steps = range(self.kept["step"] if was_applied else end, end)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that no optimizer step came first: one did
            for _ in range(0 if isinstance(scheduler, ReduceLROnPlateau) else sum(map(n_calls, steps))):
                scheduler.step()

    def _count_applied(self) -> int:
        return max(
            (int(self.opt._client.read_number(b.index, _lib.STEP_COUNT)) for b in self.opt._bound if b.trainable),
            default=0,
        )

    def _before_commit(self) -> None:
        self._generators, self._sampler_state = generators(), self._get_sampler()

    def _after_step(self, *_: Any) -> None:
        self._n_applied += not self.opt.step_was_skipped


# ---- the process group ----------------------------------------------------------------------------------


def _has_group() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _known_step() -> int:
    return max((opt.known_step for opt in open_optimizers), default=0)


def _is_in_step() -> bool:
    return any(opt.has_gradients for opt in open_optimizers)


def _collective_of_main_thread() -> Any:
    """The frame of the collective of all ranks that the main thread runs, or None."""
    frame, found = sys._current_frames().get(threading.main_thread().ident), None
    while frame is not None:
        if frame.f_code.co_filename == distributed.distributed_c10d.__file__ and "group" in frame.f_locals:
            group = frame.f_locals["group"]
            found = frame if group is None or group is distributed.group.WORLD else None
        frame = frame.f_back
    return found


class _Watch:
    """
    Ends this process if another process of the process group ends before that process is done, and if two ranks wait
    for each other, one in the job and one in the process group. If this rank is done and another rank waits for it in
    the job, this rank leaves the job. diagnostics.on_leave then decides whether the other rank continues.
    """

    def __init__(self, needs_all: bool) -> None:
        self._needs_all = needs_all
        self._rank = distributed.get_rank()
        self._others = [rank for rank in range(distributed.get_world_size()) if rank != self._rank]
        self._is_done = threading.Event()
        self._done: dict[int, int] = {}  # rank -> the step after which that rank was done
        self._step = 0
        self.is_ending = False  # the loop makes no more steps
        self._is_said = False  # the store says where this rank waits in the process group
        self._has_left = False  # this rank has left the job, so the end of other ranks does not end it
        self._group: Any = self._make_group()
        self._threads = [threading.Thread(target=self._wait, args=(other,), daemon=True) for other in self._others]
        self._looking = threading.Thread(target=self._look, daemon=True)
        for thread in (*self._threads, self._looking):
            thread.start()
        atexit.register(self.done_at_exit)

    def _make_group(self) -> Any:
        """
        Makes a group that torch.distributed does not know. A program ends properly with destroy_process_group(), which
        would destroy a group of new_group() while other ranks still train.
        """
        global _n_groups
        self._store = distributed.PrefixStore(f"zerod-watch-{_n_groups}", distributed.distributed_c10d._get_default_store())
        _n_groups += 1
        return distributed.ProcessGroupGloo(self._store, self._rank, len(self._others) + 1, _WATCH_TIMEOUT)

    def _wait(self, other: int) -> None:
        step = torch.zeros(1, dtype=torch.int64)
        try:
            self._group.recv([step], other, 0).wait()
        except BaseException:
            if self._has_left:
                return
            self._end(f"rank {other} has ended, and with it the process group", ", so that all ranks are started again")
        self._done[other] = int(step)

    def _end(self, why: str, more: str = "") -> None:
        print(f"zerod: {why}: rank {self._rank} ends as well{more}", file=sys.stderr, flush=True)
        os._exit(1)

    # ---- ranks that wait for each other ---------------------------------------------------------------

    def _look(self) -> None:
        """
        Looks for ranks that wait for each other, until this rank is done. Only a state that is seen several times
        counts, because a step or a collective may be about to end.
        """
        n_in_step = n_in_group = 0
        last_step, last_collective = -1, None
        while not self._is_done.wait(_LOOK_S):
            step, collective = _known_step() if _is_in_step() else -1, _collective_of_main_thread()
            n_in_step = n_in_step + 1 if step >= 0 and step == last_step else 0
            n_in_group = n_in_group + 1 if collective is not None and collective is last_collective else 0
            last_step, last_collective = step, collective
            with contextlib.suppress(RuntimeError):  # the store has ended, with the rank that owns it
                if n_in_step:
                    self._say_that_it_is_in_step(step, n_in_step)
                self._say_where_it_waits(collective, n_in_group)

    def _say_that_it_is_in_step(self, step: int, n_seen: int) -> None:
        """Notes that this rank has gradients of the step, which needs all ranks."""
        if n_seen == _SOON:
            self._store.set(_IN_STEP, f"{self._rank} {step}")
        if n_seen >= _LATE and self._store.check([_IN_GROUP]):
            other, said, where = self._store.get(_IN_GROUP).decode().split(" ", 2)
            if int(said) <= step:
                self._end(f"rank {other}, after step {said}, waits in {where}, and rank {self._rank} is in the next step")

    def _say_where_it_waits(self, collective: Any, n_seen: int) -> None:
        if n_seen >= _SOON and self.is_ending:
            self._leave_if_awaited()  # this rank makes no call of zerod meanwhile
        if n_seen < _LATE:
            if self._is_said:
                self._is_said = False
                self._store.delete_key(_IN_GROUP)  # other ranks that wait set it again
            return
        step, site = _known_step(), sites.user_site(collective).decode()
        where = f"{collective.f_code.co_name}() of torch.distributed (called at {site})"
        for other, its_step in self._done.items():
            self._end(f"rank {self._rank}, after step {step}, waits in {where}, and rank {other} was done after step {its_step}")
        if not _is_in_step():  # otherwise the other ranks may reach this collective in the same step
            self._is_said = True
            self._store.set(_IN_GROUP, f"{self._rank} {step} {where}")

    def _leave_if_awaited(self) -> None:
        """Leaves the job if another rank waits for a step, because this rank's loop makes no more steps."""
        step = self._note_step()
        if self._has_left or not self._store.check([_IN_STEP]):
            return
        other, its_step = self._store.get(_IN_STEP).decode().split()
        if int(its_step) < step:
            return
        what = f"rank {self._rank} is done after step {step}, and rank {other} is in the next one"
        if self._needs_all and any(opt.goes_on_without for opt in open_optimizers):
            self._end(f"{what}, which needs the data of all ranks")
        self._has_left = True
        print(
            f"zerod: {what}: rank {self._rank} leaves the job, and diagnostics.on_leave says whether the others go on",
            file=sys.stderr,
            flush=True,
        )
        for opt in list(open_optimizers):
            opt.close()

    def _note_step(self) -> int:
        """Returns the last step that this rank knows; after it has left, the step in which it left."""
        self._step = max(self._step, _known_step())
        return self._step

    # ---- the end --------------------------------------------------------------------------------------

    def done(self) -> None:
        """Waits until all other ranks are done."""
        self._is_done.set()
        self._looking.join()
        step = self._note_step()
        for other in self._others:
            with contextlib.suppress(RuntimeError):  # the rank has ended: its thread prints that
                self._group.send([torch.tensor([step])], other, 0).wait()
        while running := [thread for thread in self._threads if thread.is_alive()]:
            running[0].join(_LOOK_S)
            with contextlib.suppress(RuntimeError):
                self._leave_if_awaited()
        self._group = None  # the group's threads end now, not during the interpreter's shutdown

    def done_at_exit(self) -> None:
        if _watch is self and not hasattr(sys, "last_value"):  # an uncaught exception sets it
            group_is_done()


_watch: _Watch | None = None
_n_groups = 0  # of watches; each has its own names in the store


def watch_group(needs_all: bool = False) -> None:
    """
    Starts the watch of the other ranks. A collective. Without the watch, a rank that waits in the daemon for a dead
    rank would never notice that their process group has ended, and the dead rank's successor would wait for the group
    in vain.

    needs_all: each step of the loop has a collective of the process group, so that no rank can continue without the
    others.
    """
    global _watch
    if _watch is None and _has_group():
        _watch = _Watch(needs_all)


def loop_ends() -> None:
    """Notes that the loop makes no more steps. Its remaining work, such as saving, may need the process group."""
    if _watch is not None:
        _watch.is_ending = True


def group_is_done() -> None:
    """Ends the watch, because this rank's training is over, and waits until the other ranks end theirs."""
    global _watch
    watch, _watch = _watch, None
    if watch is not None:
        watch.done()
