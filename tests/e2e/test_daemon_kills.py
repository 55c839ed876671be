# SPDX-License-Identifier: Apache-2.0
"""
A daemon dies and is restarted. The run keeps its bits, and trainers only see a pause. daemon_kills.py has the campaign.
This file has small campaigns, and tests of zerodrun, the log and zerodctl.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from conftest import environment, merge, wait_for
from daemon_kills import Life, Plan, campaign, one_run
from keeper import KeptDaemon
import kills
import stores
from puppet import ABORTED, N_PARAMS, RESUMED, Puppet, all_do, state, steps, trainers
from tiers import full

N_STEPS = 24
STORES = Path(__file__).parent / "stores"


@pytest.mark.parametrize("seed", [1, 2, *full(3, 4)])
def test_some_kills(seed):
    said = []
    assert campaign(20, itertools.count(seed * 1_000_000), 1, said.append) == 0, "\n".join(said)


@pytest.mark.parametrize("n_nodes, device", [(1, "cuda-offload"), (2, "cuda"), *full((1, "cuda"), (3, "cuda-offload"))])
def test_some_kills_with_gpus(n_nodes, device):
    """The memory of the GPUs outlives the daemon too."""
    said = []
    assert campaign(10, itertools.count(7_000_000), 1, said.append, n_nodes=n_nodes, device=device) == 0, "\n".join(said)


@pytest.mark.parametrize("device", ["", *full("cuda")])
@pytest.mark.parametrize("lives", [
    [["Ready.log:kill@1", "flip:kill@1"], []],
    [[], ["forming:kill@1", "flip:kill@1", "answer:kill@1"]],
    [["flip:kill@2"], ["flip:kill@2", "adopt:kill"]],
    [["answer:kill@5"], []],
    [["flipped:kill@2"], []],
    [["flipped:kill", "Ready.log:kill", "order:kill"], ["forming:kill@2", "flipped:kill", "answer:kill", "flip:kill"]],
], ids=["node-0", "node-1", "both", "weights", "unheard", "again"])
def test_killed_while_forming(build, tmp_path, lives, device):
    """Daemons of several nodes die while the job is formed. It is still formed. The second flip begins the training."""
    plan = Plan(2, n_nodes=2, device=device, only=())
    plan.config["zero_optimization"]["stage"] = 3  # in stage 3 initial weights have their own memory
    plan.lives = [[Life.at(point) for point in points] for points in lives]
    plan.victims = [[] for _ in plan.victims]
    assert one_run(build, kills.References(build, tmp_path), tmp_path, plan) == sum(map(len, lives))


@pytest.mark.parametrize("point", ["combined:kill@12", "updated:kill@1"])
def test_killed_after_a_successor_came(build, tmp_path, point):
    """On several nodes, the next daemon also knows the predecessor's pushes, and compares the successor's with them."""
    plan = Plan(2, n_nodes=2, device="", only=())
    plan.ranks = (1, 1)
    plan.victims = [[], ["slot:kill@17"]]
    plan.lives = [[], [Life.at(point)]]
    plan.config["zero_optimization"] |= {"stage": 2, "reduce_bucket_size": 1}
    assert one_run(build, kills.References(build, tmp_path), tmp_path, plan) == 1


def test_killed_after_a_window_closed(build, tmp_path):
    """On several nodes, a successor learns that the window is over, however late node 0 learns its node's position."""
    plan = Plan(2, n_nodes=2, device="", only=())
    plan.ranks = (1, 2)
    plan.victims = [[], [[], "WriteBegin.send:sleep:600"], []]
    plan.env = {"ZEROD_FAILPOINT": "kept:sleep:300@*"}
    plan.lives = [[], [Life.at("flip:kill@21")]]  # in the window before step 16, which is forgotten
    plan.lives[1][0].also = "trainer"
    assert one_run(build, kills.References(build, tmp_path), tmp_path, plan) == 1


@pytest.mark.parametrize("n_nodes", [1, 2])
def test_killed_while_ranks_attach_again(build, tmp_path, n_nodes):
    """The journal has the processes that waited to attach again, and the next daemon adopts them."""
    plan = Plan(2, n_nodes=n_nodes, device="", only=())
    plan.victims = [[] for _ in plan.victims]
    plan.saves = plan.loads = False
    plan.config.pop("checkpoint", None)
    plan.own_args += ["--again", 5, "--anew"]
    points = ["Leave.log:kill@1", "BeginBackward.log:kill@1", "Leave.log:kill@1", "BeginBackward.log:kill@2"]
    plan.lives = [[Life.at(point) for point in points] for _ in range(n_nodes)]
    assert one_run(build, kills.References(build, tmp_path), tmp_path, plan) == 4 * n_nodes


