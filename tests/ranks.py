# SPDX-License-Identifier: Apache-2.0
"""
Ranks for tests: functions of a test module that run in separate processes, with a real daemon.

    def train(steps):                    # runs as a rank: RANK, WORLD_SIZE and ZEROD_SOCKET are set
        opt = zerod.Optimizer(model())
        ...
        return result                    # anything that pickles

    def test_it(zerod, run):
        results = run(zerod({"zero_optimization": {"stage": 2}}), train, steps=3)

Processes are forked from a server that has imported torch once, with the modules that zerod and optimizers need. An
exception of a function is raised in the test as a Crash.
"""

import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# For tests that import zerod themselves. pytest.ini has the package's path.
os.environ.setdefault("ZEROD_LIBRARY", str(Path(os.environ.get("ZEROD_BUILD", ROOT / "build")) / "client/libzerod.so"))


class Crash(Exception):
    """A rank ended with an exception, or without a result."""


def _rank(variables, path, function, arguments, connection):
    import torch

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(variables)
    sys.path[:0] = path
    torch.set_num_threads(1)
    module, name = function
    try:
        result = getattr(__import__(module), name)(**arguments)
        answer = pickle.dumps((True, result))
    except BaseException as e:  # the test must also see SystemExit and KeyboardInterrupt
        answer = pickle.dumps((False, f"{type(e).__name__}: {e}\n{traceback.format_exc()}"))
    connection.send_bytes(answer)
    sys.stdout.flush()
    sys.stderr.flush()


@pytest.fixture(scope="session")
def server(build):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "numpy", "torch._dynamo", "torch.distributed.fsdp"])
    with pytest.MonkeyPatch.context() as patch:
        for name, text in build.preload().items():
            patch.setenv(name, text)
        multiprocessing.forkserver.ensure_running()
    return context


@pytest.fixture
def start(server, build):
    """start(daemon, function, rank, **arguments) -> a process with .result(timeout)."""
    started = []

    def go(daemon, function, rank=0, variables=None, **arguments):
        ours, theirs = server.Pipe(duplex=False)
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(daemon.local_rank(rank)), "WORLD_SIZE": str(daemon.world_size),
            "ZEROD_SOCKET": str(daemon.socket_of(rank)), "ZEROD_LIBRARY": str(build.path("client/libzerod.so")),
            "OMP_NUM_THREADS": "1",
        } | (variables or {})
        path = [str(ROOT / "client" / "python"), str(Path(sys.modules[function.__module__].__file__).parent)]
        process = server.Process(
            target=_rank, args=(environment, path, (function.__module__, function.__name__), arguments, theirs))
        process.start()
        theirs.close()
        started.append(process)

        def result(timeout=120):
            if not ours.poll(timeout):
                os.kill(process.pid, signal.SIGUSR1)  # makes it print its stack into the test's output
                raise Crash(f"rank {rank} did not answer within {timeout} s")
            try:
                ok, value = pickle.loads(ours.recv_bytes())
            except EOFError:
                process.join(10)
                raise Crash(f"rank {rank} ended with {process.exitcode} and said nothing") from None
            process.join(30)
            if not ok:
                raise Crash(f"rank {rank}: {value}")
            return value

        process.result = result
        return process

    yield go
    for process in started:
        if process.is_alive():
            process.kill()
        process.join()


@pytest.fixture
def run(start):
    """run(daemon, function, **arguments) runs the function on all ranks. Return: the list of its results."""

    def go(daemon, function, variables=None, **arguments):
        ranks = [start(daemon, function, r, variables, **arguments) for r in range(daemon.world_size)]
        return [rank.result() for rank in ranks]

    return go
