# SPDX-License-Identifier: Apache-2.0
"""
Hugging Face's Trainer, with a schedule, clipping and two groups (no decay on biases and norms). With the argument
"lion" its optimizer is Lion. Without zerod it is another Lion than bitsandbytes', which needs a GPU.
"""

import sys
from pathlib import Path

import common
from transformers import TrainingArguments

if common.ZEROD:
    from zerod.integrations.transformers import ZerodTrainer as Trainer
else:
    from transformers import Trainer


def lion(args):
    sys.path.append(str(Path(__file__).parents[1]))
    from lion import Lion

    return Lion, {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}


if __name__ == "__main__":
    with_lion = "lion" in sys.argv
    args = common.arguments(TrainingArguments, max_grad_norm=0.5, **{"optim": "lion_32bit"} if with_lion else {})
    trainer = Trainer(model=common.gpt2(), args=args, train_dataset=common.Text(),
                      optimizer_cls_and_kwargs=lion(args) if with_lion and not common.ZEROD else None)  # fmt: skip
    trainer.train()
    common.report_trainer(trainer)
