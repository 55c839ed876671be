# SPDX-License-Identifier: Apache-2.0
"""
torch's side on a GPU: fused AdamW, and chains of calls that compute 16-bit weights from 16-bit gradients.

    gpu_torch.py DEVICE ELEMS PARAMS

Prints the names of its chains. For each line of standard input, makes fresh gradients, runs the named chain once and
prints the chain's time. On a GPU that is the time from the first kernel to the last. The GPU is kept busy while the
host puts the kernels on the stream, as in a training.
"""

import json
import os
import sys
import time

import torch

POOL_ELEMS = 1 << 20
MAX_NORM = 1.0
LOSS_SCALE = 2.0
BUSY_BYTES, BUSY_TIMES = 1 << 30, 64  # 15 ms at 4 TB/s


class Chains:
    def __init__(self, device, elems, n_params):
        self.device = device
        self.flat_pushed = torch.zeros(elems, dtype=torch.bfloat16, device=device)
        self.flat_grad = torch.zeros(elems, device=device)
        self.pool = ((torch.rand(2 * POOL_ELEMS) - 0.5) * 2.0**-8).bfloat16().to(device)
        self.pushed, self.grads = (list(flat.chunk(n_params)) for flat in (self.flat_pushed, self.flat_grad))
        self.weights = list(torch.zeros(elems, dtype=torch.bfloat16, device=device).chunk(n_params))
        self.masters = [torch.nn.Parameter(p) for p in torch.zeros(elems, device=device).chunk(n_params)]
        for master, grad in zip(self.masters, self.grads):
            master.grad = grad
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-3, fused=True)
        self.busy = torch.empty(BUSY_BYTES if device != "cpu" else 0, dtype=torch.uint8, device=device)
        self.found_inf = torch.zeros((), device=device)
        self.inverse = torch.tensor(1 / LOSS_SCALE, device=device)
        self.run = {"fused AdamW": self.adamw, "unscale, clip_grad_norm_, fused AdamW, cast": self.unscale_first,
                    "norm, fused AdamW that unscales and clips, cast": self.unscale_within}

    def refill(self, iteration):
        begin = iteration * 8 * 1013 % POOL_ELEMS
        for block in self.flat_pushed.split(POOL_ELEMS):
            block.copy_(self.pool[begin:begin + block.numel()])
        self.flat_grad.copy_(self.flat_pushed)

    def adamw(self):
        self.optimizer.grad_scale = self.optimizer.found_inf = None
        self.optimizer.step()

    def unscale_first(self):
        """Calls what GradScaler and clip_grad_norm_() call, except the check on the host whether all values were
        finite."""
        self.optimizer.grad_scale = self.optimizer.found_inf = None
        torch._foreach_copy_(self.grads, self.pushed)
        self.found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(self.grads, self.found_inf, self.inverse)
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM, foreach=True)
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)

    def unscale_within(self):
        """Uses arguments of the fused kernel that unscale and clip."""
        torch._foreach_copy_(self.grads, self.pushed)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.grads)))
        self.optimizer.grad_scale = torch.clamp(norm / MAX_NORM, min=LOSS_SCALE)
        self.optimizer.found_inf = (~norm.isfinite()).float()
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)

    def time(self, name):
        """Runs the chain once. Return: milliseconds."""
        if self.device == "cpu":
            begin = time.monotonic_ns()
            self.run[name]()
            return (time.monotonic_ns() - begin) / 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(BUSY_TIMES):
            self.busy.zero_()
        begin.record()
        self.run[name]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


@torch.no_grad()
def main():
    device, elems, n_params = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    chains = Chains(device, elems, n_params)
    out = os.fdopen(os.dup(1), "w")
    print(json.dumps(list(chains.run)), file=out, flush=True)
    for iteration, line in enumerate(sys.stdin):
        chains.refill(iteration)
        print(json.dumps({"ms": chains.time(line.strip())}), file=out, flush=True)


if __name__ == "__main__":
    main()
