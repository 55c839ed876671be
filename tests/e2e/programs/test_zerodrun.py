# SPDX-License-Identifier: Apache-2.0
"""zerodrun with small shell and Python trainers: environment, output, exit codes, restarts, signals, daemon."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from conftest import Build
from nodes import Nodes, free_ports, make_key
from terminal import Terminal

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("ZEROD_BUILD", ROOT / "build")).resolve()
ZERODRUN = BUILD / "client" / "run" / "zerodrun"
ZEROD = BUILD / "daemon" / "zerod"
TIMEOUT = 60


@pytest.fixture
def env(tmp_path):
    """An environment without variables of other runs."""
    clean = {k: v for k, v in os.environ.items() if not re.match(r"(ZEROD_|RANK$|WORLD_|LOCAL_|MASTER_|OMP_|SLURM_)", k)}
    clean["XDG_RUNTIME_DIR"] = str(tmp_path)
    return clean


def start(args, env, under=(), **kwargs):
    kwargs.setdefault("stdout", subprocess.PIPE)
    kwargs.setdefault("stderr", subprocess.PIPE)
    return subprocess.Popen([*under, str(ZERODRUN), *map(str, args)], env=env, text=True, errors="replace", **kwargs)


def run(args, env, **kwargs):
    process = start(args, env, **kwargs)
    out, err = process.communicate(timeout=TIMEOUT)
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def python(code):
    return ["--", sys.executable, "-uc", code]


def shell(code):
    return ["--", "sh", "-c", code]


def wait_for(what, condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids_in(directory, n):
    """Waits for the files pid.RANK of n ranks. Return: the pids in them."""
    files = [directory / f"pid.{i}" for i in range(n)]
    wait_for("ranks did not start", lambda: all(f.exists() and f.read_text().endswith("\n") for f in files))
    return [int(f.read_text()) for f in files]


# ---- environment -----------------------------------------------------------------------------------------


ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


def environments(result):
    return {int(m[1]): json.loads(m[2]) for m in re.finditer(r"^\[(\d+)\] (\{.*\})$", result.stdout, re.M)}


def test_environment(env):
    result = run(["-n", 3, "--no-daemon", "--socket", "/tmp/job.sock", *python(ENVIRONMENT)], env)
    assert result.returncode == 0, result.stderr
    ranks = environments(result)
    assert sorted(ranks) == [0, 1, 2]
    for rank, got in ranks.items():
        assert got["RANK"] == got["LOCAL_RANK"] == str(rank)
        assert got["WORLD_SIZE"] == got["LOCAL_WORLD_SIZE"] == "3"
        assert got["MASTER_ADDR"] == "127.0.0.1"
        assert got["ZEROD_SOCKET"] == "/tmp/job.sock"
        assert got["OMP_NUM_THREADS"] == "1"
        assert got["ZEROD_RESTART_COUNT"] == "0" and "ZEROD_RESTARTS_LEFT" not in got
        assert got["PATH"] == env["PATH"]
    assert len({r["ZEROD_RUN_ID"] for r in ranks.values()}) == 1
    assert re.fullmatch("[0-9a-f]{16}", ranks[0]["ZEROD_RUN_ID"])
    ports = {r["MASTER_PORT"] for r in ranks.values()}
    assert len(ports) == 1
    port = int(ports.pop())
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert port >= 10000 and not low <= port <= high, "an outgoing connection could get it before rank 0 listens"
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_environment_is_overridden_and_kept(env):
    env |= {"RANK": "9", "ZEROD_RESTARTS_LEFT": "0", "ZEROD_RUN_ID": "mine", "ZEROD_SOCKET": "/tmp/env.sock", "OMP_NUM_THREADS": "3",
            "TORCHELASTIC_USE_AGENT_STORE": "True"}
    got = environments(run(["--no-daemon", "--master-port", 12345, *python(ENVIRONMENT)], env))[0]
    assert (got["RANK"], got["WORLD_SIZE"], got["MASTER_PORT"]) == ("0", "1", "12345")
    assert (got["ZEROD_RUN_ID"], got["ZEROD_SOCKET"], got["OMP_NUM_THREADS"]) == ("mine", "/tmp/env.sock", "3")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in got and "ZEROD_RESTARTS_LEFT" not in got
    got = environments(run(["--no-daemon", "--run-id", "other", *python(ENVIRONMENT)], env))[0]
    assert got["ZEROD_RUN_ID"] == "other"


def test_environments_of_all_sizes_are_kept():
    """Environments of all sizes are complete, also if zerodrun's copy must grow for the last variable."""
    for n in range(40, 72):
        more = {f"VARIABLE_{i}": str(i) for i in range(n)}
        result = run(["--no-daemon", "--socket", "/tmp/job.sock", "-q", "--", "/usr/bin/env"], more)
        lines = result.stdout.splitlines()
        assert result.returncode == 0, (n, result.stderr)
        assert set(lines) >= {f"[0] {name}={value}" for name, value in more.items()}, n
        assert "[0] ZEROD_RESTART_COUNT=0" in lines, n


def test_two_runs_differ(env):
    a, b = (environments(run(["--no-daemon", *python(ENVIRONMENT)], env))[0] for _ in range(2))
    assert a["ZEROD_RUN_ID"] != b["ZEROD_RUN_ID"]


def test_arguments_reach_the_program(env):
    code = "import sys; print(sys.argv[1:])"
    result = run(["--no-daemon", "-q", *python(code), "-n", "7", "--help", "a b", ""], env)
    assert result.stdout == "[0] ['-n', '7', '--help', 'a b', '']\n"


def test_stdin_is_rank_0s(env):
    code = "import sys; print(repr(sys.stdin.read()))"
    process = start(["-n", 2, "--no-daemon", *python(code)], env, stdin=subprocess.PIPE)
    out, _ = process.communicate("hello", timeout=TIMEOUT)
    assert sorted(out.splitlines()) == ["[0] 'hello'", "[1] ''"]


# ---- output ----------------------------------------------------------------------------------------------


def test_prefixes_and_streams(env):
    code = 'echo out $RANK; echo err $RANK >&2; printf "no newline" > /dev/stdout'
    result = run(["-n", 2, "-q", "--no-daemon", *shell(code)], env)
    assert sorted(result.stdout.splitlines()) == ["[0] no newline", "[0] out 0", "[1] no newline", "[1] out 1"]
    assert sorted(result.stderr.splitlines()) == ["[0] err 0", "[1] err 1"]
    assert result.stdout.endswith("\n")


def test_lines_stay_whole(env):
    """Lines of ranks that write in small pieces at the same time do not mix."""
    code = """
import os, sys
rank = os.environ["RANK"]
text = "".join(f"{rank} {i} " + "x" * (i % 300) + " end\\n" for i in range(3000)).encode()
for i in range(0, len(text), 37 + int(rank)):
    os.write(1, text[i:i + 37 + int(rank)])
"""
    result = run(["-n", 4, "-q", "--no-daemon", *python(code)], env)
    seen = [0] * 4
    for line in result.stdout.splitlines():
        m = re.fullmatch(r"\[(\d)\] \1 (\d+) (x*) end", line)
        assert m, line
        rank, i = int(m[1]), int(m[2])
        assert i == seen[rank] and len(m[3]) == i % 300
        seen[rank] += 1
    assert seen == [3000] * 4


def test_progress_bars_and_long_lines(env):
    code = r"""
import os
os.write(1, b"10%\r20%\rdone\n")
os.write(1, b"y" * 200000 + b"\n")
"""
    process = subprocess.run([ZERODRUN, "-q", "--no-daemon", *python(code)], env=env, capture_output=True,
                             timeout=TIMEOUT)
    # A log keeps only the last state of a progress bar, which shows how far the rank came.
    assert process.stdout == b"[0] done\n[0] " + b"y" * 200000 + b"\n"
    code = 'printf "kept\\r\\n\\r10%%|#  |\\r20%%|## |" >&2; kill -9 $$'
    assert run(["-q", "--no-daemon", *shell(code)], env).stderr == "[0] kept\n[0] 20%|## |\n"


# ---- terminal --------------------------------------------------------------------------------------------


DRAW = """
import os, sys, time
directory, rank = sys.argv[1], os.environ["RANK"]
def wait(name):
    while not os.path.exists(f"{directory}/{name}"):
        time.sleep(0.01)
def draw(text):
    sys.stderr.write("\\r" + text)
    sys.stderr.flush()
wait("begin." + rank)
draw("0%|   |")
wait("half." + rank)
draw("50%|## |")
wait("print." + rank)
print("step 1")
wait("end." + rank)
draw("100%|###|\\nend\\n")  # the line below it tells at once that the bar is finished
"""


def draw(env, tmp_path, height):
    """Starts two ranks with a bar each. Return: their terminal, and a function for a rank's next action."""
    terminal = Terminal([ZERODRUN, "-q", "-n", "2", "--no-daemon", *python(DRAW), tmp_path], {**env, "NO_COLOR": "1"},
                        height)

    def act(name, *lines):
        (tmp_path / name).touch()
        terminal.wait_for([*lines])

    return terminal, act


