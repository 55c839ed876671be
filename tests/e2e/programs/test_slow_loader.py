# SPDX-License-Identifier: Apache-2.0
"""
A rank whose data loader is slow. status, metrics and the alert report it, with the numbers of a real job. They report
nothing when both loaders take equally long.
"""

import re
import time

import pytest
from conftest import wait_for
from test_alerts import PROMTOOL, firing
from test_metrics import value

LOADS = 0.08  # seconds, long enough that a busy machine does not make a rank slow
N_STEPS, BEGIN, END = 20, 4, 18


def train(seconds):
    import torch

    import zerod

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    opt = zerod.Optimizer(model)
    for step in zerod.steps(opt, N_STEPS):
        with step:
            time.sleep(seconds)
            model(torch.randn(8, 16)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    opt.close()


def look(daemon, step):
    wait_for(f"step {step}", lambda: daemon.status()["step"] >= step)
    return time.monotonic(), daemon.ctl("metrics").stdout


@pytest.mark.parametrize("slow", [True, False])
def test_slow_loader(zerod, start, tmp_path, slow):
    daemon = zerod({"zero_optimization": {"stage": 2}})
    ranks = [start(daemon, train, rank=rank, seconds=LOADS * (4 if slow and rank == 1 else 1)) for rank in range(2)]
    (begin, before), (end, after) = look(daemon, BEGIN), look(daemon, END)
    status, shown = daemon.status(), daemon.ctl("status").stdout
    for rank in ranks:
        rank.result()

    def share(name, **labels):
        try:
            earlier = value(before, name, **labels)
        except KeyError:  # a wait that began after the list was read
            earlier = 0
        return (value(after, name, **labels) - earlier) / (end - begin)

    behind = [share("zerod_rank_behind_seconds_total", rank=str(rank)) for rank in range(2)]
    assert behind[0] < 0.2 and (behind[1] > 0.6 if slow else behind[1] < 0.2), behind
    if slow:
        waits = share("zerod_rank_wait_seconds_total", rank="0", state="boundary", **{"for": "ranks"})
        assert 0.6 < waits < 1 and abs(share("zerod_step_seconds_total", phase="wait") - waits) < 0.1
        assert status["time"]["wait"]["last_ns"] > 0.6 * status["last_step_ns"]
        assert status["slowest_rank"]["rank"] == 1 and status["slowest_rank"]["behind_ns"] > 2 * LOADS * 1e9
        assert re.search(r"\ntime +waiting for ranks \d+ ms \([6-9]\d %\)", shown), shown
    if PROMTOOL is None:
        pytest.skip("there is no promtool (scripts/test fetches it): the alert was not tried")
    slopes = {f'zerod_rank_behind_seconds_total{{JOB,rank="{rank}"}}': f"+{60 * behind[rank]:.3f}" for rank in range(2)}
    assert firing(tmp_path, slopes, 50) == ({"ZerodSlowRank"} if slow else set())
