# SPDX-License-Identifier: Apache-2.0
"""
Makes system calls of a daemon fail, one at a time: the nth call of a name, which strace counts after the daemon has
begun to listen. Meanwhile a job of two ranks trains, one rank is killed and started again, and zerodctl asks questions.
The daemon must survive, and the job must end with the bits of an undisturbed one. Each text for a client or the log
must name the resource that was short.

Used by test_failing_calls.py. As a program (scripts/soak calls) it runs the long campaign.
"""

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from conftest import Build, Daemon, ROOT, environment, wait_for
from kills import References, results

N_STEPS = 8
WINDOW = 4
MOST_LIVES = 8  # most processes of one rank
UNREACHED = 3   # consecutive numbers that no thread reached; then there are no more such calls
STAGES = (1, 2, 3)

CALLS = {
    "memfd_create": ("ENOMEM", "EMFILE"),
    "mmap": ("ENOMEM",),
    "fallocate": ("ENOSPC", "ENOMEM"),
    "ftruncate": ("ENOMEM",),
    "openat": ("EMFILE", "ENOMEM"),
    "epoll_ctl": ("ENOMEM", "ENOSPC"),
    "recvmmsg": ("ENOMEM",),
    "recvmsg": ("ENOMEM",),
    "sendmsg": ("ENOMEM", "ENOBUFS"),
    "accept4": ("EMFILE", "ENOMEM"),
    "pidfd_open": ("EMFILE", "ENOMEM"),
    "clone3": ("ENOMEM", "EAGAIN"),
    "timerfd_settime": ("ENOMEM",),
}

# The words that a text must have for each errno.
SAYS = {
    "ENOMEM": r"memory",
    "EMFILE": r"descriptor|open files",
    "ENOSPC": r"memory|space",
    "ENOBUFS": r"memory|buffer",
    "EAGAIN": r"thread|process|memory|Resource temporarily unavailable",
}
# Texts that refer to the log, which then must name the resource. When its connection breaks, zerodctl cannot know more.
SEE_LOG = re.compile(r"its log has the reason|has closed the connection$")
ABORTED = re.compile(r"E1302 (warning, step begins again|step aborted)|E1007|no error")


# A line of strace: an epoll_ctl() and its result.
EPOLL_CTL = re.compile(r"epoll_ctl\(\d+, EPOLL_CTL_(\w+), (\d+),.* = (-1 E\w+|0)")


def may_fail(call, trace):
    """Return: whether the kernel could have failed this call. epoll_ctl() needs memory only for a new descriptor."""
    added = set()
    for line in trace.splitlines() if call == "epoll_ctl" else ():
        match = EPOLL_CTL.search(line)
        if not match:
            continue
        what, fd, result = match.groups()
        if "(INJECTED)" in line:
            return what == "ADD" and fd not in added
        if what == "DEL":
            added.discard(fd)
        elif result == "0" or "EEXIST" in result:
            added.add(fd)
    return True


def traced(daemon):
    """Return: the threads of the daemon that strace follows."""
    tasks = Path(f"/proc/{daemon.pid}/task")
    return [t for t in tasks.iterdir() if "TracerPid:\t0" not in (t / "status").read_text()]


