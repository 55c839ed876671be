# SPDX-License-Identifier: Apache-2.0
"""
Fixtures of the end-to-end tests: a real daemon on a private socket, and its client processes.

    def test_something(zerod, build):
        daemon = zerod({"world": {"size": 2}, "zero_optimization": {"stage": 2}})
        ranks = [daemon.spawn(build.path("tests/kill-trainer"), "--steps", 20, rank=r) for r in range(2)]
        for rank in ranks:
            assert rank.wait() == 0, rank.err()
        assert daemon.status()["step"] == 20

The fixture `build` is the build folder (environment ZEROD_BUILD, default build/). `zerod` starts daemons, `spawn` other
programs. When a test ends, processes that still run are killed, and every daemon is stopped with SIGTERM. The test
fails unless the daemon exits with 0 within seconds, without a report of a sanitizer.
"""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

import gpu_kinds

pytest_plugins = ["ranks"]  # for tests with PyTorch

ROOT = Path(__file__).resolve().parents[1]
SANITIZER = re.compile(r"(ERROR|WARNING): \w+Sanitizer|runtime error: |SUMMARY: \w+Sanitizer")
DEFAULTS = {
    "job": "test",
    "listen": {"mode": "0600"},
    "world": {"size": 2},
    # Stage 3 gathers in tests even on one node, as it does between nodes. Tests of its default on one node override
    # this.
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 2000, "stage3_on_one_node": "gathered"},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.01}},
    "threads": 2,
}


def merge(base, changes):
    """Return: base overridden by changes, level by level. None removes a key."""
    result = dict(base)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merge(result[key], value)
        else:
            result[key] = value
    return result


def wait_for(what, condition, timeout=60):
    """Waits until condition() is true. Return: its value. what: a text, or a function that returns one."""
    deadline, pause = time.monotonic() + timeout, 0.01
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain: " + (what() if callable(what) else what)
        time.sleep(pause)
        pause = min(1.1 * pause, 0.05)  # the process that the test waits for needs the processor too
    return value


class Build:
    """A build folder."""

    def __init__(self, folder):
        self.folder = Path(folder).resolve()
        options = self.folder / "meson-info" / "intro-buildoptions.json"
        self.options = {o["name"]: o["value"] for o in json.loads(options.read_text())} if options.exists() else {}
        sanitize = self.options.get("b_sanitize", "none")
        self.sanitize = [] if sanitize in ("none", []) else sanitize if isinstance(sanitize, list) else sanitize.split(",")
        # Everything is slower under a sanitizer, so the tests' time limits are multiplied by this.
        self.patience = 6 if self.sanitize else 1

    def path(self, name):
        path = self.folder / name
        if not path.exists():
            pytest.fail(f"{path} is missing: build first (scripts/build), or set ZEROD_BUILD")
        return path

    def preload(self):
        """Return: variables for Python to load a libzerod with sanitizers, whose runtimes must be loaded first."""
        if "thread" in self.sanitize:
            pytest.skip("Python cannot load a libzerod that was built with the thread sanitizer")
        if not self.sanitize:
            return {}
        linked = subprocess.run(["ldd", self.path("client/libzerod.so")], capture_output=True, text=True, check=True).stdout
        runtimes = re.findall(r"lib\w*san\.so\S* => (\S+)", linked)
        return {"LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0:exitcode=99"}  # Python leaks

    def compile(self, source, target):
        """Compiles a C program, given as text, with libzerod and the headers of the tree."""
        file = Path(f"{target}.c")
        file.write_text(source)
        flags = [f"-fsanitize={','.join(self.sanitize)}"] if self.sanitize else []
        subprocess.run(
            [*shlex.split(os.environ.get("CC", "gcc")), "-std=gnu17", "-g", "-O1", "-Wall", "-D_GNU_SOURCE",
             "-ffp-contract=off", *flags, f"-I{ROOT}", f"-I{ROOT}/client/include", file, "-o", target,
             f"-L{self.folder}/client", f"-Wl,-rpath,{self.folder}/client", "-lzerod", "-lm", "-pthread"],
            check=True)
        return Path(target)


