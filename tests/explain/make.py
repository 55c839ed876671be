#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the tracebacks of this folder: small programs with one fault each, under real DDP, two ranks over gloo.

    python3 tests/explain/make.py [NAME...]

writes tests/explain/NAME.txt: what both ranks printed, one behind the other, as torchrun would show it. Folders are
masked; line numbers, thread names and the like stay as torch 2.13 printed them. Not a test, as other releases of torch
word their messages a little differently: the files are what test-explain and test_explain.py read.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Scenario:
    """A rank's program, and the value of TORCH_DISTRIBUTED_DEBUG."""

    def __init__(self, run: Callable[[int], None], debug: str = "OFF") -> None:
        self.run = run
        self.debug = debug


def layers(n: int = 3):
    import torch

    return torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(n))


def train(model, n_steps: int = 3, backward=None, **ddp) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(1)
    wrapped = DistributedDataParallel(model, **ddp)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(n_steps):
        output = wrapped(torch.ones(2, 4, requires_grad=True))
        (backward or (lambda _, o: o.sum().backward()))(wrapped, output)
        optimizer.step()
        optimizer.zero_grad()


def checkpointed(layer, x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(layer, x, use_reentrant=True)


def make_model(forward, n: int = 3):
    """Return: a model of n layers. forward(model, x) is its forward."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(n)
            self.head = torch.nn.Linear(4, 4)
            self.n_calls = 0

        def forward(self, x):
            self.n_calls += 1
            return forward(self, x)

    return Model()


def phantom(_: int) -> None:
    def forward(model, x):
        for layer in model.layers:
            x = checkpointed(layer, x)
        return model.head(x)

    train(make_model(forward), find_unused_parameters=True)


def reentrant(_: int) -> None:
    def forward(model, x):
        for layer in model.layers:
            x = checkpointed(layer, checkpointed(layer, x))
        return model.head(x)

    train(make_model(forward))


def outside(_: int) -> None:
    """The head is used outside of forward."""

    def forward(model, x):
        for layer in model.layers:
            x = layer(x)
        return x

    train(make_model(forward), backward=lambda m, o: m.module.head(o).sum().backward(), find_unused_parameters=True)


def two_losses(_: int) -> None:
    """Two backwards over one forward. The first one does not reach all parameters."""

    def forward(model, x):
        for layer in model.layers:
            x = layer(x)
        return x, model.head(x)

    def backward(_, outputs):
        outputs[0].sum().backward(retain_graph=True)
        outputs[1].sum().backward()

    train(make_model(forward), backward=backward)


def unused(_: int) -> None:
    def forward(model, x):
        for layer in model.layers:
            x = layer(x)
        return x

    train(make_model(forward))


def unused_elsewhere(_: int) -> None:
    """forward returns a type that DDP cannot search for tensors, so DDP considers all parameters unused."""

    class Output:
        def __init__(self, hidden) -> None:
            self.hidden = hidden

    def forward(model, x):
        for layer in model.layers:
            x = layer(x)
        return Output(model.head(x))

    train(make_model(forward), backward=lambda _, o: o.hidden.sum().backward(), find_unused_parameters=True)


def dead_segment(_: int) -> None:
    """The input of the first checkpointed layer does not require grad."""

    def forward(model, x):
        x = checkpointed(model.layers[0], x.detach())
        return model.head(model.layers[2](model.layers[1](x)))

    train(make_model(forward))


def static_fewer(_: int) -> None:
    def forward(model, x):
        for layer in model.layers if model.n_calls < 3 else model.layers[1:]:
            x = layer(x)
        return model.head(x)

    train(make_model(forward), n_steps=5, static_graph=True)


def static_more(_: int) -> None:
    def forward(model, x):
        for layer in model.layers if model.n_calls > 2 else model.layers[1:]:
            x = layer(x)
        return model.head(x)

    train(make_model(forward), n_steps=5, static_graph=True)


def swallowed(rank: int, **ddp) -> None:
    """On rank 1 an exception interrupts the second backward, and the loop continues."""

    def forward(model, x):
        for i, layer in enumerate(model.layers):
            x = layer(x)
            if rank == 1 and model.n_calls == 2 and i == 0:
                x.register_hook(out_of_memory)
        return model.head(x)

    def out_of_memory(_):
        raise RuntimeError("out of memory (injected)")

    def backward(_, output):
        try:
            output.sum().backward()
        except RuntimeError as error:
            print(f"Skipping iteration due to error: {error}", flush=True)

    train(make_model(forward), backward=backward, **ddp)


def many(_: int) -> None:
    """There are more missing parameters than DDP names."""

    def forward(model, x):
        return model.head(x)

    train(make_model(forward, 60))


def trainer(_: int, reentrant_: bool = True) -> None:
    """Hugging Face's Trainer with peft and gradient checkpointing, the fault of most reports. Needs both packages."""
    import tempfile

    import peft
    import transformers

    config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                      num_attention_heads=2, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config)
    model.enable_input_require_grads()
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    data = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 16
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=2, per_device_train_batch_size=2, report_to="none",
            save_strategy="no", disable_tqdm=True, ddp_backend="gloo", gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant_})
        transformers.Trainer(model=model, args=arguments, train_dataset=data).train()


SCENARIOS = {
    "ready-once-phantom": Scenario(phantom),
    "ready-once-reentrant": Scenario(reentrant),
    "ready-once-outside": Scenario(outside),
    "ready-once-two-losses": Scenario(two_losses),
    "ready-once-hidden-output": Scenario(unused_elsewhere),
    "ready-once-trainer": Scenario(trainer),
    "prior-unused": Scenario(unused),
    "prior-unused-info": Scenario(unused, "INFO"),
    "prior-swallowed": Scenario(swallowed),
    "prior-swallowed-find": Scenario(lambda rank: swallowed(rank, find_unused_parameters=True)),
    "prior-dead-segment": Scenario(dead_segment),
    "prior-many": Scenario(many),
    "static-fewer": Scenario(static_fewer),
    "static-more": Scenario(static_more),
}


def run_rank(name: str, rank: int) -> None:
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    if name != "ready-once-trainer":
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    SCENARIOS[name].run(rank)


def mask(text: str) -> str:
    text = re.sub(r'/[^\s"\']*/site-packages/', "/venv/site-packages/", text)
    text = re.sub(r'/[^\s"\']*/tests/explain/make.py', "/home/user/train.py", text)
    text = re.sub(r"\[W\d{4} [\d:.]+ ", "[W0101 00:00:00.000000000 ", text)
    return re.sub(r"(localhost|127\.0\.0\.1)\]?:\d+", "HOST", text)


def run_scenario(name: str) -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", OMP_NUM_THREADS="1",
                       TORCH_DISTRIBUTED_DEBUG=SCENARIOS[name].debug, ACCELERATE_USE_CPU="1")
    ranks = [
        subprocess.Popen([sys.executable, __file__, "--rank", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True, env=dict(environment, RANK=str(rank), LOCAL_RANK=str(rank)))
        for rank in range(2)
    ]
    try:
        return "".join(mask(rank.communicate(timeout=120)[0]) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--rank"]:
        run_rank(arguments[1], int(os.environ["RANK"]))
        return
    for name in arguments or SCENARIOS:
        text = run_scenario(name)
        if "Traceback" not in text:
            sys.exit(f"{name}: no traceback\n{text}")
        (HERE / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
