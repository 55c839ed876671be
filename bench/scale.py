#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""
Prints the tables of docs/scale.md: the bytes sent between nodes, and how long that takes at a given speed. All figures
are computed from the formulas of docs/scale.md, not measured.
"""

import argparse
import math

WORLDS = ((2, 4), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8), (64, 8), (64, 16))  # (nodes, ranks per node)
SPEEDS = (10, 25, 100, 400)  # Gbit/s of a node in each direction
BUCKETS = (2_000_000, 20_000_000, 200_000_000)  # reduce_bucket_size
GRADIENT_BYTES = 4  # gradients between nodes are always fp32
MESSAGES = 4  # READY and MOVED to node 0; EXCHANGE and SETTLED from node 0


def elsewhere(n):
    """Return: the share of the whole that belongs to others, if n owners have equal parts."""
    return (n - 1) / n


def gradients(params, nodes):
    """Return: the bytes that a node sends, and receives, per micro-batch: each part of its partial sum goes to the
    part's owner."""
    return GRADIENT_BYTES * params * elsewhere(nodes)


def weights(params, nodes, weight_bytes):
    """Return: the bytes that a node receives, and sends, when every node gathers all weights once."""
    return weight_bytes * params * elsewhere(nodes)


def step_bytes(params, nodes, weight_bytes, micro_batches, gathers=1):
    """Return: the bytes of a node and step in one direction. gathers: how often all weights are gathered in the
    step."""
    return micro_batches * gradients(params, nodes) + gathers * weights(params, nodes, weight_bytes)


def paper(stage, params, ranks):
    """Return: the elements that a rank sends in the ZeRO paper's count, with the exact factor of a ring."""
    return (3 if stage == 3 else 2) * params * elsewhere(ranks)


def messages(params, nodes, bucket):
    """Return: the number of messages that node 0 receives or sends per micro-batch."""
    return MESSAGES * (nodes - 1) * math.ceil(params / bucket)


def seconds(n_bytes, gbit):
    return n_bytes * 8 / (gbit * 1e9)


def table(head, rows):
    print("| " + " | ".join(head) + " |")
    print("|" + " --- |" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def name(nodes, ranks):
    return f"{nodes * ranks:,} ({nodes} x {ranks})"


def print_volumes(a):
    print(f"{a.params / 1e9:g} G parameters, weights of {a.weight_bytes} bytes; GB of 1e9 bytes, one way, per node:\n")
    table(("ranks (nodes x ranks)", "gradients, per micro-batch", "weights, stages 1 and 2, per step",
           "weights, stage 3, per micro-batch at most", "stages 1 and 2, one micro-batch",
           "stage 3, one micro-batch, at most",
           "paper, stages 1 and 2, per rank", "paper, stage 3, per rank"),
          [(name(n, k), f"{gradients(a.params, n) / 1e9:.2f}", f"{weights(a.params, n, a.weight_bytes) / 1e9:.2f}",
            f"{2 * weights(a.params, n, a.weight_bytes) / 1e9:.2f}",
            f"{step_bytes(a.params, n, a.weight_bytes, 1) / 1e9:.2f}",
            f"{step_bytes(a.params, n, a.weight_bytes, 1, 2) / 1e9:.2f}",
            f"{2 * paper(2, a.params, n * k) / 1e9:.2f}", f"{2 * paper(3, a.params, n * k) / 1e9:.2f}")
           for n, k in WORLDS])


def print_times(a, stage):
    def cell(nodes, gbit):
        n_bytes = [step_bytes(a.params, nodes, a.weight_bytes, m, 2 * m if stage == 3 else 1)
                   for m in (1, a.micro_batches)]
        return " / ".join(f"{seconds(n, gbit):.2f}" for n in n_bytes)

    print(f"Stage{'s 1 and 2' if stage == 2 else ' 3, at most'}: seconds per step, of one micro-batch and of "
          f"{a.micro_batches}, at the full speed of the network:\n")
    table(("ranks (nodes x ranks)", *(f"{s} Gbit/s" for s in SPEEDS)),
          [(name(n, k), *(cell(n, s) for s in SPEEDS)) for n, k in WORLDS])


def print_messages(a):
    print("Control messages that node 0 gets or sends per micro-batch, by `reduce_bucket_size`:\n")
    table(("nodes", *(f"{b:,}" for b in BUCKETS)),
          [(str(n), *(f"{messages(a.params, n, b):,}" for b in BUCKETS)) for n in (2, 4, 8, 16, 32, 64)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip())
    parser.add_argument("--params", type=float, default=7.5e9, help="trainable parameters")
    parser.add_argument("--weight-bytes", type=int, choices=(2, 4), default=2, help="of one weight")
    parser.add_argument("--micro-batches", type=int, default=8, help="per step")
    a = parser.parse_args()
    print_volumes(a)
    for stage in (2, 3):
        print_times(a, stage)
    print_messages(a)


if __name__ == "__main__":
    main()
