# SPDX-License-Identifier: Apache-2.0
"""
zerodctl top in a real terminal (tmux): its output at each size, keys, daemons that end and start, and its own end.
"""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from conftest import Daemon, wait_for
from test_zerodctl import daemon, example, parts, path, zerodctl  # noqa: F401
from tmux import Tmux

SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--batch", "2", "--steps", "1000000"]
FOOTER = "q quit"
TROUBLE = "\x1b[31mred\x1b]0;title\x07 \x9b2J é \u202e€"  # a job name with control sequences, which must not act
INSTEAD = "zerodctl status --watch"


@pytest.fixture
def start(zerod, build):
    """start(n_ranks) -> a job that trains."""

    def begin(n_ranks=3, *args, **config):
        job = zerod({"world": {"size": n_ranks}, "limits": {"memory": "1GiB"}, **config})
        trainer = build.path("tests/example/zerod-example")
        job.ranks = [job.spawn(trainer, *SMALL, *args, rank=rank) for rank in range(n_ranks)]
        wait_for("the job does not train", lambda: job.status()["step"] >= 5)
        return job

    return begin


@pytest.fixture
def top(build, tmp_path):
    """top(socket, width, height, env) -> a terminal in which zerodctl top runs."""

    def run(socket, width=80, height=24, env=None):
        terminal = Tmux(tmp_path, width, height, env)
        terminal.program = f"{build.path('client/ctl/zerodctl')} --socket {socket} top; echo status $?"
        terminal.type(terminal.program)
        return terminal

    return run


def answers(status=None, ranks=None):
    """Return: answers for a small test daemon: the examples with these changes."""
    given = {"status": json.loads(example("status")) | (status or {}),
             "ranks": ranks if ranks is not None else json.loads(example("ranks")),
             "diagnostics": json.loads(example("diagnostics"))}
    return lambda command: parts(json.dumps(given[command]))


def step_of(text):
    return int(re.search(r"^step +(\d+) ", text, re.MULTILINE)[1])


# ---- what it shows -----------------------------------------------------------------------------------------------


def test_a_running_job_at_80_x_24(start, top):
    job = start(3, "--provoke-duplicate", "2:blocks.0.norm1.bias:1")
    terminal = top(job.socket)
    text = terminal.wait_for(FOOTER)
    lines = text.splitlines()
    assert re.match("test: (training|updating), stage 1, 3 of 3 ranks attached, up ", lines[0])
    for line in (r"step +\d+   [\d.]+ steps/s, last .*\d+ applied, 0 skipped, 0 aborted",
                 r"time +compute .* %\), wait .* %\), update .* %\)", r" +reduce .* %\)", r"slowest  rank \d, .* behind the first",
                 r"values   grad norm [\d.]+   loss scale 1   lr 0.001", r"memory   \[ *\] \d % of at most 1.00 GiB; held ",
                 r"last     E1001 duplicate gradient refused: rank 1, step 2, micro-batch 0 \(",
                 r"RANK STATE +STEP +BEHIND SILENT WAITS +FOR / FAULT", *(rf"{rank} +[a-z]+ +\d+ " for rank in range(3))):
        assert any(re.match(line, shown) for shown in lines), (line, text)
    assert "state" in text and "gradient" in text and "ring" in text
    before = step_of(text)
    terminal.wait_for(lambda shown: step_of(shown) > before)
    assert all(len(line) <= 80 for line in lines) and lines[23].startswith(" q quit")


def test_updates_before_the_decision(start, top):
    """The running job shows their share, and why a job has none."""
    zero = {"stage": 2, "speculative_update": True}
    job = start(1, zero_optimization=zero)
    shown = re.compile(r"^early    (\d+) % of the update, (\d+) chunks accepted, \d+ dropped(;|$)", re.MULTILINE)
    top(job.socket).wait_for(lambda text: (found := shown.search(text)) and int(found[1]) > 0 and int(found[2]) > 0)
    other = start(1, zero_optimization=zero | {"speculative_update": False})
    top(other.socket).wait_for("early    no update; zero_optimization.speculative_update is false")


