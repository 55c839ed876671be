# SPDX-License-Identifier: Apache-2.0
"""
zero_optimization.speculative_update: chunks are updated before the step is decided. All numbers are those of a run
without it, whatever happens between the backward and the step.
"""

import json
import re
import time

import pytest

from conftest import merge, wait_for
from puppet import RESUMED, Puppet, all_do, state, steps, trainers
from test_daemon_kills import kept  # noqa: F401  a fixture


def early(daemon):
    counters = daemon.status()["counters"]
    return counters["n_early_updates"], counters["n_early_updates_dropped"]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True, "bf16_optimizer_states": True}}])
def test_same(kept, stage, more):  # noqa: F811
    zero = {"stage": stage}
    on = kept({"zero_optimization": zero | {"speculative_update": True}, "gradient_clipping": 0, **more})
    off = kept({"zero_optimization": zero, "gradient_clipping": 0, **more})
    ranks, others = trainers(on), trainers(off)
    for step in range(6):
        steps(ranks)
        steps(others)
        assert state(ranks) == state(others), step
    assert early(on)[0] > 0 and early(off) == (0, 0)


def test_memory_only_without(zerod):
    """The job fits without spare places only, and they are asked for: the refusal names the setting."""
    config = {"world": {"size": 1}, "zero_optimization": {"stage": 2}}
    daemon = zerod(config)
    trainers(daemon)
    memory = daemon.status()["memory"]
    needed = memory["total"]["planned_bytes"] - memory["overflow"]["planned_bytes"]
    daemon = zerod(merge(merge(config, ON), {"limits": {"memory": needed + 4096}}))
    refused = Puppet(daemon).attach()("form")
    assert refused.error["code"] == 1401 and "set zero_optimization.speculative_update to auto" in refused.text, refused.text


def test_resize_and_windows(kept):  # noqa: F811
    """Values in spare places are those that windows, reads and another number of ranks see."""
    on = kept({"zero_optimization": {"stage": 2, "speculative_update": True}, "gradient_clipping": 0})
    off = kept({"zero_optimization": {"stage": 2}, "gradient_clipping": 0})
    found = []
    for daemon in (on, off):
        ranks = trainers(daemon)
        for n_steps in (3, 2):  # odd and even: values are in the second or the first places
            steps(ranks, n_steps)
            all_do(ranks, "window")
            ranks[0].ok("put", 0, 1, 5)
            ranks[0].ok("put", 7, 0, 3)
            all_do(ranks, "commit")
        steps(ranks)
        states = [state(ranks)]
        for rank in ranks:
            rank.kill()
        wait_for("no rank", lambda: daemon.status()["n_attached"] == 0)
        daemon.ctl("resize", "3")
        ranks = trainers(daemon, 3)
        states.append(state(ranks))
        steps(ranks, 2)
        found.append([*states, state(ranks)])
    assert found[0] == found[1]
    assert early(on)[0] > 0


def test_window_over_what_a_dead_rank_has_left(kept):  # noqa: F811
    """
    A rank dies when its gradients are in the sums, and chunks are updated early. Its successor writes moments in a window,
    and pushes the same gradients. The moments that count are those of the window.
    """
    found = []
    for early_too in (True, False):
        daemon = kept({"world": {"size": 1}, "gradient_clipping": 0,
                       "zero_optimization": {"stage": 2, "speculative_update": early_too}})
        ranks = trainers(daemon)
        steps(ranks, 2)
        ranks[0].ok("begin")
        ranks[0].ok("pushes")
        time.sleep(0.5)  # until all are summed, and updated early
        ranks[0].kill()
        ranks = [Puppet(daemon, 0).attach()]
        assert ranks[0]("form").r == RESUMED
        ranks[0].ok("window")
        for param in (0, 1, 2, 7):
            ranks[0].ok("put", param, 1, 5)
        ranks[0].ok("commit")
        steps(ranks)
        counters = daemon.status()["counters"]
        assert counters["n_pushes_redone"] > 0 and counters["n_aborts"] == 0, daemon.log()
        found.append(state(ranks))
    assert found[0] == found[1]


# ---- what status says ------------------------------------------------------------------------------------------


ON = {"zero_optimization": {"stage": 2, "speculative_update": True}, "gradient_clipping": 0}


def why(daemon):
    """Return: the obstacle's word and sentence, which `zerodctl status` shows too."""
    found = daemon.status()["early_updates"]
    shown = [line for line in daemon.ctl("status").stdout.splitlines() if line.startswith("early ")]
    assert (len(shown) == 1 and shown[0].endswith(f"; {found['why']}")) if found["why"] else not found["prevented_by"], shown
    return found["prevented_by"], found["why"]


