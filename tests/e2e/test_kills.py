# SPDX-License-Identifier: Apache-2.0
"""
Trainers that die, stop, are slow, abort or attach twice. The other ranks lose nothing, and the final bits are those of
an undisturbed run. A few runs of each kind; scripts/soak kills runs many.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest

import kills
from conftest import wait_for
from kills import CLASSES, References, describe, finish, judge, start, train
from puppet import ABORTED, RESUMED, Puppet, all_do, steps, trainers
from tiers import each_once, full

pytestmark = pytest.mark.threads

SHORT = 24  # steps of runs in which the place of the kill does not matter


@pytest.fixture(scope="session")
def references(build, tmp_path_factory):
    if not build.options.get("failpoints"):
        pytest.skip("a build without failpoints: meson setup -Dfailpoints=true")
    return References(build, tmp_path_factory.mktemp("references"))


def lines(process, word):
    return [line for line in process.out().splitlines() if line.split(" ", 1)[0] == word]


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "gone"


def began(process, step):
    """Return: whether the trainer has begun that step."""
    return any(int(line.split()[1]) >= step for line in lines(process, "weights"))


# ---- killed and started again ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, *full(2)])
@pytest.mark.parametrize("kind", CLASSES)
def test_killed(build, references, tmp_path, kind, seed):
    kills.one_run(build, references, tmp_path, seed, kind)


@pytest.mark.parametrize("seed", [0, 1, *full(2, 3)])
def test_two_ranks_killed(build, references, tmp_path, seed):
    kinds = list(CLASSES)
    kills.one_run(build, references, tmp_path, seed, kinds[seed * 3 % len(kinds)], double=True)


@pytest.mark.parametrize("seed", [0, 1, *full(2, 3)])
def test_aborted(build, references, tmp_path, seed):
    kills.one_run(build, references, tmp_path, seed, kills.ABORTS)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_successor_of_a_rank_that_pushed_nothing(zerod, stage):
    """A rank dies without a push. Its successor asks for the step, as its position says. The step begins again once."""
    daemon = zerod({"world": {"size": 3}, "zero_optimization": {"stage": stage}})
    ranks = trainers(daemon)
    steps(ranks)
    for p in ranks:
        p.ok("begin")
    for p in ranks[:2]:
        p.ok("pushes")
    assert [a.r for a in all_do(ranks, "end")] == [0] * 3
    for p in ranks[:2]:
        p.tell("step")
    assert ranks[2]("step").error["code"] == 1005
    ranks[2].kill()
    ranks[2] = Puppet(daemon, 2).attach()
    assert ranks[2]("form").r == RESUMED
    for answer in [ranks[2]("step"), *(p.answer() for p in ranks[:2])]:
        assert answer.r == ABORTED and answer.error["code"] == 1302, answer
        assert "E1005" in answer.text and "by a process that died since" in answer.text
    steps(ranks, 2)
    assert daemon.status()["counters"]["n_aborts"] == 1


@pytest.mark.parametrize("stage", [2, 3, *full(1)])
def test_every_rank_killed_in_turn(zerod, references, stage):
    daemon = zerod({"world": {"size": 3}, "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0})
    plans = [[f"Push.sent:kill@{37 + 50 * i}" for i in range(3)],
             [f"Step.wait:kill@{3 + i}" for i in range(3)],
             [f"EndBackward.wait:kill@{5 + i}" for i in range(3)]]
    judge(train(daemon, plans, n_steps=SHORT), daemon, references.get(3, n_steps=SHORT))
    assert daemon.status()["counters"]["n_reattaches"] == 9


def test_all_ranks_killed_at_once(zerod, references):
    daemon = zerod({"gradient_clipping": 1.0})
    ranks = start(daemon, [[["--at", "5.1.3:stop"], []], [["--at", "5.1.6:stop"], []]], n_steps=SHORT)
    wait_for("both ranks to stop", lambda: all(state(r.last.pid) == "T" for r in ranks))
    for rank in ranks:
        rank.n_kills = 1
        rank.last.signal(signal.SIGKILL)
    judge(finish(ranks, daemon), daemon, references.get(2, n_steps=SHORT))


def test_killed_while_forked_child_holds_the_socket(zerod, references):
    daemon = zerod({"gradient_clipping": 1.0})
    ranks = train(daemon, [[["--at", "6.1.4:fork", "--at", "7.0.2:die"]], []], n_steps=SHORT)
    child = lines(ranks[0].processes[0], "child")[0].split()
    try:
        assert state(int(child[1])) != "gone", "the child was to outlive its parent"
        assert int(child[2]) == -10, "a forked child's call is -ECHILD"
        judge(ranks, daemon, references.get(2, n_steps=SHORT))
    finally:
        os.kill(int(child[1]), signal.SIGKILL)


@pytest.mark.parametrize("what, stage", each_once(("die", "abort", "reconnect"), (2, 3)))
def test_half_written_window(zerod, references, stage, what):
    daemon = zerod({"gradient_clipping": 1.0, "zero_optimization": {"stage": stage}})
    ranks = train(daemon, [[["--at", "8.0.window:scribble", "--at", f"8.0.window:{what}"]], []], n_steps=SHORT)
    judge(ranks, daemon, references.get(2, n_steps=SHORT), "no error|the test wants it so")


@pytest.mark.parametrize("where", ["3.0.0", "6.1.5", "6.1.end", "9.0.step", "16.0.window"])
def test_same_process_reconnects(zerod, references, where):
    daemon = zerod({"gradient_clipping": 1.0, "zero_optimization": {"stage": 3}})
    ranks = train(daemon, [[], [["--at", f"{where}:reconnect"]]], n_steps=SHORT)
    judge(ranks, daemon, references.get(2, n_steps=SHORT))
    assert len(lines(ranks[1].last, "start")) == 2


def test_same_process_reconnects_while_its_child_holds_the_socket(zerod, references):
    daemon = zerod({"gradient_clipping": 1.0})
    ranks = train(daemon, [[], [["--at", "4.0.1:fork", "--at", "4.0.3:reconnect"]]], n_steps=SHORT)
    os.kill(int(lines(ranks[1].last, "child")[0].split()[1]), signal.SIGKILL)
    judge(ranks, daemon, references.get(2, n_steps=SHORT))


# ---- without a successor, or with a wrong one ----------------------------------------------------------------


def test_nobody_comes_back(zerod, references):
    daemon = zerod({"gradient_clipping": 1.0, "limits": {"reattach_timeout": "1s"},
                    "zero_optimization": {"reduce_bucket_size": 1}})
    ranks = start(daemon, [[], [["--at", "5.1.7:die"]]], n_steps=SHORT)
    ranks[1].n_kills = 0  # not restarted yet
    wait_for(lambda: f"the step to be aborted\n{daemon.log()}", lambda: lines(ranks[0].last, "aborted"))
    text = lines(ranks[0].last, "aborted")[0]
    assert text.startswith("aborted 1302 E1302 step aborted"), text
    assert "rank 1" in text and f"pid {ranks[1].last.pid}" in daemon.log(), text
    ranks[1].n_kills = 1
    judge(finish(ranks, daemon), daemon, references.get(2, n_steps=SHORT), "E1302 step aborted.*rank 1")


def test_successor_that_never_forms_is_no_successor(zerod, references):
    daemon = zerod({"gradient_clipping": 1.0, "limits": {"reattach_timeout": "1s"}})
    ranks = start(daemon, [[], [["--at", "5.1.7:die"], "Declare.sent:kill", "Form.send:kill"]], n_steps=SHORT)
    ranks[1].n_kills = 2
    wait_for("the second successor to die", lambda: not ranks[1].tend())
    wait_for(lambda: f"the step to be aborted\n{daemon.log()}", lambda: lines(ranks[0].last, "aborted"))
    ranks[1].n_kills = 3
    judge(finish(ranks, daemon), daemon, references.get(2, n_steps=SHORT), "E1302 step aborted.*rank 1")


@pytest.mark.parametrize("stage,accumulate", [(1, False), (2, True), (3, False)])
def test_successor_differs(zerod, references, stage, accumulate):
    daemon = zerod({"gradient_clipping": 1.0, "zero_optimization": {"stage": stage, "reduce_bucket_size": 1}},
                   env={"ZEROD_FAILPOINT": "reduce:sleep:1@*,verify:sleep:5@*"})
    # Rank 1 sleeps until rank 0's buckets are reduced. Then its successor pushes other bits.
    ranks = start(daemon, [[], [["--at", "5.1.12:sleep=300", "--at", "5.1.12:die"], ["--at", "5.1.0:differ"]]],
                  ["--accumulate"] if accumulate else [], n_steps=SHORT)
    finish(ranks, daemon)
    aborted = lines(ranks[0].last, "aborted") + lines(ranks[1].last, "aborted")
    assert len(aborted) == 2 and all("differ" in text for text in aborted), describe(ranks, daemon)
    judge(ranks, daemon, references.get(2, accumulate, SHORT), "E1302 step aborted.*rank 1.*differ")
    assert daemon.status()["counters"]["n_aborts"] == 1


def test_successor_that_redoes_too_little(zerod, references):
    """The successor ends the micro-batch without repeating its predecessor's posted pushes: the step is aborted."""
    daemon = zerod({"gradient_clipping": 1.0, "zero_optimization": {"reduce_bucket_size": 1}})
    ranks = start(daemon, [[], [["--at", "5.1.12:sleep=300", "--at", "5.1.12:die"], ["--at", "5.1.0:omit"]]],
                  n_steps=SHORT)
    finish(ranks, daemon)
    judge(ranks, daemon, references.get(2, n_steps=SHORT), "E1302 step aborted.*rank 1.*differ")
    assert daemon.status()["counters"]["n_aborts"] == 1