@pytest.mark.parametrize("node, point", [(1, "BACK.heard"), (0, "BACK.reported"), *full((1, "BACK.obeyed"), (0, "BACK.said"), (0, "BACK.heard"), (0, "BACK.obeyed"),
                                                                  (1, "Leave.judged"), (0, "Leave.judged"))])
def test_killed_while_all_are_back(build, tmp_path, node, point):
    """All ranks had left, and rank 0 is back. The next daemon expects its ranks too, in any state of messages."""
    plan = Plan(2, n_nodes=2, device="", only=())
    plan.victims = [[] for _ in plan.victims]
    plan.saves = plan.loads = False
    plan.config.pop("checkpoint", None)
    plan.own_args += ["--again", 5]
    plan.lives = [[], []]
    plan.lives[node] = [Life.at(f"{point}:kill@{n}") for n in (1, 2)]
    began = time.monotonic()
    assert one_run(build, kills.References(build, tmp_path), tmp_path, plan) == 2
    assert time.monotonic() - began < 15 * build.patience, "it waited for limits.reattach_timeout"


@pytest.mark.parametrize("n_nodes", [2, 3])
def test_killed_while_all_stop(build, tmp_path, n_nodes):
    """
    The checkpoint is saved, but one daemon dies before it gets the message. Node 0 waits for the next daemon. A third
    node stops no earlier, because node 0's next daemon needs all nodes.
    """
    plan = Plan(2, n_nodes=n_nodes, device="", only=("save_on_stop",))
    plan.lives = [[] for _ in range(n_nodes)]
    plan.lives[-1] = [Life.at("SAVE_END.heard:kill@1")]
    if n_nodes == 3:
        plan.lives[-1][0].also = "neighbour"
    assert one_run(build, kills.References(build, tmp_path), tmp_path, plan) == n_nodes - 1


def test_killed_with_a_decided_step(build, tmp_path):
    """On GPUs of several nodes, a decided step is never undone, even if no daemon has received all messages."""
    plan = Plan(2, n_nodes=2, device="cuda", only=())
    plan.victims = [[] for _ in plan.victims]
    plan.lives = [[Life.at("decided:kill@3"), Life.at("updated:kill@5")], [Life.at("decided:kill@7")]]
    assert one_run(build, kills.References(build, tmp_path), tmp_path, plan) == 3


def test_killed_while_a_window_goes_back(build, tmp_path):
    """An interrupted copy of a window to a GPU may leave any values, also in arrays that the window does not change."""
    plan = Plan(2, n_nodes=1, device="cuda", only=())
    plan.ranks, plan.victims, plan.engine_kills, plan.saves, plan.loads = (1,), [[]], [], False, False
    plan.config.pop("checkpoint", None)
    plan.env = {"ZEROD_SIM": "devices=16,delay-us=1000"}
    plan.optimizer = "AdamW"
    plan.config["optimizer"], plan.moments = kills.OPTIMIZERS["AdamW"]
    plan.lives = [[Life.at(f"bringing:fuse:{us}000@1") for us in (2000, 4000, 8000)]]
    assert one_run(build, kills.References(build, tmp_path), tmp_path, plan) == 3


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_many_kills(seed):
    said = []
    assert campaign(100, itertools.count(500_000_000 + seed * 1_000_000), 1, said.append) == 0, "\n".join(said)


@pytest.fixture
def kept(build, tmp_path):
    started = []

    def start(config=None, plan=(), **more):
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(KeptDaemon(build, folder, {"world": {"size": 2}, "gradient_clipping": 1.0, **(config or {})},
                                  plan=plan, **more))
        return started[-1]

    yield start
    for daemon in started:
        for process in daemon.others:
            process.kill()
        daemon.kill()


def train(daemon, ranks, timeout=30):
    deadline = time.monotonic() + timeout * daemon.patience
    while any([rank.tend() for rank in ranks]):
        daemon.tend()
        assert time.monotonic() < deadline, kills.describe(ranks, daemon)
        time.sleep(0.002)


