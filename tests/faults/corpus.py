# SPDX-License-Identifier: Apache-2.0
"""
Scenarios and what is expected of them.

A scenario is a program, a function of one argument (trial.Trial), that every rank runs as a process of its own:

    @scenario(expect=Expect(1001, "D1", params=("h.0.fc.weight",), rank=1, step=1, fix=("use_reentrant=False",)))
    def checkpoint_twice(t):
        ...

It is run twice: faulty, where exactly that has to be said, and repaired as the text proposes, where nothing may be said
and the parameters must be those of plain torch. Without an expectation it is a guard: there is only the second run.
The status of each run may have only those findings that its scenario expects (Found). No run may have warnings of zerod's without a
code, be they Python's on a rank's stderr or lines in the daemon's log, but the faulty one those of its scenario (remarks).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import quiet

# Laid under each policy. Stalls are looked for where a scenario is about them: on a machine under load they are true.
CONFIG: dict[str, Any] = quiet.CONFIG | {
    "job": "faults",
    "listen": {"mode": "0600"},
    "world": {"size": 2},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 128},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01},
    },
    "gradient_clipping": 0,
    "threads": 1,
    "diagnostics": {"stall_warning": "10min", "stall_timeout": "1h"},
}

ALL = -1  # Expect.rank: every rank says it, each of itself
ANY = -2  # Expect.micro_batch, step: where a position belongs to no single micro-batch, it is not compared
N_STEPS = 3


@dataclass(frozen=True)
class Expect:
    """The expected fault. Fields left at their defaults must be absent, except where a comment says otherwise."""

    code: int
    cause_class: str = ""
    params: tuple[str, ...] = ()  # all of them; an exception shows five at most
    rank: int | None = None
    step: int | None = None
    micro_batch: int | None = None
    fix: tuple[str, ...] = ()  # parts of the lines "fix" and "or"
    says: tuple[str, ...] = ()  # parts of the text
    never_says: tuple[str, ...] = ()
    exception: str = "GradientFault"  # its class or one of its bases; "" for a warning in the daemon's log only
    told: int | None = None  # the rank that gets the exception, if it is not the one that is named
    sticky: bool = True  # the next step() says it again; the runner tries
    signal: int = 0  # the process dies of it, and the text is the last thing on its standard error

    def ranks(self, world: int) -> list[int]:
        """The ranks that are told of the fault."""
        if self.told is not None:
            return [self.told]
        return list(range(world)) if self.rank in (ALL, None) else [self.rank]


@dataclass(frozen=True)
class Refused:
    """A call that is refused before zerod's codes apply, as torch does it or in zerod's words."""

    exceptions: tuple[str, ...]
    says: tuple[str, ...] = ()
    rank: int = ALL

    def ranks(self, world: int) -> list[int]:
        return list(range(world)) if self.rank == ALL else [self.rank]


@dataclass(frozen=True)
class Found:
    """A finding of `zerodctl status` instead of a diagnostic. The faulty program trains on to its end, and hears nothing."""

    kind: str
    rank: int | None = None
    params: tuple[str, ...] = ()  # with a finding each
    says: tuple[str, ...] = ()  # parts of each text

    def ranks(self, world: int) -> list[int]:
        return [] if self.rank is None else [self.rank]


Expected = Expect | Refused | Found | None
Program = Callable[[Any], None]


@dataclass(frozen=True)
class Scenario:
    name: str
    program: Program
    expect: Expected
    policy: Mapping[str, Any]  # laid over CONFIG
    repaired_policy: Mapping[str, Any]  # laid over policy for the twin
    world: int
    stages: tuple[int, ...]
    pattern: str  # of the tables in the documentation of torch's hooks and of the five cases
    trains: bool  # the faulty run goes on to the end, and its parameters are compared too
    tolerates: tuple[int, ...]  # codes that the daemon may write down of a guard or a twin, because they are true
    echoes: tuple[int, ...]  # what else may be said in the faulty run
    remarks: tuple[str, ...]  # words of warnings without a code in the faulty run
    direct: Callable[[Any], None] | None  # the runner's part, where it is more than starting all ranks
    twin: bool  # there is a repaired program
    hooks: bool  # torch's hooks are counted to show that params is what torch does
    fresh: bool  # the process is a new interpreter, not a fork: its end is what matters
    limit: float  # seconds for a process
    doc: str = ""

    def config(self, stage: int, repaired: bool) -> dict[str, Any]:
        config = merge(CONFIG, {"world": {"size": self.world}, "zero_optimization": {"stage": stage}})
        config = merge(config, self.policy)
        return merge(config, self.repaired_policy) if repaired else config


@dataclass
class Corpus:
    scenarios: dict[str, Scenario] = field(default_factory=dict)


_corpus = Corpus()


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """base with changes laid over it, folder by folder."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else value
    return result


def scenario(expect: Expected = None, *, policy: Mapping[str, Any] | None = None,
             repaired_policy: Mapping[str, Any] | None = None, world: int = 2, stages: tuple[int, ...] = (2,),
             pattern: str = "", trains: bool = False, tolerates: tuple[int, ...] = (), echoes: tuple[int, ...] = (),
             remarks: tuple[str, ...] = (), direct: Callable[[Any], None] | None = None, twin: bool = True, hooks: bool | None = None,
             fresh: bool = False, limit: float = 120) -> Callable[[Program], Program]:
    def register(program: Program) -> Program:
        name = program.__name__.replace("_", "-")
        assert name not in _corpus.scenarios, f"two scenarios are named {name}"
        counts = isinstance(expect, Expect) and expect.cause_class in ("D1", "D2", "M1", "M2", "M5")
        _corpus.scenarios[name] = Scenario(
            name, program, expect, policy or {}, repaired_policy or {}, world, stages, pattern, trains, tolerates,
            echoes, remarks, direct, twin and expect is not None, counts if hooks is None else hooks, fresh, limit,
            (program.__doc__ or "").strip())
        return program

    return register


def load() -> dict[str, Scenario]:
    """All scenarios by name, in the order in which they are written."""
    from . import scenarios

    for module in sorted(pkgutil.iter_modules(scenarios.__path__), key=lambda m: m.name):
        importlib.import_module(f"{scenarios.__name__}.{module.name}")
    return _corpus.scenarios
