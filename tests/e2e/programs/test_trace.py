# SPDX-License-Identifier: Apache-2.0
"""
zerodctl trace: the events of a real job are on the right tracks and in the right order, the traces of two nodes fit
each other, and a job that stalls or aborts writes a trace by itself.
"""

import json
import os
import pty
import re
import subprocess
from collections import defaultdict

import pytest
from conftest import environment, wait_for
from nodes import Nodes
from test_zerodctl import daemon, path, zerodctl  # noqa: F401

# At least two buckets, so that parcels differ.
SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--batch", "2", "--micro-batches", "2"]
CONFIG = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 20000}}


def train(job, n_steps=1000000, ranks=2, **more):
    trainer = job.build.path("tests/example/zerod-example") if hasattr(job, "build") else more.pop("trainer")
    return [job.spawn(trainer, *SMALL, "--steps", n_steps, rank=rank, **more) for rank in range(ranks)]


def trace_of(job, *args):
    result = job.ctl("trace", *args)
    return json.loads(result.stdout), result.stderr


class Timeline:
    """The events of one node, by the names of their tracks."""

    def __init__(self, trace, node=0):
        pid = 4194305 + node
        events = [e for e in trace["traceEvents"] if e.get("pid") == pid]
        self.names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.spans, self.moments = defaultdict(list), defaultdict(list)
        for e in events:
            if e["ph"] == "X":
                self.spans[self.names[e["tid"]]].append(e)
            elif e["ph"] == "i":
                self.moments[self.names[e["tid"]]].append(e)
        self.starts = {e["id"]: e for e in events if e["ph"] == "s"}
        self.ends = {e["id"]: e for e in events if e["ph"] == "f"}
        self.events = events

    def of(self, track, name, step=None):
        return [e for e in self.spans[track] if e["name"] == name and step in (None, e["args"]["step"])]

    @property
    def parcels(self):
        return [name for name in self.names.values() if name.startswith("bucket")]


def end(event):
    return event["ts"] + event["dur"]


def check_format(trace):
    """
    Checks the rules of the Trace Event Format: required keys, and spans of a track that are either disjoint or nested.
    """
    assert isinstance(trace["traceEvents"], list) and trace["displayTimeUnit"] == "ms"
    open_spans = defaultdict(list)
    for e in sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        stack = open_spans[e["pid"], e["tid"]]
        while stack and end(stack[-1]) <= e["ts"] + 0.0005:
            stack.pop()
        assert not stack or end(e) <= end(stack[-1]) + 0.0005, (stack[-1], e)
        stack.append(e)
    for e in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid"} <= e.keys() and e["ph"] in "XisfM", e
        assert e["ph"] == "M" or e["ts"] >= 0
        assert e["ph"] != "X" or e["dur"] > 0
        assert e["ph"] != "i" or e["s"] == "t"


def test_of_a_running_job(zerod):
    job = zerod(CONFIG)
    train(job)
    wait_for("the job does not train", lambda: job.status()["step"] >= 12)
    trace, said = trace_of(job, "--steps", 6)
    check_format(trace)
    line = Timeline(trace)
    first, last = trace["zerod"]["oldest_step"], trace["zerod"]["open_step"] - 1
    assert last - first == 5
    assert said == (f"zerodctl: traced steps {first} to {last}, and what there is of step {last + 1}. Open the file at "
                    "ui.perfetto.dev or chrome://tracing\n")
    assert {"step", "rank 0", "rank 1", "worker 1"} <= set(line.names.values()) and len(line.parcels) > 1
    for step in range(first, last + 1):
        decided = line.of("step", "update and commit", step)
        assert len(decided) == 1
        for rank in ("rank 0", "rank 1"):
            forwards, backwards = line.of(rank, "forward", step), line.of(rank, "backward", step)
            assert [e["args"]["micro_batch"] for e in forwards] == [0, 1] or step == first
            assert [e["args"]["micro_batch"] for e in backwards] == [0, 1]
            assert all(end(a) <= b["ts"] + 0.001 for a, b in zip(forwards, backwards) if step > first)
            assert end(backwards[-1]) <= decided[0]["ts"]
        for parcel in line.parcels:
            reduces, updates = line.of(parcel, "reduce", step), line.of(parcel, "update", step)
            assert len(reduces) == 2 and len(updates) == 1
            assert end(reduces[-1]) <= decided[0]["ts"] + 0.001 <= updates[0]["ts"] + 0.002
            assert end(updates[0]) <= end(decided[0])
    # Each sum of the closed steps has an arrow from a backward, from the push for which the sum waited.
    n_sums = sum(len(line.of(parcel, "reduce", step)) for parcel in line.parcels for step in range(first, last + 1))
    assert line.starts.keys() == line.ends.keys() and len(line.ends) >= n_sums
    for number, a in line.starts.items():
        b = line.ends[number]
        assert 0 <= b["ts"] - a["ts"] < 1e5 and line.names[b["tid"]] in line.parcels
        assert a["ts"] in [m["ts"] for m in line.moments[line.names[a["tid"]]]]


