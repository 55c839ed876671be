# SPDX-License-Identifier: Apache-2.0
"""
zerodrun keeps its daemon's descriptors and restarts the daemon. The daemon is the test program kept-daemon, or zerod.
"""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import wait_for

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("ZEROD_BUILD", ROOT / "build")).resolve()
ZERODRUN = BUILD / "client" / "run" / "zerodrun"
ZEROD = BUILD / "daemon" / "zerod"
KEPT_DAEMON = BUILD / "tests" / "kept-daemon"
TIMEOUT = 60
SLEEP = ["--", "sh", "-c", "exec sleep 100"]


class Run:
    """A zerodrun with its output in files."""

    def __init__(self, folder, args):
        self.out, self.err = folder / "out", folder / "err"
        others = re.compile("ZEROD_|RANK$|WORLD_|LOCAL_|MASTER_|LISTEN_|NOTIFY_")
        env = {k: v for k, v in os.environ.items() if not others.match(k)}
        env["XDG_RUNTIME_DIR"] = str(folder)
        with open(self.out, "w") as out, open(self.err, "w") as err:
            self.process = subprocess.Popen([ZERODRUN, *map(str, args)], env=env, stdout=out, stderr=err)

    def said(self, pattern, n=1, of=None):
        """Waits for n matches in the output. Return: the last one."""
        file = of or self.out
        wait_for(f"{pattern} in {file}", lambda: len(re.findall(pattern, file.read_text())) >= n)
        return re.findall(pattern, file.read_text())[n - 1]

    def daemon(self, n=1):
        """
        Return: (inode of its memory, pids of the daemons that had this memory, number of other descriptors) of the n-th
        daemon. Waits until the ranks run, because before that zerodrun does not restart a daemon.
        """
        self.said("ranks, run", of=self.err)
        inode, pids, others = self.said(r"inode (\d+), pids ([\d ]+), (\d+) others", n)
        return inode, [int(pid) for pid in pids.split()], int(others)

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "job.sock"


@pytest.fixture
def config(tmp_path, path):
    file = tmp_path / "job.yaml"
    file.write_text(f"listen: {{socket: {path}}}\nworld: {{size: 1}}\n")
    return file


@pytest.fixture
def start(tmp_path):
    """
    start(*args) starts a zerodrun. At the test's end it is killed with all its processes. Nothing of it may be left.
    """
    runs = []

    def begin(*args):
        runs.append(Run(tmp_path, args))
        return runs[-1]

    yield begin
    for run in runs:
        killed = run.process.poll() is None
        run.process.kill()
        run.process.wait()
        assert killed or not list(tmp_path.glob("zerodrun-*")), "a private directory is left"


def say(path, word):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.connect(str(path))
        s.send(word.encode())


def test_memory_outlives_the_daemon(start, config, path):
    """The next daemon gets the same memory (by its inode and content) and the socket."""
    run = start("--config", config, "--zerod", KEPT_DAEMON, *SLEEP)
    inode, pids, _ = run.daemon()
    for n in (2, 3):
        os.kill(pids[-1], signal.SIGKILL)
        again, more, _ = run.daemon(n)
        assert again == inode and more[:-1] == pids and len(more) == n
        run.said(rf"zerod \(pid {pids[-1]}\) was killed by signal 9 \(Killed\); restart {n - 1} of 3", of=run.err)
        pids = more
        say(path, "p")
        run.said("did p, confirmed 0", n - 1)
    assert "confirmed -" not in run.out.read_text()
    assert run.end() == 143
    assert not path.exists()


def test_messages_of_a_dead_daemon_count(start, config, path):
    """
    A daemon sends a descriptor and dies at once, perhaps before zerodrun has read the message. The descriptor is kept.
    """
    run = start("--config", config, "--zerod", KEPT_DAEMON, *SLEEP)
    run.daemon()
    say(path, "m")
    run.said("did m, confirmed 0")
    say(path, "k")
    assert run.daemon(2)[2] == 101
    say(path, "p")
    run.said("did p")
    assert re.findall(r"kept (\S+)", run.out.read_text()) == [f"more.{i}" for i in range(100)] + ["last"]


def test_forgotten(start, config, path):
    run = start("--config", config, "--zerod", KEPT_DAEMON, *SLEEP)
    inode, pids, _ = run.daemon()
    say(path, "f")
    run.said("did f, confirmed 0")
    os.kill(pids[0], signal.SIGKILL)
    again, pids, _ = run.daemon(2)
    assert again != inode and len(pids) == 1


