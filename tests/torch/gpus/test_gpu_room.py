# SPDX-License-Identifier: Apache-2.0
"""
Models on GPUs with a daemon in host memory and the default configuration. The job has large buckets, and rings for all
gradients of a micro-batch if there is enough memory. The bits are those of models in host memory. late_cuda.py stands
in for a GPU.
"""

import contextlib
import io
import json
import os
import re
import signal
import subprocess

import late_cuda
import pytest
import torch
from keeper import KeptDaemon
from tiers import full
from torch import nn

N_LAYERS, WIDTH, N_STEPS = 3, 1024, 2
ARENA = 4 * N_LAYERS * WIDTH * WIDTH  # bytes of a micro-batch's gradients; more than five buckets of 500,000
AUTO = {"reduce_bucket_size": "auto"}


def train(on_gpu):
    """
    Runs a rank. on_gpu: ranks whose model is on a GPU. Return: weights, rank 0's output, status, copies and problems.
    """
    if int(os.environ["RANK"]) in on_gpu:
        late_cuda.install()
    import zerod

    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(N_LAYERS)))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        opt = zerod.Optimizer(model)
    n_blocked = 0
    for step in range(N_STEPS):
        for micro_batch in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + opt.rank)
            loss = model(torch.randn(2, WIDTH, generator=generator)).square().mean()
            before = late_cuda.counts["blocked"]
            loss.backward()
            n_blocked += late_cuda.counts["blocked"] - before
        status = opt._client.status(10)  # before the step, because no rank leaves before the other one's last step
        opt.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    opt.close()
    return weights, said.getvalue(), status, late_cuda.counts | {"in backward": n_blocked}, list(late_cuda.problems)


def sizes(status):
    ring = status["memory"]["ring"]
    assert ring["held_bytes"] == pytest.approx(ring["planned_bytes"], rel=0.02, abs=16 << 20)
    return status["bucket_elems"], ring["held_bytes"] / (ARENA * status["n_attached"])


def check_bits(reference, ranks):
    for rank in ranks:
        assert torch.equal(rank[0], reference)
        assert rank[4] == []


found = []  # the reference of this process


@pytest.fixture
def reference(zerod, run):
    """The weights of models in host memory, with the default sizes for host memory."""
    if not found:
        daemon = zerod({"zero_optimization": AUTO})
        ranks = run(daemon, train, on_gpu=())
        assert ranks[0][2]["bucket_elems"] == 500_000 and sizes(ranks[0][2])[1] < 0.9
        assert "on GPUs" not in daemon.log() and ", the ring of" not in ranks[0][1]
        found.append(ranks[0][0])
    return found[0]


