# SPDX-License-Identifier: Apache-2.0
"""
Hostile clients attack the daemon of an honest job, all at once. The daemon and the job's two ranks belong to one user.
Some attackers are the same user, some another user who may connect, and some a user who may not. Used by
test_hostile.py. As a program (scripts/soak hostile) it runs the long campaign.

Undisturbed and attacked phases alternate. After each attacked phase the job must have the bits of a job without
attackers. Each time root must have got an answer, and the daemon must have no more descriptors than before. Attackers
run under SCHED_IDLE, so that their own use of the processors does not count, only the daemon's work for them.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from conftest import Build, Daemon, ROOT, environment
from puppet import Puppet, form, n_fds_at_rest, n_threads, settled, state, steps

OWNER, ALLOWED, STRANGER = 21001, 21002, 21003  # uids of no user
GOAL = 1.25       # limit for the median step: attacked phases divided by undisturbed ones
PAUSE = 0.01      # between steps
ROOT_WITHIN = 10  # seconds in which root must get an answer
MODEL = ("param", "big", 1 << 19)

# Attacks that are repeated, each in a new process: uid -> arguments of tests/hostile.
REPEATED = {
    OWNER: ["garbage 100", "truncated", "oversized", "descriptors", "not-hello", "other-version", "empty-packet",
            "control-pushes", "control-unknown", "rank-taken", "steals-shown"],
    ALLOWED: ["garbage 100", "oversized", "control-unknown", "rank-taken", "steals-shown", "admin 0", "admin 1", "admin 2"],
    STRANGER: ["foreign 0", "foreign 1"],
}
# Attacks that run until they are ended or the daemon closes their connections: (arguments, number of processes).
LASTING = {
    OWNER: [("asks 20", 1), ("never-reads 10000", 1), ("control-idle", 20)],
    ALLOWED: [("asks 20", 1), ("never-reads 10000", 1), ("control-idle", 44), ("idle 100", 1)],
    STRANGER: [("idle 200", 1)],
}
# An attacker has not succeeded if it is refused because there is no room, or if another connection replaces its silent
# one.
LOOP = 'while :; do if "$@" >out 2>&1; then echo held; elif grep -qE "E1401|got the end" out; then echo full; else cat out; fi; done >>{}'


def as_user(uid):
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


class Programs:
    """Copies of the programs that each user can run, wherever the build folder is."""

    def __init__(self, build):
        self.private = tempfile.TemporaryDirectory(prefix="zerod-hostile-")
        self.folder, self.options = Path(self.private.name), build.options
        self.patience, self.sanitize = build.patience, build.sanitize
        self.folder.chmod(0o755)
        for name in ("daemon/zerod", "client/ctl/zerodctl", "tests/hostile", "tests/refusals", "client/libzerod.so.0"):
            target = self.folder / name
            target.parent.mkdir(exist_ok=True, parents=True)
            shutil.copy(build.path(name), target)

    def path(self, name):
        return self.folder / name

    def folder_of(self, uid, name):
        folder = self.folder / name
        folder.mkdir()
        os.chown(folder, uid, uid)
        return folder


class Attackers:
    """All attackers, from the constructor to end(). idle: run them under SCHED_IDLE."""

    def __init__(self, programs, daemon, name, idle):
        self.programs, self.daemon, self.name, self.processes, self.lines = programs, daemon, name, [], {}
        self.schedule = ["chrt", "--idle", "0"] if idle else []
        for uid, attacks in REPEATED.items():
            for attack in attacks:
                self.repeat(uid, attack)
        for uid, attacks in LASTING.items():
            for attack, n in attacks:
                for _ in range(n):
                    self.start(uid, [programs.path("tests/hostile"), *attack.split()], None)

    def start(self, uid, command, folder):
        self.processes.append(subprocess.Popen(
            [*self.schedule, *as_user(uid), *map(str, command)], cwd=folder, process_group=0,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=environment({"ZEROD_SOCKET": self.daemon.socket})))

    def repeat(self, uid, attack):
        folder = self.programs.folder_of(uid, f"{self.name}-{uid}-{attack.replace(' ', '-')}")
        self.lines[uid, attack] = folder / "lines"
        self.start(uid, ["sh", "-c", LOOP.format("lines"), "sh", self.programs.path("tests/hostile"), *attack.split()], folder)

    def each_has_ended(self):
        """Return: whether each attack has ended at least once."""
        return all(path.exists() and path.stat().st_size for path in self.lines.values())

    def end(self):
        """Return: {(uid, attack): (times that the daemon held, times that it was full)}, and other output."""
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
            process.stdin.close()
        counts, others = {}, []
        for key, path in self.lines.items():
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            counts[key] = lines.count("held"), lines.count("full")
            others += [f"uid {key[0]}, {key[1]}: {line}" for line in lines if line not in ("held", "full")]
        return counts, sorted(set(others))


class Visitor(threading.Thread):
    """Root, which asks for the status again and again."""

    def __init__(self, daemon):
        super().__init__(daemon=True)
        self.control, self.seconds, self.failures, self.over = daemon, [], [], threading.Event()
        self.start()

    def run(self):
        while not self.over.wait(0.2):
            began = time.monotonic()
            try:
                result = self.control.ctl("status", check=False)
            except subprocess.TimeoutExpired:
                self.failures.append("no answer in a minute")
                continue
            self.seconds.append(time.monotonic() - began)
            if result.returncode != 0:
                self.failures.append(result.stderr)

    def end(self):
        self.over.set()
        self.join()
        assert not self.failures, f"root was not let in {len(self.failures)} of {len(self.seconds)} times: {self.failures[0]}"
        return max(self.seconds)


class Job:
    """A job of two ranks that belong to OWNER."""

    def __init__(self, programs, config, name):
        folder = programs.folder_of(OWNER, name)
        listen = {"mode": "0666", "allow_users": [str(OWNER), str(ALLOWED)]}
        self.daemon = Daemon(programs, folder, {"listen": listen, **config}, prefix=as_user(OWNER))
        library = {"LD_LIBRARY_PATH": programs.path("client")}
        self.ranks = [Puppet(self.daemon, r, setpriv=as_user(OWNER), env=library).attach(declare=MODEL) for r in range(2)]
        form(self.ranks)
        self.n_steps = 0

    def train(self, seconds):
        """Return: the duration of each step."""
        took, until = [], time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.monotonic()
            steps(self.ranks)
            took.append(time.monotonic() - began)
            time.sleep(PAUSE)
        self.n_steps += len(took)
        return took

    def end(self):
        for rank in self.ranks:
            rank.kill()
        self.daemon.kill()


class Campaign:
    """Two jobs, one of which is attacked in some phases, and the findings about both."""

    def __init__(self, build, config=None):
        self.programs, self.jobs = Programs(build), []
        try:
            for name in ("attacked", "quiet"):
                self.jobs.append(Job(self.programs, config or {}, name))
        except BaseException:
            self.end()
            raise
        self.attacked, self.quiet = self.jobs
        steps(self.attacked.ranks)
        steps(self.quiet.ranks)
        self.at_rest = n_fds_at_rest(self.attacked.daemon), n_threads(self.attacked.daemon)
        self.undisturbed, self.disturbed, self.counts, self.root_waited, self.n_rounds = [], [], {}, 0, 0

    def round(self, seconds, each=False):
        """
        One undisturbed and one attacked phase, of this many seconds each. each: attackers use the processors normally,
        and the phase lasts until each attack has ended once.
        """
        self.n_rounds += 1
        self.undisturbed += self.attacked.train(seconds)
        visitor = Visitor(self.attacked.daemon)
        attackers = Attackers(self.programs, self.attacked.daemon, f"round{self.n_rounds}", idle=not each)
        try:
            self.disturbed += self.attacked.train(seconds)
            until = time.monotonic() + 60 * self.programs.patience
            while each and not attackers.each_has_ended() and time.monotonic() < until:
                self.attacked.train(0.2)
        finally:
            counts, others = attackers.end()
        self.root_waited = max(self.root_waited, visitor.end())
        assert not others, "an attack found something:\n" + "\n".join(others)
        assert self.root_waited < ROOT_WITHIN * self.programs.patience
        for key, (held, full) in counts.items():
            before = self.counts.get(key, (0, 0))
            self.counts[key] = before[0] + held, before[1] + full
        self.compare()
        settled(self.attacked.daemon, *self.at_rest)

    def compare(self):
        """Trains the undisturbed job as far as the attacked one. Both must have the same bits."""
        steps(self.quiet.ranks, self.attacked.n_steps - self.quiet.n_steps)
        self.quiet.n_steps = self.attacked.n_steps
        assert state(self.attacked.ranks) == state(self.quiet.ranks), "an attacked job has other bits"

    def end(self):
        for job in self.jobs:
            job.end()
        self.programs.private.cleanup()


def report(campaign):
    print(f"\n{'uid':<8}{'attack':<22}{'daemon held':>12}{'no room':>9}")
    for (uid, attack), (held, full) in campaign.counts.items():
        print(f"{uid:<8}{attack:<22}{held:>12}{full:>9}")
    for uid, attacks in LASTING.items():
        for attack, n in attacks:
            print(f"{uid:<8}{attack + (f', {n} of them' if n > 1 else ''):<22}{'all the time':>12}")
    before, during = (1000 * statistics.median(times) for times in (campaign.undisturbed, campaign.disturbed))
    print(f"\nsteps: {len(campaign.undisturbed)} undisturbed, {len(campaign.disturbed)} attacked; the same bits in each of "
          f"{campaign.n_rounds} rounds\nmedian step: {before:.2f} ms undisturbed, {during:.2f} ms attacked: {during / before:.2f} "
          f"times (goal {GOAL})\nroot was answered within {campaign.root_waited:.2f} s each time")
    return 0 if during <= GOAL * before else 1


def main(arguments):
    campaign = Campaign(Build(os.environ.get("ZEROD_BUILD", ROOT / "build")))
    try:
        until = time.monotonic() + 60 * arguments.minutes
        while time.monotonic() < until:
            campaign.round(arguments.phase)
            print(f"round {campaign.n_rounds}: {len(campaign.disturbed)} attacked steps so far", flush=True)
        return report(campaign)
    finally:
        campaign.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/soak hostile", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="how long (10)")
    parser.add_argument("--phase", type=float, default=10, help="seconds of a phase (10)")
    sys.exit(main(parser.parse_args()))
