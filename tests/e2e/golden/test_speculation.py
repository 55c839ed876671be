# SPDX-License-Identifier: Apache-2.0
"""
zero_optimization.speculative_update: chunks are updated before the step is decided. All numbers are those of a run
without it, whatever happens between the backward and the step.
"""

import time

import pytest

from conftest import wait_for
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
