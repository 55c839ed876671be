# SPDX-License-Identifier: Apache-2.0
"""
Clients that attack the daemon or break (tests/programs/hostile.c). Only the guilty connection may suffer. After each
attack the daemon must be alive without more descriptors or threads than before, and the job's next step must have the
bits of an undisturbed run.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

import neighbours
from conftest import ROOT, Build, Daemon, environment, wait_for
from puppet import (REFUSED, Puppet, form, memory_cgroup, n_fds, n_fds_at_rest, n_threads, said_alike, settled, state, steps,
                    trainers)

BUILD = Build(os.environ.get("ZEROD_BUILD", ROOT / "build"))
LEAVING = {"diagnostics": {"on_leave": "continue"}}
CONFIG = {"gradient_clipping": 0.5, "limits": {"clients": 32, "handshake_timeout": "3s"}}


def attacks(*groups):
    program = BUILD.folder / "tests" / "hostile"
    listed = subprocess.run([program, "--list"], capture_output=True, text=True).stdout if program.exists() else ""
    return [line.split()[1] for line in listed.splitlines() if line.split()[0] in groups]


def run(daemon, *words, setpriv=(), env=None, timeout=60):
    """Runs an attack to its end. Return: the program's output."""
    result = subprocess.run([*setpriv, daemon.build.path("tests/hostile"), *map(str, words)], capture_output=True, text=True,
                            timeout=timeout * daemon.patience, errors="replace",
                            env=environment({"ZEROD_SOCKET": daemon.socket,
                                             "HOSTILE_PATIENCE_MS": 10000 * daemon.patience, **(env or {})}))
    assert result.returncode == 0, f"{words}: {result.stdout}{result.stderr}\n{daemon.log()[-3000:]}"
    return result.stdout


class Attack:
    """An attack that continues until end()."""

    def __init__(self, daemon, *words, setpriv=()):
        self.popen = subprocess.Popen([*setpriv, self.program(daemon, setpriv), *map(str, words)], text=True,
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      env=environment({"ZEROD_SOCKET": daemon.socket}))
        self.first = self.popen.stdout.readline()

    @staticmethod
    def program(daemon, setpriv):
        """Return: the attack program. Another user cannot run the build folder's, and gets a copy (open_daemon)."""
        return Path(daemon.folder) / "hostile" if setpriv else daemon.build.path("tests/hostile")

    def end(self):
        out, _ = self.popen.communicate("x", timeout=60)
        assert self.popen.returncode == 0, out
        return out

    def kill(self):
        self.popen.kill()
        self.popen.communicate()


class World:
    """A job of two ranks that trains, and an undisturbed job of the same configuration for comparison."""

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
        self.fds, self.threads = n_fds_at_rest(self.daemon), n_threads(self.daemon)

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
        """Detaches rank 1, so that an attack can claim it. Rank 0 stays."""
        self.ranks[1].ok("close")
        wait_for("rank 1 is free", lambda: not self.daemon.json("ranks")[1]["attached"], 10 * self.daemon.patience)

    def attach_rank_1(self):
        self.ranks[1].attach()
        answer = self.ranks[1]("form")
        assert answer.r == 1, answer

    def advance(self):
        """Both ranks do a step, which must have the undisturbed job's bits."""
        steps(self.ranks)
        self.step += 1
        assert state(self.ranks) == self.expected(self.step)

    def survive(self):
        """After an attack, rank 0, which waits in its step, must continue with a new rank 1."""
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


@pytest.fixture(scope="module")
def world3_gpus(tmp_path_factory):
    worlds = make_world(tmp_path_factory, zero_optimization={"stage": 3})
    with pytest.MonkeyPatch.context() as patch:  # only for these daemons
        patch.setenv("ZEROD_DEVICE", "cuda")
        world = next(worlds)
    yield world
    next(worlds, None)


NUMBERS = {"garbage": 200, "never-reads": 10000, "never-reads-state": 10000}


@pytest.mark.parametrize("name", attacks("stranger"))
def test_strangers(world, name):
    """Connections that are no rank of the job attack while rank 0 waits in a step."""
    world.ranks[0].tell("steps 1")
    run(world.daemon, name, NUMBERS.get(name, 0))
    settled(world.daemon, world.fds, world.threads)
    world.survive()


@pytest.mark.parametrize("name", attacks("rank"))
def test_ranks(world, name):
    """A rank of the job breaks the rules while the other rank waits for it."""
    world.ranks[0].tell("steps 1")
    run(world.daemon, name, NUMBERS.get(name, 0))
    world.survive()


@pytest.mark.parametrize("name", attacks("stage3"))
def test_stage3(world3, name):
    world3.ranks[0].tell("steps 1")
    run(world3.daemon, name)
    world3.survive()


