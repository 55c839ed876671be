# SPDX-License-Identifier: Apache-2.0
"""
A service manager for tests. It keeps a daemon's descriptors and restarts a dead daemon. A life is one process of a
daemon or rank.

    daemon = KeptDaemon(build, folder, config, plan=["reduced:kill@3", "adopt:kill", None])

plan: a failpoint for each life of the daemon; the last one applies to all further lives.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

from conftest import DEFAULTS, Daemon, Process, environment, merge, wait_for

RUN = """
import os, sys
n, names, program = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
if n:
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(n), LISTEN_FDNAMES=names)
os.execv(program[0], program)
"""


class Store:
    """The socket of a service manager, and the kept descriptors: a list of (name, descriptor)."""

    def __init__(self):
        self.kept, self.lock = [], threading.Lock()
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self.name = f"zerod-test-{os.getpid()}-{id(self)}"
        self.server.bind("\0" + self.name)
        self.ended = False
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        self.server.settimeout(0.2)
        while not self.ended:
            try:
                self.take(*socket.recv_fds(self.server, 65536, 64)[:2])
            except TimeoutError:
                continue
            except OSError:
                return

    def take(self, data, fds):
        lines = dict(line.split("=", 1) for line in data.decode().splitlines() if "=" in line)
        with self.lock:
            if lines.get("FDSTORE") == "1":
                self.kept += [(lines.get("FDNAME", "stored"), fd) for fd in fds]
                return
            if lines.get("FDSTOREREMOVE") == "1":
                for name, fd in [k for k in self.kept if k[0] == lines["FDNAME"]]:
                    os.close(fd)
                    self.kept.remove((name, fd))
        for fd in fds:  # a barrier's descriptor; closing it is the answer
            os.close(fd)

    def settle(self):
        """Waits until the manager has processed all messages that a dead daemon has sent."""
        ours, theirs = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect("\0" + self.name)
            socket.send_fds(sender, [b"BARRIER=1"], [theirs])
        os.close(theirs)
        os.read(ours, 1)
        os.close(ours)

    def names(self):
        with self.lock:
            return sorted(name for name, _ in self.kept)

    def close(self):
        self.ended = True
        self.thread.join()
        self.server.close()
        for _, fd in self.kept:
            os.close(fd)
        self.kept = []


class KeptDaemon(Daemon):
    def __init__(self, build, folder, config=None, env=None, plan=(), wait=True):
        self.store, self.plan, self.lives = Store(), list(plan), []
        self.base_env = dict(env or {})
        first = self.life_env(0)
        super().__init__(build, folder, config, first, wait)
        self.lives.append((self.pid, self.err_path))
        self.began = time.monotonic()  # start of the present life

    def life_env(self, life):
        point = self.plan[min(life, len(self.plan) - 1)] if self.plan else None
        env = self.base_env | {"NOTIFY_SOCKET": "@" + self.store.name, "FDSTORE": "4096"}
        points = [p for p in (self.base_env.get("ZEROD_FAILPOINT"), point) if p]
        if points:
            env["ZEROD_FAILPOINT"] = ",".join(points)
        return env

    def start_again(self):
        """Starts the next life with the kept descriptors."""
        self.store.settle()
        with self.store.lock:
            kept = list(self.store.kept)
        n = len(kept)
        command = [sys.executable, "-I", "-S", "-c", RUN, str(n), ":".join(name for name, _ in kept), *self.command]
        copies = [os.dup(fd) for _, fd in kept]
        high = [os.dup2(fd, 400 + i, inheritable=True) for i, fd in enumerate(copies)]
        for fd in copies:
            os.close(fd)

        life = len(self.lives)
        placed = {name: value for name, value in self.env.items() if name != "ZEROD_FAILPOINT"}
        self.err_path = self.folder / f"zerod-life-{life}.err"

        def place():
            for i in range(n):
                os.dup2(400 + i, 3 + i, inheritable=True)
            os.closerange(3 + n, 400 + n + 64)

        with open(self.err_path, "wb") as err:
            self.popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err,
                                          env=environment(placed | self.life_env(life)), preexec_fn=place, close_fds=False)
        for fd in high:
            os.close(fd)
        self.pid = self.popen.pid
        self.lives.append((self.pid, self.err_path))
        self.began = time.monotonic()

    def tend(self):
        """Restarts a killed daemon. Return: whether it was killed."""
        if self.popen.poll() is None:
            return False
        if self.popen.returncode != -signal.SIGKILL:
            raise AssertionError(f"the daemon ended with {self.popen.returncode}\n{self.describe()}")
        self.start_again()
        return True

    def is_settled(self):
        if self.popen.poll() == -signal.SIGKILL:
            self.start_again()
        return not self.running() or "ready: job" in self.err_path.read_text()

    def log(self):
        return "".join(path.read_text(errors="replace") for _, path in self.lives)

    def stop(self, *args, **more):
        """Stops the daemon after it is ready. It may just have been restarted, or its plan may kill it first."""
        wait_for("the daemon is ready", lambda: self.checked or self.is_settled())
        super().stop(*args, **more)
        self.store.close()

    def kill(self):
        super().kill()
        if not self.store.ended:
            self.store.close()

    def age(self):
        """Return: the duration of the present life in seconds."""
        return time.monotonic() - self.began

    def stops_for(self):
        return 0  # it is not asked to stop while trainers run


LIFE = """#!/bin/sh
# One more life of a process: here/N has its output. Line N of here/points is its failpoint, or further arguments.
here=$1${RANK:+/rank$RANK}; shift
n=0; until mkdir "$here/$n" 2>/dev/null; do n=$((n + 1)); done
line=$(sed -n "$((n + 1))p" "$here/points")
case $line in
--*) set -- "$@" $line ;;
?*) ZEROD_FAILPOINT=$line; export ZEROD_FAILPOINT ;;
esac
echo $$ >"$here/$n/pid"
exec "$@" >"$here/$n/out" 2>"$here/$n/err"
"""


class RunLife:
    """One process that zerodrun has started."""

    def __init__(self, folder):
        self.folder, self.began = folder, time.monotonic()

    @property
    def pid(self):
        try:
            return int((self.folder / "pid").read_text())
        except (OSError, ValueError):  # the process is just starting
            return None

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            if self.pid:
                os.kill(self.pid, number)

    def read(self, name):
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def out(self):
        return self.read("out")

    def err(self):
        return self.read("err")

    def poll(self):
        return "started by zerodrun"


class RunLives:
    """The lives of a daemon or a rank that zerodrun starts. The first life may not have started yet."""

    def __init__(self, folder, points):
        self.folder, self.plan, self.processes = folder, points, []
        folder.mkdir()
        (folder / "points").write_text("".join(f"{line}\n" for line in points))
        self.see()

    def see(self):
        while (self.folder / str(len(self.processes))).exists() or not self.processes:
            self.processes.append(RunLife(self.folder / str(len(self.processes))))

    @property
    def last(self):
        return self.processes[-1]


class RunRank(RunLives):
    def __init__(self, rank, folder, plan):
        super().__init__(folder, [life if isinstance(life, str) else " ".join(life) for life in plan])
        self.rank, self.plan = rank, plan
        self.is_late = False  # its predecessor had left, and the run has ended

    @property
    def n_kills(self):
        return len(self.processes) - 1

    def lines(self):
        return [line.split(" ", 2) for p in self.processes for line in p.out().splitlines()]

    def problems(self):
        if "done" not in self.last.out() and not self.is_late:
            yield f"rank {self.rank} did not come to its end"


class RunNode:
    """zerodrun on one node. It starts the daemon and the ranks."""

    def __init__(self, build, folder, config, env, points, first, plans, args):
        """points: a failpoint for each life of the daemon. plans: as in kills.Lives. first: the first rank."""
        self.build, self.folder, self.patience = build, folder, build.patience
        self.config_path, self.socket = folder / "zerod.json", folder / "zerod.sock"
        self.config_path.write_text(json.dumps(merge(merge(DEFAULTS, config), {"listen": {"socket": str(self.socket)}})))
        script, zerod = folder / "life.sh", folder / "zerod.sh"
        script.write_text(LIFE)
        zerod.write_text(f'#!/bin/sh\nexec sh {script} {folder / "daemon"} {build.path("daemon/zerod")} "$@"\n')
        zerod.chmod(0o755)
        always = (env or {}).get("ZEROD_FAILPOINT")
        points = [",".join(filter(None, (always, point))) for point in [*points, *[None] * 20]]
        self.daemon = RunLives(folder / "daemon", points)
        (folder / "ranks").mkdir()
        self.ranks = [RunRank(first + i, folder / "ranks" / f"rank{first + i}", plan) for i, plan in enumerate(plans)]
        command = [build.path("client/run/zerodrun"), "--zerod", zerod, "-n", len(plans), "--config", self.config_path,
                   "--run-id", "kills", "--restarts", 20, "--daemon-restarts", 50, "--", "sh", script, folder / "ranks",
                   build.path("tests/kill-trainer"), *args]
        env = {name: value for name, value in (env or {}).items() if name != "ZEROD_FAILPOINT"}
        self.run = Process(command, folder, env, build.patience, "zerodrun")
        self.popen, self.others, self.stopping_since, self.has_begun = self.run.popen, [self.run], None, False

    @property
    def lives(self):
        return self.daemon.processes

    def age(self):
        """
        Return: the duration of the daemon's present life in seconds. The first life counts from the ranks' start,
        because before that zerodrun does not restart the daemon.
        """
        return time.monotonic() - self.daemon.last.began if self.has_begun else 0

    def tend(self):
        for lives in (self.daemon, *self.ranks):
            lives.see()
        if not self.has_begun and "zerodrun: starts " in self.run.err():
            self.has_begun, self.daemon.last.began = True, time.monotonic()

    def stops_for(self):
        """Return: the seconds since the present daemon was asked to stop."""
        if "SIGINT" not in self.daemon.last.err():
            self.stopping_since = None
        elif self.stopping_since is None:
            self.stopping_since = time.monotonic()
        return time.monotonic() - self.stopping_since if self.stopping_since else 0

    def signal(self, number):
        self.daemon.last.signal(number)

    def n_killed(self):
        return len(re.findall(r"zerod \(pid \d+\) was killed by signal 9", self.run.err()))

    def ctl(self, *args, check=True):
        return Daemon.ctl(self, *args, check=check)

    def log(self):
        return "".join(life.err() for life in self.lives)

    def describe(self):
        return f"zerodrun: {self.popen.poll()}\n{self.run.err()[-3000:]}\n{self.log()[-6000:]}"

    def kill(self):
        self.run.popen.send_signal(signal.SIGTERM)
        for lives in (self.daemon, *self.ranks) if self.run.poll() is None else ():
            lives.last.signal(signal.SIGKILL)
        self.run.kill()
