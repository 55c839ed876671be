# SPDX-License-Identifier: Apache-2.0
"""
Faults between nodes while a job trains on them, and the judge of how such a run has ended. Each node has its own
network namespace. Used by test_node_faults.py. As a program (scripts/soak node-faults) it runs the long campaign.

A round is one fault at a random moment of a run. The daemons must notice the fault in time and report the node and the
reason. After the fault's end the run must soon continue. At its end the run must have the bits of an undisturbed one on
one node.
"""

import argparse
import contextlib
import ctypes
import os
import random
import re
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path

import kills
from conftest import Build, Daemon, ROOT
from network import Network, why_no_network
from nodes import Nodes

N_STEPS = 110
N_ROUNDS = 5    # per run
APART = 15      # least number of steps between two faults
PACE_MS = 40    # range of a fault's moment within its step; longer than a step takes

# Limits in seconds, for a machine with other load. The promised times are in brackets.
NOTICE_DEATH = 0.5    # [0.1]
NOTICE_SILENCE = 3.5  # [3]
RECOVER = 1.5         # [1]
BOUND = 30            # limit for everything else

# The possible reasons for an engine's end.
WHO = r"the engine of node \d+ \(192\.0\.2\.\d+:\d+\) "
REASONS = re.compile(
    rf"{WHO}(was killed by signal 9 \(Killed\)|exited with status \d+|missed its deadline( for connecting)?)|"
    rf"{WHO}says: ("
    r"waited \d+ ms for node \d+ to (send|take) \d+ bytes \(move \d+ of \d+\)|"
    r"not connected to all nodes within \d+ ms: .*|who answers for node \d+ is not its engine|"
    r"node \d+ has sent unexpected data|gloo gives up: .*|.* \(node \d+\)|"
    r".*(Connection|connection|timed out|Timed out|connect|reset|unreachable|Broken pipe|SO_ERROR|closed).*)$")
LOST = re.compile(r"the link to its daemon is down: (has not been heard for [\d.]+ s|"
                  r"the connection was lost: .*|it has made a new connection|it has ended the connection: .*)$")

STRANGER = re.compile(r"a connection from 192\.0\.2\.\d+:\d+ (was dropped: what it says is not what a daemon says|"
                      r"ended before it had proved to be a node)")


def in_namespace(name, work):
    """Runs work() in that network namespace, on a new thread. Return: the result."""
    found = []

    def enter():
        fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(fd, 0x40000000):  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(fd)
        found.append(work())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return found[0]


