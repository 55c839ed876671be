# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, leave, attach again or ask at difficult moments. Each of these moments once caused a bug."""

import signal
import time

import pytest

from conftest import wait_for
from puppet import ABORTED, REFUSED, RESUMED, Puppet, all_do, diagnostics, form, memory, state, steps, trainers
from tiers import full

pytestmark = [pytest.mark.quick, pytest.mark.threads]


def is_lost(daemon, rank):
    return not daemon.json("ranks")[rank]["attached"]


def die(daemon, puppet):
    puppet.kill()
    wait_for("its rank is free", lambda: is_lost(daemon, puppet.rank))


def test_tickets_go_round_in_one_micro_batch(zerod):
    """A parameter has more passes than a rank has slots. Reused slots do not mix up the lists of slots."""
    daemon = zerod({"world": {"size": 1}, "diagnostics": {"on_duplicate": "accumulate"}})
    puppet = Puppet(daemon).attach(declare=("many", 1))
    form([puppet])
    for _ in range(2):
        puppet.ok("begin")
        for _ in range(200):
            puppet.ok("push", 0)
        puppet.ok("end")
        assert puppet.ok("step").applied
    assert daemon.json("status")["counters"]["n_pushes_accumulated"] == 2 * 199


def test_successor_dies_while_it_is_compared(zerod):
    """The third process of a rank begins while the second one's push is still compared with the first one's."""
    daemon = zerod({"world": {"size": 1}, "threads": 4}, env={"ZEROD_FAILPOINT": "verify:sleep:1500@*"})
    first = Puppet(daemon).attach(declare=("many", 1))
    form([first])
    first.ok("begin")
    first.ok("push", 0)
    wait_for("it is reduced", lambda: daemon.json("status")["counters"]["n_pushes_admitted"] == 1)
    die(daemon, first)
    second = Puppet(daemon).attach(declare=("many", 1))
    assert second("form").r == RESUMED
    second.ok("begin")
    second.ok("push", 0)
    second.tell("end")
    wait_for("it is compared", lambda: daemon.json("status")["counters"]["n_pushes_redone"] == 1)
    die(daemon, second)
    third = Puppet(daemon).attach(declare=("many", 1))
    assert third("form").r == RESUMED
    third.ok("begin")
    third.ok("push", 0)
    third.ok("end")
    assert third.ok("step").applied


def test_successor_leaves_instead_of_going_on(zerod):
    """A successor leaves. Its predecessor's unfinished backward is withdrawn, so no step contains a part of it."""
    daemon = zerod({"diagnostics": {"on_leave": "continue"}, "zero_optimization": {"reduce_bucket_size": 1}})
    ranks = trainers(daemon)
    for puppet in ranks:
        puppet.ok("begin")
    ranks[0].ok("pushes")
    ranks[1].ok("push 0")
    ranks[1].ok("push 1")
    ranks[0].tell("end")
    wait_for("pushes are in", lambda: daemon.json("status")["counters"]["n_pushes_admitted"] == 12)
    die(daemon, ranks[1])
    successor = Puppet(daemon, 1).attach()
    successor.ok("leave")
    answer = ranks[0].answer()
    if answer.r == 0:  # nothing was reduced yet
        answer = ranks[0]("step")
    assert answer.r == 3 and "E1007" in answer.text, answer
    assert ranks[0].ok("steps 1").position["step"] == 1


def test_rank_that_left_is_not_lost(zerod):
    """A successor leaves before it is formed. No later step is aborted because of that rank."""
    daemon = zerod({"world": {"size": 3}, "limits": {"reattach_timeout": "1s"}, "diagnostics": {"on_leave": "continue"}})
    ranks = trainers(daemon)
    steps(ranks)
    die(daemon, ranks[1])
    successor = Puppet(daemon, 1).attach()
    successor.ok("leave")
    successor.end()
    ranks[0].ok("begin")
    ranks[0].ok("pushes")
    ranks[0].tell("end")
    time.sleep(1.5)
    assert not ranks[0].has_answered()
    ranks[2].tell("steps 1")
    assert ranks[0].answer().r == 0
    assert ranks[0].ok("step").applied
    assert ranks[2].answer().r == 0


def test_rank_with_no_restart_left(zerod):
    """The launcher ends the run after a rank without restarts. No text announces a successor until one attaches."""
    daemon = zerod({"world": {"size": 3}})
    ranks = [Puppet(daemon, r, env={"ZEROD_RESTARTS_LEFT": str(int(r != 1))}).attach() for r in range(3)]
    form(ranks)
    steps(ranks)
    die(daemon, ranks[1])
    die(daemon, ranks[2])
    assert not diagnostics(daemon), "it was said to wait for a successor"
    wait_for("a line about each", lambda: daemon.log().count("is gone and is not started again") == 2)
    successor = Puppet(daemon, 1, env={"ZEROD_RESTARTS_LEFT": "1"}).attach()
    assert successor("form").r == RESUMED
    die(daemon, successor)
    assert [d["code"] for d in diagnostics(daemon)] == ["E1302"]


def test_step_is_not_taken_without_who_left(zerod):
    """on_leave: stop. A rank leaves after the other rank has asked for the step: the step is not applied."""
    daemon = zerod({"diagnostics": {"on_leave": "stop"}})
    ranks = trainers(daemon)
    steps(ranks)
    before = memory(daemon)
    for puppet in ranks:
        puppet.ok("begin")
        puppet.ok("pushes")
    assert [a.r for a in all_do(ranks, "end")] == [0, 0]
    ranks[0].tell("step")
    wait_for("rank 0 waits", lambda: daemon.json("ranks")[0]["waiting_for"])
    ranks[1].ok("leave")
    answer = ranks[0].answer()
    assert answer.r == REFUSED and answer.error["code"] == 1302, answer
    assert memory(daemon) == before