def environment(extra=None):
    """Return: the caller's environment without variables that could influence a test, with the variables of extra."""
    env = {k: v for k, v in os.environ.items() if not re.match(r"(ZEROD_|RANK$|WORLD_SIZE$|LOCAL_|NOTIFY_|LISTEN_)", k)}
    env.setdefault("ASAN_OPTIONS", "exitcode=99")
    env.setdefault("UBSAN_OPTIONS", "print_stacktrace=1:halt_on_error=1:exitcode=99")
    env.setdefault("TSAN_OPTIONS", "exitcode=99")
    env.setdefault("LSAN_OPTIONS", "exitcode=99")
    return env | {k: str(v) for k, v in (extra or {}).items()}


class Process:
    """A program whose output goes into files."""

    n_started = 0

    def __init__(self, command, folder, env=None, patience=1, name=None):
        Process.n_started += 1
        self.command = [str(word) for word in command]
        stem = f"{name or Path(self.command[0]).name}-{Process.n_started}"
        self.out_path, self.err_path = Path(folder) / f"{stem}.out", Path(folder) / f"{stem}.err"
        self.patience = patience
        with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
            self.popen = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                          env=environment(env))
        self.pid = self.popen.pid

    def poll(self):
        return self.popen.poll()

    def running(self):
        return self.popen.poll() is None

    def wait(self, timeout=60):
        """Waits for the end. Return: the exit status, negative for a signal."""
        try:
            return self.popen.wait(timeout * self.patience)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{shlex.join(self.command)} did not end\n{self.err()}")

    def signal(self, number):
        self.popen.send_signal(number)

    def kill(self):
        if self.running():
            self.popen.kill()
        return self.popen.wait()

    def out(self):
        return self.out_path.read_text(errors="replace")

    def err(self):
        return self.err_path.read_text(errors="replace")

    def check_sanitizers(self):
        found = SANITIZER.search(self.err())
        assert not found, f"{shlex.join(self.command)}\n{self.err()[max(found.start() - 500, 0):][:8000]}"


def is_placed_on_gpus(config):
    """Return: whether ZEROD_DEVICE=cuda or cuda-offload puts this job on GPUs. It puts every suitable job there."""
    return (os.environ.get("ZEROD_DEVICE") in ("cuda", "cuda-offload") and config["world"]["size"] <= 16 and
            "device" not in config and ("nodes" in config["world"] or "collective" not in config))


def place(build, config, env):
    """
    If ZEROD_DEVICE puts the job on GPUs, changes the configuration for that; with cuda-offload, master weights and
    moments stay in host memory. On several nodes `collective` carries the other data.
    """
    gpu = {"device": "cuda", "collective": "nccl", "weights": "shared", "deterministic": True}
    if not is_placed_on_gpus(config):
        return config, env
    if os.environ["ZEROD_DEVICE"] == "cuda-offload":
        gpu["zero_optimization"] = {"offload_optimizer": {"device": "cpu"}}
    return merge(config, gpu), gpu_kinds.of_daemon(build) | env


