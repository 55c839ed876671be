# SPDX-License-Identifier: Apache-2.0
"""
A rank of the kill campaigns with the loop of the README and two micro-batches. It does not ask for its position within
a step. It prints kill-trainer's lines about steps and the end. Processes are forked from a server that has imported
torch.
"""

import hashlib
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import unittest.mock
from pathlib import Path

from conftest import ROOT, SANITIZER
import kills

PACKAGE = ROOT / "client" / "python"


def digest(tensors):
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()[:16]


def train(n_steps):
    import torch
    import zerod

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.Tanh(), torch.nn.Linear(32, 12))
    opt = zerod.Optimizer(model)
    for step in zerod.steps(opt, n_steps):
        with step:
            with zerod.gathered(model):
                print(f"weights {int(step)} {digest(model.parameters())}")
            for micro_batch in range(kills.N_MICRO):
                seed = (int(step) * kills.N_MICRO + micro_batch) * opt.world_size + opt.rank
                x = torch.randn(4, 12, generator=torch.Generator().manual_seed(seed))
                (model(x) - x.flip(1)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            print(f"norm {int(step)} {opt.result.grad_norm.hex()} {int(opt.result.applied)}")
    names = [name for name, _ in model.named_parameters()]
    states = list(opt.full_state_dict()["state"].values())
    with zerod.gathered(model):
        print("final", digest(opt.master(name) for name in names),
              *(digest(state[kind] for state in states if kind in state) for kind in ("exp_avg", "exp_avg_sq")),
              ",".join(str(int(state["step"])) for state in states), digest(model.parameters()))
    opt.close()
    print("done")


def run(variables, out, err, n_steps):
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    os.environ.update(variables)
    train(n_steps)


def server(build):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "numpy", "torch._dynamo", "torch.distributed.fsdp", "zerod"])
    variables = {"ZEROD_LIBRARY": str(build.path("client/libzerod.so")), "PYTHONPATH": str(PACKAGE)} | build.preload()
    with unittest.mock.patch.dict(os.environ, variables):
        multiprocessing.forkserver.ensure_running()
    return context


class Fork:
    """A forked process with the interface of conftest.Process."""

    def __init__(self, build, folder, name, variables, n_steps):
        self.out_path, self.err_path = Path(folder) / f"{name}.out", Path(folder) / f"{name}.err"
        self.out_path.touch()
        self.err_path.touch()
        self.process = server(build).Process(target=run, args=(variables, self.out_path, self.err_path, n_steps))
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def wait(self):
        self.process.join()
        return self.process.exitcode

    def signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.process.kill()
        return self.wait()

    def out(self):
        return self.out_path.read_text(errors="replace")

    def err(self):
        return self.err_path.read_text(errors="replace")

    def check_sanitizers(self):
        assert not SANITIZER.search(self.err()), self.err()


class LoopLives(kills.Lives):
    def start(self):
        life, daemon = len(self.processes), self.daemon
        at = daemon.daemons[daemon.node_of(self.rank)] if hasattr(daemon, "node_of") else daemon
        variables = {"RANK": str(self.rank), "ZEROD_SOCKET": str(at.socket), "OMP_NUM_THREADS": "1"}
        if life < len(self.plan):
            variables["ZEROD_FAILPOINT"] = self.plan[life]
        self.processes.append(Fork(daemon.build, at.folder, f"loop.rank{self.rank}-{life}", variables, self.args))
        at.others.append(self.last)


def start(daemon, plans, args=(), n_steps=kills.N_STEPS):
    """kills.start() for these trainers."""
    return [LoopLives(daemon, None, n_steps, rank, plan) for rank, plan in enumerate(plans)]
