# SPDX-License-Identifier: Apache-2.0
"""Changes the number of ranks of a job that is in memory. Its state must not change."""

import json
import re
import signal
import subprocess

import pytest

import kills
from conftest import Daemon, environment, free_ports, merge, wait_for
from keeper import KeptDaemon
from nodes import make_key
from test_checkpoints import start  # noqa: F401
from tiers import full

N_STEPS = 10
N_TURNS = 2 + N_STEPS + 2  # turns of the journal: formed, training, steps, windows


def config(world, stage=2, bucket=300, **more):
    return {"world": {"size": world}, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket}, **more}


def train(daemon, world, n_steps, args=("--any-blob",)):
    ranks = kills.train(daemon, [[]] * world, args, n_steps)
    assert all(rank.last.poll() == 0 for rank in ranks), kills.describe(ranks, daemon)
    return kills.results(ranks)


def finals(found):
    """Return: the hashes of master weights, moments and weights of all ranks."""
    return {value for key, values in found.items() if key[0] == "final" for value in values}


@pytest.mark.parametrize("stage, bucket, kept, state", [
    (1, 300, True, "fp32"), (2, 50000, False, "8 bits"), (3, 300, True, "24 bits"), (3, 1, False, "fp32")])
def test_nothing_changes(start, tmp_path, stage, bucket, kept, state):
    """2, 5, 64 and 3 ranks have the same state, and then the steps of a job that loads it from a checkpoint."""
    folder = tmp_path / "checkpoints"
    settings = config(2, stage, bucket, checkpoint={"dir": str(folder), "load": "never"})
    daemon = start(merge(settings, kills.STATES[state]), KeptDaemon if kept else Daemon)
    before = finals(train(daemon, 2, N_STEPS))
    daemon.ctl("checkpoint", "save")
    n_before = 2
    for n_ranks in (5, 64, 3):
        said = daemon.ctl("resize", n_ranks).stdout.strip()
        assert said == f"ranks of the job: {n_ranks}, before it was {n_before}; the next step is {N_STEPS}"
        assert daemon.status()["world_size"] == n_ranks
        n_before = n_ranks
    assert finals(train(daemon, 3, N_STEPS)) == before
    assert "what ranks had stored (loader position, random state) is left out: it was that of 2 ranks" in daemon.log()

    settings = config(3, stage, bucket, checkpoint={"dir": str(folder), "load": "latest"})
    other = start(merge(settings, kills.STATES[state]))
    expected = train(other, 3, N_STEPS + 6)
    found = train(daemon, 3, N_STEPS + 6)
    assert {key for key in expected if key[0] == "norm"} == {("norm", N_STEPS + i) for i in range(6)}
    assert {key: value for key, value in found.items() if key[0] != "gradnorm"} == {
        key: value for key, value in expected.items() if key[0] != "gradnorm"}


@pytest.mark.parametrize("point", ["repartitioned:kill", *(f"{turn}:kill@{N_TURNS + 1}" for turn in ("flip", "flipped"))])
@pytest.mark.parametrize("stage", [2, *full(3)])
def test_killed_meanwhile(start, point, stage):
    """A daemon that is killed during a resize has the old or the new number of ranks, and all of its state."""
    daemon = start(config(2, stage), KeptDaemon, plan=[point, None])
    before = finals(train(daemon, 2, N_STEPS))
    assert daemon.ctl("resize", 3, check=False).returncode != 0
    assert daemon.popen.wait(10) == -signal.SIGKILL
    daemon.start_again()
    wait_for("the daemon listens", daemon.listens)
    status = daemon.status()
    assert not status["held"] and status["step"] == N_STEPS
    assert status["world_size"] == (3 if point.startswith("flipped") else 2)
    daemon.ctl("resize", 3)
    assert finals(train(daemon, 3, N_STEPS)) == before
    daemon.signal(signal.SIGKILL)  # a kept run outlives the daemon, whatever the configuration is
    daemon.popen.wait()
    daemon.start_again()
    wait_for("the daemon listens", daemon.listens)
    assert finals(train(daemon, 3, N_STEPS)) == before
    assert "the run keeps its 3 ranks, although the configuration says 2" in daemon.log()
    daemon.ctl("drop")
    assert daemon.status()["world_size"] == 2
    assert sorted(daemon.store.names()) == ["listen"]


