# SPDX-License-Identifier: Apache-2.0
"""A loop with accelerate: accumulation, clipping, a scheduler, groups of its own."""

import common
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

model = common.gpt2()
decay = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}]
adam = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-5}
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
if common.ZEROD:
    import zerod

    opt = zerod.Optimizer(groups, model=model, **adam)
else:
    opt = torch.optim.AdamW(groups, **adam)
names = common.names_of(model)
ids = torch.tensor([common.tokenizer()(text)["input_ids"] for text in common.sentences(192)])
prepared, optimizer, loader, scheduler = accelerator.prepare(
    model, opt, DataLoader(TensorDataset(ids), batch_size=4), torch.optim.lr_scheduler.StepLR(opt, 5, 0.5))  # fmt: skip
losses = []
for (batch,) in loader:
    with accelerator.accumulate(prepared):
        loss = prepared(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean"))
common.report(model, losses)
