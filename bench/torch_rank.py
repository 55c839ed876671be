# SPDX-License-Identifier: Apache-2.0
"""
Runs the chains (peers/) with which zerod's step is compared, in one process.

    torch_rank.py RANK WORLD ELEMS PARAMS THREADS FOLDER FAMILIES

FAMILIES: families of chains, separated by commas. FOLDER: a folder in memory for files that all ranks share. Prints for
each chain its family and whether it clips. Each line of standard input is JSON that names a "chain" and a request.
"iteration" makes a step with the gradients of that iteration, and prints when the step began and ended
(CLOCK_MONOTONIC, ns). "reset" clears weights and state. "sample" prints weights.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from peers import make_chains
from peers.chain import Rank


def step(rank, chain, iteration):
    rank.refill(iteration)
    if rank.world > 1:
        dist.barrier()
    start = time.monotonic_ns()
    chain.run()
    return {"start": start, "done": time.monotonic_ns()}


def serve(rank, chains, out):
    for command in map(json.loads, sys.stdin):
        chain, answer = chains[command["chain"]], None
        if "iteration" in command:
            answer = step(rank, chain, command["iteration"])
        elif "sample" in command:
            answer = chain.sample(command["sample"])
        elif "reset" in command:
            chain.reset()
        print(json.dumps(answer), file=out, flush=True)


def main():
    number, world, elems, n_params, threads = map(int, sys.argv[1:6])
    folder, families = sys.argv[6], sys.argv[7].split(",")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps output of the peers out of the answers
    torch.set_num_threads(threads)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=world)
    rank = Rank(number, world, elems, n_params, folder)
    by_family = {family: make_chains(family, rank) for family in families}
    print(json.dumps({chain.name: {"family": family, "clips": chain.clips}
                      for family, chains in by_family.items() for chain in chains}), file=out, flush=True)
    serve(rank, {chain.name: chain for chains in by_family.values() for chain in chains}, out)


if __name__ == "__main__":
    main()