def bytes_needed(build, *more):
    """more: arguments of zerodctl plan."""
    command = [build.path("client/ctl/zerodctl"), "--json", "plan", "--ranks", "2", "--params", str(ARENA // 4), *more]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def test_sizes(build, zerod, run, reference):
    daemon = zerod({"zero_optimization": AUTO})
    ranks = run(daemon, train, on_gpu=(0, 1))
    check_bits(reference, ranks)
    for rank in ranks:
        assert sizes(rank[2]) == (50_000_000, pytest.approx(1, rel=0.02))
        assert rank[3]["waited"] == 0 and rank[3]["late"] == N_STEPS * 2 * N_LAYERS
        assert rank[3]["in backward"] == 0, "a backward waited for room"
    assert re.search(r"the models are on GPUs: \d+ workers, buckets of up to 50000000 elements, and a ring of 12.0 MiB for "
                     r"each rank, which holds all gradients of a micro-batch\n", daemon.log()), daemon.log()
    assert "the update begins in the backward, in spare places of " in daemon.log()
    assert ranks[0][2]["early_updates"]["prevented_by"] in (None, "micro-batches", "workers")  # nothing of the machine
    assert ", the ring of 12.0 MiB holds all of the GPU's gradients; from the daemon" in ranks[0][1]
    planned = bytes_needed(build, "--offload")["bytes_by_class"]
    for name, n_bytes in planned.items():
        assert ranks[0][2]["memory"][name]["planned_bytes"] == pytest.approx(n_bytes, rel=0.02, abs=16 << 20), name
    assert ranks[0][2]["memory"]["ring"]["planned_bytes"] == pytest.approx(planned["ring"], rel=0.02)


def test_one_model_in_host_memory(zerod, run, reference):
    daemon = zerod({"zero_optimization": AUTO})
    ranks = run(daemon, train, on_gpu=(1,))
    check_bits(reference, ranks)
    assert ranks[0][2]["bucket_elems"] == 500_000 and sizes(ranks[0][2])[1] < 0.9
    assert "the models of 1 of 2 ranks are on GPUs, the others in host memory" in daemon.log()


@pytest.mark.parametrize("settings, bucket, share, said", [
    (AUTO, 500_000, 0.8, "for large buckets and rings: as for models in host memory there are buckets of up to 500000 "),
    ({"reduce_bucket_size": 200_000}, 200_000, 0.33, "for rings of 12.0 MiB, which hold all gradients of a micro-batch"),
], ids=["buckets", "ring"])
def test_memory_is_short(build, zerod, run, reference, tmp_path, settings, bucket, share, said):
    """With little memory the job has smaller rings and no spare places, and one line reports this."""
    config = tmp_path / "plan.yaml"  # memory is short for the spare places of a speculative update, too
    config.write_text("zero_optimization: {speculative_update: false}\n")
    limit = bytes_needed(build, "--offload", "--config", str(config))["needed_bytes"] - (4 << 20)
    daemon = zerod({"zero_optimization": settings, "limits": {"memory": f"{limit >> 10}KiB"}})
    ranks = run(daemon, train, on_gpu=(0, 1))
    check_bits(reference, ranks)
    assert sizes(ranks[0][2]) == (bucket, pytest.approx(share, rel=0.1))
    lines = [line for line in daemon.log().splitlines() if "the models are on GPUs" in line]
    assert len(lines) == 1 and f"memory is short {said}" in lines[0], daemon.log()
    assert "the update begins" not in daemon.log()
    early = ranks[0][2]["early_updates"]
    assert early["prevented_by"] == "memory" and re.fullmatch(r"memory is short: 0 of \d+ buckets have spare places", early["why"])
    assert "holds a part of the GPU's gradients" in ranks[0][1]


def test_a_part_is_updated_early(build, zerod, run, reference, tmp_path):
    """With memory for the spare places of a part of the model, the buckets whose gradients come first have them."""
    zero, needed = {"reduce_bucket_size": 500_000}, []
    for early in ("false", "auto"):
        config = tmp_path / "plan.yaml"
        config.write_text(f"zero_optimization: {{reduce_bucket_size: 500000, speculative_update: {early}}}\n")
        needed.append(bytes_needed(build, "--offload", "--config", str(config))["needed_bytes"])
    limit = needed[0] + int(0.8 * (needed[1] - needed[0])) + (20 << 20)  # and for a write window and a reading
    daemon = zerod({"zero_optimization": zero, "limits": {"memory": f"{limit >> 10}KiB"}})
    ranks = run(daemon, train, on_gpu=(0, 1))
    check_bits(reference, ranks)
    assert f"the update of 2 of {N_LAYERS} buckets begins in the backward, in spare places of " in daemon.log()
    early = daemon.status()["early_updates"]
    assert (early["prevented_by"], early["why"]) == ("memory", f"memory is short: 2 of {N_LAYERS} buckets have spare places")
    assert 0 <= early["early_elems"] <= early["elems"] * 2 // N_LAYERS


@pytest.mark.full
def test_little_memory_is_wanted(zerod, run, reference):
    """overlap_comm: false. The rings have room for two buckets."""
    daemon = zerod({"zero_optimization": {"reduce_bucket_size": 500_000, "overlap_comm": False}})
    ranks = run(daemon, train, on_gpu=(0, 1))
    check_bits(reference, ranks)
    assert sizes(ranks[0][2]) == (500_000, pytest.approx(2 * 500_000 * 4 / ARENA, rel=0.1))
    assert "because of overlap_comm: false" in daemon.log()


@pytest.mark.parametrize("on_gpu, bucket", [((0, 1), 50_000_000), *full(((0,), 8_000_000), ((1,), 8_000_000))])
def test_all_nodes_have_one_layout(zerod, run, reference, monkeypatch, on_gpu, bucket):
    monkeypatch.setenv("ZEROD_NODES", "2")
    daemon = zerod({"zero_optimization": AUTO})
    ranks = run(daemon, train, on_gpu=on_gpu)
    check_bits(reference, ranks)
    assert [rank[2]["bucket_elems"] for rank in ranks] == [bucket, bucket]
    for node, one in enumerate(daemon.daemons):
        wrong = "another node has not the memory, or has models in host memory, for large buckets and rings"
        assert (wrong in one.log()) == (on_gpu == (node,)), one.log()


def test_a_run_keeps_its_rings(build, start, tmp_path, reference):
    """A daemon that adopts the run keeps the size of its rings. Another run gets new rings."""
    daemon = KeptDaemon(build, tmp_path, {"zero_optimization": AUTO}, plan=["summed:kill@3", None])
    try:
        ranks = [start(daemon, train, rank, on_gpu=(0, 1)) for rank in range(2)]
        assert daemon.popen.wait(60 * daemon.patience) == -signal.SIGKILL
        daemon.start_again()
        ranks = [rank.result() for rank in ranks]
        check_bits(reference, ranks)
        assert sizes(ranks[0][2]) == (50_000_000, pytest.approx(1, rel=0.02))
        assert daemon.status()["n_daemons"] == 2
        daemon.ctl("drop")
        again = [start(daemon, train, rank, on_gpu=()) for rank in range(2)]
        again = [rank.result() for rank in again]
        check_bits(reference, again)
        assert again[0][2]["bucket_elems"] == 500_000
    finally:
        daemon.kill()
