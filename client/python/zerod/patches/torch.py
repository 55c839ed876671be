# SPDX-License-Identifier: Apache-2.0
"""
Patches of torch itself: what each function would do without its patch, and what it does.

    clip_grad_norm_      would find cleared gradients and clip nothing: clips in the daemon
    clip_grad_value_     is not possible: raises
    GradScaler           would find no gradients to check: sends the scale to the daemon, and gets its verdict back
    Module.zero_grad     is called by many trainers instead of the optimizer's
    Module.to            would copy from host memory to host memory
    load_state_dict      writes into published weights: happens inside a write window
    dcp.load             the same, if a state_dict has published weights
    _sync_module_states  broadcasts a module's state, as Lightning does before it validates: only its buffers

A step of another optimizer that has parameters of zerod's gets a warning: it finds no gradients.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import compiled, sites
from ..errors import ZerodWarning
from ..registry import OpenOptimizer, open_optimizers, owners_of, with_gradients
from ..uncopied import Hook

# ---- clipping -------------------------------------------------------------------------------------------


def _clip(parameters: list[torch.Tensor], max_norm: float, total_norm: torch.Tensor, how: dict[str, Any]) -> bool:
    """Clips in the daemon; how: further arguments of clip_grad_norm_. Returns False for parameters of no optimizer."""
    owners = owners_of(parameters)
    if not owners:
        return False
    if len(owners) > 1 or len({id(p) for p in parameters}) < owners[0].n_trainable:
        raise ValueError(
            "clip_grad_norm_ of some of the parameters: zerod clips by the norm of all of a job's gradients; "
            "pass model.parameters(), or set gradient_clipping in the daemon's configuration"
        )
    total_norm.fill_(owners[0].clip_grad_norm_(max_norm, **how))  # computed from cleared gradients, it is 0 so far
    return True


def _wrap_clipping() -> None:
    clip, value, norm = clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_, clip_grad._get_total_norm
    asked: dict[str, Any] = {}  # arguments of the running clip_grad_norm_

    @functools.wraps(norm)
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None
    ) -> Any:
        asked.update(norm_type=norm_type, error_if_nonfinite=error_if_nonfinite)
        return norm(tensors, norm_type, error_if_nonfinite, foreach)

    @functools.wraps(clip)
    def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: Any = None) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        how = dict(asked)
        asked.clear()
        if not _clip(parameters, max_norm, total_norm, how):
            clip(parameters, max_norm, total_norm, foreach)

    @functools.wraps(value)
    def clip_grad_value_(parameters: Any, clip_value: float, foreach: Any = None) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if owners_of(parameters):
            raise ValueError("clip_grad_value_: the gradients are in zerod already; it clips by norm, clip_grad_norm_")
        value(parameters, clip_value, foreach)

    # clip_grad_norm_ looks these up when it is called, so that earlier imports of clip_grad_norm_ are covered.
    clip_grad._get_total_norm = get_total_norm
    clip_grad._clip_grads_with_norm_ = clip_grads_with_norm_
    clip_grad.clip_grad_value_ = nn.utils.clip_grad_value_ = clip_grad_value_


# ---- GradScaler -----------------------------------------------------------------------------------------


def _wrap_scaler() -> None:
    unscale = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def unscale_grads_(scaler: Any, optimizer: Any, inv_scale: Any, found_inf: torch.Tensor, allow_fp16: bool) -> Any:
        real = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        if not hasattr(real, "take_scale"):
            return unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        real.take_scale(scaler.get_scale(), found_inf)
        return {found_inf.device: found_inf}

    torch.amp.GradScaler._unscale_grads_ = unscale_grads_


# ---- other optimizers -----------------------------------------------------------------------------------

_examined: weakref.WeakSet[Any] = weakref.WeakSet()  # the optimizers that have stepped since the last attach


def _examine(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """Runs before the first step of any torch optimizer. An optimizer that holds zerod's is a wrapper, and calls
    zerod's step()."""
    if optimizer in _examined or optimizer in open_optimizers:
        return
    _examined.add(optimizer)
    ids = frozenset().union(*(opt.param_ids for opt in open_optimizers))
    shared = [p for group in optimizer.param_groups for p in group["params"] if id(p) in ids and p.requires_grad]
    is_wrapper = any(isinstance(v, torch.optim.Optimizer) and v in open_optimizers for v in vars(optimizer).values())
    if not shared or is_wrapper:
        return
    names = [compiled.plain(name) for opt in owners_of(shared) for name, p in opt.model.named_parameters() if any(p is q for q in shared[:3])]
    more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
    warnings.warn(
        f"{type(optimizer).__name__}.step() at {sites.user_site().decode()} does nothing for {', '.join(names)}{more}: "
        "zerod.Optimizer trains these parameters, and their gradients are in the daemon. Leave that optimizer out, or give it "
        "other parameters; for two optimizers of zerod's, each has a model and a daemon of its own",
        ZerodWarning,
        stacklevel=2,
    )


