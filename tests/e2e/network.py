# SPDX-License-Identifier: Apache-2.0
"""Networks of namespaces of this machine, for tests and benchmarks with several nodes."""

import os
import subprocess


def ip(*words, check=True):
    return subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, check=check)


def why_no_network():
    """Return: the reason why this machine cannot have namespaces, or None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"zerod-{os.getpid()}-try"
    made = ip("netns", "add", name, check=False)
    ip("netns", "del", name, check=False)
    return made.stderr.strip() or None if made.returncode else None


def sweep():
    """Removes the namespaces of killed test processes. A namespace's name contains its process id."""
    for line in ip("netns", "list").stdout.splitlines():
        words = line.split()[0].split("-")
        if words[0] == "zerod" and len(words) == 4 and not os.path.exists(f"/proc/{words[1]}"):
            ip("netns", "del", line.split()[0], check=False)


class Network:
    """
    A namespace per node, and another one with a bridge that joins them. The addresses are from a range for
    documentation. Unix sockets are reachable from outside, because network namespaces do not hide files.
    """

    n_made = 0

    def __init__(self, n, arp_ms=None):
        """arp_ms: time between two queries for a neighbour's address. None: the kernel's default, a second."""
        Network.n_made += 1
        self.name = f"zerod-{os.getpid()}-{Network.n_made}"
        self.middle, self.nodes = f"{self.name}-m", [f"{self.name}-{i}" for i in range(n)]
        self.hosts = [f"192.0.2.{i + 1}" for i in range(n)]
        try:
            sweep()
            self.build()
            for node in range(n) if arp_ms else ():
                self.ask_every(node, arp_ms)
        except BaseException:
            self.close()
            raise

    def build(self):
        ip("netns", "add", self.middle)
        ip("-n", self.middle, "link", "add", "br0", "type", "bridge")
        ip("-n", self.middle, "link", "set", "br0", "up")
        for i, node in enumerate(self.nodes):
            ip("netns", "add", node)
            ip("-n", node, "link", "set", "lo", "up")
            ip("-n", node, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{i}", "netns", self.middle)
            ip("-n", self.middle, "link", "set", f"port{i}", "master", "br0", "up")
            ip("-n", node, "addr", "add", f"{self.hosts[i]}/24", "dev", "eth0")
            ip("-n", node, "link", "set", "eth0", "up")

    def ask_every(self, node, arp_ms):
        subprocess.run([*self.inside(node), "tee", "/proc/sys/net/ipv4/neigh/eth0/retrans_time_ms"],
                       input=str(arp_ms), text=True, stdout=subprocess.DEVNULL, check=True)

    def close(self):
        for name in [*self.nodes, self.middle]:
            ip("netns", "del", name, check=False)

    def inside(self, node):
        """Return: the first words of a command that is to run on the node. The command keeps the process id."""
        return ["nsenter", f"--net=/run/netns/{self.nodes[node]}"]

    # Ways to disconnect a node: (disconnect, reconnect). They differ in what the node detects.

    def interface(self, node):
        """The node's interface goes down: sending fails at once."""
        return (lambda: ip("-n", self.nodes[node], "link", "set", "eth0", "down"),
                lambda: ip("-n", self.nodes[node], "link", "set", "eth0", "up"))

    def cable(self, node):
        """The bridge's end of the link goes down: the node's interface is up without a carrier."""
        return (lambda: ip("-n", self.middle, "link", "set", f"port{node}", "down"),
                lambda: ip("-n", self.middle, "link", "set", f"port{node}", "up"))

    def switch(self, node):
        """Packets from and to the node are lost, without a sign."""
        return (lambda: ip("-n", self.middle, "link", "set", f"port{node}", "nomaster"),
                lambda: ip("-n", self.middle, "link", "set", f"port{node}", "master", "br0"))

    def route(self, node):
        """Packets from the node are lost; packets to it arrive."""
        def routes(verb):
            for i, host in enumerate(self.hosts):
                if i != node:
                    ip("-n", self.nodes[node], "route", verb, "blackhole", f"{host}/32")
        return lambda: routes("add"), lambda: routes("del")
