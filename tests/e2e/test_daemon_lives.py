# SPDX-License-Identifier: Apache-2.0
"""
The daemon has the state of a job, so nothing may end it: no stray signal, and no reader of its log. Without descriptors
or memory it reports that.
"""

import os
import resource
import select
import signal
import socket
import subprocess
from contextlib import contextmanager, suppress

import pytest

from conftest import wait_for
from puppet import REFUSED, Puppet, all_do, diagnostics, n_fds_at_rest, steps, trainers

STRAY = [signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF,
         signal.SIGIO, signal.SIGPWR, signal.SIGXCPU, signal.SIGXFSZ]


def refused_packet(daemon):
    """Makes a connection that is closed with E1403, which the daemon logs in at least two lines."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.settimeout(20 * daemon.patience)
        s.connect(str(daemon.socket))
        s.send(b"\xff nonsense")
        assert b"E1403" in s.recv(1 << 17)


@pytest.fixture
def stderr(tmp_path):
    """A pipe, read by nobody, for a daemon's stderr. Yields a descriptor of it, and the prefix of the command."""
    path = tmp_path / "stderr"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    yield fd, ("sh", "-c", f'exec "$0" "$@" 2>"{path}"')
    with suppress(OSError):
        os.close(fd)


def fill(pipe):
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 4096)


def drain(pipe):
    data = b""
    with suppress(BlockingIOError):
        while chunk := os.read(pipe, 1 << 16):
            data += chunk
    return data.decode()


def test_stray_signals_do_nothing(zerod):
    daemon = zerod()
    ranks = trainers(daemon)
    for number in [*STRAY, *STRAY]:
        daemon.signal(number)
    steps(ranks)
    wait_for("SIGHUP is not logged", lambda: "SIGHUP changes nothing" in daemon.log())
    assert daemon.status()["step"] == 1
    assert daemon.log().count("SIGHUP changes nothing") == 1


def test_log_whose_reader_has_gone(zerod, stderr):
    pipe, prefix = stderr
    daemon = zerod(prefix=prefix)
    ranks = trainers(daemon)
    os.close(pipe)
    refused_packet(daemon)
    steps(ranks)
    assert daemon.status()["step"] == 1


def test_log_that_nobody_reads(zerod, stderr):
    pipe, prefix = stderr
    daemon = zerod(prefix=prefix)
    ranks = trainers(daemon)
    fill(pipe)
    refused_packet(daemon)
    steps(ranks)
    assert daemon.status()["step"] == 1
    said = ""

    def told():
        nonlocal said
        said += drain(pipe)
        return "E1403" in said
    wait_for("the lines that waited", told)


def test_log_that_nobody_reads_does_not_hold_up_the_end(zerod, stderr):
    pipe, prefix = stderr
    daemon = zerod(prefix=prefix)
    fill(pipe)
    refused_packet(daemon)
    daemon.stop()  # SIGTERM, and exit status 0 within seconds


def test_strangers_fill_neither_the_log_nor_what_is_kept(zerod):
    daemon = zerod()
    ranks = trainers(daemon)
    told = ranks[1]("read 8 1")  # a frozen parameter has no moments
    assert told.r == REFUSED
    for _ in range(400):
        refused_packet(daemon)
    steps(ranks)
    assert told.text in [d["text"].rstrip("\n") for d in diagnostics(daemon)]
    assert 0 < daemon.log().count("E1403 bad message refused\n") < 40


# ---- descriptors and memory -----------------------------------------------------------------------------------------


@contextmanager
def limited(daemon, n_more):
    """Limits the daemon to n_more further descriptors."""
    soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    n_fds_at_rest(daemon)
    highest = max(map(int, os.listdir(f"/proc/{daemon.pid}/fd")))
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (highest + 1 + n_more, hard))
    try:
        yield
    finally:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (soft, hard))


def is_told_of_descriptors(answer):
    assert answer.r == REFUSED and answer.error["code"] == 1401, answer
    assert "zerod has no file descriptor left for it" in answer.text and "ulimit -n" in answer.text, answer.text
    return True


@pytest.mark.parametrize("stage", [2, 3])
def test_state_is_read_whole_or_not_at_all(zerod, stage):
    daemon = zerod({"world": {"size": 1}, "zero_optimization": {"stage": stage}})
    [rank] = trainers(daemon)
    steps([rank])
    right, refused = rank.ok("read 0 0").value, 0
    for n_more in range(4):
        with limited(daemon, n_more):
            answer = rank("read 0 0")
        if answer.r == 0:
            assert answer.value == right, f"{n_more} descriptors more: garbage"
        else:
            refused += is_told_of_descriptors(answer)
    assert refused
    steps([rank])