def test_aborted_while_a_successor_forms(zerod, references):
    """A step is aborted while a successor forms, which outdates position and blob of its Formed message."""
    daemon = zerod({"gradient_clipping": 1.0})
    ranks = start(daemon, [[["--at", "5.1.5:stop", "--at", "5.1.5:abort"]],
                           [["--at", "5.1.3:die"], "formed:stop"]], n_steps=SHORT)
    wait_for("the successor to be formed", lambda: ranks[1].tend() and len(ranks[1].processes) == 2
             and state(ranks[1].last.pid) == state(ranks[0].last.pid) == "T")
    ranks[0].last.signal(signal.SIGCONT)
    wait_for("the abort", lambda: lines(ranks[0].last, "aborted"))
    ranks[1].last.signal(signal.SIGCONT)
    judge(finish(ranks, daemon), daemon, references.get(2, n_steps=SHORT), "no error")
    assert lines(ranks[1].last, "start")[0].startswith("start rank 1 step 5 micro 0 attempt 1 "), describe(ranks, daemon)


def test_rank_taken(zerod, references):
    daemon = zerod({"gradient_clipping": 1.0})
    ranks = start(daemon, [[], [["--at", "5.1.7:stop"]]], n_steps=SHORT)
    wait_for("rank 1 to stop", lambda: state(ranks[1].last.pid) == "T")
    second = daemon.spawn(daemon.build.path("tests/kill-trainer"), "--steps", SHORT, rank=1)
    assert second.wait() == 3, second.out()
    assert second.out().startswith("refused 1301 E1301") and str(ranks[1].last.pid) in second.out()
    ranks[1].last.signal(signal.SIGCONT)
    judge(finish(ranks, daemon), daemon, references.get(2, n_steps=SHORT))


