# SPDX-License-Identifier: Apache-2.0
"""Processes that run in turn: a daemon with its ranks, torch with its ranks, programs that iterate on demand."""

import contextlib
import json
import os
import pathlib
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("ZEROD_BENCH_BUILD", ROOT / "build" / "release"))
MI = 1 << 20
SHARED = "/dev/shm"  # files in memory
EXTENSIONS = ROOT / "build" / "torch-extensions"  # the kernels that DeepSpeed compiles


class Failure(Exception):
    """A benchmark could not run. The text gives the reason."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def program(name):
    """Return: the path of a program or library of the measured build."""
    places = {"zerod": "daemon", "zerodctl": "client/ctl", "zerodrun": "client/run", "zerod-exporter": "client/exporter",
              "zerod-example": "tests/example", "libzerod.so": "client"}
    return str(BUILD / places.get(name, "bench") / name)


def n_cores():
    return len(os.sched_getaffinity(0))


def available_bytes():
    for line in open("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def deepspeed_environment(world, job):
    """Return: the environment of DeepSpeed on CPUs. job: a part of the names of DeepSpeed's shared memory segments."""
    return {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(world), "MASTER_ADDR": job, "MASTER_PORT": "0",
            "TORCH_EXTENSIONS_DIR": str(EXTENSIONS)}


def remove_deepspeed_segments(job):
    """Removes the shared memory that DeepSpeed leaves behind."""
    for segment in pathlib.Path(SHARED).glob(f"deepspeed_allreduce_buffer_*_{job}_*"):
        segment.unlink()


def forget_broken_builds():
    """Removes the locks of processes that ended while DeepSpeed compiled, because the next process would wait for them
    forever."""
    for lock in EXTENSIONS.glob("*/lock"):
        lock.unlink()


class Process:
    """A program that answers each line on its standard input with one line."""

    def __init__(self, argv, env=None, log=None):
        self.name = pathlib.Path(argv[0]).name
        if self.name.startswith("python"):
            self.name = pathlib.Path(argv[1]).name
        self.log = log or tempfile.TemporaryFile()
        self.popen = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, env=env)
        self.buffer = b""

    def send(self, line=""):
        try:
            self.popen.stdin.write(line.encode() + b"\n")
            self.popen.stdin.flush()
        except BrokenPipeError:
            raise Failure(self.why("ended early")) from None

    def receive(self, timeout=120):
        until = time.monotonic() + timeout
        while b"\n" not in self.buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.popen.stdout], [], [], left)[0]:
                raise Failure(self.why(f"no answer in {timeout} s"))
            data = os.read(self.popen.stdout.fileno(), 1 << 20)
            if not data:
                raise Failure(self.why("ended early"))
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return line.decode()

    def why(self, what):
        self.log.seek(0)
        said = self.log.read().decode(errors="replace").strip().splitlines()
        return f"{self.name}: {what}" + (f": {said[-1]}" if said else "")

    def finish(self):
        """Closes the program's input. Return: the rest of the program's output."""
        rest, _ = self.popen.communicate(timeout=60)
        return (self.buffer + rest).decode()

    def stop(self):
        if self.popen.poll() is None:
            if self.popen.stdin and not self.popen.stdin.closed:
                try:
                    self.popen.stdin.close()
                except BrokenPipeError:
                    pass
            try:
                self.popen.wait(10)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        self.popen.stdout.close()
        self.log.close()


def stop_all(processes):
    """Closes the input of all processes before it waits for any of them, because ranks leave together."""
    for process in processes:
        if process.popen.poll() is None:
            process.popen.stdin.close()
    for process in processes:
        process.stop()


ADAMW = "optimizer: {type: AdamW, params: {lr: 1.0e-3}}\n"


