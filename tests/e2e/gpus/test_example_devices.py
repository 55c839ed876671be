# SPDX-License-Identifier: Apache-2.0
"""
The example trainer with --device cuda: a real daemon, a real engine over the stand-ins of tests/sim, and trainers whose
driver is a stand-in too, so that they share memory with the engine. The reference computes the same training in one
process.
"""

import json
import os
import signal
from pathlib import Path

import pytest

import gpu_kinds
from conftest import wait_for
from tiers import full

MODEL = ["--steps", 5, "--micro-batches", 2, "--batch", 2, "--seq", 16, "--layers", 2, "--width", 32, "--heads", 4]


class Job:
    def __init__(self, zerod, build, world, stage=2, sim="", **config):
        self.build, self.world, self.sim = build, world, sim
        # Parcels are smaller than the largest parameter, so that it is pushed in parts.
        self.daemon = zerod(
            {"world": {"size": world}, "device": "cuda", "collective": "nccl", "gradient_clipping": 1.0,
             "zero_optimization": {"stage": stage, "reduce_bucket_size": 3000}} | config,
            gpu_kinds.of_daemon(build, *sim.split()))

    def start(self, rank, *options, failpoint=None, local_rank=None, sim=None):
        env = gpu_kinds.of_trainer(self.build, *(self.sim if sim is None else sim).split())
        if local_rank is not None:
            env["LOCAL_RANK"] = local_rank
        return self.daemon.spawn(self.build.path("tests/example/zerod-example"), "--device", "cuda", "--dump",
                                 self.dump(rank), "--report", self.report(rank), *MODEL, *options, rank=rank, env=env,
                                 failpoint=failpoint)

    def dump(self, rank):
        return self.daemon.folder / f"{rank}.weights"

    def report(self, rank):
        return self.daemon.folder / f"{rank}.report"

    def events(self, rank, name):
        return [e for e in map(json.loads, self.report(rank).read_text().splitlines()) if e["event"] == name]

    def check(self, ranks):
        """All ranks must have ended well, with the weights of the reference."""
        for rank in ranks:
            assert rank.wait() == 0, rank.err()
        expected = self.daemon.folder / "reference.weights"
        reference = self.daemon.spawn(self.build.path("tests/example/zerod-example-reference"), "--world-size",
                                      self.world, "--dump", expected, *MODEL)
        assert reference.wait() == 0, reference.err()
        for rank in range(self.world):
            assert self.dump(rank).read_bytes() == expected.read_bytes()


@pytest.fixture
def job(zerod, build):
    return lambda *args, **how: Job(zerod, build, *args, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("world, stage, sim", [
    (1, 1, ""), (2, 2, "delay-us=3000"), *full((3, 1, "seed=3"), (4, 2, "delay-us=0"))])
def test_trains(job, world, stage, sim):
    j = job(world, stage, sim)
    j.check([j.start(r) for r in range(world)])


def test_trainers_stream_is_slow(job):
    """The engine is informed of a push long before the trainer's stream has computed the gradient."""
    j = job(2, 2, "delay-us=0")
    j.check([j.start(r, sim="delay-us=8000") for r in range(2)])


@pytest.mark.gpu
def test_duplicate(job):
    """A duplicate is refused after a comparison of both gradients' bytes, and the first one stays."""
    j = job(2)
    j.check([j.start(r, "--provoke-duplicate", "2:blocks.1.attn.proj.weight:1") for r in range(2)])
    (said,) = j.events(1, "provoked")
    assert (said["code"], said["rank"], said["step"], said["param"]) == (1001, 1, 2, "blocks.1.attn.proj.weight")
    assert not j.events(0, "provoked")


@pytest.mark.gpu
@pytest.mark.parametrize("failpoint", ["copy:kill@9", "slot:kill@17", "Push.sent:kill@5", "EndBackward.wait:kill@3",
                                       "Step.answered:kill@2", "formed:kill"])
def test_trainer_is_killed(job, failpoint):
    """The killed trainer's successor repeats its open micro-batch, with its own points."""
    j = job(2)
    others, victim = [j.start(0)], j.start(1, failpoint=failpoint)
    assert victim.wait() == -signal.SIGKILL, victim.err()
    j.check([*others, j.start(1)])


def test_others_push_after_its_death(job):
    """The engine gets orders after the trainer's death that wait for work which the trainer's GPU will never finish."""
    j = job(2)
    others, victim = [j.start(0, failpoint="slot:sleep:4000")], j.start(1, sim="cuStreamWriteValue64:delay=600000@10")
    n_pushes = lambda rank: j.daemon.json("ranks")[rank]["n_pushes"]
    # Some gradients are pushed in parts. With the seventh push the rank has written ten points; the engine waits for
    # the tenth.
    wait_for("its tenth point", lambda: n_pushes(1) == 7)
    victim.popen.kill()
    victim.wait()
    wait_for("all that rank 0 has", lambda: n_pushes(0) == 29)
    wait_for("the last of its points", lambda: "the trainer of local rank 1 is gone" in j.daemon.log())
    j.check([*others, j.start(1)])
    assert "E1502" not in j.daemon.log()


def test_wrong_gpu(job):
    j = job(1)
    rank = j.start(0, local_rank=2)
    assert rank.wait() == 1
    gpu = "GPU-73696d2d-6465-7669-6365-2d4{}00000000"
    assert rank.err().splitlines()[-1] == (
        f"this rank's memory lies on {gpu.format(1)}, and this process uses {gpu.format(3)}: cudaSetDevice(0) first, or "
        "let CUDA_VISIBLE_DEVICES name the GPUs in the order of the ranks")


@pytest.mark.gpu
def test_told_otherwise(job, zerod, build):
    program = build.path("tests/example/zerod-example")
    for daemon, device in ((job(1).daemon, "cuda"), (zerod({"world": {"size": 1}}), "cpu")):
        other = {"cuda": "cpu", "cpu": "cuda"}[device]
        rank = daemon.spawn(program, "--device", other, *MODEL, rank=0)
        assert rank.wait() == 1
        assert rank.err().splitlines()[0] == (
            f"zerod-example: the daemon's job has device: {device}; start with --device {device}")


def test_engine_is_killed(job):
    """The trainers only see a pause when the engine is killed."""
    j = job(2, 2, "delay-us=3000")
    ranks = [j.start(r) for r in range(2)]
    children = Path(f"/proc/{j.daemon.pid}/task/{j.daemon.pid}/children")
    killed = []
    for step in (1, 3):
        wait_for(f"step {step}", lambda step=step: j.report(0).exists() and len(j.events(0, "step")) >= step)
        (engine,) = wait_for("an engine", lambda: [int(p) for p in children.read_text().split() if int(p) not in killed])
        os.kill(engine, signal.SIGKILL)
        killed.append(engine)
    j.check(ranks)
    assert j.daemon.log().count("E1502") == 2
