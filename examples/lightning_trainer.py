"""Lightning's Trainer with loader workers, OneCycleLR and early stopping, saved and resumed by ckptman.

python examples/lightning_trainer.py runs/lightning                                         # kill it, start it again
torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py runs/lightning2      # on several ranks
"""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckptman.integrations.lightning import CkptmanCallback


class Regression(lightning.LightningModule):
    """A small network with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        self.print(f"step {self.global_step + 1}: loss {loss.item()!r}", flush=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main(root: str) -> int:
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(116, 16)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    callback = CkptmanCallback(root, monitor="val_loss", save_top_k=2)
    trainer = lightning.Trainer(
        max_epochs=3,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        callbacks=[callback, EarlyStopping("val_loss", patience=2)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    train_loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    trainer.fit(Regression(), train_loader, DataLoader(data, batch_size=58))
    return callback.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
