# SPDX-License-Identifier: Apache-2.0
"""
Case 3, FlagEmbedding's LLM reranker with LoRA under DDP: "Expected to mark a variable ready only once".

Variants: reentrant is the reporter's setting, nonreentrant and nofind are its two repairs; embedder and
embedder-nonreentrant train the embedder of the same package, which runs its model twice, for queries and passages.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from shared import LR, WEIGHT_DECAY, Run, byte_tokenizer, hugging_face_callbacks, observe

LORA = dict(use_lora=True, lora_rank=4, lora_alpha=8, lora_dropout=0.0,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])  # fmt: skip


def make_llama(folder: Path) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, pad_token_id=tokenizer.pad_token_id,
                         bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_data(path: Path, rank: int) -> list[str]:
    nouns = ["rain", "snow", "wind", "hail", "fog", "sun"]
    with path.open("w") as file:
        for i in range(16):
            noun, other = nouns[(i + rank) % 6], nouns[(i + rank + 1) % 6]
            row = {"query": f"what is {noun}", "pos": [f"{noun} is weather {i}"], "neg": [f"{other} is not", "a stone"]}
            file.write(json.dumps(row) + "\n")
    return [str(path)]


def training_arguments(run: Run, kind: Any, **more: Any) -> Any:
    find_unused = {"ddp_find_unused_parameters": False} if run.variant == "nofind" else {}
    return kind(
        output_dir=str(run.folder / f"out{run.rank}"), overwrite_output_dir=True, use_cpu=True, max_steps=run.steps,
        per_device_train_batch_size=2, dataloader_drop_last=True, gradient_checkpointing=run.side != "reference",
        gradient_checkpointing_kwargs={"use_reentrant": not run.variant.endswith("nonreentrant")}, report_to="none",
        remove_unused_columns=False, save_strategy="no", max_grad_norm=0.0, learning_rate=LR, weight_decay=WEIGHT_DECAY,
        lr_scheduler_type="constant", logging_steps=1, disable_tqdm=True, **find_unused, **more)  # fmt: skip


def make_reranker(run: Run, model: str, data: list[str], cache: str) -> Any:
    from FlagEmbedding.abc.finetune.reranker import AbsRerankerDataArguments, AbsRerankerTrainingArguments
    from FlagEmbedding.finetune.reranker.decoder_only.base import DecoderOnlyRerankerRunner, RerankerModelArguments

    return DecoderOnlyRerankerRunner(
        model_args=RerankerModelArguments(model_name_or_path=model, model_type="decoder", **LORA),
        data_args=AbsRerankerDataArguments(train_data=data, train_group_size=2, query_max_len=16, passage_max_len=32,
                                           cache_path=cache),
        training_args=training_arguments(run, AbsRerankerTrainingArguments))  # fmt: skip


def make_embedder(run: Run, model: str, data: list[str], cache: str) -> Any:
    from FlagEmbedding.abc.finetune.embedder import AbsEmbedderDataArguments, AbsEmbedderTrainingArguments
    from FlagEmbedding.finetune.embedder.decoder_only.base import (DecoderOnlyEmbedderModelArguments,
                                                                   DecoderOnlyEmbedderRunner)  # fmt: skip

    return DecoderOnlyEmbedderRunner(
        model_args=DecoderOnlyEmbedderModelArguments(model_name_or_path=model, **LORA),
        data_args=AbsEmbedderDataArguments(train_data=data, train_group_size=2, query_max_len=16, passage_max_len=32,
                                           cache_path=cache),
        training_args=training_arguments(run, AbsEmbedderTrainingArguments, sentence_pooling_method="last_token",
                                         normalize_embeddings=True))  # fmt: skip


def main() -> None:
    run = Run(("reentrant", "nonreentrant", "nofind", "embedder", "embedder-nonreentrant"), __doc__.splitlines()[1])
    private = run.folder / f"in{run.rank}{run.side}"
    private.mkdir(parents=True, exist_ok=True)
    llama = make_llama(private / "llama")
    data = write_data(private / "data.jsonl", run.rank if not run.distributed else 0)
    make = make_embedder if run.variant.startswith("embedder") else make_reranker
    runner = make(run, llama, data, str(private / "cache"))
    trainer = runner.trainer
    trainer.data_collator = run.recorded(trainer.data_collator)
    if run.side == "reference":
        run.reference(runner.model, lambda batch: trainer.compute_loss(runner.model, batch))
        return

    def body() -> None:
        trainer.optimizer = run.make_optimizer(runner.model)
        for callback in hugging_face_callbacks(run):
            trainer.add_callback(callback)
        observe(run, trainer)
        runner.run()

    run.train(body, runner.model)


if __name__ == "__main__":
    os.environ.setdefault("WANDB_DISABLED", "true")
    main()
