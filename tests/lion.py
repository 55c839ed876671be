# SPDX-License-Identifier: Apache-2.0
"""Lion as published by its authors (arXiv 2302.06675, program 1). torch does not have it."""

import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                exp_avg = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(beta1 * exp_avg + (1 - beta1) * p.grad))
                exp_avg.mul_(beta2).add_(p.grad, alpha=1 - beta2)