def test_all_that_status_has(path, top):  # noqa: F811
    """At 80 columns nothing is cut: checkpoint, GPUs, missing gradients, a limit, a fault and an absent rank."""
    more = {"n_missing_steps": 3, "n_missing_params": 2, "replaced_ns": 5 * 10**9, "away_ns": 10**9, "n_daemons": 2}
    with daemon(path, answers(more)):
        text = top(path).wait_for(FOOTER)
    flat = re.sub(r"\s+", " ", text)
    for part in ("pretrain: training, stage 2, 3 of 4 ranks attached",
                 "replaced daemon 2 took the run over 5.00 s ago, after nobody had served it for 1.00 s",
                 "42 3.5 steps/s, last 300 ms 41 applied, 1 skipped, 1 aborted",
                 "missing gradients in 3 steps; in the last one 2 parameters had none",
                 "compute 300 ms (100 %), wait 10 ns (0 %), update 30 ns (0 %)", "75 % of the bytes before the backward ended",
                 "early 75 % of the update, 12 chunks accepted, 5 dropped; memory is short: 2 of 3 buckets have spare places",
                 "rank 3, 1.50 ms behind the first", "grad norm 0.1 loss scale 65536 lr 0.001",
                 "saved step 20 1 min 0 s ago, 4.00 MiB in 3.00 s; saving step 42, 25 %",
                 "the last one failed: model.safetensors: No space left on device", "of at most 64.0 GiB"):
        assert part in flat, (part, text)
    ranks = [line.split()[0] for line in text.splitlines() if re.match(r"\d +[a-z]+ ", line)]
    assert ranks[:2] == ["1", "3"], text  # refused, and absent


def test_nodes(path, top):  # noqa: F811
    with daemon(path, answers(json.loads(example("status-nodes")))):
        text = top(path, 100, 40).wait_for(FOOTER)
    flat = re.sub(r"\s+", " ", text)
    nodes = json.loads(example("status-nodes"))["nodes"]
    assert f"nodes {len(nodes['list'])}, engines " in flat
    for node in nodes["list"]:
        assert f"node {node['node']} at {node['address']}" in flat
    assert "this one" in flat and nodes["list"][1]["why"] in flat


def test_a_lost_node_of_many(path, top):  # noqa: F811
    """At 80 x 24 not all nodes fit. The lost node is shown, and so are the ranks."""
    nodes = json.loads(example("status-nodes"))["nodes"]
    there = nodes["list"][0] | {"reached": True}
    nodes["list"] = [there | {"node": i, "address": f"10.0.0.{i}:7700"} for i in range(32)]
    nodes["list"][29] |= {"reached": False, "silent_ns": 3 * 10**9, "why": "the connection was lost"}
    with daemon(path, answers({"nodes": nodes})):
        text = top(path).wait_for(FOOTER)
    assert "node 29 at 10.0.0.29:7700" in text and "the connection was lost" in re.sub(r"\s+", " ", text)
    assert re.search(r"FOR / FAULT\n1 +backward", text)


def test_findings(path, top):  # noqa: F811
    findings = [{"kind": "slow", "rank": 3, "param": None, "text": "rank 3 is 40 % slower than the others"},
                {"kind": "norm", "rank": None, "param": "w", "text": "the gradient of w is 10 times the others'"}]
    with daemon(path, answers({"findings": findings})):
        text = top(path).wait_for(FOOTER)
    assert "found    rank 3 is 40 % slower than the others\n         the gradient of w is 10 times the others'\n" in text


def test_200_x_60_has_more(path, top):  # noqa: F811
    ranks = [json.loads(example("ranks"))[0] | {"rank": n} for n in range(64)]
    with daemon(path, answers(ranks=ranks)):
        text = top(path, 200, 60).wait_for(FOOTER)
    head = next(line for line in text.splitlines() if line.startswith("RANK"))
    assert head.split()[:6] == ["RANK", "STATE", "PID", "STEP", "MICRO-BATCH", "PUSHES"]
    assert sum(bool(re.match(r"\d+ +backward ", line)) for line in text.splitlines()) > 35
    assert re.search(r"memory .*: gradient .*, overflow .*, staging .*, weights .*, pool .*, fixed ", text, re.DOTALL)
    assert "E1005" in text and "E1001" in text  # older diagnostics


