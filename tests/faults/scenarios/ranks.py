# SPDX-License-Identifier: Apache-2.0
"""Slow, stopped, dead, duplicate or early processes: E1109, E1301 to E1303."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import stat
import time
from typing import Any

import torch
from torch.nn.functional import mse_loss

from ..corpus import ALL, ANY, Expect, scenario
from ..models import Net, names

SOON = {"diagnostics": {"stall_warning": "1s", "stall_timeout": "1h"}}
LATER = {"diagnostics": {"stall_warning": "10min", "stall_timeout": "1h"}}  # a loaded machine is slow without a fault
N_LONG = 4


def train(t: Any, in_step: Any = None, n: int = 3, close: bool = True, make: Any = Net) -> None:
    """in_step(model, opt, loss, step) runs between forward and backward."""
    model = t.model(make)
    opt = t.attach(model)
    t.mark(f"attached-{t.rank}")
    for step in t.steps(opt, n):
        x, y = t.batch(step)
        loss = mse_loss(model(x), y)
        if in_step:
            in_step(model, opt, loss, step)
        loss.backward()
        opt.step()
        opt.zero_grad()
    if close:
        opt.close()


# ---- E1303: a rank is late ----------------------------------------------------------------------------------


@scenario(
    Expect(1303, "M7", rank=0, step=1, micro_batch=ANY, says=("on             rank 1", "in dawdle"), fix=("zerodctl stacks",), exception="",
           sticky=False),
    policy=SOON, repaired_policy=LATER, pattern="slow", trains=True, echoes=(1303,))
def slow_rank(t: Any) -> None:
    """Rank 1 needs four seconds before it begins a backward. A warning reports this."""

    def dawdle(_model: Any, _opt: Any, _loss: Any, step: int) -> None:
        if t.faulty and t.rank == 1 and step == 1 and t.real:
            time.sleep(4)

    train(t, dawdle)


def stop_and_go_on(run: Any) -> None:
    ranks = [run.start(r) for r in range(2)]
    if run.faulty:
        run.await_mark("stop-me")
        os.kill(ranks[1].pid, signal.SIGSTOP)
        run.until_said(1303, "on             rank 1 (pid")
        os.kill(ranks[1].pid, signal.SIGCONT)
    run.wait(*ranks)


@scenario(
    Expect(1303, params=names("embed", "h.0.fc"), rank=0, step=1, micro_batch=ANY, says=("on             rank 1 (pid PID",),
           exception="", sticky=False),
    policy=SOON, repaired_policy=LATER, pattern="SIGSTOP", trains=True, echoes=(1303,), direct=stop_and_go_on)
def stopped_rank(t: Any) -> None:
    """Rank 1 is stopped in the middle of its backward. A warning says who waits for what, and the run continues."""

    def pause(_grad: torch.Tensor) -> None:
        t.mark("stop-me")
        time.sleep(1)

    def wait_for_it(_module: Any, inputs: Any) -> None:
        if t.real and t.faulty and t.rank == 1 and t.opt.position.step == 1 and not t.marked("stop-me"):
            inputs[0].register_hook(pause)  # called after the pushes of the second block and the head

    def make() -> Net:
        net = Net()
        net.h[1].register_forward_pre_hook(wait_for_it)
        return net

    train(t, make=make)


def stop_for_good(run: Any) -> None:
    ranks = [run.start(r) for r in range(2)]
    if run.faulty:
        run.await_mark("stop-me")
        os.kill(ranks[1].pid, signal.SIGSTOP)
        run.wait(ranks[0])
        ranks[1].kill()
    else:
        run.wait(*ranks)


@scenario(
    Expect(1303, "M7", rank=0, step=1, micro_batch=ANY, says=("on             rank 1", "step aborted"),
           exception="StepAborted", told=0,
           sticky=False),
    policy={"diagnostics": {"stall_warning": "1s", "stall_timeout": "15s"}}, repaired_policy=LATER,
    pattern="SIGSTOP", echoes=(1302, 1303), direct=stop_for_good)
def stopped_for_good(t: Any) -> None:
    """Rank 1 is stopped and not continued. After stall_timeout the step is aborted, and rank 0 is told who was late."""

    def wait_for_it(_model: Any, _opt: Any, _loss: Any, step: int) -> None:
        if t.faulty and t.rank == 1 and step == 1:
            t.mark("stop-me")
            time.sleep(100)

    train(t, wait_for_it)


# ---- E1302: a rank has died ---------------------------------------------------------------------------------


@scenario(
    Expect(1302, rank=1, step=1, micro_batch=ANY, says=("step aborted",), fix=("start the rank again",),
           exception="StepAborted", told=0, sticky=False),
    policy={"limits": {"reattach_timeout": "1s"}}, pattern="killed", echoes=(1302,))
def killed_rank(t: Any) -> None:
    """Rank 1 is killed and has no successor."""

    def die(_model: Any, _opt: Any, _loss: Any, step: int) -> None:
        if t.faulty and t.rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    train(t, die)


def start_again(run: Any) -> None:
    ranks = [run.start(r) for r in range(2)]
    ranks[1].wait()
    run.wait(run.start(1, life=1), ranks[0])


@scenario(pattern="m", tolerates=(1302,), direct=start_again, stages=(1, 2, 3))
def killed_and_started_again(t: Any) -> None:
    """Rank 1 is killed in the middle of a backward. Its successor continues, and the numbers are the same."""

    def die(model: Any, _opt: Any, _loss: Any, step: int) -> None:
        if t.real and t.rank == 1 and step == 1 and t.life == 0:
            # All gradients behind the second block are pushed by then.
            model.h[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    train(t, die)


def cut(opt: Any) -> None:
    """Closes this process's connection to the daemon, like a broken network."""
    path = os.environ["ZEROD_SOCKET"]
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as s:
                if s.family == socket.AF_UNIX and s.getpeername() == path:
                    s.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