def test_status_says_it(kept):
    daemon = kept(plan=["summed:kill@40", None])
    ranks = kills.start(daemon, [[], []], n_steps=N_STEPS)
    train(daemon, ranks)
    assert "took over the job from the daemon before, which lived 0." in daemon.log()
    status = daemon.status()
    assert status["n_daemons"] == 2 and status["step"] == N_STEPS
    assert 0 <= status["away_ns"] < 5e9
    assert "2 daemons so far" in daemon.ctl("status").stdout


def companions(pid):
    """Return: the processes that share the daemon's memory and have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            name, rest = (entry / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            if name == "zerod-memory" and rest.split()[0] != "Z" and (pid is None or int(rest.split()[1]) == pid):
                found.append(int(entry.name))
    return found


def watches(pid, other):
    """Return: whether the process has only one descriptor, a pidfd of the other process."""
    folder = Path(f"/proc/{pid}/fdinfo")
    return [re.search(r"^Pid:\s+(\d+)$", (folder / fd).read_text(), re.MULTILINE)[1] for fd in os.listdir(folder)] == [str(other)]


def companion_of(daemon):
    """Return: the daemon's companion, which starts a moment after the daemon listens."""
    wait_for("its companion", lambda: companions(daemon.pid))
    (companion,) = companions(daemon.pid)
    return companion


def test_companion(kept, build):
    """The companion has only one descriptor and ends with the daemon. The daemon works without it."""
    if "thread" in build.options["b_sanitize"]:
        pytest.skip("the thread sanitizer allows no second process in the daemon's memory")
    daemon = kept()
    companion = companion_of(daemon)
    assert watches(companion, daemon.pid)
    os.kill(companion, signal.SIGTERM)
    assert companions(daemon.pid) == [companion]
    os.kill(companion, signal.SIGKILL)
    wait_for("its end", lambda: not companions(daemon.pid))
    ranks = kills.start(daemon, [[], []], n_steps=N_STEPS)
    daemon.signal(signal.SIGKILL)
    train(daemon, ranks)
    assert all(rank.last.poll() == 0 for rank in ranks), kills.describe(ranks, daemon)
    companion = companion_of(daemon)
    daemon.stop()
    wait_for("its end", lambda: companion not in companions(None))


def test_death_does_not_wait_for_memory(kept, build):
    """The death of a daemon is detected, and the next one trains, while the dead one's memory is still mapped."""
    if "thread" in build.options["b_sanitize"]:
        pytest.skip("the thread sanitizer allows no second process in the daemon's memory")
    daemon = kept()
    companion = companion_of(daemon)
    ranks = kills.start(daemon, [[], []], n_steps=400)
    wait_for("some steps", lambda: daemon.status()["step"] > 5)
    os.kill(companion, signal.SIGSTOP)
    try:
        daemon.signal(signal.SIGKILL)
        assert daemon.popen.wait(30) == -signal.SIGKILL
        assert "memfd:zerod" in Path(f"/proc/{companion}/maps").read_text()
        train(daemon, ranks, 60)
        assert all(rank.last.poll() == 0 for rank in ranks), kills.describe(ranks, daemon)
        assert companion in companions(None)
    finally:
        os.kill(companion, signal.SIGCONT)
    wait_for("its end", lambda: companion not in companions(None))


def test_nobody_keeps(zerod, build):
    """Without a descriptor store, the log says once that the state can be lost, and how to prevent that."""
    daemon = zerod()
    wait_for("the first line of the log", lambda: "ready: job" in daemon.log())
    assert daemon.log().count("the job's state is lost if this daemon dies") == 1


def test_persist_off(kept):
    daemon = kept({"persist": "off"})
    train(daemon, kills.start(daemon, [[], []], n_steps=2))
    assert daemon.store.names() in ([], ["listen"])


def stop_midway(kept, config=None):
    """Return: a daemon killed in the middle of a run and not restarted yet, and its stopped trainers."""
    daemon = kept(config, plan=["summed:kill@40", None])
    ranks = kills.start(daemon, [[], []], n_steps=N_STEPS)
    assert daemon.popen.wait(30 * daemon.patience) == -signal.SIGKILL
    return daemon, ranks


def is_held(daemon, why):
    """The daemon must live, keep the run unchanged, and report the reason."""
    before = daemon.store.names()
    wait_for("the daemon listens", daemon.listens)
    wait_for(lambda: daemon.log(), lambda: "E1304" in daemon.log())
    assert why in daemon.log(), daemon.log()
    assert daemon.store.names() == before
    status = daemon.status()
    assert why in status["held"], status
    return before


