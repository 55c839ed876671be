# SPDX-License-Identifier: Apache-2.0
"""
Jobs on the GPUs of several nodes: a daemon for each node on this machine's loopback, with the engine over the stand-ins
of tests/sim. Whatever dies, the bits must be those of one node in host memory.
"""

import contextlib
import json
import os
import random
import re
import signal
import time

import pytest

import gpu_kinds
from conftest import wait_for
from golden_bits import golden_run, make_case, read_results
from kills import STATES, References, finish, judge, results, start, train
from node_faults import engines
from nodes import Nodes
from puppet import REFUSED, Puppet, all_do
from golden_jobs import check_rank, make_config
from tiers import each_once, full, pairwise

pytestmark = pytest.mark.threads

SHORT = 24
CUDA = {"device": "cuda", "collective": "nccl", "deterministic": True}


# ---- bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.plenty
@pytest.mark.parametrize("offload, stage, ranks", pairwise(("none", "cpu"), (1, 2, 3), ((1, 1), (2, 1), (2, 2), (1, 2, 1))))
def test_bits(zerod, build, tmp_path, offload, stage, ranks):
    case = make_case(sum(ranks), "AdamW")
    config = make_config(case, stage=stage, bucket_elems=500, zero={"offload_optimizer": {"device": offload}}, **CUDA)
    nodes = Nodes(zerod, tmp_path, ranks, config, gpu_kinds.of_daemon(build))
    (tmp_path / "case.json").write_text(json.dumps(case))
    (tmp_path / "how.json").write_text(json.dumps({"order": "random", "seed": 1}))
    processes = [nodes.spawn(build.path("tests/golden-client"), tmp_path / "case.json", tmp_path / "how.json", rank,
                             tmp_path / f"rank{rank}", rank=rank) for rank in range(sum(ranks))]
    nodes.wait(processes, 90 * build.patience)
    steps = golden_run(case)
    for rank in range(sum(ranks)):
        check_rank(case, steps, read_results(tmp_path / f"rank{rank}"))


# ---- engines that end ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def references(build, tmp_path_factory):
    if not build.options.get("failpoints"):
        pytest.skip("a build without failpoints: meson setup -Dfailpoints=true")
    return References(build, tmp_path_factory.mktemp("references"))


@pytest.fixture
def cluster(zerod, build, tmp_path):
    """
    cluster(ranks, stage=2, offload="none", sim={node: ZEROD_SIM items of its GPUs}, more=[{variable: value} of each
    node], **config) -> the daemons of a job on the GPUs of nodes. offload="cpu" keeps master weights and moments in
    host memory.
    """

    def begin(ranks, stage=2, offload="none", sim=None, more=None, **config):
        ranks = gpu_kinds.spread(ranks)
        env = [gpu_kinds.of_daemon(build, *(sim or {}).get(node, ())) | (more[node] if more else {}) for node in range(len(ranks))]
        zero = {"stage": stage, "reduce_bucket_size": 2000, "offload_optimizer": {"device": offload}}
        return Nodes(zerod, tmp_path, ranks, {"zero_optimization": zero, "gradient_clipping": 1.0, **CUDA, **config}, env)

    return begin


def said(nodes, code):
    return sum(daemon.log().count(f"{code} ") for daemon in nodes.daemons)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks, stage, offload, state", [((2, 1), 3, "cpu", "24 bits"), ((1, 2), 2, "none", "24 bits"), *full(
    ((1, 1), 2, "none", "stochastic"), ((1, 1), 3, "none", "8 bits"), ((1, 2), 3, "none", "24 bits"),
    ((2, 1), 3, "cpu", "fp32"), ((1, 1, 1), 2, "none", "fp32"), ((1, 1), 1, "none", "fp32"), ((2, 1), 2, "none", "fp32"), ((1, 1), 3, "none", "fp32"),
    ((1, 2), 3, "none", "fp32"), ((1, 2), 3, "none", "bf16 moments"), ((1, 1), 2, "cpu", "fp32"), ((1, 2), 1, "cpu", "fp32"))])
def test_undisturbed(cluster, references, ranks, stage, offload, state):
    """An undisturbed run has the reference's bits. It includes write windows, norms and reads of state."""
    nodes = cluster(ranks, stage, offload, **STATES[state])
    judge(train(nodes, [[]] * sum(ranks), n_steps=SHORT), nodes, references.get(sum(ranks), n_steps=SHORT, state=state))
    assert said(nodes, "E1502") == 0


@pytest.mark.gpu
def test_sums_of_nccl(cluster):
    """NCCL sums in its own order, so the bits differ from the reference, but all ranks have the same ones."""
    nodes = cluster((2, 1), deterministic=False)
    found = results(train(nodes, [[]] * 3, n_steps=8))
    assert all(len(found[word, step]) == 1 for word in ("weights", "norm") for step in range(8)), nodes.logs()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks, stage, offload, seed", [((1, 2), 3, "cpu", 7), *full(
    ((1, 1, 1), 2, "none", 3), ((1, 1), 2, "none", 1), ((2, 1), 1, "none", 2), ((2, 1), 2, "cpu", 4),
    ((1, 1), 3, "none", 5), ((2, 1), 3, "none", 6))])