def test_updates_before_the_decision(zerod):
    """They are in the backward, and are not named as those after the decision."""
    job = zerod({"zero_optimization": CONFIG["zero_optimization"] | {"speculative_update": True}, "gradient_clipping": 0})
    train(job)
    wait_for("chunks are updated early", lambda: job.status()["counters"]["n_early_updates"] > 100)
    trace, _ = trace_of(job, "--steps", 20)
    check_format(trace)
    line, n = Timeline(trace), 0
    for step in range(trace["zerod"]["oldest_step"], trace["zerod"]["open_step"]):
        decided = line.of("step", "update and commit", step)[0]["ts"]
        for parcel in line.parcels:
            summed = end(line.of(parcel, "reduce", step)[-1])
            for early in line.of(parcel, "update early", step):
                assert summed <= early["ts"] + 0.001 and early["ts"] <= decided + 0.001
                n += 1
            assert all(update["ts"] >= decided - 0.001 for update in line.of(parcel, "update", step))
    assert n > 0 and any(re.fullmatch(r"update parcel \d+ early", e["name"]) for e in line.spans["worker 1"])


def test_more_than_is_kept(zerod):
    job = zerod(CONFIG)
    ranks = train(job, 20)
    for rank in ranks:
        assert rank.wait() == 0
    trace, said = trace_of(job, "--steps", 1000000)
    assert trace["zerod"]["oldest_step"] == 0 and "traced steps 0 to 19" in said and "asked for" not in said


def test_an_empty_trace(zerod):
    job = zerod()
    trace, said = trace_of(job)
    check_format(trace)
    assert said == "zerodctl: nothing has happened yet: the trace is empty\n"