def test_restarts_run_out(start, config, path):
    run = start("--config", config, "--zerod", KEPT_DAEMON, "--daemon-restarts", 1, *SLEEP)
    os.kill(run.daemon()[1][-1], signal.SIGKILL)
    os.kill(run.daemon(2)[1][-1], signal.SIGKILL)
    assert run.process.wait(TIMEOUT) == 137
    err = run.err.read_text()
    assert re.search(r"was killed by signal 9 \(Killed\); restart 1 of 1\n", err)
    assert re.search(r"\(Killed\) while ranks were running; no restart is left \(1 in 10 minutes\)\n", err)


@pytest.mark.parametrize("word, code", [("7", 78), ("0", 0)])
def test_exit_codes(start, config, path, word, code):
    """zerodrun does not restart a daemon whose configuration is wrong."""
    run = start("--config", config, "--zerod", KEPT_DAEMON, *SLEEP)
    run.daemon()
    say(path, word)
    if code == 0:
        assert len(run.daemon(2)[1]) == 2
        run.said(r"zerod \(pid \d+\) exited with 0; restart 1 of 3", of=run.err)
    else:
        assert run.process.wait(TIMEOUT) == code
        assert "exited with 78 while ranks were running\n" in run.err.read_text()


def test_nothing_is_kept(start, config, tmp_path):
    show = tmp_path / "zerod"
    show.write_text("#!/bin/sh\nenv | grep -E '^(NOTIFY_SOCKET|LISTEN_|FDSTORE)' || echo nothing\nexit 3\n")
    show.chmod(0o755)
    run = start("--config", config, "--zerod", show, "--daemon-restarts", 0, *SLEEP)
    assert run.process.wait(TIMEOUT) == 3
    assert "[zerod] nothing" in run.out.read_text()


def test_environment_of_daemon_and_ranks(start, config, path):
    """zerodrun raises its limit of open files for the kept descriptors. Ranks have zerodrun's original limit."""
    code = "import os, resource as r; print('rank', r.getrlimit(r.RLIMIT_NOFILE)[0], 'FDSTORE' in os.environ)"
    run = start("--config", config, "--zerod", KEPT_DAEMON, "--", sys.executable, "-c", code)
    assert run.process.wait(TIMEOUT) == 0
    assert f"rank {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} False" in run.out.read_text()


def test_strangers_are_not_obeyed(start, config, path, tmp_path):
    """Another process of the same user sends a descriptor and removes one. zerodrun ignores both messages."""
    run = start("--config", config, "--zerod", KEPT_DAEMON, *SLEEP)
    inode, pids, _ = run.daemon()
    notify = str(next(tmp_path.glob("zerodrun-*/notify")))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s, open("/dev/null") as file:
        s.connect(notify)
        socket.send_fds(s, [b"FDSTORE=1\nFDNAME=stranger"], [file.fileno()])
        s.send(b"FDSTOREREMOVE=1\nFDNAME=state")
    os.kill(pids[0], signal.SIGKILL)
    again, pids, others = run.daemon(2)
    assert again == inode and len(pids) == 2 and others == 0


def test_zerodrun_does_not_grow(start, config):
    """The number of zerodrun's descriptors does not grow with restarts."""
    run = start("--config", config, "--zerod", KEPT_DAEMON, "--daemon-restarts", 20, *SLEEP)
    _, pids, _ = run.daemon()
    open_files = Path(f"/proc/{run.process.pid}/fd")
    before = len(list(open_files.iterdir()))
    for n in range(2, 12):
        os.kill(pids[-1], signal.SIGKILL)
        _, pids, others = run.daemon(n)
        assert others == 0
    wait_for("more open files than before", lambda: len(list(open_files.iterdir())) <= before)


# ---- zerod itself ----------------------------------------------------------------------------------------


def started(run, n=1):
    return int(run.said(r"started \S*zerod \(pid (\d+)\)", n, of=run.err))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve(start, config, path, number):
    """The socket always accepts connections, even while there is no daemon."""
    run = start("--serve", "--config", config, "--zerod", ZEROD)
    assert run.said("serving on (.*) until", of=run.err) == str(path)
    pid = started(run)
    wait_for("no daemon is ready", lambda: "ready: job" in run.err.read_text())
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT
    while "; restart 1 of 3" not in run.err.read_text() or run.err.read_text().count("ready: job") < 2:
        assert time.monotonic() < deadline, run.err.read_text()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
            s.connect(str(path))
    subprocess.run([BUILD / "client" / "ctl" / "zerodctl", "--socket", path, "status"], check=True, timeout=TIMEOUT)
    assert run.end(number) == 0
    assert not path.exists()
    assert "stopping: SIGINT" in run.err.read_text()


def test_serve_where_a_daemon_serves(start, config, path):
    run = start("--serve", "--config", config, "--zerod", ZEROD)
    run.said("serving on", of=run.err)
    second = subprocess.run([ZERODRUN, "--serve", "--config", config], capture_output=True, text=True, timeout=TIMEOUT)
    assert second.returncode == os.EX_UNAVAILABLE
    assert f"a daemon answers on {path} already" in second.stderr
    assert run.end() == 0


