# SPDX-License-Identifier: Apache-2.0
"""sentence-transformers: an encoder of pairs of sentences. With the argument "loss" its loss has parameters too."""

import sys
import tempfile

import common
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers import losses as st_losses
from sentence_transformers import models as st_models
from transformers import BertConfig, BertModel

if common.ZEROD:
    from zerod.integrations.transformers import ZerodMixin

    class Trainer(ZerodMixin, SentenceTransformerTrainer):
        pass
else:
    Trainer = SentenceTransformerTrainer

folder = tempfile.mkdtemp()
torch.manual_seed(3)
BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=64,
                     max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
          add_pooling_layer=False).save_pretrained(folder)  # fmt: skip
common.tokenizer().save_pretrained(folder)
encoder = st_models.Transformer(folder, max_seq_length=32, model_args={"add_pooling_layer": False})
model = SentenceTransformer(modules=[encoder, st_models.Pooling(32)], device="cpu")
texts = common.sentences(96, 10)
rows = [{"anchor": t.rsplit(" ", 5)[0], "positive": t.split(" ", 5)[-1]} for t in texts]
if "loss" in sys.argv:
    rows = [row | {"label": i % 2} for i, row in enumerate(rows)]
    loss = st_losses.SoftmaxLoss(model, 32, num_labels=2)
else:
    loss = st_losses.MultipleNegativesRankingLoss(model)
trainer = Trainer(
    model=model,
    # The Trainer clips the gradients of the model without those of the loss. zerod clips all gradients of a job, or
    # none.
    args=common.arguments(SentenceTransformerTrainingArguments, max_grad_norm=0 if "loss" in sys.argv else 1.0),
    train_dataset=Dataset.from_list(rows),
    loss=loss,
)
trainer.train()
common.report_trainer(trainer, loss if "loss" in sys.argv else None)
