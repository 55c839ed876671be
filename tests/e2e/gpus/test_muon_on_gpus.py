# SPDX-License-Identifier: Apache-2.0
"""Muon on GPUs: the same bits in any stage and on any number of nodes, and beside host memory within a tolerance."""

import os

import pytest
import torch
from safetensors.torch import load_file

import gpu_kinds
from conftest import merge
from kills import OPTIMIZERS, STATES, References, judge, train
from nodes import Nodes
from puppet import REFUSED, Puppet
from tiers import full

pytestmark = pytest.mark.threads

SHORT = 24
CUDA = {"device": "cuda", "collective": "nccl", "deterministic": True}
SETTINGS, MOMENTS = OPTIMIZERS["Muon"]
TOLERANCE = 1e-4  # relative: tests/engine/test-orthogonalize.c allows 2e-4 for one orthogonalisation


@pytest.fixture(scope="session")
def references(build, tmp_path_factory):
    if not build.options.get("failpoints"):
        pytest.skip("a build without failpoints: meson setup -Dfailpoints=true")
    return References(build, tmp_path_factory.mktemp("references"))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks, stage, bucket_elems, state", [
    ((3,), 3, 50000, "8 bits"), ((2, 1), 1, 2000, "fp32"), *full(
        ((3,), 1, 2000, "fp32"), ((1, 2), 2, 50000, "stochastic"), ((1, 1, 1), 3, 2000, "bf16 moments"), ((1, 2), 3, 300, "8 bits"))])
def test_same_bits(zerod, build, tmp_path, references, monkeypatch, ranks, stage, bucket_elems, state):
    """As on the GPUs of one node in stage 2. Write windows, norms and state that is read are in it."""
    zero = {"stage": stage, "reduce_bucket_size": bucket_elems}
    config = {"zero_optimization": zero, "gradient_clipping": 1.0, "optimizer": SETTINGS, **CUDA}
    nodes = Nodes(zerod, tmp_path, gpu_kinds.spread(ranks), merge(config, STATES[state]), [gpu_kinds.of_daemon(build)] * len(ranks))
    found = train(nodes, [[]] * sum(ranks), ["--moments", MOMENTS], SHORT)
    monkeypatch.setenv("ZEROD_DEVICE", "cuda")
    judge(found, nodes, references.get(sum(ranks), n_steps=SHORT, optimizer="Muon", state=state))
    assert all("E1502 " not in daemon.log() for daemon in nodes.daemons)


def saved(zerod, folder, **more):
    """State and fp32 weights after some steps."""
    checkpoint = {"dir": str(folder), "save_steps": 6}
    daemon = zerod({"world": {"size": 2}, "optimizer": SETTINGS, "checkpoint": checkpoint, **more})
    train(daemon, [[]] * 2, ["--moments", MOMENTS], 6)
    daemon.stop()
    (path,) = folder.glob("step-*")
    values = load_file(path / "optimizer.safetensors") | load_file(path / "model.safetensors")
    return {name: value for name, value in values.items() if value.dtype == torch.float32 and value.numel() > 0}


@pytest.mark.gpu
def test_beside_host_memory(zerod, build, tmp_path, monkeypatch):
    """Other products, so other bits, but the same numbers."""
    host = saved(zerod, tmp_path / "host")
    monkeypatch.setenv("ZEROD_DEVICE", "cuda")
    gpus = saved(zerod, tmp_path / "gpus")
    assert set(host) == set(gpus) and any(name.endswith("momentum_buffer") for name in host)
    assert any(not torch.equal(gpus[name], value) for name, value in host.items())
    for name, value in host.items():
        assert (gpus[name] - value).abs().max() <= TOLERANCE * value.abs().max(), name


def test_cublas_fails(zerod, build, monkeypatch):
    """The error says what has failed."""
    monkeypatch.setenv("ZEROD_DEVICE", "cuda")
    daemon = zerod({"world": {"size": 1}, "optimizer": SETTINGS},
                   gpu_kinds.of_daemon(build, "cublasCreate_v2:error=CUBLAS_STATUS_NOT_INITIALIZED"))
    answer = Puppet(daemon, 0).attach()("form")
    assert answer.r == REFUSED and answer["error"]["code"] == 1502 and "cuBLAS" in answer.text, answer.text


def test_offload_is_refused(zerod):
    with pytest.raises(AssertionError, match="Muon needs gradients and state in one memory"):
        zerod({"world": {"size": 1}, "optimizer": SETTINGS, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}, **CUDA})
