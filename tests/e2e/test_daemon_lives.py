# SPDX-License-Identifier: Apache-2.0
"""The daemon holds the state of a job: no stray signal ends it, and no reader of its log can stop it."""

import os
import signal
import socket
from contextlib import suppress

import pytest

from conftest import wait_for
from puppet import steps, trainers

STRAY = [signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF,
         signal.SIGIO, signal.SIGPWR, signal.SIGXCPU, signal.SIGXFSZ]


def refused_packet(daemon):
    """A connection that is closed with E1403, which the daemon logs in two lines or more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.settimeout(20 * daemon.patience)
        s.connect(str(daemon.socket))
        s.send(b"\xff nonsense")
        assert b"E1403" in s.recv(1 << 17)


@pytest.fixture
def stderr(tmp_path):
    """A pipe for a daemon's standard error, which nobody reads: a descriptor of it, and the prefix of the command."""
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
