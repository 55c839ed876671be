# SPDX-License-Identifier: Apache-2.0
"""
The GPUs of tests: stand-ins for CUDA and NCCL (tests/sim), unless ZEROD_TEST_GPU selects another kind:

    real  the GPUs of this machine, with its driver and NCCL
    one   stand-ins, with one GPU per test: the tests of `real` on a machine with one GPU

One GPU is enough for a test with the mark gpu: the ranks of one node become ranks of several nodes that share the GPU.
"""

import ctypes
import functools
import os

import pytest

KIND = os.environ.get("ZEROD_TEST_GPU", "stand-ins")
ENGINES = ("tests/sim/zerod-engine-nccl-sim", "daemon/zerod-engine-nccl")
assert KIND in ("stand-ins", "one", "real"), f"ZEROD_TEST_GPU={KIND}, and it may be one or real"


@functools.cache
def count():
    """Return: the number of GPUs that each daemon can use."""
    if KIND != "real":
        return 1 if KIND == "one" else 16
    n = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        pytest.exit(f"ZEROD_TEST_GPU=real: {error}", 1)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(n)) != 0 or n.value == 0:
        pytest.exit("ZEROD_TEST_GPU=real, and there is no GPU", 1)
    return n.value


def of_daemon(build, *items):
    """
    Return: the environment of a daemon whose job is on GPUs. items: items of ZEROD_SIM. A test with ordered faults
    ("call:error=...") is skipped on other GPUs, which cannot fail on order.
    """
    if KIND != "stand-ins" and any(":" in item for item in items):
        pytest.skip("needs the stand-ins, which fail when they are told to")
    if KIND == "real":
        return {"ZEROD_DEVICE_ENGINE": str(build.path(ENGINES[1]))}
    return {"ZEROD_DEVICE_ENGINE": str(build.path(ENGINES[0])),
            "ZEROD_SIM": ",".join((f"devices={count()}", "never-blocks", *items))}


def of_trainer(build, *items):
    """Return: the environment of a trainer. It has no effect on a trainer without a GPU."""
    if KIND == "real":
        return {}
    return {"ZEROD_LIBCUDA": str(build.folder / "tests/sim/libcuda-sim.so"),
            "ZEROD_SIM": ",".join((f"devices={count()}", *items))}


def of_node(node):
    """Return: variables by which the engines of several nodes share a GPU, which NCCL refuses within one host."""
    return {"NCCL_HOSTID": f"zerod-test-{node}", "NCCL_SOCKET_IFNAME": "lo"} if KIND == "real" else {}


def spread(ranks):
    """Return: the ranks of each node, split so that no node needs more GPUs than there are."""
    return [min(count(), n - first) for n in ranks for first in range(0, n, count())]


def n_nodes(world_size):
    """Return: the number of nodes on which a job for one node runs instead."""
    return len(spread([world_size]))
