# SPDX-License-Identifier: Apache-2.0
"""
Hugging Face's Trainer and its subclasses: the optimizer that their arguments ask for. transformers is imported here when
it is used, not before.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from .optimizer import HYPERS, Optimizer

if TYPE_CHECKING:
    import transformers


def _hypers(kind: type, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All that torch's optimizer has, its defaults where the Trainer says nothing: the daemon's may be others."""
    names = HYPERS.get(kind.__name__)
    if names is None or not kind.__module__.startswith("torch.optim"):
        raise ValueError(
            f"these TrainingArguments ask for {kind.__module__}.{kind.__name__}: zerod has torch's AdamW, SGD and "
            'Adagrad for a Trainer (optim="adamw_torch", "sgd" or "adagrad")'
        )
    parameters = inspect.signature(kind).parameters
    return {name: kwargs.get(name, parameters[name].default) for name in names}


def _choose(trainer: Any, own: dict[str, Any], args: Any, model: nn.Module | None = None) -> tuple[Any, dict[str, Any]]:
    """In the place of get_optimizer_cls_and_kwargs: what is returned is called with the groups that it has made."""
    kind, kwargs = type(trainer).get_optimizer_cls_and_kwargs(args, model)
    hypers = {"type": kind.__name__, **_hypers(kind, kwargs), **own}

    def make(groups: list[dict[str, Any]], **_: Any) -> Optimizer:
        return Optimizer([group for group in groups if group["params"]], model=trainer.model, **hypers)

    return make, {}


def _create(trainer: Any, own: dict[str, Any]) -> Optimizer:
    trainer.get_optimizer_cls_and_kwargs = functools.partial(_choose, trainer, own)
    try:
        optimizer = trainer.create_optimizer()
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
    The optimizer that a Trainer would make for these arguments: their learning rate, betas, eps and weight decay, in
    its two groups (no decay on biases and norms).

        trainer = Trainer(model=model, args=args, optimizers=(zerod.for_trainer(model, args), None), ...)

    A trainer that makes its model itself, as SFTTrainer does for peft_config, is given instead of model and args,
    before train(); the optimizer is put into it.

    more: further arguments of zerod.Optimizer; they win over those of args.
    """
    if not isinstance(model, nn.Module):
        if args is not None or not hasattr(model, "create_optimizer"):
            raise TypeError("zerod.for_trainer() takes a model and TrainingArguments, or a Trainer")
        if model.optimizer is not None or getattr(model, "optimizer_cls_and_kwargs", None) is not None:
            raise ValueError(
                "this trainer has an optimizer already: make it without optimizers= and without "
                "optimizer_cls_and_kwargs="
            )
        return _create(model, more)
    if args is None:
        raise TypeError("zerod.for_trainer(model, args): the TrainingArguments are missing")
    from transformers import Trainer

    trainer = object.__new__(Trainer)  # for its create_optimizer(), which needs no more than this
    trainer.model = trainer.model_wrapped = model
    trainer.args, trainer.optimizer, trainer.optimizer_cls_and_kwargs = args, None, None
    return _create(trainer, more)
