# SPDX-License-Identifier: Apache-2.0
"""On a GPU: the kernels compared with copies and with torch; tests and costs of processes that share the GPU."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager, nullcontext

from harness import MI, ROOT, Failure, Process, in_turn, median, program, row, say

MPS = "nvidia-cuda-mps-control"
FACTS = {
    "handles": "memory of another process, by a descriptor",
    "handles-legacy": "the same, by an IPC handle",
    "killed": "its owner is killed at work, the descriptor is held",
    "killed-legacy": "the same, an IPC handle is open",
    "updates": "updates with undo slots are killed and given again",
    "slices": "two processes at once",
    "ranks": "two ranks of NCCL",
}


class Setup:
    """The programs and sizes of a measurement."""

    program = program("bench-gpu")
    device = "cuda"
    elems = 256 * MI
    n_params = 64
    bytes = 64 * MI

    @staticmethod
    def modes():
        """Yields modes: without MPS, and with MPS if it is installed. A mode is a name and a context manager of an
        environment."""
        yield "", nullcontext
        if shutil.which(MPS):
            yield ", MPS", mps
        else:
            say(f"  there are no figures with MPS: {MPS} is not installed")


class StandIns(Setup):
    """A small run on the simulated CUDA of tests/sim, which only tests the benchmark. Its figures mean nothing."""

    program = program("bench-gpu-sim")
    device = "cpu"
    elems = 1 << 18
    n_params = 4
    bytes = MI

    @staticmethod
    def modes():
        yield "", lambda: nullcontext(dict(os.environ, ZEROD_SIM="devices=1"))


SETUP = StandIns if os.environ.get("ZEROD_TEST_GPU") == "one" else Setup


def control(environment, *lines):
    """Sends lines to the control daemon of MPS. Return: the control daemon's answer."""
    return subprocess.run([MPS], env=environment, input="".join(f"{line}\n" for line in lines), capture_output=True,
                          text=True, timeout=30).stdout.strip()


