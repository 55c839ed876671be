# SPDX-License-Identifier: Apache-2.0
"""
Where a late rank is while other ranks wait for it. E1303, `zerodctl stacks` and `zerodctl report` show the line,
whatever the rank does there, and the rank is not disturbed.
"""

import ctypes
import json
import os
import re
import signal
import sys
import time

import pytest
from conftest import ROOT, wait_for
from tiers import full

N_STEPS = 4
CONFIG = {"diagnostics": {"stall_warning": "1s"}, "zero_optimization": {"stage": 2}}


class Loader:
    """A data loader. On rank 1 it hangs from the third batch on, in the given way."""

    def __init__(self, rank, hang):
        self.rank, self.hang = rank, hang

    def __next__(self):
        import torch

        self.n = getattr(self, "n", 0) + 1
        if self.rank == 1 and self.n == 3:
            self.hang()
        return torch.ones(2, 4)


def sleep_in_loader():
    time.sleep(600)  # in the loader


def wait_in_collective():
    """Calls a collective that no other rank calls."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", int(os.environ["COLLECTIVE_PORT"]), 1, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)  # in a collective


def stop_in_c():
    ctypes.PyDLL(None).sleep(600)  # in C, with the interpreter lock


def spin():
    while True:  # in Python
        pass


def train(hang):
    import torch

    import zerod

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    opt = zerod.Optimizer(model)
    loader = Loader(opt.rank, globals()[hang])
    for _ in range(N_STEPS):
        model(next(loader)).sum().backward()
        opt.step()
        opt.zero_grad()
    opt.close()


def line_of(comment):
    with open(__file__) as file:
        return next(n for n, line in enumerate(file, 1) if line.rstrip().endswith(f"  # {comment}"))


def stalled(daemon, says="where"):
    """Return: the text of E1303 for step 2. Earlier steps may have such a text too, because a busy machine was slow."""
    texts = [d["text"] for d in daemon.json("diagnostics") if d["code"] == "E1303" and d["step"] == 2]
    return next((text for text in texts if says in text), None)


PLACES = {
    "sleep_in_loader": ("in the loader", "sleep_in_loader"),
    "wait_in_collective": ("in a collective", "wait_in_collective"),
    "stop_in_c": ("in C, with the interpreter lock", "stop_in_c"),
    "spin": ("in Python", "spin"),
}


@pytest.mark.parametrize("hang", [*list(PLACES)[:3], *full("spin")])
def test_where(zerod, start, hang):
    daemon = zerod(CONFIG)
    port = {"COLLECTIVE_PORT": "0"}
    for rank in range(2):
        start(daemon, train, rank=rank, hang=hang, variables=port)
    text = wait_for("E1303", lambda: stalled(daemon))
    comment, function = PLACES[hang]
    line = line_of(comment)
    frame = rf"test_stacks\.py:{line}{'|' + str(line + 1) if hang == 'spin' else ''} in {function}\n"
    where = re.search(r"^  where +rank 1, main thread(.*\n(?: {17}.*\n)+)", text, re.MULTILINE)
    assert where and re.search(frame, where[1]), text
    assert re.search(r"test_stacks\.py:\d+ in __next__\n", where[1]) and re.search(r"test_stacks\.py:\d+ in train\n", where[1])
    assert ("keeps Python's interpreter lock" in where[1]) == (hang == "stop_in_c")
    shown = daemon.ctl("stacks").stdout
    assert re.search(rf"^rank 1 \(pid \d+\): step 2, micro-batch 0, computing\nmain thread(.|\n)*{frame}", shown, re.MULTILINE), shown
    assert re.search(r"^rank 0 \(pid \d+\): step 2, micro-batch \d, (boundary|step)\nmain thread:\n", shown, re.MULTILINE), shown
    report = json.loads(daemon.ctl("report", "-").stdout)
    stacks = report["daemon"]["stacks"]
    assert [s["rank"] for s in stacks] == [0, 1] and re.search(frame, stacks[1]["stack"])


def test_stopped(zerod, start):
    """
    A stopped process cannot answer, so the kernel's answer is shown. After SIGCONT the process answers and trains on.
    """
    daemon = zerod(CONFIG)
    ranks = [start(daemon, train, rank=rank, hang="sleep_a_little") for rank in range(2)]
    wait_for("step 2", lambda: daemon.status()["step"] >= 2)
    pid = daemon.json("ranks")[1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        said = "\n  where          rank 1: its process is stopped by a signal; kill -CONT lets it go on\n"
        wait_for("E1303", lambda: stalled(daemon, said))
        shown = daemon.ctl("stacks").stdout
        assert "\nits process is stopped by a signal; kill -CONT lets it go on\n" in shown
    finally:
        os.kill(pid, signal.SIGCONT)
    for rank in ranks:
        rank.result()


def sleep_a_little():
    time.sleep(4)


def run_on():
    """
    Trains while its stack is asked for again and again. The program has its own handlers for all signals except one.
    """
    import torch

    import zerod

    heard, children = [], []
    for number in (signal.SIGUSR2, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)):
        if number != signal.SIGRTMIN + 3:
            signal.signal(number, lambda number, _frame: heard.append(number))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    opt = zerod.Optimizer(model)
    for step in range(200):
        time.sleep(0.01)
        if step % 50 == 0:
            child = os.fork()  # as DataLoader does
            if child == 0:
                os._exit(7)
            children.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    return heard, children, signal.getsignal(signal.SIGRTMIN + 3)


def test_asked_while_it_runs(zerod, start):
    daemon = zerod(CONFIG)
    ranks = [start(daemon, run_on, rank=rank) for rank in range(2)]
    wait_for("step 5", lambda: daemon.status()["step"] >= 5)
    n = 0
    while daemon.status()["step"] < 150:
        for o in daemon.json("stacks"):
            n += bool(re.match(r"main thread:\n(  \S+:\d+ in \S+\n)*  test_stacks\.py:\d+ in run_on\n", o["stack"] or ""))
    assert n > 2
    for rank in ranks:
        heard, children, _ = rank.result()
        assert heard == [] and children == [7] * 4


def test_on_another_node(zerod, start, monkeypatch):
    """The daemon whose rank waits asks the daemon of the late rank, also for the kernel's answer."""
    monkeypatch.setenv("ZEROD_NODES", "2")
    daemon = zerod(CONFIG)
    for rank in range(2):
        start(daemon, train, rank=rank, hang="sleep_in_loader")
    text = wait_for("E1303", lambda: stalled(daemon.daemons[0]))
    line = line_of("in the loader")
    assert re.search(rf"\n  where +rank 1, main thread:\n +test_stacks\.py:{line} in sleep_in_loader\n", text), text


