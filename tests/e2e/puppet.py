# SPDX-License-Identifier: Apache-2.0
"""Trainers that execute commands (tests/programs/refusals.c), and facts about a daemon seen from outside."""

import hashlib
import json
import os
import queue
import re
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import gpu_kinds
from conftest import ROOT, SANITIZER, Build, environment, wait_for

GOLDEN = ROOT / "tests" / "e2e" / "refusals"
REFUSED, ABORTED, RESUMED = 2, 3, 1
N_PARAMS = 11  # parameters of tests/programs/puppet-model.h
FROZEN = 8


class Answer(dict):
    def __getattr__(self, name):
        return self[name]

    @property
    def text(self):
        return self["error"]["text"]


class Puppet:
    """One rank's process. Call the object to execute a command; tell() and answer() are the two halves of a call."""

    def __init__(self, daemon, rank=0, setpriv=(), env=None):
        self.daemon, self.rank, self.patience = daemon, rank, daemon.patience
        self.err_path = daemon.folder / f"puppet{rank}-{id(self)}.err"
        with open(self.err_path, "wb") as err:
            self.popen = subprocess.Popen([*setpriv, daemon.build.path("tests/refusals")], stdin=subprocess.PIPE,
                                          stdout=subprocess.PIPE, stderr=err, text=True, errors="surrogateescape",
                                          env=environment({"ZEROD_SOCKET": daemon.socket, **gpu_kinds.of_trainer(daemon.build),
                                                            **(env or {})}))
        self.pid = self.popen.pid
        self.lines = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()
        daemon.others.append(self)  # killed and checked when the daemon's test ends

    def read(self):
        for line in self.popen.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def tell(self, *words):
        self.popen.stdin.write(" ".join(map(str, words)) + "\n")
        self.popen.stdin.flush()

    def answer(self, timeout=30):
        line = self.lines.get(timeout=timeout * self.patience)
        assert line, f"the trainer has ended: {self.err_path.read_text(errors='replace')}"
        return Answer(json.loads(line))

    def has_answered(self):
        return not self.lines.empty()

    def __call__(self, *words):
        self.tell(*words)
        return self.answer()

    def ok(self, *words):
        """Executes a command that must succeed. Return: the answer."""
        answer = self(*words)
        assert answer.r == 0, f"{words}: {answer}"
        return answer

    def attach(self, *options, declare=("declare",)):
        """Connects and declares. form() does the rest, for all ranks at once."""
        self.ok("connect", f"rank={self.rank}", *options)
        self.ok(*declare)
        return self

    def err(self):
        return self.err_path.read_text(errors="replace")

    def end(self):
        """Ends the process. Return: the exit status."""
        if self.popen.poll() is None:
            try:
                self.tell("quit")
            except BrokenPipeError:
                pass
        return self.popen.wait(20 * self.patience)

    def kill(self):
        self.popen.kill()
        self.popen.wait()

    def check_sanitizers(self):
        assert not SANITIZER.search(self.err()), self.err()


def all_do(puppets, *words):
    """Executes one command on all puppets at once. Return: their answers."""
    for p in puppets:
        p.tell(*words)
    return [p.answer() for p in puppets]


def form(puppets):
    answers = all_do(puppets, "form")
    assert [a.r for a in answers] in ([0] * len(puppets), [RESUMED] * len(puppets)), answers


def trainers(daemon, n=None, options=(), declare=("declare",)):
    """Return: puppets that have formed a job."""
    puppets = [Puppet(daemon, r).attach(*options, declare=declare) for r in range(n or daemon.world_size)]
    form(puppets)
    return puppets


def steps(puppets, n=1, *options):
    answers = all_do(puppets, "steps", n, *options)
    assert [a.r for a in answers] == [0] * len(puppets), answers
    return answers


def state(puppets, kinds="012"):
    """Return: the digest of masters, moments and weights, equal on all ranks. kinds: digits, enum zerod_state."""
    digests = {a.digest for a in all_do(puppets, "state", f"kinds={kinds}")}
    assert len(digests) == 1, digests
    return digests.pop()


# ---- the daemon from outside --------------------------------------------------------------------------------


def segments(daemon):
    """Return: the daemon's own memory, its memfds without a rank, as {name: path}."""
    found = {}
    folder = f"/proc/{daemon.pid}/fd"
    for fd in os.listdir(folder):
        try:
            match = re.match(r"/memfd:zerod\.([\w.]+) ", os.readlink(f"{folder}/{fd}"))
        except FileNotFoundError:
            continue
        if match:
            found[match[1]] = f"{folder}/{fd}"
    return found


