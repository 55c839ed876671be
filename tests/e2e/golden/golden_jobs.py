# SPDX-License-Identifier: Apache-2.0
"""
Places in which a golden case runs: the core of the daemon (tests/programs/golden-driver.c), or a real daemon with a
process per rank (tests/programs/golden-client.c), in host memory or on GPUs, which are the stand-ins of tests/sim.

With ZEROD_TIMING=1 no push may take longer than 50 ms. Otherwise the duration of the slowest push is only printed.
"""

import json
import os
import subprocess

import numpy as np

import gpu_kinds
from conftest import DEFAULTS, merge, wait_for
from golden_bits import check_norms, differences, golden_run, list_isas, read_results, wanted_state

TIMING = os.environ.get("ZEROD_TIMING", "0") == "1"
MOST_MS = 50
ONE_EACH, EVERYTHING = 1, 10**9
BUCKETS = (ONE_EACH, 64, 500, EVERYTHING)
ORDERS = ("forward", "reverse", "alternate", "random")
MOMENTS = {"fp32": {}, "bf16": {"bf16": {"bf16_optimizer_states": True}},
           "bf16-stochastic": {"bf16": {"bf16_optimizer_states": True, "stochastic_rounding": True}},
           "8bit": {"optimizer": {"params": {"optim_bits": 8}}},
           "fp32-24bit": {"optimizer": {"params": {"master_weight_bits": 24}}},
           "bf16-24bit": {"bf16": {"bf16_optimizer_states": True}, "optimizer": {"params": {"master_weight_bits": 24}}},
           "8bit-24bit": {"optimizer": {"params": {"optim_bits": 8, "master_weight_bits": 24}}}}
OFFLOADS = {"none": {}, "cpu": {"offload_optimizer": {"device": "cpu"}}}


# ---- the core ------------------------------------------------------------------------------------------------


class Driver:
    def __init__(self, program, folder):
        self.program, self.folder, self.isas = program, folder, list_isas(program)

    def run(self, case, hows):
        """Return: the results of the case, one for each how (golden-driver.c)."""
        (self.folder / "case.json").write_text(json.dumps(case))
        (self.folder / "hows.json").write_text(json.dumps(hows))
        done = subprocess.run([self.program, self.folder / "case.json", self.folder / "hows.json", self.folder],
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [read_results(self.folder / str(i)) for i in range(len(hows))]


def check_hows(driver, case, hows):
    """All hows must give the golden numbers. Return: the golden steps."""
    steps = golden_run(case)
    for how, results in zip(hows, driver.run(case, hows)):
        two = how.get("split", 0) > 0
        wanted = wanted_state(case, steps[-1], ("weights", "other_weights") if two else ("weights",))
        for i, step in enumerate(steps):
            for name in ("counts", "other_counts") if two else ("counts",):
                wanted[f"{name}.{i}"] = np.array(step["counts"], np.uint64)
        check_norms(results, steps)
        assert list(differences(results, wanted)) == [], how
    return steps


def make_how(rng, world, stage, bucket_elems, threads, isa, cores, split=None):
    if split is None:
        split = rng.randrange(1, world) if cores == 2 and world > 1 else 0
    return {"stage": stage, "bucket_elems": bucket_elems, "threads": threads, "isa": isa, "split": split,
            "order": rng.randrange(2**32)}


# ---- a daemon ------------------------------------------------------------------------------------------------


def constants(settings):
    """A setting may have one value for each step. Return: the settings with their first values."""
    return {name: value[0] if isinstance(value, list) and name != "betas" else value
            for name, value in settings.items()}


def make_config(case, stage, bucket_elems, zero=None, **config):
    """Return: the daemon's configuration. zero: further keys of zero_optimization."""
    params = dict.fromkeys(DEFAULTS["optimizer"]["params"]) | constants(case["optimizer"]["params"])
    return merge({
        "world": {"size": case["world_size"]},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket_elems} | (zero or {}),
        "optimizer": {"type": case["optimizer"]["type"], "params": params},
        "gradient_clipping": constants({"max_norm": case.get("max_norm", 0)})["max_norm"],
        "gradient_allreduce_op": case.get("op", "mean"),
        **config,
    }, MOMENTS[case.get("moments", "fp32")])


class Job:
    """A daemon, and all ranks of a case as its trainers."""

    def __init__(self, zerod, build):
        self.zerod, self.client, self.patience = zerod, build.path("tests/golden-client"), build.patience
        self.build, self.environment = build, {}
        self.isas = list_isas(build.path("tests/golden-driver"))

    def run(self, case, how=None, isa=-1, **config):
        """Runs the case. Return: the ranks' processes after all have ended or one has failed."""
        self.daemon = self.zerod(make_config(case, **config),
                                 {"ZEROD_ISA": self.isas[isa % len(self.isas)]} | self.environment)
        folder = self.daemon.folder
        (folder / "case.json").write_text(json.dumps(case))
        (folder / "how.json").write_text(json.dumps({"order": "random", "seed": 1} | (how or {})))
        ranks = [self.daemon.spawn(self.client, folder / "case.json", folder / "how.json", rank, folder / f"rank{rank}",
                                   rank=rank) for rank in range(case["world_size"])]
        wait_for(lambda: "".join(rank.err() for rank in ranks) + self.daemon.log(),
                 lambda: all(rank.poll() == 0 for rank in ranks) or any(rank.poll() for rank in ranks),
                 120 * self.patience)
        return ranks

    def check(self, case, how=None, **config):
        """Runs the case. All ranks must get the golden numbers."""
        ranks = self.run(case, how, **config)
        assert {rank.poll() for rank in ranks} == {0}, "".join(rank.err() for rank in ranks) + self.daemon.log()
        results = [read_results(self.daemon.folder / f"rank{rank}") for rank in range(len(ranks))]
        steps = golden_run(case)
        for rank in results:
            check_rank(case, steps, rank)
        slowest_ms = max(np.frombuffer(rank["slowest_push_ns.0"], np.uint64)[0] for rank in results) / 1e6
        print(f"slowest push {slowest_ms:.2f} ms")
        assert slowest_ms <= MOST_MS or not TIMING


class DeviceJob(Job):
    def run(self, case, how=None, isa=-1, sim="", **config):
        self.environment = gpu_kinds.of_daemon(self.build, *sim.split())
        return super().run(case, how, isa, **{"device": "cuda", "collective": "nccl", "deterministic": True} | config)


def n_missing(case, counts):
    """Yields the number of trainable parameters without a push for each step, None for a skipped step."""
    trainable = [i for i, p in enumerate(case["params"]) if p.get("trainable", True)]
    before = [0] * len(case["params"])
    for after in counts:
        yield None if after == before else sum(after[i] == before[i] for i in trainable)
        before = after


def check_rank(case, steps, results):
    wanted = wanted_state(case, steps[-1])
    for i, step in enumerate(steps):
        seen = i % len(case["params"])
        wanted[f"seen.{i}"] = step["weights"][seen]
    check_norms(results, steps)
    assert list(differences(results, wanted)) == []
    for i, (step, missing) in enumerate(zip(steps, n_missing(case, [step["counts"] for step in steps]))):
        epoch, applied, n = np.frombuffer(results[f"said.{i}"], np.uint64).tolist()
        assert (epoch, applied) == (i + 1, step["applied"])
        assert missing in (None, n), f"step {i}"