@pytest.mark.parametrize("change, why", [
    (lambda kept: kept.pop(), "\"{name}\" is missing"),
    (lambda kept: kept.append(kept[-1]), "\"{name}\" was kept twice"),
    (lambda kept: kept.append(("surprise", kept[-1][1])), "this version has no segment named \"surprise\""),
    (lambda kept: kept.__setitem__(-1, (kept[-1][0], kept[0][1])), "\"{name}\" does not match: its name, its size or its seals differ"),
], ids=["missing", "twice", "unknown", "exchanged"])
def test_store_differs(kept, change, why):
    """The daemon reports which kept segment is wrong. When it is corrected the run continues with the same bits."""
    daemon, ranks = stop_midway(kept)
    good = sorted((k for k in daemon.store.kept if k[0] != "listen"), key=lambda k: k[0] != "counts")[::-1]
    listen = [k for k in daemon.store.kept if k[0] == "listen"]
    bad = list(good)
    change(bad)
    daemon.store.kept = listen + bad
    daemon.start_again()
    is_held(daemon, why.format(name="counts"))
    daemon.signal(signal.SIGKILL)
    daemon.popen.wait()
    daemon.store.kept = listen + good
    train(daemon, ranks)
    assert all(rank.last.poll() == 0 for rank in ranks), kills.describe(ranks, daemon)


JOURNAL_CURRENT = (12, 4)  # daemon/memory/journal.c: the number of the valid head


@pytest.mark.parametrize("name, part, why", [
    ("journal", None, "its journal was overwritten"),
    *full(("journal", (0, 4096), "its journal was overwritten"), ("journal", JOURNAL_CURRENT, "its journal was overwritten")),
    ("counts", None, "segment \"counts\" was overwritten"),
    *full(("state", None, "segment \"state\" was overwritten"), ("weights", None, "segment \"weights\" was overwritten")),
])
def test_store_was_overwritten(kept, name, part, why):
    """A segment is overwritten by zeros, all or in part. The daemon reports it; after a repair the run continues."""
    daemon, ranks = stop_midway(kept)
    fd = dict(daemon.store.kept)[name]
    saved = list(stores.blocks(fd, os.fstat(fd).st_size))
    for at, data in [(at, bytes(len(data))) for at, data in saved] if part is None else [(part[0], bytes(part[1]))]:
        os.pwrite(fd, data, at)
    daemon.start_again()
    is_held(daemon, why)
    daemon.signal(signal.SIGKILL)
    daemon.popen.wait()
    for at, data in saved:
        os.pwrite(fd, data, at)
    train(daemon, ranks)
    assert all(rank.last.poll() == 0 for rank in ranks), kills.describe(ranks, daemon)


@pytest.mark.parametrize("change, why", [
    ({"zero_optimization": {"stage": 2}}, 'the run has "zero_optimization.stage 1", the configuration of this daemon says '
                                          '"zero_optimization.stage 2"'),
    ({"persist": "off"}, 'the configuration of this daemon says "persist: off", with which no state is kept'),
    ({"bf16": {"bf16_optimizer_states": True}}, 'the run has "bf16.bf16_optimizer_states 0", the configuration of this '
                                                'daemon says "bf16.bf16_optimizer_states 1"'),
    ({"optimizer": {"params": {"optim_bits": 8}}}, 'the run has "optimizer.params.optim_bits 32", the configuration of this '
                                                   'daemon says "optimizer.params.optim_bits 8"'),
    ({"optimizer": {"params": {"master_weight_bits": 24}}},
     'the run has "optimizer.params.master_weight_bits 32", the configuration of this daemon says '
     '"optimizer.params.master_weight_bits 24"'),
], ids=["stage", "persist", "bf16", "optim_bits", "master_weight_bits"])
def test_configuration_differs(kept, change, why):
    daemon, ranks = stop_midway(kept)
    good = daemon.config_path.read_text()
    daemon.config_path.write_text(json.dumps(merge(json.loads(good), change)))
    daemon.start_again()
    is_held(daemon, why)
    daemon.signal(signal.SIGKILL)
    daemon.popen.wait()
    daemon.config_path.write_text(good)
    train(daemon, ranks)
    assert all(rank.last.poll() == 0 for rank in ranks), kills.describe(ranks, daemon)


