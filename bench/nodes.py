# SPDX-License-Identifier: Apache-2.0
"""Several nodes, each in its own network namespace: zerod compared with torch's chains on gloo."""

import os
import pathlib
import sys
import tempfile

from harness import (MI, ROOT, Daemon, Failure, Process, TorchJob, ZerodJob, in_turn, median, n_cores, program, row,
                     say, stop_all)

sys.path.append(str(ROOT / "tests" / "e2e"))
from network import Network, why_no_network  # noqa: E402

ELEMS = 64 * MI
BUCKET = ", reduce_bucket_size: 8000000"  # as in config/multi-node.yaml
GOALS = {"all": 1.15, "bf16": 1.6, "reduce_scatter": 1.8}


class NodesJob(ZerodJob):
    """A daemon and one rank in each node's namespace. in_slot: gradients are computed in the slots that they are sent
    from, as torch's chains compute them in place. Otherwise they are copied to the slots."""

    def __init__(self, network, key, stage, elems=ELEMS, params=64, bf16=False, in_slot=False, kept=False):
        world = len(network.hosts)
        nodes = ", ".join(f"{{address: '{host}:7700', ranks: 1}}" for host in network.hosts)
        self.ranks, self.daemons, self.in_slot = [], [], in_slot
        try:
            for node in range(world):
                extra = f"collective: gloo\nthreads: {max(1, n_cores() // world)}\n"
                extra += "communication_data_type: bf16\n" if bf16 else ""
                self.daemons.append(Daemon(world, stage, extra, BUCKET, prefix=network.inside(node),
                                           nodes=f", nodes: [{nodes}], node: {node}, key_file: {key}", kept=kept))
            for node, daemon in enumerate(self.daemons):
                self.ranks.append(Process([program("bench-rank"), "--rank", str(node), "--socket", daemon.socket,
                                           "--elems", str(elems), "--params", str(params), "--on-demand",
                                           *(["--bf16"] if bf16 else []), *(["--in-slot"] if in_slot else [])]))
            for rank in self.ranks:
                rank.receive()
        except BaseException:
            self.stop()
            raise
        self.daemon = self.daemons[0]

    def step(self):
        if self.in_slot:
            for rank in self.ranks:
                rank.send()
            for rank in self.ranks:
                rank.receive()
        return super().step()

    def stop(self):
        stop_all(self.ranks)
        for daemon in self.daemons:
            daemon.stop()


def make_key(folder):
    key = folder / "job.key"
    key.write_bytes(os.urandom(48))
    key.chmod(0o600)
    return key


def payload(job):
    """Return: the bytes that node 0's engine has sent since its start, and the job's step."""
    status = job.daemon.ctl("status")
    return status["nodes"]["sent_bytes"], status["step"]


# The variants of zerod. The gradients of torch's chains are in one flat tensor from the beginning. zerod's gradients
# are in their slots without a copy only if they are computed there.
VARIANTS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp32, gradients in place": {"in_slot": True},
    "bf16, gradients in place": {"bf16": True, "in_slot": True},
}


def measure(world, network, key, elems, quick):
    """Return: zerod's results by variant; the medians of torch's chains by variant, measured in turn with that variant;
    the slow chains, which ran only at first; the MiB that a node sent in a step."""
    ours, theirs, jobs = {}, {}, []
    try:
        torch = TorchJob(world, elems, network=network)
        jobs.append(torch)
        for variant, options in VARIANTS.items():
            job = NodesJob(network, key, 2, elems, **options)
            jobs.append(job)
            if not ours:
                first = {chain: min(torch.step(chain) for _ in range(2)) for chain in torch.chains}
                slow = torch.slow(first)
                sides = {chain: (lambda chain=chain: torch.step(chain)) for chain in torch.chains if chain not in slow}
            results = in_turn(sides | {"zerod": job.step}, 4 if quick else 9)
            if not ours:
                sent, step = payload(job)
                job.step()
                more, later = payload(job)
            ours[variant] = results.pop("zerod")
            theirs[variant] = {chain: first[chain] if chain in slow else median(results[chain])
                               for chain in torch.chains}
            jobs.pop().stop()  # only one job at a time, because all jobs use the same ports
    finally:
        for job in jobs:
            job.stop()
    return ours, theirs, slow, (more - sent) / (later - step) / MI


def on(network, key, quick):
    world = len(network.hosts)
    elems = ELEMS // (64 * world) * 64 * world  # a number of elements that the sharded chain can divide
    ours, theirs, slow, sent = measure(world, network, key, elems, quick)
    chains = {chain: median([times[chain] for times in theirs.values()]) for chain in theirs["fp32"]}
    fastest = min(chains, key=chains.get)
    sharded = next(chain for chain in chains if chain.startswith("reduce_scatter"))
    total = {variant: median([r["total"] for r in results]) for variant, results in ours.items()}
    rows = [row(f"nodes: whole, {world} nodes, {variant}", ms, theirs[variant][fastest], f"{fastest} in fp32", "ms",
                GOALS["bf16" if VARIANTS[variant].get("bf16") else "all"]) for variant, ms in total.items()]
    rows.append(row(f"nodes: whole, {world} nodes, fp32, beside the sharded chain", total["fp32"], chains[sharded],
                    sharded, "ms", GOALS["reduce_scatter"]))
    # A node sends the other nodes' slices of its gradient, and its own slices of the weights: (world - 1) / world of
    # fp32 each.
    formula = 2 * 4 * elems * (world - 1) / world / MI
    rows.append(row(f"nodes: bytes that a node sends in a step, {world} nodes", sent, formula, "the formula", "MiB",
                    0.98))
    table = [[f"{world} nodes, zerod, {variant}", *(f"{median([r[part] for r in results]):.1f}"
                                                    for part in ("push", "tail", "total"))]
             for variant, results in ours.items()]
    table += [[f"{world} nodes, torch, {chain}" + (" (best of 2)" if chain in slow else ""), "", "", f"{ms:.1f}"]
              for chain, ms in chains.items()]
    return rows, table


def nodes(quick):
    """A whole step of 64 Mi fp32 parameters on 2 and 3 nodes in network namespaces, compared with torch's chains."""
    if why_no_network():
        raise Failure(f"no network namespaces: {why_no_network()}")
    rows, table = [], []
    for world in (2, 3):
        say(f"  {world} nodes")
        network = Network(world)
        try:
            with tempfile.TemporaryDirectory() as folder:
                more_rows, more_table = on(network, make_key(pathlib.Path(folder)), quick)
        finally:
            network.close()
        rows += more_rows
        table += more_table
    return rows, {"each side": [["ms, medians", "until the last push", "after the last push", "whole"], *table]}
