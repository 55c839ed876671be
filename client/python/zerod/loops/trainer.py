# SPDX-License-Identifier: Apache-2.0
"""
Hugging Face's Trainer and its subclasses: the optimizer that their arguments ask for, and training that continues in a
process that was started again. This module imports transformers only when it is used.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ZerodWarning
from ..optimizer import HYPERS, Optimizer
from .progress import Progress, group_is_done, loop_ends

if TYPE_CHECKING:
    import transformers

# ---- the optimizer of its arguments ---------------------------------------------------------------------


# transformers' names of optimizers that take the step of AdamW or Lion: bitsandbytes', in paged memory, with 8-bit
# moments.
_SAME_STEP = {
    "adamw_8bit": "AdamW", "adamw_bnb_8bit": "AdamW", "paged_adamw_8bit": "AdamW", "paged_adamw": "AdamW",
    "paged_adamw_32bit": "AdamW", "adamw_torch_8bit": "AdamW", "lion_32bit": "Lion", "lion_8bit": "Lion",
    "paged_lion_32bit": "Lion", "paged_lion_8bit": "Lion",
}  # fmt: skip


def _same_step(args: transformers.TrainingArguments) -> dict[str, Any] | None:
    """The type and hyperparameters for a name in _SAME_STEP; None for another name, which transformers must look up."""
    name = str(getattr(args.optim, "value", args.optim))
    kind = _SAME_STEP.get(name)
    if kind is None:
        return None
    if name.endswith("8bit") and args.process_index == 0:
        warnings.warn(
            f"optim={name!r}: zerod computes {kind}'s step, and keeps its moments as the daemon is configured. "
            "optimizer: {params: {optim_bits: 8}} in the daemon's configuration keeps them in 8 bits",
            ZerodWarning,
            stacklevel=2,
        )
    hypers = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "weight_decay": 0.0}
    return {"type": kind, **hypers} | ({"eps": args.adam_epsilon} if kind == "AdamW" else {})


def _hypers(kind: type, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Type and hyperparameters of torch's optimizer. Unset hyperparameters have torch's defaults: the daemon's may
    differ."""
    names = HYPERS.get(kind.__name__)
    if names is None or kind.__name__ == "Muon" or not kind.__module__.startswith("torch.optim"):
        raise ValueError(
            f"these TrainingArguments ask for {kind.__module__}.{kind.__name__}: zerod has AdamW, Lion, SGD and Adagrad for a "
            'Trainer: optim="adamw_torch", "lion_32bit", "sgd" or "adagrad"'
        )
    parameters = inspect.signature(kind).parameters
    return {"type": kind.__name__, **{name: kwargs.get(name, parameters[name].default) for name in names}}