def test_bars_on_a_terminal(env, tmp_path):
    """Each rank's bar keeps its row, with one prefix, below all finished lines."""
    terminal, act = draw(env, tmp_path, 24)
    act("begin.1", "[1] 0%|   |")
    act("begin.0", "[1] 0%|   |", "[0] 0%|   |")
    act("half.1", "[1] 50%|## |", "[0] 0%|   |")
    act("print.1", "[1] step 1", "[1] 50%|## |", "[0] 0%|   |")
    finished = ["[1] step 1", "[1] 100%|###|", "[1] end"]
    act("end.1", *finished, "[0] 0%|   |")
    act("half.0", *finished, "[0] 50%|## |")
    act("print.0", *finished, "[0] step 1", "[0] 50%|## |")
    (tmp_path / "end.0").touch()
    assert terminal.end() == [*finished, "[0] step 1", "[0] 100%|###|", "[0] end"]


NESTED = """
import sys, time, tqdm
for epoch in tqdm.tqdm(range(2), desc="epoch", bar_format="{desc} {n}", mininterval=0):
    for batch in tqdm.tqdm(range(3), desc="batch", bar_format="{desc} {n}", leave=False, mininterval=0):
        time.sleep(0.05)
    tqdm.tqdm.write("a word", file=sys.stderr)
"""


def test_bars_below_each_other(env):
    """Nested bars of tqdm have one prefix each. A pipe gets only the last state of the bar that stays."""
    pytest.importorskip("tqdm")
    result = run(["-q", "--no-daemon", *python(NESTED)], env)
    assert (result.returncode, result.stderr) == (0, "[0] a word\n[0] a word\n[0] epoch 2\n")
    terminal, states = Terminal([ZERODRUN, "-q", "--no-daemon", *python(NESTED)], {**env, "NO_COLOR": "1"}), []
    while terminal.read():
        states.append(terminal.screen.lines())
    # One read may contain several states; only the last one is seen.
    seen = {tuple(re.sub(r"(batch) \d", r"\1", line) for line in state) for state in states}
    assert {("[0] epoch 0", "[0] batch"), ("[0] a word", "[0] epoch 1", "[0] batch")} <= seen, states
    assert terminal.end() == ["[0] a word", "[0] a word", "[0] epoch 2"]


def test_finished_bar_does_not_wait(env, tmp_path):
    """The last state of a bar that a nested bar might follow is printed when no more output comes."""
    code = f'printf "\\r9%%\\n" >&2; while [ ! -e {tmp_path}/end ]; do sleep 0.05; done'
    process = start(["-q", "--no-daemon", *shell(code)], env)
    assert process.stderr.readline() == "[0] 9%\n"
    (tmp_path / "end").touch()
    assert process.wait(TIMEOUT) == 0


def test_bars_on_a_low_terminal(env, tmp_path):
    """A bar for which there is no room is shown as soon as there is room."""
    terminal, act = draw(env, tmp_path, 2)
    act("begin.1", "[1] 0%|   |")
    (tmp_path / "begin.0").touch()
    (tmp_path / "half.0").touch()
    act("print.0", "[0] step 1", "[1] 0%|   |")
    (tmp_path / "half.1").touch()
    act("print.1", "[0] step 1", "[1] step 1", "[1] 50%|## |")
    act("end.1", "[0] step 1", "[1] step 1", "[1] 100%|###|", "[1] end", "[0] 50%|## |")
    (tmp_path / "end.0").touch()
    assert terminal.end() == ["[0] step 1", "[1] step 1", "[1] 100%|###|", "[1] end", "[0] 100%|###|", "[0] end"]


def test_bar_of_a_narrow_terminal(env):
    """A bar uses one row, however long it is. A bar that its program erases leaves no row."""
    code = 'printf "\\r10%%%100s" "" ; sleep 0.2; printf "\\r20%%%100s\\r%100s\\r"; [ $RANK = 0 ] || echo end'
    terminal = Terminal([ZERODRUN, "-q", "-n", "2", "--no-daemon", *shell(code)], {**env, "NO_COLOR": "1"}, width=40)
    assert terminal.end() == ["[1] end"]


def test_colors(env, tmp_path):
    code = 'echo out; [ $RANK = 0 ] || exit 0; echo err >&2'
    zerod = fake_zerod(tmp_path)

    def lines(more_env, *more):
        args = [ZERODRUN, "-n", "2", *more, "--zerod", zerod, *shell(code)]
        return {re.sub(r"\d+\.\d s", "T s", line) for line in Terminal(args, {**env, **more_env}, colors=True).end()}

    colored, plain = lines({}), lines({"NO_COLOR": "1"})
    assert {"<36>[0]<0> out", "<36>[0]<0> err", "<32>[1]<0> out", "<1>[zerod]<0> listening"} <= colored
    assert {"[0] out", "[0] err", "[1] out", "[zerod] listening", "zerodrun: done after T s"} <= plain
    assert lines({"NO_COLOR": ""}, "-q") == lines({"NO_COLOR": "1"}, "-q", "--color", "always")
    assert lines({"TERM": "dumb"}, "-q") == lines({}, "-q", "--color", "never") == lines({"NO_COLOR": "1"}, "-q")
    result = run(["-q", "--no-daemon", "--color", "always", *shell("echo out")], env)
    assert result.stdout == "\x1b[36m[0]\x1b[0m out\n"
    result = run(["--color", "always", "--zerod", fake_zerod(tmp_path, fail=78), *shell("true")], env)
    assert re.search(r"^\x1b\[1;31mzerodrun:\x1b\[0m zerod \(pid \d+\) exited with 78 before", result.stderr, re.M)


def test_quiet(env):
    result = run(["-n", 2, "--no-daemon", *shell("true")], env)
    assert re.search(r"^zerodrun: starts 2 of 2 ranks, run [0-9a-f]{16}, socket none$", result.stderr, re.M)
    assert re.search(r"^zerodrun: done after [0-9.]+ s$", result.stderr, re.M)
    result = run(["-n", 2, "--no-daemon", "--quiet", *shell("exit 3")], env)
    assert (result.returncode, result.stderr, result.stdout) == (3, "", "")


def test_slow_reader_bounds_memory_and_not_signals(env, tmp_path):
    """If nobody reads, the ranks block on their pipes. zerodrun stays small and forwards signals."""
    code = f"""
import os, signal
def usr1(*_):
    open({str(tmp_path)!r} + "/usr1." + os.environ["RANK"], "w").close()
signal.signal(signal.SIGUSR1, usr1)
with open({str(tmp_path)!r} + "/pid." + os.environ["RANK"], "w") as f:
    f.write(str(os.getpid()) + "\\n")
line = b"z" * 999 + b"\\n"
for i in range(100000):
    os.write(1, line)
"""
    process = start(["-n", 2, "-q", "--no-daemon", *python(code)], env)
    pids_in(tmp_path, 2)
    sizes = []
    for _ in range(20):
        time.sleep(0.05)
        sizes.append(int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1]))
    n_sanitized = 200 * 1024 if "asan" in Path(f"/proc/{process.pid}/maps").read_text() else 0
    assert max(sizes) < 16 * 1024 + n_sanitized, sizes
    process.send_signal(signal.SIGUSR1)
    wait_for("signal did not arrive", lambda: all((tmp_path / f"usr1.{i}").exists() for i in range(2)))
    n_bytes = 0
    while chunk := process.stdout.read(1 << 20):
        n_bytes += len(chunk)
    assert n_bytes == 2 * 100000 * 1004
    assert process.wait(TIMEOUT) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_output_that_nobody_takes_does_not_hold_up_the_end(env, tmp_path, number):
    code = f"""
import os
with open({str(tmp_path)!r} + "/pid." + os.environ["RANK"], "w") as f:
    f.write(str(os.getpid()) + "\\n")
while True:
    os.write(1, b"z" * 999 + b"\\n")
"""
    process = start(["-n", 2, "--grace", 1, "--no-daemon", *python(code)], env, stderr=subprocess.DEVNULL)
    pids = pids_in(tmp_path, 2)
    time.sleep(0.5)  # the pipes fill
    process.send_signal(number)
    assert process.wait(TIMEOUT) != 0
    assert not any(alive(pid) for pid in pids)
    process.stdout.close()


def test_reader_that_goes_away_does_not_end_the_run(env, tmp_path):
    code = f'for i in $(seq 5000); do echo line $i; done; echo ok > {tmp_path}/end'
    process = start(["--no-daemon", "-q", *shell(code)], env)
    assert process.stdout.readline() == "[0] line 1\n"
    process.stdout.close()
    assert process.wait(TIMEOUT) == 0
    assert (tmp_path / "end").read_text() == "ok\n"


# ---- equal texts of several processes --------------------------------------------------------------------

MISTAKE = """
import os
import torch, zerod

model = torch.nn.Linear(4, 4)
opt = zerod.Optimizer(model, lr=0.1)
model(torch.ones(2, 4)).sum().backward()
model.to(torch.float16 if int(os.environ["RANK"]) in ALIKE else torch.float64)
opt.step()
"""