def test_an_open_step_is_begun_again(start):
    """Ranks died during a step. The new ranks repeat it."""
    daemon = start(config(3))
    ranks = kills.start(daemon, [["Push.sent:kill@200"]] * 3, ["--any-blob"], N_STEPS)
    for rank in ranks:
        rank.last.wait()
    step = daemon.status()["step"]
    assert 0 < step < N_STEPS
    wait_for("all are missed", lambda: daemon.status()["n_attached"] == 0)
    wait_for("no rank trains", lambda: daemon.status()["state"] == "waiting")
    daemon.ctl("resize", 2)
    assert len(finals(train(daemon, 2, N_STEPS))) == 1


def test_before_there_is_a_state(start):
    """Without a state a resize is refused, because the daemon could not keep the new number of ranks."""
    daemon = start(config(2))
    refused = daemon.ctl("resize", 3, check=False)
    assert (refused.returncode, refused.stderr) == (
        69, "zerodctl: there is no state yet that 3 ranks could go on with: set world.size, and restart the daemon\n")
    train(daemon, 2, 2)
    assert daemon.ctl("resize", 2).stdout == "ranks of the job: 2, as before\n"


def test_not_more_than_there_are_descriptors_for(start):
    daemon = start(config(2), prefix=["prlimit", "--nofile=100:100"])
    train(daemon, 2, 2)
    refused = daemon.ctl("resize", 64, check=False)
    assert refused.returncode == 69 and "RLIMIT_NOFILE" in refused.stderr, refused.stderr
    assert daemon.status()["world_size"] == 2


def test_what_was_said_of_other_ranks(start):
    daemon = start(config(3))
    train(daemon, 3, 4)
    assert daemon.status()["slowest_rank"] is not None
    daemon.ctl("resize", 1)
    assert daemon.status()["slowest_rank"] is None


def test_other_nodes_are_another_configuration(start, tmp_path):
    """A kept run for other nodes is refused with a text that names the difference."""
    daemon = start(config(2), KeptDaemon)
    train(daemon, 2, 2)
    daemon.signal(signal.SIGKILL)
    daemon.popen.wait()
    path = daemon.config_path
    text = path.read_text()
    nodes = [{"address": f"127.0.0.1:{port}", "ranks": 2} for port in free_ports(2)]
    path.write_text(json.dumps(json.loads(text) | {"collective": "gloo", "world": {
        "size": 4, "node": 0, "key_file": str(make_key(tmp_path)), "nodes": nodes}}))
    daemon.start_again()
    wait_for("it says so", lambda: "world.nodes" in daemon.log())
    assert 'the run has "world.nodes 1", the configuration of this daemon says "world.nodes 2"' in daemon.log()


@pytest.mark.parametrize("argument, text", [
    ("65", "65 ranks on one node; allowed: at most 64"),
    ("0", "resize takes a number of ranks from 1 on, nothing else"),
    ("3x", "resize takes a number of ranks from 1 on, nothing else"),
    ("-3", "resize takes a number of ranks from 1 on, nothing else"),
])
def test_what_is_no_number(start, argument, text):
    daemon = start(config(2))
    train(daemon, 2, 2)
    refused = daemon.ctl("resize", argument, check=False)
    assert refused.returncode in (64, 69) and refused.stderr == f"zerodctl: {text}\n"


def test_not_while_ranks_are_attached(start):
    daemon = start(config(2))
    ranks = kills.start(daemon, [[], []], n_steps=2000)
    wait_for("some steps", lambda: daemon.status()["step"] > 5)
    refused = daemon.ctl("resize", 3, check=False)
    assert (refused.returncode, refused.stderr) == (
        69, "zerodctl: trainers are still attached: end them first (zerodctl ranks lists them)\n")
    assert json.loads(daemon.ctl("--json", "resize", 3, check=False).stdout).keys() == {"error"}
    for rank in ranks:
        rank.last.kill()


