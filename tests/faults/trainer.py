# SPDX-License-Identifier: Apache-2.0
"""
A trainer process: one rank of one run. It writes the messages that it gets to its outcome file, and its parameters to
another file.

The house forks the process from one that has loaded torch and zerod (begin), or starts it as a new interpreter: python
-m faults.trainer ORDER, where ORDER is the JSON of an Order.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # optimizers and checkpoints import it when they are first used: once for all forks

from . import corpus, plain, trial

try:  # imported once, in the forks' parent; references need only torch
    import zerod
except ImportError:
    zerod = None


@dataclass(frozen=True)
class Order:
    scenario: str
    rank: int  # -1: the single-process reference
    faulty: bool
    stage: int
    folder: str
    stem: str  # of the files STEM.json, STEM.npz, STEM.out, STEM.err
    env: dict[str, str]
    limit: float
    life: int = 0

    def path(self, kind: str) -> Path:
        return Path(self.folder) / f"{self.stem}.{kind}"


class Outcome:
    """Facts about a process, written after every change, so that a process that dies has left them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {"faults": [], "error": None, "again": None, "done": False}

    def note(self, **facts: Any) -> None:
        self.facts.update(facts)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self.facts))
        os.replace(draft, self.path)


def plain_fault(fault: Any) -> dict[str, Any]:
    """Return: a GradientFault as data."""
    classes = [c.__name__ for c in type(fault).__mro__]
    fields = [[label, text] for label, text in (fault.fields or [])]
    return {"code": int(fault.code or 0), "cause_class": fault.cause_class or "", "params": list(fault.params or []),
            "n_params": fault.n_params, "rank": fault.rank, "step": fault.step, "micro_batch": fault.micro_batch,
            "fields": fields, "text": fault.text, "classes": classes, "warning": False}


def save_parameters(path: Path, model: torch.nn.Module | None) -> None:
    if model is not None:
        arrays = {n: p.detach().clone().float().numpy() for n, p in model.named_parameters()}
        np.savez(path, **arrays)


def train_against_zerod(order: Order, outcome: Outcome) -> None:
    scenario = corpus.load()[order.scenario]
    t = trial.Trial(scenario, order.rank, order.faulty, order.stage, Path(order.folder), order.life)
    try:
        scenario.program(t)
        outcome.note(done=True)
        save_parameters(order.path("npz"), t.trained)
    except zerod.GradientFault as fault:
        outcome.note(faults=[plain_fault(fault)])
        after_a_fault(t, outcome)
    except BaseException as error:  # KeyboardInterrupt too, because the exception itself is judged
        sys.excepthook(type(error), error, error.__traceback__)  # like the interpreter; zerod adds notes in it
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        outcome.note(error={"classes": [c.__name__ for c in type(error).__mro__], "text": text,
                            "trace": traceback.format_exc()})
        leave(t)


def after_a_fault(t: trial.Trial, outcome: Outcome) -> None:
    """A fault persists: the next step must raise it again for a program that caught it."""
    expect = t.scenario.expect
    if t.opt is not None and getattr(expect, "sticky", False) and t.rank in expect.ranks(t.world):
        try:
            t.opt.step()
            outcome.note(again="nothing: step() went on")
        except zerod.GradientFault as fault:
            outcome.note(again=int(fault.code or 0))
        except Exception as error:
            outcome.note(again=repr(error))
    t.mark(f"spoken-{t.rank}")
    if t.opt is not None and expect is not None:
        let_the_others_speak(t)
    leave(t)


def let_the_others_speak(t: trial.Trial) -> None:
    """Waits until all ranks that must get a fault have got it, because leaving ends the step for them."""
    for rank in t.scenario.expect.ranks(t.world):
        if rank != t.rank:
            try:
                t.await_mark(f"spoken-{rank}", 20)
            except TimeoutError:
                print(f"rank {rank} was not told anything", file=sys.stderr)


def leave(t: trial.Trial) -> None:
    """Leaves, so that the other ranks can end. Errors of this have nothing to do with the scenario."""
    if t.opt is None:
        return
    for call in (lambda: t.opt.abort_step("the scenario is over"), t.opt.close):
        try:
            call()
        except Exception as error:
            print(f"leaving: {error!r}", file=sys.stderr)


def train_alone(order: Order, outcome: Outcome) -> None:
    """Runs the reference. All ranks have rank 0's parameters."""
    scenario = corpus.load()[order.scenario]
    try:
        trials = plain.run(scenario, order.faulty, order.stage)
        save_parameters(order.path("npz"), trials[0].trained)
        outcome.note(done=True)
    except BaseException as error:
        outcome.note(error={"classes": [c.__name__ for c in type(error).__mro__], "text": str(error),
                            "trace": traceback.format_exc()})


def begin(order: Order) -> None:
    """Turns a fork into the trainer."""
    for fd, kind in ((1, "out"), (2, "err")):
        new = os.open(order.path(kind), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(new, fd)
        os.close(new)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    run(order)


def run(order: Order) -> None:
    os.environ.update(order.env)
    torch.set_num_threads(1)
    # Every wait has a limit. After it the process prints its stack and ends.
    faulthandler.dump_traceback_later(order.limit, exit=True, file=sys.__stderr__ if sys.__stderr__ else sys.stderr)
    outcome = Outcome(order.path("json"))
    outcome.note()
    (train_alone if order.rank < 0 else train_against_zerod)(order, outcome)
    outcome.note(ended=True)
    sys.stdout.flush()
    sys.stderr.flush()
    faulthandler.cancel_dump_traceback_later()


def order_of(text: str) -> Order:
    return Order(**json.loads(text))


def text_of(order: Order) -> str:
    return json.dumps(asdict(order))


if __name__ == "__main__":
    run(order_of(sys.argv[1]))
