# SPDX-License-Identifier: Apache-2.0
"""
One rank of the GPT in training. With zerod, which finds its daemon through zerodrun's environment:

    zerodrun -n 2 -- python train.py --lr 1e-3

and the same training with torch's own DistributedDataParallel and AdamW, for comparison:

    torchrun --nproc-per-node 2 train.py --lr 1e-3 --ddp

attach() chooses between the two. Read main(), attach() and train().
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from task import Text, add_options, make_model
from torch import distributed, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

WARMUP = 20  # steps


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of a small GPT in training.")
    add_options(parser)
    parser.add_argument("--ddp", action="store_true", help="with DistributedDataParallel and AdamW, not with zerod")
    parser.add_argument(
        "--lr",
        type=float,
        help="highest learning rate, after a warm-up, then down along a cosine; "
        "without it everything is as the daemon is configured",
    )
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient, with --lr (%(default)s)")
    parser.add_argument("--log-every", type=int, default=10, metavar="N", help="steps between two lines (%(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write rankN.json, an object a line for each step, and in the end rankN.weights, one after the other",
    )
    parser.add_argument(
        "--provoke-duplicate",
        metavar="STEP:PARAMETER:RANK",
        help="push one gradient twice, show what zerod says, and go on",
    )
    args = parser.parse_args()
    if args.ddp and args.lr is None:
        parser.error("--ddp needs --lr: there is no daemon to say it")
    return args


def attach(args: argparse.Namespace, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the module that is called instead of the model, and the optimizer."""
    if args.ddp:
        distributed.init_process_group("gloo")
        # The setup of torch with the least memory: gradients live in the buckets, the update needs no temporaries.
        return (
            nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True),
            torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
        )
    import zerod

    if args.lr is None:
        return model, zerod.Optimizer(model)
    return model, zerod.Optimizer(model, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)


class Report:
    """Writes JSON objects, one per line, for other programs; without a folder it writes nothing."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.file: TextIO | None = (folder / f"rank{rank}.json").open("a", encoding="utf-8") if folder else None

    def add(self, event: str, **what: Any) -> None:
        if self.file:
            print(json.dumps({"event": event, **what}), file=self.file, flush=True)


class Progress:
    """A line of rank 0 now and then: the mean loss since the last one, and the pace."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.every, self.n_steps, self.rank = args.log_every, args.steps, rank
        self.losses: list[float] = []
        self.began = time.monotonic()

    def add(self, step: int, loss: float, norm: float) -> None:
        self.losses.append(loss)
        done = step + 1
        if self.rank != 0 or not (step == 0 or done % self.every == 0 or done == self.n_steps):
            return
        now, n = time.monotonic(), len(self.losses)
        print(
            f"step {done:4}/{self.n_steps}  loss {sum(self.losses) / n:.3f}  grad norm {norm:.3f}  "
            f"{n / (now - self.began):.1f} steps/s",
            flush=True,
        )
        self.losses, self.began = [], now


def warm_up_and_decay(n_steps: int) -> Callable[[int], float]:
    def factor(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / WARMUP
        return 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / max(1, n_steps - WARMUP))

    return factor


def train(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, report: Report) -> None:
    text, rank = Text(args), int(os.environ["RANK"])
    schedule = LambdaLR(optimizer, warm_up_and_decay(args.steps)) if args.lr is not None else None
    progress = Progress(args, rank)

    def take(step: int) -> None:
        loss = model(*text.batch(step, rank))
        mistake = penalty(args, model, step, rank) if args.provoke_duplicate else None
        loss.backward()
        if mistake is not None:
            show_refusal(mistake, optimizer, report)
        norm = clip_grad_norm_(model.parameters(), args.clip) if schedule else None
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()
        if schedule:
            schedule.step()
        if not args.ddp:  # the values that were used
            lr, norm = optimizer.result.lr, optimizer.result.grad_norm
        report.add("step", step=step, loss=loss.item(), grad_norm=float(norm), lr=float(lr), seconds=time.monotonic())
        progress.add(step, loss.item(), float(norm))

    if args.ddp:
        for step in range(args.steps):
            take(step)
        return
    import zerod

    for _ in range(optimizer.epoch if schedule else 0):
        schedule.step()
    for step in zerod.steps(optimizer, args.steps):  # continues at the job's step
        with step:  # an aborted step begins again
            take(step)


def penalty(args: argparse.Namespace, model: nn.Module, step: int, rank: int) -> torch.Tensor | None:
    """For --provoke-duplicate, at its step: a second loss of the same forward, which reaches one parameter."""
    import zerod

    at_step, name, at_rank = args.provoke_duplicate.split(":")
    if (step, rank) != (int(at_step), int(at_rank)):
        return None
    with zerod.gathered(model):
        return 1e-4 * model.get_parameter(name).sum()


def show_refusal(mistake: torch.Tensor, optimizer: torch.optim.Optimizer, report: Report) -> None:
    """Each of two losses has its own backward: the second one makes a gradient that has already been pushed."""
    import zerod

    try:
        mistake.backward()
    except zerod.DuplicateGradient as fault:
        print(fault, file=sys.stderr)
        report.add(
            "provoked",
            code=fault.code,
            rank=fault.rank,
            step=fault.step,
            micro_batch=fault.micro_batch,
            n_params=fault.n_params,
            param=fault.params[0],
            text=str(fault),
        )
        optimizer.clear_fault()  # the first gradient, that of the loss, stays


def main() -> None:
    args, rank = arguments(), int(os.environ["RANK"])
    torch.set_num_threads(1)  # ranks share the processors
    model = make_model(args)
    n_params, n_elems = len(list(model.parameters())), sum(p.numel() for p in model.parameters())
    called, optimizer = attach(args, model)
    world_size = distributed.get_world_size() if args.ddp else optimizer.world_size
    report = Report(args.out, rank)
    report.add("start", pid=os.getpid(), rank=rank, world_size=world_size, n_elems=n_elems, n_params=n_params)
    if rank == 0:
        print(f"{n_elems} parameters in {n_params} tensors, {world_size} ranks", flush=True)
    train(args, called, optimizer, report)
    if args.out:
        whole = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        (args.out / f"rank{rank}.weights").write_bytes(whole)
    report.add("done")
    if args.ddp:
        distributed.destroy_process_group()
    else:
        optimizer.close()


main()
