# SPDX-License-Identifier: Apache-2.0
"""
Case 2, fastNLP on several GPUs: "Expected to have finished reduction in the prior iteration", for seven parameters.

Variants: unused has a BERT whose pooler does not reach the loss, and a head that is never called; frozen is the same
with both frozen.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from shared import Run


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.bert = BertModel(BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                         intermediate_size=32, hidden_dropout_prob=0.0,
                                         attention_probs_dropout_prob=0.0))  # fmt: skip
        self.used = torch.nn.Linear(16, 4)
        self.unused = torch.nn.Linear(16, 4)

    def train_step(self, input_ids: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.bert(input_ids).last_hidden_state[:, 0]
        return {"loss": torch.nn.functional.cross_entropy(self.used(hidden), target)}

    # Under DDP fastNLP itself calls train_step through forward.
    forward = train_step


def make_model(run: Run) -> Net:
    torch.manual_seed(0)
    net = Net()
    if run.variant == "frozen":
        net.bert.pooler.requires_grad_(False)
        net.unused.requires_grad_(False)
    return net


def loader(run: Run) -> Any:
    """torch's own loader, because fastNLP's passes a prefetch_factor with 0 workers, which torch 2 refuses."""
    generator = torch.Generator().manual_seed(run.rank)
    data = [{"input_ids": torch.randint(0, 64, (8,), generator=generator),
             "target": torch.randint(0, 4, (), generator=generator)} for _ in range(2 * run.steps)]  # fmt: skip
    collate = run.recorded(torch.utils.data.default_collate)
    return torch.utils.data.DataLoader(data, batch_size=2, shuffle=False, collate_fn=collate)


def main() -> None:
    run = Run(("unused", "frozen"), __doc__.splitlines()[1])
    model = make_model(run)
    if run.side == "reference":
        run.reference(model, lambda batch: model.train_step(**batch)["loss"])
        return

    def body() -> None:
        from fastNLP import Trainer

        arguments: dict[str, Any] = {"model": model, "device": "cpu"}
        if run.distributed:
            # What fastNLP calls case C, the only one that does without CUDA: the user starts the processes and
            # makes the group, and wraps the model.
            torch.distributed.init_process_group("gloo")
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
            arguments = {"model": wrapped, "device": None, "data_device": "cpu"}
            if run.side == "observe":
                import zerod

                run.observer = zerod.observe(wrapped)
        trainer = Trainer(driver="torch", optimizers=run.make_optimizer(model), train_dataloader=loader(run), n_epochs=1,
                          progress_bar=None, **arguments)  # fmt: skip
        trainer.run()

    run.train(body, model)


if __name__ == "__main__":
    os.environ["FASTNLP_BACKEND"] = "torch"
    main()
