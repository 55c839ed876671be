# SPDX-License-Identifier: Apache-2.0
"""A loop in the manner of nanoGPT: micro-batches, clipping, a learning rate by hand, decay for matrices only."""

import contextlib
import math

import common
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

N_STEPS, N_MICRO, WARMUP = 12, 2, 3
dist.init_process_group("gloo")
model = common.gpt2()
decay = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
adam = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-5}
if common.ZEROD:
    import zerod

    optimizer, ddp, no_sync = zerod.Optimizer(groups, model=model, **adam), model, contextlib.nullcontext
else:
    optimizer, ddp = torch.optim.AdamW(groups, **adam), DistributedDataParallel(model)
    no_sync = ddp.no_sync
ids = torch.tensor([common.tokenizer()(text)["input_ids"] for text in common.sentences(192)])
batches = iter(ids[common.RANK :: common.WORLD].split(4))
losses = []
for step in range(N_STEPS):
    rate = 2e-3 * (step + 1) / WARMUP if step < WARMUP else 1e-3 * (1 + math.cos(math.pi * step / N_STEPS))
    for group in optimizer.param_groups:
        group["lr"] = rate
    for micro in range(N_MICRO):
        with no_sync() if micro + 1 < N_MICRO else contextlib.nullcontext():
            batch = next(batches)
            loss = ddp(input_ids=batch, labels=batch).loss / N_MICRO
            loss.backward()
        losses.append(loss.detach() * N_MICRO)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
common.report(model, losses)