class Daemon(Process):
    """zerod with a configuration merged into DEFAULTS; it listens after the constructor. prefix: executes zerod."""

    def __init__(self, build, folder, config=None, env=None, wait=True, prefix=()):
        self.build, self.folder = build, Path(folder)
        self.socket = self.folder / "zerod.sock"
        self.private = None
        if len(str(self.socket)) > 100:  # the path in a sockaddr_un has at most 107
            self.private = tempfile.TemporaryDirectory(prefix="zerod-")
            self.socket = Path(self.private.name) / "zerod.sock"
        config = merge(merge(DEFAULTS, config or {}), {"listen": {"socket": str(self.socket)}})
        config, self.env = place(build, config, env or {})
        self.world_size = config["world"]["size"]
        self.config_path = self.folder / "zerod.yaml"
        self.config_path.write_text(json.dumps(config, indent=2))  # JSON is YAML
        self.others = []
        self.checked = False
        super().__init__([*prefix, build.path("daemon/zerod"), "--config", self.config_path], self.folder, self.env,
                         build.patience, "zerod")
        if wait:
            wait_for(lambda: f"the daemon does not listen\n{self.err()}",
                     lambda: not self.running() or self.listens(), 20 * self.patience)
            assert self.running(), self.err()

    def socket_of(self, rank):
        return self.socket  # a job on one node has one socket

    def local_rank(self, rank):
        return rank

    def listens(self):
        """
Return: whether the daemon listens (flag __SO_ACCEPTCON). The socket's file exists a little earlier. Reads
        /proc/PID/net, because the daemon may be in another network namespace.
        """
        try:
            lines = [line.split() for line in Path(f"/proc/{self.pid}/net/unix").read_text().splitlines()]
        except OSError:  # the daemon has ended
            return False
        return any(line[-1] == str(self.socket) and int(line[3], 16) & 0x10000 for line in lines[1:])

    def spawn(self, program, *args, rank=None, env=None, failpoint=None):
        """Starts a client program, as a rank if rank is given. failpoint: see core/base/failpoint.h."""
        more = {"ZEROD_SOCKET": self.socket_of(rank), **({} if rank is None else {"RANK": rank}),
                **({} if failpoint is None else {"ZEROD_FAILPOINT": failpoint}), **gpu_kinds.of_trainer(self.build),
                **(env or {})}
        process = Process([program, *args], self.folder, more, self.patience,
                          None if rank is None else f"{Path(program).name}.rank{rank}")
        self.others.append(process)
        return process

    def ctl(self, *args, check=True):
        result = subprocess.run([self.build.path("client/ctl/zerodctl"), "--socket", self.socket, *map(str, args)],
                                capture_output=True, text=True, timeout=60 * self.patience, env=environment())
        if check:
            assert result.returncode == 0, f"zerodctl {args}: {result.stderr}"
        return result

    def json(self, *args):
        """Return: the parsed output of zerodctl --json."""
        return json.loads(self.ctl("--json", *args).stdout)

    def status(self):
        return self.json("status")

    def log(self):
        return self.err()

    def describe(self):
        """Return: a description for the report of a failed test."""
        return f"daemon (pid {self.pid}): {self.poll()}\n{self.log()[-6000:]}"

    def stop(self, number=signal.SIGTERM, timeout=10):
        """Stops the daemon and checks that it ends cleanly."""
        if self.checked:
            return
        self.checked = True
        if self.running():
            self.signal(number)
        status = self.wait(timeout)
        self.check_sanitizers()
        assert status == 0, f"the daemon ended with {status}\n{self.err()}"
        assert not self.socket.exists(), "the daemon left its socket behind"

    def kill(self):
        """Kills the daemon. Its end is not checked."""
        self.checked = True
        return super().kill()


@pytest.fixture(scope="session")
def build():
    return Build(os.environ.get("ZEROD_BUILD", ROOT / "build"))


@pytest.fixture
def spawn(build, tmp_path):
    """spawn(program, *args, env={}) -> Process. The process is killed when the test ends."""
    started = []

    def start(program, *args, env=None):
        started.append(Process([program, *args], tmp_path, env, build.patience))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.check_sanitizers()