def test_ranks_scroll(path, top):  # noqa: F811
    ranks = [json.loads(example("ranks"))[0] | {"rank": n} for n in range(64)]

    def first(text):
        return int(re.search(r"^(\d+) +backward", text, re.MULTILINE)[1])

    with daemon(path, answers(ranks=ranks)):
        terminal = top(path)
        page = int(re.search(r"rows 1 to (\d+) of 64", terminal.wait_for("of 64"))[1])
        assert page >= 4
        for keys, row in ((["Down", "Down"], 2), (["Up"], 1), (["NPage"], 1 + page), (["PPage"], 1), (["End"], 64 - page),
                          (["Down"], 64 - page), (["Home"], 0), (["Up"], 0)):
            terminal.press(*keys)
            terminal.wait_for(lambda text: first(text) == row)
        terminal.press("End")
        terminal.resize(80, 60)
        terminal.wait_for(lambda text: "\n63 " in text and len(text.splitlines()) == 60 and first(text) < 64 - page)


def test_a_diagnostic_and_help(path, top):  # noqa: F811
    with daemon(path, answers()):
        terminal = top(path)
        terminal.wait_for(FOOTER)
        terminal.press("d")
        newest = terminal.wait_for("2 of 2")
        last = json.loads(example("diagnostics"))[-1]
        assert last["text"].splitlines()[0] in newest and all(line.split()[-1] in newest for line in last["text"].splitlines())
        terminal.press("Left")
        assert json.loads(example("diagnostics"))[0]["text"].splitlines()[0] in terminal.wait_for("1 of 2")
        terminal.press("Right")
        terminal.wait_for("2 of 2")
        terminal.press("?")
        terminal.wait_for("PgUp, PgDn")
        terminal.press("Escape")
        terminal.wait_for("RANK STATE")
        terminal.press("q")
        terminal.wait_for("status 0")


# ---- texts with control sequences --------------------------------------------------------------------------------


@pytest.mark.parametrize("locale", ["C.UTF-8", "C", "no_SUCH.UTF-8"])
def test_escapes_arrive_escaped(path, top, locale):  # noqa: F811
    hostile = json.loads(example("ranks"))
    hostile[2] |= {"waiting_for": TROUBLE, "state": TROUBLE}
    with daemon(path, answers({"job": TROUBLE, "findings": [{"text": TROUBLE}]}, hostile)):
        terminal = top(path, 120, 40, {"LC_ALL": locale})
        text = terminal.wait_for(FOOTER)
        shown = r"\x1b[31mred\x1b]0;title\x07 \xc2\x9b2J é \xe2\x80\xae€"
        if locale == "C":
            shown = shown.replace("é", r"\xc3\xa9").replace("€", r"\xe2\x82\xac")
        assert text.startswith(shown + ": training") and f"found    {shown}" in text
        assert terminal.ask("pane_title") != "title" and terminal.ask("alternate_on") == "1"


PUSHES_TWICE = r"""
#include <unistd.h>
#include "zerod/client.h"

/* A parameter whose name wants to be obeyed, pushed twice. */
int main(void)
{
    struct zerod_param param = {.name = "a\33[2Jb\377", .trainable = true};
    struct zerod_step_result result;
    struct zerod *c;
    float grad = 1;

    if (zerod_connect(&c, &(struct zerod_options){.rank = -1, .client = "c\33[2J"}) || zerod_declare(c, &param, 1) || zerod_form(c))
        return 1;
    if (zerod_begin_backward(c, NULL) || zerod_push(c, &(struct zerod_push){.param = 0, .data = &grad}) ||
        zerod_push(c, &(struct zerod_push){.param = 0, .data = &grad}) || zerod_step(c, NULL, &result) != ZEROD_REFUSED)
        return 2;
    pause();
}
"""


