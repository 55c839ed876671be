# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several nodes. Each node writes the state that it owns, and any job can load them."""

import json
import os
import re
import signal
import subprocess
import sys

import kills
import pytest
from conftest import Daemon, wait_for
from keeper import KeptDaemon
from nodes import Nodes
from test_checkpoints import config, flip, references, same_tensors, saved, start  # noqa: F401
from tiers import full

N_STEPS = 40

# Reads both forms of a checkpoint, in one file and in parts, with torch alone.
BY_DCP = """
import sys
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

whole = load_file(f"{sys.argv[1]}/model.safetensors") | load_file(f"{sys.argv[1]}/optimizer.safetensors")
for folder in sys.argv[2:]:
    found = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(folder))
    print(len(found), all(torch.equal(found[name], whole[name]) for name in whole))
"""


def train(job, world, n_steps, args=()):
    ranks = kills.train(job, [[]] * world, args, n_steps)
    assert all(rank.last.poll() == 0 for rank in ranks), kills.describe(ranks, job)
    return ranks


@pytest.fixture
def begin(build, tmp_path):
    """begin(ranks, config) stops the previous job and starts a daemon on each node. kind: the daemons' class."""
    jobs = []

    def stop():
        for daemon in jobs.pop() if jobs else []:
            daemon.stop()

    def start_job(ranks, settings, prefixes=None, envs=None, kind=Daemon):
        stop()
        folder = tmp_path / f"job{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        daemons = []

        def one(config, env=None, prefix=()):
            where = folder / str(len(daemons))
            where.mkdir()
            more = {"prefix": prefixes[len(daemons)]} if len(daemons) in (prefixes or {}) else {}
            daemons.append(kind(build, where, config, env, **more))
            return daemons[-1]

        jobs.append(daemons)
        return Nodes(one, folder, ranks, settings, envs) if len(ranks) > 1 else one(settings)

    yield start_job
    stop()


@pytest.mark.parametrize("stage, device", [(2, ""), (3, ""), (3, "cuda"), *full((1, ""), (2, "cuda"), (2, "cuda-offload"))])
def test_go_on_as_if_nothing_had_been(begin, tmp_path, references, monkeypatch, stage, device):  # noqa: F811
    reference = references.get(2, False, N_STEPS)
    monkeypatch.setenv("ZEROD_DEVICE", device)
    folder = tmp_path / "checkpoints"
    nodes = begin((1, 1), config(folder, 2, stage, save_steps=5, save_total_limit=2))
    train(nodes, 2, 21)
    nodes.daemons[1].ctl("checkpoint", "save")
    assert len(saved(folder)) == 2 and saved(folder)[-1] == "step-00000021"

    nodes = begin((1, 1), config(folder, 2, stage))
    ranks = train(nodes, 2, N_STEPS)
    assert all(f"loaded {folder}/step-00000021" in daemon.log() for daemon in nodes.daemons)
    found = kills.results(ranks)
    assert min(key[1] for key in found if key[0] == "norm") == 21
    assert {key: value for key, value in found.items() if key not in reference or reference[key] != value} == {}


@pytest.mark.parametrize("device", ["cuda", *full("cuda-offload")])
def test_saved_after_a_node_has_asked(begin, tmp_path, references, monkeypatch, device):  # noqa: F811
    """
    On GPUs, node 1 has asked for step 8 when node 0 orders a checkpoint of step 7. Node 1 copies its state while the
    step is decided. The update waits for the copy, so that the checkpoint has no part of step 8.
    """
    reference = references.get(2, False, N_STEPS)
    monkeypatch.setenv("ZEROD_DEVICE", device)
    folder = tmp_path / "checkpoints"
    nodes = begin((1, 1), config(folder, 2, 2, save_on_stop=False), envs=[{}, {"ZEROD_FAILPOINT": "staging:sleep:3000@2"}])
    ranks = kills.start(nodes, [["Step.send:sleep:1500@8"], []], n_steps=10)
    wait_for("node 1 asks", lambda: nodes.daemons[1].status()["step"] == 7 and nodes.daemons[1].json("ranks")[0]["state"] == "step")
    said = save(nodes.daemons[0])
    kills.finish(ranks, nodes)
    assert "step-00000007" in said and saved(folder) == ["step-00000007"], said

    nodes = begin((1, 1), config(folder, 2, 2))
    found = kills.results(train(nodes, 2, N_STEPS))
    assert min(key[1] for key in found if key[0] == "norm") == 7
    assert {key: value for key, value in found.items() if key not in reference or reference[key] != value} == {}


