# SPDX-License-Identifier: Apache-2.0
"""A job on several nodes as its users see it: status, ranks, and diagnostics about nodes that are late or lost."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from conftest import wait_for
from keeper import KeptDaemon
from nodes import Nodes
from puppet import ABORTED, REFUSED, Puppet, all_do, form, steps
from test_zerodctl import validator
from tiers import full

pytestmark = pytest.mark.threads


def start(zerod, ranks, **config):
    """Starts a formed job. Return: its daemons, and a puppet for each rank."""
    nodes = Nodes(zerod, Path(zerod.folder), ranks, config)
    puppets = [Puppet(nodes.daemons[nodes.node_of(r)], r).attach() for r in range(sum(ranks))]
    form(puppets)
    return nodes, puppets


@pytest.fixture
def zerod(zerod, tmp_path):
    zerod.folder = tmp_path
    return zerod


def said(daemon, code):
    """Waits for a diagnostic with this code. Return: the diagnostic's text."""
    found = wait_for(lambda: f"no E{code} in\n{daemon.log()}",
                     lambda: [d for d in daemon.json("diagnostics") if d["code"] == f"E{code}"], 20 * daemon.patience)
    wait_for("the log", lambda: found[-1]["text"].rstrip("\n") in daemon.log())
    return found[-1]["text"]


def line(text, label):
    """The diagnostic's text under this label."""
    return re.search(rf"^  {label:<14} (.*)$", text, re.M)[1]


@pytest.mark.parametrize("node, stays", [(0, False), (1, False), *full((1, True))])
def test_drop(zerod, node, stays):
    """zerodctl drop on one node ends the run on all. An attached rank of another node gets an error."""
    nodes, puppets = start(zerod, (1, 1, 1))
    steps(puppets, 2)
    for rank, puppet in enumerate(puppets):
        if not stays or rank == node:
            puppet.kill()
    wait_for("the job is idle", lambda: "gone" in nodes.daemons[node].ctl("drop", check=False).stdout)
    for daemon in nodes.daemons:
        wait_for("the run is dropped", lambda daemon=daemon: not daemon.status()["formed"])
    if stays:
        assert f"zerodctl drop was called on node {node}" in said(nodes.daemons[0], 1503)
        for rank in (0, 2):
            puppets[rank].kill()
    puppets = [Puppet(nodes.daemons[r], r).attach() for r in range(3)]
    form(puppets)
    steps(puppets, 2)
    assert all(daemon.status()["step"] == 2 for daemon in nodes.daemons)


def test_status_and_ranks(zerod):
    """Each node shows its own ranks by their numbers in the world, and its information about the other nodes."""
    nodes, puppets = start(zerod, (2, 1))
    steps(puppets, 3)
    for i, daemon in enumerate(nodes.daemons):
        status = daemon.status()
        validator("status").validate(status)
        seen = status["nodes"]
        assert (status["world_size"], status["n_attached"], status["step"]) == (3, nodes.ranks[i], 3)
        assert (seen["node"], seen["engine"], seen["generation"], seen["connected"]) == (i, "gloo", 1, True)
        assert [(n["node"], n["address"], n["first_rank"], n["n_ranks"]) for n in seen["list"]] == \
            [(k, nodes.addresses[k], first, n) for k, (first, n) in enumerate(((0, 2), (2, 1)))]
        assert [(n["reached"], n["why"]) for n in seen["list"]] == [(True, None)] * 2
        moved = {c["name"]: c for c in seen["collectives"]}
        assert list(moved) == ["reduce-scatter", "all-gather", "broadcast", "fetch"]
        for key in ("sent_bytes", "received_bytes"):
            assert seen[key] == sum(c[key] for c in moved.values())
        for name in ("reduce-scatter", "all-gather", "broadcast"):
            c = moved[name]
            assert c["n_orders"] > 0 and c["busy_ns"] > 0
            assert c["bytes_per_s"] == pytest.approx((c["sent_bytes"] + c["received_bytes"]) * 1e9 / c["busy_ns"])
        assert moved["fetch"]["n_orders"] == 0 and moved["fetch"]["bytes_per_s"] is None
        assert [rank["rank"] for rank in daemon.json("ranks")] == [[0, 1], [2]][i]
        first, *lines = daemon.ctl("status").stdout.splitlines()
        assert first.endswith(f"{nodes.ranks[i]} of {nodes.ranks[i]} ranks of this node attached, 3 ranks in all")
        assert f"          node {i} at {nodes.addresses[i]}, rank{'s 0 to 1' if i == 0 else ' 2'}: this one" in lines
        assert f"          node {1 - i} at {nodes.addresses[1 - i]}, rank{' 2' if i == 0 else 's 0 to 1'}: reached" in lines
    sent, received = ([d.status()["nodes"][key] for d in nodes.daemons] for key in ("sent_bytes", "received_bytes"))
    assert sent == received[::-1] and min(sent) > 0
    report = json.loads(nodes.daemons[0].ctl("report", "-").stdout)["daemon"]
    assert report["status"]["nodes"]["list"][1]["address"] == nodes.addresses[1]