class Daemon:
    """zerod on a private socket. Options that are not given have the default configuration's values, except that
    clipping is on."""

    def __init__(self, world, stage=2, extra="", zero="", cores=None, clipping=1.0, prefix=(), nodes="", optimizer="",
                 kept=False, env=None):
        self.folder = tempfile.mkdtemp(prefix="zerod-bench-")
        self.socket = f"{self.folder}/s"
        self.config = f"{self.folder}/zerod.yaml"
        with open(self.config, "w") as file:
            file.write(
                f"job: bench\nlisten: {{socket: {self.socket}}}\nworld: {{size: {world}{nodes}}}\n"
                f"zero_optimization: {{stage: {stage}{zero}}}\n"
                f"{optimizer or ADAMW}gradient_clipping: {clipping}\n" + extra
            )
        self.log = open(f"{self.folder}/log", "w+b")
        command = [*prefix, program("zerod"), "--config", self.config]
        if kept:  # zerodrun starts the daemon again if it ends
            command = [*prefix, program("zerodrun"), "--serve", "--zerod", program("zerod"), "--daemon-restarts", "100",
                       "--config", self.config]
        self.popen = subprocess.Popen(command, stdout=self.log,
                                      stderr=self.log, env=env,
                                      preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None)
        until = time.monotonic() + 10
        while not os.path.exists(self.socket):
            if self.popen.poll() is not None or time.monotonic() > until:
                self.log.seek(0)
                said = self.log.read().decode(errors="replace").strip()
                self.stop()
                raise Failure(f"zerod did not start: {said}")
            time.sleep(0.01)

    def ctl(self, *command):
        run = subprocess.run([program("zerodctl"), "--socket", self.socket, "--json", *command], capture_output=True,
                             text=True, timeout=60)
        if run.returncode != 0:
            raise Failure(f"zerodctl {command[0]}: {run.stderr.strip() or run.stdout.strip()}")
        return json.loads(run.stdout)

    def stop(self):
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(30)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class ZerodJob:
    """A daemon and its ranks, which make steps on demand."""

    def __init__(self, world, stage=2, elems=64 * MI, params=64, buffer_elems=None, compute_us=0, gather=False,
                 extra="", zero="", optimizer="", kept=False, clipping=1.0, types="", more=()):
        self.ranks = []
        self.daemon = Daemon(world, stage, extra, zero, clipping=clipping, optimizer=optimizer, kept=kept)
        options = ["--socket", self.daemon.socket, "--elems", str(elems), "--params", str(params), "--on-demand"]
        options += ["--compute-us", str(compute_us), *more]
        if gather:
            options += ["--gather"]
        if types:
            options += [types]
        if buffer_elems:
            options += ["--buffer-elems", str(buffer_elems)]
        try:
            for rank in range(world):
                self.ranks.append(Process([program("bench-rank"), "--rank", str(rank), *options]))
            for rank in self.ranks:
                rank.receive()
        except BaseException:
            self.stop()
            raise

    def begin_step(self):
        for rank in self.ranks:
            rank.send()

    def end_step(self):
        """Return: milliseconds of the pushes, the tail (from the last push to the last answer) and the whole step, and
        the rows."""
        rows = [json.loads(rank.receive()) for rank in self.ranks]
        start, pushed, done = min(r["start"] for r in rows), max(r["pushed"] for r in rows), max(r["done"] for r in rows)
        return {"push": (pushed - start) / 1e6, "tail": (done - pushed) / 1e6, "total": (done - start) / 1e6,
                "rows": rows}

    def step(self):
        """Makes one step with all ranks."""
        self.begin_step()
        return self.end_step()

    def status(self):
        return self.daemon.ctl("status")

    def daemon_pid(self):
        return self.status()["pid"]

    def stop(self):
        stop_all(self.ranks)
        self.daemon.stop()

    def close(self):
        self.stop()


