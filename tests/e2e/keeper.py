# SPDX-License-Identifier: Apache-2.0
"""
A service manager for tests: it keeps a daemon's descriptors, and starts the daemon again when it has died.

    daemon = KeptDaemon(build, folder, config, plan=["reduced:kill@3", "adopt:kill", None])

plan: a failpoint for each life of the daemon; the last one is that of all further lives.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

from conftest import Daemon, Process, environment, wait_for

RUN = """
import os, sys
n, names, program = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
if n:
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(n), LISTEN_FDNAMES=names)
os.execv(program[0], program)
"""


class Store:
    """The socket of a service manager, and what it keeps: a list of (name, descriptor)."""

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
        for fd in fds:  # of a barrier: closing it is the answer
            os.close(fd)

    def settle(self):
        """All that a dead daemon has sent is kept."""
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
        self.began = time.monotonic()  # of this life

    def life_env(self, life):
        point = self.plan[min(life, len(self.plan) - 1)] if self.plan else None
        env = self.base_env | {"NOTIFY_SOCKET": "@" + self.store.name, "FDSTORE": "4096"}
        points = [p for p in (self.base_env.get("ZEROD_FAILPOINT"), point) if p]
        if points:
            env["ZEROD_FAILPOINT"] = ",".join(points)
        return env

    def start_again(self):
        """The next life, with what was kept."""
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
        """Starts a daemon that was killed again. Return: whether it was."""
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
        """The end, once it is a daemon: it may have been started again just now, and be killed as planned."""
        wait_for("the daemon is ready", lambda: self.checked or self.is_settled())
        super().stop(*args, **more)
        self.store.close()

    def kill(self):
        super().kill()
        if not self.store.ended:
            self.store.close()
