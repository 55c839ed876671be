# SPDX-License-Identifier: Apache-2.0
"""A network with BatchNorm, SGD with momentum, and an average of its weights (EMA), as image models are trained."""

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

dist.init_process_group("gloo")
torch.manual_seed(3)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(16, 4))  # fmt: skip
sgd = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
if common.ZEROD:
    import zerod

    optimizer, ddp = zerod.Optimizer(model, type="SGD", **sgd), model
else:
    optimizer, ddp = torch.optim.SGD(model.parameters(), **sgd), DistributedDataParallel(model)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
generator = torch.Generator().manual_seed(7 + common.RANK)
losses = []
for _ in range(16):
    labels = torch.randint(0, 4, (16,), generator=generator)
    images = torch.randn(16, 3, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1)
    loss = nn.functional.cross_entropy(ddp(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    losses.append(loss.detach())
average.eval()
with torch.no_grad():  # the average has to be the same as well
    losses += [nn.functional.cross_entropy(average(images), labels)]
common.report(model, losses)
