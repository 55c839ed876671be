# SPDX-License-Identifier: Apache-2.0
"""
Pushes with ZEROD_PUSH_MORE, which announces further pushes: several are sent in one message, and nothing else changes.
"""

import signal

import pytest

from conftest import wait_for
from keeper import KeptDaemon
from puppet import FROZEN, N_PARAMS, REFUSED, Puppet, form, state, trainers

pytestmark = [pytest.mark.quick, pytest.mark.threads]

MORE = 1 << 4  # enum zerod_push_flags
AT_ONCE = 64


def admitted(daemon):
    return daemon.status()["counters"]["n_pushes_admitted"]


def one_rank(zerod, n_params, n_elems, env=None, config=None):
    daemon = zerod({"world": {"size": 1}, **(config or {})})
    puppet = Puppet(daemon, env=env).attach(declare=("many", n_params, f"elems={n_elems}"))
    form([puppet])
    puppet.ok("begin")
    return daemon, puppet


def test_several_are_sent_at_once(zerod):
    daemon, puppet = one_rank(zerod, 3 * AT_ONCE, 10)
    for i in range(AT_ONCE - 1):
        puppet.ok("push", i, f"flags={MORE}")
    assert admitted(daemon) == 0
    puppet.ok("push", AT_ONCE - 1, f"flags={MORE}")
    wait_for("64 pushes", lambda: admitted(daemon) == AT_ONCE)
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


def kills_at(message, n):
    return {"ZEROD_FAILPOINT": f"{message}.send:kill@{n}"}


BUCKETS = {"zero_optimization": {"stage": 2, "reduce_bucket_size": AT_ONCE * 64}}  # 64 parameters in each bucket


def test_in_one_message(zerod):
    """Pushes of one bucket are sent in one message, and each counts."""
    daemon, puppet = one_rank(zerod, 2 * AT_ONCE, 64, env=kills_at("Pushes", 2), config=BUCKETS)
    for i in range(AT_ONCE):
        puppet.ok("push", i, f"flags={MORE}")
    wait_for("all", lambda: admitted(daemon) == AT_ONCE)
    for i in range(AT_ONCE, 2 * AT_ONCE):
        puppet.tell("push", i, f"flags={MORE}")
    assert puppet.popen.wait(20 * puppet.patience) == -signal.SIGKILL
    assert admitted(daemon) == AT_ONCE


def test_buckets_in_turn(zerod):
    """Pushes alternate between two buckets, as with and without weight decay. There is one message for each bucket."""
    daemon, puppet = one_rank(zerod, 2 * AT_ONCE, 64, env=kills_at("Pushes", 3), config=BUCKETS)
    for i in range(AT_ONCE // 2):
        puppet.ok("push", i, f"flags={MORE}")
        puppet.ok("push", i + AT_ONCE, f"flags={MORE}")
    wait_for("two messages", lambda: admitted(daemon) == AT_ONCE)
    assert puppet.popen.poll() is None
    puppet.ok("push", AT_ONCE - 1, f"flags={MORE}")
    puppet.ok("push", AT_ONCE - 2, f"flags={MORE}")
    puppet.tell("flush")
    assert puppet.popen.wait(20 * puppet.patience) == -signal.SIGKILL


def test_many_buckets_in_turn(zerod):
    """There are more buckets than waiting messages are allowed. Earlier messages are sent to make room."""
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 20}}
    daemon, puppet = one_rank(zerod, 40, 10, config=config)
    for i in (*range(0, 40, 2), *range(1, 40, 2)):
        puppet.ok("push", i, f"flags={MORE}")
    assert 0 < admitted(daemon) < 40
    puppet.ok("end")
    assert admitted(daemon) == 40


def test_evidence_keeps_them_apart(zerod):
    """Pushes into one slot from different call sites are not sent in one message, so that a text can name each site."""
    _, puppet = one_rank(zerod, 4, 10)
    for i in range(4):
        puppet.ok("push", i, f"flags={MORE}", f"site=model.py:{10 + i % 2}")  # a new site sends the waiting pushes
    puppet.ok("push", 2, f"flags={MORE}", "site=model.py:99")
    answer = puppet("end")
    assert answer.r == REFUSED
    assert "model.py:10" in answer.text and "model.py:99" in answer.text and "model.py:11" not in answer.text


@pytest.mark.parametrize("point", ["Pushes.log", "Pushes.judged"])
def test_daemon_dies_at_a_message(build, tmp_path, point):
    """A daemon dies at such a message. The next daemon has each push of it once."""
    states = set()
    for plan in ([None], [f"{point}:kill@1", None]):
        folder = tmp_path / str(len(plan))
        folder.mkdir()
        daemon = KeptDaemon(build, folder, {"world": {"size": 1}}, plan=plan)
        try:
            puppet = trainers(daemon)[0]
            for _ in range(2):
                puppet.ok("begin")
                for i in reversed(range(N_PARAMS)):
                    puppet.ok("push", i, f"flags={MORE}") if i != FROZEN else None
                puppet.tell("end")
                wait_for("an answer", lambda: not daemon.tend() and puppet.has_answered())
                assert puppet.answer().r == 0
                puppet.ok("step")
            states.add(state([puppet]))
            assert len(daemon.lives) == len(plan)
        finally:
            puppet.kill()
            daemon.kill()
    assert len(states) == 1


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
    """A duplicate follows queued pushes. The queued pushes are sent first, and the error names both call sites."""
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


def test_passes_stay_in_order(zerod):
    """A parameter's second gradient is sent after the first one, however the pushes are combined."""
    config = BUCKETS | {"diagnostics": {"on_duplicate": "accumulate"}}
    daemon, puppet = one_rank(zerod, AT_ONCE, 64, config=config)
    puppet.ok("push", 1, f"flags={MORE}")
    puppet.ok("flush")
    for param in (1, 0, 0, *range(2, AT_ONCE)):
        puppet.ok("push", param, f"flags={MORE}")
    puppet.ok("end")
    counters = daemon.status()["counters"]
    assert counters["n_pushes_accumulated"] == 2, counters
