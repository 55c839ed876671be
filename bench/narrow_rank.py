# SPDX-License-Identifier: Apache-2.0
"""
A training of bench/narrow_state.py on one rank: a small GPT whose weights and gradients are bf16. It computes in fp32,
so runs differ only in the state that the daemon keeps.

    narrow_rank.py SEED STEPS FILE

Writes the losses to FILE, as a JSON list.
"""

import json
import pathlib
import sys

import torch
import zerod
from gpt2 import GPT2, Batches
from torch.func import functional_call

SHAPE = {"layers": 2, "heads": 4, "width": 128, "vocabulary": 2048, "positions": 64}
BATCH = 16


def main():
    seed, n_steps = map(int, sys.argv[1:3])
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = GPT2(**SHAPE).bfloat16()
    batches = Batches(SHAPE["vocabulary"], seed, seed + 1, BATCH, SHAPE["positions"])
    opt, losses = zerod.Optimizer(model), []
    for _ in range(n_steps):
        wide = {name: p.float() for name, p in model.named_parameters()}
        loss = functional_call(model, wide, (batches.next(),))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    opt.close()
    pathlib.Path(sys.argv[3]).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