def test_bucket_size_of_the_run(kept):
    """A configuration without a bucket size adopts a run with another bucket size than the default."""
    daemon, ranks = stop_midway(kept)
    config = json.loads(daemon.config_path.read_text())
    size = config["zero_optimization"].pop("reduce_bucket_size")
    assert size != 500_000
    daemon.config_path.write_text(json.dumps(config))
    daemon.start_again()
    wait_for("the daemon listens", daemon.listens)
    status = daemon.status()
    assert (status["held"], status["bucket_elems"]) == (None, size), status
    train(daemon, ranks)
    assert all(rank.last.poll() == 0 for rank in ranks), kills.describe(ranks, daemon)
    for rank in ranks:
        rank.last.wait()
    daemon.ctl("drop")
    assert daemon.status()["run_id"] is None
    kills.start(daemon, [[], []], n_steps=2)
    wait_for("a new run is laid out anew", lambda: daemon.status()["bucket_elems"] == 500_000)


def test_drop_begins_anew(kept):
    daemon, ranks = stop_midway(kept)
    for rank in ranks:
        rank.last.kill()
    daemon.store.kept = [k for k in daemon.store.kept if k[0] != "counts"]
    daemon.start_again()
    is_held(daemon, '"counts" is missing')
    daemon.ctl("drop")
    wait_for("the store is empty", lambda: daemon.store.names() == ["listen"])
    ranks = kills.start(daemon, [[], []], n_steps=2)
    train(daemon, ranks)
    assert all(rank.last.poll() == 0 for rank in ranks), kills.describe(ranks, daemon)


def kill_and_start_again(daemon, meanwhile=lambda: None):
    daemon.signal(signal.SIGKILL)
    daemon.popen.wait()
    meanwhile()
    daemon.start_again()
    wait_for("the daemon listens", daemon.listens)


def test_killed_while_a_successor_declares(kept, build, tmp_path):
    """A successor and the daemon die while it declares. The next daemon knows the next successor."""
    daemon = kept()
    ranks = kills.start(daemon, [["Push.sent:kill@40", "Declare.sent:stop", "EndBackward.send:stop"], []], n_steps=N_STEPS)
    state = lambda: daemon.json("ranks")[0]["state"]
    ranks[0].last.wait()
    ranks[0].start()
    wait_for("the successor", lambda: state() == "declaring")
    kill_and_start_again(daemon, ranks[0].last.kill)
    ranks[0].start()
    wait_for("the next successor", lambda: state() == "backward")
    kill_and_start_again(daemon)
    assert not daemon.status()["held"], daemon.log()
    ranks[0].last.signal(signal.SIGCONT)
    train(daemon, ranks)
    assert [rank.last.poll() for rank in ranks] == [0, 0], kills.describe(ranks, daemon)
    reference = kills.References(build, tmp_path).get(2, n_steps=N_STEPS)
    assert {key: found for key, found in kills.results(ranks).items() if reference.get(key) != found} == {}


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_after_a_rank_died_while_forming(kept, build, tmp_path, victim):
    """
    A rank dies while the job is formed, and its successor attaches before the memory is reserved. Later daemons know
    all parameters, whichever process has declared them.
    """
    daemon = kept(plan=["reserve:sleep:1500", None])
    plans = [[], []]
    plans[victim] = ["Form.sent:kill"]
    ranks = kills.start(daemon, plans, n_steps=N_STEPS)
    ranks[victim].last.wait()
    ranks[victim].start()
    wait_for("a step", lambda: daemon.status()["step"] > 2)
    kill_and_start_again(daemon)
    assert not daemon.status()["held"], daemon.log()
    train(daemon, ranks)
    reference = kills.References(build, tmp_path).get(2, n_steps=N_STEPS)
    assert {key: found for key, found in kills.results(ranks).items() if reference.get(key) != found} == {}


def write_moments(rank, first=0):
    """Writes moments and a step count into an open window. first selects the parameters."""
    for param, kind, value in [(first, 1, 5), (7, 2, 3), (first + 1, 4, 9)]:
        rank.ok("put", param, kind, value)