def test_another_run(zerod, references):
    daemon = zerod({"gradient_clipping": 1.0})
    reference = references.get(2, n_steps=SHORT)
    program = daemon.build.path("tests/kill-trainer")
    args = ["--steps", SHORT, "--window", kills.WINDOW]

    def run(run_id):
        processes = [daemon.spawn(program, *args, rank=r, env={"ZEROD_RUN_ID": run_id}) for r in range(2)]
        return [p.wait() for p in processes], processes

    assert run("monday")[0] == [0, 0]
    statuses, processes = run("tuesday")
    assert statuses == [3, 3]
    for p in processes:
        assert p.out().startswith("refused 1109 E1109") and "monday" in p.out() and "tuesday" in p.out()
    statuses, processes = run("monday")  # it resumes and finds the run finished
    assert statuses == [0, 0]
    for r, p in enumerate(processes):
        assert f"start rank {r} step {SHORT} " in p.out() and "resumed 1" in p.out()
        assert {lines(p, "final")[0].split(" ", 1)[1]} == reference["final", r]
    daemon.ctl("drop")
    statuses, processes = run("tuesday")
    assert statuses == [0, 0]
    for r, p in enumerate(processes):
        assert {lines(p, "final")[0].split(" ", 1)[1]} == reference["final", r]


