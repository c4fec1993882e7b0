"""A training by Lightning alone: `lightning_fit.py --default_root_dir DIR --max_steps N [--requeue]`."""

import argparse
import os
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

parser = argparse.ArgumentParser()
parser.add_argument("--default_root_dir", required=True)
parser.add_argument("--max_steps", type=int, required=True)
parser.add_argument("--requeue", action="store_true")
options = parser.parse_args()


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def on_train_start(self):
        print(f"starts at {self.global_step}", flush=True)

    def training_step(self, batch, _):
        time.sleep(0.2 * Path("slow").exists())
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


data = torch.utils.data.TensorDataset(torch.randn(100_000, 8))
trainer = lightning.Trainer(
    default_root_dir=options.default_root_dir,
    max_steps=options.max_steps,
    accelerator="cpu",
    num_nodes=int(os.environ["SLURM_NNODES"]),
    devices=1,
    callbacks=[ModelCheckpoint(every_n_train_steps=25, save_last=True)],
    plugins=[SLURMEnvironment(auto_requeue=options.requeue)],
    logger=False,
    enable_progress_bar=False,
)
# Lightning's own requeue saves beside the callback, and "last" does not look there.
last = max(Path(options.default_root_dir).rglob("*.ckpt"), key=os.path.getmtime, default=None)
trainer.fit(Model(), torch.utils.data.DataLoader(data), ckpt_path=last if options.requeue else "last")