def test_not_more_than_there_is_memory_for(start):
    settings = config(2)
    daemon = start(settings)
    train(daemon, 2, 2)
    needed = sum(part["planned_bytes"] for part in daemon.status()["memory"].values())
    daemon.stop()
    daemon = start(settings | {"limits": {"memory": needed + 1_000_000, "clients": 8}})
    before = finals(train(daemon, 2, N_STEPS))
    refused = daemon.ctl("resize", 8, check=False)
    assert refused.returncode == 69
    assert re.fullmatch(r"zerodctl: 8 ranks need \d+ bytes of memory, \d+ more than 2 do, and limits.memory allows only "
                        r"\d+ more\n", refused.stderr), refused.stderr
    assert daemon.ctl("resize", 9, check=False).stderr == (
        "zerodctl: limits.clients lets 8 connect, which is fewer than 9 ranks\n")
    assert finals(train(daemon, 2, N_STEPS)) == before


def test_a_checkpoint_comes_first(start, tmp_path):
    """zerodctl waits for a running save, and reports that."""
    daemon = start(config(2, checkpoint={"dir": str(tmp_path / "c"), "load": "never"}),
                   env={"ZEROD_FAILPOINT": "disk.write:sleep:300@*"})
    before = finals(train(daemon, 2, N_STEPS))
    daemon.ctl("checkpoint", "save", "--no-wait")
    done = daemon.ctl("resize", 3)
    assert done.stderr == "zerodctl: waiting: a checkpoint is being written\n"
    assert daemon.status()["checkpoint"]["n_saved"] == 1
    assert finals(train(daemon, 3, N_STEPS)) == before


@pytest.mark.parametrize("device", ["cuda", "cuda-offload"])
def test_not_on_gpus(start, monkeypatch, device):
    monkeypatch.setenv("ZEROD_DEVICE", device)
    daemon = start(config(2))
    train(daemon, 2, 2)
    refused = daemon.ctl("resize", 3, check=False)
    assert refused.stderr == (
        "zerodctl: a job on GPUs gets another number of ranks by way of a checkpoint: save one, end the job, and start it "
        "with the other number and checkpoint.load: latest\n")
    train(daemon, 2, 4)


def test_zerodrun_does_it(build, tmp_path):
    """zerodrun -n 3, with the run id of a daemon for two ranks, resizes the run."""
    config_path, socket = tmp_path / "zerod.yaml", tmp_path / "zerod.sock"
    config_path.write_text(f"job: test\nlisten: {{socket: {socket}}}\nworld: {{size: 2}}\n"
                           "zero_optimization: {stage: 2, reduce_bucket_size: 300}\n")
    zerodrun = [str(build.path("client/run/zerodrun")), "--zerod", str(build.path("daemon/zerod"))]

    def run(*args):
        trainer = [str(build.path("tests/kill-trainer")), "--any-blob", "--steps", str(N_STEPS)]
        return subprocess.run([*zerodrun, *map(str, args), "--", *trainer], capture_output=True, text=True,
                              env=environment(), timeout=60 * build.patience)

    def final(result):
        assert result.returncode == 0, result.stderr
        return set(re.findall("final (.*)", result.stdout))

    keeper = subprocess.Popen([*zerodrun, "--serve", "--config", config_path], stderr=subprocess.PIPE, text=True,
                              env=environment())
    try:
        next(line for line in keeper.stderr if "ready: " in line)
        before = final(run("--config", config_path, "--run-id", "it"))
        refused = run("--socket", socket, "-n", 3, "--run-id", "another")
        assert refused.returncode == 64 and (
            f"zerodrun: -n 3, but the daemon on {socket} has world.size 2 and the state of run it: with --run-id it that run "
            'goes on with 3 ranks, "zerodctl drop" forgets it\n') in refused.stderr
        again = run("--socket", socket, "-n", 3, "--run-id", "it")
        assert final(again) == before and again.stdout.count("done") == 3
        assert f"zerodrun: ranks of the job: 3, before it was 2; the next step is {N_STEPS}\n" in again.stderr
        assert run("--config", config_path, "--run-id", "it").stdout.count("done") == 3  # the daemon's number
        back = run("--config", config_path, "-n", 1, "--run-id", "it")
        assert final(back) == before and back.stdout.count("done") == 1
    finally:
        keeper.terminate()
        keeper.communicate()
