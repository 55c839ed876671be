# SPDX-License-Identifier: Apache-2.0
"""
ZEROD_OVERLAP_UPDATE: zerod_step() returns when the step is decided, and zerod_wait() when a parameter's new weights are
there. Such runs have the same bits as other runs. test_daemon_kills.py also kills daemons in such runs.
"""

import pytest

from daemon_kills import Plan, one_run
import kills
from tiers import full

N_STEPS = 20  # one is skipped; every eighth begins with a window
SLOW = {"ZEROD_FAILPOINT": "update:sleep:3@*"}  # each chunk takes 3 ms longer


@pytest.mark.threads
@pytest.mark.parametrize("config, env", [
    ({"zero_optimization": {"stage": 1}}, SLOW),
    ({"zero_optimization": {"stage": 2}}, {}),
    *full(({"zero_optimization": {"stage": 3, "stage3_on_one_node": "gathered"}}, SLOW)),
    *full(({"weights": "private"}, SLOW)),
], ids=["late", "fast", "gathered", "private"])
def test_same_bits(zerod, build, tmp_path, config, env):
    """Ranks hash each parameter after zerod_wait(), or after their backward. The bits are those without overlap."""
    reference = kills.References(build, tmp_path).get(2, False, N_STEPS)
    daemon = zerod(config | {"world": {"size": 2}, "gradient_clipping": 1.0}, env=env)
    kills.judge(kills.train(daemon, [[], []], ["--overlap"], N_STEPS), daemon, reference)


@pytest.mark.parametrize("n_nodes, device", [(2, ""), *full((1, "cuda")), *full((1, "cuda-offload")), *full((2, "cuda"))])
def test_where_no_page_is(build, tmp_path, n_nodes, device):
    """On several nodes and on GPUs, a wait for one parameter waits for the whole step."""
    plan = Plan(2, n_nodes=n_nodes, device=device, only=())
    plan.overlap, plan.victims, plan.engine_kills = True, [[] for _ in plan.victims], []
    plan.lives = [[] for _ in plan.lives]
    assert one_run(build, kills.References(build, tmp_path), tmp_path, plan) == 0
