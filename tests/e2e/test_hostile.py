# SPDX-License-Identifier: Apache-2.0
"""
Clients that mean ill, or break (tests/hostile.c). The guilty connection alone suffers: after each attack the daemon is
alive and holds no descriptor and no thread more than before, and the job's next step has the bits of an undisturbed run.
"""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from conftest import DEFAULTS, ROOT, Build, Daemon, environment, wait_for
from puppet import Puppet, all_do, form, memory, n_fds, n_threads, said_alike, settled, state, steps, trainers

BUILD = Build(os.environ.get("ZEROD_BUILD", ROOT / "build"))
CONFIG = {"gradient_clipping": 0.5, "limits": {"clients": 32}}


def attacks(*groups):
    program = BUILD.folder / "tests" / "hostile"
    listed = subprocess.run([program, "--list"], capture_output=True, text=True).stdout if program.exists() else ""
    return [line.split()[1] for line in listed.splitlines() if line.split()[0] in groups]


def run(daemon, *words, setpriv=(), env=None, timeout=60):
    """An attack from its beginning to its end. Return: what it printed."""
    result = subprocess.run([*setpriv, daemon.build.path("tests/hostile"), *map(str, words)], capture_output=True, text=True,
                            timeout=timeout * daemon.patience, errors="replace",
                            env=environment({"ZEROD_SOCKET": daemon.socket,
                                             "HOSTILE_PATIENCE_MS": 10000 * daemon.patience, **(env or {})}))
    assert result.returncode == 0, f"{words}: {result.stdout}{result.stderr}\n{daemon.log()[-3000:]}"
    return result.stdout


class Attack:
    """An attack that goes on until end()."""

    def __init__(self, daemon, *words, setpriv=()):
        self.popen = subprocess.Popen([*setpriv, daemon.build.path("tests/hostile"), *map(str, words)], text=True,
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      env=environment({"ZEROD_SOCKET": daemon.socket}))
        self.first = self.popen.stdout.readline()

    def end(self):
        out, _ = self.popen.communicate("x", timeout=60)
        assert self.popen.returncode == 0, out
        return out

    def kill(self):
        self.popen.kill()
        self.popen.communicate()


class World:
    """A job of two ranks that trains on, and an undisturbed one of the same configuration to compare with."""

    def __init__(self, folder, config):
        folder.mkdir(exist_ok=True)
        self.daemons, self.digests, self.config = [], [], config
        self.quiet = self.start(folder / "quiet")
        self.quiet_ranks = trainers(self.quiet)
        self.daemon = self.start(folder / "attacked")
        self.ranks = trainers(self.daemon)
        self.step = 0
        self.advance()
        self.leave_rank_1()
        self.fds, self.threads = n_fds(self.daemon), n_threads(self.daemon)

    def start(self, folder):
        folder.mkdir()
        self.daemons.append(Daemon(BUILD, folder, self.config))
        return self.daemons[-1]

    def expected(self, step):
        while len(self.digests) < step:
            steps(self.quiet_ranks)
            self.digests.append(state(self.quiet_ranks))
        return self.digests[step - 1]

    def leave_rank_1(self):
        """Rank 1 is free to be claimed; rank 0 stays."""
        self.ranks[1].ok("close")
        wait_for("rank 1 is free", lambda: not self.daemon.json("ranks")[1]["attached"], 10 * self.daemon.patience)

    def attach_rank_1(self):
        self.ranks[1].attach()
        answer = self.ranks[1]("form")
        assert answer.r == 1, answer

    def advance(self):
        """A step of both ranks, and its bits."""
        steps(self.ranks)
        self.step += 1
        assert state(self.ranks) == self.expected(self.step)

    def survive(self):
        """After an attack: rank 0, which waits in its step, goes on with a new rank 1."""
        assert self.daemon.running(), self.daemon.log()
        self.attach_rank_1()
        self.ranks[1].tell("steps", self.step + 1 - self.ranks[1].ok("user").position["step"])
        answers = [r.answer() for r in self.ranks]
        assert [a.r for a in answers] == [0, 0], answers
        self.step += 1
        assert state(self.ranks) == self.expected(self.step)
        self.leave_rank_1()
        settled(self.daemon, self.fds, self.threads)

    def stop(self):
        try:
            for daemon in self.daemons:
                daemon.stop()
                for process in daemon.others:
                    process.kill()
                    process.check_sanitizers()
        finally:
            for daemon in self.daemons:
                daemon.kill()


def make_world(tmp_path_factory, **config):
    world = World(tmp_path_factory.mktemp("world"), CONFIG | config)
    yield world
    world.stop()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    yield from make_world(tmp_path_factory, zero_optimization={"stage": 2})


@pytest.fixture(scope="module")
def world3(tmp_path_factory):
    yield from make_world(tmp_path_factory, zero_optimization={"stage": 3})


NUMBERS = {"garbage": 200, "never-reads": 10000, "never-reads-state": 10000}


@pytest.mark.parametrize("name", attacks("stranger"))
def test_strangers(world, name):
    """Connections that are no rank of the job, while rank 0 waits in a step."""
    world.ranks[0].tell("steps 1")
    run(world.daemon, name, NUMBERS.get(name, 0))
    settled(world.daemon, world.fds, world.threads)
    world.survive()


@pytest.mark.parametrize("name", attacks("rank"))
def test_ranks(world, name):
    """A rank of the job breaks the rules, while the other waits for it."""
    world.ranks[0].tell("steps 1")
    run(world.daemon, name, NUMBERS.get(name, 0))
    world.survive()


@pytest.mark.parametrize("name", attacks("stage3"))
def test_stage3(world3, name):
    world3.ranks[0].tell("steps 1")
    run(world3.daemon, name)
    world3.survive()


@pytest.mark.parametrize("n", range(17))
def test_hang_up(world, n):
    """A connection is closed in the middle of everything."""
    world.ranks[0].tell("steps 1")
    run(world.daemon, "hang-up", n)
    world.survive()


def test_every_attack_is_run():
    source = Path(__file__).read_text()
    assert len(attacks("stranger", "rank", "stage3")) > 30
    for name in attacks("other"):
        assert f'"{name}"' in source, f"no test runs {name}"