def test_one_node_has_no_section(zerod):
    daemon = zerod({"world": {"size": 1}})
    assert daemon.status()["nodes"] is None
    assert "nodes " not in daemon.ctl("status").stdout


def test_stalled_on_another_node(zerod):
    """A rank waits for one of the other node, and its node names it. When that rank asks, both continue."""
    nodes, puppets = start(zerod, (1, 1), diagnostics={"stall_warning": "300ms"})
    for waiting, late in ((0, 1), (1, 0)):
        steps(puppets)
        puppets[waiting].tell("steps", 1)
        text = said(nodes.daemons[waiting], 1303)
        assert line(text, "waits").startswith(f"rank {waiting}, ")
        assert re.fullmatch(rf"rank {late} \(pid {puppets[late].popen.pid}, last message Step \d+ ms ago\)", line(text, "on"))
        assert puppets[late]("steps", 1).r == puppets[waiting].answer().r == 0


def test_given_up_on_another_node(zerod):
    """After stall_timeout node 0 aborts the step, and every node reports the reason. The next attempt succeeds."""
    nodes, puppets = start(zerod, (1, 1), diagnostics={"stall_warning": "300ms", "stall_timeout": "1s"})
    steps(puppets)
    puppets[0].tell("steps", 1)  # repeats the step after an abort
    for daemon in nodes.daemons:
        text = said(daemon, 1302)
        assert line(text, "cause").startswith("E1303 stalled for ") and f"rank 1 (pid {puppets[1].popen.pid}, " in text
        assert "administrator" not in text
    assert puppets[1]("steps", 1).r == puppets[0].answer().r == 0
    attempts = {d.status()["attempt"] for d in nodes.daemons}
    assert len(attempts) == 1 and attempts.pop() >= 1


@contextlib.contextmanager
def killed_at(build, folder, point, victim, word, ranks=(1, 1), **config):
    """Starts nodes whose ranks send this command. The victim's daemon is killed there once, and not restarted."""
    def zerod(config, env=None, prefix=()):
        where = folder / f"node{config['world']['node']}"
        where.mkdir()
        return KeptDaemon(build, where, config, env, [f"{point}:kill" if config["world"]["node"] == victim else None, None])

    nodes = Nodes(zerod, folder, ranks, config)
    puppets = [Puppet(daemon, r).attach() for r, daemon in enumerate(nodes.daemons)]
    try:
        form(puppets)
        if word == "commit":
            all_do(puppets, "window")
        for p in puppets:
            p.tell(word)
        nodes.daemons[victim].popen.wait()
        yield nodes, puppets
    finally:
        for p in puppets:
            p.kill()
        for daemon in nodes.daemons:
            daemon.kill()


@pytest.mark.parametrize("point, word, why", (
    ("Step.log", "steps 1", "nothing goes on without node 0"),
    ("GATHER.heard", "steps 1", "the step, or the write window, is decided"),
    ("STORE.said", "commit", "the step, or the write window, is decided"),
), ids=("open", "step", "window"))
def test_node_0_is_away(build, tmp_path, point, word, why):
    """Node 0 dies. After stall_timeout node 1's ranks get an error. A restarted node 0 finishes its decisions."""
    config = {"diagnostics": {"stall_warning": "300ms", "stall_timeout": "1s"}}
    with killed_at(build, tmp_path, point, 0, word, **config) as (nodes, puppets):
        answer = puppets[1].answer()
        assert answer.r == REFUSED and answer["error"]["code"] == 1303, answer
        assert "wait given up" in answer.text and line(answer.text, "cause").startswith(why), answer.text
        assert line(answer.text, "on").endswith("which decides what comes next; it is not reached")
        nodes.daemons[0].start_again()
        wait_for(nodes.logs, lambda: nodes.daemons[1].status()["state"] == "training")