def run_mistake(env, tmp_path, alike, *options):
    """Runs a program whose ranks convert the model to another dtype, those in `alike` to float16."""
    pytest.importorskip("torch")
    program = tmp_path / "mistake.py"
    program.write_text(MISTAKE.replace("ALIKE", repr(alike)))
    env = env | Build(BUILD).preload()
    env |= {"PYTHONPATH": str(ROOT / "client/python"), "ZEROD_LIBRARY": str(BUILD / "client/libzerod.so")}
    # The second rank must not get SIGTERM before it has printed its text.
    return run(["-n", 2, "--zerod", ZEROD, *options, "--", sys.executable, "-c",
                "import runpy, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                f"runpy.run_path({str(program)!r})"], env)  # fmt: skip


def texts(result):
    """Return: the lines of each process without prefixes."""
    lines = [re.match(r"\[(\w+)\] (.*)", line) for line in result.stderr.splitlines()]
    return {name: [m[2] for m in lines if m and m[1] == name] for name in ("0", "1", "zerod")}


def test_same_mistake_of_all_ranks(env, tmp_path):
    """The common cause is printed once, and each rank's headline. --tee has all lines."""
    result = run_mistake(env, tmp_path, (0, 1), "--tee", tmp_path / "logs")
    said = texts(result)
    cause = "  got            weight is torch.float16 on cpu in memory of its own, seen at mistake.py:9"
    headline = "E1104 weights re-pointed, step refused: rank {}, step 0, micro-batch 1"
    assert result.returncode == 1 and result.stderr.count(cause) == 1
    assert said["zerod"].count("  the same 7 lines as above") == 1
    for rank in "01":
        assert f"zerod[zerodrun]: {headline.format(rank)}" in said["zerod"]
        assert said[rank][-2:] == [f"zerod.errors.WeightsRepointed: {headline.format(rank)}",
                                   "  the same 7 lines as [zerod] above"]  # fmt: skip
    for name, n in ("rank0", 1), ("rank1", 1), ("zerod", 2):
        log = (tmp_path / f"logs/{name}.log").read_text()
        assert log.count(cause) == n and "the same" not in log


def test_different_mistakes_of_ranks(env, tmp_path):
    """If one line differs, the texts of both ranks are printed completely."""
    result = run_mistake(env, tmp_path, (0,))
    assert result.returncode == 1
    for dtype in "float16", "float64":
        assert result.stderr.count(f"  got            weight is torch.{dtype} on cpu") == 1
    assert result.stderr.count("  cause    ") == 2 and "  the same 7 lines as above" not in result.stderr


GROUP = """
import signal
import torch.distributed

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which must not come before the text of the second rank
torch.distributed.init_process_group("gloo")
error = ValueError("no such column")
error.add_note("  the columns are a, b, c\\n  and the file is train.csv")
torch.distributed.barrier()
raise error
"""


def test_same_traceback_with_a_process_group(env, tmp_path):
    """torch's hook puts the rank before a traceback's lines. It is printed once, and --tee has the original."""
    pytest.importorskip("torch")
    program = tmp_path / "group.py"
    program.write_text(GROUP)
    result = run(["-n", 2, "--no-daemon", "--tee", tmp_path / "logs", "--", sys.executable, program], env)
    said, frame, note = texts(result), f'  File "{program}", line 10, in <module>', "  the columns are a, b, c"
    assert result.returncode == 1 and result.stderr.count(frame) == 1 and result.stderr.count(note) == 1
    first, second = sorted("01", key=lambda rank: frame not in said[rank])
    tail = said[second][said[second].index("Traceback (most recent call last):"):]
    assert tail[:4] == ["Traceback (most recent call last):", f"  the same 2 lines as [{first}] above",
                        "ValueError: no such column", f"  the same 2 lines as [{first}] above"]  # fmt: skip
    assert "[rank" not in result.stderr
    assert re.search(r"rank \d exited with 1; its last message: \"ValueError: no such column\"", result.stderr)
    for rank in "01":
        log = (tmp_path / f"logs/rank{rank}.log").read_text()
        assert f"[rank{rank}]: {frame}\n" in log and f"[rank{rank}]: {note}\n" in log


@pytest.mark.parametrize("is_one", [True, False], ids=["one file", "two"])
def test_standard_error_elsewhere(env, tmp_path, is_one):
    """A text that another rank wrote to another file is not referred to as being above."""
    code = """
import os, sys, time
while os.environ["RANK"] == "1" and not os.path.exists(os.environ["SAID"]):
    time.sleep(0.01)
print("E1001 x\\n  first\\n  second\\nend", file=sys.stderr if os.environ["RANK"] == "0" else sys.stdout, flush=True)
time.sleep(0.3)
open(os.environ["SAID"], "w").close()
"""
    result = run(["-n", 2, "--no-daemon", *python(code)], env | {"SAID": str(tmp_path / "said")},
                 stderr=subprocess.STDOUT if is_one else subprocess.PIPE)  # fmt: skip
    lines = [line[4:] for line in result.stdout.splitlines() if line.startswith("[1]")]
    assert lines == ["E1001 x", *(["  the same 2 lines as [0] above"] if is_one else ["  first", "  second"]), "end"]


def test_slow_repetition_is_not_held(env):
    """The beginning of a possible repetition is printed without its rest if the rest does not come."""
    code = """
import os, sys, time
print("E1001 x\\n  first\\n  second", flush=True)
if os.environ["RANK"] == "0":
    print("  third\\nend", flush=True)
time.sleep(1 if os.environ["RANK"] == "0" else 60)
"""
    process = start(["-n", 2, "--no-daemon", "--grace", 1, *python(code)], env)
    lines = [process.stdout.readline() for _ in range(8)]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT)
    whole = [line[4:] for line in lines if line.startswith("[0]")]
    assert whole == ["E1001 x\n", "  first\n", "  second\n", "  third\n", "end\n"]
    assert [line[4:] for line in lines if line.startswith("[1]")] == ["E1001 x\n", "  first\n", "  second\n"]


# ---- tee -------------------------------------------------------------------------------------------------


def test_tee(env, tmp_path):
    """--tee creates the folder and writes each process's output without prefixes. The next run appends."""
    logs = tmp_path / "logs" / "of" / "it"
    options = ["-n", 2, "--tee", logs, "--color", "always", "--restarts", 1, "--zerod", fake_zerod(tmp_path)]
    code = 'echo out $RANK; printf "\\r1%%\\r2%%\\n" >&2; [ $RANK = 0 ] || [ $ZEROD_RESTART_COUNT = 1 ]'
    result = run([*options, "--run-id", "a", *shell(code)], env)
    assert result.returncode == 0, result.stderr
    assert sorted((logs / "rank0.log").read_text().splitlines()) == ["2%", "out 0"]
    lines = (logs / "rank1.log").read_text().splitlines()
    assert lines[2] == "zerodrun: rank 1 exited with 1; restart 1 of 1"
    assert sorted(lines[:2]) == sorted(lines[3:]) == ["2%", "out 1"]
    assert (logs / "zerod.log").read_text() == "listening\n"
    run([*options, "--run-id", "b", *shell("echo again")], env)
    assert (logs / "rank1.log").read_text().endswith("\nzerodrun: run b begins\nagain\n")
    assert (logs / "zerod.log").read_text() == "listening\nzerodrun: run b begins\nlistening\n"


def test_tee_that_cannot_be(env, tmp_path):
    (tmp_path / "file").write_text("")
    for path in tmp_path / "file", tmp_path / "file" / "logs":
        result = run(["--no-daemon", "--tee", path, *shell("echo never")], env)
        assert (result.returncode, result.stdout) == (os.EX_CANTCREAT, "")
        assert f"zerodrun: --tee: cannot write {path}/rank0.log: Not a directory\n" in result.stderr


def test_tee_to_a_full_disk(env, tmp_path):
    """A full disk is reported once, and the run continues."""
    (tmp_path / "rank0.log").symlink_to("/dev/full")
    result = run(["-q", "--no-daemon", "--tee", tmp_path, *shell("echo a; sleep 0.1; echo b")], env)
    assert (result.returncode, result.stdout) == (0, "[0] a\n[0] b\n")
    assert result.stderr == (f"zerodrun: {tmp_path}/rank0.log: No space left on device: the rest of the output is not in "
                             "it\n")


# ---- exit codes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code, expected", [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -ABRT $$", 134),
                                            ("exit 255", 255)])
def test_exit_code(env, code, expected):
    assert run(["-n", 2, "--no-daemon", *shell(code)], env).returncode == expected


def test_first_failure_counts(env):
    result = run(["-n", 3, "--no-daemon", *shell('[ $RANK = 1 ] && exit 7; trap "exit 9" TERM; sleep 60 & wait')], env)
    assert result.returncode == 7
    assert re.search(r"rank 1 \(pid \d+\) exited with 7", result.stderr)


def last_line(result):
    """Return: zerodrun's last line, without the time."""
    assert result.stderr.endswith("\n")
    line = result.stderr.splitlines()[-1]
    assert re.match(r"zerodrun: failed after \d+\.\d s(, interrupted)?: ", line), line
    return line.split(": ", 2)[2]


def test_first_failure_counts_whose_output_ends_later(env, tmp_path):
    """The first failure decides, although a helper of that rank still has the output open when the other rank fails."""
    code = f"""
if [ $RANK = 0 ]; then setsid sleep 30 & echo $! > {tmp_path}/pid.0; touch {tmp_path}/failed; exit 7; fi
until [ -e {tmp_path}/failed ]; do sleep 0.02; done
sleep 0.2
exit 9
"""
    result = run(["-n", 2, "--no-daemon", *shell(code)], env)
    assert (result.returncode, last_line(result)) == (7, "rank 0 exited with 7")
    for pid in pids_in(tmp_path, 1):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


CRASH = """
import faulthandler, numpy, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
faulthandler._sigsegv()
"""
# With the dumps of two threads and the list of modules. A shell would print its own message about the signal.
CRASHES = shlex.join([sys.executable, "-c", f"import subprocess, sys\nsubprocess.run([sys.executable, '-X', 'faulthandler', '-c', {CRASH!r}])"]) + "; exit 1"