@contextmanager
def mps():
    """Starts a private control daemon of MPS. It is an error if no process has used the control daemon."""
    folder = tempfile.mkdtemp(prefix="zerod-mps-")
    environment = dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
    try:
        subprocess.run([MPS, "-d"], env=environment, check=True, timeout=30)
        try:
            yield environment
            if not control(environment, "get_server_list"):
                raise Failure("MPS has started no server: what ran did not use it")
        finally:
            control(environment, "quit -t 5")
    except (OSError, subprocess.SubprocessError) as error:
        raise Failure(f"MPS: {error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- kernels -------------------------------------------------------------------------------------------------------


class Side(Process):
    """A program that runs the kernel or chain named by a line and answers with the time."""

    def ms(self, name):
        self.send(name)
        return json.loads(self.receive())["ms"]


NARROW = {"bf16-moments": "bf16 moments, stochastic", "8bit": "8-bit moments",
          "8bit-24": "8-bit moments, 24-bit masters"}


def measure(setup, environment, n):
    """Return: the milliseconds of each kernel and of each of torch's chains, measured in turn."""
    sides = []
    try:
        ours = Side([setup.program, "kernels", "--elems", str(setup.elems), "--params", str(setup.n_params)],
                    env=environment)
        sides.append(ours)
        ours.receive()
        torch = Side([sys.executable, str(ROOT / "bench" / "gpu_torch.py"), setup.device, str(setup.elems),
                      str(setup.n_params)], env=environment)
        sides.append(torch)
        chains = json.loads(torch.receive())
        kernels = ["copy-fp32", "adamw", "copy-bf16", "adamw-bf16", "adamw-imported", "adamw-undo", "sequence"]
        kernels += [f"{what}-{kind}" for kind in NARROW for what in ("copy", "adamw")]
        ms = in_turn({kernel: (lambda kernel=kernel: ours.ms(kernel)) for kernel in kernels} |
                     {chain: (lambda chain=chain: torch.ms(chain)) for chain in chains}, n)
    finally:
        for side in sides:
            side.stop()
    return {name: median(values) for name, values in ms.items()}, chains


def kernel_rows(ms, chains, mode):
    adamw, *sequences = chains
    fastest = min(sequences, key=ms.get)
    return [row(f"gpu: adamw, fp32{mode}", ms["adamw"], ms["copy-fp32"], "copy of the same bytes", "ms", 0.90),
            row(f"gpu: adamw, fp32 and bf16 weights{mode}", ms["adamw-bf16"], ms["copy-bf16"],
                "copy of the same bytes", "ms", 0.90),
            row(f"gpu: adamw, fp32{mode}", ms["adamw"], ms[adamw], adamw, "ms", 1.0),
            row(f"gpu: unscale, norm, clip, adamw, cast{mode}", ms["sequence"], ms[fastest], fastest, "ms", 1.3),
            row(f"gpu: adamw on imported memory{mode}", ms["adamw-imported"], ms["adamw"], "memory of its own", "ms",
                0.95),
            row(f"gpu: adamw with undo slots{mode}", ms["adamw-undo"], ms["adamw"], "without", "ms", 0.95),
            *(row(f"gpu: adamw, {name}{mode}", ms[f"adamw-{kind}"], ms[f"copy-{kind}"], "copy of the same bytes", "ms",
                  0.90) for kind, name in NARROW.items())]


def gpu_kernels(quick, setup=SETUP):
    """The kernels compared with copies of the same bytes, torch's fused AdamW and its chains; without and with MPS."""
    rows, table = [], []
    for mode, environment_for in setup.modes():
        try:
            with environment_for() as environment:
                ms, chains = measure(setup, environment, 5 if quick else 31)
        except Failure as error:
            if not rows:
                raise
            say(f"  no figures{mode}: {error}")
            continue
        rows += kernel_rows(ms, chains, mode)
        table += [[name + mode, f"{value:.3f}"] for name, value in ms.items()]
    return rows, {f"medians, {setup.elems / MI:g} Mi parameters in {setup.n_params} tensors": [["", "ms"], *table]}


# ---- facts ---------------------------------------------------------------------------------------------------------


def ask(setup, command, environment):
    """Runs a command. Return: its answers; the last one may be an error."""
    argv = [setup.program, command, "--bytes", str(setup.bytes)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        try:
            status = subprocess.run(argv, env=environment, stdout=out, stderr=errors, timeout=120).returncode
        except subprocess.TimeoutExpired:
            status = "120 s, and no answer"
        out.seek(0)
        errors.seek(0)
        answers = [line.split("\t") for line in out.read().splitlines() if "\t" in line]
        if status != 0:
            answers.append(["ended", "; ".join(errors.read().splitlines()) or str(status)])
    return answers


def taken_for_granted(answers, mode):
    """Return: rows for zerod's assumptions. If they hold, a job loses nothing when its engine is killed."""
    killed, ranks, updates = (dict(answers[name]) for name in ("killed", "ranks", "updates"))
    seen = {"memory with a descriptor outlives its owner": killed.get("it can be written") == "yes",
            "nothing writes once a killed process has ended": killed.get("it changes after that") == "no",
            "writes of a killed kernel are in the order of its fences":
                updates.get("the update goes on", "").startswith("to the same bits"),
            "two ranks of NCCL share it": "ended" not in ranks and len(ranks) > 1}
    return [row(f"gpu: {what}{mode}", float(so), 1.0, "what is taken for granted", "so", 1.0, float(so))
            for what, so in seen.items()]


def gpu_facts(quick, setup=SETUP):
    """Tests zerod's assumptions about GPU memory that processes share, and measures what sharing costs; without and
    with MPS."""
    rows, table = [], []
    for mode, environment_for in setup.modes():
        answers = {}
        for command in FACTS:  # with a new MPS server for each command, because a killed process may harm the server
            try:
                with environment_for() as environment:
                    answers[command] = ask(setup, command, environment)
            except Failure as error:
                answers[command] = [["ended", str(error)]]
        rows += taken_for_granted(answers, mode)
        table += [[FACTS[command] + mode, *answer] for command in FACTS for answer in answers[command]]
    return rows, {f"memory of {setup.bytes / MI:.0f} MiB": [["", "", "answer"], *table]}
