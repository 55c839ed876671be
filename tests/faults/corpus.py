# SPDX-License-Identifier: Apache-2.0
"""
Scenarios and their expectations.

A scenario is a program, a function of one argument (trial.Trial). Every rank runs it in its own process:

    @scenario(expect=Expect(1001, "D1", params=("h.0.fc.weight",), rank=1, step=1, fix=("use_reentrant=False",)))
    def checkpoint_twice(t):
        ...

The program runs twice. The faulty run must give exactly the expected diagnostic. The repaired run, changed as the
diagnostic proposes, must give none, and its parameters must be those of plain torch. A scenario without an expectation
is a guard and has only the second run. The status of a run may have only the findings that the scenario expects
(Found). No run may have a warning of zerod without a code, neither Python's on a rank's stderr nor in the daemon's log.
Exceptions for the faulty run are in the scenario's remarks.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import quiet

# The base of each policy. Stall warnings are disabled, because a loaded machine really stalls. Scenarios about stalls
# enable them.
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

ALL = -1  # Expect.rank: every rank gets the fault and names itself
ANY = -2  # Expect.micro_batch, step: not compared, because the fault belongs to no single micro-batch
N_STEPS = 3


@dataclass(frozen=True)
class Expect:
    """The expected fault. Fields left at their defaults must be absent, except where a comment says otherwise."""

    code: int
    cause_class: str = ""
    params: tuple[str, ...] = ()  # all of them; an exception shows at most five
    rank: int | None = None
    step: int | None = None
    micro_batch: int | None = None
    fix: tuple[str, ...] = ()  # parts of the lines "fix" and "or"
    says: tuple[str, ...] = ()  # parts of the text
    never_says: tuple[str, ...] = ()
    exception: str = "GradientFault"  # its class or one of its bases; "" for a warning in the daemon's log only
    told: int | None = None  # rank that gets the exception, if it is not the named one
    sticky: bool = True  # the next step() raises it again; the runner tests this
    signal: int = 0  # kills the process, whose last output on stderr is the text

    def ranks(self, world: int) -> list[int]:
        """Return: the ranks that get the fault."""
        if self.told is not None:
            return [self.told]
        return list(range(world)) if self.rank in (ALL, None) else [self.rank]


@dataclass(frozen=True)
class Refused:
    """A call that torch or zerod refuses before zerod's codes apply, in torch's or zerod's words."""

    exceptions: tuple[str, ...]
    says: tuple[str, ...] = ()
    rank: int = ALL

    def ranks(self, world: int) -> list[int]:
        return list(range(world)) if self.rank == ALL else [self.rank]


@dataclass(frozen=True)
class Found:
    """A finding of `zerodctl status` instead of a diagnostic. The faulty program trains to its end without an error."""

    kind: str
    rank: int | None = None
    params: tuple[str, ...] = ()  # each has a finding
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
    policy: Mapping[str, Any]  # changes to CONFIG
    repaired_policy: Mapping[str, Any]  # further changes for the twin
    world: int
    stages: tuple[int, ...]
    pattern: str  # pattern of the tables about torch's hooks and the five cases
    trains: bool  # the faulty run reaches its end, and its parameters are compared too
    tolerates: tuple[int, ...]  # codes that a guard or twin may log because they are true
    echoes: tuple[int, ...]  # further codes that the faulty run may have
    remarks: tuple[str, ...]  # texts of warnings without a code in the faulty run
    direct: Callable[[Any], None] | None  # the runner's actions, if it does more than start all ranks
    twin: bool  # whether there is a repaired program
    hooks: bool  # whether torch's hooks are counted to prove that params is right
    fresh: bool  # a new interpreter instead of a fork, to test its end
    limit: float  # time limit for a process in seconds
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
    """Return: base overridden by changes, level by level."""
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
    """Return: all scenarios by name, in the order of their source."""
    from . import scenarios

    for module in sorted(pkgutil.iter_modules(scenarios.__path__), key=lambda m: m.name):
        importlib.import_module(f"{scenarios.__name__}.{module.name}")
    return _corpus.scenarios
