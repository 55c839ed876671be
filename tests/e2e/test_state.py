# SPDX-License-Identifier: Apache-2.0
"""
Optimizer state is read from one daemon and written into another. The moved run continues with the bits of an unmoved
one. Uncommitted writes leave no trace, whatever ends them.
"""

import errno
import signal
from pathlib import Path

import pytest

from conftest import merge, wait_for
from puppet import FROZEN, N_PARAMS, REFUSED, RESUMED, Puppet, all_do, form, memory, state, steps, trainers
from tiers import each_once

pytestmark = [pytest.mark.quick, pytest.mark.threads]

BEFORE, AFTER = 3, 3
EMPTY, BIG = 5, 7  # of tests/programs/puppet-model.h
OPTIMIZERS = {  # the configuration, and its states as digits, enum zerod_state
    "AdamW": ({}, "0124"),
    "Adam-L2": ({"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}}, "0124"),
    "SGD": ({"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "betas": None}}, "014"),
    "Adagrad": ({"type": "Adagrad", "params": {"lr": 1e-2, "lr_decay": 0.1, "betas": None}}, "024"),
    "Lion": ({"type": "Lion", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}}, "014"),
}


def configure(world=2, stage=1, optimizer="AdamW", bucket=2000, **more):
    return merge({"world": {"size": world}, "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket},
                  "optimizer": OPTIMIZERS[optimizer][0]}, more)


def load(ranks, path, kinds):
    """All ranks execute the same calls. Only rank 0's values count; the other ranks write other values."""
    all_do(ranks, "window")
    ranks[0].tell("load", path, f"kinds={kinds}")
    for p in ranks[1:]:
        p.tell("put", BIG, 0, 7.5)
    assert [p.answer().r for p in ranks] == [0] * len(ranks)
    assert [a.r for a in all_do(ranks, "commit")] == [0] * len(ranks)


@pytest.fixture
def saved(zerod, tmp_path):
    """saved(config, optimizer) -> a file with the state, the state's digest, and the digest AFTER steps later."""

    def run(config, optimizer="AdamW"):
        kinds = OPTIMIZERS[optimizer][1]
        ranks = trainers(zerod(config))
        steps(ranks, BEFORE)
        path = tmp_path / "state"
        ranks[0].ok("save", path, f"kinds={kinds}")
        then = state(ranks, kinds)
        steps(ranks, AFTER)
        return path, then, state(ranks, kinds)

    return run


# ---- from one daemon into another -----------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer, stages", each_once(tuple(OPTIMIZERS), ((1, 2), (2, 3), (3, 1))))
def test_moved(zerod, saved, optimizer, stages):
    """
    The state is moved into another stage and other buckets. The bits are the same at once, and after further steps.
    """
    before, after = stages
    kinds = OPTIMIZERS[optimizer][1]
    path, then, final = saved(configure(stage=before, optimizer=optimizer), optimizer)
    weights = "private" if after == 2 else "shared"
    ranks = trainers(zerod(configure(stage=after, optimizer=optimizer, bucket=700, weights=weights)))
    all_do(ranks, "gather", BIG)  # gathered parameters show the new weights
    assert state(ranks, kinds) != then
    load(ranks, path, kinds)
    all_do(ranks, "release", BIG)
    assert state(ranks, kinds) == then
    assert ranks[0].ok("read", EMPTY, 4).value == BEFORE
    steps(ranks, AFTER, f"from={BEFORE}")
    assert state(ranks, kinds) == final


@pytest.mark.parametrize("world", [1, 3])
def test_other_world(zerod, saved, world):
    """The state is moved to more or fewer ranks. Later bits are those of that number of ranks, in any stage."""
    path, then, _ = saved(configure(stage=2))
    finals = set()
    for stage in (1, 2, 3):
        ranks = trainers(zerod(configure(world, stage)))
        load(ranks, path, "0124")
        assert state(ranks, "0124") == then
        steps(ranks, AFTER, f"from={BEFORE}")
        finals.add(state(ranks, "0124"))
    assert len(finals) == 1


def test_moved_by_halves(zerod, saved):
    """The state may be moved in parts, with a window for each."""
    path, then, final = saved(configure(stage=1))
    ranks = trainers(zerod(configure(stage=3)))
    load(ranks, path, "0124")
    for kinds in ("4", "20", "1"):
        ranks[0].ok("save", f"{path}-{kinds}", f"kinds={kinds}")
    ranks = trainers(zerod(configure(stage=3)))
    steps(ranks)
    for kinds in ("4", "20", "1"):
        load(ranks, f"{path}-{kinds}", kinds)
    assert state(ranks, "0124") == then
    ranks[0].tell("steps", AFTER, f"from={BEFORE - 1}")
    ranks[1].tell("steps", AFTER, f"from={BEFORE - 1}")
    assert [p.answer().r for p in ranks] == [0, 0]
    assert state(ranks, "0124") == final


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_not_written_stays(zerod, stage):
    """Unwritten state stays unchanged. Written are one moment, one count, and a master weight beside weights."""
    ranks = trainers(zerod(configure(stage=stage)))
    steps(ranks, 2)
    before = {(i, kind): ranks[1].ok("read", i, kind).value for i in (0, 1, 3, BIG) for kind in (0, 1, 2, 4)}
    all_do(ranks, "window")
    ranks[0].ok("put", BIG, 1, 0.125)
    ranks[0].ok("put", BIG, 4, 9)
    ranks[0].ok("write", 3, 5.0)  # bf16
    ranks[0].ok("put", 3, 0, 1.001)  # rounds to 1; the master weight wins, in its own precision
    ranks[0].ok("write", 1, 4.0)
    assert ranks[0].ok("read", BIG, 4).value == 2, "not committed yet"
    assert [a.r for a in all_do(ranks, "commit")] == [0, 0]
    now = {(i, kind): ranks[1].ok("read", i, kind).value for i, kind in before}
    assert now.pop((3, 0)) == pytest.approx(1.001) and now.pop((BIG, 1)) == 0.125
    assert now.pop((BIG, 4)) == 9 and now.pop((1, 0)) == 4.0
    assert now == {key: before[key] for key in now}
    steps(ranks)
    assert ranks[0].ok("read", BIG, 4).value == 10


# ---- nothing of it ----------------------------------------------------------------------------------------------


def is_unchanged(daemon, before, journal):
    after = memory(daemon)
    return all(after[key] == before[key] for key in before if key != "journal" or journal)


@pytest.mark.parametrize("stage, how", each_once((1, 2, 3), ("forget", "abort")))
def test_forgotten(zerod, saved, stage, how):
    path, _, final = saved(configure(stage=stage))
    daemon = zerod(configure(stage=stage))
    ranks = trainers(daemon)
    steps(ranks, BEFORE)
    before, digest = memory(daemon), state(ranks, "0124")
    all_do(ranks, "window")
    ranks[0].ok("load", path)
    for kind in (0, 1, 2, 4):
        ranks[0].ok("put", BIG, kind, 3)
    ranks[1].tell("commit")
    if how == "forget":
        ranks[0].ok("forget")
        assert ranks[1].answer().r == 0
    else:
        ranks[0].ok("abort because")
        assert ranks[1].answer().r == 3
    assert is_unchanged(daemon, before, journal=how == "abort")  # the journal counts an ended window
    assert state(ranks, "0124") == digest
    steps(ranks, AFTER)
    assert state(ranks, "0124") == final


@pytest.mark.parametrize("where, stage", each_once(
    ("WriteState.send", "WriteState.wait", "WriteState.answered", "state-mapped"), (1, 3)))
def test_killed_in_the_middle(zerod, saved, stage, where):
    """Rank 0 dies after it has written half of the state. Its successor writes all of it again."""
    path, then, final = saved(configure(stage=2))
    daemon = zerod(configure(stage=stage))
    ranks = [Puppet(daemon, 0, env={"ZEROD_FAILPOINT": f"{where}:kill@8"}).attach(), Puppet(daemon, 1).attach()]
    form(ranks)
    steps(ranks)
    before = memory(daemon)
    all_do(ranks, "window")
    ranks[1].tell("commit")
    ranks[0].tell("load", path)
    assert ranks[0].popen.wait(20 * daemon.patience) == -9
    wait_for("its rank is free", lambda: not daemon.json("ranks")[0]["attached"])
    assert memory(daemon) == before
    ranks[0] = Puppet(daemon, 0).attach()
    assert ranks[0]("form").r == RESUMED
    ranks[0].ok("window")
    assert memory(daemon) == before
    ranks[0].ok("load", path)
    ranks[0].ok("commit")
    assert ranks[1].answer().r == 0
    assert state(ranks, "0124") == then
    for p in ranks:
        p.tell("steps", AFTER, f"from={BEFORE - 1}")
    assert [p.answer().r for p in ranks] == [0, 0]
    assert state(ranks, "0124") == final


def test_successor_writes_nothing(zerod, saved):
    """The predecessor's writes are dropped, not committed with the successor's window."""
    path, _, _ = saved(configure())
    daemon = zerod(configure(stage=2))
    ranks = trainers(daemon)
    steps(ranks)
    before = memory(daemon)
    all_do(ranks, "window")
    ranks[0].ok("load", path)
    ranks[1].tell("commit")
    ranks[0].kill()
    wait_for("its rank is free", lambda: not daemon.json("ranks")[0]["attached"])
    ranks[0] = Puppet(daemon, 0).attach()
    assert ranks[0]("form").r == RESUMED
    ranks[0].ok("window")
    ranks[0].ok("commit")
    assert ranks[1].answer().r == 0
    assert is_unchanged(daemon, before, journal=False)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_die_while_it_is_committed(zerod, saved, stage):
    """Ranks die after all have asked for the window's end. The daemon completes the commit without them."""
    path, then, _ = saved(configure())
    daemon = zerod(configure(stage=stage), env={"ZEROD_FAILPOINT": "rewrite:stop@3"})
    ranks = trainers(daemon)
    all_do(ranks, "window")
    ranks[0].ok("load", path)
    for p in ranks:
        p.tell("commit")
    stat = Path(f"/proc/{daemon.pid}/stat")
    wait_for("it is being committed", lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    for p in ranks:
        p.kill()
    daemon.signal(signal.SIGCONT)
    wait_for("both ranks are free", lambda: not any(r["attached"] for r in daemon.json("ranks")))
    ranks = [Puppet(daemon, r).attach() for r in range(2)]
    form(ranks)
    assert state(ranks, "0124") == then


def test_no_pages(zerod, saved):
    """
    The kernel has no pages for a write. The write is refused and not committed by mistake; the next attempt succeeds.
    """
    path, then, _ = saved(configure())
    daemon = zerod(configure(stage=2), env={"ZEROD_FAILPOINT": "writing:error@8"})
    ranks = trainers(daemon)
    steps(ranks)
    before = memory(daemon)
    all_do(ranks, "window")
    ranks[1].tell("commit")
    answer = ranks[0]("load", path)
    assert answer.r == REFUSED and answer.error["code"] == 1401, answer
    assert ranks[0]("commit").error == answer.error
    assert memory(daemon) == before
    ranks[0].ok("clear")
    ranks[0].ok("load", path)
    ranks[0].ok("commit")
    assert ranks[1].answer().r == 0
    assert state(ranks, "0124") == then


# ---- what is no state ---------------------------------------------------------------------------------------------


def test_wrong_arguments(zerod):
    """libzerod refuses wrong arguments equally on every rank, and the refusal does not persist."""
    ranks = trainers(zerod(configure()))
    all_do(ranks, "window")
    for p in ranks:
        for words in (f"put {N_PARAMS} 0 1", "put 0 3 1", "put 0 5 1", "put 0 4 1.5", "put 0 4 -1", "put 0 4 nan",
                      "put 0 4 1e300", "put 0 4 inf"):
            answer = p(words)
            assert answer.r == -errno.EINVAL, f"{words}: {answer}"
            assert "zerod_write_state" in answer.text
        p.ok("put 0 4", 2**53)
    all_do(ranks, "commit")
    assert ranks[1].ok("read 0 4").value == 2**53


def test_counts_are_read(zerod):
    """A pushed parameter has a step count; a frozen one has none."""
    ranks = trainers(zerod(configure()))
    steps(ranks, 2)
    for p in ranks:
        p.ok("begin")
        p.ok("pushes only=1")
    all_do(ranks, "end")
    for p in ranks:
        p.tell("step")
    for p in ranks:
        if p.answer().r == REFUSED:  # missing gradients of other parameters; the rank has reported them
            p.ok("clear")
            p.tell("step")
            p.answer()
    assert [ranks[0].ok("read", i, 4).value for i in (0, 1, EMPTY)] == [2, 3, 2]
    answer = ranks[0]("read", FROZEN, 4)
    assert answer.r == REFUSED and answer.error["code"] == 1403, answer


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_leaves_while_another_still_reads(zerod, stage):
    """client.h: reading state, and weights in stage 3, needs no other rank. A write window does (on_leave: stop)."""
    daemon = zerod(configure(stage=stage))
    ranks = trainers(daemon)
    steps(ranks, BEFORE)
    then = state(ranks)
    ranks[1].ok("leave")
    assert ranks[1].end() == 0
    assert ranks[0].ok("state").digest == then
    ranks[0].ok(f"gather {BIG}")
    ranks[0].ok(f"peek {BIG}")
    assert ranks[0]("window").r == REFUSED