def _of_own_type(hypers: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The arguments for zerod.Optimizer. If own names another type, only that type's hyperparameters are kept."""
    names = ("type", *HYPERS.get(own.get("type", hypers["type"]), hypers))
    return {name: value for name, value in hypers.items() if name in names} | own


def _module_of(trainer: Any, groups: list[dict[str, Any]]) -> nn.Module:
    """Returns the model, or the loss around it if the loss has parameters of its own, as some of sentence-transformers
    have."""
    known = {id(param) for param in trainer.model.parameters()}
    if all(id(param) in known for group in groups for param in group["params"]):
        return trainer.model
    loss = trainer.loss
    return nn.ModuleDict(loss) if isinstance(loss, dict) else loss


def _unknown(what: str) -> TypeError:
    """The error for a Trainer that calls its methods in another way than the Trainers with which zerod was tested."""
    import transformers

    return TypeError(
        f"zerod cannot make the optimizer of the Trainer of transformers {transformers.__version__}, which {what}: install "
        "a version that docs/compatibility.md names, or return a zerod.Optimizer from your Trainer's create_optimizer()"
    )


def _class_of(trainer: Any, hypers: dict[str, Any]) -> type:
    """
    The class that the Trainer calls with its groups, to get its optimizer. It is derived from torch's Optimizer,
    because newer versions of transformers call any other object without groups, to get a second function.
    """

    class ForTrainer(torch.optim.Optimizer):
        def __new__(cls, *given: Any, **_: Any) -> Any:
            """Returns a zerod.Optimizer, which is not of this class, so __init__() is not called."""
            if len(given) != 1 or not isinstance(given[0], list):
                names = ", ".join(type(value).__name__ for value in given) or "nothing"
                raise _unknown(f"gives an optimizer {names} where zerod expects a list of parameter groups")
            groups = [group for group in given[0] if group["params"]]
            return Optimizer(groups, model=_module_of(trainer, groups), **hypers)

    return ForTrainer


def _choose(trainer: Any, own: dict[str, Any], ask: Callable[..., Any], *given: Any, **named: Any) -> tuple[type, dict[str, Any]]:
    """Replaces a Trainer's get_optimizer_cls_and_kwargs()."""
    same = _same_step(trainer.args)
    if same is not None:
        return _class_of(trainer, _of_own_type(same, own)), {}
    kind, kwargs = ask(*given, **named)
    hypers = _of_own_type(_hypers(kind, kwargs), own)
    # Under these names a subclass of Trainer passes its own groups.
    return _class_of(trainer, hypers), {name: kwargs[name] for name in ("params", "model", "optimizer_dict") if name in kwargs}


def create(trainer: Any, own: dict[str, Any], make: Callable[[], Any] | None = None) -> Optimizer:
    """Has the trainer, or make(), create its optimizer. own: arguments that override those of the TrainingArguments."""
    ask = getattr(trainer, "get_optimizer_cls_and_kwargs", None)
    if ask is None:
        raise _unknown("has no get_optimizer_cls_and_kwargs()")
    trainer.get_optimizer_cls_and_kwargs = functools.partial(_choose, trainer, own, ask)
    try:
        optimizer = (make or trainer.create_optimizer)()
    finally:
        del trainer.get_optimizer_cls_and_kwargs
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"create_optimizer() of {type(trainer).__name__} makes a {type(optimizer).__name__} of its own: "
            "give it optimizers=(zerod.for_trainer(model, args), None), or return that from create_optimizer()"
        )
    return optimizer


def for_trainer(
    model: nn.Module | transformers.Trainer, args: transformers.TrainingArguments | None = None, **more: Any
) -> Optimizer:
    """
    The optimizer that a Trainer would make for these arguments: their learning rate, betas, eps and weight decay, in a
    Trainer's two groups (no decay on biases and norms).

        trainer = Trainer(model=model, args=args, optimizers=(zerod.for_trainer(model, args), None), ...)

    If a trainer makes its model itself, as SFTTrainer does for peft_config, pass the trainer instead of model and args,
    before train(); the trainer gets the optimizer.

    more: further arguments of zerod.Optimizer, which override those of args.
    """
    if not isinstance(model, nn.Module):
        if args is not None or not hasattr(model, "create_optimizer"):
            raise TypeError("zerod.for_trainer() takes a model and TrainingArguments, or a Trainer")
        if model.optimizer is not None or getattr(model, "optimizer_cls_and_kwargs", None) is not None:
            raise ValueError(
                "this trainer has an optimizer already: make it without optimizers= and without "
                "optimizer_cls_and_kwargs="
            )
        return create(model, more)
    if args is None:
        raise TypeError("zerod.for_trainer(model, args): the TrainingArguments are missing")
    from transformers import Trainer

    trainer = object.__new__(Trainer)  # for its create_optimizer(), which needs no more than this
    trainer.model = trainer.model_wrapped = model
    trainer.args, trainer.optimizer, trainer.optimizer_cls_and_kwargs = args, None, None
    try:
        return create(trainer, more)
    except AttributeError as e:
        if e.obj is not trainer:
            raise
        raise _unknown(f"needs {e.name} of a Trainer to make an optimizer") from e


# ---- continuing -----------------------------------------------------------------------------------------


def _optimizer_of(trainer: Any) -> Optimizer:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate wraps it
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "this trainer has no zerod.Optimizer: optimizers=(zerod.for_trainer(model, args), None), or "
            "zerod.for_trainer(trainer) before this"
        )
    return optimizer


def _state_of(trainer: weakref.ref[Any]) -> dict[str, Any]:
    state = dataclasses.asdict(trainer().state)
    return {name: value for name, value in state.items() if name != "log_history"}  # it grows without end