def test_half_written_window(zerod):
    """A process that did not begin a window cannot end it. The writes of its dead predecessor are dropped."""
    daemon = zerod()
    ranks = trainers(daemon)
    before = memory(daemon)
    all_do(ranks, "window")
    ranks[0].ok("write 0 7.0")
    die(daemon, ranks[0])
    ranks[1].tell("commit")
    successor = Puppet(daemon, 0).attach()
    assert successor("form").r == RESUMED
    answer = successor("commit")
    assert answer.r == REFUSED and answer.error["code"] == 1003, answer
    successor.ok("clear")
    successor.ok("window")
    successor.ok("commit")
    assert ranks[1].answer().r == 0
    after = memory(daemon)
    assert {k: v for k, v in after.items() if k != "journal"} == {k: v for k, v in before.items() if k != "journal"}


@pytest.mark.parametrize("call, n_ranks", [("end", 1), ("norm", 2), *full(("end", 2), ("norm", 1))])
def test_call_that_waits_for_an_open_window(zerod, call, n_ranks):
    """All ranks wait for a window that only they could end, so no rank is late. This is reported as a stall too."""
    daemon = zerod({"world": {"size": n_ranks}, "diagnostics": {"stall_warning": "100ms", "stall_timeout": "400ms"}})
    ranks = trainers(daemon)
    all_do(ranks, "window")
    ranks[0].ok("write 0 7.0")
    for puppet in ranks if call == "end" else []:
        puppet.ok("begin")
        puppet.ok("pushes")
    for answer in all_do(ranks, call):
        assert answer.r == ABORTED and "E1303 stalled" in answer.text, answer
        assert "on             the end of the write window that is open" in answer.text, answer.text
    steps(ranks)
    undisturbed = trainers(zerod({"world": {"size": n_ranks}}))
    steps(undisturbed)
    assert state(ranks) == state(undisturbed)


def test_norm_before_the_step_is_asked_for(zerod):
    """The norm does not depend on the loss scale of an earlier step."""
    daemon = zerod({"world": {"size": 1}})
    puppet = trainers(daemon)[0]
    norms = []
    for scale in (1, 1024):
        puppet.ok("begin")
        puppet.ok("pushes")
        puppet.ok("end")
        norms.append(puppet.ok("norm").norm)
        puppet.ok(f"step scale={scale * 1024}")
    assert 0.5 < norms[1] / norms[0] < 2, norms


@pytest.mark.parametrize("config", [{"gradient_accumulation_steps": 1}, {"diagnostics": {"static_graph": True}}],
                         ids=["count", "static-graph"])
def test_held_step_is_cleared(zerod, config):
    """A refused step succeeds after it is cleared and asked for again."""
    daemon = zerod({"world": {"size": 1}} | config)
    puppet = trainers(daemon)[0]
    puppet.ok("steps 1")
    for words in (["pushes", "pushes"] if "gradient_accumulation_steps" in config else ["pushes but=0"]):
        puppet.ok("begin")
        puppet.ok(words)
        puppet.ok("end")
    assert puppet("step").r == REFUSED
    puppet.ok("clear")
    assert puppet.ok("step").applied


def test_refused_duplicate_is_kept_once(zerod):
    daemon = zerod({"world": {"size": 1}, "diagnostics": {"on_duplicate": "abort_step"}})
    puppet = trainers(daemon)[0]
    puppet.ok("begin")
    puppet.ok("push 0")
    puppet.ok("push 0")
    assert puppet("end").r == 3
    assert [d["code"] for d in diagnostics(daemon)].count("E1001") == 1


def test_forming_is_given_up_while_a_rank_declares(zerod):
    """Forming times out while a rank declares. Only the waiting ranks are refused; the declaring one continues."""
    daemon = zerod({"diagnostics": {"stall_timeout": "1s", "stall_warning": "500ms"}})
    slow = Puppet(daemon, 1, env={"ZEROD_FAILPOINT": "Form.send:stop"}).attach()
    quick = Puppet(daemon, 0).attach()
    slow.tell("form")
    answer = quick("form")
    assert answer.r == REFUSED and answer.error["code"] == 1303, answer
    quick.tell("form")
    slow.popen.send_signal(signal.SIGCONT)
    assert slow.answer().r == 0
    assert quick.answer().r == 0


def test_initial_weights_come_late(zerod):
    """Rank 0 dies before it sends the initial weights, and the other rank gets an error. Its next attempt succeeds."""
    daemon = zerod({"diagnostics": {"stall_timeout": "1s", "stall_warning": "500ms"}})
    first = Puppet(daemon, 0, env={"ZEROD_FAILPOINT": "formed:kill"}).attach()
    other = Puppet(daemon, 1).attach()
    first.tell("form")
    answer = other("form")
    assert answer.r == REFUSED and answer.error["code"] == 1303, answer
    successor = Puppet(daemon, 0).attach()
    form([successor, other])
    steps([successor, other])


def test_sent_segv(zerod):
    """The handler that explains writes to weights does not hide a SIGSEGV sent by another process."""
    daemon = zerod({"world": {"size": 1}})
    puppet = trainers(daemon)[0]
    puppet.popen.send_signal(signal.SIGSEGV)
    assert puppet.popen.wait(20 * daemon.patience) in (-signal.SIGSEGV, 99)  # 99: a sanitizer's own handler
    puppet.err_path.write_text("")