def listening(pid):
    """Return: the TCP ports with a listener in the process's namespace."""
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sorted({int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A"})


def engines(daemon):
    """Return: pids of the daemon's engine. Empty while the engine is being replaced, or before its exec()."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, rest = (entry / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            except OSError:
                continue
            state, parent = rest.split()[:2]
            if int(parent) == daemon.pid and state != "Z" and name.startswith("zerod-engine"):
                found.append(int(entry.name))
    return found


class Run:
    """A job on several nodes, each with a daemon in its namespace, and its trainers."""

    def __init__(self, build, folder, rng, stage, ranks, arp_ms=None, slack=1):
        """slack: factor for the time to continue after a fault, because other tests run at the same time."""
        self.build, self.folder, self.rng, self.slack = build, Path(folder), rng, slack
        self.started = []
        self.network = Network(len(ranks), arp_ms)
        try:
            self.nodes = Nodes(self.daemon, self.folder, ranks, {
                "gradient_clipping": 1.0, "threads": rng.choice((1, 2)),
                "zero_optimization": {"stage": stage, "reduce_bucket_size": rng.choice((300, 2000, 50000))},
            }, network=self.network)
            self.ranks = []
            self.train()
        except BaseException:
            self.end()
            raise

    def daemon(self, config, env=None, prefix=()):
        folder = self.folder / f"daemon{len(self.started)}"
        folder.mkdir()
        self.started.append(Daemon(self.build, folder, config, env, prefix=prefix))
        return self.started[-1]

    def train(self):
        """Starts all trainers."""
        self.ranks = [self.trainer(rank) for rank in range(sum(self.nodes.ranks))]

    def trainer(self, rank):
        return kills.Lives(self.nodes.daemons[self.nodes.node_of(rank)], self.build.path("tests/kill-trainer"),
                           ["--steps", N_STEPS, "--micro", kills.N_MICRO], rank, [])

    def stop(self):
        """Stops all daemons and checks that they end cleanly."""
        for daemon in self.started:
            daemon.stop()
            daemon.check_sanitizers()
            for process in daemon.others:
                process.check_sanitizers()

    def end(self):
        """Kills all processes and removes the network, in whatever state the run is."""
        for daemon in self.started:
            for process in daemon.others:
                process.kill()
            if daemon.running():
                daemon.signal(signal.SIGCONT)
            daemon.kill()
        self.network.close()

    def describe(self):
        return kills.describe(self.ranks, self.nodes)

    # ---- waiting

    def wait(self, what, condition, timeout=BOUND):
        """Waits until condition() is true, and restarts killed trainers. Return: the value of condition()."""
        deadline = time.monotonic() + timeout * self.nodes.patience
        while not (value := condition()):
            for rank in self.ranks:
                rank.tend()
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.002)
        return value

    def step(self):
        """Return: the last step that any rank has begun, or -1."""
        words = [line[1] for rank in self.ranks for line in rank.lines() if line[0] == "weights"]
        return max(map(int, words), default=-1)

    def finish(self):
        kills.finish(self.ranks, self.nodes, BOUND)

    def engine(self, node):
        return self.wait(f"an engine of node {node}", lambda: engines(self.nodes.daemons[node]))[0]

    # ---- diagnostics

    def said(self, code):
        """Return: for each node, how often its daemon has logged this code."""
        return [daemon.log().count(f"{code} ") for daemon in self.nodes.daemons]

    def await_word(self, code, before, node, limit):
        """Waits until that node has logged the code again. Return: the seconds until then."""
        began = time.monotonic()
        self.wait(f"{code} of node {node}", lambda: self.said(code)[node] > before[node], limit)
        return time.monotonic() - began

    def check_words(self):
        """Every report must name a node and a known reason."""
        for daemon in self.nodes.daemons:
            text = daemon.log()
            for code, pattern in (("E1502", REASONS), ("E1501", LOST)):
                for match in re.finditer(rf"{code} .*(?:\n .*)*?\n  cause +(.*)", text):
                    assert pattern.fullmatch(match[1]) or pattern.match(match[1]), f"{code}: {match[1]}"
            assert text.count("E1502 warning") == len(re.findall(r"engine failed, replaced", text))  # no counting line


# ---- faults. Each returns (seconds until it was noticed or None, time when its cause ended) --------------------


def engine_killed(run):
    node, before = run.rng.randrange(len(run.nodes.ranks)), run.said("E1502")
    os.kill(run.engine(node), signal.SIGKILL)
    gone = time.monotonic()
    return run.await_word("E1502", before, node, NOTICE_DEATH), gone


def engine_killed_twice(run):
    """The second engine may be killed before it is connected, and may be on another node."""
    nodes = range(len(run.nodes.ranks))
    node, other = run.rng.choice(nodes), run.rng.choice(nodes)
    before, first, second = run.said("E1502"), run.engine(node), run.engine(other)
    os.kill(first, signal.SIGKILL)
    noticed = run.await_word("E1502", before, node, NOTICE_DEATH)
    run.wait("the next engine", lambda: (found := engines(run.nodes.daemons[other])) and found != [second])
    time.sleep(run.rng.random() * 0.03)
    before = run.said("E1502")
    os.kill(run.engine(other), signal.SIGKILL)
    gone = time.monotonic()
    return max(noticed, run.await_word("E1502", before, other, NOTICE_DEATH)), gone


def engine_frozen(run):
    node, before = run.rng.randrange(len(run.nodes.ranks)), run.said("E1502")
    pid = run.engine(node)
    os.kill(pid, signal.SIGSTOP)
    noticed = run.await_word("E1502", before, node, NOTICE_SILENCE)
    gone = time.monotonic()
    run.wait("the end of the frozen engine", lambda: pid not in engines(run.nodes.daemons[node]))
    return noticed, gone


def cut_off(run, way, seconds):
    """A node that is disconnected for longer than the allowed silence is reported."""
    out, back = way(run.rng.randrange(len(run.nodes.ranks)))
    before, noticed = (run.said("E1501"), run.said("E1502")), None
    began = time.monotonic()
    out()
    try:
        if seconds > NOTICE_SILENCE:
            run.wait("somebody to miss a node", lambda: (run.said("E1501"), run.said("E1502")) != before,
                     NOTICE_SILENCE)
            noticed = time.monotonic() - began
        run.wait("the end of the fault", lambda: time.monotonic() - began > seconds, seconds + 1)
    finally:
        back()
    return noticed, time.monotonic()


def link_down(run):
    way = run.rng.choice((run.network.interface, run.network.cable))
    return cut_off(run, way, run.rng.choice((run.rng.uniform(0.2, 2), run.rng.uniform(2, 5))))


def black_hole(run):
    way = run.rng.choice((run.network.switch, run.network.route))
    return cut_off(run, way, run.rng.uniform(1, 5))


def daemon_frozen(run):
    daemon = run.rng.choice(run.nodes.daemons)
    freeze = (lambda node: (lambda: daemon.signal(signal.SIGSTOP), lambda: daemon.signal(signal.SIGCONT)))
    return cut_off(run, freeze, run.rng.choice((run.rng.uniform(0.5, 2), run.rng.uniform(2, 5))))


GLOO_KILLER = struct.pack("<7Q", 56, 1, 77, 0, 8, 0, 0)  # a header for which gloo has no operation


def send_noise(host, port, data):
    try:
        with socket.create_connection((host, port), 1) as s:
            s.sendall(data)
            s.settimeout(0.05)
            s.recv(1)
    except OSError:
        pass  # nobody listens any more, or the stranger was disconnected


def make_noise(run, from_node, host, port):
    for data in (run.rng.randbytes(run.rng.randint(1, 5000)), b"", GLOO_KILLER):
        in_namespace(run.network.nodes[from_node], lambda d=data: send_noise(host, port, d))


def hold_up(run, node):
    """
    Kills that node's engine, and stops the next one while the other nodes wait for it. Return: the next one's pid.
    """
    daemon, old = run.nodes.daemons[node], run.engine(node)
    os.kill(old, signal.SIGKILL)
    pid = run.wait("the next engine", lambda: [pid for pid in engines(daemon) if pid != old])[0]
    os.kill(pid, signal.SIGSTOP)
    return pid


def ports_of_all(run):
    return [(node, port) for node, daemon in enumerate(run.nodes.daemons) for port in listening(daemon.pid)]


def noise(run):
    """
    Sends noise to every port with a listener on a node, from another node or from the node itself. Engines listen only
    while they connect, so an engine is stopped meanwhile, unless it was too fast.
    """
    nodes = range(len(run.nodes.ranks))
    ports, until = [], time.monotonic() + BOUND
    while len(ports) < 2:
        assert time.monotonic() < until, "no engine listens"
        with contextlib.suppress(ProcessLookupError):
            held = hold_up(run, run.rng.choice(nodes))
            try:
                time.sleep(0.02)
                ports = ports_of_all(run)
                for node, port in ports if len(ports) > 1 else []:
                    make_noise(run, run.rng.choice(nodes), run.network.hosts[node], port)
            finally:
                os.kill(held, signal.SIGCONT)
    run.wait("a word about strangers", lambda: STRANGER.search(run.nodes.daemons[0].log()))
    return None, time.monotonic()


def trainer_killed(run):
    rank = run.rng.choice(run.ranks)
    rank.n_kills += 1
    rank.last.signal(signal.SIGKILL)
    gone = time.monotonic()
    return None, gone


FAULTS = {
    "engine killed": engine_killed,
    "engine killed twice": engine_killed_twice,
    "engine frozen": engine_frozen,
    "link down": link_down,
    "black hole": black_hole,
    "daemon frozen": daemon_frozen,
    "noise": noise,
    "trainer killed": trainer_killed,
}


# ---- runs ------------------------------------------------------------------------------------------------------


class Times:
    """The longest times of a class of faults, in seconds."""

    def __init__(self):
        self.n, self.noticed, self.recovered = 0, 0, 0

    def add(self, noticed, recovered):
        self.n += 1
        self.noticed, self.recovered = max(self.noticed, noticed or 0), max(self.recovered, recovered)


def one_round(run, fault, times):
    run.wait("a fault's moment", lambda: time.monotonic() > run.at)
    assert any(rank.last.poll() is None for rank in run.ranks), "the run was over before the fault"
    noticed, gone = fault(run)
    step = run.step() + 1  # may have begun before the fault
    run.wait("the run to go on", lambda: run.step() > step or not any(rank.last.poll() is None for rank in run.ranks))
    recovered = time.monotonic() - gone
    assert recovered < RECOVER * run.slack * run.nodes.patience, f"the run went on after {recovered:.2f} s only"
    times.add(noticed, recovered)


def fault_rounds(run, kind, n_rounds, times):
    for i in range(n_rounds):
        # An engine has time to connect until the first step. A frozen engine may use up that time, so such a fault
        # begins later.
        step = i * APART + run.rng.randrange(APART) - (kind != "engine frozen")
        run.wait(f"step {step}", lambda: run.step() >= step)
        run.at = time.monotonic() + run.rng.random() * PACE_MS / 1000
        one_round(run, FAULTS[kind], times)


def check_end(run, rank, victim):
    """Checks how a trainer of the lost run has ended. If it had only declared, it may still wait, for the new run."""
    status, last = rank.last.poll(), (rank.last.out().splitlines() or [""])[-1]
    gone = (rf"cause +the daemon of node {victim} \(192\.0\.2\.\d+:\d+\) was started anew, "
            r"and what the one before it held of the run is gone")
    if run.nodes.node_of(rank.rank) == victim:
        expected = (4, r"fatal .*(zerod has closed the connection|cannot connect)")
    else:
        lost = r"1503 E1503 a node came back as another daemon, job ended: step \d+|1101 E1101 .*"
        expected = (3, rf"refused ({lost}) \|.*{gone}")
    assert status == expected[0] and re.match(expected[1], last), f"rank {rank.rank}, {status}: {last}"


def come_back(run, victim):
    """Starts a new daemon and its trainers, perhaps before the daemon has connected to the others."""
    out, back = run.network.switch(victim)
    cut = run.rng.random() < 0.5
    if cut:
        out()
    try:
        run.nodes.start(victim)
        first = {rank.rank: run.trainer(rank.rank) for rank in run.ranks if run.nodes.node_of(rank.rank) == victim}
        if cut:
            time.sleep(run.rng.uniform(0.02, 0.3))
    finally:
        if cut:
            back()
    return first


def daemon_killed(run, times):
    """
    A killed daemon's state is lost. When a new daemon is there, all ranks get an error, and can begin again at once.
    """
    victim = run.rng.randrange(len(run.nodes.ranks))
    witness = 1 if victim == 0 else 0
    step = run.rng.choice((-1, run.rng.randrange(N_STEPS * 2 // 3)))
    run.wait(f"step {step}", lambda: run.step() >= step)
    time.sleep(run.rng.random() * PACE_MS / 1000)
    before = run.said("E1501")
    run.nodes.daemons[victim].kill()
    noticed = run.await_word("E1501", before, witness, NOTICE_DEATH)
    old, begun = run.ranks, {rank.rank for rank in run.ranks if rank.last.out()}
    time.sleep(run.rng.choice((0, run.rng.random())))
    anew = come_back(run, victim)
    began = time.monotonic()

    def replace():
        """Starts a new trainer for each trainer of the lost run that has ended. Return: whether all have ended."""
        for rank in old:
            if rank.rank not in anew and rank.last.poll() is not None:
                check_end(run, rank, victim)
                anew[rank.rank] = run.trainer(rank.rank)
        run.ranks = [anew.get(rank.rank, rank) for rank in old]
        return begun <= set(anew)

    for rank in old:
        if rank.rank in anew:
            rank.last.wait()
            check_end(run, rank, victim)
    run.wait("the trainers' end", replace, RECOVER * run.slack)
    run.wait("the new run", lambda: replace() and run.step() >= 1)
    times.add(noticed, time.monotonic() - began)


def kill_rounds(run, kind, n_rounds, times):
    del kind  # there is only one kind
    for _ in range(n_rounds):
        daemon_killed(run, times)


KINDS = {**{kind: fault_rounds for kind in FAULTS}, "daemon killed": kill_rounds}


def one_run(build, references, folder, seed, kind, n_rounds, times, stage=None, arp_ms=None, slack=1):
    """A run with n_rounds faults. A failure raises AssertionError."""
    rng = random.Random(f"{seed} {kind}")
    stage = stage or rng.choice((1, 2, 3))
    ranks = rng.choice(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1)))
    reference = references.get(sum(ranks), n_steps=N_STEPS, window=0)
    run = Run(build, folder, rng, stage, ranks, arp_ms, slack)
    try:
        KINDS[kind](run, kind, n_rounds, times)
        run.finish()
        kills.judge(run.ranks, run.nodes, reference)
        run.check_words()
        run.stop()
    except BaseException as error:
        error.args = (f"seed {seed}, {kind}, stage {stage}, ranks {ranks}\n{error}\n{run.describe()}",)
        raise
    finally:
        run.end()


def campaign(arguments):
    """Runs the long campaign and prints a table. Return: the number of failed runs."""
    build = Build(os.environ.get("ZEROD_BUILD", ROOT / "build"))
    folder = Path(tempfile.mkdtemp(prefix="zerod-soak-"))
    references = kills.References(build, folder)
    seed0 = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**9)
    n_failed = 0
    print(f"seed {seed0}; {N_ROUNDS} rounds a run\n\n{'fault':<22}{'rounds':>8}{'runs':>6}{'same bits':>11}"
          f"{'noticed s':>11}{'went on s':>11}{'seconds':>9}")
    for kind in arguments.only or KINDS:
        began, times, n_good, left, i = time.monotonic(), Times(), 0, arguments.rounds, 0
        while left > 0:
            where = folder / f"{kind.replace(' ', '-')}-{i}"
            where.mkdir()
            try:
                one_run(build, references, where, seed0 + i, kind, min(left, N_ROUNDS), times, arp_ms=arguments.arp_ms)
                n_good += 1
                shutil.rmtree(where)
            except BaseException as error:  # pytest's failures are not derived from Exception
                if isinstance(error, KeyboardInterrupt):
                    raise
                n_failed += 1
                (where / "failure.txt").write_text(str(error))
                print(f"FAILED, see {where}/failure.txt\n{str(error)[:3000]}", file=sys.stderr)
            left -= N_ROUNDS
            i += 1
        print(f"{kind:<22}{times.n:>8}{i:>6}{n_good:>11}{times.noticed:>11.3f}{times.recovered:>11.3f}"
              f"{time.monotonic() - began:>9.1f}", flush=True)
    if n_failed == 0:
        shutil.rmtree(folder)
    return n_failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/soak node-faults", description=__doc__)
    parser.add_argument("rounds", type=int, nargs="?", default=200, help="of each fault (200)")
    parser.add_argument("--only", action="append", choices=list(KINDS), help="only this fault")
    parser.add_argument("--seed", type=int, help="repeats a campaign; random unless given")
    parser.add_argument("--arp-ms", type=int, help="how often a node asks for a neighbour's address (the kernel: 1000)")
    if why := why_no_network():
        sys.exit(f"node-faults cannot run here: {why}")
    sys.exit(1 if campaign(parser.parse_args()) else 0)