@pytest.mark.parametrize("code, said", [
    ("exit 1", ""),
    ("kill -9 $$", ""),
    ("echo out; echo; exit 1", "out"),
    ("echo err >&2; echo out; exit 1", "err"),
    ("echo 'Traceback:\n  line 3\nE1001 refused\n  fix  none' >&2; exit 1", "E1001 refused"),
    ("echo '[rank1]: Traceback:\n[rank1]:   line 3\n[rank1]: E1001 refused\n[rank1]:   fix  none\n[rank1]:   state  x' >&2; exit 1",
     "E1001 refused"),
    ("printf 'a\\033[31mred\\033[0m\\tb\\a \\302\\200\\377\\r\\n' >&2; exit 1", "ared b"),
    ("printf '%0251d\\303\\244%050d' 1 2 >&2; exit 1", "0" * 250 + "1..."),
    (CRASHES, "Fatal Python error: Segmentation fault"),
], ids=["silent", "signal", "stdout", "stderr", "details", "torch", "control", "long", "crash"])
def test_last_line_names_the_first_failure(env, code, said):
    result = run(["-n", 2, "--no-daemon", *shell(f"[ $RANK = 0 ] && exec sleep 60; {code}")], env)
    end = "was killed by signal 9 (Killed)" if "kill" in code else "exited with 1"
    assert last_line(result) == f"rank 1 {end}" + (f'; its last message: "{said}"' if said else "")


def test_program_that_cannot_run(env, tmp_path):
    result = run(["--no-daemon", "--", "no-such-program"], env)
    assert result.returncode == 127
    assert last_line(result) == ('rank 0 exited with 127; its last message: '
                                 '"zerodrun: cannot run no-such-program: No such file or directory"')
    (tmp_path / "plain").write_text("text")
    result = run(["--no-daemon", "--", tmp_path / "plain"], env)
    assert result.returncode == 126


def test_others_get_sigterm_then_sigkill(env, tmp_path):
    code = f"""
if [ $RANK = 0 ]; then while [ $(ls {tmp_path} | grep -c ready) -lt 2 ]; do sleep 0.05; done; exit 5; fi
if [ $RANK = 1 ]; then trap 'echo polite > {tmp_path}/term; exit 0' TERM; else trap "" TERM; fi
echo > {tmp_path}/ready.$RANK
while :; do sleep 0.1; done
"""
    began = time.monotonic()
    result = run(["-n", 3, "--no-daemon", "--grace", 2, *shell(code)], env)
    assert result.returncode == 5
    assert (tmp_path / "term").read_text() == "polite\n"
    assert re.search(r"rank 2 \(pid \d+\) was killed by signal 9", result.stderr)
    assert 2 <= time.monotonic() - began < 30


# ---- restarts --------------------------------------------------------------------------------------------


def test_restart_of_a_dead_rank(env, tmp_path):
    code = f"""
echo "$RANK $ZEROD_RESTART_COUNT $ZEROD_RUN_ID $MASTER_PORT" >> {tmp_path}/starts
[ $RANK = 1 ] && [ $ZEROD_RESTART_COUNT -lt 2 ] && kill -9 $$
exit 0
"""
    result = run(["-n", 2, "--no-daemon", "--restarts", 3, *shell(code)], env)
    assert result.returncode == 0, result.stderr
    starts = [line.split() for line in (tmp_path / "starts").read_text().splitlines()]
    assert sorted(s[:2] for s in starts) == [["0", "0"], ["1", "0"], ["1", "1"], ["1", "2"]]
    assert len({tuple(s[2:]) for s in starts}) == 1
    assert "restart 2 of 3" in result.stderr


def test_restarts_run_out(env, tmp_path):
    code = f"""
echo >> {tmp_path}/$RANK
[ $RANK = 0 ] && while :; do sleep 0.1; done
until [ -s {tmp_path}/0 ]; do sleep 0.02; done
exit 4
"""
    result = run(["-n", 2, "--no-daemon", "--restarts", 2, *shell(code)], env)
    assert result.returncode == 4
    assert (tmp_path / "1").read_text() == "\n" * 3
    assert (tmp_path / "0").read_text() == "\n"


def test_success_is_not_restarted(env, tmp_path):
    result = run(["-n", 2, "--no-daemon", "--restarts", 5, *shell(f"echo >> {tmp_path}/$RANK")], env)
    assert result.returncode == 0
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == "\n"


# ---- signals ---------------------------------------------------------------------------------------------


CATCH = """
import os, signal, sys, time
directory, rank = sys.argv[1], os.environ["RANK"]
def got(number, frame):
    with open(f"{directory}/got.{rank}", "a") as f:
        f.write(signal.Signals(number).name + "\\n")
    if number in (signal.SIGTERM, signal.SIGHUP):
        sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, got)
with open(f"{directory}/pid.{rank}", "w") as f:
    f.write(f"{os.getpid()}\\n")
while True:
    time.sleep(0.05)
"""


def signals_of(directory, rank):
    path = directory / f"got.{rank}"
    return path.read_text().split() if path.exists() else []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_are_forwarded(env, tmp_path, number):
    process = start(["-n", 2, "--no-daemon", *python(CATCH), tmp_path], env)
    pids_in(tmp_path, 2)
    for earlier in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        process.send_signal(earlier)
        wait_for("not forwarded", lambda: all(signals_of(tmp_path, r)[-1:] == [earlier.name] for r in range(2)))
    process.send_signal(number)
    assert process.wait(TIMEOUT) == 0
    expected = ["SIGUSR1", "SIGUSR2", "SIGINT", number.name]
    assert signals_of(tmp_path, 0) == signals_of(tmp_path, 1) == expected


def test_sigint_of_unprepared_ranks(env, tmp_path):
    process = start(["-n", 2, "--no-daemon", "--restarts", 9,
                     *shell(f"echo $$ > {tmp_path}/pid.$RANK; exec sleep 60")], env)
    pids_in(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGINT
    assert re.search(r"^zerodrun: failed after .*, interrupted: rank [01] was killed by signal 2 \(Interrupt\)\n\Z", err, re.M)


def test_second_sigint_kills(env, tmp_path):
    process = start(["-n", 2, "--no-daemon", *python(CATCH), tmp_path], env)
    pids = pids_in(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    wait_for("first SIGINT", lambda: all(signals_of(tmp_path, r) == ["SIGINT"] for r in range(2)))
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT) == 128 + signal.SIGINT
    assert not any(alive(pid) for pid in pids)


def test_terminal_ctrl_c_arrives_once(env, tmp_path):
    """A terminal signals its whole foreground group, to which the ranks do not belong. Each rank gets SIGINT once."""
    process = start(["-n", 2, "--no-daemon", *python(CATCH), tmp_path], env, start_new_session=True)
    pids_in(tmp_path, 2)
    os.killpg(process.pid, signal.SIGINT)
    wait_for("SIGINT", lambda: all(signals_of(tmp_path, r) for r in range(2)))
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT) == 0
    assert signals_of(tmp_path, 0) == signals_of(tmp_path, 1) == ["SIGINT", "SIGTERM"]


# ---- no orphans ------------------------------------------------------------------------------------------


def test_ranks_die_with_zerodrun(env, tmp_path):
    process = start(["-n", 3, "--no-daemon", *python(CATCH), tmp_path], env)
    pids = pids_in(tmp_path, 3)
    process.kill()
    process.wait(TIMEOUT)
    wait_for("orphans", lambda: not any(alive(pid) for pid in pids))


def test_helpers_die_with_their_rank(env, tmp_path):
    code = f"sleep 600 & echo $! > {tmp_path}/pid.$RANK; exit 0"
    assert run(["-n", 2, "--no-daemon", *shell(code)], env).returncode == 0
    wait_for("orphans", lambda: not any(alive(pid) for pid in pids_in(tmp_path, 2)))


def test_stranger_that_holds_the_output_does_not_hold_the_run(env, tmp_path):
    code = f"setsid sleep 30 & echo $! > {tmp_path}/pid.$RANK; exit 0"
    began = time.monotonic()
    assert run(["--no-daemon", "-q", *shell(code)], env, stdout=subprocess.DEVNULL,
               stderr=subprocess.DEVNULL).returncode == 0
    assert time.monotonic() - began < 20
    # setsid forks if it leads a group, so the sleeper is the process with its own session.
    for pid in pids_in(tmp_path, 1):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


# ---- usage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [[], ["-n", 2], ["-n", 0, "--", "true"], ["-n", "x", "--", "true"],
                                  ["-n", 65, "--", "true"], ["--restarts", -1, "--", "true"], ["--nonsense"],
                                  ["--master-port", 70000, "--", "true"], ["--run-id", "", "--", "true"],
                                  ["--run-id", "x" * 256, "--", "true"], ["--config"],
                                  ["--daemon-restarts", 101, "--", "true"], ["--serve"],
                                  ["--serve", "--config", "a", "--", "true"],
                                  ["--serve", "--config", "a", "--no-daemon"],
                                  ["--color", "red", "--", "true"],
                                  ["--jobs", 0, "--", "true"], ["--jobs", 9, "--", "true"],
                                  ["--config", "a", "--config", "b", "--", "true"]])
def test_usage_errors(env, args):
    result = run(args, env)
    assert result.returncode == os.EX_USAGE
    assert result.stderr and not result.stdout


def test_help_and_version(env):
    result = run(["--help"], env)
    assert result.returncode == 0 and "--restarts" in result.stdout and not result.stderr
    result = run(["--version"], env)
    assert result.returncode == 0 and re.fullmatch(r"zerodrun \d+\.\d+\.\d+\n", result.stdout)


