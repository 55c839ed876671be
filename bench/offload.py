# SPDX-License-Identifier: Apache-2.0
"""
On a GPU: whole steps of a model of Llama's shape (llama_rank.py) with zerod's optimizer in host memory or on the GPU, compared
with torch, DeepSpeed and torchao.
"""

import json
import os
import socket
import sys

import harness
from gpu import SETUP, Setup, StandIns
from harness import (EXTENSIONS, ROOT, Daemon, Failure, Process, available_bytes, forget_broken_builds, in_turn, median, not_run, program,
                     row, say)  # fmt: skip

ALONE = "GPU alone: forward and backward, gradients freed"
MASTERS = "torch, fused AdamW, fp32 masters, all on the GPU"
HOST = "zerod, all in host memory"
NARROW, PLAIN = f"{HOST}, bf16 moments", f"{HOST}, no overlap_update"
ON_GPU = "zerod, all on the GPU"
ZERO_2, ZERO_3 = "DeepSpeed, ZeRO-2 offload", "DeepSpeed, ZeRO-3 offload"
TORCHAO = "torchao, CPUOffloadOptimizer, fp32 weights, autocast, no clipping"
# name -> side of llama_rank.py; what the daemon's configuration has beside the defaults (None: no daemon); bytes of host
# memory for each parameter
WAYS = {
    ALONE: ("alone", None, 0),
    MASTERS: ("masters", None, 0),
    HOST: ("zerod-overlap", "", 24),
    NARROW: ("zerod-overlap", "bf16: {bf16_optimizer_states: true}\n", 20),
    PLAIN: ("zerod", "", 24),
    ON_GPU: ("zerod", "device: cuda\ncollective: nccl\n", 0),
    ZERO_2: ("deepspeed-2", None, 24),
    ZERO_3: ("deepspeed-3", None, 24),
    TORCHAO: ("torchao", None, 20),
}

BOUND = "1.1 x the longer of GPU alone and update alone, + 15 ms"
BOUND_FACTOR, BOUND_MS = 1.1, 15.0
# How many times as fast zerod is to be, for each of the three sizes. None: there is no goal and no row.
DEEPSPEED_GOALS = (2.0, 2.6, 1.0)
TORCHAO_GOALS = (1.0, 1.0, 1.0)
TORCH_GOALS = (None, None, 1.0)
ON_GPU_GOAL = 0.9

N_MEASURED = 3  # steps of a turn
N_CHANGED = 8  # steps whose early updates are dropped. After three of them there are none for 8 steps or more
CHUNK_ELEMS = 64 * 1024


class Llama:
    """A model of 1.159 G parameters, and sizes: rows and tokens in each."""

    config = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20, "num_attention_heads": 32, "vocab_size": 32000}
    sizes = ((4, 1024), (8, 2048), (16, 2048))
    device = "cuda"
    modes = staticmethod(Setup.modes)

    @classmethod
    def n_params(cls):
        """Return: the number of parameters, without the few of norms."""
        c = cls.config
        layer = 4 * c["hidden_size"] ** 2 + 3 * c["hidden_size"] * c["intermediate_size"]
        return 2 * c["vocab_size"] * c["hidden_size"] + c["num_hidden_layers"] * layer

    @classmethod
    def stand_in(cls, name):
        """Return: a rank's further arguments, and further variables of the daemon and the rank."""
        return [], {}, {}


class Tiny(Llama):
    """A model for the stand-ins, which only tests the benchmark. Its figures mean nothing."""

    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128}
    sizes = ((2, 64), (4, 64), (8, 64))
    device = "cpu"
    modes = staticmethod(StandIns.modes)

    @classmethod
    def stand_in(cls, name):
        of_rank = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        if name == ON_GPU:
            sim = harness.BUILD / "tests/sim"
            return (["sim_cuda"], {"ZEROD_DEVICE_ENGINE": str(sim / "zerod-engine-nccl-sim"), "ZEROD_SIM": "devices=1,never-blocks"},
                    of_rank | {"ZEROD_LIBCUDA": str(sim / "libcuda-sim.so"), "ZEROD_SIM": "devices=1,open"})  # fmt: skip
        return (["late_cuda"] if WAYS[name][1] is not None else []), {}, of_rank