@scenario(pattern="l", tolerates=(1302,))
def dropped_connection(t: Any) -> None:
    """The connection breaks after a backward. The program attaches again and repeats its pushes."""
    model = t.model(Net)
    opt = t.attach(model)
    broken = False
    while opt.position.step < 3:
        step = opt.position.step
        x, y = t.batch(step)
        try:
            mse_loss(model(x), y).backward()
            if t.real and t.rank == 1 and step == 1 and not broken:
                broken = True
                cut(opt)
            opt.step()
        except RuntimeError as error:
            assert type(error).__name__ == "ConnectionLost", repr(error)
            opt.close()
            opt = t.attach(model)
            continue
        opt.zero_grad()
    assert broken or not t.real or t.rank != 1
    opt.close()


# ---- E1302: a rank has left ---------------------------------------------------------------------------------


@scenario(
    Expect(1302, rank=1, step=2, micro_batch=ANY, says=("a rank has left", "on_leave is stop"),
           fix=("same number of steps",), told=0, sticky=False),
    pattern="early", echoes=(1302,))
def one_rank_finishes_early(t: Any) -> None:
    """Rank 1 has data for two steps, rank 0 for three."""
    train(t, n=2 if t.faulty and t.rank == 1 else 3)


@scenario(policy={"diagnostics": {"on_leave": "continue"}}, pattern="early")
def one_rank_has_left_and_may(t: Any) -> None:
    """All ranks do their steps, and one closes long before the other. This is allowed."""
    train(t)
    if t.real and t.rank == 0:
        time.sleep(0.3)


# ---- E1301, E1109: who may attach ---------------------------------------------------------------------------


def one_too_many(run: Any) -> None:
    if not run.faulty:
        return run.wait(*[run.start(r) for r in range(2)])
    ranks = [run.start(r) for r in range(2)]
    run.await_mark("attached-1")
    run.wait(run.start(1, life=1))
    run.mark("go")
    run.wait(*ranks)


@scenario(
    Expect(1301, rank=1, says=("held by", "pid PID"), fix=("its own rank",), exception="RankTaken", told=1,
           sticky=False),
    pattern="n", trains=True, direct=one_too_many)
def two_processes_one_rank(t: Any) -> None:
    """A second process claims to be rank 1. It is refused, and the first one is not disturbed."""

    def wait_for_the_other(_model: Any, _opt: Any, _loss: Any, step: int) -> None:
        if t.faulty and step == 1:
            t.await_mark("go")

    train(t, wait_for_the_other)


def two_runs(run: Any) -> None:
    run.wait(*[run.start(r, env={"ZEROD_RUN_ID": "monday"}) for r in range(2)])
    run.mark("second")
    name = "tuesday" if run.faulty else "monday"
    run.wait(*[run.start(r, life=1, env={"ZEROD_RUN_ID": name}) for r in range(2)])


@scenario(
    Expect(1109, rank=ALL, says=("tuesday", "monday", "at epoch 2"), fix=("ZEROD_RUN_ID=monday", "zerodctl drop"),
           exception="OtherRun", sticky=False),
    pattern="E1109", direct=two_runs)
def state_of_another_run(t: Any) -> None:
    """The daemon has the state of monday's run. Tuesday's run is refused, and monday's may continue."""
    train(t, n=2 if t.real and t.life == 0 else N_LONG)


# ---- forks and ends -----------------------------------------------------------------------------------------


@scenario(pattern="fork")
def fork_after_attach(t: Any) -> None:
    """A child that inherits the connection ends normally, which does not disturb its parent."""

    def fork(_model: Any, _opt: Any, _loss: Any, step: int) -> None:
        if not t.real or step != 1:
            return
        child = os.fork()
        if child == 0:  # the end of an interpreter, without this program's harness
            gc.collect()
            atexit._run_exitfuncs()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    train(t, fork)


@scenario(pattern="fork")
def step_in_a_fork(t: Any) -> None:
    """A child that asks for the step is refused by libzerod, and its parent continues."""

    def fork(_model: Any, opt: Any, loss: Any, step: int) -> None:
        if not t.real or step != 1:
            return
        child = os.fork()
        if child == 0:
            try:
                opt.step()
            except RuntimeError as error:
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0, "the child was not told that it is a fork"

    train(t, fork)


class Numbers(torch.utils.data.Dataset):
    def __init__(self, t: Any) -> None:
        self.t = t

    def __len__(self) -> int:
        return 3

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.t.batch(step)


@scenario(pattern="fork")
def data_loader_workers(t: Any) -> None:
    """Workers of a DataLoader inherit the connection, and keep it while they live."""
    model = t.model(Net)
    opt = t.attach(model)
    loader = torch.utils.data.DataLoader(Numbers(t), batch_size=None, num_workers=1 if t.real else 0,
                                         multiprocessing_context="fork" if t.real else None)
    for x, y in loader:
        mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    opt.close()


@scenario(pattern="exit", fresh=True, tolerates=(1302,), limit=300)
def exit_without_close(t: Any) -> None:
    """The interpreter ends with an attached optimizer."""
    train(t, close=False)


@scenario(pattern="exit", fresh=True, tolerates=(1007, 1302), limit=300)
def exit_with_gradients(t: Any) -> None:
    """The program ends after a backward, without a step."""
    model = t.model(Net)
    opt = t.attach(model)
    for step in t.steps(opt):
        x, y = t.batch(step)
        mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    x, y = t.batch(3)
    mse_loss(model(x), y).backward()
