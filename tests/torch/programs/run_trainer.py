# SPDX-License-Identifier: Apache-2.0
"""
A rank that trains a small model several times with Hugging Face Trainer: test_callers.py starts it with zerodrun or
torchrun and a file of runs, {name: how}:

    socket      of the daemon; without one it is DDP with torch's AdamW
    reentrant   gradient checkpointing with this use_reentrant
    resume      the checkpoint to continue from
    save        a folder for save_model()
    args        further TrainingArguments

The results of a run are in FOLDER/NAME.rankN.pt.
"""

import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import zerod
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

N_STEPS = 6
# The gradients of some biases are zero except for rounding. With a small eps, AdamW would turn the rounding into full
# steps.
ADAM = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.01}


class Text(Dataset):
    def __init__(self, n):
        self.pieces = torch.randint(0, 64, (n, 16), generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, i):
        return {"input_ids": self.pieces[i], "labels": self.pieces[i]}


def make_model():
    """A model with tied weights."""
    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32, use_cache=False,
                                      resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def run(name, folder, rank, socket=None, reentrant=None, resume=None, save=None, args=None):
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # from the previous run
    model = make_model()
    optimizer = zerod.Optimizer(model, socket, **ADAM) if socket else torch.optim.AdamW(model.parameters(), **ADAM)
    own = folder / f"{name}.rank{rank}"
    checkpointing = {} if reentrant is None else {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    args = {"save_strategy": "no", "output_dir": str(own)} | checkpointing | (args or {})
    trainer = Trainer(
        model=model, train_dataset=Text(64), eval_dataset=Text(8), optimizers=(optimizer, None),
        args=TrainingArguments(max_steps=N_STEPS, per_device_train_batch_size=4, use_cpu=True, warmup_steps=2,
                               logging_steps=1, report_to="none", disable_tqdm=True, **args))
    trainer.train(resume_from_checkpoint=resume)
    result = {
        "wrapped": isinstance(trainer.model_wrapped, DistributedDataParallel),
        "backend": dist.get_backend(),
        "environment": os.environ["RANK"],
        "rank": trainer.args.process_index,
        "log": trainer.state.log_history,
    }
    if save:
        trainer.save_model(save)
        dist.barrier()
        again = GPT2LMHeadModel.from_pretrained(save)
        result["again"] = again.state_dict()
        model.load_state_dict(again.state_dict())
    result["weights"] = {k: v.clone() for k, v in model.state_dict().items()}
    result["files"] = sorted(str(path.relative_to(own)) for path in own.rglob("*") if path.is_file())
    if socket:
        result["step"] = optimizer.position.step
        optimizer.close()
    torch.save(result, folder / f"{name}.rank{rank}.pt")


def main():
    folder, rank = Path(sys.argv[1]).parent, int(os.environ["RANK"])
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for name, how in json.loads(Path(sys.argv[1]).read_text()).items():
        run(name, folder, rank, **how)
    dist.destroy_process_group()


main()
