# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer."""

import common
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

if common.ZEROD:
    import zerod
    from zerod.integrations.lightning import ZerodCallback, ZerodStrategy
else:
    from lightning.pytorch.strategies import DDPStrategy as ZerodStrategy


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = common.gpt2(), []

    def training_step(self, batch, _):
        loss = self.net(input_ids=batch[0], labels=batch[0]).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        adam = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
        opt = zerod.Optimizer(self, **adam) if common.ZEROD else torch.optim.AdamW(self.parameters(), **adam)
        return [opt], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.9), "interval": "step"}]


lightning.seed_everything(5, verbose=False)
module = Module()
ids = torch.tensor([common.tokenizer()(text)["input_ids"] for text in common.sentences(96)])
trainer = lightning.Trainer(
    accelerator="cpu", devices=common.WORLD, strategy=ZerodStrategy(), max_epochs=1, logger=False, gradient_clip_val=1.0,
    accumulate_grad_batches=2, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[ZerodCallback()] if common.ZEROD else [])  # fmt: skip
trainer.fit(module, DataLoader(TensorDataset(ids), batch_size=4, shuffle=True))
common.report(module, module.losses)