def test_into_any_job(begin, tmp_path, monkeypatch):
    """
    A checkpoint is loaded by jobs of one, two, three and one nodes, with other stages and buckets, and on GPUs. Master
    weights, moments and counts keep their bits.
    """
    folders = [tmp_path / f"c{i}" for i in range(5)]
    daemon = begin((4,), config(folders[0], 4, 1))
    train(daemon, 4, 4, ["--window", 50])
    daemon.ctl("checkpoint", "save")
    jobs = [((2, 1), 3, 500, ""), ((1, 2, 1), 2, 50000, "cuda"), ((1, 1), 1, 1, ""), ((3,), 2, 300, "")]
    for i, (ranks, stage, bucket, device) in enumerate(jobs):
        monkeypatch.setenv("ZEROD_DEVICE", device)
        settings = config(folders[i + 1], sum(ranks), stage, load=str(folders[i] / "step-00000004"))
        settings["zero_optimization"]["reduce_bucket_size"] = bucket
        job = begin(ranks, settings)
        train(job, sum(ranks), 4, ["--window", 50, "--any-blob"])
        daemon = job.daemons[-1] if len(ranks) > 1 else job
        daemon.ctl("checkpoint", "save")
        daemon.ctl("checkpoint", "verify")
    assert same_tensors(folders[0] / "step-00000004", folders[4] / "step-00000004")
    read = subprocess.run([sys.executable, "-c", BY_DCP, *(folders[i] / "step-00000004" for i in (0, 1, 2, 3))],
                          capture_output=True, text=True)
    assert re.fullmatch(r"(\d\d True\n){3}", read.stdout), read.stdout + read.stderr


def seen_as(path, instead):
    """Return: the first words of a command that runs a daemon for which another file or folder has that name."""
    return ["unshare", "-m", "sh", "-c", f'mount --bind {instead} {path} && exec "$@"', "sh"]


def test_a_node_cannot_read_the_newest(begin, tmp_path):
    """One node reads a wrong bit in the newest checkpoint. All nodes load the previous one."""
    folder, wrong = tmp_path / "checkpoints", tmp_path / "wrong"
    nodes = begin((1, 1), config(folder, 2, 2))
    for n_steps in (5, 10):
        train(nodes, 2, n_steps)
        nodes.daemons[0].ctl("checkpoint", "save")
    path = folder / "step-00000010" / "optimizer-node1.safetensors"
    wrong.write_bytes(path.read_bytes())
    flip(wrong)
    nodes = begin((1, 1), config(folder, 2, 2), {1: seen_as(path, wrong)})
    train(nodes, 2, 10)
    assert "step-00000010 is not loaded, because another node cannot read it" in nodes.daemons[0].log()
    assert all(f"loaded {folder}/step-00000005" in daemon.log() for daemon in nodes.daemons)


def test_a_folder_that_is_not_shared(begin, tmp_path):
    """On node 1 the path is another folder: no checkpoint gets its final name, and none is loaded by one node only."""
    folder, hidden = tmp_path / "checkpoints", tmp_path / "hidden"
    folder.mkdir()
    hidden.mkdir()
    other = {1: seen_as(folder, hidden)}
    nodes = begin((1, 1), config(folder, 2, 2, save_steps=5, save_on_stop=False), other)
    train(nodes, 2, 6)
    wait_for(nodes.logs, lambda: all("E1701 warning, checkpoint not saved" in daemon.log() for daemon in nodes.daemons))
    text = nodes.daemons[0].log()
    assert re.search(r"node 0: node 1 has written its part, but not where this node looks: all nodes must see one folder "
                     r"there \(.step-00000005.[0-9a-f]{16}.writing/node1.json: No such file or directory\)", text), text
    assert [name for name in saved(folder) if not name.startswith(".")] == []

    daemon = begin((2,), config(folder, 2, 2))
    train(daemon, 2, 5)
    daemon.ctl("checkpoint", "save")
    assert saved(folder) == ["step-00000005"]
    nodes = begin((1, 1), config(folder, 2, 2), other)
    ranks = kills.train(nodes, [[]] * 2, [], 6)
    for rank in ranks:
        assert "node 1 finds no checkpoint in checkpoint.dir, and node 0 has found that of step 5" in rank.last.out()