@pytest.mark.parametrize("point, word", (("COMMIT.heard", "steps 1"), ("CLOSED.heard", "commit")), ids=("step", "window"))
def test_all_stop_when_all_have_ended(build, tmp_path, point, word):
    """
    Node 1's daemon is replaced in the last step, which it cannot end alone. The other nodes are asked to stop after
    their ranks' end, and wait for node 1. Node 1 is asked later, and knows then that it may stop.
    """
    with killed_at(build, tmp_path, point, 1, word, ranks=(1, 1, 1)) as (nodes, puppets):
        others = [nodes.daemons[0], nodes.daemons[2]]
        assert puppets[0].answer().r == 0 and puppets[2].answer().r == 0
        for daemon in others:
            daemon.signal(signal.SIGTERM)
            wait_for(nodes.logs, lambda: "stopping when all nodes have ended what was decided" in daemon.log())
        time.sleep(0.3)
        assert all(daemon.running() for daemon in others)
        nodes.daemons[1].start_again()
        for daemon in others:
            assert daemon.popen.wait(10 * build.patience) == 0, daemon.log()
            assert "stopping: all nodes have ended what was decided" in daemon.log()
        assert puppets[1].answer().r == 0
        nodes.daemons[1].signal(signal.SIGTERM)
        assert nodes.daemons[1].popen.wait(3 * build.patience) == 0


def test_back_before_node_0_has_answered(build, tmp_path):
    """
    A rank and its daemon die while the rank leaves. The request that its node had sent is void, so the successor does
    not wait for an answer to it.
    """
    with killed_at(build, tmp_path, "Leave.log", 1, "leave") as (nodes, puppets):
        leading, killed = nodes.daemons
        puppets.pop().kill()
        leading.signal(signal.SIGSTOP)
        killed.start_again()
        puppets.append(Puppet(killed, 1).attach())
        puppets[1].tell("form")
        time.sleep(0.3)
        leading.signal(signal.SIGCONT)
        assert puppets[1].answer().r == 1  # the successor resumes
        puppets[1].ok("leave")


@pytest.mark.parametrize("lost", (0, 1))
def test_stops_without_a_node_that_is_away(build, tmp_path, lost):
    """A dead node's daemon is not replaced. The other one, asked to stop, waits a few seconds and reports the node."""
    with killed_at(build, tmp_path, "DECIDED.heard", lost, "steps 1") as (nodes, puppets):
        daemon = nodes.daemons[1 - lost]
        daemon.signal(signal.SIGTERM)
        assert daemon.popen.wait(9 * build.patience) == 0
        assert "stopping: other nodes have not ended what was decided, or have ranks that do not leave" in daemon.log()


def test_stops_when_ranks_of_other_nodes_have_left(zerod):
    """
    A rank dies after all other ranks have left. Their nodes stay, because its successor would wait for them forever.
    """
    nodes, puppets = start(zerod, (1, 1), zero_optimization={"stage": 3})
    steps(puppets, 2)
    puppets[1].ok("leave")
    nodes.daemons[1].signal(signal.SIGTERM)
    wait_for(nodes.logs, lambda: "stopping when all nodes have ended what was decided" in nodes.daemons[1].log())
    puppets[0].kill()
    successor = Puppet(nodes.daemons[0], 0).attach()
    form([successor])
    assert nodes.daemons[1].running()
    successor.ok("leave")
    assert nodes.daemons[1].popen.wait(5 * nodes.patience) == 0
    assert "stopping: all nodes have ended what was decided" in nodes.daemons[1].log()
    no_node_is_missed(nodes)


def test_all_stop_while_a_rank_stays(zerod):
    """
    Both nodes are asked to stop while rank 1 is attached. Node 1 stops first, and node 0 does not report it as missing.
    """
    nodes, puppets = start(zerod, (1, 1))
    steps(puppets, 2)
    puppets[0].ok("leave")
    nodes.daemons[0].signal(signal.SIGTERM)
    wait_for(nodes.logs, lambda: "stopping when all nodes have ended what was decided" in nodes.daemons[0].log())
    nodes.daemons[1].signal(signal.SIGTERM)
    assert nodes.daemons[1].popen.wait(5 * nodes.patience) == 0
    no_node_is_missed(nodes)