class Injected:
    """Makes the daemon's nth call of that name fail, once in each of its threads."""

    def __init__(self, daemon, call, errno, n):
        self.trace = daemon.folder / "strace.txt"
        self.popen = subprocess.Popen(
            ["strace", "-f", "-qq", "-o", self.trace, "-e", f"trace={call}", "-e", f"inject={call}:error={errno}:when={n}",
             "-p", str(daemon.pid)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=environment({"ASAN_OPTIONS": "detect_leaks=0"}))
        wait_for("strace follows all threads of the daemon", lambda: self.popen.poll() is not None or
                 len(traced(daemon)) == len(os.listdir(f"/proc/{daemon.pid}/task")), 10)
        assert self.popen.poll() is None, self.popen.stderr.read()

    def end(self):
        """Stops strace. Return: the number of calls that failed."""
        self.popen.terminate()
        self.popen.communicate()
        return self.trace.read_text().count("(INJECTED)")


class Rank:
    """A rank that is always started again, whatever the reason of its end."""

    def __init__(self, daemon, rank, first_failpoint=None):
        self.daemon, self.rank, self.processes = daemon, rank, []
        self.start(first_failpoint)

    def start(self, failpoint=None):
        self.processes.append(self.daemon.spawn(
            self.daemon.build.path("tests/kill-trainer"), "--steps", N_STEPS, "--window", WINDOW, "--micro", 2,
            rank=self.rank, failpoint=failpoint))

    def tend(self):
        status = self.processes[-1].poll()
        if status in (None, 0):
            return status is None
        if len(self.processes) < MOST_LIVES and self.daemon.running():
            time.sleep(0.02)
            self.start()
            return True
        return False

    def lines(self):
        return [line.split(" ", 2) for p in self.processes for line in p.out().splitlines()]

    def texts(self):
        return [line[2] for line in self.lines() if line[0] in ("refused", "fatal")]


class Asker(threading.Thread):
    """zerodctl asks one question after the other, each over a new connection."""

    def __init__(self, daemon):
        super().__init__(daemon=True)
        self.control, self.failures, self.over = daemon, [], threading.Event()
        self.start()

    def run(self):
        for question in itertools.cycle(("status", "ranks", "report -")):
            result = self.control.ctl(*question.split(), check=False)
            if result.returncode != 0:
                self.failures.append(result.stderr)
            if self.over.wait(0.05):
                return

    def end(self):
        self.over.set()
        self.join()
        return self.failures


def problems_of(daemon, ranks, reference, errno, n_failed, failures):
    if not daemon.running():
        return [f"the daemon is gone: {daemon.poll()}"]
    problems = [f"rank {r.rank} did not end: {r.processes[-1].poll()}" for r in ranks if r.processes[-1].poll() != 0]
    found = results(ranks)
    problems += [f"{key}: {values}, undisturbed {reference.get(key)}" for key, values in found.items()
                 if values != reference.get(key)]
    problems += [" ".join(line) for r in ranks for line in r.lines()
                 if line[0] == "wrong" or (line[0] == "aborted" and not ABORTED.search(line[2]))]
    for text in [*failures, *(t for r in ranks for t in r.texts())]:
        said = daemon.log() if SEE_LOG.search(text.strip()) else text
        if not re.search(SAYS[errno], said):
            problems.append(f"what was short is not said: {text}")
    if n_failed == 0 and (failures or any(r.texts() for r in ranks)):
        problems.append("nothing was made to fail, but somebody was refused")
    return problems


def one_run(build, references, folder, call, errno, n, patience=60):
    """
    Return: the number of failed calls, or None if the kernel cannot fail this call. A problem raises AssertionError.
    """
    stage = STAGES[n % len(STAGES)]
    folder.mkdir(parents=True)
    daemon = Daemon(build, folder, {"zero_optimization": {"stage": stage}, "gradient_clipping": 1.0})
    try:
        injected = Injected(daemon, call, errno, n)
        ranks = [Rank(daemon, 0), Rank(daemon, 1, "Push.sent:kill@31")]
        asker = Asker(daemon)
        deadline = time.monotonic() + patience
        while any([r.tend() for r in ranks]) and time.monotonic() < deadline:
            time.sleep(0.005)
        failures = asker.end()
        n_failed = injected.end()
        if not may_fail(call, injected.trace.read_text()):
            return None
        reference = references.get(2, n_steps=N_STEPS, window=WINDOW)
        problems = problems_of(daemon, ranks, reference, errno, n_failed, failures)
        assert not problems, (f"{call} number {n} fails with {errno}, stage {stage}; {n_failed} did:\n" + "\n".join(problems) +
                              f"\n{injected.trace.read_text()[-600:]}\n{daemon.describe()}")
        daemon.stop()
        return n_failed
    finally:
        for process in daemon.others:
            process.kill()
        daemon.kill()


def campaign(arguments):
    """Runs the long campaign and prints a table. Return: the number of failed runs."""
    build = Build(os.environ.get("ZEROD_BUILD", ROOT / "build"))
    folder = Path(tempfile.mkdtemp(prefix="zerod-calls-"))
    references = References(build, folder)
    n_wrong = 0
    print(f"{'call':<18}{'error':<9}{'runs':>6}{'failed calls':>14}{'right':>7}{'cannot fail':>13}{'seconds':>9}")
    for call, errno in [(call, errno) for call, errnos in CALLS.items() for errno in errnos]:
        if arguments.only and call not in arguments.only:
            continue
        began, n_runs, n_right, n_calls, n_cannot, unreached = time.monotonic(), 0, 0, 0, 0, 0
        for n in range(arguments.first, arguments.last + 1):
            where, n_runs = folder / f"{call}-{errno}-{n}", n_runs + 1
            try:
                n_failed = one_run(build, references, where, call, errno, n)
                n_cannot += n_failed is None
                n_right, n_calls = n_right + (n_failed is not None), n_calls + (n_failed or 0)
                unreached = unreached + 1 if n_failed == 0 else 0
                shutil.rmtree(where)
            except AssertionError as error:
                n_wrong += 1
                (where / "failure.txt").write_text(str(error))
                print(f"FAILED, see {where}/failure.txt\n{str(error)[:2000]}", file=sys.stderr)
            if unreached == UNREACHED:
                break
        print(f"{call:<18}{errno:<9}{n_runs:>6}{n_calls:>14}{n_right:>7}{n_cannot:>13}{time.monotonic() - began:>9.1f}", flush=True)
    if n_wrong == 0:
        shutil.rmtree(folder)
    return n_wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/soak calls", description=__doc__)
    parser.add_argument("--first", type=int, default=1, help="the first of each call's numbers (1)")
    parser.add_argument("--last", type=int, default=200, help="the last of each call's numbers (200)")
    parser.add_argument("--only", action="append", choices=[*CALLS], help="only this call")
    sys.exit(1 if campaign(parser.parse_args()) else 0)
