# SPDX-License-Identifier: Apache-2.0
"""
Muon on GPUs: the same bits in all stages and on any number of nodes, and the same numbers as in host memory within a
tolerance.
"""

import re

import pytest

import gpu_kinds
from conftest import merge
from kills import OPTIMIZERS, STATES, judge, results, train
from nodes import Nodes
from tiers import full

pytestmark = pytest.mark.threads

SHORT = 24
CUDA = {"device": "cuda", "collective": "nccl", "deterministic": True}
SETTINGS, MOMENTS = OPTIMIZERS["Muon"]
TOLERANCE = 1e-4  # relative; tests/engine/test-orthogonalize.c allows 2e-4 for one orthogonalisation


@pytest.mark.gpu
@pytest.mark.parametrize("ranks, stage, bucket_elems, state", [
    ((3,), 3, 50000, "24 bits"), ((2, 1), 1, 2000, "fp32"), *full(
        ((3,), 1, 2000, "fp32"), ((1, 2), 2, 50000, "stochastic"), ((1, 1, 1), 3, 2000, "bf16 moments"), ((1, 2), 3, 300, "8 bits"))])
def test_same_bits(zerod, build, tmp_path, ranks, stage, bucket_elems, state):
    """The bits are those of one node's GPUs in stage 2. The run includes write windows, norms and reads of state."""

    def run(name, ranks, **zero):
        (tmp_path / name).mkdir()
        ranks = gpu_kinds.spread(ranks)
        config = merge({"zero_optimization": zero, "gradient_clipping": 1.0, "optimizer": SETTINGS, **CUDA}, STATES[state])
        nodes = Nodes(zerod, tmp_path / name, ranks, config, [gpu_kinds.of_daemon(build)] * len(ranks))
        found = train(nodes, [[]] * sum(ranks), ["--moments", MOMENTS], SHORT)
        assert all("E1502 " not in daemon.log() for daemon in nodes.daemons)
        return found, nodes

    wanted = results(run("wanted", (sum(ranks),), stage=2)[0])
    assert len(wanted["weights", SHORT - 1]) == 1
    judge(*run("found", ranks, stage=stage, reduce_bucket_size=bucket_elems), wanted)


def saved(zerod, folder, config):
    """Return: state and fp32 weights after some steps."""
    checkpoint = {"dir": str(folder), "save_steps": 6}
    daemon = zerod(merge({"world": {"size": 1}, "optimizer": SETTINGS, "checkpoint": checkpoint}, config))
    train(daemon, [[]], ["--moments", MOMENTS], 6)
    daemon.stop()
    load_file = pytest.importorskip("safetensors.torch").load_file
    (path,) = folder.glob("step-*")
    values = load_file(path / "optimizer.safetensors") | load_file(path / "model.safetensors")
    return {name: value for name, value in values.items() if value.element_size() == 4 and value.numel() > 0}


@pytest.mark.gpu
@pytest.mark.parametrize("config", [{}, {"optimizer": {"params": {"master_weight_bits": 24}}}], ids=["fp32", "24 bits"])
def test_beside_host_memory(zerod, tmp_path, monkeypatch, config):
    """Products on GPUs have other bits than in host memory, but the numbers agree within the tolerance."""
    host = saved(zerod, tmp_path / "host", config)
    monkeypatch.setenv("ZEROD_DEVICE", "cuda")
    gpus = saved(zerod, tmp_path / "gpus", config)
    assert set(host) == set(gpus) and any(name.endswith("momentum_buffer") for name in host)
    assert any((gpus[name] != value).any() for name, value in host.items())
    for name, value in host.items():
        assert (gpus[name] - value).abs().max() <= TOLERANCE * value.abs().max(), name


def test_cublas_fails(zerod, build, monkeypatch):
    """If cuBLAS fails, the error names the call that failed."""
    monkeypatch.setenv("ZEROD_DEVICE", "cuda")
    daemon = zerod({"world": {"size": 1}, "optimizer": SETTINGS},
                   gpu_kinds.of_daemon(build, "cublasCreate_v2:error=CUBLAS_STATUS_NOT_INITIALIZED"))
    (rank,) = train(daemon, [[]], ["--moments", MOMENTS], 1)
    assert re.search("refused 1502 .*cuBLAS", rank.last.out()), rank.last.out()


def test_offload_is_refused(zerod):
    with pytest.raises(AssertionError, match="Muon needs gradients and state in one memory"):
        zerod({"world": {"size": 1}, "optimizer": SETTINGS, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}, **CUDA})