class TorchJob:
    """The chains of torch and of other peers (peers/), with as many processes as zerod. Runs one chain on demand."""

    def __init__(self, world, elems=64 * MI, params=64, threads=None, network=None, families=("gloo",)):
        self.ranks = []
        self.folder = tempfile.mkdtemp(prefix="zerod-bench-", dir=SHARED)
        threads = threads or max(1, n_cores() // world)
        env = dict(os.environ, OMP_NUM_THREADS=str(threads), GLOO_SOCKET_IFNAME="eth0" if network else "lo",
                   **deepspeed_environment(world, self.name()))
        script = str(ROOT / "bench" / "torch_rank.py")
        try:
            for rank in range(world):
                inside = network.inside(rank) if network else []
                self.ranks.append(Process([*inside, sys.executable, script, str(rank), str(world), str(elems),
                                           str(params), str(threads), self.folder, ",".join(families)], env=env))
            # name -> family, and whether it clips. DeepSpeed compiles its kernels when they are first used.
            self.chains = [json.loads(rank.receive(600)) for rank in self.ranks][0]
        except BaseException:
            self.stop()
            raise
        self.iterations = dict.fromkeys(self.chains, 0)

    def name(self):
        return pathlib.Path(self.folder).name

    def ask(self, chain, **what):
        """Sends a request to all ranks. Return: the answers."""
        for rank in self.ranks:
            rank.send(json.dumps({"chain": chain, **what}))
        return [json.loads(rank.receive()) for rank in self.ranks]

    def step(self, chain):
        """Return: milliseconds from when all ranks have their gradients until all ranks have their weights."""
        rows = self.ask(chain, iteration=self.iterations[chain])
        self.iterations[chain] += 1
        return (max(r["done"] for r in rows) - min(r["start"] for r in rows)) / 1e6

    def reset(self, chain):
        """Resets the chain, with weights of zero."""
        self.ask(chain, reset=True)
        self.iterations[chain] = 0

    def slow(self, first):
        """Return: the chains that take over twice as long as the fastest chain of their family. first: chain -> ms of a
        first run."""
        fastest = {}
        for chain, ms in first.items():
            family = self.chains[chain]["family"]
            fastest[family] = min(ms, fastest.get(family, ms))
        return {chain for chain, ms in first.items() if ms > 2 * fastest[self.chains[chain]["family"]]}

    def stop(self):
        stop_all(self.ranks)
        shutil.rmtree(self.folder, ignore_errors=True)
        remove_deepspeed_segments(self.name())

    def close(self):
        self.stop()


def in_turn(sides, n, n_warm_up=2):
    """Calls the sides in turn, beginning with another side in each round. Return: each side's results, by name."""
    results = {name: [] for name in sides}
    names = list(sides)
    for i in range(n_warm_up + n):
        for k in range(len(names)):
            name = names[(i + k) % len(names)]
            result = sides[name]()
            if i >= n_warm_up:
                results[name].append(result)
    return results


def in_both_orders(make, step, n):
    """
    Makes the jobs twice, in this order and in reverse. Of jobs that exist at the same time, the job that was made first
    is slower by up to 4 %, whichever it is. make: functions that make a job, by name. step: makes one step of a job.
    Return: each job's results of n rounds in each order, by name.
    """
    results = {name: [] for name in make}
    for names in (list(make), list(make)[::-1]):
        with contextlib.ExitStack() as stack:
            jobs = {name: stack.enter_context(contextlib.closing(make[name]())) for name in names}
            for name, found in in_turn({name: (lambda job=job: step(job)) for name, job in jobs.items()}, n).items():
                results[name] += found
    return results


def row(name, zerod, peer, peer_name, unit, goal, ratio=None):
    """Makes a row. Ratios are peer / zerod, of times, so above 1 zerod is faster. goal: None if the figure is only
    information."""
    ratio = peer / zerod if ratio is None else ratio
    return {"name": name, "zerod": round(zerod, 4), "peer": round(peer, 4), "peer_name": peer_name, "unit": unit,
            "ratio": round(ratio, 3), "goal": goal, "holds": goal is None or ratio >= goal}


def not_run(name, peer_name, unit, goal, why):
    """Makes a row that could not be measured. It has no ratio, and does not hold."""
    return {"name": name, "peer_name": peer_name, "unit": unit, "goal": goal, "not_run": why, "holds": False}


def allowance(name, unit, planned, held, difference, allowed):
    """Makes a row for how far a figure is from the planned one. It has no ratio, because no peer has this figure."""
    return {"name": name, "unit": unit, "plan": round(planned, 4), "held": round(held, 4),
            "difference": round(difference, 4), "allowed": round(allowed, 4), "holds": difference <= allowed}


median = statistics.median
