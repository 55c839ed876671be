# SPDX-License-Identifier: Apache-2.0
"""
Case 1, GLiNER under DDP: "Expected to have finished reduction in the prior iteration", for rank 1 alone.

Variants: backward and forward raise one exception on rank 1 in a backward or forward, which GLiNER's Trainer catches
because its text is about memory; pooler leaves BERT's unused pooler trainable; fixed does neither.
"""

from __future__ import annotations

import os
from typing import Any

from shared import LR, WEIGHT_DECAY, Run, byte_tokenizer, hugging_face_callbacks, observe

STEP_OF_FAULT = 3
INJECTED = "CUDA out of memory (injected)"


def make_model(run: Run) -> Any:
    from gliner.config import UniEncoderSpanConfig
    from gliner.model import UniEncoderSpanGLiNER

    # GLiNER uses the last two tokens as its markers, in this order.
    tokenizer = byte_tokenizer(extra=["<<ENT>>", "<<SEP>>"], cls_token="[CLS]", sep_token="[SEP]")
    bert = dict(model_type="bert", vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                intermediate_size=64, max_position_embeddings=512, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0)  # fmt: skip
    config = UniEncoderSpanConfig(model_name="none", hidden_size=32, max_width=4, max_types=4, max_len=64, dropout=0.0,
                                  span_mode="markerV0", words_splitter_type="whitespace", vocab_size=len(tokenizer),
                                  encoder_config=bert)  # fmt: skip
    model = UniEncoderSpanGLiNER(config, tokenizer=tokenizer, backbone_from_pretrained=False)
    model.resize_embeddings()
    if run.variant != "pooler":
        for name, param in model.named_parameters():
            if ".pooler." in name:
                param.requires_grad_(False)
    return model


def samples(rank: int) -> list[dict[str, Any]]:
    people, places = ["Ann", "Bob", "Cem", "Dag"], ["Rome", "Oslo", "Lima"]
    return [{"tokenized_text": [people[(i + rank) % 4], "lives", "in", places[i % 3]],
             "ner": [[0, 0, "person"], [3, 3, "place"]]} for i in range(16)]  # fmt: skip


def inject(run: Run, model: Any, trainer: Any) -> None:
    """Raises once on rank 1 at the encoder's output. In a backward the head is then done, the encoder is not."""

    def due() -> bool:
        return run.rank == 1 and trainer.state.global_step == STEP_OF_FAULT

    def fail(*_: Any) -> None:
        raise RuntimeError(INJECTED)

    def poison(module: Any, inputs: Any, output: Any) -> None:
        if due():
            (output[0] if isinstance(output, tuple) else output).register_hook(fail)

    if run.variant == "backward":
        model.model.token_rep_layer.register_forward_hook(poison)
    elif run.variant == "forward":
        model.register_forward_pre_hook(lambda *_: fail() if due() else None)


def make_trainer(run: Run, model: Any, optimizer: Any) -> Any:
    from gliner.training import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(run.folder / f"out{run.rank}"), use_cpu=True, max_steps=run.steps, per_device_train_batch_size=2,
        report_to="none", remove_unused_columns=False, save_strategy="no", max_grad_norm=0.0, dataloader_num_workers=0,
        learning_rate=LR, weight_decay=WEIGHT_DECAY, lr_scheduler_type="constant", disable_tqdm=True,
        # Collectives of the Trainer's own, one for each logged loss and one for each batch, in transformers since
        # 4.46: after the swallowed exception rank 1 would wait in the next for ever, and rank 0 in DDP's all-reduce.
        # Without them, as in the release that the reporter had, rank 1 gets to its next forward and to DDP's text.
        logging_strategy="no" if run.distributed else "steps", logging_steps=1, average_tokens_across_devices=False,
        ddp_find_unused_parameters=False)  # fmt: skip
    # A Trainer that knows of several ranks takes every second batch of one data set; each rank brings its own here.
    collate = model._create_data_collator() if hasattr(model, "_create_data_collator") else model.data_collator_class(
        model.config, data_processor=model.data_processor, prepare_labels=True)  # fmt: skip
    data = samples(run.rank if not run.distributed else 0)
    return Trainer(model=model, args=arguments, train_dataset=data, data_collator=run.recorded(collate),
                   optimizers=(optimizer, None), callbacks=hugging_face_callbacks(run))  # fmt: skip


def main() -> None:
    run = Run(("backward", "forward", "pooler", "fixed"), __doc__.splitlines()[1])
    model = make_model(run)
    if run.side == "reference":
        # The optimizer is never used: only the loss of this Trainer is needed.
        trainer = make_trainer(run, model, run.torch_optimizer(model))
        run.reference(model, lambda batch: trainer.compute_loss(model, batch))
        return

    def body() -> None:
        trainer = make_trainer(run, model, run.make_optimizer(model))
        inject(run, model, trainer)
        observe(run, trainer)
        trainer.train()

    run.train(body, model)


if __name__ == "__main__":
    os.environ.setdefault("WANDB_DISABLED", "true")
    main()
