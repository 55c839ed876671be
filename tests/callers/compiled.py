# SPDX-License-Identifier: Apache-2.0
"""
torch.compile. The argument "whole" compiles the whole model of a loop, "layers" each layer. "trainer" runs a Trainer
that compiles the model because of TrainingArguments(torch_compile=True).
"""

import sys

import common
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from transformers import TrainingArguments

N_STEPS, BACKEND = 12, "aot_eager"  # inductor's graphs, without a C++ compiler
how = sys.argv[1]
ids = torch.tensor([common.tokenizer()(text)["input_ids"] for text in common.sentences(192)])


def train_by_trainer():
    if common.ZEROD:
        from zerod.integrations.transformers import ZerodTrainer as Trainer
    else:
        from transformers import Trainer

    def collate(rows):
        batch = torch.stack([row for (row,) in rows])
        return {"input_ids": batch, "labels": batch}

    arguments = common.arguments(TrainingArguments, torch_compile=True, torch_compile_backend=BACKEND)
    trainer = Trainer(model=common.gpt2(), args=arguments, train_dataset=TensorDataset(ids), data_collator=collate)
    trainer.train()
    common.report_trainer(trainer)


def train_by_loop():
    dist.init_process_group("gloo")
    model, adam = common.gpt2(), {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
    if how == "layers":
        blocks = model.transformer.h
        for i, block in enumerate(blocks):
            blocks[i] = torch.compile(block, backend=BACKEND)
    call = torch.compile(model, backend=BACKEND) if how == "whole" else model
    if common.ZEROD:
        import zerod

        optimizer = zerod.Optimizer(call, **adam)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **adam)
        call = DistributedDataParallel(call)
    losses = []
    for batch in ids[common.RANK :: common.WORLD].split(4)[:N_STEPS]:
        loss = call(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    common.report(model, losses)


train_by_trainer() if how == "trainer" else train_by_loop()