@pytest.mark.parametrize("name", attacks("stage3"))
def test_stage3_on_gpus(world3_gpus, name):
    test_stage3(world3_gpus, name)


def test_pool_is_no_state(world3):
    """
    A client with the daemon's own uid can write into the pool of stage 3, but not into master weights and moments.
    """
    world3.ranks[0].tell("steps 1")
    run(world3.daemon, "reopened", 2)
    world3.survive()


@pytest.mark.parametrize("n", range(17))
def test_hang_up(world, n):
    """A connection is closed after any request of a step."""
    world.ranks[0].tell("steps 1")
    run(world.daemon, "hang-up", n)
    world.survive()


# ---- sockets that outlive their owners ------------------------------------------------------------------------


def test_forked_child_keeps_the_socket(world):
    """A DataLoader worker inherits the socket. The rank becomes free when the trainer itself is dead."""
    world.ranks[0].tell("steps 1")
    world.attach_rank_1()
    world.ranks[1].ok("begin")
    world.ranks[1].ok("push 3")
    child = world.ranks[1].ok("fork").pid
    try:
        world.ranks[1].kill()
        os.kill(child, 0)
        world.ranks[1] = Puppet(world.daemon, 1)
        world.survive()
        os.kill(child, 0)  # the child still has the dead trainer's socket; it would have ended if a call had succeeded
    finally:
        os.kill(child, signal.SIGKILL)


def test_orphan_floods(world):
    """An orphaned child keeps sending. The daemon stops reading its socket."""
    world.ranks[0].tell("steps 1")
    run(world.daemon, "orphan-flood", timeout=20)
    world.survive()


