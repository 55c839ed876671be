# SPDX-License-Identifier: Apache-2.0
"""
A Trainer that stops early. With zerod only rank 0 stops. With DDP all ranks stop, because DDP would hang otherwise.
"""

import common
from transformers import TrainerCallback, TrainingArguments

if common.ZEROD:
    from zerod.integrations.transformers import ZerodTrainer as Trainer
else:
    from transformers import Trainer


class Stop(TrainerCallback):
    def on_step_end(self, _args, state, control, **_):
        if state.global_step == 6 and (common.RANK == 0 or not common.ZEROD):
            control.should_training_stop = True


trainer = Trainer(model=common.gpt2(), args=common.arguments(TrainingArguments), train_dataset=common.Text(), callbacks=[Stop()])
try:
    trainer.train()
except RuntimeError as e:  # from zerod's on_leave: stop, or from a process group that another rank has left
    print(f"rank {common.RANK} ends with {type(e).__name__}: {str(e).splitlines()[0]}", flush=True)
common.report_trainer(trainer)
