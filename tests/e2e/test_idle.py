# SPDX-License-Identifier: Apache-2.0
"""An idle daemon sleeps without a time-out, and wakes when something is due."""

import signal
import socket
import time
from pathlib import Path

import pytest

from conftest import Daemon, wait_for
from keeper import KeptDaemon
from puppet import Puppet, form, steps, trainers

WINDOW_S = 2.0
SETTLES_S = 2.5  # seconds until zerodctl's connections have ended and the last status was sent to the service manager


def switches(pid):
    """Return: how often each thread has begun to wait."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        lines = dict(line.split(":", 1) for line in (thread / "status").read_text().splitlines())
        found[thread.name] = int(lines["voluntary_ctxt_switches"])
    return found


def wakes(*pids):
    """Return: the threads' wake-ups in WINDOW_S, the lowest of three counts, because other causes may wake a thread."""
    counts = []
    while len(counts) < 3 and 0 not in counts:
        before = [switches(pid) for pid in pids]
        time.sleep(WINDOW_S)
        counts.append(sum(sum(after.values()) - sum(b.values()) for b, after in zip(before, map(switches, pids))))
    return min(counts)


@pytest.fixture
def idle(zerod, build):
    if "thread" in build.options["b_sanitize"]:
        pytest.skip("the thread sanitizer has a thread of its own, which wakes")
    return zerod


def test_without_trainers(idle):
    daemon = idle({"world": {"size": 2}})
    time.sleep(SETTLES_S)
    assert wakes(daemon.pid) == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_formed(idle, stage):
    """While trainers compute or do nothing, the daemon sleeps, and so do libzerod's threads."""
    daemon = idle({"world": {"size": 2}, "zero_optimization": {"stage": stage}})
    ranks = trainers(daemon)
    steps(ranks, 2)
    time.sleep(SETTLES_S)
    assert wakes(daemon.pid, *(p.pid for p in ranks)) == 0
    steps(ranks)


def test_a_rank_has_gone(idle):
    daemon = idle({"world": {"size": 2}})
    ranks = trainers(daemon)
    steps(ranks)
    ranks[1].kill()
    time.sleep(SETTLES_S)
    assert wakes(daemon.pid) == 0


def test_one_waits(idle):
    """While a rank waits for another, the daemon wakes for its time-outs."""
    daemon = idle({"world": {"size": 2}, "diagnostics": {"stall_warning": "1500ms"}})
    ranks = trainers(daemon)
    steps(ranks)
    time.sleep(SETTLES_S)
    ranks[0].ok("begin")
    ranks[0].ok("pushes")
    ranks[0].tell("end")
    wait_for("a warning", lambda: "E1303" in daemon.log(), 10)
    assert ranks[1].ok("begin") and ranks[1].ok("pushes") and ranks[1].ok("end")
    assert ranks[0].answer().r == 0
    time.sleep(SETTLES_S)
    assert wakes(daemon.pid) == 0


def test_silent_connection(idle):
    """A silent connection is closed after its time-out, although nothing else wakes the daemon."""
    daemon = idle({"world": {"size": 1}, "limits": {"handshake_timeout": "1s"}})
    time.sleep(0.5)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(str(daemon.socket))
        silent.settimeout(10 * daemon.patience)
        began = time.monotonic()
        while silent.recv(65536):
            pass
        assert 0.9 < time.monotonic() - began < 3 * daemon.patience


def test_save_is_due(idle, tmp_path):
    """A checkpoint is saved at its time, even without a step."""
    daemon = idle({"world": {"size": 1}, "checkpoint": {"dir": str(tmp_path / "c"), "save_interval": "6s"}})
    ranks = trainers(daemon)
    began = time.monotonic()
    steps(ranks)
    time.sleep(1)
    assert wakes(daemon.pid) == 0
    wait_for("the checkpoint", lambda: (tmp_path / "c" / "step-00000001").exists(), 20)
    assert time.monotonic() - began > 5
    time.sleep(SETTLES_S)
    assert wakes(daemon.pid) == 0


def test_watchdog(idle, build, tmp_path):
    """A daemon with a watchdog wakes only for that."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        limit_s = 4 * build.patience
        daemon = Daemon(build, tmp_path, {"world": {"size": 1}},
                        {"NOTIFY_SOCKET": tmp_path / "notify", "WATCHDOG_USEC": int(limit_s * 1e6)})
        try:
            time.sleep(SETTLES_S)
            surplus = []
            while len(surplus) < 3 and all(n > 0 for n in surplus):  # the lowest of three, as in wakes()
                drain(manager)
                before = sum(switches(daemon.pid).values())
                time.sleep(limit_s)
                n_fed = drain(manager).count(b"WATCHDOG=1")
                assert 2 <= n_fed <= 5
                # A wake-up when it is due, one a tick later, and one for the socket.
                surplus.append(sum(switches(daemon.pid).values()) - before - 3 * (n_fed + 1))
            assert min(surplus) <= 0
        finally:
            daemon.stop()


def drain(sock):
    messages = []
    while True:
        try:
            messages.append(sock.recv(65536))
        except BlockingIOError:
            return messages


def test_death_in_its_sleep(build, tmp_path):
    """The next daemon knows when the sleeping one died, not only when it fell asleep."""
    if "thread" in build.options["b_sanitize"]:
        pytest.skip("without a companion only the last tick is known")
    daemon = KeptDaemon(build, tmp_path, {"world": {"size": 1}})
    try:
        puppet = Puppet(daemon).attach()
        form([puppet])
        steps([puppet])
        time.sleep(6)  # it sleeps after at most 2 s, when it has sent its status
        daemon.signal(signal.SIGKILL)
        wait_for("its end", lambda: daemon.tend())
        steps([puppet])
        assert 0 < daemon.status()["away_ns"] < 3e9 * build.patience
    finally:
        puppet.kill()
        daemon.kill()