# ---- stopped and slow -----------------------------------------------------------------------------------------------

PLACES = ["connected:stop", "Form.send:stop", "Ready.wait:stop", "BeginBackward.sent:stop@9", "Push.send:stop@77",
          "copy:stop@90", "EndBackward.send:stop@11", "EndBackward.answered:stop@12", "Step.send:stop@6",
          "Step.wait:stop@7", "Step.answered:stop@8", "Gather.wait:stop@10", "Release.send:stop@10",
          "WriteBegin.send:stop@2", "window-mapped:stop@2", "WriteEnd.wait:stop@2", "Leave.send:stop"]


@pytest.mark.parametrize("place", PLACES)
def test_stopped(zerod, references, place):
    daemon = zerod({"gradient_clipping": 1.0, "zero_optimization": {"stage": 3},
                    "diagnostics": {"stall_warning": "100ms", "on_leave": "continue"}})
    ranks = start(daemon, [[place], []], n_steps=SHORT)
    wait_for(lambda: f"rank 0 to stop\n{describe(ranks, daemon)}", lambda: state(ranks[0].last.pid) == "T")
    if place.startswith("Leave"):
        assert ranks[1].last.wait() == 0, "who has left is not waited for"
    else:
        wait_for(lambda: f"E1303\n{describe(ranks, daemon)}", lambda: "E1303 warning" in daemon.log())
    ranks[0].last.signal(signal.SIGCONT)
    judge(finish(ranks, daemon), daemon, references.get(2, n_steps=SHORT))


def test_slow(zerod, references):
    places = ["Form.send", "Push.send", "EndBackward.send", "Step.send", "Step.wait", "Gather.wait", "WriteEnd.send"]
    daemon = zerod({"gradient_clipping": 1.0, "zero_optimization": {"stage": 3}, "world": {"size": 3},
                    "diagnostics": {"stall_warning": "150ms"}})
    plans = [[], [",".join(f"{p}:sleep:300@{i + 1}" for i, p in enumerate(places))],
             [",".join(f"{p}:sleep:2@*" for p in places)]]
    judge(train(daemon, plans, n_steps=SHORT), daemon, references.get(3, n_steps=SHORT))
    stalls = re.findall(r"E1303 warning.*(?:\n  .*)*", daemon.log())
    assert any("rank 1 (pid" in text for text in stalls), daemon.log()


def test_stall_timeout_aborts(zerod, references):
    daemon = zerod({"gradient_clipping": 1.0,
                    "diagnostics": {"stall_warning": "100ms", "stall_timeout": "400ms"}})
    ranks = start(daemon, [["Push.send:stop@100"], []], n_steps=SHORT)
    wait_for(lambda: f"an abort\n{daemon.log()}", lambda: lines(ranks[1].last, "aborted"))
    ranks[0].last.signal(signal.SIGCONT)
    judge(finish(ranks, daemon), daemon, references.get(2, n_steps=SHORT), "E1303")


