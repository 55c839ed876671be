# SPDX-License-Identifier: Apache-2.0
"""Pushes that say that more follow (ZEROD_PUSH_MORE): several travel at once, and nothing else changes."""

import pytest

from conftest import wait_for
from puppet import N_PARAMS, REFUSED, Puppet, form, state, trainers

pytestmark = [pytest.mark.quick, pytest.mark.threads]

MORE = 1 << 4  # enum zerod_push_flags
AT_ONCE = 8


def admitted(daemon):
    return daemon.status()["counters"]["n_pushes_admitted"]


def one_rank(zerod, n_params, n_elems):
    daemon = zerod({"world": {"size": 1}})
    puppet = Puppet(daemon).attach(declare=("many", n_params, f"elems={n_elems}"))
    form([puppet])
    puppet.ok("begin")
    return daemon, puppet


def test_several_are_sent_at_once(zerod):
    daemon, puppet = one_rank(zerod, 3 * AT_ONCE, 10)
    for i in range(AT_ONCE - 1):
        puppet.ok("push", i, f"flags={MORE}")
    assert admitted(daemon) == 0
    puppet.ok("push", AT_ONCE - 1, f"flags={MORE}")
    wait_for("8 pushes", lambda: admitted(daemon) == AT_ONCE)
    puppet.ok("push", AT_ONCE, f"flags={MORE}")
    puppet.ok("push", AT_ONCE + 1)
    wait_for("one that waited, and one that does not wait", lambda: admitted(daemon) == AT_ONCE + 2)
    puppet.ok("push", AT_ONCE + 2, f"flags={MORE}")
    puppet.ok("flush")
    wait_for("what was flushed", lambda: admitted(daemon) == AT_ONCE + 3)
    puppet.ok("push", AT_ONCE + 3, f"flags={MORE}")
    puppet.ok("end")
    assert admitted(daemon) == AT_ONCE + 4
    puppet.ok("flush")


def test_large_ones_do_not_wait(zerod):
    daemon, puppet = one_rank(zerod, 4, 10000)
    puppet.ok("push", 0, f"flags={MORE}")
    assert admitted(daemon) == 0
    puppet.ok("push", 1, f"flags={MORE}")
    wait_for("80 kB", lambda: admitted(daemon) == 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_same_is_trained(zerod, stage):
    digests = set()
    for flags in (0, MORE):
        ranks = trainers(zerod({"zero_optimization": {"stage": stage}}))
        for _ in range(3):
            for p in ranks:
                p.ok("begin")
                p.ok("pushes", f"flags={flags}")
                p.tell("end")
            assert [p.answer().r for p in ranks] == [0, 0]
            for p in ranks:
                p.tell("step")
            assert [p.answer().r for p in ranks] == [0, 0]
        digests.add(state(ranks))
    assert len(digests) == 1


def test_a_duplicate_behind_them(zerod):
    """A duplicate behind queued pushes: those are sent first, and the error names both call sites."""
    puppet = trainers(zerod({"world": {"size": 1}}))[0]
    puppet.ok("begin")
    for i in reversed(range(N_PARAMS - 2)):
        puppet.ok("push", i, f"flags={MORE}", f"site=model.py:{i}") if i != 8 else None
    puppet.ok("push", 3, f"flags={MORE}", "site=model.py:99")
    answer = puppet("end")
    assert answer.r == REFUSED
    assert answer.error["code"] == 1001
    assert "model.py:3" in answer.text and "model.py:99" in answer.text


def test_after_leaving(zerod):
    puppet = trainers(zerod({"world": {"size": 1}}))[0]
    puppet.ok("leave")
    for call in ("begin", f"push 0 flags={MORE}"):
        answer = puppet(call)
        assert answer.r < 0 and "zerod_leave was called" in answer.text
