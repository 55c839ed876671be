# SPDX-License-Identifier: Apache-2.0
"""
Several daemons of one job: a daemon for each node, all on this machine's loopback, or each in its own network
namespace, whose link can be cut.
"""

import os

import gpu_kinds
from conftest import free_ports, wait_for

PORT = 7700  # port of node 0 in a namespace, where all ports are free


def make_key(folder):
    key = folder / "job.key"
    key.write_bytes(os.urandom(48))
    key.chmod(0o600)
    return key


class Nodes:
    """
    The daemons of a job on len(ranks) nodes. Node i has ranks[i] ranks, or is split into several nodes if that are more
    ranks than GPUs. daemons[i] is node i's daemon. The daemons are on loopback, or each in its namespace of the
    network.
    """

    def __init__(self, zerod, folder, ranks, config=None, env=None, network=None):
        self.zerod, self.network = zerod, network
        self.ranks = gpu_kinds.spread(ranks) if (config or {}).get("device") == "cuda" else list(ranks)
        self.key = make_key(folder)
        self.addresses = ([f"{host}:{PORT}" for host in network.hosts] if network else
                          [f"127.0.0.1:{port}" for port in free_ports(len(self.ranks))])
        self.configs = [self.config(node, config or {}) for node in range(len(self.ranks))]
        self.envs = env if isinstance(env, list) else [env] * len(self.ranks)
        self.daemons = [None] * len(self.ranks)
        for node in range(len(self.ranks)):
            self.start(node)

    def start(self, node):
        """Starts that node's daemon, or a new one instead of it."""
        self.daemons[node] = self.zerod(self.configs[node], (self.envs[node] or {}) | gpu_kinds.of_node(node),
                                        prefix=self.network.inside(node) if self.network else [])

    def config(self, node, config):
        nodes = [{"address": a, "ranks": n} for a, n in zip(self.addresses, self.ranks)]
        world = {"size": sum(self.ranks), "nodes": nodes, "node": node, "key_file": str(self.key)}
        return {"collective": "gloo", **config, "world": world}

    def node_of(self, rank):
        """Return: the node of a rank."""
        for node, n in enumerate(self.ranks):
            if rank < n:
                return node
            rank -= n
        raise ValueError("no such rank")

    def local_rank(self, rank):
        return rank - sum(self.ranks[:self.node_of(rank)])

    def spawn(self, program, *args, rank, env=None, **more):
        env = {"LOCAL_RANK": self.local_rank(rank), **(env or {})}
        return self.daemons[self.node_of(rank)].spawn(program, *args, rank=rank, env=env, **more)

    @property
    def build(self):
        return self.daemons[0].build

    @property
    def patience(self):
        return self.daemons[0].patience

    def logs(self):
        return "".join(f"---- node {i}\n{d.log()}" for i, d in enumerate(self.daemons))

    def describe(self):
        return "".join(f"--- node {i}: {d.describe()}" for i, d in enumerate(self.daemons))

    def wait(self, processes, timeout):
        """Waits until all processes have ended well or one has failed."""
        wait_for(lambda: "".join(p.err() for p in processes) + self.logs(),
                 lambda: all(p.poll() == 0 for p in processes) or any(p.poll() for p in processes), timeout)
        assert {p.poll() for p in processes} == {0}, "".join(p.err() for p in processes) + self.logs()
