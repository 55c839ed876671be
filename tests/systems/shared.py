# SPDX-License-Identifier: Apache-2.0
"""
What the programs of the systems table share. Each is one process of one run:

    case1_gliner.py --side SIDE --variant VARIANT --folder FOLDER ...

    side       ddp        torch's DistributedDataParallel over gloo, as the reporter had it; started by torchrun
               observe    the same under zerod.observe()
               deepspeed  DeepSpeed instead (case 5); started by torchrun
               zerod      zerod.Optimizer, without DDP; started by zerodrun
               reference  one process, torch's optimizer, the batches that the ranks of a run in FOLDER recorded
    variant    the fault, or one of its repairs; each program lists its own

A rank writes into FOLDER what came of it (rank0.json), the batches that it trained on (rank0-batches.pt) and its
parameters at the end (rank0-params.pt); the reference writes reference.pt. run.py starts the ranks and compares.
Models are tiny, made in memory from a fixed seed, and nothing is fetched from anywhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

LR, WEIGHT_DECAY = 1e-3, 0.01
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
           "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}  # fmt: skip
# What makes Hugging Face, fastNLP and swift believe that they are one of several, and wrap the model in DDP.
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Run:
    """One process of one run: its arguments, and the place of its results."""

    def __init__(self, variants: Iterable[str], description: str) -> None:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--side", choices=("ddp", "observe", "deepspeed", "zerod", "reference"), required=True)
        parser.add_argument("--variant", choices=tuple(variants), required=True)
        parser.add_argument("--folder", type=Path, required=True, help="where the results go")
        parser.add_argument("--steps", type=int, default=6)
        parser.add_argument("--world", type=int, default=2, help="ranks of the run, for the reference")
        parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3), help="of ZeRO")
        parser.add_argument("--optimizer", default="AdamW", choices=("AdamW", "SGD"))
        parser.add_argument("--on-duplicate", choices=("reject", "accumulate"), help="the policy of zerod.Optimizer")
        parser.add_argument("--bucket", type=float, default=5e8, help="reduce_bucket_size of DeepSpeed")
        options = parser.parse_args()
        self.__dict__.update(vars(options))
        self.rank = int(os.environ.get("RANK", "0"))
        self.distributed = self.side in ("ddp", "observe", "deepspeed")
        if not self.distributed:
            for name in TORCHRUN:
                os.environ.pop(name, None)
        os.environ.update(OFFLINE)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.batches: list[Any] = []
        self.losses: list[float] = []
        self.trained: torch.nn.Module | None = None  # the module that the package wraps during the run, as with LoRA
        self.gathered: dict[str, Any] | None = None  # for parameters that are not in the model at the end

    side: str
    variant: str
    folder: Path
    steps: int
    world: int
    stage: int
    optimizer: str
    on_duplicate: str | None
    bucket: float

    def recorded(self, collate: Callable[..., Any]) -> Callable[..., Any]:
        """Return: collate, which also stores its results: the reference trains on exactly these batches."""

        def keep(*args: Any, **kwargs: Any) -> Any:
            batch = collate(*args, **kwargs)
            self.batches.append(copy_of(batch))
            return batch

        return keep

    def attach(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return: zerod.Optimizer. The daemon's configuration has the hyperparameters of torch_optimizer()."""
        import zerod

        self.attached = zerod.Optimizer(model, rank=self.rank, on_duplicate=self.on_duplicate, timeout=120.0)
        return self.attached

    def torch_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        params = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer == "SGD":
            return torch.optim.SGD(params, lr=LR)
        return torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY)

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return self.attach(model) if self.side == "zerod" else self.torch_optimizer(model)

    def train(self, body: Callable[[], None], model: torch.nn.Module) -> None:
        """Runs body and writes the outcome to a file, also a fault, which then ends the process."""
        outcome: dict[str, Any] = {"outcome": "trained"}
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt from a signal is an outcome, too
            traceback.print_exc()
            outcome = {"outcome": "failed", **described(error)}
            if outcome["type"] != "StepAborted":
                self.release(outcome["text"])
        self.save(model, outcome)
        raise SystemExit(0 if outcome["outcome"] == "trained" else 3)

    def release(self, why: str) -> None:
        """A rank that fails aborts the step: the other ranks get the fault and need not wait for a deadline."""
        attached = getattr(self, "attached", None)
        try:
            if attached is not None:
                attached.abort_step(why.splitlines()[0] if why else "")
        except Exception:  # noqa: BLE001 - the step may be gone, or the daemon; the outcome is known already
            traceback.print_exc()

    def save(self, model: torch.nn.Module, outcome: dict[str, Any]) -> None:
        attached = getattr(self, "attached", None)
        model = self.trained or model
        outcome |= {"rank": self.rank, "losses": self.losses}
        # Before close(), because the published weights themselves are saved. In stage 3 they are gathered first.
        if self.gathered is not None:
            params = self.gathered
        elif attached is not None and attached.stage == 3:
            import zerod

            if outcome["outcome"] == "trained":
                with zerod.gathered(model):
                    params = copy_of(dict(model.named_parameters()))
            else:
                params = {}
        else:
            params = copy_of(dict(model.named_parameters()))
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(params, self.folder / f"rank{self.rank}-params.pt")
        torch.save(self.batches, self.folder / f"rank{self.rank}-batches.pt")
        (self.folder / f"rank{self.rank}.json").write_text(json.dumps(outcome, indent=1))
        if attached is not None and outcome["outcome"] == "trained":
            attached.close()

    def reference(self, model: torch.nn.Module, loss_of: Callable[[Any], torch.Tensor]) -> None:
        """
        The mean of the ranks' gradients, one optimizer step for each of their steps, in one process.

        Then the same again from weights that differ in their last bit. What that does to a tensor is what rounding
        alone does to it: much, where the gradient is nothing but rounding, as that of the bias of an attention's keys.
        """
        start = copy_of(dict(model.named_parameters()))
        losses = self._reference_steps(model, loss_of)
        torch.save(copy_of(dict(model.named_parameters())), self.folder / "reference.pt")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                sign = torch.randint(0, 2, p.shape, generator=generator) * 2 - 1
                p.copy_(start[name] * (1 + sign * 2.0**-23))
        self._reference_steps(model, loss_of)
        torch.save(copy_of(dict(model.named_parameters())), self.folder / "reference-perturbed.pt")
        (self.folder / "reference.json").write_text(json.dumps({"losses": losses}))

    def _reference_steps(self, model: torch.nn.Module, loss_of: Callable[[Any], torch.Tensor]) -> list[float]:
        ranks = [torch.load(self.folder / f"rank{r}-batches.pt", weights_only=False) for r in range(self.world)]
        optimizer = self.torch_optimizer(model)
        model.train()
        losses = []
        for step in range(self.steps):
            optimizer.zero_grad()
            for batches in ranks:
                loss = loss_of(batches[step])
                loss.backward()
                losses.append(float(loss.detach()))
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= self.world
            optimizer.step()
        return losses