REPLACED = """
import json, os, signal, subprocess, time, torch, zerod
model = torch.nn.Linear(4, 2)
opt = zerod.Optimizer(model)
for step in range(2):
    model(torch.ones(2, 4)).sum().backward()
    opt.step()
    opt.zero_grad()
    if step == 0 and opt.rank == 0:
        ask = lambda what: json.loads(subprocess.run(["zerodctl", "--json", what], capture_output=True).stdout or "null")
        before = ask("status")["pid"]
        os.kill(before, signal.SIGKILL)
        while (status := ask("status") or {}).get("pid", before) == before:
            time.sleep(0.05)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not all(o["stack"] for o in ask("stacks")):
            time.sleep(0.2)
        print("told:", [bool(o["stack"]) for o in ask("stacks")])
opt.close()
"""


def test_after_the_daemon_was_replaced(build, spawn, tmp_path):
    """The watch connects to the next daemon by itself, although its rank makes no call while it waits."""
    (tmp_path / "replaced.py").write_text(REPLACED)
    path = os.pathsep.join(str(build.path(folder)) for folder in ("client/run", "client/ctl", "daemon"))
    run = spawn(build.path("client/run/zerodrun"), "-n", 2, "--", sys.executable, tmp_path / "replaced.py",
                env={"PATH": path + os.pathsep + os.environ["PATH"], "PYTHONPATH": str(ROOT / "client/python"),
                     "ZEROD_LIBRARY": str(build.path("client/libzerod.so")), **build.preload()})
    assert run.wait() == 0, run.err()
    assert "[0] told: [True, True]" in run.out(), run.out() + run.err()