def test_man_page_names_what_help_names(env):
    page = (ROOT / "man" / "zerodrun.1").read_text().replace("\\-", "-")
    words = set(re.findall(r"--[a-z]+[a-z-]*", run(["--help"], env).stdout))
    assert len(words) > 12
    for word in words:
        assert word in page, word


# ---- daemon ----------------------------------------------------------------------------------------------


FAKE = """#!{python}
# Listens where its configuration says, as zerod does; what it saw goes to a file.
import json, os, re, signal, socket, sys, time
out = {out!r}
assert sys.argv[1] == "--config"
text = open(sys.argv[2]).read()
path = re.search(r"socket: '(.*)'", text)[1].replace("''", "'")
time.sleep({delay})
if {fail} is not None:
    print("E1601 config: bad", file=sys.stderr)
    sys.exit({fail})
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(path)
print("listening", flush=True)  # before: from then on the ranks run, and may be at their end at once
server.listen()
saw = dict(config=text, path=path, pid=os.getpid(), notify=os.environ.get("NOTIFY_SOCKET"))
def write():
    with open(out + ".new", "w") as f:
        json.dump(saw, f)
    os.rename(out + ".new", out)
def stop(*_):
    saw["stopped"] = True
    write()
    os.unlink(path)
    sys.exit(0)
signal.signal(signal.SIGINT, stop)
write()
while True:
    server.accept()[0].close()
"""

CONNECT = """
import os, socket
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(os.environ["ZEROD_SOCKET"])
print("connected", os.environ["ZEROD_SOCKET"])
"""


def fake_zerod(tmp_path, delay=0, fail=None):
    script = tmp_path / "fake" / "zerod"
    script.parent.mkdir(exist_ok=True)
    script.write_text(FAKE.format(python=sys.executable, out=str(tmp_path / "saw.json"), delay=delay, fail=fail))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def saw(tmp_path):
    return json.loads((tmp_path / "saw.json").read_text())


def test_daemon_is_started_and_stopped(env, tmp_path):
    env["NOTIFY_SOCKET"] = "/nowhere"
    zerod = fake_zerod(tmp_path, delay=0.3)
    result = run(["-n", 2, "--zerod", zerod, *python(CONNECT)], env)
    assert result.returncode == 0, result.stderr
    got = saw(tmp_path)
    assert got["stopped"] and not alive(got["pid"]) and got["notify"] not in (None, "/nowhere")
    assert result.stdout.count(f"connected {got['path']}\n") == 2
    assert "[zerod] listening" in result.stdout
    assert re.search(r"world:\n  size: 2\n", got["config"]) and "stage: 2" in got["config"]
    assert Path(got["path"]).is_relative_to(tmp_path)
    assert not list(tmp_path.glob("zerodrun-*")), "the private directory is left"