def test_killed_control_clients(world):
    world.ranks[0].tell("steps 1")
    for i in range(20):
        client = subprocess.Popen([world.daemon.build.path("client/ctl/zerodctl"), "--socket", world.daemon.socket,
                                   "report", "-"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(i * 0.0007)
        client.kill()
        client.wait()
    world.survive()


# ---- many and much -----------------------------------------------------------------------------------------------


def test_flood(world):
    """A rank sends as fast as it can. No other client has to wait for it."""
    world.ranks[0].tell("steps 1")
    attack = Attack(world.daemon, "flood", 1000000)
    try:
        for _ in range(3):
            start = time.monotonic()
            assert world.daemon.status()["n_attached"] == 2
            assert time.monotonic() - start < 1 * world.daemon.patience
            time.sleep(0.1)
    finally:
        out = attack.end()
    assert int(out.split()[-2]) >= 10000, out
    world.survive()


def test_idle_connections(zerod):
    """1,000 connections that send nothing do not keep a trainer out, and are closed after the timeout."""
    daemon = zerod({"world": {"size": 1}, "limits": {"handshake_timeout": "2s"}})
    fds = n_fds(daemon)
    attack = Attack(daemon, "idle", 1000)
    try:
        assert attack.first == "1000 are open\n"
        puppet = Puppet(daemon, 0)
        puppet("maps")
        start = time.monotonic()
        puppet.attach()
        form([puppet])
        assert time.monotonic() - start < 1 * daemon.patience
        steps([puppet], 2)
        wait_for("the daemon has accepted them", lambda: n_fds(daemon) > 1000, 10 * daemon.patience)
        wait_for("they are closed", lambda: n_fds(daemon) < fds + 20, 10 * daemon.patience)
        assert puppet.ok("steps 1").position["step"] == 3
        run(daemon, "idle-closed")
    finally:
        attack.end()


def test_control_connections_keep_no_trainer_out(zerod):
    """limits.clients limits control connections. Trainers always have room, because there are never more than ranks."""
    daemon = zerod({"world": {"size": 2}, "limits": {"clients": 3}})
    sitting = [Attack(daemon, "control-idle") for _ in range(3)]
    try:
        assert [a.first for a in sitting] == ["welcome\n"] * 3
        ranks = trainers(daemon)
        steps(ranks)
    finally:
        for a in sitting:
            a.end()


def test_a_rank_that_left(zerod):
    """The daemon ignores a rank that has left, and the other ranks train on."""
    daemon, quiet = zerod(LEAVING), zerod(LEAVING)
    for d in (daemon, quiet):
        ranks = trainers(d)
        ranks[0].tell("steps 2")
        ranks[1].ok("steps 1")
        if d is daemon:
            ranks[1].ok("close")
            run(daemon, "after-leave")
        else:
            ranks[1].ok("leave")
        assert ranks[0].answer().r == 0
        d.left = state(ranks[:1])
    assert daemon.left == quiet.left


def test_reconnect_after_an_abort(zerod):
    """A connection breaks and its step is aborted. When the rank reconnects, its old ring no longer exists."""
    daemon = zerod({"world": {"size": 1}})
    run(daemon, "reconnects")
    puppet = Puppet(daemon).attach()
    assert puppet("form").r == 1
    steps([puppet])


def test_gather_before_there_are_weights(zerod):
    """A gather before the weights exist must not load memory, because all ranks would use it as weights."""
    digests = []
    for attacked in (True, False):
        daemon = zerod({"zero_optimization": {"stage": 3}})
        ranks = [Puppet(daemon, 0, env={"ZEROD_FAILPOINT": "formed:stop"} if attacked else {}).attach(), Puppet(daemon, 1)]
        ranks[0].tell("form")
        if attacked:
            run(daemon, "gather-early")
            wait_for("rank 0 has stopped", lambda: Path(f"/proc/{ranks[0].pid}/stat").read_text().split()[2] == "T")
            os.kill(ranks[0].pid, signal.SIGCONT)
        ranks[1].attach()
        assert ranks[1]("form").r in (0, 1)
        assert ranks[0].answer().r == 0
        digests.append(state(ranks))
    assert digests[0] == digests[1]


def test_hoarded_state(zerod):
    """A client asks for state and keeps all answers. Only the last answer has memory, and all requests are answered."""
    with memory_cgroup(256 << 20) as cgroup:
        daemon = zerod({"world": {"size": 1}})
        cgroup.take(daemon.pid)
        puppet = Puppet(daemon).attach(declare=("param", "big", 2 << 20))
        form([puppet])
        steps([puppet])
        puppet.ok("close")
        assert run(daemon, "hoards-state", 100) == "100 answers\n"
        assert daemon.running(), daemon.log()
        puppet.attach(declare=("param", "big", 2 << 20))
        assert puppet("form").r == 1
        steps([puppet])


def test_state_that_is_read_counts_for_the_job(zerod):
    """
    limits.memory has room for the job and 6 MiB. A read of 8 MiB of state is refused before memory is allocated, and
    the refusal says how much is missing.
    """
    job = {"world": {"size": 1}}
    refused = Puppet(zerod({**job, "limits": {"memory": "1MiB"}})).attach(declare=("param", "big", 2 << 20))("form")
    needed = int(re.search(r"asked +(\d+) bytes", refused.text)[1])
    daemon = zerod({**job, "limits": {"memory": needed + (6 << 20)}})
    [rank] = trainers(daemon, declare=("param", "big", 2 << 20))
    steps([rank])
    answer = rank("read 0 0")
    assert answer.r == REFUSED and answer.error["code"] == 1401, answer
    assert f"asked          {8 << 20} bytes" in answer.text, answer.text
    assert f"allowed        {needed + (6 << 20)} bytes" in answer.text, answer.text
    assert "raise limits.memory" in answer.text
    said_alike(daemon, answer.text)
    steps([rank])
    roomy = zerod({**job, "limits": {"memory": needed + (10 << 20)}})
    [rank] = trainers(roomy, declare=("param", "big", 2 << 20))
    steps([rank])
    for _ in range(3):  # the memory of earlier answers is freed first
        rank.ok("read 0 0")
    steps([rank])


# ---- strangers ------------------------------------------------------------------------------------------------------


NOBODY = ("setpriv", "--reuid=65534", "--regid=65534")


@pytest.fixture
def open_daemon(tmp_path_factory):
    """
    open_daemon(...) -> a daemon whose socket every user can reach. Every user can also run its copy of the attacks.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    started = []

    def start(config=None, **listen):
        folder = tempfile.TemporaryDirectory(prefix="zerod-open-")
        os.chmod(folder.name, 0o755)
        shutil.copy(BUILD.path("tests/hostile"), folder.name)
        daemon = Daemon(BUILD, folder.name, {"listen": {"mode": "0666", **listen}, **(config or {})})
        started.append((daemon, folder))
        return daemon

    yield start
    for daemon, folder in started:
        daemon.stop()
        daemon.kill()
        folder.cleanup()


def as_nobody(daemon, *words, groups=()):
    setpriv = [*NOBODY, f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"]
    result = subprocess.run([*setpriv, Path(daemon.folder) / "hostile", *map(str, words)], capture_output=True, text=True,
                            timeout=60 * daemon.patience, env=environment({"ZEROD_SOCKET": daemon.socket}))
    assert result.returncode == 0, f"{words}: {result.stdout}{result.stderr}\n{daemon.log()[-3000:]}"
    return result.stdout


def test_foreign_uid(open_daemon):
    daemon = open_daemon()
    fds, threads = n_fds_at_rest(daemon), n_threads(daemon)
    for role in (0, 1):
        text = as_nobody(daemon, "foreign", role)
        assert "got            uid 65534, gid 65534" in text
        said_alike(daemon, text)
    settled(daemon, fds, threads)


@pytest.mark.parametrize("listen, groups", [
    ({"allow_users": ["65534"]}, ()),
    ({"allow_groups": ["65534"]}, ()),
    ({"allow_groups": ["31415"]}, (27182, 31415)),
])
def test_allowed_uid(open_daemon, listen, groups):
    """A user that may attach may read the job's status, but not change the job."""
    daemon = open_daemon(**listen)
    as_nobody(daemon, "control-unknown", groups=groups)
    for command in range(3):
        code, answer = as_nobody(daemon, "admin", command, groups=groups).split(" ", 1)
        assert int(code) == os.EX_NOPERM
        assert json.loads(answer)["error"].startswith("E1402 not allowed"), answer
    assert daemon.status()["state"] == "waiting"


@pytest.mark.parametrize("stage", [2, 3])
def test_another_uid_writes_nothing(open_daemon, stage):
    """Another user cannot open memory for writing that it got for reading."""
    daemon = open_daemon(allow_users=["65534"], config={"device": "cpu", "zero_optimization": {"stage": stage}})
    rank_0 = Puppet(daemon, 0).attach()
    rank_0.tell("form")
    as_nobody(daemon, "reopened", 1)
    assert rank_0.answer().r == 0
    rank_0.kill()


def test_silent_connections_keep_nobody_out(open_daemon):
    """Another user's silent connections fill all places. Root still gets an answer, and they are closed in time."""
    daemon = open_daemon({"world": {"size": 2}, "limits": {"clients": 4, "handshake_timeout": "2s"}}, allow_users=["65534"])
    silent = [Attack(daemon, "control-idle", setpriv=[*NOBODY, "--clear-groups"]) for _ in range(4)]
    try:
        assert [a.first for a in silent] == ["welcome\n"] * 4
        fds = n_fds(daemon)
        for _ in range(20):
            assert daemon.status()["state"] == "waiting"
        wait_for("they are closed", lambda: n_fds(daemon) <= fds - 2 * 4, 20 * daemon.patience)
        as_nobody(daemon, "control-unknown")
    finally:
        for a in silent:
            a.kill()


def test_administrators(open_daemon):
    daemon = open_daemon(admin_groups=["31415"])
    as_nobody(daemon, "foreign", 0)
    code, answer = as_nobody(daemon, "admin", 2, groups=(31415,)).split(" ", 1)
    assert int(code) == 0, answer


def test_attackers_of_three_users_at_once(build):
    """One round of scripts/soak hostile, without its time limit."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    campaign = neighbours.Campaign(build)
    try:
        campaign.round(0.5, each=True)
        assert all(sum(campaign.counts[key]) for key in campaign.counts), campaign.counts
    finally:
        campaign.end()


# ---- monkeys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, policy", [(1, "accumulate"), (2, "reject"), (3, "abort_step")])
def test_monkeys(zerod, stage, policy):
    """Both ranks send nearly correct requests at the same time. Then the state is dropped and a job trains."""
    config = {"zero_optimization": {"stage": stage}, "diagnostics": {"on_duplicate": policy}}
    daemon, quiet = zerod(config), zerod(config)
    fds, threads = n_fds_at_rest(daemon), n_threads(daemon)
    for p in trainers(daemon):
        p.ok("close")
    processes = [daemon.spawn(BUILD.path("tests/hostile"), "monkey", 10 * stage + r) for r in range(4)]
    for process in processes:
        assert process.wait() == 0, process.err()
    wait_for("all are gone", lambda: not any(r["attached"] for r in daemon.json("ranks")), 10 * daemon.patience)
    wait_for("it can be dropped", lambda: daemon.ctl("drop", check=False).returncode == 0, 20 * daemon.patience)
    ranks, quiet_ranks = trainers(daemon), trainers(quiet)
    steps(ranks, 2, "micro=2")
    steps(quiet_ranks, 2, "micro=2")
    assert state(ranks) == state(quiet_ranks)
    for p in ranks:
        p.ok("close")
    wait_for("all are gone", lambda: not any(r["attached"] for r in daemon.json("ranks")))
    daemon.ctl("drop")
    settled(daemon, fds, threads)


# ---- nothing is forgotten ----------------------------------------------------------------------------------------------


def test_every_attack_is_run():
    source = Path(__file__).read_text()
    assert len(attacks("stranger", "rank", "stage3")) > 30
    at_once = {attack.split()[0] for attacks in neighbours.LASTING.values() for attack, _ in attacks}
    for name in attacks("other"):
        assert name in at_once or f'"{name}"' in source, f"no test runs {name}"