class Spread:
    """
    A job whose ranks are spread over several nodes, each with a daemon on this machine's loopback. It has the interface
    of Daemon: requests go to the first node, except those for sockets and logs.
    """

    def __init__(self, start, folder, config, env, n_nodes):
        size = merge(DEFAULTS, config)["world"]["size"]
        self.ranks = [size // n_nodes + (i < size % n_nodes) for i in range(n_nodes)]
        nodes = [{"address": f"127.0.0.1:{port}", "ranks": n} for port, n in zip(free_ports(n_nodes), self.ranks)]
        key = folder / "job.key"
        key.write_bytes(os.urandom(48))
        key.chmod(0o600)
        of_nodes = {"collective": "nccl" if config.get("device") == "cuda" else "gloo"}
        self.daemons = [start(merge(config, of_nodes | {"world": {"nodes": nodes, "node": i, "size": size,
                                                                  "key_file": str(key)}}), (env or {}) | gpu_kinds.of_node(i))
                        for i in range(n_nodes)]

    def __getattr__(self, name):
        return getattr(self.daemons[0], name)

    def of(self, rank):
        for daemon, n in zip(self.daemons, self.ranks):
            if rank < n:
                return daemon
            rank -= n
        return self.daemons[0]  # the first daemon refuses a rank that does not exist

    def socket_of(self, rank):
        return self.of(rank).socket

    def local_rank(self, rank):
        for n in self.ranks:
            if rank < n:
                return rank
            rank -= n
        return rank

    def spawn(self, program, *args, rank=None, env=None, **more):
        env = {"LOCAL_RANK": self.local_rank(rank or 0), **(env or {})}
        return self.of(rank or 0).spawn(program, *args, rank=rank, env=env, **more)

    def json(self, *args):
        """Return: node 0's answer. Lists of ranks or diagnostics are merged from all nodes, without repeated texts."""
        if args[0] not in ("ranks", "diagnostics"):
            return self.daemons[0].json(*args)
        said = [item for daemon in self.daemons for item in daemon.json(*args)]
        texts = [item.get("text", i) for i, item in enumerate(said)]
        return [item for i, item in enumerate(said) if texts.index(texts[i]) == i]

    def log(self):
        return "".join(daemon.log() for daemon in self.daemons)

    err = log

    def stop(self, *args, **more):
        for daemon in self.daemons:
            daemon.stop(*args, **more)

    def kill(self):
        for daemon in self.daemons:
            daemon.kill()


def start_job(start, folder, config=None, env=None):
    """
    Starts a job with start(config, env) -> Daemon. With ZEROD_NODES=2, a job of several ranks is spread over two nodes.
    A job that needs more GPUs than one node has is spread too.
    """
    whole = merge(DEFAULTS, config or {})
    n_nodes, world = int(os.environ.get("ZEROD_NODES", "1")), whole["world"]
    if whole.get("device") == "cuda" or is_placed_on_gpus(whole):
        n_nodes = max(n_nodes, gpu_kinds.n_nodes(world["size"]))
    if n_nodes == 1 or world["size"] < n_nodes or "nodes" in world:
        return start(config, env)
    folder.mkdir(exist_ok=True)
    return Spread(start, folder, config or {}, env, n_nodes)


def free_ports(n):
    """Return: n ports without a listener, below the range from which the kernel takes ports for connections."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = set()
    while len(ports) < n:
        port = random.SystemRandom().randrange(10000, end)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            ports.add(port)
    return list(ports)


@pytest.fixture
def zerod(build, tmp_path):
    """
    zerod(config, env={}) -> Daemon, which listens. It is stopped and checked when the test ends. With ZEROD_NODES=2,
    jobs of several ranks are spread over two nodes.
    """
    daemons = []

    def start_one(config=None, env=None, prefix=()):
        folder = tmp_path / f"daemon{len(daemons)}"
        folder.mkdir()
        daemons.append(Daemon(build, folder, config, env, prefix=prefix))
        return daemons[-1]

    def start(config=None, env=None, **more):
        return start_job(lambda c, e: start_one(c, e, **more), tmp_path / f"nodes{len(daemons)}", config, env)

    yield start
    try:
        for daemon in daemons:
            daemon.stop()
            for process in daemon.others:
                process.kill()
                process.check_sanitizers()
    finally:
        for daemon in daemons:
            for process in daemon.others:
                process.kill()
            daemon.kill()