@pytest.mark.parametrize("moment", ["begun", "written", *full("reserved", "stored", "begun thrice")])
def test_killed_after_a_window_was_begun_again(kept, moment):
    """
    Rank 0 dies in a window, and the daemon after that. The window has all edits of rank 0's successor, and no others.
    """
    points = {"reserved": "writing:kill@3", "stored": "rewrite:kill@2"}
    daemon = kept(plan=[points.get(moment), None])
    ranks = trainers(daemon)
    all_do(ranks, "window")
    for n in range(2 if moment == "begun thrice" else 1):
        write_moments(ranks[0], 2 + n)
        ranks[0].kill()
        ranks[0] = Puppet(daemon, 0).attach()
        assert ranks[0]("form").r == RESUMED
        ranks[0].ok("window")
    if moment == "begun":
        kill_and_start_again(daemon)
    if moment == "reserved":
        ranks[0].tell("put 0 1 5")
        assert daemon.popen.wait(30 * daemon.patience) == -signal.SIGKILL
        daemon.start_again()
        assert ranks[0].answer().r == 0
    write_moments(ranks[0])
    if moment in ("written", "begun thrice"):
        kill_and_start_again(daemon)
    for rank in ranks:
        rank.tell("commit")
    if moment == "stored":
        assert daemon.popen.wait(30 * daemon.patience) == -signal.SIGKILL
        daemon.start_again()
    assert [rank.answer().r for rank in ranks] == [0, 0], daemon.log()
    undisturbed = trainers(kept())
    all_do(undisturbed, "window")
    write_moments(undisturbed[0])
    all_do(undisturbed, "commit")
    assert state(ranks, "0124") == state(undisturbed, "0124")


PUSH_MORE = 16  # ZEROD_PUSH_MORE


@pytest.mark.parametrize("call", ["release", "gather", *full("prefetch")])
def test_killed_while_parameters_are_gathered(kept, call):
    """Stage 3. libzerod sends delayed pushes first, and the next daemon gets them. It counts each gather once."""
    daemon = kept({"zero_optimization": {"stage": 3}})
    ranks = trainers(daemon)
    for rank in ranks:
        rank.ok("gather", 7, 0, 0)
        rank.ok("begin")
    for n in range(2):
        ranks[0].ok("push", n, f"flags={PUSH_MORE}")
        kill_and_start_again(daemon)
        ranks[0].ok(call, 0)
    held = {"release": 0, "gather": 4, "prefetch": 2}[call]
    for _ in range(held):
        ranks[0].ok("release", 0)
    assert ranks[0]("release", 0).r < 0
    ranks[0].ok("release", 7)
    ranks[1].ok("release", 7, 0, 0)
    ranks[0].ok("pushes", "but=0,1")
    ranks[1].ok("pushes")
    assert [a.r for a in all_do(ranks, "end")] == [0, 0]
    assert [a.r for a in all_do(ranks, "step")] == [0, 0]
    undisturbed = trainers(kept({"zero_optimization": {"stage": 3}}))
    steps(undisturbed)
    assert state(ranks) == state(undisturbed)


def test_push_that_was_refused(kept, build):
    """The next daemon refuses a logged push as its predecessor did (hostile.c: its point does not exist)."""
    daemon = kept({"zero_optimization": {"reduce_bucket_size": 1}})  # one push of the rank completes a parcel
    ranks = trainers(daemon)
    ranks[1].kill()
    ranks[0].tell("steps 1")
    wait_for("all pushes of rank 0", lambda: daemon.status()["counters"]["n_pushes_admitted"] == N_PARAMS - 1)
    env = environment({"ZEROD_SOCKET": daemon.socket})
    subprocess.run([build.path("tests/hostile"), "point-unknown", "0"], env=env, check=True, timeout=60)
    kill_and_start_again(daemon)
    ranks[1] = Puppet(daemon, 1).attach()
    assert ranks[1]("form").r == RESUMED
    ranks[1].ok("steps 1")
    assert ranks[0].answer().r == 0
    counters = daemon.status()["counters"]
    assert (counters["n_pushes_redone"], counters["n_aborts"]) == (0, 0), daemon.log()