def test_serve_runs_out(start, config, path):
    run = start("--serve", "--config", config, "--zerod", ZEROD, "--daemon-restarts", 0)
    run.said("serving on", of=run.err)
    os.kill(started(run), signal.SIGKILL)
    assert run.process.wait(TIMEOUT) == 137
    assert "(Killed) while it was serving\n" in run.err.read_text()


# ---- the checkpoint of save_on_stop ----------------------------------------------------------------------


@pytest.fixture
def stopped(start, tmp_path, path):
    """
    stopped(plan, *options) does a run of three steps with save_on_stop. plan: the failpoints of its successive daemons;
    later daemons have none. Return: (exit status, saved folders, standard error).
    """

    def run(plan, *options, interrupted_at=None, then="exit"):
        folder = tmp_path / "checkpoints"
        file = tmp_path / "job.yaml"
        file.write_text(f"listen: {{socket: {path}}}\nworld: {{size: 1}}\ncheckpoint: {{dir: {folder}, save_on_stop: true}}\n")
        for n, failpoint in enumerate(plan):
            (tmp_path / f"plan.{n}").write_text(failpoint)
        daemon = tmp_path / "zerod"
        daemon.write_text(
            f"#!/bin/sh\necho $$ >{tmp_path}/pid\n"
            f'for plan in {tmp_path}/plan.*; do [ -e "$plan" ] && export ZEROD_FAILPOINT="$(cat "$plan")" && rm "$plan"; break; done\n'
            f'exec {ZEROD} "$@"\n')
        daemon.chmod(0o755)
        trainer = f"{BUILD}/tests/example/zerod-example --layers 1 --width 16 --heads 1 --batch 1 --steps 3"
        zerodrun = start("-n", 1, "--config", file, "--zerod", daemon, *options, "--", "sh", "-c", f"{trainer} && {then}")
        if interrupted_at:
            zerodrun.said(interrupted_at, of=zerodrun.err)
        while interrupted_at and zerodrun.process.poll() is None:
            zerodrun.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        code = zerodrun.process.wait(TIMEOUT)
        return code, sorted(f.name for f in folder.glob("*")), zerodrun.err.read_text()

    return run


@pytest.mark.parametrize("plan", [["disk.write:kill"], ["disk.rename:kill"], ["disk.sync:kill", "disk.make_folder:kill"]],
                         ids=["first write", "rename", "twice"])
def test_daemon_dies_while_it_saves(stopped, plan):
    """A daemon dies while it saves. The next one gets the kept descriptors, is asked to stop too, and saves."""
    code, saved, err = stopped(plan)
    assert (code, saved) == (0, ["step-00000003"]), err
    assert err.count("was killed by signal 9 (Killed); restart ") == len(plan)
    assert err.count("the checkpoint is written") == 1


@pytest.mark.parametrize("plan, options, status, said", [
    (["disk.sync:kill"] * 3, ["--daemon-restarts", 2], 137,
     r"failed after .*: zerod was killed by signal 9 \(Killed\) while it was stopping; a checkpoint that it was to write may be "
     r"missing; no restart is left \(2 in 10 minutes\)"),
    (["disk.sync:kill"], ["--daemon-restarts", 0], 137, "a checkpoint that it was to write may be missing"),
    (["disk.write:error@*"], [], os.EX_IOERR,
     r"failed after .*: zerod exited with 74 while it was stopping; .* its last message: \".*stopping; the last step is not saved: "
     r".*No space left on device\""),
], ids=["dies always", "not kept", "disk full"])
def test_last_checkpoint_is_not_there(stopped, plan, options, status, said):
    code, saved, err = stopped(plan, *options)
    assert [name for name in saved if not name.startswith(".")] == []
    assert code == status and re.search(said, err), err


def test_slow_disk(stopped):
    """zerodrun waits for a slow save as long as the daemon asks for time, like systemd."""
    code, saved, err = stopped(["disk.sync:sleep:3000"], "--grace", 1)
    assert (code, saved) == (0, ["step-00000003"]), err


def test_user_does_not_wait(stopped):
    code, saved, err = stopped(["disk.sync:sleep:100000@*"], interrupted_at="stopping when a checkpoint is written")
    assert code == 130 and "second SIGINT: killing" in err and "may be missing" not in err, err


def test_daemon_dies_before_it_is_told_to_stop(stopped, tmp_path):
    """The daemon dies just before the last rank ends. The next daemon still saves."""
    code, saved, err = stopped([], then=f"kill -9 $(cat {tmp_path}/pid)")
    assert (code, saved) == (0, ["step-00000003"]), err
