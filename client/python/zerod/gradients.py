# SPDX-License-Identifier: Apache-2.0
"""
Sends the gradients of one model: hooks, micro-batches, and the exception that is raised when the daemon refuses a
gradient.

A parameter's post-accumulate hook pushes its gradient and clears .grad, so every push is an increment. After a
backward, the micro-batch ends at the next forward with gradients enabled, or at the step: until then another backward
belongs to it. A fault is raised when the outermost backward ends, because raising in a hook would cut the backward off
and show one fault of many. Every later backward and step raises the fault again until it is cleared.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from . import _lib, sites, watch
from ._lib import lib
from .binding import Bound
from .client import Client
from .errors import BackwardRuns, Error, GradientFault, StepAborted, WeightsWritten, ZerodWarning
from .evidence import Evidence, entry_modules
from .uncopied import Hook
from .late import Late
from .own import Own
from .placement import InHost, is_large
from .reads import get_grad, grad_in_c, set_grad
from .stage3 import Sharding
from .watch import now

OUTERMOST = 2**32 - 1  # the graph task of an outermost backward in records; nested ones count from 1
MOVED = 2  # in _pushed: the parameter is no longer its published weight, so its size may differ
NO_TASK = -2  # no graph task has this id, so the next hook calls _enter()

_ATTRIBUTES = grad_in_c, torch._C.TensorBase.__dict__["dtype"]
_HAVE_QUICK_HOOKS = all(isinstance(a, types.GetSetDescriptorType) for a in _ATTRIBUTES) and lib.has_python()


def _shared_with_hooks(client: Client, pushed: bytearray, failed: Callable[[], None]) -> _lib.Hooks:
    """The values that hooks share with their Gradients, without keeping the Gradients alive."""
    bytes_of = (ctypes.c_uint8 * len(pushed)).from_buffer(pushed)
    grad, dtype = _ATTRIBUTES
    return _lib.Hooks(
        client=client.handle.value, task=NO_TASK, pushed=ctypes.cast(bytes_of, ctypes.POINTER(ctypes.c_uint8)), none=None,
        runtime_error=RuntimeError, grad=grad, dtype=dtype, current_task=watch.current_task,
        is_contiguous=torch.Tensor.is_contiguous, data_ptr=torch.Tensor.data_ptr, failed=failed,
    )  # fmt: skip


def _note_failure(me: weakref.ref[Gradients]) -> None:
    gradients = me()
    if gradients is not None:
        gradients._push_failed()


def _push_with_care(me: weakref.ref[Gradients], index: int, param: torch.Tensor) -> None:
    """Calls _push(), unless the optimizer no longer exists."""
    gradients = me()
    if gradients is not None:
        gradients._push(index, param)


class Gradients:
    """A watch.Watcher. pack: returns the blob to be committed with a micro-batch, or None. sharding: for stage 3."""

    def __init__(
        self,
        client: Client,
        model: nn.Module,
        bound: Sequence[Bound],
        own: Sequence[Own],
        pack: Callable[[], bytes | None],
        sharding: Sharding | None,
        place: InHost,
        expect: Callable[[], None],
    ) -> None:
        self._client, self._model, self._bound, self._pack, self._sharding = client, model, bound, pack, sharding
        self._expect = expect  # called before each begin of a micro-batch
        self._place = place
        self.evidence = Evidence(model, bound)
        self._late = Late(model, bound, own, self._report_now)
        self._wanted = int.from_bytes(bytes(b.trainable for b in bound), "little")
        self._pushed = bytearray(len(bound))  # the parameters pushed in the open micro-batch: a byte for each
        self._in_step = 0  # pushed in ended micro-batches of this step: a number with a byte for each parameter
        self._n_ended = 0
        self._had = 0  # as _in_step: parameters that have had a gradient since zero_grad() last set .grad to None
        self._zeroed = 0  # those whose .grad would be zeros in torch, because of zero_grad(set_to_none=False)
        self.max_norm: float | None = None  # of a clip_grad_norm_ since the step began
        self._first_clip: tuple[int, str] | None = None  # last backward before the step's first clip; the clip's site
        self._warns_of_clip = True
        self._open = False
        self._blob: bytes | None = None  # user state as the last backward left it
        self._refuses_again = client.job.on_duplicate != _lib.ON_DUPLICATE["accumulate"]
        self._hooks = _shared_with_hooks(client, self._pushed, functools.partial(_note_failure, weakref.ref(self)))
        self._record = self._hooks.push
        self._texts: Any = None  # the objects that own the texts of the record
        self._outer = 0  # number of the last outermost backward in which a hook fired
        self._forward_since = True  # True if a forward has run since the last backward
        self._collided: BackwardRuns | None = None  # another thread began a backward during this backward
        self._sequence = 0  # autograd's count of nodes when the last backward ended
        self._suspect = False  # a push of this backward was refused, or will be
        self._error: BaseException | None = None  # the error of a push, until the backward ends
        self._not_dense: list[int] = []  # parameters whose gradients in this backward were sparse
        self._layout: Any = None  # layout of the last sparse gradient
        self.fault: GradientFault | None = None  # kept until it is cleared
        self._handles: list[Any] = []
        self._install()

    def _install(self) -> None:
        self._handles = [b.param.register_post_accumulate_grad_hook(self._hook(b)) for b in self._bound if b.trainable]
        for module in entry_modules(self._model):
            self._handles.append(module.register_forward_pre_hook(Hook(self._before_forward), prepend=True))
        self._handles.append(self._model.register_forward_hook(Hook(self._after_forward), always_call=True))
        if self._sharding:
            self._sharding.on_fault = self._keep
        watch.add(self, self._model)

    def close(self) -> None:
        watch.remove(self)
        self._late.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.evidence.stop()

    # ---- pushes --------------------------------------------------------------------------------------

    def _hook(self, b: Bound) -> Callable[[torch.Tensor], None]:
        """
        Returns the hook of a parameter, which is the hot path: libzerod's hook handles most pushes alone, and calls
        _push() for all other pushes. No hook keeps the optimizer alive.
        """
        careful = functools.partial(_push_with_care, weakref.ref(self), b.index)
        if not (_HAVE_QUICK_HOOKS and self._place.has_quick_hook and b.n_grad_bytes) or b.order is not None:
            return careful
        hook = _lib.Hook(ctypes.py_object(self._hooks), b.grad_dtype, careful, b.index, is_large(b))
        return lib.python_hook(ctypes.byref(self._hooks), ctypes.byref(hook))

    def _push(self, index: int, param: torch.Tensor) -> None:
        """
        Pushes any gradient, including the first gradient of a graph task, a repeated or sparse gradient, and a gradient
        in another memory order.
        """
        b, grad, task = self._bound[index], get_grad(param), watch.current_task()
        if grad is None:  # torch also calls hooks for undefined gradients
            return
        if task != self._hooks.task:
            self._enter(task)
        if self._pushed[index] and not self._may_push_again(index):
            return
        if grad.layout != torch.strided:
            self._refuse(b, grad)
            return
        if grad.dtype != b.grad_dtype:
            raise TypeError(
                f"{b.name} has a gradient of {grad.dtype}, and was declared with {b.grad_dtype}: "
                "set grad_dtype before zerod.Optimizer(model), and leave it alone"
            )
        if b.order is not None or not grad.is_contiguous():
            grad = b.flatten(grad)
        if self._place.push(b, self._record, grad, self._texts, self._pushed[index] != 0):
            self._push_failed()
        self._pushed[index] = 1
        set_grad(param, None)

    def _may_push_again(self, index: int) -> bool:
        self._suspect |= self._refuses_again or self._pushed[index] == MOVED
        return self._pushed[index] != MOVED

    def _refuse(self, b: Bound, grad: torch.Tensor) -> None:
        """Notes a gradient that is not dense, and drops it. When the backward ends, it is reported (E1102)."""
        self._suspect = True
        self._not_dense.append(b.index)
        self._layout = grad.layout
        b.param.grad = None

    def _report_not_dense(self) -> None:
        indices, self._not_dense = self._not_dense, []
        if indices:
            what = f"a gradient that is {self._layout}, in a backward from {now.site.decode()}"
            self._client.report(1102, indices, what)

    def _enter(self, task: int) -> None:
        """Called by the first hook of a graph task. Fills the record with evidence."""
        record = self._record
        self._hooks.task = task
        if self._outer != now.outer:
            if self._place.drain():  # else the last backward's gradients get this backward's number
                self._push_failed()
            self._outer = now.outer
            self._open = True
            for b in self._moved():
                self._pushed[b.index] = MOVED
            try:
                self._expect()
                self._client.begin_backward(self.evidence.n_forwards, self.evidence.n_backwards)
            except GradientFault as fault:  # E1106: the backward runs to its end, and the micro-batch is dropped
                self._suspect, self._error = True, fault
        flags = _lib.PUSH_MORE | (_lib.PUSH_NEW_FORWARD if self._forward_since else 0)
        if now.passes:
            segment = now.segments[-1]
            record.task, record.depth, record.flags = now.passes[-1], len(now.passes), flags | _lib.PUSH_NESTED
            record.segment, record.call, record.site = segment.name, segment.call, segment.site
            self._texts = segment.name, segment.site
        else:
            record.task, record.depth, record.flags = OUTERMOST, 0, flags | _lib.PUSH_SITE_IS_BACKWARD
            record.segment, record.call, record.site = None, 0, now.site
            self._texts = now.site

    def _push_failed(self) -> None:
        """Notes why a push failed: no slot (E1401), an abort, a lost connection. The error is raised when the backward
        ends."""
        self._suspect = True
        if self._error is None:
            try:
                self._client.check(lib.error(self._client.handle).contents.status)
            except BaseException as e:
                self._error = e

    def report_left_out(self, indices: list[int]) -> None:
        """Reports gradients of parameters that are in no group (E1103)."""
        if indices and self.fault is None:
            self._client.report(1103, indices, f"a gradient in the step called at {sites.user_site().decode()}")

    def push_frozen(self, index: int) -> None:
        """Pushes a gradient of a parameter declared as frozen, so that the daemon's next answer refuses it (E1103)."""
        self._record.param, self._record.data = index, None
        self._client.check(lib.push(self._client.handle, ctypes.byref(self._record)))

    # ---- forwards ------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        if now.inside or not torch.is_grad_enabled():
            return
        if module is self._model or not self._forward_since:
            self._check_weights(module)
        self._forward_since = True
        if module is self._model:
            self.evidence.n_forwards += 1
        if self._open:
            self.end_micro_batch()

    def _after_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Runs after a failed forward, too, which has no output. In an except block every forward sees an error."""
        error = sys.exc_info()[1]
        if error is not None and output is None and not now.inside and torch.is_grad_enabled():
            self.evidence.failure = watch.failure(error, in_forward=True)

    # ---- backwards: events of watch ------------------------------------------------------------------

    def _check_weights(self, module: nn.Module) -> None:
        """
        Raises E1106 if the program has written to published weights. A forward of a module in evaluation or without
        trainable parameters is not checked: a program may merge its adapters and then use the model.
        """
        if self._client.has_written and module.training and any(param.requires_grad for param in module.parameters()):
            self.answered(self._client.check_weights)

    def backward_begins(self, roots: Any) -> None:
        self._hooks.task = NO_TASK
        self.evidence.n_backwards += 1
        if self._open and not self._forward_since and watch.newer_than(roots, self._sequence):
            # No watched module saw a forward, but the graph is newer than the last backward, so another forward has
            # run.
            self._forward_since = True
            self.end_micro_batch()
        if self._sharding:
            self._sharding.backward_begins()

    def second_backward(self, sites: str) -> None:
        self._collided = BackwardRuns(
            f"two backwards run at the same time, {sites}, and their gradients cannot be told apart\n"
            "  fix            one backward at a time: a lock around forward and backward, or (loss_a + loss_b).backward()\n"
            "  state          both are given up: neither's gradients count"
        )
        raise self._collided

    def backward_ends(self, error: BaseException | None) -> None:
        collided, self._collided = self._collided, None
        if error is None and collided is not None:
            self._abandon(watch.failure(collided, in_forward=False))
            raise collided
        involved = self._outer == now.outer
        self._hooks.task = NO_TASK
        self._sequence = watch.sequence_number()
        if self._sharding:
            self._sharding.backward_ended()
        if error is not None:
            self._abandon(watch.failure(error, in_forward=False))
            return
        if involved:
            self._forward_since = False
            self.evidence.failure = None
            # The user state is packed now, and not when the micro-batch ends, because the program draws its next batch
            # before the next forward, and a successor that begins there has to draw the same batch.
            self._blob = self._pack()
            if self._place.backward_ended():
                self._push_failed()
            self._client.flush()
        if self._suspect:
            self._raise_refusal()
        self._raise_fault()
        if involved:
            self._late.check()

    def _raise_fault(self) -> None:
        """Raises this rank's fault at every call until it is cleared. An abort is raised only once, because its step is
        over."""
        fault = self.fault
        if isinstance(fault, StepAborted):
            self.fault = None
        if fault is not None:
            raise fault

    def _abandon(self, failure: watch.Failure) -> None:
        """An exception left the backward, so its pushes are dropped (E1007). The next call raises an abort."""
        self.evidence.failure = failure
        self._suspect, self._error, self._not_dense = False, None, []
        if self._open and self.fault is None:
            self._forget_micro_batch()
            try:
                caught = f", caught by {failure.swallowed_by}" if failure.swallowed_by else ""
                self._client.abandon_backward(f"{failure.text}, raised at {failure.raised_at}{caught}")
            except GradientFault as fault:
                self._keep(fault)
                self.fault = fault
            except Error:
                pass  # the next call raises it

    def _raise_refusal(self) -> None:
        """Raises the refusal of a push, which any answered call returns. If no push was refused, ends the
        micro-batch."""
        error, self._error, self._suspect = self._error, None, False
        self.report_storage()
        self._report_not_dense()
        if error is not None:
            if isinstance(error, WeightsWritten):
                self._forget_micro_batch()
            if isinstance(error, GradientFault):
                self._keep(error)
            raise error
        self.end_micro_batch()

    def _keep(self, fault: GradientFault) -> None:
        if isinstance(fault, StepAborted):
            self.forget_step()
        else:
            self.fault = fault

    # ---- micro-batches and steps ---------------------------------------------------------------------

    def answered(self, call: Callable[[], Any]) -> Any:
        """Makes a call that the daemon may refuse, and keeps the fault."""
        try:
            return call()
        except GradientFault as fault:
            self._keep(fault)
            raise

    def end_micro_batch(self) -> None:
        if self._place.drain():
            self._push_failed()
            self._suspect, error, self._error = False, self._error, None
            if isinstance(error, GradientFault):
                self._keep(error)
            raise error
        self.answered(lambda: self._client.end_backward(self._blob))
        self._in_step |= int.from_bytes(self._pushed, "little")
        self._n_ended += 1
        self._forget_micro_batch()

    def check_alone(self) -> None:
        if watch.runs_elsewhere():
            raise BackwardRuns(
                f"called at {sites.user_site().decode()} while the backward of {now.site.decode()} runs in another thread\n"
                "  fix            wait for that thread first: its gradients belong to the step\n"
                "  state          nothing was done"
            )

    def flush(self) -> None:
        """Ends the open micro-batch. Raises the fault of this rank, if it has one."""
        self.check_alone()
        self._raise_fault()
        if self._error is not None or self._suspect:
            self._raise_refusal()
        if self._open:
            self.end_micro_batch()

    def finish(self) -> None:
        """Called before the step is requested: ends the micro-batch, and sends evidence of missing parameters."""
        if self._sharding:
            self._sharding.reset()
        self.answered(self._client.check_weights)
        self.flush()
        self._late.check()
        self.report_storage()
        left = self._wanted & ~self._in_step
        if left:
            missing = [i for i, byte in enumerate(left.to_bytes(len(self._bound), "little")) if byte]
            evidence = self.evidence.of(missing)
            if evidence is not None:
                self._client.evidence(evidence)

    def _moved(self) -> list[Bound]:
        return [b for b in self._bound if b.param.data_ptr() != b.address and b.n_bytes]

    def report_storage(self) -> None:
        """Reports E1104 if a parameter is no longer the published weight; the next answered call raises it."""
        moved = self._moved()
        if moved:
            what = f"{moved[0].name} is {moved[0].param.dtype} on {moved[0].param.device} in memory of its own"
            self._client.report(1104, [b.index for b in moved], f"{what}, seen at {sites.user_site().decode()}")

    def _report_now(self, code: int, indices: list[int], what: str) -> None:
        """Reports a fault that this process found, and raises it. The fault stays until it is cleared."""
        self._client.report(code, indices, f"{what}, seen at {sites.user_site().decode()}")
        self.answered(lambda: self._client.read_number(indices[0], _lib.GRAD_NORM))

    def drop(self, why: str) -> None:
        """Drops this rank's pushes before the step. If some pushes are already in the sums, aborts the step for all
        ranks."""
        if self.fault is not None:
            return  # the fault stays until it is cleared
        self._forget_clip()
        if self._n_ended:
            self._client.abort_step(why)
            self.forget_step()
        elif self._open:
            self._forget_micro_batch()
            try:
                self.answered(lambda: self._client.abandon_backward(why))
            except StepAborted:
                pass  # some pushes were in the sums, so the other ranks get the abort; this rank asked for it

    def was_pushed(self, index: int) -> bool:
        """True if the parameter has been pushed for the open step."""
        return self._pushed[index] != 0 or self._in_step >> 8 * index & 0xFF != 0

    @property
    def has_any(self) -> bool:
        return self._open or self._n_ended > 0

    def _forget_micro_batch(self) -> None:
        self._place.forget()
        self._open = False
        self._pushed[:] = bytes(len(self._pushed))

    def clip(self, max_norm: float) -> None:
        """Makes the step clip by this norm, unless its gradients are dropped."""
        self.max_norm = max_norm
        if self._first_clip is None:
            self._first_clip = self._outer, sites.user_site().decode()

    def check_clip(self) -> None:
        """Warns once about gradients after the first clip of the step: torch does not clip them, or clips earlier ones
        twice."""
        if self._first_clip is None or self._first_clip[0] == self._outer or not self._warns_of_clip:
            return
        self._warns_of_clip = False
        warnings.warn(
            f"clip_grad_norm_ at {self._first_clip[1]} came before the last backward of its step: torch clips the gradients that "
            "are there, zerod all gradients of the step, once. Call it after the last backward",
            ZerodWarning,
            stacklevel=2,
        )

    def _forget_clip(self) -> None:
        self.max_norm = self._first_clip = None

    def note_zero_grad(self, indices: Iterable[int] | None, set_to_none: bool) -> None:
        """Notes that the program calls zero_grad() for these parameters; None: for all parameters."""
        if not self._had:
            return
        mask = self._wanted if indices is None else sum(1 << 8 * i for i in indices) & self._wanted
        if set_to_none:
            self._had &= ~mask
            self._zeroed &= ~mask
        else:
            self._zeroed |= self._had & mask

    def of_zeros(self) -> list[Bound]:
        """The parameters whose gradients are zeros in torch: momentum and weight decay still change them."""
        left = self._zeroed & ~self._in_step & ~int.from_bytes(self._pushed, "little")
        return [b for b in self._bound if left >> 8 * b.index & 0xFF] if left else []

    def forget_step(self) -> None:
        self._had |= self._in_step
        self._forget_clip()
        self._forget_micro_batch()
        self._in_step = self._n_ended = 0
        self._suspect, self._error, self._not_dense, self.fault = False, None, [], None
        self.evidence.step_ended()