def memory(daemon):
    """
    Return: digests of master weights, moments, weights and journal, read from the daemon's memory without a request.
    """
    found = {}
    for name, path in segments(daemon).items():
        if name in ("state", "weights", "journal"):
            with open(path, "rb") as file:
                found[name] = hashlib.sha256(file.read()).hexdigest()
    assert found, "the daemon holds no state"
    return found


def n_fds(daemon):
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def n_fds_at_rest(daemon):
    """Return: the number of descriptors after the daemon has closed the connections of zerodctl and similar clients."""
    counts = [n_fds(daemon)]
    while len(counts) < 10 or len(set(counts[-10:])) > 1:
        time.sleep(0.02)
        counts.append(n_fds(daemon))
    return counts[-1]


def n_threads(daemon):
    return len(os.listdir(f"/proc/{daemon.pid}/task"))


def settled(daemon, fds, threads):
    """Waits until the daemon has as many descriptors and threads as given."""
    assert daemon.running(), daemon.log()
    wait_for(lambda: f"{n_fds(daemon)} descriptors, expected {fds}; {n_threads(daemon)} threads, expected {threads}",
             lambda: (n_fds(daemon), n_threads(daemon)) == (fds, threads), 5 * daemon.patience)


class Cgroup:
    """A memory cgroup of version 1 or 2, created below this process's cgroup."""

    def __init__(self, limit):
        lines = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().split())
        version1 = "memory" in lines
        root = Path("/sys/fs/cgroup/memory" if version1 else "/sys/fs/cgroup")
        parent = root / lines["memory" if version1 else ""].strip("/")
        self.folder = (parent if parent.exists() else root) / f"zerod-test-{os.getpid()}"
        self.folder.mkdir()
        try:
            (self.folder / ("memory.limit_in_bytes" if version1 else "memory.max")).write_text(str(limit))
        except OSError:
            self.folder.rmdir()
            raise

    def take(self, pid):
        (self.folder / "cgroup.procs").write_text(str(pid))

    def remove(self):
        for _ in range(500):
            try:
                return self.folder.rmdir()
            except OSError:
                time.sleep(0.01)


@contextmanager
def memory_cgroup(limit):
    try:
        cgroup = Cgroup(limit)
    except (OSError, KeyError) as e:
        pytest.skip(f"no memory cgroup can be made here: {e}")
    try:
        yield cgroup
    finally:
        for pid in (cgroup.folder / "cgroup.procs").read_text().split():
            (cgroup.folder.parent / "cgroup.procs").write_text(pid)
        cgroup.remove()


# ---- texts ---------------------------------------------------------------------------------------------------


MASKS = [
    (re.compile(r"pid \d+"), "pid PID"),
    (re.compile(r"kill \d+ "), "kill PID "),
    (re.compile(r"attached [\w. ]+ ago"), "attached TIME ago"),
    (re.compile(r"\d+ ms ago"), "TIME ago"),
    (re.compile(r"for [\d.]+ (ms|s)\b"), "for TIME"),
    (re.compile(r"after [\d.]+ (ms|s)\b"), "after TIME"),
]


def mask(text):
    for pattern, replacement in MASKS:
        text = pattern.sub(replacement, text)
    return text


def golden(name, text):
    """
    The text, with masked times and pids, must be that of the file. ZEROD_UPDATE_GOLDEN=1 writes the file. Builds with
    sanitizers skip the comparison, because sanitizers do not change texts.
    """
    if Build(os.environ.get("ZEROD_BUILD", ROOT / "build")).sanitize:
        return
    path = GOLDEN / f"{name}.txt"
    text = mask(text).rstrip("\n") + "\n"
    assert name.startswith(("e1601", "start")) or max(map(len, text.splitlines())) <= 140, text
    if os.environ.get("ZEROD_UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.exists(), f"{path} is missing; ZEROD_UPDATE_GOLDEN=1 writes it. Text:\n{text}"
    assert text == path.read_text()


def diagnostics(daemon):
    return daemon.json("diagnostics")


def said_alike(daemon, text):
    """The client's text must be in the log and in zerodctl's JSON, word for word."""
    wait_for(lambda: f"not in the log:\n{text}\nlog:\n{daemon.log()}", lambda: text.rstrip("\n") in daemon.log(),
             5 * daemon.patience)  # a separate thread writes the log
    texts = [d["text"].rstrip("\n") for d in diagnostics(daemon)]
    assert text.rstrip("\n") in texts, f"not in zerodctl diagnostics:\n{text}\nthere:\n" + "\n".join(texts)
