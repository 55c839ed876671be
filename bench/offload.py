# SPDX-License-Identifier: Apache-2.0
"""On a GPU: a whole training step with the optimizer on the GPU or in host memory, beside torch's and DeepSpeed's."""

import json
import os
import socket
import sys
from contextlib import ExitStack

from gpu import SETUP, StandIns
from harness import BUILD, ROOT, Daemon, Failure, Process, in_turn, median, row, say

HOST, ON_GPU = "zerod, optimizer in host memory", "zerod, all on the GPU"
TORCH, DEEPSPEED = "torch, fused AdamW on the GPU", "DeepSpeed, ZeRO-2, optimizer in host memory"
GPU_JOB = "device: cuda\ncollective: nccl\n"
# Of the model; 16 layers are 268 M parameters.
WIDTH, LAYERS = 4096, 16
LEAST_MS = 0.01  # a difference of two medians may be less than nothing


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
                         env=os.environ | alone | {"PYTHONPATH": ":".join(paths), "ZEROD_LIBRARY": str(BUILD / "client/libzerod.so")} | environment)
        self.n_params = int(self.receive(300))

    def step(self):
        self.send()
        return json.loads(self.receive())["ms"]


def start(setup, stack):
    """name -> Trainer, each of which is stopped with the stack. What cannot run here is said."""
    found = {}
    ways = {TORCH: ("torch", None), HOST: ("zerod", ""), ON_GPU: ("zerod", GPU_JOB), DEEPSPEED: ("deepspeed", None)}
    for name, (who, job) in ways.items():
        try:
            environment = {}
            if job is not None:
                if job and setup is StandIns:
                    raise Failure("torch has no stand-in for a GPU here")
                daemon = Daemon(1, extra=job)
                stack.callback(daemon.stop)
                environment = {"ZEROD_SOCKET": daemon.socket}
            found[name] = Trainer(who, setup, environment)
            stack.callback(found[name].stop)
        except (Failure, OSError, ValueError) as error:
            if name in (TORCH, HOST):
                raise
            say(f"  no figures of {name}: {error}")
    return found


def gpu_offload(quick, setup=SETUP):
    """A training step of a bf16 model on one GPU: what the optimizer in host memory adds to torch's step on the GPU."""
    with ExitStack() as stack:
        trainers = start(setup, stack)
        ms = {name: median(values) for name, values in
              in_turn({name: trainer.step for name, trainer in trainers.items()}, 3 if quick else 15).items()}
        n_params = trainers[TORCH].n_params
    rows = [row("gpu: a whole step, optimizer in host memory", ms[HOST], ms[TORCH], TORCH, "ms", None)]
    if ON_GPU in ms:
        rows.append(row("gpu: a whole step, all on the GPU", ms[ON_GPU], ms[TORCH], TORCH, "ms", 0.9))
    if DEEPSPEED in ms:
        rows.append(row("gpu: what the optimizer in host memory adds to torch's step", max(ms[HOST] - ms[TORCH], LEAST_MS),
                        ms[DEEPSPEED] - ms[TORCH], DEEPSPEED, "ms", 2.0))
    table = [[name, f"{value:.1f}", f"{value - ms[TORCH]:.1f}"] for name, value in ms.items()]
    return rows, {f"medians, {n_params / 1e6:.1f} M parameters": [["", "ms", "ms more than torch's"], *table]}
