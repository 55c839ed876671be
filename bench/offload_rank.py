# SPDX-License-Identifier: Apache-2.0
"""
Makes training steps on one GPU, with one of several optimizers. Weights are bf16; gradients are clipped to a norm of 1.

    offload_rank.py torch|masters|deepspeed|zerod DEVICE WIDTH LAYERS

torch: fused AdamW on the GPU, with moments in the weights' bf16. masters: fused AdamW with fp32 masters and moments, as
zerod has them. deepspeed: ZeRO-2 with the optimizer in host memory. zerod: the optimizer of the daemon's configuration
(ZEROD_SOCKET). Prints the number of parameters. For each line of standard input, makes a step on fresh data and prints
the milliseconds from the forward until the GPU has the new weights.
"""

import json
import sys
import time

import torch
from torch import nn

ROWS = 2048
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.01}


class Torch:
    def __init__(self, model, device):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(self, loss):
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Masters:
    def __init__(self, model, device):
        self.weights = list(model.parameters())
        self.masters = [weight.detach().float() for weight in self.weights]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.model, self.optimizer = model, torch.optim.AdamW(self.masters, fused=True, **ADAMW)

    def step(self, loss):
        loss.backward()
        torch._foreach_copy_([master.grad for master in self.masters], [weight.grad for weight in self.weights])
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
        self.model.zero_grad()


class Zerod:
    def __init__(self, model, device):
        import zerod

        self.model, self.optimizer = model, zerod.Optimizer(model)

    def step(self, loss):
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class DeepSpeed:
    def __init__(self, model, device):
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": ROWS, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
                  "optimizer": {"type": "AdamW", "params": ADAMW},
                  "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True,
                                        "offload_optimizer": {"device": "cpu", "pin_memory": True}}}  # fmt: skip
        self.model, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(self, loss):
        self.model.backward(loss)
        self.model.step()


def main():
    who, device, width, n_layers = sys.argv[1], torch.device(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    answers, sys.stdout = sys.stdout, sys.stderr  # DeepSpeed prints to sys.stdout
    torch.manual_seed(1)
    layers = [layer for _ in range(n_layers) for layer in (nn.Linear(width, width, False, device, torch.bfloat16), nn.GELU())]
    for layer in layers[::2]:  # with torch's default weights, gradients vanish, and their squares are subnormal
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    model = nn.Sequential(*layers)
    optimizer = {"torch": Torch, "masters": Masters, "deepspeed": DeepSpeed, "zerod": Zerod}[who](model, device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    print(sum(p.numel() for p in model.parameters()), file=answers, flush=True)
    for _ in sys.stdin:
        x = torch.randn(ROWS, width, device=device, dtype=torch.bfloat16)
        synchronize()
        began = time.perf_counter()
        optimizer.step(optimizer.model(x).float().square().mean())
        synchronize()
        print(json.dumps({"ms": 1e3 * (time.perf_counter() - began)}), file=answers, flush=True)


main()