def test_how_much_was_early(zerod):
    daemon = zerod(merge(ON, {"world": {"size": 1}}))
    ranks = trainers(daemon)
    steps(ranks)
    found = daemon.status()["early_updates"]  # no number of micro-batches was known before the first step
    assert (found["early_elems"], found["ratio"]) == (0, 0)
    assert why(daemon) == ("micro-batches", "the number of micro-batches was not known before the last step")

    def is_wholly_early():
        for word in ("begin", "pushes", "end"):
            ranks[0].ok(word)
        time.sleep(0.1)  # usually enough for all early updates
        ranks[0].ok("step")
        return daemon.status()["early_updates"]["ratio"] == 1

    wait_for("a step is updated early", is_wholly_early)
    status = daemon.status()
    assert status["early_updates"] == {"early_elems": status["trainable_elems"], "elems": status["trainable_elems"],
                                       "ratio": 1, "prevented_by": None, "why": None}
    assert re.search(r"^early +100 % of the last step's update was made in the backward \(.* of .* elements\); \d+ chunks accepted, 0 dropped$",
                     daemon.ctl("status").stdout, re.MULTILINE)
    assert re.search(r'^zerod_early_update_ratio\{.*\} 1$', daemon.ctl("metrics").stdout, re.MULTILINE)


WORKERS = ("workers", "the workers had no time for the rest before the step was decided")


def test_why_not_all(zerod):
    """Each early update takes 20 ms, and the step is decided at once."""
    daemon = zerod(merge(ON, {"world": {"size": 1}}), env={"ZEROD_FAILPOINT": "speculate:sleep:20@*"})
    ranks = trainers(daemon)
    steps(ranks, 3)
    assert why(daemon) == WORKERS
    assert daemon.status()["early_updates"]["ratio"] < 1


@pytest.mark.parametrize("zero, word, text", [
    ({"speculative_update": False}, "configured", "zero_optimization.speculative_update is false"),
    ({}, "host-models", "a model is in host memory, and zero_optimization.speculative_update is auto"),
    ({"stage": 3, "speculative_update": True}, "stage-3", "ranks gather their weights (stage 3)"),
])
def test_why_never(zerod, zero, word, text):
    daemon = zerod({"zero_optimization": zero})
    ranks = trainers(daemon)
    assert why(daemon) == (word, text)
    steps(ranks, 2)
    assert why(daemon) == (word, text) and daemon.status()["early_updates"]["ratio"] is None
    assert f'prevented_by="{word}"}} 1\n' in daemon.ctl("metrics").stdout


def test_why_not_on_several_nodes(zerod, build, monkeypatch):
    monkeypatch.setenv("ZEROD_NODES", "2")
    job = zerod(ON)
    ranks = [job.spawn(build.path("tests/kill-trainer"), "--steps", 3, rank=rank) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    for daemon in job.daemons:
        assert why(daemon) == ("several-nodes", "the job has several nodes")


def test_why_not_on_gpus(zerod, monkeypatch):
    monkeypatch.setenv("ZEROD_DEVICE", "cuda")
    daemon = zerod(ON)
    steps(trainers(daemon), 2)
    assert why(daemon) == ("gpu-job", "the state is on GPUs (device: cuda without offload_optimizer)")


def test_why_not_without_parameters(zerod):
    daemon = zerod(merge(ON, {"world": {"size": 1}}))
    trainers(daemon, declare=("declare", "first=1", "freeze=0"))
    assert why(daemon) == ("no-buckets", "no parameter is trained")


def test_why_not_yet_and_other_micro_batches(zerod):
    daemon = zerod(ON)
    assert why(daemon) == (None, None)  # the job is not formed
    ranks = trainers(daemon)
    assert why(daemon) == ("micro-batches", "the number of micro-batches is known after the next step")
    steps(ranks, 3)
    assert why(daemon) in ((None, None), WORKERS)
    steps(ranks, 1, "micro=2")
    assert why(daemon) == ("micro-batches", "the last step had 2 micro-batches, and 1 were expected")
    steps(ranks, 1, "micro=2")
    assert why(daemon)[0] in (None, "dropped", "workers")  # those of the step before, if this one was decided very early


def test_why_paused(zerod):
    """Early updates of clipped steps are dropped. After three such steps, some steps make none."""
    daemon = zerod(merge(ON, {"world": {"size": 1}, "gradient_clipping": 1e-6}))
    ranks, words = trainers(daemon), []
    for _ in range(40):  # a step that is decided very early has nothing to drop
        steps(ranks)
        word, text = why(daemon)
        words += [word] if words[-1:] != [word] else []
        if word == "paused":
            break
    assert words[-2:] == ["dropped", "paused"], words
    until = re.fullmatch(r"paused until step (\d+), because 3 steps dropped their early updates: they were clipped, or learning rates "
                         "or micro-batches had changed", text)
    step, before = daemon.status()["step"], early(daemon)
    assert step + 8 == int(until[1])
    steps(ranks, 7)
    assert why(daemon) == (word, text) and early(daemon) == before
    steps(ranks)
    assert why(daemon) == ("dropped", "the last early updates were dropped: the step was clipped, or its learning rates had changed")


def test_why_not_after_another_daemon(kept):  # noqa: F811
    """A run that began without spare places gets none from the next daemon, whatever its configuration says."""
    daemon = kept(merge(ON, {"zero_optimization": {"speculative_update": False}}))
    ranks = trainers(daemon)
    steps(ranks)
    daemon.popen.kill()
    daemon.popen.wait()
    daemon.config_path.write_text(json.dumps(merge(json.loads(daemon.config_path.read_text()), ON)))
    daemon.start_again()
    steps(ranks)
    n = daemon.status()["n_buckets"]
    assert why(daemon) == ("adopted", f"the run began with spare places for 0 of {n} buckets")