def test_world_that_does_not_come_together(zerod, references):
    daemon = zerod({"gradient_clipping": 1.0, "diagnostics": {"stall_warning": "100ms", "stall_timeout": "300ms"}})
    program = daemon.build.path("tests/kill-trainer")
    alone = daemon.spawn(program, rank=1)
    assert alone.wait() == 3 and alone.out().startswith("refused 1303 E1303"), alone.out()
    assert "rank 0 (never attached)" in alone.out()
    judge(train(daemon, [[], []], n_steps=SHORT), daemon, references.get(2, n_steps=SHORT))


# ---- giving up ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where, stage", each_once(("7.0.0", "7.1.6", "7.1.end", "7.0.step", "8.0.window"), (1, 3)))
def test_abort_step(zerod, references, where, stage):
    daemon = zerod({"gradient_clipping": 1.0, "world": {"size": 3},
                    "zero_optimization": {"stage": stage, "reduce_bucket_size": 300}},
                   env={"ZEROD_FAILPOINT": "transfer:sleep:3@*,reduce:sleep:1@*"})
    ranks = train(daemon, [[], [["--at", f"{where}:abort"]], []], n_steps=SHORT)
    judge(ranks, daemon, references.get(3, n_steps=SHORT), "E1302 warning, step begins again.*the test wants it so|no error")
    for rank in ranks:
        assert len(lines(rank.last, "aborted")) == 1, describe(ranks, daemon)
    assert daemon.status()["attempt"] == 1


def test_abandoned_and_nothing_was_reduced(zerod, references):
    daemon = zerod({"gradient_clipping": 1.0, "zero_optimization": {"reduce_bucket_size": 50000}})
    # Rank 1 is slow, so that no bucket is complete.
    ranks = train(daemon, [[["--at", "4.1.7:abandon", "--at", "9.0.0:abandon"]],
                           [["--at", "4.1.0:sleep=500", "--at", "9.0.0:sleep=500"]]], n_steps=SHORT)
    judge(ranks, daemon, references.get(2, n_steps=SHORT))  # no rank got an abort
    assert daemon.log().count("E1007 ") == 2
    assert daemon.status()["counters"]["n_aborts"] == 0


def test_abandoned_and_some_was_reduced(zerod, references):
    daemon = zerod({"gradient_clipping": 1.0, "zero_optimization": {"reduce_bucket_size": 1}})
    ranks = train(daemon, [[["--at", "4.1.9:sleep=300", "--at", "4.1.9:abandon"]], []], n_steps=SHORT)
    judge(ranks, daemon, references.get(2, n_steps=SHORT), "E1007")
    for rank in ranks:
        assert len(lines(rank.last, "aborted")) == 1, describe(ranks, daemon)


@pytest.mark.parametrize("where", ["5.0.0", "5.1.6", "5.0.step"])
def test_leave_stops_the_others(zerod, references, where):
    daemon = zerod({"diagnostics": {"on_leave": "stop"}})
    ranks = train(daemon, [[], [["--at", f"{where}:leave"]]], n_steps=SHORT)
    assert ranks[1].last.wait() == 0
    assert ranks[0].last.wait() == 3
    text = lines(ranks[0].last, "refused")[0]
    assert text.startswith("refused 1302 E1302") and "rank 1" in text, text