@pytest.mark.parametrize("what", ["reduce", "verify"])
def test_killed_while_an_abort_waits(kept, what):
    """An abort waits for a sum, or a comparison with a successor's pushes. The next daemon finishes both."""
    daemon = kept(plan=[f"{what}:sleep:60000,AbortStep.judged:kill", None])
    ranks = trainers(daemon)
    for rank in ranks:
        rank.ok("begin")
        rank.ok("pushes")
    wait_for("all pushes", lambda: daemon.status()["counters"]["n_pushes_admitted"] == 2 * (N_PARAMS - 1))
    if what == "verify":
        ranks[1].kill()
        ranks[1] = Puppet(daemon, 1).attach()
        assert ranks[1]("form").r == RESUMED
        ranks[1].ok("begin")
        ranks[1].ok("pushes")
        wait_for("a push to be compared", lambda: daemon.status()["counters"]["n_pushes_redone"] > 0)
    ranks[0].tell("abort test")
    assert daemon.popen.wait(30 * daemon.patience) == -signal.SIGKILL
    daemon.start_again()
    assert ranks[0].answer().r == 0, daemon.log()
    assert ranks[1]("end").r == ABORTED
    steps(ranks)
    undisturbed = trainers(kept())
    steps(undisturbed)
    assert state(ranks) == state(undisturbed)


def test_stopped_with_trainers(kept):
    """SIGTERM during a run, as sent by systemctl restart: trainers continue with the next daemon."""
    daemon = kept()
    ranks = kills.start(daemon, [[], []], n_steps=400)
    wait_for("some steps", lambda: daemon.status()["step"] > 5)
    daemon.signal(signal.SIGTERM)
    assert daemon.popen.wait(10) == 0
    daemon.start_again()
    train(daemon, ranks, 60)
    assert all(rank.last.poll() == 0 for rank in ranks), kills.describe(ranks, daemon)
    assert "the next daemon goes on with it" in daemon.log()


def test_nobody_starts_it_again(kept):
    """If no daemon follows, trainers wait for limits.reattach_timeout and then report it."""
    daemon, ranks = stop_midway(kept, config={"limits": {"reattach_timeout": "2s"}})
    for rank in ranks:
        assert rank.last.wait() == 4
        assert "no other daemon has answered within 2000 ms (limits.reattach_timeout); see its log" in rank.last.out()


def begin_with(kept, path):
    """Return: a daemon that starts with the stored descriptors of an earlier build."""
    daemon = kept(stores.CONFIG, plan=[None])
    daemon.signal(signal.SIGKILL)
    daemon.popen.wait()
    daemon.store.kept = [k for k in daemon.store.kept if k[0] == "listen"] + stores.load(path)
    daemon.start_again()
    wait_for("the daemon listens", daemon.listens)
    return daemon


def test_store_of_another_version(kept):
    """A store with another journal version is kept, untouched, until a user drops it."""
    daemon = begin_with(kept, STORES / "journal-1.zip")
    assert daemon.status()["held"] == "its journal has version 1, and this daemon reads version 2"
    assert "journal" in daemon.store.names() and "state" in daemon.store.names()
    daemon.ctl("drop")
    assert daemon.store.names() == ["listen"]


@pytest.mark.parametrize("path", sorted(set(STORES.glob("journal-*.zip")) - {STORES / "journal-1.zip"}), ids=lambda p: p.stem)
def test_store_of_a_release(kept, build, tmp_path, path):
    """The store of an earlier build is adopted, and its run ends with the bits of this build."""
    daemon = begin_with(kept, path)
    status = daemon.status()
    assert not status["held"] and 0 < status["step"] < N_STEPS, daemon.log()
    wait_for("the trainers of then are missed", lambda: daemon.log().count("E1302 warning, rank lost") == 2)
    ranks = kills.start(daemon, [[], []], n_steps=N_STEPS)
    train(daemon, ranks)
    reference = kills.References(build, tmp_path).get(2, n_steps=N_STEPS)
    kills.judge(ranks, daemon, {key: found for key, found in reference.items() if key in kills.results(ranks)})
    assert {key for key in kills.results(ranks) if key[0] == "final"} == {("final", 0), ("final", 1)}


def test_zerodrun_starts_it_again(build, tmp_path):
    """zerodrun restarts the daemon, in a setup like a user's."""
    command = [build.path("client/run/zerodrun"), "-n", "2", "--zerod", build.path("daemon/zerod"), "--", build.path("tests/kill-trainer"), "--steps", "2000"]
    run = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           env=environment(), cwd=tmp_path)
    started = run.stderr.readline()
    pid = int(started.split("(pid ")[1].split(")")[0])
    time.sleep(0.5)
    subprocess.run(["kill", "-9", str(pid)], check=True)
    out, err = run.communicate(timeout=60 * build.patience)
    assert run.returncode == 0, err[-3000:]
    assert f"(pid {pid}) was killed by signal 9 (Killed); restart 1 of 3" in err
    assert "took over the job from the daemon before" in err
    assert out.count("done") == 2
