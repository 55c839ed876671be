# SPDX-License-Identifier: Apache-2.0
"""
One run: a daemon on a private socket and its trainer processes. Every wait has a time limit.

Trainers are forks of a process that has loaded torch, which saves most of a run's time. Scenarios about the end of an
interpreter use new processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import conftest  # the house of the other end-to-end tests: it knows how a daemon is started and stopped
import quiet

from . import trainer
from .corpus import Scenario

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
PACKAGE = ROOT / "client" / "python"


def environment(build: Any) -> dict[str, str]:
    """Return: the variables with which a Python process finds the package and this build's libzerod."""
    paths = [str(TESTS), str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": "1",
            "ZEROD_LIBRARY": str(build.path("client/libzerod.so")), "PYTHONDONTWRITEBYTECODE": "1"}


_forks: Any = None


def forks(build: Any) -> Any:
    """Return: the multiprocessing context that forks trainers."""
    global _forks
    if _forks is None:
        os.environ.update(environment(build))
        sys.path[:0] = [path for path in (str(TESTS), str(PACKAGE)) if path not in sys.path]  # inherited by forks
        _forks = multiprocessing.get_context("forkserver")
        _forks.set_forkserver_preload(["faults.trainer"])
    return _forks


@dataclass
class Rank:
    """A trainer process, forked or fresh."""

    order: trainer.Order
    process: Any

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    def wait(self, seconds: float | None = None) -> int | None:
        """Return: the exit status, negative for a signal. None: the process did not end, and was killed."""
        deadline = time.monotonic() + (seconds or self.order.limit + 5)
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                return None
            time.sleep(0.005)
        return self.poll()

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            while self.poll() is None:
                time.sleep(0.005)

    def outcome(self) -> dict[str, Any]:
        path = self.order.path("json")
        return json.loads(path.read_text()) if path.exists() else {}

    def err(self) -> str:
        path = self.order.path("err")
        return path.read_text(errors="replace") if path.exists() else ""

    def parameters(self) -> dict[str, Any] | None:
        import numpy as np

        path = self.order.path("npz")
        if not path.exists():
            return None
        with np.load(path) as arrays:
            return dict(arrays)


@dataclass
class Run:
    """One run of the faulty program or its twin."""

    scenario: Scenario
    stage: int
    faulty: bool
    folder: Path
    build: Any
    ranks: list[Rank] = field(default_factory=list)
    diagnostics: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)  # by all daemons
    complaint: str = ""  # a problem of the run itself: a daemon that ended badly, a missing mark
    daemon: Any = None

    def begin(self) -> None:
        self.folder.mkdir(parents=True)
        config = self.scenario.config(self.stage, not self.faulty)
        self.daemon = conftest.start_job(self._start_daemon, self.folder, config)

    def _start_daemon(self, config: dict[str, Any], env: dict[str, str] | None) -> Any:
        several = "nodes" in config.get("world", {})
        folder = self.folder / f"node{config['world']['node']}" if several else self.folder
        folder.mkdir(exist_ok=True)
        return conftest.Daemon(self.build, folder, config, env)

    def start(self, rank: int, life: int = 0, env: dict[str, str] | None = None) -> Rank:
        place = {"RANK": str(rank), "WORLD_SIZE": str(self.scenario.world), "LOCAL_RANK": str(rank),
                 "ZEROD_SOCKET": str(self.daemon.socket_of(rank))}
        more = environment(self.build) | place | (env or {})
        order = trainer.Order(self.scenario.name, rank, self.faulty, self.stage, str(self.folder),
                              f"rank{rank}" + (f"-life{life}" if life else ""), more,
                              self.scenario.limit * self.build.patience, life)
        self.ranks.append(start(order, self.build, self.scenario.fresh))
        return self.ranks[-1]

    def wait(self, *ranks: Rank) -> None:
        for rank in ranks:
            rank.wait()

    # Methods for a scenario's direct().

    def mark(self, word: str) -> None:
        (self.folder / f"mark-{word}").touch()

    def await_mark(self, word: str) -> None:
        self._until(f"the mark {word}", lambda: (self.folder / f"mark-{word}").exists())

    def until_waiting(self, rank: int, step: int, state: str | None = None) -> None:
        """Waits until this rank waits in that step. state: its name in zerodctl ranks, if it matters."""

        def waits() -> bool:
            found = next(r for r in self.daemon.json("ranks") if r["rank"] == rank)
            return found["waiting_for"] is not None and found["step"] == step and state in (None, found["state"])

        self._until(f"rank {rank} waiting in step {step}", waits)

    def until_said(self, code: int, words: str) -> None:
        """Waits until the daemon has a diagnostic of this code that contains the words."""

        def is_said() -> bool:
            return any(d["code"] == f"E{code}" and words in d["text"] for d in self.daemon.json("diagnostics"))

        self._until(f"E{code}", is_said)

    def _until(self, what: str, condition: Any, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds * self.build.patience
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited in vain for {what}")
            time.sleep(0.01)

    def go(self) -> None:
        """Does the whole run. On return all processes have ended."""
        self.begin()
        try:
            if self.scenario.direct:
                self.scenario.direct(self)
            else:
                self.wait(*[self.start(r) for r in range(self.scenario.world)])
        except TimeoutError as error:
            self.complaint = str(error)
        finally:
            self._end()

    def _end(self) -> None:
        for rank in self.ranks:
            rank.kill()
        try:
            self.diagnostics = self.daemon.json("diagnostics")
            self.findings = quiet.findings_of(self.daemon)
            self.daemon.stop()
            self.logged = quiet.said_in_log(self.daemon.log())
        except BaseException as error:  # includes pytest.fail; the table must show it
            self.complaint = self.complaint or f"the daemon: {error}"
            self.daemon.kill()


def start(order: trainer.Order, build: Any, fresh: bool) -> Rank:
    if fresh:
        env = conftest.environment(environment(build) | order.env)
        with open(order.path("out"), "wb") as out, open(order.path("err"), "wb") as err:
            return Rank(order, subprocess.Popen([sys.executable, "-m", "faults.trainer", trainer.text_of(order)],
                                                stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env))
    process = forks(build).Process(target=trainer.begin, args=(order,))
    process.start()
    return Rank(order, process)


def reference(scenario: Scenario, faulty: bool, stage: int, folder: Path, build: Any) -> Rank:
    """Runs the program in torch alone, in a separate process."""
    folder.mkdir(parents=True, exist_ok=True)
    order = trainer.Order(scenario.name, -1, faulty, stage, str(folder), "reference", {}, 60 * build.patience)
    rank = start(order, build, fresh=False)
    rank.wait()
    return rank


def clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
