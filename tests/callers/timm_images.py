# SPDX-License-Identifier: Apache-2.0
"""
A vision transformer of timm, trained as in timm's train.py: no decay on biases and norms, clipping, an average of the
weights (ModelEmaV3), and a cosine schedule with warm-up that counts updates. With the argument "layers" each layer has
its own learning rate, as in fine-tuning.
"""

import sys

import common
import timm
import torch
import torch.distributed as dist
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch.nn.parallel import DistributedDataParallel

N_EPOCHS, N_BATCHES, N_CLASSES = 4, 4, 4
dist.init_process_group("gloo")
torch.manual_seed(3)
model = timm.create_model("vit_tiny_patch16_224", num_classes=N_CLASSES, img_size=32, patch_size=8, embed_dim=48, depth=3)
if "layers" in sys.argv:
    groups = param_groups_layer_decay(model, weight_decay=0.1, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.7)
else:
    groups = param_groups_weight_decay(model, weight_decay=0.1, no_weight_decay_list=model.no_weight_decay())
adam = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-5}
if common.ZEROD:
    import zerod

    optimizer = zerod.Optimizer(groups, model=model, **adam)
else:
    optimizer = torch.optim.AdamW(groups, **adam)
ema = ModelEmaV3(model, decay=0.9, use_warmup=True)
ddp = model if common.ZEROD else DistributedDataParallel(model)
scheduler, _ = create_scheduler_v2(optimizer, num_epochs=N_EPOCHS, warmup_epochs=1, warmup_lr=1e-4, warmup_prefix=True,
                                   min_lr=1e-4, step_on_epochs=False, updates_per_epoch=N_BATCHES)  # fmt: skip
generator = torch.Generator().manual_seed(7 + common.RANK)
losses, n_updates = [], 0
for epoch in range(N_EPOCHS):
    model.train()
    for _ in range(N_BATCHES):
        labels = torch.randint(0, N_CLASSES, (16,), generator=generator)
        images = torch.randn(16, 3, 32, 32, generator=generator) + labels.view(-1, 1, 1, 1)
        loss = torch.nn.functional.cross_entropy(ddp(images), labels)
        loss.backward()
        dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
        optimizer.step()
        optimizer.zero_grad()
        n_updates += 1
        ema.update(model, step=n_updates)
        scheduler.step_update(num_updates=n_updates, metric=loss.item())
        losses.append(loss.detach())
    scheduler.step(epoch + 1)
common.report(model, losses, average=ema.module)