def copy_of(value: Any) -> Any:
    """Return: a deep copy, without gradients, of batches and lists of parameters."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict) or hasattr(value, "items"):
        return {key: copy_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_of(item) for item in value)
    return value


def described(error: BaseException) -> dict[str, Any]:
    """Return: the parts of an exception that are compared, for zerod's also the structured fields."""
    result: dict[str, Any] = {"type": type(error).__name__, "text": getattr(error, "text", str(error))}
    if hasattr(error, "cause_class"):
        for name in ("code", "cause_class", "params", "n_params", "rank", "step", "micro_batch", "fields"):
            result["fault_" + name] = getattr(error, name, None)
    if error.__cause__ is not None:
        result["cause"] = f"{type(error.__cause__).__name__}: {error.__cause__}"
    return result


def byte_tokenizer(extra: Iterable[str] = (), ids: dict[str, int] | None = None, **special: str) -> Any:
    """Return: a tokenizer with a token for each byte; extra tokens are added in order, ids are fixed numbers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary.update(ids or {})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", **special}
    result = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    for token in extra:
        result.add_tokens([AddedToken(token, special=True, normalized=False)])
    return result


def torchvision_without_kernels() -> None:
    """
    Lets a torchvision that was built for CUDA be imported beside a torch without: its compiled part cannot be loaded,
    and for two operators, which nothing here calls, it expects at least the schema.
    """
    if importlib.util.find_spec("torchvision") is None or torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        try:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        except RuntimeError:  # already defined, so this build fits
            return
    torch.torchvision_schemas = library  # torch removes the schemas with the object


def hugging_face_callbacks(run: Run) -> list[Any]:
    """Callbacks for a Trainer: the losses, and zerod.observe() on the model that the Trainer has wrapped."""
    from transformers import TrainerCallback

    class Losses(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                run.losses.append(float(logs["loss"]))

    return [Losses()]


def observe(run: Run, trainer: Any) -> None:
    """Installs zerod.observe() on the DDP model as soon as the Trainer has made it."""
    from transformers import TrainerCallback

    class Observe(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            import zerod

            run.observer = zerod.observe(trainer.model_wrapped)

    if run.side == "observe":
        trainer.add_callback(Observe())