@pytest.mark.parametrize("where", ["5.0.0", "5.0.end", "5.1.6", "5.0.step"])
def test_leave_and_the_others_continue(zerod, references, where):
    found = []
    for bucket in (1, 50000):
        daemon = zerod({"diagnostics": {"on_leave": "continue"}, "world": {"size": 3},
                        "zero_optimization": {"reduce_bucket_size": bucket}})
        ranks = train(daemon, [[], [["--at", f"{where}:leave"]], []], n_steps=SHORT)
        assert [rank.last.wait() for rank in ranks] == [0, 0, 0], describe(ranks, daemon)
        assert all(lines(ranks[r].last, "done") for r in (0, 2))
        found.append(kills.results(ranks))
    for results in found:
        assert results["final", 0] == results["final", 2]
    if where in ("5.0.0", "5.0.step"):  # otherwise timing decides whether its pushes were reduced
        assert found[0] == found[1]


# ---- the daemon ends, or has no memory ---------------------------------------------------------------------------------

ENDS = {
    "waiting": ([["Hello.answered:stop"], []], None),
    "forming": ([[], []], "forming:sleep:{ms}@*"),
    "initialising": ([["Init.wait:stop@3"], []], None),
    "pushing": ([["Push.sent:stop@100"], []], "reduce:sleep:30@*"),
    "waiting in step": ([["Step.send:stop@5"], []], None),
    "updating": ([[], []], "update:sleep:100@*"),
    "gathering": ([["Gather.wait:stop@20"], []], "transfer:sleep:30@*"),
    "window opens": ([[], []], "transfer:sleep:100@*"),
    "window": ([["window-mapped:stop@2"], []], None),
    "redone": ([[["--at", "2.1.12:die"], []], []], "reduce:sleep:10@*,verify:sleep:100@*"),
}


@pytest.mark.parametrize("moment", ENDS)
@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_daemon_ends(zerod, build, references, moment, number):
    plans, failpoint = ENDS[moment]
    daemon = zerod({"zero_optimization": {"stage": 3, "reduce_bucket_size": 300}, "threads": 4},
                   env={"ZEROD_FAILPOINT": failpoint.format(ms=1500 * build.patience)} if failpoint else {})
    ranks = start(daemon, plans, n_steps=SHORT)
    wait_for(lambda: describe(ranks, daemon),  # the last lives, which are not killed
             lambda: [rank.tend() for rank in ranks] and all(len(rank.processes) > rank.n_kills for rank in ranks))
    time.sleep(0.4 * daemon.patience)
    began_at = time.monotonic()
    daemon.stop(number, timeout=5)
    assert time.monotonic() - began_at < 5 * daemon.patience
    for rank in ranks:
        if state(rank.last.pid) == "T":
            rank.last.signal(signal.SIGCONT)
        assert rank.last.wait() == 3, describe(ranks, daemon)
        assert "E1305 daemon stopped, the run ends" in rank.last.out()


@pytest.mark.parametrize("n, n_nodes", each_once((1, 2, 3, 5, 8, 12, 16, 20, 30, 60), (1, 2)))
def test_out_of_memory(zerod, references, monkeypatch, n, n_nodes):
    """
    The daemon's n-th request for memory fails. The daemon reports it, nothing is lost, and the next attempt succeeds.
    """
    monkeypatch.setenv("ZEROD_NODES", str(n_nodes))
    daemon = zerod({"gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "reduce_bucket_size": 300}},
                   env={"ZEROD_FAILPOINT": f"reserve:error@{n}"})
    reference = references.get(2, n_steps=SHORT)
    ranks = start(daemon, [[], []], n_steps=SHORT)
    refused = []
    deadline = time.monotonic() + 30 * daemon.patience
    while [rank.last.poll() for rank in ranks] != [0, 0]:
        assert time.monotonic() < deadline, describe(ranks, daemon)
        for rank in ranks:
            assert rank.last.poll() in (None, 0, 3), describe(ranks, daemon)
            if rank.last.poll() == 3:  # restarted, as by zerodrun --restarts
                refused += lines(rank.last, "refused")
                rank.start()
        time.sleep(0.005)
    assert refused and all(text.startswith("refused 1401 E1401") for text in refused), refused
    found = kills.results(ranks)
    assert found == reference, describe(ranks, daemon)