def test_engines_killed(cluster, references, ranks, stage, offload, seed):
    """Engines of both nodes are killed at any moment. The run keeps its bits."""
    nodes = cluster(ranks, stage, offload)
    lives, rng, n_killed = start(nodes, [[]] * sum(ranks), n_steps=SHORT), random.Random(seed), 0
    while any([rank.tend() for rank in lives]):
        time.sleep(rng.uniform(0, 0.2))
        found = engines(rng.choice(nodes.daemons))
        if found and n_killed < 12 and nodes.daemons[0].status()["step"] > n_killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(found), signal.SIGKILL)
                n_killed += 1
    judge(lives, nodes, references.get(sum(ranks), n_steps=SHORT))
    assert n_killed >= 3, "it trained too fast to be disturbed"
    assert said(nodes, "E1502") > 0 and nodes.daemons[0].status()["counters"]["n_aborts"] == 0


@pytest.mark.parametrize("fault, reason", [
    ("ncclSend:async=ncclRemoteError@150", "NCCL"),
    ("cudaEventRecord:kill@900", "(killed by signal 9|.*connection closed by remote peer)"),
    *full(("cudaMemcpyAsync:async=cudaErrorIllegalAddress@700", "illegal memory")),
], ids=["nccl", "kill", "gpu"])
def test_engine_fails(cluster, references, fault, reason):
    """
    Every engine of one node fails in this way after some time, and all nodes start new engines. The node's daemon logs
    the first reason. If the other node times out before it gets this reason, its log says that a connection was closed.
    """
    nodes = cluster((1, 2), sim={1: [fault]})
    judge(train(nodes, [[]] * 3, n_steps=SHORT, timeout=120), nodes, references.get(3, n_steps=SHORT))
    for daemon in nodes.daemons:
        assert re.search(rf"cause +on node \d \(.*\) the engine of the GPUs .*{reason}", daemon.log()), nodes.logs()


@pytest.mark.full
def test_engine_hangs(cluster, references):
    """A hanging engine is replaced when an order misses its deadline: ten seconds in this test, not a minute."""
    nodes = cluster((1, 1), sim={1: ["sim_launch:hang@300"]}, more=[{"ZEROD_FAILPOINT": "others:error@*"}] * 2)
    judge(train(nodes, [[]] * 2, n_steps=8, timeout=300), nodes, references.get(2, n_steps=8))
    assert re.search(r"on node \d .* took more than \d+ ms", nodes.daemons[0].log()), nodes.logs()


# ---- an engine that never begins -------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [0, 1])
def test_not_formed(cluster, node):
    """If one node's engine cannot start, all ranks get an error, nothing stays allocated, and a retry is possible."""
    nodes = cluster((1, 1), sim={node: ["cuMemCreate:error=CUDA_ERROR_OUT_OF_MEMORY@2"]})
    ranks = [Puppet(daemon, rank, env={"LOCAL_RANK": 0}).attach() for rank, daemon in enumerate(nodes.daemons)]
    for _ in range(2):
        for answer in all_do(ranks, "form"):
            assert answer.r == REFUSED and answer["error"]["code"] == 1502, answer
            assert "are needed (cuMemCreate)" in answer.text, answer.text
        for daemon in nodes.daemons:
            wait_for(daemon.log, lambda d=daemon: not d.status()["formed"])
        for rank in ranks:
            rank.ok("clear")


# ---- trainers and daemons that die -----------------------------------------------------------------------------------


PLANS = {
    "mid-push": [f"Push.sent:kill@{37 + 50 * i}" for i in range(3)],
    "pushed": [f"EndBackward.wait:kill@{5 + i}" for i in range(3)],
    "waiting": [f"Step.wait:kill@{3 + i}" for i in range(3)],
    "window": ["WriteBegin.wait:kill@2", "WriteEnd.send:kill@1", "WriteEnd.wait:kill@2"],
}


@pytest.mark.gpu
@pytest.mark.plenty
@pytest.mark.parametrize("offload, stage, rank, kind", pairwise(("none", "cpu"), (2, 3), (0, 1, 2), tuple(PLANS)))
def test_trainer_killed(cluster, references, offload, stage, rank, kind):
    """Work that the GPU has not done at its trainer's death is never done. If a sum needs it, the step is aborted."""
    nodes = cluster((2, 1), stage, offload)
    plans = [[]] * 3
    plans[rank] = PLANS[kind]
    judge(train(nodes, plans, n_steps=SHORT, timeout=120), nodes, references.get(3, n_steps=SHORT),
          "E1302 step aborted.*differ")


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [*full("none"), "cpu"])
def test_ranks_of_both_nodes_killed(cluster, references, offload):
    """Both ranks have pushed what the other has not, and die. Their successors wait for it: the step begins again."""
    nodes = cluster((1, 1), zero_optimization={"stage": 2, "reduce_bucket_size": 1, "offload_optimizer": {"device": offload}})
    plans = [[["--at", "5.1.7:sleep=500", "--at", "5.1.7:die"]]] * 2
    judge(train(nodes, plans, n_steps=SHORT), nodes, references.get(2, n_steps=SHORT), "E1302 step aborted")
    assert any("E1302 rank lost, step aborted: " in daemon.log() for daemon in nodes.daemons), nodes.logs()