def test_a_parameter_whose_name_has_escapes(zerod, top, build, tmp_path):
    """A real daemon's JSON already contains the escapes of a parameter's name in printable form."""
    job = zerod({"world": {"size": 1}})
    rank = job.spawn(build.compile(PUSHES_TWICE, tmp_path / "pushes-twice"), rank=0)
    terminal = top(job.socket)
    terminal.wait_for("E1001 duplicate gradient refused")
    terminal.press("d")
    assert r"a\x1b[2Jb\xff" in terminal.wait_for("refusal 1 of 1"), rank.err()


# ---- events while top runs ---------------------------------------------------------------------------------------


def test_a_rank_is_killed(start, top):
    job = start(3)
    terminal = top(job.socket)
    terminal.wait_for("3 of 3 ranks attached")
    job.ranks[1].kill()
    text = terminal.wait_for("2 of 3 ranks attached")
    terminal.wait_for(lambda text: re.search(r"FOR / FAULT\n1 +lost ", text))
    assert FOOTER in text


def test_resized(start, top):
    job = start(3)
    terminal = top(job.socket, 80, 24)
    terminal.wait_for(FOOTER)
    for width, height in ((200, 60), (60, 20), (20, 5), (1, 1), (80, 24)):
        terminal.resize(width, height)
        if width >= 20:
            terminal.wait_for(lambda text: len(text.splitlines()) == height and text.splitlines()[-1].startswith(" q quit"), 5)
    assert "PID" not in terminal.wait_for("BEHIND")
    before = step_of(terminal.text())
    terminal.wait_for(lambda text: step_of(text) > before)


def test_the_daemon_is_replaced(start, top, build, tmp_path):
    """When the daemon ends, top reports it and keeps the last answers. It continues with another daemon."""
    job = start(2)
    terminal = top(job.socket)
    terminal.wait_for("2 of 2 ranks attached")
    for rank in job.ranks:
        rank.kill()
    job.stop()
    text = terminal.wait_for("Asking again")
    assert "no daemon on " in text and re.match("test: (training|updating), .* 2 of 2 ranks attached", text)
    other = Daemon(build, job.folder, {"world": {"size": 5}})
    try:
        terminal.wait_for(lambda shown: "0 of 5 ranks attached" in shown and "Asking" not in shown)
    finally:
        other.stop()


def test_a_daemon_that_is_stopped(start, top):
    """While the daemon does not answer, keys work, q ends top at once, and top shows that there is no answer."""
    job = start(1)
    terminal = top(job.socket)
    terminal.wait_for(FOOTER)
    os.kill(job.pid, signal.SIGSTOP)
    try:
        time.sleep(1)
        terminal.press("?")
        terminal.wait_for("PgUp, PgDn", 3)
        terminal.press("?")
        assert "not answered in time" in re.sub(r"\s+", " ", terminal.wait_for("Asking again", 15))
        terminal.press("q")
        terminal.wait_for("status 0", 3)
    finally:
        os.kill(job.pid, signal.SIGCONT)


def test_a_daemon_that_answers_nonsense(path, top):  # noqa: F811
    """Values of other types than the schema's, and answers that are no objects, are shown as missing."""
    status = {"status": {"job": 7, "memory": [], "nodes": {"list": 3}, "time": "x", "groups": [None], "step": {}, "findings": [1]},
              "ranks": [1, None, {"rank": "x", "fault": 3}], "diagnostics": []}
    with daemon(path, lambda command: parts(json.dumps(status[command]))):
        assert top(path).wait_for(FOOTER).startswith("7: -, stage -")


# ---- the terminal before and after -------------------------------------------------------------------------------


def state_of(terminal):
    """Return: state that a program may leave: terminal modes, the alternate screen, no cursor, other keys."""
    return [terminal.ask(v) for v in ("alternate_on", "cursor_flag", "keypad_flag", "keypad_cursor_flag", "insert_flag",
                                      "mouse_any_flag", "wrap_flag")]