@pytest.mark.threads
def test_of_several_nodes(zerod, build, tmp_path):
    """Each daemon traces its own node. In the merged trace, both nodes commit a step at the same time."""
    nodes = Nodes(zerod, tmp_path, [1, 1], CONFIG)
    ranks = [nodes.spawn(build.path("tests/example/zerod-example"), *SMALL, "--steps", "20", rank=rank) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    other = tmp_path / "node1.json"
    other.write_text(nodes.daemons[1].ctl("trace", "--steps", 8).stdout)
    trace, _ = trace_of(nodes.daemons[0], "--steps", 8, "--merge", other)
    here, there = Timeline(trace, 0), Timeline(trace, 1)
    assert set(here.names.values()) & set(there.names.values()) >= {"step", "worker 1", "reduce-scatter", "all-gather"}
    assert "rank 0" in here.names.values() and "rank 1" in there.names.values()
    assert all(here.of(parcel, "combine") for parcel in here.parcels)
    shared = [(a, b) for a in here.of("step", "update and commit") for b in there.of("step", "update and commit")
              if a["args"]["step"] == b["args"]["step"]]
    assert len(shared) == 8
    middle = sorted(abs(end(a) - end(b)) for a, b in shared)[len(shared) // 2]
    assert middle < 5e4 * build.patience  # microseconds; without the shift, the distance of the daemons' starts


# ---- traces without a request ------------------------------------------------------------------------------------


def abort(job):
    wait_for("no step is open", lambda: job.ctl("abort-step", check=False).returncode == 0)


def test_an_abort_leaves_a_trace(zerod, tmp_path):
    job = zerod(CONFIG | {"diagnostics": {"trace_dir": str(tmp_path)}})
    train(job)
    wait_for("the job does not train", lambda: job.status()["step"] >= 5)
    abort(job)
    job.ctl("abort-step", check=False)  # within the same 10 s, so it gets no trace of its own
    wait_for("no trace is written", lambda: "trace of the last steps" in job.log())
    files = list(tmp_path.glob("*.trace.json"))
    assert len(files) == 1 and re.fullmatch(r"test-node0-step\d+-E1302-\d+\.trace\.json", files[0].name)
    trace = json.loads(files[0].read_text())
    check_format(trace)
    assert "E1302" in [e["name"] for e in Timeline(trace).moments["step"]]
    assert list(tmp_path.glob("*.new")) == []


def test_a_stall_leaves_a_trace(zerod, tmp_path):
    job = zerod(CONFIG | {"diagnostics": {"trace_dir": str(tmp_path), "stall_warning": "200ms"}})
    first, second = train(job)
    wait_for("the job does not train", lambda: job.status()["step"] >= 5)
    second.signal(19)  # SIGSTOP
    wait_for("no trace is written", lambda: "trace of the last steps" in job.log())
    second.signal(18)
    (file,) = tmp_path.glob("*-E1303-*.trace.json")
    assert Timeline(json.loads(file.read_text())).of("rank 0", "backward")


def test_a_folder_that_cannot_be_written(zerod, tmp_path):
    """If the trace folder cannot be written, training continues, and one line has the reason."""
    job = zerod(CONFIG | {"diagnostics": {"trace_dir": str(tmp_path / "missing")}})
    train(job)
    wait_for("the job does not train", lambda: job.status()["step"] >= 5)
    abort(job)
    wait_for("nothing is said", lambda: re.search(r"no trace in .*/missing/test-.*: No such file or directory", job.log()))
    step = job.status()["step"]
    wait_for("the job does not go on", lambda: job.status()["step"] > step + 2)


# ---- errors of users ---------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("args, said", [
    (["--steps", "0"], "--steps: '0' is not a whole number from 1 to 1000000"),
    (["--steps", "ten"], "--steps: 'ten' is not a whole number from 1 to 1000000"),
    (["--steps", "10000000"], "--steps: '10000000' is not a whole number from 1 to 1000000"),
    (["trace.json"], "trace takes --steps N, --merge FILE and --output FILE, nothing else"),
])
def test_usage(args, said):
    result = zerodctl("--socket", "/nowhere", "trace", *args)
    assert (result.returncode, result.stdout) == (64, "") and said in result.stderr


@pytest.mark.quick
def test_a_terminal_is_no_place_for_it():
    ours, theirs = pty.openpty()
    result = subprocess.run([zerodctl.__globals__["ZERODCTL"], "trace"], stdout=theirs, stderr=subprocess.PIPE, text=True,
                            env=environment())
    os.close(theirs)
    os.close(ours)
    assert result.returncode == 64
    assert result.stderr == "zerodctl: the trace is a file for a browser: add > trace.json, or --output trace.json\n"


def test_files_that_cannot_be_merged_or_written(zerod, tmp_path):
    job = zerod()
    bad = tmp_path / "bad.json"
    for text, said in [("{", "it is not JSON; a packed file (.gz) must be unpacked first"), ("{}", "it has no traceEvents"),
                       ('{"traceEvents": []}', "it does not say when it began (baseTimeNanoseconds)")]:
        bad.write_text(text)
        result = job.ctl("trace", "--merge", bad, check=False)
        assert result.returncode == 65 and f"--merge {bad}: " in result.stderr and said in result.stderr, result.stderr
    os.mkfifo(tmp_path / "fifo")
    for name, code in ((tmp_path / "fifo", os.EX_DATAERR), ("/dev/zero", os.EX_NOINPUT)):
        assert job.ctl("trace", "--merge", name, check=False).returncode == code
    result = job.ctl("trace", "--merge", tmp_path / "none", check=False)
    assert result.returncode == 66 and "No such file" in result.stderr
    result = job.ctl("trace", "--output", tmp_path / "no" / "t.json", check=False)
    assert result.returncode == 73 and "No such file or directory" in result.stderr