@pytest.mark.gpu
@pytest.mark.parametrize("stage, offload", each_once((2, 3), ("none", "cpu")))
def test_steps_are_aborted(cluster, references, stage, offload):
    """A rank aborts steps: in the middle of a backward, when it asks for the step, and in a window."""
    nodes = cluster((1, 1), stage, offload)
    plan = [["--at", "3.1.6:abort", "--at", "7.0.step:abort", "--at", "8.0.window:abort", "--at", "11.0.0:abort"]]
    judge(train(nodes, [plan, []], n_steps=SHORT), nodes, references.get(2, n_steps=SHORT),
          "E1302 warning, step begins again.*the test wants it so|no error")


@pytest.mark.parametrize("asked, stage", each_once((
    ("mirror:error@1",) * 2, ("mirror:error@2",) * 2, ("reserve:error@4",) * 2, ("reserve:error@12",) * 2,
    ("forming:sleep:500@*", "reserve:error@4")), (2, 3)))
def test_out_of_memory(cluster, references, asked, stage):
    """
    A node has no memory for a mirror of its GPUs' data, or for pages, perhaps while another node still reserves its
    own. The node's ranks get an error, and their next attempt succeeds.
    """
    nodes = cluster((1, 1), stage, more=[{"ZEROD_FAILPOINT": point} for point in asked])
    lives, refused = start(nodes, [[], []], n_steps=SHORT), []
    while any(life.last.poll() != 0 for life in lives):
        for life in lives:
            assert life.last.poll() in (None, 0, 3), nodes.logs()
            if life.last.poll() == 3:
                refused += [line for line in life.last.out().splitlines() if line.startswith("refused")]
                life.start()
        time.sleep(0.005)
    assert results(lives) == references.get(2, n_steps=SHORT), nodes.logs()
    assert refused and all(line.startswith("refused 1401 E1401") for line in refused), refused


@pytest.mark.gpu
def test_backward_is_given_up(cluster, references):
    """Announced gradients are withdrawn from the other nodes. If they are in a sum already, the step begins again."""
    nodes = cluster((1, 1))
    plans = [[["--at", "4.1.7:abandon", "--at", "9.0.0:abandon"]], [["--at", "4.1.0:sleep=500"]]]
    judge(train(nodes, plans, n_steps=SHORT), nodes, references.get(2, n_steps=SHORT), "E1007|no error")
    assert said(nodes, "E1007") >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("node, stage", each_once((0, 1), (2, 3)))
def test_daemon_killed(cluster, references, node, stage):
    """
    When a daemon dies, the run ends on all nodes. No GPU of another node hangs, and the next run begins from the start.
    """
    nodes = cluster((1, 1), stage)
    lives = start(nodes, [[], []], n_steps=SHORT)
    wait_for(nodes.logs, lambda: nodes.daemons[0].status()["step"] > 3)
    nodes.daemons[node].kill()
    nodes.start(node)
    for life in lives:
        life.last.wait()
    wait_for(nodes.logs, lambda: not nodes.daemons[1 - node].status()["formed"])  # dropped, with its engines
    ranks = start(nodes, [[], []], n_steps=SHORT)
    judge(finish(ranks, nodes), nodes, references.get(2, n_steps=SHORT))
    assert "E1503" in nodes.daemons[1 - node].log()


@pytest.mark.parametrize("offload", [*full("none"), "cpu"])
def test_daemon_killed_in_an_update(cluster, references, offload):
    """A GPU's work is dropped with the run: no node waits for an engine that has ended."""
    nodes = cluster((1, 1), offload=offload, sim={0: ["delay-us=5000"]})  # the slowest node to update
    lives = start(nodes, [[], []], n_steps=SHORT)
    wait_for(nodes.logs, lambda: nodes.daemons[0].status()["state"] == "updating")
    engine = nodes.daemons[0].status()["device"]["pid"]

    def is_held_in_an_update():
        os.kill(engine, signal.SIGSTOP)
        if nodes.daemons[0].status()["state"] == "updating":
            return True
        os.kill(engine, signal.SIGCONT)
        return False

    wait_for(nodes.logs, is_held_in_an_update)
    nodes.daemons[1].kill()
    nodes.start(1)
    for life in lives:
        life.last.wait()
    wait_for(nodes.logs, lambda: not nodes.daemons[0].status()["formed"])
    judge(train(nodes, [[], []], n_steps=8), nodes, references.get(2, n_steps=8))
