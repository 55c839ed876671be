# SPDX-License-Identifier: Apache-2.0
"""
One rank of a LoRA fine-tuning with Hugging Face Trainer, peft and gradient checkpointing; zerod is the optimizer:

    zerodrun -n 2 -- python train.py

The model is made from its configuration class, so nothing is downloaded; its weights are random, which a fine-tuning's
usually are not. The text is /usr/share/common-licenses, a token is a byte. Needs transformers, peft and accelerate.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch
import zerod
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

CONTEXT = 64


class Text(Dataset):
    """Pieces of CONTEXT bytes."""

    def __init__(self, folder: Path) -> None:
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
        whole = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
        self.pieces = whole[: len(whole) // CONTEXT * CONTEXT].view(-1, CONTEXT).long()

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[i], "labels": self.pieces[i]}


def make_model() -> nn.Module:
    # An adapter can do little with the small random weights that are the default for a start of training.
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        use_cache=False,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    return get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))


def digest(model: nn.Module, trainable: bool) -> str:
    """A digest of the bits of all trainable parameters, or of all others."""
    whole = hashlib.sha256()
    with zerod.gathered(model):
        for p in model.parameters():
            if p.requires_grad == trainable:
                whole.update(p.detach().numpy().tobytes())
    return whole.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of a LoRA fine-tuning.")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-2, help="(%(default)s)")
    parser.add_argument("--reentrant", action="store_true", help="checkpoint with autograd inside autograd")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of the adapter and of rankN.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    args.out.mkdir(parents=True, exist_ok=True)
    model = make_model()
    if args.reentrant:  # such a segment makes no gradients if no input requires one, and the base is frozen
        model.enable_input_require_grads()
    settings = TrainingArguments(
        output_dir=str(args.out / "trainer"),
        max_steps=args.steps,
        learning_rate=args.lr,
        per_device_train_batch_size=8,
        use_cpu=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": args.reentrant},
        lr_scheduler_type="constant",
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    optimizer = zerod.for_trainer(model, settings)
    before = digest(model, True), digest(model, False)
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=Text(Path("/usr/share/common-licenses")),
        optimizers=(optimizer, None),
    )
    trainer.train(resume_from_checkpoint=zerod.resume(trainer))
    after = digest(model, True), digest(model, False)
    if optimizer.rank == 0:
        model.save_pretrained(args.out / "adapter")
    (args.out / f"rank{optimizer.rank}.json").write_text(
        json.dumps(
            {
                "adapter": [before[0], after[0]],
                "base": [before[1], after[1]],
                "n_trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
                "n_frozen": sum(p.numel() for p in model.parameters() if not p.requires_grad),
                "steps": optimizer.position.step,
                "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
            }
        ),
        encoding="utf-8",
    )
    optimizer.close()


main()