@pytest.mark.parametrize("stage", [2, 3])
def test_window_opens_with_its_memory_or_not_at_all(zerod, stage):
    daemon = zerod({"zero_optimization": {"stage": stage}})
    ranks = trainers(daemon)
    steps(ranks)
    refused = 0
    for n_more in range(5):
        with limited(daemon, n_more):
            answers = all_do(ranks, "window")
        again = [rank for rank, answer in zip(ranks, answers, strict=True) if answer.r and is_told_of_descriptors(answer)]
        refused += len(again)
        assert [a.r for a in all_do(again, "window")] == [0] * len(again)
        assert [a.r for a in all_do(ranks, "commit")] == [0, 0]
        steps(ranks)
    assert refused


def test_idle_connections_leave_the_job_its_descriptors(zerod):
    daemon = zerod({"limits": {"handshake_timeout": "10min"}}, prefix=("prlimit", "--nofile=64:64"))
    ranks = trainers(daemon)
    idle = []
    try:
        for _ in range(30):
            idle.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            idle[-1].connect(str(daemon.socket))
        answered = wait_for("a connection is refused", lambda: select.select(idle, [], [], 0)[0], 10 * daemon.patience)
        assert b"E1401" in answered[0].recv(1 << 17)
        steps(ranks)
        assert ranks[1].ok("read 0 0").value is not None
        all_do(ranks, "window")
        assert [a.r for a in all_do(ranks, "commit")] == [0, 0]
    finally:
        for s in idle:
            s.close()
    wait_for("zerodctl gets in", lambda: daemon.ctl("status", check=False).returncode == 0)


@pytest.mark.parametrize("n", [4, 8, 12, 22, 24])
def test_too_few_descriptors_are_told_at_the_start(build, tmp_path, n):
    config = tmp_path / "zerod.yaml"
    config.write_text(f"world: {{size: 2}}\nlisten: {{socket: {tmp_path}/s}}\n")
    result = subprocess.run(["prlimit", f"--nofile={n}:{n}", build.path("daemon/zerod"), "--config", config],
                            capture_output=True, text=True, timeout=60)
    assert result.returncode > 0, result
    assert f"RLIMIT_NOFILE) is {n}, but a job of 2 ranks needs" in result.stderr, result.stderr


@pytest.mark.parametrize("nth", range(3, 7))
def test_connection_that_cannot_be_watched(zerod, nth):
    """
    epoll has no memory for the nth descriptor. The first descriptors are the workers' and the listener's, and each
    connection has at least two.
    """
    daemon = zerod(env={"ZEROD_FAILPOINT": f"watch:error@{nth}"})
    for _ in range(4):
        daemon.ctl("status", check=False)
    ranks = trainers(daemon)
    steps(ranks)
    assert daemon.log().count("Cannot allocate memory") == 1


# ---- connections that end ----------------------------------------------------------------------------------


def test_trainers_of_a_daemon_that_is_killed(zerod):
    daemon = zerod({"world": {"size": 2}})
    ranks = trainers(daemon)
    ranks[0].tell("steps 1")
    daemon.signal(signal.SIGKILL)
    answer = ranks[0].answer()
    assert "it was stopped or killed" in answer.text, answer
    daemon.popen.wait(20 * daemon.patience)
    daemon.checked = True


@pytest.mark.parametrize("listens", [True, False])
def test_connection_that_is_closed_alone(zerod, tmp_path, listens):
    """If a connection is closed without a message, libzerod reports whether the daemon still listens."""
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        puppet = Puppet(zerod(), env={"ZEROD_SOCKET": path})
        puppet.tell("connect rank=0 timeout=1000")
        connection = listener.accept()[0]
        assert connection.recv(1 << 17)
        if not listens:
            listener.close()
        connection.close()
        text = puppet.answer().text
    assert ("closed only this connection and is still running; its log has the reason" in text) == listens, text
    assert ("zerod was stopped or killed, and no other daemon has answered" in text) != listens, text


def test_threads_are_those_that_it_may_use(zerod):
    """threads: auto means one for each CPU that the daemon may use, not for each CPU of the machine."""
    for prefix, n in (("taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))), 1), ((), len(os.sched_getaffinity(0))):
        daemon = zerod({"threads": "auto"}, prefix=prefix)
        wait_for(daemon.log, lambda: f", {n} threads, " in daemon.log())