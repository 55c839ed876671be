# SPDX-License-Identifier: Apache-2.0
"""On a GPU: a whole training step with the optimizer on the GPU or in host memory, compared with torch and
DeepSpeed."""

import json
import os
import socket
import sys
from contextlib import ExitStack

from gpu import SETUP, StandIns
from harness import ROOT, Daemon, Failure, Process, in_turn, median, program, row, say

TORCH, MASTERS = "torch, fused AdamW, all of it bf16", "torch, fused AdamW, fp32 masters and moments"
ON_GPU, NARROW = "zerod, all on the GPU", "zerod, all on the GPU, moments in bf16"
HOST, MIXED = "zerod, all in host memory", "zerod, gradients on the GPU, optimizer in host memory"
DEEPSPEED = "DeepSpeed, ZeRO-2, optimizer in host memory"
GPU_JOB = {"extra": "device: cuda\ncollective: nccl\n"}
WAYS = {
    TORCH: ("torch", None),
    MASTERS: ("masters", None),
    ON_GPU: ("zerod", GPU_JOB),
    NARROW: ("zerod", {"extra": GPU_JOB["extra"] + "bf16: {bf16_optimizer_states: true}\n"}),
    MIXED: ("zerod", GPU_JOB | {"zero": ", offload_optimizer: {device: cpu}"}),
    HOST: ("zerod", {}),
    DEEPSPEED: ("deepspeed", None),
}
# The model's size; 16 layers have 268 M parameters.
WIDTH, LAYERS = 4096, 16
LEAST_MS = 0.01  # a difference of two medians may be negative


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Trainer(Process):
    def __init__(self, who, setup, environment):
        width, n_layers = (64, 2) if setup is StandIns else (WIDTH, LAYERS)
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        paths = [str(ROOT / "client/python"), *filter(None, [os.environ.get("PYTHONPATH")])]
        super().__init__([sys.executable, str(ROOT / "bench/offload_rank.py"), who, setup.device, str(width), str(n_layers)],
                         env=environment | alone | {"PYTHONPATH": ":".join(paths), "ZEROD_LIBRARY": program("libzerod.so")})

    def step(self):
        self.send()
        return json.loads(self.receive())["ms"]


def start(setup, ways, environment, stack):
    """Starts all trainers at once; the exit stack stops them. Reports those that cannot run. Return: name ->
    Trainer."""
    found = {}
    for name in ways:
        who, job = WAYS[name]
        more = {}
        if job is not None:
            daemon = Daemon(1, env=environment, **job)
            stack.callback(daemon.stop)
            more = {"ZEROD_SOCKET": daemon.socket}
        found[name] = Trainer(who, setup, (environment or os.environ) | more)
        stack.callback(found[name].stop)
    for name in ways:
        try:
            found[name].n_params = int(found[name].receive(300))
        except (Failure, ValueError) as error:
            if name != DEEPSPEED:
                raise
            say(f"  no figures of {name}: {error}")
            del found[name]
    return found


def measure(setup, ways, environment, n):
    """Return: the medians of the milliseconds of a step, by name; and the number of parameters."""
    with ExitStack() as stack:
        trainers = start(setup, ways, environment, stack)
        ms = in_turn({name: trainer.step for name, trainer in trainers.items()}, n)
        return {name: median(values) for name, values in ms.items()}, trainers[TORCH].n_params


def rows_of(ms, mode):
    rows = []
    if ON_GPU in ms:
        rows += [row(f"gpu: a whole step, all on the GPU{mode}", ms[ON_GPU], ms[MASTERS], MASTERS, "ms", 0.9),
                 row(f"gpu: a whole step, moments in bf16{mode}", ms[NARROW], ms[MASTERS], MASTERS, "ms", None)]
    rows += [row(f"gpu: a whole step, {name.removeprefix('zerod, ')}{mode}", ms[name], ms[TORCH], TORCH, "ms", None)
             for name in (MIXED, HOST) if name in ms]
    if DEEPSPEED in ms:
        fastest = min((name for name in (MIXED, HOST) if name in ms), key=ms.get)
        rows.append(row("gpu: what the optimizer in host memory adds to torch's step", max(ms[fastest] - ms[TORCH], LEAST_MS),
                        ms[DEEPSPEED] - ms[TORCH], DEEPSPEED, "ms", 2.0))  # fmt: skip
    return rows


def ways_on(setup, mode):
    """With MPS, only ways that keep everything on the GPU. The stand-ins do not simulate torch's own calls of a GPU."""
    if setup is StandIns:
        return [TORCH, MASTERS, HOST, DEEPSPEED]
    return [TORCH, MASTERS, ON_GPU, NARROW] if mode else list(WAYS)


def gpu_offload(quick, setup=SETUP):
    """A step of a bf16 model on one GPU, with the optimizer on the GPU or in host memory, compared with torch and
    DeepSpeed."""
    rows, table, n = [], [], 3 if quick else 15
    for mode, environment_for in setup.modes():
        try:
            with environment_for() as environment:
                ms, n_params = measure(setup, ways_on(setup, mode), environment, n)
        except Failure as error:
            if not rows:
                raise
            say(f"  no figures{mode}: {error}")
            continue
        rows += rows_of(ms, mode)
        table += [[name + mode, f"{value:.1f}", f"{value - ms[TORCH]:.1f}"] for name, value in ms.items()]
    return rows, {f"medians, {n_params / 1e6:.1f} M parameters": [["", "ms", "ms more than torch's"], *table]}
