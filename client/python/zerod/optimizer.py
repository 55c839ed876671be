# SPDX-License-Identifier: Apache-2.0
"""zerod.Optimizer: a torch.optim.Optimizer whose state and step are the daemon's."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from . import _lib, again, binding, buffersync, compiled, muon, own, patches, placement, reads, settings, sites, state
from .client import Client, Position, StepResult, path_of, rank_of
from .edits import Edits
from .errors import ConnectionLost, GradientFault, StepAborted, ZerodWarning
from .gradients import Gradients
from .metrics import collect
from .overlap import Overlap, WholeStep
from .patches.accelerate import refuse_lost_settings
from .patches.wrappers import is_inside_ddp
from .registry import open_optimizers, owners_of, when_attached
from .scaling import LossScale
from .stage3 import Sharding
from .unread import Unread

# torch's names of a group's hyperparameters, for each optimizer of the daemon's.
HYPERS = {
    "AdamW": ("lr", "betas", "eps", "weight_decay"),
    "Adam": ("lr", "betas", "eps", "weight_decay"),
    "SGD": ("lr", "momentum", "dampening", "nesterov", "weight_decay"),
    "Lion": ("lr", "betas", "weight_decay"),
    "Adagrad": ("lr", "lr_decay", "eps", "weight_decay"),
    "Muon": (
        "lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn",
    ),  # fmt: skip
}
SIGNED = ("dampening", "ns_coefficients")  # they may be below 0
FLT_MAX = torch.finfo(torch.float32).max
_FLAGS = {again.Attach.FIRST: 0, again.Attach.AGAIN: _lib.AGAIN, again.Attach.ANEW: _lib.ANEW}


@dataclasses.dataclass
class _Aside:
    """State that methods set, in an object of its own: Lightning's wrapper calls the methods, but its attributes are
    copies."""

    user_state: Any = None
    step_began: tuple[int, bytes] | None = None  # the last step that began in this process, and the user state then
    before_commit: Any = None  # called when step() has pushed all gradients, before the user state is packed
    in_window: bool = False
    amp: tuple[float, torch.Tensor] | None = None  # loss scale and found_inf of a GradScaler


def _number(name: str, value: Any) -> float:
    if isinstance(value, str):
        raise TypeError(f"{name} is the string {value!r}; expected a number")
    return float(value)


def _check_muon(index: int, group: dict[str, Any]) -> None:
    """Checks the settings that only Muon has."""
    if group["adjust_lr_fn"] not in settings.ADJUST_LR_FNS:
        raise ValueError(
            f"adjust_lr_fn of parameter group {index} is {group['adjust_lr_fn']!r}; expected None or one of "
            + ", ".join(filter(None, settings.ADJUST_LR_FNS))
        )
    ns = group["ns_coefficients"]
    if not isinstance(ns, tuple | list) or len(ns) != 3:
        raise ValueError(f"ns_coefficients of parameter group {index} are {ns!r}; expected 3 numbers")
    if group["ns_steps"] not in range(1, 100):
        raise ValueError(
            f"ns_steps of parameter group {index} is {group['ns_steps']!r}; expected a whole number from 1 to 99"
        )


def _check_hypers(names: tuple[str, ...], index: int, group: dict[str, Any]) -> None:
    """Checks the ranges of torch.optim's constructors. betas and momentum end below 1, as in the daemon's
    configuration."""
    if "adjust_lr_fn" in names:
        _check_muon(index, group)
    for name in names:
        if name == "adjust_lr_fn":
            continue
        values = group[name] if name in settings.TUPLES else (group[name],)
        below_1 = name in ("betas", "momentum")
        for value in values:
            number = _number(name, value)
            low = name not in SIGNED and number < 0 or name == "eps" and number == 0
            if low or not abs(number) <= FLT_MAX or below_1 and number >= 1:
                raise ValueError(
                    f"{name} of parameter group {index} is {group[name]!r}; expected a finite number "
                    + ("above 0" if name == "eps" else "that fp32 can hold" if name in SIGNED else "of at least 0")
                    + (" and below 1" if below_1 else "")
                )
    if "dampening" in names and group["nesterov"] and not (group["momentum"] > 0 and group["dampening"] == 0):
        raise ValueError(f"nesterov of parameter group {index} needs a momentum above 0 and a dampening of 0")


class Optimizer(torch.optim.Optimizer):
    """
    Attaches this process to a zerod job as one rank, with all parameters of one model.

    params        the model; or param groups of its parameters in torch's form, then with model=
    socket        path of the daemon's socket; default: environment ZEROD_SOCKET
    job           number of a job of `zerodrun --jobs N`, from 0, because each optimizer of a process needs its own
                  daemon. Job 1 has the socket of environment ZEROD_SOCKET_1, and so on
    rank          default: environment RANK, as zerodrun and torchrun set it
    run_id        name of the run that owns the state: the same id resumes it, another id is refused (E1109)
    on_duplicate  "reject", "accumulate" or "abort_step"; default: as the daemon is configured
    on_grad_read  "warn" once, "error" or "ignore", when the program reads .grad after it was pushed, see reads.py
    sync_buffers  if there is a process group, all ranks get rank 0's buffers after each step, as under DDP; without a
                  group one warning says that the ranks' buffers differ, see zerod.sync_buffers()
    overlap_update  step() returns when the step is decided, and the daemon writes the weights while the next forward
                  runs. The forward waits for each module's own weights. For other reads of weights see zerod.wait()
    publish_frozen    frozen float32, bfloat16 and float16 parameters are published like trained ones: all ranks of a
                  node share one copy, which is rank 0's. False: they stay in this process's memory. Frozen parameters
                  whose type, layout or device zerod does not support always stay there, see own.py
    timeout       seconds to wait for an answer before TimeoutError; default: only the daemon's stall_timeout
    type          "AdamW", "Adam", "SGD", "Lion", "Adagrad" or "Muon": if the daemon's configuration names no
                  optimizer, the daemon uses this type; otherwise a type other than the configured one is refused;
                  default: the daemon's type
    hypers        lr, betas, eps, ... of the daemon's optimizer; default: as the daemon is configured. The daemon's
                  scheduler sets the learning rates, and starts from lr, if lr is given here. The scheduler has no
                  effect on a group whose lr the program changes in param_groups, as torch's schedulers do

    A process that has closed its optimizer can attach again with a new one. With the same model the run continues; with
    another model the next run begins, see again.py.

    Waits until all ranks are attached. Then all ranks have rank 0's weights, and the parameters of the model are the
    daemon's published weights: read-only memory, see zerod.writable().

    Raises GradientFault and its subclasses when the daemon refuses; TypeError and ValueError for parameters and
    settings that cannot be declared; ConnectionLost when there is no daemon.
    """

    _step_supports_amp_scaling = True  # torch's GradScaler leaves the verdict to step(), see patches/torch.py

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        socket: str | None = None,
        *,
        job: int = 0,
        model: nn.Module | None = None,
        rank: int | None = None,
        run_id: str | None = None,
        on_duplicate: str | None = None,
        on_grad_read: str = "warn",
        sync_buffers: bool = True,
        overlap_update: bool = False,
        publish_frozen: bool = True,
        timeout: float | None = None,
        type: str | None = None,
        **hypers: Any,
    ) -> None:
        self._formed = False
        self._on_grad_read = reads.check_how(on_grad_read)
        refuse_lost_settings(params)
        self._syncs_buffers = sync_buffers
        self.model, groups = _model_and_groups(params, model)
        _refuse_shapeless(self.model)
        hypers = settings.without_switches("", hypers)
        groups = [
            settings.without_switches(f" of parameter group {i}", group) if isinstance(group, dict) else group
            for i, group in enumerate(groups)
        ]
        _refuse_attached(self.model)
        socket = _socket_of(job) if job and socket is None else socket
        given = settings.given(groups, hypers)
        settings.check_type(type, HYPERS)
        self._path = path_of(socket)
        self._attach = again.find(self._path, rank_of(rank), self.model, groups, run_id, type)
        self._client = Client(
            socket,
            rank,
            run_id,
            timeout,
            on_duplicate,
            type,
            settings.momentum(type, given),
            _lib.OVERLAP_UPDATE * overlap_update
            | _lib.COPIES_FROM_GPU * placement.is_on_gpu(self.model)
            | _FLAGS[self._attach],
        )
        self._overlaps, self._publishes_frozen = overlap_update, publish_frozen
        try:
            _refuse_wrapped(self.model, self._client)
            settings.check_type(type, [self.optimizer_type])
            self._init_groups(groups, hypers)
            self._form()
        except BaseException:
            self._client.close()
            raise
        if self._client.rank == 0:
            print(
                self._describe(socket),
                *settings.differences(self._client.job, given),
                sep="\n",
                file=sys.stderr,
                flush=True,
            )
        for call in list(when_attached):
            call(self)

    # ---- attaching -----------------------------------------------------------------------------------

    def _init_groups(self, groups: list[Any], hypers: dict[str, Any]) -> None:
        hyper, names = self._client.job.hyper, HYPERS[self.optimizer_type]
        unknown = [name for name in hypers if name not in names]
        if unknown:
            raise TypeError(f"{unknown[0]}: the daemon's {self.optimizer_type} has {', '.join(names)}")
        configured = {n: settings.value_of(hyper, n) for n in names}
        given = settings.names_given(groups, hypers)  # before torch completes the groups
        super().__init__(groups, configured | hypers | ({"use_muon": None} if self.optimizer_type == "Muon" else {}))
        state.check_groups(self, self.param_groups)
        for i, group in enumerate(self.param_groups):
            _check_hypers(names, i, group)
        self._given = settings.Given(self._client.job, given, [self._hyper_of(group) for group in self.param_groups])

    def _describe(self, socket: str | None) -> str:
        """The line that names this run's settings, for a comparison when two runs give different numbers."""
        job = self._client.job
        rates, decays = (
            "/".join(dict.fromkeys(f"{float(group[name]):g}" for group in self.param_groups))
            for name in ("lr", "weight_decay")
        )
        clipping = f"clipping to {job.max_norm:g}" if job.max_norm else "clipping: the program's"
        at = f", goes on at step {self._client.position.step}" if self._resumed else ""
        return (
            f"zerod: {self.optimizer_type}, stage {job.configured_stage}, {job.world_size} ranks, lr {rates}, weight_decay {decays}, "
            f"{clipping}{self._place.describe()}{at}; from the daemon at {socket or os.environ.get('ZEROD_SOCKET')}"
        )

    def _form(self) -> None:
        client = self._client
        self._bound, self._own = binding.bind(self.model, self.param_groups, self._publishes_frozen)
        if self.optimizer_type == "Muon":
            muon.choose(self.model, self.param_groups, self._bound)
        self._place = place = placement.place(client, self._bound)
        buffers, fingerprints = binding.pack_buffers(self.model), own.fingerprints(self._own)
        with place.context():
            declarations, keep = binding.declarations(self._bound, buffers, fingerprints, client.rank, place.initial)
            self._resumed = client.form(declarations)
            del keep
            self._make_own_equal(len(declarations) - 1, fingerprints)
            place.attach()
        self._began = client.position.step
        self._layout = again.layout_of(self.model, self.param_groups)
        if buffers.numel() and not self.goes_on:  # otherwise the daemon's buffers are older
            packed = place.read_frozen(len(self._bound), buffers.numel())
            binding.unpack_buffers(self.model, packed, device=place.device)
        self._frozen = [b for b in self._bound if not b.trainable]
        trainable = [b.param for b in self._bound if b.trainable]
        self._unread = Unread(client.position, trainable, weakref.WeakMethod(self._take_back))
        self.scaling = LossScale(client)
        self._aside = _Aside()
        self.result: StepResult | None = None
        self.sharding = Sharding(client, self.model, self._bound, place.device) if self.stage == 3 else None
        self._gradients = Gradients(client, self.model, self._bound, self._own, self._pack, self.sharding, place, self._expect)
        self._n_buffer_bytes = buffers.numel()
        self._buffers = buffersync.BufferSync(self.model, client.rank, self.world_size, self._syncs_buffers)
        self._unwatch = reads.watch(self._gradients.was_pushed, self._bound, self._on_grad_read)
        self._guards = patches.attach(self)
        self._overlap = self._make_overlap()
        if self.goes_on:
            self._unread.read()  # this program has made the steps
        self._edits = Edits(self.param_groups)
        # The hyperparameters that the daemon expects in the coming step; None: it need not know them. If the daemon has a
        # schedule, it knows the learning rates itself.
        self._expected: list[dict[str, Any]] | None = [] if self.rank == 0 and not client.job.has_scheduler else None
        self._state = state.States(self)
        self.register_state_dict_post_hook(state.finish_state_dict, prepend=True)
        self.param_ids = frozenset(id(b.param) for b in [*self._bound, *self._own])
        self._formed = True
        open_optimizers.add(self)

    def _make_own_equal(self, index: int, fingerprints: torch.Tensor) -> None:
        """Makes frozen parameters outside the daemon equal on all ranks. index: of rank 0's fingerprints. A process
        that was started again attaches alone, so it takes part in no collective."""
        if not self._own:
            return
        device = None
        if not self._resumed and buffersync.has_group(self.rank, self.world_size):
            device = buffersync.device_of_group(next(b.param for b in self._bound if b.trainable))
        first = self._place.read_frozen(index, fingerprints.numel())
        own.make_equal(self._own, fingerprints, first, device)

    def _make_overlap(self) -> WholeStep:
        place = self._place
        if self._overlaps and self.sharding is None and type(place) in (placement.InHost, placement.Offload):
            return Overlap(self._client, self._bound, place, self.model)
        return WholeStep(self._client, self._bound, place)

    def close(self) -> None:
        """Leaves the job; the model's weights become ordinary memory of this process."""
        if self._client.handle and self._formed:
            self._formed = False
            self._gradients.close()
            self._overlap.close()
            self._unwatch()
            for guard in self._guards:
                guard.remove()
            self._unread.close()
            if self._client.is_mine:
                self._give_back()
            open_optimizers.discard(self)
            self._state.close()

    def _give_back(self) -> None:
        """Detaches the weights and leaves. After a lost connection the weights are still mapped, but stage 3 cannot
        gather."""
        try:
            self._overlap.wait()
        except (ConnectionLost, TimeoutError) as lost:
            warnings.warn(f"some weights may lack the last step, which zerod had not written: {lost}", ZerodWarning, stacklevel=3)
        try:
            for b in self._bound:
                with self._client.gathered([b.index]) if self.sharding else contextlib.nullcontext():
                    self._place.detach(b)
            self._leave()
        except ConnectionLost as lost:
            if self.sharding:
                warnings.warn(f"the weights stay with the daemon, nobody can read them here: {lost}", ZerodWarning, stacklevel=3)
        if self.sharding:
            self.sharding.close()

    def _leave(self) -> None:
        self._client.leave()
        again.note_left(
            self._path, self.rank, self.model, self._layout, self._client.job.run_id, self.optimizer_type
        )

    # ---- properties and position ---------------------------------------------------------------------

    @property
    def optimizer_type(self) -> str:
        """The daemon's optimizer: "AdamW", "Adam", "SGD", "Lion", "Adagrad" or "Muon"."""
        return self._client.job.optimizer.decode()

    @property
    def rank(self) -> int:
        return self._client.rank

    @property
    def world_size(self) -> int:
        return int(self._client.job.world_size)

    @property
    def stage(self) -> int:
        """ZeRO stage: 1, 2 or 3. The daemon serves stage 3 on one node as stage 2, because all weights are on that
        node."""
        return int(self._client.job.stage)

    @property
    def device(self) -> torch.device | None:
        """The model's device; None: host memory."""
        return self._place.device

    @property
    def resumed(self) -> bool:
        """True if the job had begun before this process attached. If so, continue at position."""
        self._unread.read()
        return self._resumed

    @property
    def known_step(self) -> int:
        """The next step, as far as this program knows; any thread may read it."""
        return self._client.result.epoch if self._client.result is not None else self._began

    @property
    def goes_on_without(self) -> bool:
        """True with diagnostics.on_leave: continue: the other ranks continue without a rank that leaves."""
        return bool(self._client.job.configured & _lib.CONFIGURED_LEAVE_CONTINUES)

    @property
    def goes_on(self) -> bool:
        """True if this process has closed an optimizer of this run, and has attached again with the same model."""
        return self._attach is again.Attach.AGAIN and self._resumed

    def save_checkpoint(self, wait: bool = False) -> None:
        """
        Asks the daemon for a checkpoint of the last committed step, in checkpoint.dir of its configuration; training
        continues while the daemon writes it. wait: waits until it is on the disk. One rank is enough, and more do no
        harm. Raises zerod.CheckpointNotSaved (E1701) if it cannot be written.
        """
        self._client.save_checkpoint(wait)

    @property
    def position(self) -> Position:
        """
        The next step and micro-batch of this rank. A program that was started again continues at this position. If the
        position is in the middle of a step, and the program does not read position.micro_batch before its first
        backward, the step is aborted for all ranks and begins again with micro-batch 0.
        """
        return self._unread.position(self._client.position)

    @property
    def epoch(self) -> int:
        """Steps committed, skipped ones included."""
        self._unread.read()
        return self._client.position.step

    def begin_anew(self) -> None:
        """
        Call it in a program that was started again and begins its data anew, but keeps the job's weights and state. A
        program that does not call this must read `position`, `epoch` or `resumed` before its first backward
        (ResumeIgnored). If this rank is in the middle of a step, the step is aborted for all ranks, and begins again
        with micro-batch 0.
        """
        self._unread.read()
        if self._client.position.micro_batch:
            self.abort_step("the program begins anew")

    def _take_back(self) -> None:
        """Brings all ranks to micro-batch 0 of the open step, because this program computes all of the step again."""
        at = self._client.position
        if at.micro_batch == 0:
            return
        why = (
            f"rank {self.rank} was started again at step {at.step}, micro-batch {at.micro_batch}, and its program, which "
            "did not read opt.position.micro_batch, does the whole step again"
        )
        self.abort_step(why)
        if self.user_state is not None:  # this backward's batch was drawn after the dropped micro-batches
            raise StepAborted(f"E1302 step aborted: {why}", code=1302, step=at.step)

    def step_begins(self) -> None:
        """Called when a step begins or continues. Keeps the user state of the step's begin, which rewind() restores."""
        at = self._client.position
        if self.user_state is not None and at.micro_batch == 0 and not self.has_gradients:
            self._aside.step_began = at.step, self.user_state.pack()

    def rewind(self) -> bool:
        """Restores the user state of the begin of the open step. Returns False if that is not known."""
        if self.user_state is None:
            return True
        step, blob = self._aside.step_began or (-1, b"")
        if step != self._client.position.step:
            return False
        self.user_state.unpack(blob)
        return True

    @property
    def loss_scale(self) -> float:
        """
        The daemon's loss scale, by which the program multiplies the next loss: `(loss * opt.loss_scale).backward()`. It
        is 1 unless fp16 is enabled in the daemon's configuration. A program that was started again gets the other
        ranks' scale. With accelerate, the Trainer, Lightning and Fabric, the library's backward multiplies the loss;
        see scaling.py.
        """
        return self.scaling.read()

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step did not change the weights, because of non-finite gradients."""
        return self.result is not None and not self.result.applied

    def metrics(self, prefix: str = "", timeout: float = 0.2) -> dict[str, float]:
        """
        The job's figures as plain numbers for a logger, for example `writer.log(opt.metrics("zerod/"))`, on any rank,
        between any two calls. Figures without a value are left out: a norm that is not finite, a checkpoint if there is
        none. prefix: the beginning of each name.

        step                         steps committed, skipped ones included
        n_applied, n_skipped, n_aborted    steps since the daemon started
        n_missing_steps              steps in which a rank had no gradient of a parameter that is not declared unused
        n_missing_params             parameters of which no rank had a gradient in the last step
        grad_norm                    of the last step, unscaled, before clipping
        loss_scale                   of the next loss
        lr, lr_1, lr_2, ...          learning rates of the groups in the last step
        steps_per_s                  over the last steps
        last_step_seconds            from the commit before the last to the last one
        wait_seconds, reduce_seconds, update_seconds    phases of the last step: a rank waited for ranks, at the end of
                                     a micro-batch or in the step; reductions, parallel to the backward; the update
        waited_ratio                 share (0 to 1) of the time since the last metrics() in which this rank waited for
                                     the others and the daemon, in step() and at the end of each micro-batch
        slowest_rank, slowest_rank_behind_seconds       the rank that others waited for longest in the last step
        overlap_ratio                share of the last micro-batch's bytes that was reduced during the backward
        early_update_ratio           share of the last update that was made before the step was decided
        memory_bytes, memory_planned_bytes, memory_limit_bytes    host memory that the daemon holds, plans, may hold
        gpu_memory_bytes             GPU memory that the daemon holds
        n_ranks_attached             ranks of this node
        n_refused, n_warnings        diagnostics since the daemon started
        checkpoint_step, checkpoint_age_seconds         the last checkpoint that this daemon has written

        The daemon is asked over a separate connection, which takes about a millisecond and delays no rank's step. If it
        does not answer within timeout seconds, the result has only the figures of the last step() (step, grad_norm,
        loss_scale, lr, n_missing_params) and waited_ratio. Call it as often as you log.
        """
        return {prefix + name: value for name, value in collect(self._client, timeout).items()}

    # ---- the step ------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """
        Waits until all ranks have asked for the step and it is committed. Then the weights are new, and `result` is
        the step's StepResult. With overlap_update it waits only until the step is decided, and each module waits for
        its own weights (zerod.wait()). A closure is called first, with gradients enabled, and step() returns its value.

        Raises the fault of an earlier backward, if it was not cleared; MissingGradient; NonFiniteGradient
        (on_nonfinite: error); StepArgumentsDiffer; StepAborted; ResumeIgnored; LossScaleIgnored; BackwardRuns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._take_step()
        except GradientFault as fault:
            raise fault.with_traceback(None) from fault.__cause__  # a user needs no frames of this package
        return loss

    def _take_step(self) -> None:
        self._gradients.check_alone()
        self._unread.check()
        self._edits.check(self.param_groups)
        self._check_frozen()
        self._gradients.check_clip()
        self._push_zeros()
        self._push_by_hand()
        if self._gradients.has_any:
            self.scaling.check(has_scaler=self._aside.amp is not None)
        self._gradients.finish()
        args = self._step_args()
        self._place.before_step()
        self.result = self._gradients.answered(lambda: self._client.step(args))
        self._overlap.stepped(self.result.applied)
        if self._aside.amp is not None and not self.result.applied:
            self._aside.amp[1].fill_(1.0)  # GradScaler.update() reads it: the verdict of all ranks, not of this rank
        self._aside.amp = None
        self._gradients.forget_step()
        self._edits.forget()
        self._buffers.after_step()

    def wait(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """See zerod.wait()."""
        self._overlap.wait(params)

    def _check_frozen(self) -> None:
        """
        Makes the next answer E1103 if a parameter that is in no group, or was thawed since its declaration, has a
        gradient.
        """
        frozen = [b for b in self._frozen if b.param.grad is not None]
        self._gradients.report_left_out([b.index for b in frozen if b.left_out])
        for b in frozen:
            if not b.left_out:
                self._gradients.push_frozen(b.index)
            b.param.grad = None

    def _push_by_hand(self) -> None:
        """Pushes gradients that the program put into .grad itself, for example from torch.func.grad."""
        params = [b.param for b in self._bound if b.trainable and b.param.grad is not None]
        if params and self._gradients.fault is None:
            grads = [param.grad for param in params]
            for param in params:
                param.grad = None
            torch.autograd.backward(params, grads)

    def _push_zeros(self) -> None:
        """After zero_grad(set_to_none=False) a parameter that this step does not use has a gradient of zeros, as in torch."""
        for b in self._gradients.of_zeros():
            if b.param.grad is None:
                b.param.grad = torch.zeros_like(b.param, dtype=b.grad_dtype)

    def _hyper_of(self, group: dict[str, Any]) -> dict[str, Any]:
        def plain(name: str, value: Any) -> Any:
            if name in settings.TUPLES:
                return tuple(_number(name, item) for item in value)
            return value or "original" if name == "adjust_lr_fn" else _number(name, value)

        return {name: plain(name, group[name]) for name in HYPERS[self.optimizer_type]}

    def _hyper_struct(self, i: int, group: dict[str, Any]) -> _lib.Hyper:
        values = self._hyper_of(group)
        hyper = _lib.Hyper(given=self._given.bits(i, group, values))
        for name, value in values.items():
            settings.set_value(hyper, name, value)
        return hyper

    def _expect(self) -> None:
        """Tells the daemon the hyperparameters of the coming step, if they are not those of the last step."""
        self._overlap.wait()  # a model on a GPU: copies the weights that no forward has read
        if self._expected is None:
            return
        try:
            values = [self._hyper_of(group) for group in self.param_groups]
            hypers = [_lib.Hyper() for _ in values]
            for hyper, of_group in zip(hypers, values, strict=True):
                for name, value in of_group.items():
                    settings.set_value(hyper, name, value)
        except Exception:  # whatever is wrong, step() will say it; this runs inside a backward
            return
        if values != self._expected:
            self._expected = values if self._client.expect(hypers) else None

    def _step_args(self) -> _lib.StepArgs:
        args = _lib.StepArgs(loss_scale=self._aside.amp[0] if self._aside.amp is not None else 0.0)
        hypers = [self._hyper_struct(i, group) for i, group in enumerate(self.param_groups)]
        found_inf = getattr(self, "found_inf", None)
        if self._aside.before_commit is not None:
            self._aside.before_commit()
        blob = self._pack()
        if self._expected is not None:
            self._expected = [self._hyper_of(group) for group in self.param_groups]

        replaced = self._given.replaced()
        if replaced and self.rank == 0:
            print(replaced, file=sys.stderr, flush=True)
        # Groups are always sent, because a rank that was started again has the groups that its program gave, while the
        # other ranks may have changed theirs.
        args.groups, args.n_groups = (_lib.Hyper * len(hypers))(*hypers), len(hypers)
        if self._gradients.max_norm is not None:
            args.max_norm = ctypes.pointer(ctypes.c_double(self._gradients.max_norm))
        args.found_inf = found_inf is not None and bool(found_inf.item())
        if blob is not None:
            args.blob, args.blob_len = ctypes.cast(ctypes.c_char_p(blob), ctypes.c_void_p), len(blob)
        return args

    def _pack(self) -> bytes | None:
        return self._aside.user_state.pack() if self._aside.user_state is not None else None

    def join_hook(self, **_kwargs: Any) -> Any:
        """Refuses torch.distributed.algorithms.Join, which shadows collectives: a rank without data just leaves."""
        raise TypeError(
            "Join is not for zerod.Optimizer: with diagnostics.on_leave: continue in the daemon's configuration a rank "
            "whose data has ended calls opt.close(), and the others go on without it"
        )

    def set_user_state(self, user_state: Any) -> None:
        """The daemon stores the bytes of user_state.pack() with each micro-batch and step; see zerod.user_state()."""
        self._aside.user_state = user_state

    def before_commit(self, call: Callable[[], None]) -> None:
        """Each step() calls `call` after the last backward, before the user state is packed."""
        self._aside.before_commit = call

    @property
    def user_state(self) -> Any:
        """The object that set_user_state() was given, or None."""
        return self._aside.user_state

    @property
    def stored_user_state(self) -> bytes | None:
        """The user state that this rank's last incarnation stored, if that was another process."""
        return self._client.user_state if not self.goes_on else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """
        Before step(), drops this rank's pushed gradients (E1007). After step() there is nothing to clear.
        set_to_none=False: as in torch, a parameter that a later step does not use is updated with a gradient of zeros.
        """
        if self.has_gradients:
            self._gradients.drop("zero_grad() came before step()")
        super().zero_grad(set_to_none=True)
        self._gradients.note_zero_grad(None, set_to_none)

    def note_zero_grad(self, params: Iterable[torch.Tensor], set_to_none: bool) -> None:
        """Notes a call of a module's zero_grad()."""
        ids = {id(p) for p in params}
        self._gradients.note_zero_grad([b.index for b in self._bound if id(b.param) in ids], set_to_none)

    # ---- norms ---------------------------------------------------------------------------------------

    def grad_norm(self, name: str | None = None) -> float:
        """
        The norm of all gradients of this step so far, unscaled, as the step will see it: a collective. With a name, the
        norm of that parameter's gradient in the last step: not a collective.
        """
        if name is not None:
            return self._client.read_number(self._index_of(name), _lib.GRAD_NORM)
        self._push_by_hand()
        if self._gradients.has_any:
            self._gradients.flush()
        norm = self._gradients.answered(self._client.grad_norm)
        return norm / self._aside.amp[0] if self._aside.amp is not None else norm

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """
        The next step() clips all gradients as torch.nn.utils.clip_grad_norm_ does. Returns the norm. Collective. As in torch
        it has no effect while there are no gradients.
        """
        if float(norm_type) != 2.0:
            raise ValueError(f"norm_type {norm_type}: zerod clips by the 2-norm")
        norm = self.grad_norm()
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the total norm of the gradients is {norm}, so it cannot be clipped")
        if norm != 0:
            self._gradients.clip(float(max_norm) if math.isfinite(max_norm) else 0.0)  # inf: only the norm is wanted
        return torch.tensor(norm)

    def _index_of(self, name: str) -> int:
        for b in self._bound:
            if b.name == compiled.plain(name):
                return b.index
        raise KeyError(f"the model has no parameter {name!r}")

    def take_scale(self, scale: float, found_inf: torch.Tensor) -> None:
        """Called by GradScaler. scale: the factor of this step's gradients. found_inf: gets the verdict."""
        self._aside.amp = scale, found_inf

    @property
    def has_gradients(self) -> bool:
        """True if this rank has pushed gradients for the open step."""
        return self._gradients.has_any

    @property
    def n_trainable(self) -> int:
        return len(self._bound) - len(self._frozen)

    # ---- weights -------------------------------------------------------------------------------------

    @property
    def is_writable(self) -> bool:
        """True if a write window is open."""
        return self._aside.in_window

    def open_window(self) -> None:
        self._overlap.wait()
        self._place.before_step()
        self._place.window_opens()
        try:
            self._gradients.answered(self._client.write_begin)
        except BaseException:
            self._place.window_closed()
            raise
        self._aside.in_window = True
        self._place.window_opened()

    def close_window(self, forget: bool = False) -> None:
        self._aside.in_window = False
        try:
            if not forget:
                self._place.window_closes()
            self._gradients.answered(self._client.write_forget if forget else self._client.write_end)
        finally:
            self._place.window_closed()

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """Opens a write window, unless one is open already. If the body raises, the daemon drops what was written."""
        if self._aside.in_window:
            yield
            return
        self.open_window()
        try:
            yield
        except BaseException:
            self.close_window(forget=True)
            raise
        self.close_window()

    def sync_buffers(self) -> None:
        """See zerod.sync_buffers()."""
        packed, index = binding.pack_buffers(self.model), len(self._bound)
        if packed.numel() != self._n_buffer_bytes:
            raise ValueError(
                f"the model has {packed.numel()} bytes of buffers, and {self._n_buffer_bytes} when the job was formed"
            )
        if packed.numel():
            with self.window():
                if self.rank == 0:
                    ctypes.memmove(self._client.window_address(index), packed.data_ptr(), packed.numel())
            packed = self._place.read_frozen(index, packed.numel())
            binding.unpack_buffers(self.model, packed, device=self._place.device)

    def gathered(self, params: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        params = list(params)
        self._overlap.wait(params)
        index = {b.param: b.index for b in self._bound}
        return self._client.gathered(sorted({index[p] for p in params if p in index}))

    # ---- faults --------------------------------------------------------------------------------------

    def abort_step(self, why: str = "") -> None:
        """Aborts the step for all ranks, and clears this rank's fault. Begin it again with its first micro-batch."""
        self._client.abort_step(why)
        self._gradients.forget_step()

    def clear_fault(self) -> None:
        """Continues after a refusal. The refused gradient stays out of the sum."""
        self._client.clear_fault()
        self._gradients.fault = None

    def refuse(self, code: int, what: str, params: Iterable[torch.Tensor] = ()) -> None:
        """Raises a fault that this process found, with the daemon's text, and clears it, because the step is
        unharmed."""
        index = {b.param: b.index for b in self._bound}
        self._client.report(code, [index[p] for p in params if p in index], what)
        try:
            self._client.read_number(0, _lib.GRAD_NORM)
        finally:
            self._client.clear_fault()

    # ---- state ---------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """
        The state in torch's form, for reading: see state.py. The next step refuses edits, except load_state_dict().
        """
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        if not self._formed:
            self._state = value
        elif value is not self._state:
            self._edits.note("opt.state was replaced")

    def master(self, name: str) -> torch.Tensor:
        """A parameter's fp32 master weights, on any rank, between steps. Not a collective."""
        return state.read_master(self, self._bound[self._index_of(name)])

    def full_state_dict(self) -> dict[str, Any]:
        """The whole state, fp32, in torch.optim.AdamW's form, on any rank, between steps. Not a collective."""
        return state.full_state_dict(self)

    def load_full_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """
        Loads a full_state_dict(), or the state of torch's optimizer of this kind, from rank 0. A collective.
        strict=False: the state may have another layout; parameters with the same name and shape get their moments and
        step counts.
        """
        state.load_full_state_dict(self, state_dict, strict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Loads a state_dict(), of this optimizer or from a file. If it holds this optimizer's own state, only the groups
        are loaded, as accelerate's prepare() requires; any other state is loaded into the daemon: a collective.
        """
        state.load_state_dict(self, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._formed:
            raise ValueError(
                "the layout of partitions is fixed when the job is formed: pass all groups to zerod.Optimizer(...), "
                "with lr=0 for those that are to be trained later"
            )
        _check_group(self.model, self.param_groups, param_group)
        super().add_param_group(param_group)

    def __deepcopy__(self, _memo: Any) -> Any:
        raise TypeError("a zerod.Optimizer is a connection and cannot be copied; copy opt.full_state_dict()")

    def __reduce__(self) -> Any:
        raise TypeError("a zerod.Optimizer is a connection and cannot be pickled; save opt.full_state_dict()")


def _model_and_groups(params: Any, model: nn.Module | None) -> tuple[nn.Module, list[Any]]:
    params, model = compiled.unwrapped(params), compiled.unwrapped(model)
    if isinstance(params, nn.Module):
        if model is not None and model is not params:
            raise TypeError("two models: the first argument is the model, or groups of the parameters of model=")
        return params, _some(list(params.parameters()), "the model has no parameters")
    if model is None:
        raise TypeError(
            "zerod publishes the weights of a whole model: zerod.Optimizer(model, ...), "
            "or zerod.Optimizer(groups, model=model, ...)"
        )
    if isinstance(params, torch.Tensor):
        raise TypeError("the parameters are one tensor: pass the model, or a list of groups and model=")
    return model, _some(
        list(params), "the list of parameters is empty: pass the model, or groups of its parameters and model="
    )


def _refuse_shapeless(model: nn.Module) -> None:
    """Refuses lazy modules before their first forward; and TorchScript, whose parameters cannot be published."""
    for name, param in model.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"{name} has no shape yet: its module gets one at its first forward. Call model(batch) once, on every rank, "
                "before zerod.Optimizer(model)"
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{name or 'the model'} is a TorchScript module, which runs with weights of its own: train the module that "
                "torch.jit.script() or trace() was given, and script it when it is trained"
            )


def _socket_of(job: int) -> str:
    socket = os.environ.get(f"ZEROD_SOCKET_{job}")
    if not socket:
        raise ValueError(
            f"job={job}: the environment has no ZEROD_SOCKET_{job}. zerodrun --jobs {job + 1} starts the daemons and "
            "sets it; or give socket= of a second daemon"
        )
    return socket


def _some(params: list[Any], otherwise: str) -> list[Any]:
    if not params:
        raise ValueError(otherwise)
    return params


def _check_group(model: nn.Module, groups: list[dict[str, Any]], group: dict[str, Any]) -> None:
    """Checks parameters before torch does, because torch's errors do not name the parameter."""
    params = group["params"] = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
    names = {id(param): compiled.plain(name) for name, param in model.named_parameters()}
    seen = {id(param): g for g, other in enumerate(groups) for param in other["params"]}

    for i, param in enumerate(entry[1] if isinstance(entry, tuple) else entry for entry in params):
        name = names.get(id(param), f"parameter {i} of group {len(groups)}")
        binding.check_parameter(name, param)
        if seen.setdefault(id(param), len(groups)) != len(groups):
            raise ValueError(
                f"{name} is in group {seen[id(param)]} and in group {len(groups)}: it can have one learning rate only"
            )


def _refuse_attached(model: nn.Module) -> None:
    held = {id(b.param) for owner in owners_of(model.parameters()) for b in owner._bound}
    for name, param in model.named_parameters():
        if id(param) in held:
            raise ValueError(
                f"{compiled.plain(name)} belongs to another zerod.Optimizer already: its gradient would be pushed twice. "
                "Use one optimizer with several groups, or close() the first one"
            )


def _refuse_wrapped(model: nn.Module, client: Client) -> None:
    """Raises E1107. The daemon makes the fault, so that its log has it too."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel | FSDPModule | DataParallel):
            where = f"{name} of the model" if (name := compiled.plain(name)) else "the model"
            kind = "FSDP module (fully_shard)" if isinstance(module, FSDPModule) else type(module).__name__
            client.report(1107, [], f"{where} is a {kind}; attached at {sites.user_site().decode()}")
            client.form([])
    if is_inside_ddp(model):
        client.report(1107, [], "the model is inside a DistributedDataParallel")
        client.form([])
