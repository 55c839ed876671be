# SPDX-License-Identifier: Apache-2.0
"""
Trains a model of Llama's shape with random weights, on random tokens, with one of several optimizers. AdamW, clipping to 1.

    llama_rank.py SIDE DEVICE CONFIG [STAND-IN]

SIDE is a name of SIDES. CONFIG: arguments of transformers' LlamaConfig, as JSON. STAND-IN: a module that stands in for
zerod's calls of torch.cuda (tests/torch/programs). Prints a line when the optimizer is ready. Answers each line of
standard input with a line of JSON:

    BATCH LENGTH N        makes N + 2 steps; prints the milliseconds of N of them, and loss and norm of the last step
    BATCH LENGTH changed  makes a step whose learning rate changes before step(), so that no early update of it is accepted
"""

import importlib
import json
import os
import sys
import time
import traceback

import torch
from torch import nn

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.01}
MAX_NORM = 1.0


class Alone:
    """Forward and backward. Each gradient is freed when it is computed."""

    package = "transformers"
    norm = None

    def __init__(self, model):
        self.model = model
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def forward(self, tokens):
        return self.model(input_ids=tokens, labels=tokens).loss

    def step(self, loss):
        loss.backward()

    def settle(self):
        pass


class Masters(Alone):
    """torch's fused AdamW on fp32 masters on the same device."""

    def __init__(self, model):
        self.model, self.weights = model, list(model.parameters())
        self.masters = [weight.detach().float() for weight in self.weights]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **ADAMW)

    def step(self, loss):
        loss.backward()
        torch._foreach_copy_([master.grad for master in self.masters], [weight.grad for weight in self.weights])
        self.model.zero_grad()
        self.norm = nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)


class Zerod(Alone):
    """The daemon of ZEROD_SOCKET clips, and decides where the optimizer is."""

    overlap = False

    def __init__(self, model):
        import zerod

        self.model, self.wait = model, zerod.wait
        self.optimizer = zerod.Optimizer(model, overlap_update=self.overlap, **ADAMW)

    def step(self, loss, lr_factor=1.0):
        loss.backward()
        for group in self.optimizer.param_groups if lr_factor != 1.0 else ():
            group["lr"] *= lr_factor
        self.optimizer.step()
        self.norm = self.optimizer.result.grad_norm
        self.optimizer.zero_grad()

    def settle(self):
        self.wait()


class Overlapping(Zerod):
    overlap = True


class DeepSpeed2(Alone):
    """DeepSpeed's ZeRO-2 with the optimizer in host memory: its own CPU Adam."""

    package, stage = "deepspeed", 2

    def __init__(self, model):
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": MAX_NORM,
                  "steps_per_print": 1 << 30, "optimizer": {"type": "AdamW", "params": ADAMW},
                  "zero_optimization": {"stage": self.stage, "overlap_comm": True, "contiguous_gradients": True,
                                        "offload_optimizer": {"device": "cpu", "pin_memory": torch.cuda.is_available()}}}  # fmt: skip
        self.model, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(self, loss):
        self.model.backward(loss)
        self.model.step()
        self.norm = self.model.get_global_grad_norm()


class DeepSpeed3(DeepSpeed2):
    stage = 3


class TorchAO(Alone):
    """
    torchao's CPUOffloadOptimizer, whose state has the weights' type. So the weights are fp32, and autocast computes in
    bf16. It cannot clip, because each gradient is copied to the host as soon as it is computed.
    """

    package = "torchao"

    def __init__(self, model):
        from torchao.optim import CPUOffloadOptimizer

        self.model = model.float()
        self.optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, **ADAMW)

    def forward(self, tokens):
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return super().forward(tokens)

    def step(self, loss):
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


SIDES = {"alone": Alone, "masters": Masters, "zerod": Zerod, "zerod-overlap": Overlapping, "deepspeed-2": DeepSpeed2,
         "deepspeed-3": DeepSpeed3, "torchao": TorchAO}


def make_model(device, config):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(use_cache=False, **config))
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():  # the gradient's norm is below 1 then, as in the midst of a training: otherwise each step is clipped
        model.lm_head.weight.mul_(0.05)
    return model


class Trainer:
    def __init__(self, side, device, vocabulary):
        self.side, self.device, self.vocabulary, self.n_steps = side, device, vocabulary, 0

    def forward(self, batch, length):
        generator = torch.Generator(self.device).manual_seed(self.n_steps)
        self.n_steps += 1
        return self.side.forward(torch.randint(self.vocabulary, (batch, length), generator=generator, device=self.device))

    def now(self):
        """Return: the moment when the device has done all work so far, for ms_between(). The program does not wait for it."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms_between(self, begin, end):
        return 1e3 * (end - begin) if self.device.type == "cpu" else begin.elapsed_time(end)

    def steps(self, batch, length, n):
        """
        A step is measured from the end of a forward to the end of the next one, so what is hidden behind the next forward
        costs nothing, and what delays that forward does. The first step allocates memory; the last one is not measured.
        """
        ends = []
        for _ in range(n + 2):
            loss = self.forward(batch, length)
            ends.append(self.now())
            self.side.step(loss)
        self.settle()
        norm = None if self.side.norm is None else float(self.side.norm)
        ms = [self.ms_between(*pair) for pair in zip(ends[1:], ends[2:])]
        return {"ms": ms, "loss": loss.item(), "norm": norm, "steps": self.n_steps}

    def changed_step(self, batch, length):
        self.side.step(self.forward(batch, length), lr_factor=0.999)
        self.settle()
        return {}

    def settle(self):
        """Waits for all weights, and leaves the GPU's memory to the other sides."""
        self.side.settle()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def main():
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps output of the peers out of the answers
    name, device, config, *stand_in = sys.argv[1:]
    config = json.loads(config)
    for module in stand_in:
        importlib.import_module(module).install()
    importlib.import_module(SIDES[name].package)  # fails early if it is not installed
    trainer = Trainer(SIDES[name](make_model(device, config)), torch.device(device), config["vocab_size"])
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        batch, length, what = line.split()
        size = int(batch), int(length)
        answer = trainer.changed_step(*size) if what == "changed" else trainer.steps(*size, int(what))
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(reason[:300], file=sys.stderr, flush=True)  # the last line is what the benchmark shows
        os._exit(1)
