# SPDX-License-Identifier: Apache-2.0
"""A loop with Lightning Fabric, as in LitGPT."""

import common
import torch
from lightning.fabric import Fabric

if common.ZEROD:
    import zerod
    from zerod.integrations.fabric import ZerodStrategy
else:
    from lightning.fabric.strategies import DDPStrategy as ZerodStrategy

fabric = Fabric(accelerator="cpu", devices=common.WORLD, strategy=ZerodStrategy())
fabric.launch()
plain = common.gpt2()
adam = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
model, opt = fabric.setup(plain, zerod.Optimizer(plain, **adam) if common.ZEROD else torch.optim.AdamW(plain.parameters(), **adam))
ids = torch.tensor([common.tokenizer()(text)["input_ids"] for text in common.sentences(96)])
losses = []
for n, batch in enumerate(ids[common.RANK :: common.WORLD].split(4)):
    is_accumulating = n % 2 == 0
    with fabric.no_backward_sync(model, enabled=is_accumulating):
        loss = model(input_ids=batch, labels=batch).loss
        fabric.backward(loss / 2)
    losses.append(loss.detach())
    if not is_accumulating:
        for group in opt.param_groups:
            group["lr"] = 2e-3 * (1 - n / 24)
        fabric.clip_gradients(model, opt, max_norm=1.0)
        opt.step()
        opt.zero_grad()
common.report(plain, losses)