@pytest.mark.parametrize("is_waited_for", (False, True))
def test_stops_before_there_is_a_run(zerod, is_waited_for):
    nodes = Nodes(zerod, Path(zerod.folder), (1, 1))
    wait_for(nodes.logs, lambda: ") is here" in nodes.daemons[0].log())
    waiting = [Puppet(nodes.daemons[0], 0).attach()] if is_waited_for else []
    nodes.daemons[1].signal(signal.SIGTERM)
    no_node_is_missed(nodes, ["E1501"] if is_waited_for else [])
    for puppet in waiting:
        puppet.kill()


def no_node_is_missed(nodes, codes=()):
    """Node 0 must not report node 1, which has left, as missing. codes: what node 0 reports nevertheless."""
    wait_for(nodes.logs, lambda: "node 1: the connection was lost" in nodes.daemons[0].log())
    assert [d["code"] for d in nodes.daemons[0].json("diagnostics") if d["code"] in ("E1501", "E1502")] == list(codes)


def test_abort_on_another_node(zerod):
    nodes, puppets = start(zerod, (1, 1))
    steps(puppets)
    assert puppets[0]("begin", 1, 0).r == 0
    nodes.daemons[1].ctl("abort-step")
    for daemon in nodes.daemons:
        text = said(daemon, 1302)
        assert line(text, "cause") == "an administrator asked for it (zerodctl abort-step)"


class OneDiffers(Nodes):
    def config(self, node, config):
        return super().config(node, {"gradient_clipping": 2.0 if node == 1 else 1.0, **config})


def test_configured_differently(zerod):
    """If configurations differ, all ranks and logs name the key and both values. After a correction the job forms."""
    nodes = OneDiffers(zerod, Path(zerod.folder), (1, 1, 1))
    puppets = [Puppet(daemon, r).attach() for r, daemon in enumerate(nodes.daemons)]
    for p in puppets:
        p.tell("form")
    for p, daemon in zip(puppets, nodes.daemons):
        answer = p.answer()
        assert answer.r == REFUSED and answer["error"]["code"] == 1501, answer
        for text in (answer.text, daemon.log()):
            assert "nodes are configured differently" in text, text
            found = re.search(r"gradient_clipping is (\S+) there and (\S+) here", text)
            assert {float(found[1]), float(found[2])} == {1.0, 2.0}, text
        assert p("clear").r == 0
    nodes.daemons[1].stop()
    nodes.configs[1]["gradient_clipping"] = 1.0
    nodes.start(1)
    puppets[1] = Puppet(nodes.daemons[1], 1).attach()
    form(puppets)
    steps(puppets)


def test_successor_of_a_rank_that_pushed_nothing(zerod):
    """A rank dies without a push. Its successor is refused the step, which begins again, and all ranks get an error."""
    nodes, puppets = start(zerod, (1, 1))
    steps(puppets)
    for p in puppets:
        p.ok("begin")
    puppets[0].ok("pushes")
    for p in puppets:
        p.tell("end")
    assert [p.answer().r for p in puppets] == [0, 0]
    puppets[0].tell("step")
    puppets[1].kill()
    puppets[1] = Puppet(nodes.daemons[1], 1).attach()
    form(puppets[1:])
    for answer in (puppets[1]("step"), puppets[0].answer()):
        assert answer.r == ABORTED and answer["error"]["code"] == 1302, answer
        assert "E1005" in answer.text and "by a process that died since" in answer.text
    steps(puppets)


def test_backward_given_up_too_late(zerod):
    """A rank abandons a backward whose gradients are in sums. It gets an error when node 0 has aborted the step."""
    nodes, puppets = start(zerod, (1, 1), zero_optimization={"stage": 2, "reduce_bucket_size": 300})
    steps(puppets)

    def n_moved():
        return nodes.daemons[1].status()["nodes"]["collectives"][0]["n_orders"]

    before = n_moved()
    for p in puppets:
        p.ok("begin", 1, 0)
        p.ok("push", 7)
    wait_for(nodes.logs, lambda: n_moved() > before)
    time.sleep(0.2 * nodes.daemons[1].patience)  # until the gradient is summed, which no status shows
    late = puppets[1]("abandon", "out-of-memory")
    # Each node aborts when it has no work left for the attempt. Until then it accepts requests of its ranks.
    wait_for(nodes.logs, lambda: nodes.daemons[0].status()["attempt"] == 1)
    for answer in (late, puppets[0]("end")):
        assert answer.r == ABORTED and answer["error"]["code"] == 1302, answer
        assert "E1007 backward abandoned, step aborted: rank 1, step 1" in answer.text
    steps(puppets)