# ---- modules --------------------------------------------------------------------------------------------


def _wrap_zero_grad() -> None:
    zero_grad = nn.Module.zero_grad

    @functools.wraps(zero_grad)
    def watched(self: nn.Module, set_to_none: bool = True) -> None:
        for owner in with_gradients(self.parameters()):
            owner.zero_grad(set_to_none)
        for owner in owners_of(self.parameters()):
            owner.note_zero_grad(self.parameters(), set_to_none)
        zero_grad(self, set_to_none)

    nn.Module.zero_grad = watched


def _wrap_to() -> None:
    to = nn.Module.to

    @functools.wraps(to)
    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        owners = owners_of(self.parameters())
        # torch copies from "cpu" to "cpu:0", where accelerate puts models, but zerod trains only the original.
        stays = device is not None and device.type == "cpu" and dtype is None and memory_format is None
        stays = stays and all(owner.device is None for owner in owners)
        return self if owners and stays else to(self, *args, **kwargs)

    nn.Module.to = watched


def _wrap_sync_of_modules() -> None:
    """Broadcasts buffers only, because published weights are equal on all ranks and cannot be written to."""
    sync = torch.distributed.utils._sync_module_states

    @functools.wraps(sync)
    def watched(
        module: nn.Module,
        process_group: Any,
        broadcast_bucket_size: int,
        src: int,
        params_and_buffers_to_ignore: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        ids = frozenset().union(*(opt.param_ids for opt in open_optimizers))
        ours = {name for name, param in module.named_parameters() if id(param) in ids}
        ignored = ours.union(params_and_buffers_to_ignore)
        return sync(module, process_group, broadcast_bucket_size, src, ignored, *args, **kwargs)

    torch.distributed.utils._sync_module_states = watched


class _LoadGuard:
    """
    A write window around load_state_dict() of the model or of a part of it. The outermost module that is loaded opens
    the window. Every rank must load, as in any distributed program.
    """

    def __init__(self, opt: OpenOptimizer) -> None:
        self._opt = opt
        self._outermost: nn.Module | None = None

    def before(self, module: nn.Module, _state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            whose = compiled.plain(prefix.removesuffix(".")) or "the model"
            what = f"load_state_dict(assign=True) would replace the parameters of {whose}"
            self._opt.refuse(1104, what, module.parameters())
        if self._outermost is None and not self._opt.is_writable:
            self._opt.open_window()
            self._outermost = module

    def after(self, module: nn.Module, *_: Any) -> None:
        if self._outermost is module:
            self._outermost = None
            self._opt.close_window()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a state_dict, which may be nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


@functools.cache
def _wrap_dcp(loader: Any) -> None:
    load = loader._load_state_dict

    @functools.wraps(load)
    def watched(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        places = {tensor.data_ptr() for tensor in _tensors(state_dict) if tensor.numel()}
        with contextlib.ExitStack() as windows:
            for opt in list(open_optimizers):
                if any(b.address in places for b in opt._bound if b.n_bytes):
                    windows.enter_context(opt.window())
            return load(state_dict, *args, **kwargs)

    loader._load_state_dict = watched


def _wrap_dcp_if_there(*_: Any) -> None:
    """Does not import DCP, which takes seconds: a program with DCP has imported it before it makes the state_dict."""
    loader = sys.modules.get("torch.distributed.checkpoint.state_dict_loader")
    if loader is not None:
        _wrap_dcp(loader)


# ---- installing them -----------------------------------------------------------------------------------


def guard_loads(opt: OpenOptimizer) -> list[Any]:
    """Guards the model against load_state_dict(). Returns handles to be removed."""
    guard, handles = _LoadGuard(opt), [opt.model.register_state_dict_pre_hook(Hook(_wrap_dcp_if_there))]
    for module in opt.model.modules():
        handles.append(module.register_load_state_dict_pre_hook(Hook(guard.before)))
        handles.append(module.register_load_state_dict_post_hook(Hook(guard.after)))
    return handles


def install() -> None:
    """Called at every attach, when an optimizer that has been examined may share parameters with the new one."""
    _examined.clear()
    _install()


@functools.cache
def _install() -> None:
    _wrap_clipping()
    register_optimizer_step_pre_hook(_examine)
    _wrap_scaler()
    _wrap_zero_grad()
    _wrap_to()
    _wrap_sync_of_modules()
