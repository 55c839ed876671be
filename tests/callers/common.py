# SPDX-License-Identifier: Apache-2.0
"""
What the programs of this folder share: small models, data that needs no network, and the report of a run.

Each program trains two ranks, with zerod if zerodrun has set ZEROD_SOCKET, otherwise with torch's optimizer under
DistributedDataParallel. test_programs.py compares both.
"""

import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Dataset

ZEROD = "ZEROD_SOCKET" in os.environ
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]
# The gradients of some biases are zero except for rounding. With a small eps, AdamW would turn the rounding into full
# steps.
ADAM = {"learning_rate": 2e-3, "adam_beta2": 0.95, "adam_epsilon": 1e-5, "weight_decay": 0.1}

torch.set_num_threads(1)
torch.manual_seed(3)
_last_groups = []  # groups of the last step of torch's optimizer


def _keep_groups(optimizer, *_):
    optimizer = getattr(optimizer, "optimizer", optimizer)
    _last_groups[:] = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]


if not ZEROD:
    register_optimizer_step_pre_hook(_keep_groups)


def arguments(kind, **more):
    """Return: TrainingArguments, or a subclass of it, with the settings of these tests."""
    return kind(output_dir=tempfile.mkdtemp(), max_steps=12, per_device_train_batch_size=4, use_cpu=True, logging_steps=1,
                warmup_steps=3, report_to="none", disable_tqdm=True, save_strategy="no", seed=5, **ADAM, **more)  # fmt: skip


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=len(WORDS), n_positions=64, use_cache=False,
                                      bos_token_id=1, eos_token_id=1, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0,
                                      attn_pdrop=0.0))  # fmt: skip


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sentences(n, length=12, seed=5):
    """Return: texts in which each word follows from the previous one, so that a model can learn them."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 61, (n,), generator=generator).tolist()
    return [" ".join(f"w{(start + 7 * i) % 61}" for i in range(length)) for start in starts]


class Text(Dataset):
    """Sentences for a language model."""

    def __init__(self):
        encode = tokenizer()
        self.rows = [encode(text)["input_ids"] for text in sentences(96)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def names_of(model):
    """Return: the parameters' names without the prefix that torch.compile's wrappers add."""
    return {id(param): name.replace("_orig_mod.", "") for name, param in model.named_parameters()}


def report(model, losses, average=None):
    """
    Writes the losses, the groups of torch's last step and, if given, the average of the weights, by names. losses: a
    number for each step, of this rank or of all. average: the model with the average of the weights.

    Call it last in a program. It ends the process group, because a process that exits with one may crash in gloo's
    threads ("terminate called without an active exception", pytorch/pytorch#190489).
    """
    names = names_of(model)
    groups = [{**{k: v for k, v in group.items() if isinstance(v, (int, float, bool, list, tuple)) and k != "params"},
               "params": sorted(names[id(p)] for p in group["params"])} for group in _last_groups]  # fmt: skip
    averages = {name: param.flatten().tolist() for name, param in average.named_parameters()} if average else {}
    result = {"losses": [float(loss) for loss in losses], "groups": groups, "averages": averages}
    Path(os.environ["CALLERS_OUT"], f"rank{RANK}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def report_trainer(trainer, model=None):
    report(model or trainer.model, [line["loss"] for line in trainer.state.log_history if "loss" in line])