LLAMA = Tiny if SETUP is StandIns else Llama


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Trainer(Process):
    """A side's process and, for zerod, its daemon."""

    def __init__(self, name, llama, environment):
        side, extra, bytes_each = WAYS[name]
        needed, available = bytes_each * llama.n_params(), available_bytes()
        if available < needed:
            raise Failure(f"no room: it needs {needed / 2**30:.0f} GiB of host memory, and {available / 2**30:.0f} GiB are available")
        self.daemon, environment = None, environment or os.environ
        arguments, of_daemon, of_rank = llama.stand_in(name)
        paths = [ROOT / "client/python", ROOT / "tests/torch/programs", *filter(None, [os.environ.get("PYTHONPATH")])]
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                 "TORCH_EXTENSIONS_DIR": str(EXTENSIONS), "PYTHONPATH": ":".join(map(str, paths)),
                 "ZEROD_LIBRARY": program("libzerod.so")}  # fmt: skip
        if extra is not None:
            self.daemon = Daemon(1, extra=extra, env=environment | of_daemon)
            alone["ZEROD_SOCKET"] = self.daemon.socket
        super().__init__([sys.executable, str(ROOT / "bench/llama_rank.py"), side, llama.device, json.dumps(llama.config), *arguments],
                         env=environment | alone | of_rank)  # fmt: skip

    def ask(self, size, what):
        self.send(f"{size[0]} {size[1]} {what}")
        return json.loads(self.receive(300))

    def updates(self, llama):
        """
        Return: milliseconds of the daemon's update when all of it comes after the decision, beside nothing else; and the share
        of all chunks so far whose update in the backward was accepted.
        """
        status, ns = self.daemon.ctl("status"), []
        for _ in range(N_CHANGED):
            self.ask(llama.sizes[0], "changed")
            ns.append(self.daemon.ctl("status")["time"]["update"]["last_ns"])
        n_chunks = status["n_applied"] * llama.n_params() / CHUNK_ELEMS
        return median(ns[3:]) / 1e6, status["counters"]["n_early_updates"] / n_chunks

    def stop(self):
        super().stop()
        if self.daemon:
            self.daemon.stop()


class Sides:
    """Sides that run in turn. A side that cannot run has a reason instead of figures; the other sides go on."""

    def __init__(self, llama, environment=None):
        self.llama, self.environment = llama, environment
        self.running, self.why = {}, {}

    def __enter__(self):
        forget_broken_builds()
        return self

    def __exit__(self, *exc):
        for name in list(self.running):
            self.stop(name)

    def start(self, *names):
        """Starts the sides one after another. An earlier one takes what it wants of the host's memory first."""
        for name in names:
            say(f"  {name}")
            try:
                self.running[name] = Trainer(name, self.llama, self.environment)
                self.running[name].receive(600)  # DeepSpeed compiles its kernels when they are first used
            except Failure as failure:
                self.give_up(name, failure)

    def stop(self, name):
        if name in self.running:
            self.running.pop(name).stop()

    def give_up(self, name, failure):
        self.why[name] = str(failure)
        say(f"    {name}: {failure}")
        self.stop(name)

    def updates(self, name):
        """Return: the answer of Trainer.updates(), or None if the side has ended."""
        try:
            return self.running[name].updates(self.llama) if name in self.running else None
        except Failure as failure:
            self.give_up(name, failure)

    def measure(self, n):
        """Return: (name, size) -> answers of n turns of each running side that lived through all of them."""
        answers = {}

        def turn(name, size):
            if name not in self.running:
                return
            try:
                answers.setdefault((name, size), []).append(self.running[name].ask(size, N_MEASURED))
            except Failure as failure:
                answers.pop((name, size), None)
                self.give_up(name, failure)

        for size in self.llama.sizes:
            in_turn({name: lambda name=name, size=size: turn(name, size) for name in self.running}, n, 0)
        return answers


def ms_of(answers):
    """Return: (name, size) -> median."""
    return {key: median([ms for answer in turns for ms in answer["ms"]]) for key, turns in answers.items()}


def tokens(size):
    return f"{size[0]} x {size[1]}"


