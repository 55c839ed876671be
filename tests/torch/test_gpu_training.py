# SPDX-License-Identifier: Apache-2.0
"""
A small transformer on a GPU, trained with zerod and with torch's AdamW, has the same losses. The daemon's job is on the
GPU (device: cuda) or in host memory (ZeRO-Offload). On machines without a GPU, sim_cuda.py and late_cuda.py stand in.
"""

import contextlib

import gpu_kinds
import pytest
import torch
from tiers import full, param
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

N_STEPS, WORDS, WIDTH = 20, 50, 32
ADAMW = {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.01}
# Relative limits of a loss. The arithmetic is the same, but in another order, and partly in bf16.
LIMITS = {"autocast": 0.02}
LIMIT = 1e-3
REAL = gpu_kinds.KIND == "real"


class Block(nn.Module):
    def __init__(self, is_checkpointed):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0, batch_first=True)
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False) if self.is_checkpointed else self.layer(x)


class LoRA(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Linear(linear.in_features, 4, bias=False)
        self.b = nn.Linear(4, linear.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.linear(x) + self.b(self.a(x))


def make_model(kind):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(kind == "checkpoint"), Block(kind == "checkpoint"),
                          nn.Linear(WIDTH, WORDS))  # fmt: skip
    if kind == "lora":
        model.requires_grad_(False)
        model[3] = LoRA(model[3])
        model[1].layer.linear1 = LoRA(model[1].layer.linear1)
    return model


def losses(model, step, kind, device):
    """Trains. step() is the optimizer's step with its follow-up. Return: the losses."""
    generator = torch.Generator().manual_seed(5)
    stream = torch.cuda.Stream(device) if kind == "stream" else None
    said = []
    for _ in range(N_STEPS):
        first = torch.randint(0, WORDS, (8, 1), generator=generator)
        tokens = ((first + 7 * torch.arange(17)) % WORDS).to(device)
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            if stream:
                stream.wait_stream(torch.cuda.default_stream(device))
            with torch.autocast(device.type, torch.bfloat16, enabled=kind == "autocast"):
                logits = model(tokens[:, :-1])
            loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        if stream:
            torch.cuda.default_stream(device).wait_stream(stream)
        step()
        said.append(loss.item())
    return said


def train_with_torch(kind):
    device = torch.device("cuda" if REAL else "cpu")
    model = make_model(kind).to(device)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW | {"betas": tuple(ADAMW["betas"])})

    def step():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()

    return losses(model, step, kind, device)


def train_with_zerod(kind, where):
    if not REAL and where == "cuda":
        import sim_cuda

        sim_cuda.install()
    elif not REAL:
        import late_cuda

        late_cuda.install()
    import zerod

    device = torch.device("cuda" if REAL else "cpu")
    model = make_model(kind).to(device)
    opt = zerod.Optimizer(model)

    def step():
        opt.step()
        opt.zero_grad()

    said = losses(model, step, kind, device)
    opt.close()
    return said


ROWS = [("plain", "cuda", 1), ("autocast", "cuda", 3), ("checkpoint", "cuda", 3), ("lora", "cuda", 2), ("autocast", "cpu", 2)]
MORE = [("plain", "cuda", 2), ("plain", "cuda", 3), ("autocast", "cuda", 2), ("lora", "cuda", 3), ("plain", "cpu", 1),
        ("checkpoint", "cpu", 2), ("lora", "cpu", 2)]  # fmt: skip
# Only real GPUs have streams.
ON_GPUS = [("stream", "cuda", 2), ("stream", "cuda", 3), ("stream", "cpu", 2)] if REAL else []


@pytest.mark.gpu
@pytest.mark.parametrize("kind, where, stage", [*ROWS, *full(*MORE), *map(param, ON_GPUS)])
def test_losses(zerod, build, run, start, kind, where, stage):
    place = {"device": "cuda", "collective": "nccl"} if where == "cuda" else {}
    daemon = zerod({"world": {"size": 1}, "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0,
                    "optimizer": {"type": "AdamW", "params": ADAMW}, **place},
                   gpu_kinds.of_daemon(build) if place else {})  # fmt: skip
    (ours,) = run(daemon, train_with_zerod, gpu_kinds.of_trainer(build, "open"), kind=kind, where=where)
    theirs = start(daemon, train_with_torch, kind=kind).result()
    assert theirs[-1] < theirs[0] - 0.1, "nothing was learnt"
    assert ours == pytest.approx(theirs, rel=LIMITS.get(kind, LIMIT))
    assert daemon.json("diagnostics") == []