def test_daemon_from_path(env, tmp_path):
    zerod = fake_zerod(tmp_path)
    env["PATH"] = f"{zerod.parent}:{env['PATH']}"
    alone = tmp_path / "bin" / "zerodrun"
    alone.parent.mkdir()
    alone.write_bytes(ZERODRUN.read_bytes())
    alone.chmod(0o755)
    result = subprocess.run([alone, *python(CONNECT)], env=env, capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 0, result.stderr
    assert saw(tmp_path)["stopped"]


def test_daemon_that_does_not_start(env, tmp_path):
    result = run(["--zerod", fake_zerod(tmp_path, fail=78), *shell("echo never")], env)
    assert result.returncode == 78
    assert "never" not in result.stdout
    assert "[zerod] E1601 config: bad" in result.stderr
    assert re.search(r"zerod \(pid \d+\) exited with 78 before it accepted connections", result.stderr)
    assert last_line(result) == 'zerod exited with 78 before it accepted connections; its last message: "E1601 config: bad"'
    assert not list(tmp_path.glob("zerodrun-*"))


def test_daemon_that_is_missing(env):
    result = run(["--zerod", "/nowhere/zerod", *shell("echo never")], env)
    assert result.returncode == 127
    assert "cannot run /nowhere/zerod" in result.stderr


def test_daemon_dies_under_the_ranks(env, tmp_path):
    zerod = fake_zerod(tmp_path)
    process = start(["-n", 2, "--zerod", zerod, "--restarts", 5, "--daemon-restarts", 0,
                     *shell(f"echo $$ > {tmp_path}/pid.$RANK; exec sleep 60")], env)
    pids = pids_in(tmp_path, 2)
    os.kill(saw(tmp_path)["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 137
    assert last_line(subprocess.CompletedProcess([], 137, "", err)) == (
        'zerod was killed by signal 9 (Killed) while ranks were running; its last message: "listening"')
    assert not any(alive(pid) for pid in pids)


def test_daemon_outlives_the_ranks_interrupt(env, tmp_path):
    """After Ctrl-C the ranks get the signal, and the daemon is stopped only after them."""
    zerod = fake_zerod(tmp_path)
    process = start(["-n", 2, "--zerod", zerod, *python(CATCH), tmp_path], env, start_new_session=True)
    pids_in(tmp_path, 2)
    os.killpg(process.pid, signal.SIGINT)
    wait_for("SIGINT", lambda: all(signals_of(tmp_path, r) for r in range(2)))
    assert "stopped" not in saw(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT) == 0
    assert saw(tmp_path)["stopped"]


def test_interrupted_while_the_daemon_starts(env, tmp_path):
    process = start(["--zerod", fake_zerod(tmp_path, delay=30), *shell("echo never")], env)
    assert "started" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 143 and "never" not in out


def test_daemon_dies_with_zerodrun(env, tmp_path):
    process = start(["--zerod", fake_zerod(tmp_path), *python(CATCH), tmp_path], env)
    pids_in(tmp_path, 1)
    process.kill()
    process.wait(TIMEOUT)
    wait_for("daemon is left", lambda: not alive(saw(tmp_path)["pid"]))


def test_running_daemon_is_used(zerod, env):
    """The running daemon's configuration sets the number of ranks. For a run's, which -n may change: test_resize.py."""
    daemon = zerod({"world": {"size": 3}})
    to_it = ["--socket", daemon.socket, "--zerod", "/nowhere/zerod"]
    result = run([*to_it, *python(CONNECT)], env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(f"connected {daemon.socket}\n") == 3
    result = run(["-n", 2, *to_it, *python(CONNECT)], env)
    assert (result.returncode, result.stdout) == (os.EX_UNAVAILABLE, "")
    assert result.stderr == (f"zerodrun: -n 2, but the daemon on {daemon.socket} has world.size 3: there is no state yet "
                             "that 2 ranks could go on with: set world.size, and restart the daemon\n")
    assert daemon.running()


@pytest.mark.full  # 30 s
def test_busy_daemon_is_no_missing_one(env, tmp_path):
    """A daemon with a full queue counts as running: zerodrun waits for it and starts no other one."""
    path = tmp_path / "job.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s, contextlib.ExitStack() as clients:
        s.bind(str(path))
        s.listen(0)
        with pytest.raises(BlockingIOError):
            for _ in range(9):
                client = clients.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
                client.connect(str(path))
        process = start(["--socket", path, "--zerod", "/nowhere/zerod", *shell("echo never")], env)
        wait_for("it does not connect", lambda: "unix_wait_for_peer" in Path(f"/proc/{process.pid}/wchan").read_text()
                 or process.poll() is not None)
        s.shutdown(socket.SHUT_RDWR)
        out, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, out) == (os.EX_UNAVAILABLE, "")
    assert err == f"zerodrun: no daemon on {path}: connect: Connection refused\n"


def test_running_daemon_of_a_further_job(zerod, env, tmp_path):
    """A second job whose daemon has ranks on another node too, unlike the first job's, is refused."""
    nodes = [{"address": f"127.0.0.1:{port}", "ranks": 2} for port in free_ports(2)]
    first = zerod({"world": {"size": 2}})
    second = zerod({"collective": "gloo", "world": {"size": 4, "node": 0, "key_file": str(make_key(tmp_path)),
                                                    "nodes": nodes}})
    result = run(["--jobs", 2, "--config", first.config_path, "--config", second.config_path, *shell("echo never")], env)
    assert (result.returncode, result.stdout) == (os.EX_CONFIG, "")
    assert f"{second.socket} has other ranks than the first job: one program is a rank of all its jobs" in result.stderr


def test_quoted_paths_reach_the_daemon(env, tmp_path):
    with tempfile.TemporaryDirectory(prefix="it's \"odd\" #: ") as odd:
        env["XDG_RUNTIME_DIR"] = odd
        result = run(["--zerod", fake_zerod(tmp_path), *python(CONNECT)], env)
    assert result.returncode == 0, result.stderr
    assert Path(saw(tmp_path)["path"]).is_relative_to(odd)


def test_long_runtime_directory_is_not_used(env, tmp_path):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    env["XDG_RUNTIME_DIR"] = str(deep)
    env.pop("TMPDIR", None)
    result = run(["--zerod", fake_zerod(tmp_path), *python(CONNECT)], env)
    assert result.returncode == 0, result.stderr
    assert len(saw(tmp_path)["path"]) <= 107


# ---- configuration ---------------------------------------------------------------------------------------


def config(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(f"job: test\nlisten:\n  socket: '{tmp_path}/job.sock'\n" + text)
    return path


def test_ranks_as_configured(env, tmp_path):
    path = config(tmp_path, "world: {size: 3}\n")
    result = run(["--config", path, "--zerod", fake_zerod(tmp_path), *python(ENVIRONMENT)], env)
    assert result.returncode == 0, result.stderr
    ranks = environments(result)
    assert sorted(ranks) == [0, 1, 2]
    assert ranks[0]["ZEROD_SOCKET"] == f"{tmp_path}/job.sock"
    result = run(["-n", 2, "--config", path, "--no-daemon", *python(ENVIRONMENT)], env)
    assert result.returncode == os.EX_USAGE
    assert "-n 2" in result.stderr and "3 ranks" in result.stderr


def two_nodes(tmp_path, node, ports=(7700, 7700), ranks=(2, 3)):
    """Return: the configuration of one of two nodes, on this machine's loopback."""
    folder = tmp_path / f"node{node}"
    folder.mkdir()
    key = folder / "job.key"
    key.write_bytes(b"k" * 40)
    key.chmod(0o600)
    nodes = ", ".join(f'{{address: "127.0.0.{i + 1}:{port}", ranks: {n}}}'
                      for i, (port, n) in enumerate(zip(ports, ranks)))
    return config(folder, f"collective: gloo\nworld: {{size: {sum(ranks)}, node: {node}, key_file: '{key}', "
                          f"nodes: [{nodes}]}}\n")


@pytest.mark.parametrize("node, first, n", [(0, 0, 2), (1, 2, 3)])
def test_ranks_of_a_node(env, tmp_path, node, first, n):
    """zerodrun starts this node's ranks, with their numbers in the world. A given -n must be right."""
    path = two_nodes(tmp_path, node)
    to_it = ["--config", path, "--no-daemon"]
    for options in ([], ["-n", n]):
        ranks = environments(run([*options, *to_it, *python(ENVIRONMENT)], env))
        assert sorted(ranks) == list(range(first, first + n))
        for rank, got in ranks.items():
            assert (got["RANK"], got["LOCAL_RANK"], got["GROUP_RANK"]) == (str(rank), str(rank - first), str(node))
            assert (got["WORLD_SIZE"], got["LOCAL_WORLD_SIZE"]) == ("5", str(n))
            assert (got["MASTER_ADDR"], got["MASTER_PORT"]) == ("127.0.0.1", "29500")
            assert got["ZEROD_SOCKET"] == f"{path.parent}/job.sock"
    ranks = environments(run([*to_it, "--master-addr", "head", "--master-port", 1234, *python(ENVIRONMENT)], env))
    assert {(r["MASTER_ADDR"], r["MASTER_PORT"]) for r in ranks.values()} == {("head", "1234")}
    result = run(["-n", 5, *to_it, *python(ENVIRONMENT)], env)
    assert (result.returncode, result.stdout) == (os.EX_USAGE, "")
    assert result.stderr == f"zerodrun: -n 5, but {path} has {n} ranks on this node (world.size 5)\n"


TRAINER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <zerod/client.h>

/* One parameter, three steps; nothing is read after the last: by then another node's daemon may have ended. */
int main(void)
{
    static const uint64_t shape[] = {300};
    static float ones[300];
    struct zerod *c = NULL;
    struct zerod_step_result result = {0};
    int r = zerod_connect(&c, &(struct zerod_options){.rank = atoi(getenv("RANK"))});

    for (int i = 0; i < 300; i++)
        ones[i] = 1;
    if (r == 0)
        r = zerod_declare(c, &(struct zerod_param){.name = "p", .ndim = 1, .shape = shape, .trainable = true}, 1);
    if (r == 0)
        r = zerod_form(c);
    for (int step = 0; r == 0 && step < 3; step++) {
        r = zerod_begin_backward(c, NULL);
        if (r == 0)
            r = zerod_push(c, &(struct zerod_push){.param = 0, .data = ones, .n_bytes = sizeof(ones)});
        if (r == 0)
            r = zerod_end_backward(c, NULL, 0);
        if (r == 0)
            r = zerod_step(c, NULL, &result);
    }
    if (r == 0)
        printf("norm %.3f\n", result.grad_norm);
    else
        fprintf(stderr, "%s\n", zerod_error(c)->text);
    zerod_close(c);
    return r != 0;
}
"""


def test_two_nodes_train(env, tmp_path, build):
    """A zerodrun for each node, each with its own daemon, runs one job."""
    env["ZEROD_ENGINE"] = str(build.path("daemon/zerod-engine-gloo"))
    trainer = build.compile(TRAINER, tmp_path / "trainer")
    ports = free_ports(2)
    paths = [two_nodes(tmp_path, node, ports, (1, 2)) for node in range(2)]
    runs = [start(["--config", path, "--run-id", "both", "--zerod", ZEROD, "--tee", tmp_path / "logs", "--", trainer], env)
            for path in paths]
    for node, process in enumerate(runs):
        out, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, out + err
        assert sorted(out.splitlines()) == [f"[{r}] norm 17.321" for r in ((0,), (1, 2))[node]]
        assert f"zerodrun: starts {node + 1} of 3 ranks, run both, socket {paths[node].parent}/job.sock\n" in err
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "node0.zerod.log", "node1.zerod.log", "rank0.log", "rank1.log", "rank2.log"]


def train_on_two_nodes(env, tmp_path, build, options, envs=({}, {})):
    """Runs TRAINER with a zerodrun for each node. options: a list for each. Return: their outputs as text."""
    env["ZEROD_ENGINE"] = str(build.path("daemon/zerod-engine-gloo"))
    trainer = build.compile(TRAINER, tmp_path / "trainer")
    port = free_ports(1)[0]
    runs = [start(["--zerod", ZEROD, "--nodes-port", port, *more, "--", trainer], {**env, **more_env})
            for more, more_env in zip(options, envs)]
    said = []
    for node, process in enumerate(runs):
        out, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, out + err
        assert out == f"[{node}] norm 17.321\n"
        said.append(err)
    assert not list(tmp_path.glob("zerodrun-*")), "a private directory is left"
    return said


@pytest.mark.parametrize("text", [None, "job: mine\ngradient_clipping: 0",
                                  '\ufeff// of ours\n {"zero_optimization": {"stage": 1}}\n'],
                         ids=["none", "yaml", "json"])
def test_two_nodes_of_the_command_line(env, tmp_path, build, text):
    """--nodes works without a configuration, and with one that lists no nodes."""
    options = ["--nodes", "127.0.0.1,127.0.0.2", "--key-file", make_key(tmp_path), "--run-id", "both"]
    if text:
        (tmp_path / "own.conf").write_text(text)
        options += ["--config", tmp_path / "own.conf"]
    said = train_on_two_nodes(env, tmp_path, build, [[*options, "--node-rank", node] for node in range(2)])
    for node, err in enumerate(said):
        assert "zerodrun: starts 1 of 2 ranks, run both, socket " in err
        assert "2 ranks, stage 1" in err if text and "stage" in text else "2 ranks, stage 2" in err


def slurm(node, hosts="127.0.0.1,127.0.0.2", n_tasks=2):
    """Return: the variables of a step that srun has started on two nodes."""
    return {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "head,node[1-9]", "SLURM_NNODES": "2", "SLURM_NTASKS": str(n_tasks),
            "SLURM_NODEID": str(node), "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": hosts, "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_NUM_TASKS": str(n_tasks)}  # fmt: skip


SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames 127.0.0.[1-2]" ] || exit 1
printf '127.0.0.1\\n127.0.0.2\\n'
"""


@pytest.mark.parametrize("hosts", ["127.0.0.1,127.0.0.2", "127.0.0.[1-2]"])
def test_two_nodes_of_slurm(env, tmp_path, build, hosts):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    env["PATH"] = f"{scontrol.parent}:{env['PATH']}"
    said = train_on_two_nodes(env, tmp_path, build, [["--key-file", make_key(tmp_path)]] * 2,
                              [slurm(node, hosts) for node in range(2)])
    assert all("zerodrun: starts 1 of 2 ranks, run slurm-77.3, socket " in err for err in said)


def test_when_slurm_counts(env, tmp_path):
    """
    Slurm's variables are used only if srun has started one task on each node and the configuration lists no nodes.
    """
    def worlds(slurm_env, *options):
        return {(r["RANK"], r["WORLD_SIZE"], r["GROUP_RANK"], r["MASTER_ADDR"])
                for r in environments(run(["--no-daemon", *options, *python(ENVIRONMENT)], {**env, **slurm_env})).values()}

    alone = {("0", "1", "0", "127.0.0.1")}
    assert worlds(slurm(1, "a,b"), "-n", 2) == {("2", "4", "1", "a"), ("3", "4", "1", "a")}
    assert worlds(slurm(1, "a,b"), "--master-addr", "head") == {("1", "2", "1", "head")}
    assert worlds(slurm(1, "a,b"), "--nodes", "b,a") == {("1", "2", "1", "b")}
    assert worlds(slurm(1, "a,b"), "--nnodes", 1) == alone
    assert worlds(slurm(1, "a,b", n_tasks=4)) == alone
    batch = {name: value for name, value in slurm(0).items() if "STEP" not in name}
    assert worlds(batch) == alone
    listed = two_nodes(tmp_path, 0, ranks=(1, 1))
    assert worlds(slurm(1, "a,b"), "--config", listed) == {("0", "2", "0", "127.0.0.1")}
    assert worlds({}, "--nnodes", 3, "--node-rank", 2, "--master-addr", "head") == {("2", "3", "2", "head")}


@pytest.mark.parametrize("options, slurm_env, said", [
    (["--nnodes", 2, "--master-addr", "a"], {}, "--nnodes 2: --nodes HOST0,HOST1,... is missing"),
    (["--nnodes", 2, "--no-daemon", "--node-rank", 0], {}, "--nnodes 2: --master-addr is missing"),
    (["--nnodes", 3, "--nodes", "a,b"], {}, "--nnodes 3, but --nodes has 2 hosts"),
    (["--nodes", "a,,b"], {}, "nodes 'a,,b': expected 1 to 64 hosts"),
    (["--nodes", ",".join(map(str, range(65)))], {}, "expected 1 to 64 hosts"),
    (["--nodes", "a,b"], {}, "2 nodes: --node-rank is missing"),
    (["--nodes", "a,b", "--node-rank", 2], {}, "--node-rank 2, but the nodes are numbered from 0 to 1"),
    (["--node-rank", 2], {}, "--nodes HOST0,HOST1,... is missing"),
    (["--nodes", "a,b", "--node-rank", 1], {}, "2 nodes: --key-file is missing"),
    (["--nodes", "a,b", "--node-rank", 1, "--key-file", "/nowhere/key"], {}, "--key-file /nowhere/key: No such file"),
    (["--nodes", "a,b", "--node-rank", 1, "--key-file", __file__], {}, "2 nodes: --run-id is missing"),
    (["--key-file", __file__], {}, "--key-file and --nodes-port are for several nodes"),
    ([], slurm(1), "2 nodes, as Slurm says: --key-file is missing"),
    ([], slurm(1, "a,b,c"), "Slurm says that this is node 1 of 2, and its list of nodes is a,b,c"),
    ([], slurm(1, "no-such-host[1-2]"), '"scontrol show hostnames no-such-host[1-2]" fails here'),
    (["--config", "size"], slurm(1), "2 nodes, as Slurm says, but TMP/size has world.size: expected a file without the section world"),
    (["--config", "nodes", "--nodes", "a,b", "--node-rank", 1], {}, "TMP/nodes lists nodes (world.nodes), so --nodes"),
    (["--config", "wrong", "--nodes", "a,b", "--node-rank", 1], {}, "TMP/wrong:1:1: gradient_cliping"),
])
def test_nodes_that_cannot_be(env, tmp_path, options, slurm_env, said):
    (tmp_path / "size").write_text("world: {size: 2}\n")
    (tmp_path / "wrong").write_text("gradient_cliping: 1\n")
    (tmp_path / "nodes").write_bytes(two_nodes(tmp_path, 0).read_bytes())
    if options[:1] == ["--config"]:
        options = ["--config", tmp_path / options[1], *options[2:]]
    result = run([*options, *shell("echo never")], {**env, **slurm_env})
    assert result.returncode in (os.EX_USAGE, os.EX_CONFIG, os.EX_NOINPUT) and not result.stdout
    assert said.replace("TMP", str(tmp_path)) in result.stderr
    assert not list(tmp_path.glob("zerodrun-*")), "the private directory is left"


def test_kubernetes_manifest(env):
    """The parts of config/kubernetes.yaml fit each other, and zerodrun accepts its arguments."""
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((ROOT / "config" / "kubernetes.yaml").read_text())
    assert (service["apiVersion"], service["kind"], job["apiVersion"], job["kind"]) == ("v1", "Service", "batch/v1", "Job")
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": name} and service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"] and pod["restartPolicy"] == "Never"
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 2
    container, volume = pod["containers"][0], pod["volumes"][0]
    mount = container["volumeMounts"][0]
    assert container["command"] == ["zerodrun"] and mount["name"] == volume["name"]
    assert volume["secret"]["defaultMode"] == 0o400
    args = container["args"]
    assert f"--key-file={mount['mountPath']}/pretrain.key" in args
    hosts = [f"{name}-{i}.{pod['subdomain']}.default.svc.cluster.local" for i in range(spec["completions"])]
    assert f"--nodes={','.join(hosts)}" in args
    for index in range(spec["completions"]):
        options = [arg.replace("$(JOB_COMPLETION_INDEX)", str(index)) for arg in args[:args.index("--")]]
        ranks = environments(run([*options, "--no-daemon", *python(ENVIRONMENT)], env))
        assert sorted(ranks) == [4 * index + i for i in range(4)]
        assert {(r["WORLD_SIZE"], r["MASTER_ADDR"]) for r in ranks.values()} == {("8", hosts[0])}


def test_running_daemon_of_another_node(zerod, env, tmp_path):
    daemon = zerod({"world": {"size": 1}})
    result = run(["--socket", daemon.socket, "--nodes", "a,b", "--node-rank", 1, *shell("echo never")], env)
    assert (result.returncode, result.stdout) == (os.EX_CONFIG, "")
    assert result.stderr == (f"zerodrun: the daemon on {daemon.socket} is that of node 0 of 1, but this is node 1 of 2\n")


def test_running_daemon_of_several_nodes_is_used(zerod, env, tmp_path):
    """The running daemon of a node reports which ranks are this node's, and where rank 0 is."""
    nodes = Nodes(zerod, tmp_path, (1, 2))
    to_it = ["--socket", nodes.daemons[1].socket, "--zerod", "/nowhere/zerod"]
    ranks = environments(run([*to_it, *python(ENVIRONMENT)], env))
    assert {r: (got["LOCAL_RANK"], got["WORLD_SIZE"], got["GROUP_RANK"]) for r, got in ranks.items()} == \
        {1: ("0", "3", "1"), 2: ("1", "3", "1")}
    assert {(r["MASTER_ADDR"], r["MASTER_PORT"]) for r in ranks.values()} == {("127.0.0.1", "29500")}
    result = run(["-n", 3, *to_it, *python(ENVIRONMENT)], env)
    assert (result.returncode, result.stdout) == (os.EX_USAGE, "")
    assert result.stderr == (f"zerodrun: -n 3, but the daemon on {nodes.daemons[1].socket} has 2 ranks on this node "
                             "(world.size 3)\n")


def test_bad_configuration(env, tmp_path):
    result = run(["--config", config(tmp_path, "world: {size: 0}\n"), *shell("echo never")], env)
    assert result.returncode == os.EX_CONFIG
    assert "E1601" in result.stderr and "world.size" in result.stderr
    result = run(["--config", tmp_path / "missing.yaml", *shell("echo never")], env)
    assert result.returncode == os.EX_CONFIG and "never" not in result.stdout


def test_socket_that_the_configuration_contradicts(env, tmp_path):
    path = config(tmp_path, "world: {size: 1}\n")
    result = run(["--config", path, "--socket", "/tmp/other.sock", *shell("echo never")], env)
    assert result.returncode == os.EX_USAGE
    assert "/tmp/other.sock" in result.stderr and f"{tmp_path}/job.sock" in result.stderr


DEEPSPEED = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0, "bf16": {"enabled": "auto"}, "wall_clock_breakdown": False, "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "allgather_partitions": True,
        "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": "auto", "contiguous_gradients": True}}  # fmt: skip


def test_deepspeed_file(env, tmp_path):
    """A DeepSpeed file works unchanged, with zerodrun's socket and ranks. It causes no message."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(DEEPSPEED))
    result = run(["-n", 3, "--config", path, "--jobs", 2, "--zerod", ZEROD, *python(CONNECT)], env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("connected ") == 3 and "config" not in result.stderr
    assert result.stderr.count("3 ranks, stage 2") == 2
    assert path.exists() and not list(tmp_path.glob("zerodrun-*"))
    result = run(["--config", path, "--socket", tmp_path / "own.sock", "--zerod", ZEROD, *python(SOCKETS)], env)
    assert result.returncode == 0, result.stderr
    assert f"connected ZEROD_SOCKET {tmp_path}/own.sock" in result.stdout
    # No client could know a private socket.
    result = run(["--serve", "--config", path], env)
    assert result.returncode == os.EX_CONFIG and "listen.socket: is missing" in result.stderr


def test_notes_of_a_deepspeed_file(env, tmp_path):
    """The daemon prints notes about a DeepSpeed file, zerodrun does not. zerodrun itself refuses a wrong file."""
    path = tmp_path / "ds_config.json"
    schedule = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    more = {"gradient_clipping": "auto", "scheduler": {"type": "WarmupLR", "params": schedule}}
    path.write_text(json.dumps(DEEPSPEED | more))
    result = run(["-n", 1, "--config", path, "--zerod", ZEROD, *python(CONNECT)], env)
    assert result.returncode == 0, result.stderr
    for key in ("gradient_clipping", *(f"scheduler.params.{name}" for name in schedule)):
        said = [line for line in result.stderr.splitlines() if f": {key}: " in line]
        assert len(said) == 1, result.stderr
        assert said[0].startswith("[zerod] note config: ")
        assert 'nothing fills in "auto" here; the program\'s value counts if it sets one, else the default' in said[0]
    path.write_text(json.dumps(DEEPSPEED | more | {"threads": 0}))
    result = run(["-n", 1, "--config", path, "--zerod", ZEROD, *python(CONNECT)], env)
    assert result.returncode == os.EX_CONFIG and "[zerod]" not in result.stderr
    assert result.stderr.count(": threads: ") == 1


def test_accelerate_file(env, tmp_path):
    """The file's number of ranks is used unless -n gives another one."""
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: DEEPSPEED\nnum_processes: 3\ndeepspeed_config: {zero_stage: 1}\n")
    result = run(["--config", path, "--zerod", ZEROD, *python(CONNECT)], env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("connected ") == 3 and "3 ranks, stage 1" in result.stderr
    result = run(["-n", 2, "--config", path, "--zerod", ZEROD, *python(CONNECT)], env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("connected ") == 2 and "num_processes: the command line says 2, which counts" in result.stderr


def test_ranks_of_zerod_itself(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(DEEPSPEED))

    def check(*more):
        return subprocess.run([ZEROD, "--config", path, "--print-config", *more], capture_output=True, text=True,
                              timeout=TIMEOUT)  # fmt: skip

    assert re.search(r"size: 3 +# command line", check("--socket", "/tmp/a.sock", "--ranks", "3").stdout)
    assert "world.size: is missing" in check("--socket", "/tmp/a.sock").stderr
    for wrong in "0", "x", "1025":
        result = check("--ranks", wrong)
        assert result.returncode == os.EX_USAGE
        assert result.stderr == f"zerod: --ranks: '{wrong}' is not a whole number from 1 to 1024\n"
    path = config(tmp_path, "world: {size: 2}\n")
    result = check("--ranks", "3")
    assert result.returncode == os.EX_USAGE and "--ranks 3, but" in result.stderr and "world.size 2" in result.stderr


def test_nobody_attached(env):
    """A program that does not use zerod trains without it. Only then zerodrun reports that no rank has attached."""
    said = "no rank has attached to the daemon, so this run did not use zerod"
    result = run(["-n", 2, "--zerod", ZEROD, *shell("exit 0")], env)
    assert result.returncode == 0 and said in result.stderr
    result = run(["-n", 2, "--zerod", ZEROD, *shell("exit 3")], env)
    assert result.returncode == 3 and said not in result.stderr
    trainer = BUILD / "tests/example/zerod-example"
    result = run(["-n", 2, "--zerod", ZEROD, "--", trainer, "--layers", 1, "--width", 16, "--heads", 1, "--batch", 1, "--steps", 2], env)
    assert result.returncode == 0 and said not in result.stderr, result.stderr


def test_real_daemon(env, tmp_path):
    """zerod accepts the generated configuration, and ends cleanly."""
    result = run(["-n", 2, "--zerod", ZEROD, *python(CONNECT)], env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("connected ") == 2
    assert "zerod (pid" not in result.stderr.replace(f"started {ZEROD} (pid", ""), result.stderr
    assert not list(tmp_path.glob("zerodrun-*"))


def test_folders_of_a_killed_run_are_removed(env, tmp_path):
    """The next run removes the folders of a killed run, but not those of a running one or of others."""
    mine = tmp_path / "zerodrun-mine00"
    mine.mkdir(0o700)
    (mine / "results").touch()
    runs = [start(["--zerod", ZEROD, *shell("echo here; exec sleep 1000")], env) for _ in range(2)]
    for process in runs:
        assert process.stdout.readline()
    before = {folder.name for folder in tmp_path.glob("zerodrun-*")}
    runs[0].kill()
    runs[0].wait()
    wait_for("the daemon does not end", lambda: len(list(tmp_path.glob("zerodrun-*/zerod.sock"))) == 1)
    assert run(["--zerod", ZEROD, *shell("exit 0")], env).returncode == 0
    after = {folder.name for folder in tmp_path.glob("zerodrun-*")}
    assert after < before and len(after) == 3 and len(before) == 5 and (mine / "results").exists()
    assert list(tmp_path.glob("zerodrun-*/zerod.sock"))
    runs[1].send_signal(signal.SIGQUIT)
    runs[1].communicate(timeout=TIMEOUT)
    assert runs[1].returncode == 128 + signal.SIGQUIT
    assert [folder.name for folder in tmp_path.glob("zerodrun-*")] == [mine.name]


def test_folder_that_another_run_removes(env, tmp_path):
    """Another run takes this run's new folder for a killed run's and removes it. This run makes a new one."""
    calls = tmp_path / "calls"
    slow = ["strace", "-qq", "-o", calls, "-e", "trace=flock,mkdir", "-e", "inject=flock:delay_enter=500ms:when=1"]
    process = start(["--zerod", ZEROD, *shell("exit 0")], env | {"ASAN_OPTIONS": "detect_leaks=0"}, under=slow)
    wait_for("no folder is made", lambda: list(tmp_path.glob("zerodrun-*")))
    [folder] = tmp_path.glob("zerodrun-*")
    folder.rmdir()
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, errors
    made = re.findall(r'mkdir\("(.*)/zerodrun-', calls.read_text())
    assert len(made) == 3 and set(made) == {str(tmp_path)}, "the keeper's folder, once more, and the socket's"


def test_files_are_not_everybodys(env, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text(f"checkpoint: {{dir: {tmp_path}/made, save_on_stop: true}}\n")
    trainer = [BUILD / "tests/example/zerod-example", "--layers", 1, "--width", 16, "--heads", 1, "--batch", 1, "--steps", 2]
    old = os.umask(0)
    try:
        result = run(["--config", config, "--zerod", ZEROD, "--tee", tmp_path / "made" / "logs", "--", *trainer], env)
    finally:
        os.umask(old)
    assert result.returncode == 0, result.stderr
    made = [tmp_path / "made", *(tmp_path / "made").rglob("*")]
    assert len(made) > 6 and [path for path in made if path.stat().st_mode & stat.S_IWOTH] == []


# ---- jobs ------------------------------------------------------------------------------------------------


SOCKETS = """
import os, socket
for name in sorted(name for name in os.environ if name.startswith("ZEROD_SOCKET")):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(os.environ[name])
    print("connected", name, os.environ[name])
"""


def connections(result):
    return {int(rank): dict(re.findall(rf"^\[{rank}\] connected (\S+) (\S+)$", result.stdout, flags=re.M)) for rank in "01"}


def test_jobs_have_a_daemon_each(env, tmp_path):
    """The jobs' daemons use generated configurations, listen on different sockets, and end with the ranks."""
    result = run(["-n", 2, "--jobs", 3, "--zerod", ZEROD, *python(SOCKETS)], env)
    assert result.returncode == 0, result.stderr
    got = connections(result)
    first = got[0]["ZEROD_SOCKET"]
    assert got[0] == got[1] == {"ZEROD_SOCKET": first, "ZEROD_SOCKET_1": first + ".1", "ZEROD_SOCKET_2": first + ".2"}
    assert result.stderr.count("stopping: SIGINT") == 3
    assert not list(tmp_path.glob("zerodrun-*")), "the private directory is left"


def test_jobs_with_configurations(env, tmp_path):
    """A job uses its own configuration, or else the first job's with another socket."""
    paths = []
    for name, more in ("a", "optimizer: {type: SGD}\n"), ("b", ""):
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(f"listen: {{socket: {tmp_path}/{name}.sock}}\nworld: {{size: 2}}\n{more}")
    result = run(["--jobs", 3, "--config", paths[0], "--config", paths[1], "--zerod", ZEROD, *python(SOCKETS)], env)
    assert result.returncode == 0, result.stderr
    assert connections(result)[1] == {"ZEROD_SOCKET": f"{tmp_path}/a.sock", "ZEROD_SOCKET_1": f"{tmp_path}/b.sock",
                                      "ZEROD_SOCKET_2": f"{tmp_path}/a.sock.2"}
    assert not list(tmp_path.glob("*.sock*"))


@pytest.mark.parametrize("second, said", [
    ("listen: {socket: TMP/a.sock}\nworld: {size: 2}\n", "has the socket of the first job"),
    ("listen: {socket: TMP/b.sock}\nworld: {size: 3}\n", "has other ranks than the first job"),
    ("world: {size: 0}\n", "E1601"),
], ids=["socket", "ranks", "wrong"])
def test_jobs_that_do_not_fit(env, tmp_path, second, said):
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    a.write_text(f"listen: {{socket: {tmp_path}/a.sock}}\nworld: {{size: 2}}\n")
    b.write_text(second.replace("TMP", str(tmp_path)))
    result = run(["--jobs", 2, "--config", a, "--config", b, *shell("echo never")], env)
    assert result.returncode == os.EX_CONFIG and said in result.stderr and not result.stdout


def test_daemon_of_a_job_dies_under_the_ranks(env, tmp_path):
    """If the daemon of one job dies, all daemons and ranks end."""
    kill = """
import os, signal, socket, struct, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(os.environ["ZEROD_SOCKET_1"])
pid = struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
os.kill(pid, signal.SIGKILL)
time.sleep(60)
"""
    result = run(["-n", 1, "--jobs", 2, "--zerod", ZEROD, "--daemon-restarts", 0, *python(kill)], env)
    assert result.returncode == 128 + signal.SIGKILL
    assert re.search(r"zerod\.1 \(pid \d+\) was killed by signal 9 \(Killed\) while ranks were running", result.stderr)
    assert result.stderr.count("stopping: SIGINT") == 1 and not list(tmp_path.glob("zerodrun-*"))


@pytest.mark.parametrize("path", ["relative.sock", "/" + "x" * 107])
def test_socket_of_zerod_itself(env, tmp_path, path):
    result = subprocess.run([ZEROD, "--config", config(tmp_path, "world: {size: 1}\n"), "--socket", path], env=env,
                            capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == os.EX_USAGE
    assert result.stderr == f"zerod: --socket {path}: expected an absolute path of at most 107 bytes\n"