def test_another_folder_with_the_same_step(begin, tmp_path):
    """Different checkpoints of the same step are refused, because nodes would begin with different weights."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for i, folder in enumerate(folders):
        nodes = begin((1, 1), config(folder, 2, 2))
        train(nodes, 2, 5, ["--seed", i + 1])
        nodes.daemons[0].ctl("checkpoint", "save")
    nodes = begin((1, 1), config(folders[0], 2, 2), {1: seen_as(*folders)})
    for rank in kills.train(nodes, [[]] * 2, ["--seed", 1], 6):
        assert "node 1 has found another checkpoint of step 5 in checkpoint.dir than node 0" in rank.last.out()


def save(daemon, timeout=20):
    """Return: the output of zerodctl checkpoint save, which must end within that time."""
    command = [daemon.build.path("client/ctl/zerodctl"), "--socket", daemon.socket, "checkpoint", "save"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout * daemon.build.patience)
    return result.stdout + result.stderr


def test_saved_again_by_the_next_daemon(begin, tmp_path):
    """
    A new daemon does not know of a checkpoint that an earlier daemon saved. Its answer to a save is still correct.
    """
    nodes = begin((1, 1), config(tmp_path / "checkpoints", 2, 2, load="never"), kind=KeptDaemon)
    train(nodes, 2, 6)
    assert "step-00000006" in save(nodes.daemons[0])
    daemon = nodes.daemons[1]
    daemon.signal(signal.SIGKILL)
    daemon.popen.wait()
    daemon.start_again()
    wait_for("the next daemon", lambda: daemon.is_settled() and daemon.listens())
    for node in (1, 0, 1):
        assert "step-00000006" in save(nodes.daemons[node])


def test_a_save_that_ended_before_it_began(begin, tmp_path):
    """Node 1's disk fails twice while node 0 is still busy with the first save. The next save succeeds."""
    envs = [{"ZEROD_FAILPOINT": "disk.sync:sleep:1000@1"}, {"ZEROD_FAILPOINT": "disk.create:error@1,disk.create:error@2"}]
    nodes = begin((1, 1), config(tmp_path / "checkpoints", 2, 2, load="never"), envs=envs)
    train(nodes, 2, 6)
    for _ in range(2):
        assert "node 1: model-node1.safetensors: No space left on device" in save(nodes.daemons[1])
    wait_for(nodes.logs, lambda: not nodes.daemons[0].status()["checkpoint"]["saving"])
    assert "step-00000006" in save(nodes.daemons[1])


@pytest.mark.full
@pytest.mark.parametrize("first", (0, 1))
def test_stopped_one_after_the_other(begin, tmp_path, first):
    """
    With save_on_stop, a node that stops later does not wait forever for a node that has stopped. It fails if the ranks
    have done another step after the checkpoint.
    """
    nodes = begin((1, 1), config(tmp_path / "checkpoints", 2, 2, save_on_stop=True))
    kills.start(nodes, [[]] * 2, [], 1000000)
    wait_for(nodes.logs, lambda: nodes.daemons[0].status()["step"] > 4)
    for node in (first, 1 - first):
        nodes.daemons[node].signal(signal.SIGTERM)
        unsaved = nodes.daemons[node].wait(30) == os.EX_IOERR
        assert unsaved == ("the last step is not saved: the other nodes do not answer" in nodes.daemons[node].log()), nodes.logs()
        assert node != first or not unsaved, nodes.logs()
        if unsaved:
            nodes.daemons[node].kill()
    for process in nodes.daemons[0].others + nodes.daemons[1].others:
        process.kill()


def test_what_is_written(begin, tmp_path):
    folder = tmp_path / "checkpoints"
    nodes = begin((2, 1), config(folder, 3, 3))
    train(nodes, 3, 5)
    nodes.daemons[1].ctl("checkpoint", "save")
    last = folder / "step-00000005"
    names = set(saved(last))
    assert {f"{kind}-node{node}.safetensors" for kind in ("model", "optimizer", "ranks") for node in (0, 1)} <= names
    facts = json.loads((last / "zerod.json").read_text())
    assert (facts["nodes"], facts["world_size"]) == (2, 3)
    assert {file["name"] for file in facts["files"]} == {name for name in names if name.endswith(".safetensors")}