def compare(sides, ms, mine, theirs, goals, mode=""):
    """Return: a row for each size that has a goal."""
    rows = []
    for size, goal in zip(sides.llama.sizes, goals):
        name = f"gpu: {mine.removeprefix('zerod, ')}, {tokens(size)} tokens{mode}"
        if goal is None:
            continue
        if (mine, size) in ms and (theirs, size) in ms:
            rows.append(row(name, ms[mine, size], ms[theirs, size], theirs, "ms", goal))
        else:
            missing = next(side for side in (theirs, mine, ALONE) if side in sides.why)
            rows.append(not_run(name, theirs, "ms", goal, f"{missing}: {sides.why[missing]}"))
    return rows


def table_of(answers, mode=""):
    """Return: lines of all sides: tokens, side, ms, loss and norm of the last step."""
    ms = ms_of(answers)
    return [[tokens(size), name + mode, f"{ms[name, size]:.1f}", f"{turns[-1]['loss']:.3f}",
             "-" if turns[-1]["norm"] is None else f"{turns[-1]['norm']:.3f}"]
            for (name, size), turns in sorted(answers.items(), key=lambda item: item[0][1])]  # fmt: skip


def title(llama):
    return f"medians, {llama.n_params() / 1e9:.3f} G parameters", ["tokens", "", "ms", "loss", "norm"]


def n_turns(quick):
    return 1 if quick else 4


def one_by_one(sides, reference, others, quick):
    """Runs each of the others in turn with the reference, so that memory has to suffice for two sides. Yields name and answers."""
    sides.start(reference)
    for name in others:
        sides.start(name)
        yield name, sides.measure(n_turns(quick)) if len(sides.running) == 2 else {}
        sides.stop(name)


def bounds(llama, ms, found):
    """Return: (BOUND, size) -> the longest time that the goal allows. found: of updates()."""
    return {(BOUND, size): BOUND_FACTOR * max(ms[ALONE, size], found[0]) + BOUND_MS
            for size in llama.sizes if found and (ALONE, size) in ms}  # fmt: skip


def gpu_offload(quick, llama=LLAMA):
    """Whole steps of a Llama of 1.2 G parameters on the GPU with the optimizer in host memory, beside the limits of GPU and host."""
    rows, table, updates = [], [], []
    with Sides(llama) as sides:
        for name, answers in one_by_one(sides, ALONE, (HOST, NARROW, PLAIN), quick):
            ms, found = ms_of(answers), sides.updates(name)
            rows += compare(sides, ms | bounds(llama, ms, found), name, BOUND, [1.0] * 3)
            table += table_of(answers)
            if found:
                updates.append([name, f"{found[0]:.1f}", f"{100 * found[1]:.0f} %"])
    caption, head = title(llama)
    return rows, {caption: [head, *table], "the daemon's update": [["", "alone, ms", "accepted from the backward"], *updates]}


def gpu_peers(quick, llama=LLAMA):
    """The same with the default configuration in turn with torch on the GPU, DeepSpeed ZeRO-2 and ZeRO-3 offload, torchao."""
    rows, table = [], []
    peers = {MASTERS: TORCH_GOALS, ZERO_2: DEEPSPEED_GOALS, ZERO_3: DEEPSPEED_GOALS, TORCHAO: TORCHAO_GOALS}
    with Sides(llama) as sides:
        for peer, answers in one_by_one(sides, HOST, peers, quick):
            rows += compare(sides, ms_of(answers), HOST, peer, peers[peer])
            table += table_of(answers)
    caption, head = title(llama)
    return rows, {caption: [head, *table]}


def gpu_device(quick, llama=LLAMA):
    """The same all on the GPU (device: cuda), in turn with torch's fused AdamW on fp32 masters; without and with MPS."""
    rows, table = [], []
    for mode, environment_for in llama.modes():
        try:
            with environment_for() as environment, Sides(llama, environment) as sides:
                sides.start(MASTERS, ON_GPU)
                answers = sides.measure(n_turns(quick))
                rows += compare(sides, ms_of(answers), ON_GPU, MASTERS, [ON_GPU_GOAL] * 3, mode)
                table += table_of(answers, mode)
        except Failure as error:
            if not rows:
                raise
            say(f"  no figures{mode}: {error}")
    caption, head = title(llama)
    return rows, {caption: [head, *table]}