@pytest.mark.parametrize("how", ["q", "C-c", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "gone"])
def test_the_terminal_is_as_before(path, tmp_path, build, how):  # noqa: F811
    terminal = Tmux(tmp_path, 80, 24)
    terminal.type("stty -a >before; echo before")
    terminal.wait_for(lambda text: text.count("before") == 3)
    state = state_of(terminal)
    with daemon(path, answers()):
        terminal.type(f"{build.path('client/ctl/zerodctl')} --socket {path} top")
        terminal.wait_for(FOOTER)
        assert state_of(terminal) != state
        shell = terminal.ask("pane_pid")
        pid = int(Path(f"/proc/{shell}/task/{shell}/children").read_text())
        if how.startswith("SIG"):
            os.kill(pid, getattr(signal, how))
        elif how != "gone":
            terminal.press(how)
        if how == "gone":
            terminal.tmux("kill-server")
            wait_for("it has not ended", lambda: not os.path.exists(f"/proc/{pid}"), 10)
            return
        terminal.wait_for(lambda text: FOOTER not in text)
        terminal.type("echo status $?")
        number = {"q": 0, "C-c": 130, "SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129, "SIGQUIT": 131}[how]
        terminal.wait_for(f"status {number}")
    terminal.type("stty -a >after; echo after")
    terminal.wait_for(lambda text: text.count("after") == 3)
    assert state_of(terminal) == state and FOOTER not in terminal.text()
    assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()


def test_suspended_and_continued(path, top):  # noqa: F811
    with daemon(path, answers()):
        terminal = top(path)
        terminal.wait_for(FOOTER)
        terminal.press("C-z")
        terminal.wait_for("Stopped")
        assert terminal.ask("alternate_on") == "0"
        terminal.resize(100, 30)
        terminal.type("fg")
        terminal.wait_for(lambda text: len(text.splitlines()) == 30 and FOOTER in text.splitlines()[-1])
        terminal.press("q")
        terminal.wait_for(lambda text: FOOTER not in text)


# ---- terminals without the features of top, and none -------------------------------------------------------------


@pytest.mark.parametrize("env, colored", [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "vt100"}, False)])
def test_colors(path, top, env, colored):  # noqa: F811
    with daemon(path, answers()):
        terminal = top(path, env={} if "TERM" in env else env)
        if "TERM" in env:
            terminal.wait_for(FOOTER)
            terminal.press("q")
            terminal.wait_for("status 0")
            terminal.type(f"clear; TERM={env['TERM']} {terminal.program}")
        terminal.wait_for(FOOTER)
        assert bool(re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.text(colors=True))) == colored


@pytest.mark.parametrize("term, said", [("dumb", "whose cursor moves, not dumb (TERM)"), ("", "TERM is not set"),
                                        ("no-such", "knows no terminal of the type no-such (TERM)")])
def test_terminals_that_cannot(path, tmp_path, build, term, said):  # noqa: F811
    terminal = Tmux(tmp_path, 200, 24)
    with daemon(path, answers()):
        terminal.type(f"TERM={term} {build.path('client/ctl/zerodctl')} --socket {path} top; echo status $?")
        text = terminal.wait_for("status 64")
    assert said in text and INSTEAD in text and "RANK" not in text


def test_no_terminal(path):  # noqa: F811
    with daemon(path, answers()) as seen:
        result = zerodctl("--socket", path, "top", TERM="xterm")
    assert (result.returncode, result.stdout, seen) == (64, "", [])
    assert INSTEAD in result.stderr


def test_no_daemon(path, top):  # noqa: F811
    """Without a daemon at the start, top fails like any command."""
    text = top(path, 200, 24).wait_for("status 69")
    assert f"zerodctl: no daemon on {path}: connect: No such file or directory" in text


@pytest.mark.parametrize("args, said", [(["--json"], "zerodctl --json status"), (["now"], "top takes no arguments")])
def test_usage(path, args, said):  # noqa: F811
    result = zerodctl("--socket", path, "top", *args)
    assert result.returncode == 64 and said in result.stderr