def checkpoint_callback(opt: Optimizer | None = None) -> transformers.TrainerCallback:
    """
    A callback with which the daemon writes a Trainer's checkpoints: zerod.integrations.transformers.DaemonCheckpoint.

        trainer.add_callback(zerod.checkpoint_callback())
    """
    from ..integrations.transformers import DaemonCheckpoint

    return DaemonCheckpoint(opt)


def metrics_callback(
    trainer: transformers.Trainer, names: Iterable[str] | None = None, prefix: str = "zerod/"
) -> transformers.TrainerCallback:
    """
    A callback that puts the figures of Optimizer.metrics() into a Trainer's log, next to the loss:
    zerod.integrations.transformers.ZerodMetrics.

        trainer.add_callback(zerod.metrics_callback(trainer))
    """
    from ..integrations.transformers import ZerodMetrics

    return ZerodMetrics(trainer, names, prefix)


def observe_callback(trainer: transformers.Trainer) -> transformers.TrainerCallback:
    """
    A callback with which zerod.observe() watches the model of a Trainer that trains under DDP, without a daemon: the
    Trainer wraps the model only when it trains.

        trainer.add_callback(zerod.observe_callback(trainer))
    """
    from ..integrations.transformers import Observe

    return Observe(trainer)


@functools.cache
def _callback() -> type:
    from transformers import TrainerCallback

    class ZerodResume(TrainerCallback):
        """Stores the data that resume() needs in the next process."""

        def __init__(self, progress: Progress, folder: Any) -> None:
            self._progress, self._folder = progress, folder  # the folder is removed with its last reference

        def on_train_begin(self, _args: Any, _state: Any, _control: Any, lr_scheduler: Any = None, **_: Any) -> None:
            self._progress.restore(lr_scheduler)

        def on_epoch_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            if control.should_training_stop or state.global_step >= state.max_steps:
                loop_ends()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            group_is_done()

    return ZerodResume


def _write_checkpoint(folder: Path, trainer: Any, progress: Progress) -> None:
    """Writes the files from which a Trainer continues, except weights and optimizer state, which the daemon has."""
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import TrainerState

    step, args = progress.opt.epoch, trainer.args  # the trainer has not trained yet
    if progress.more is not None:
        state = TrainerState(**progress.more)
        state.global_step += step - progress.kept["step"]  # not the daemon's count if a checkpoint was loaded before
    else:
        state = TrainerState(global_step=step, train_batch_size=args.train_batch_size)
        state.compute_steps(args, args.max_steps)
    state.save_to_json(str(folder / TRAINER_STATE_NAME))
    if progress.generators is not None:
        name = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
        torch.save(progress.generators, folder / name)


def resume(trainer: transformers.Trainer) -> str | None:
    """
    Makes a Trainer continue at the job's step, in a process that was started again:

        trainer.train(resume_from_checkpoint=zerod.resume(trainer))

    Return: the folder of a checkpoint for train(), without weights, or None if the job has no step yet. The trainer
    then skips the data of the committed steps, and continues with its counters, its schedule and the random number
    generators; an unfinished step begins again. The log of earlier steps is lost. All ranks are started again together,
    because when one rank ends, the others end as well. A collective: all ranks call it.
    """
    opt = _optimizer_of(trainer)
    # A Trainer counts the tokens of all ranks in each step.
    progress = Progress(opt, functools.partial(_state_of, weakref.ref(trainer)), needs_all=True)
    step = progress.resume()
    folder = tempfile.TemporaryDirectory(prefix="zerod-resume-", ignore_cleanup_errors=True) if step else None
    trainer.remove_callback(_callback())
    trainer.add_callback(_callback()(progress, folder))
    if folder is None:
        return None
    _write_checkpoint(Path(folder.name), trainer, progress)
    load = trainer._load_from_checkpoint

    def load_unless_ours(resume_from_checkpoint: str, *more: Any, **named: Any) -> None:
        if resume_from_checkpoint != folder.name:
            load(resume_from_checkpoint, *more, **named)

    trainer._load_from_checkpoint = load_unless_ours
    return folder.name
