# SPDX-License-Identifier: Apache-2.0
"""
One rank of one side of the training benchmark. All sides train the same model on the same text, and reduce and update
in different ways.

    torch_side.py SIDE RANK WORLD RENDEZVOUS BATCH LENGTH

SIDE: none; ddp[:OPTION...]; fsdp2[:OPTION...]; deepspeed[:OPTION...]; zerod. RENDEZVOUS: a file, or zerod's socket.
Prints a line when it is ready. For each line of standard input, makes an iteration and prints when the iteration began
and ended (CLOCK_MONOTONIC, ns).
"""

import ctypes
import json
import os
import sys
import time
from datetime import timedelta

import gpt2
import torch

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Alone:
    """Only forward and backward. Each gradient is freed when it is computed, as zerod's ranks free pushed gradients."""

    def __init__(self, model, options, rank, world, rendezvous):
        self.model = model
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(free_gradient)

    def iterate(self, tokens):
        loss = self.model(tokens)
        loss.backward()
        return loss


def free_gradient(param):
    param.grad = None


class Ddp:
    """torch's DistributedDataParallel on gloo, with fused AdamW."""

    def __init__(self, model, options, rank, world, rendezvous):
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
        more = {"bucket_cap_mb": int(options["cap"])} if "cap" in options else {}
        self.model = torch.nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view="view" in options, static_graph="static" in options, **more)
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def iterate(self, tokens):
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


class Fsdp2:
    """torch's fully_shard() on gloo, with fused AdamW. Options: blocks: each block is a group of its own, in addition
    to the whole model. keep: weights stay gathered from the forward to the backward."""

    def __init__(self, model, options, rank, world, rendezvous):
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        how = {"mesh": init_device_mesh("cpu", (world,)), "reshard_after_forward": "keep" not in options}
        for block in model.blocks if "blocks" in options else ():
            fully_shard(block, **how)
        self.model = fully_shard(model, **how)
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    iterate = Ddp.iterate


class DeepSpeed:
    """DeepSpeed's ZeRO-2 on its CPU accelerator."""

    def __init__(self, model, options, rank, world, rendezvous):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        import deepspeed

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method=f"file://{rendezvous}", rank=rank,
                                   world_size=world, timeout=timedelta(minutes=10))
        zero = {"stage": 2, "overlap_comm": "overlap" in options}
        if "bucket" in options:
            zero |= {"reduce_bucket_size": int(options["bucket"]), "allgather_bucket_size": int(options["bucket"])}
        if "offload" in options:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        config = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": world, "zero_optimization": zero,
                  "bf16": {"enabled": "bf16" in options}, "gradient_clipping": 0.0, "steps_per_print": 1 << 30}
        optimizer = None
        if "torch" in options:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        else:
            config["optimizer"] = {"type": "AdamW", "params": ADAMW | {"betas": list(ADAMW["betas"])}}
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config,
                                               model_parameters=model.parameters())

    def iterate(self, tokens):
        loss = self.engine(tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss


class Zerod:
    def __init__(self, model, options, rank, world, rendezvous):
        import zerod

        self.model = model
        self.optimizer = zerod.Optimizer(model, socket=rendezvous, rank=rank, **ADAMW)

    def iterate(self, tokens):
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def close(self):
        self.optimizer.close()


SIDES = {"none": Alone, "ddp": Ddp, "fsdp2": Fsdp2, "deepspeed": DeepSpeed, "zerod": Zerod}


def return_what_is_free():
    """Returns the memory that the setup has freed, because the C library may be configured to keep freed memory."""
    ctypes.CDLL(None).malloc_trim(0)


def main():
    name, rank, world, rendezvous, batch, length = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4], *map(
        int, sys.argv[5:7])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps output of the peers out of the answers
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name, *options = name.replace(",", ":").split(":")
    options = {key: value for key, _, value in (option.partition("=") for option in options)}
    model = gpt2.GPT2(**gpt2.SMALL)
    if "bf16" in options and name == "none":
        model = model.bfloat16()
    batches = gpt2.Batches(gpt2.SMALL["vocabulary"], rank, world, batch, length)
    side = SIDES[name](model, options, rank, world, rendezvous)
    return_what_is_free()
    print("ready", file=out, flush=True)
    for _ in sys.stdin:
        tokens = batches.next()
        start = time.monotonic_ns()
        loss = side.iterate(tokens)
        done = time.monotonic_ns()
        print(json.dumps({"start": start, "done": done, "loss": loss.item()}), file=out, flush=True)
    if hasattr(side, "close"):
        side.close()


if __name__ == "__main__":
    main()