def engine_of(daemon):
    for pid in os.listdir("/proc"):
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() if pid.isdigit() else ["", "0"]
            if words[1] == str(daemon.pid) and "zerod-engine" in Path(f"/proc/{pid}/cmdline").read_text():
                return int(pid)
        except OSError:
            continue
    pytest.fail(f"no engine of {daemon.pid}")


def test_engine_that_dies(zerod):
    """When an engine dies, both nodes report whose engine it was and why it ended."""
    nodes, puppets = start(zerod, (1, 1))
    steps(puppets)
    os.kill(engine_of(nodes.daemons[1]), signal.SIGKILL)
    for daemon in nodes.daemons:
        text = said(daemon, 1502)
        assert text.startswith("E1502 warning, engine failed, replaced: step 1\n")
        assert line(text, "waits") == "traffic between nodes, for the engines of generation 2 to connect"
        assert line(text, "cause") in (
            f"the engine of node 1 ({nodes.addresses[1]}) was killed by signal 9 (Killed)",
            f"the engine of node 0 ({nodes.addresses[0]}) says: Connection closed by peer [127.0.0.1] (node 1)")
    steps(puppets)
    assert [d.status()["nodes"]["generation"] for d in nodes.daemons] == [2, 2]


def test_daemon_that_stood_still(zerod):
    """
    A daemon was frozen and its connection was lost. After the reconnect the engines are replaced without a report,
    because data that they sent may still be in the kernel.
    """
    nodes, puppets = start(zerod, (1, 1))
    steps(puppets)
    nodes.daemons[1].signal(signal.SIGSTOP)
    text = said(nodes.daemons[0], 1501)
    nodes.daemons[1].signal(signal.SIGCONT)
    assert re.match(r"the link to its daemon is down: has not been heard for \d\.\d s", line(text, "cause"))

    def engines():
        return [[d.status()["nodes"][key] for key in ("generation", "connected")] for d in nodes.daemons]

    wait_for(nodes.logs, lambda: engines() == [[2, True], [2, True]])
    steps(puppets)
    assert not any("E1502" in d.log() for d in nodes.daemons)


def test_daemon_that_comes_back(zerod):
    """Node 0 reports that node 1 is not reachable, then that it is another daemon. The next run can begin."""
    nodes, puppets = start(zerod, (1, 1))
    steps(puppets)
    puppets[0].tell("steps", 1)
    nodes.daemons[1].kill()
    text = said(nodes.daemons[0], 1501)
    assert text.startswith("E1501 warning, node 1 is not reached: step 1\n")
    assert line(text, "on") == f"node 1 at {nodes.addresses[1]}, rank 1"
    assert line(text, "waits").startswith("node 0, for it to ")
    assert line(text, "cause").startswith("the link to its daemon is down: ")
    seen = nodes.daemons[0].status()["nodes"]["list"][1]
    assert not seen["reached"] and seen["why"] and seen["silent_ns"] > 0
    assert "not reached, last heard " in nodes.daemons[0].ctl("status").stdout

    again = zerod(nodes.configs[1])
    answer = puppets[0].answer()
    assert (answer.r < 0 or answer.r == REFUSED) and answer.error["code"] == 1503, answer
    assert line(answer.text, "cause") == (f"the daemon of node 1 ({nodes.addresses[1]}) was started anew, and what the one "
                                          "before it held of the run is gone")
    assert said(nodes.daemons[0], 1503).rstrip("\n") == answer.text.rstrip("\n")
    puppets = [Puppet(daemon, r).attach("run=next") for r, daemon in enumerate((nodes.daemons[0], again))]
    form(puppets)
    steps(puppets, 2)
    assert [d.status()["step"] for d in (nodes.daemons[0], again)] == [2, 2]
