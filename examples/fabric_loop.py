"""A loop with Lightning Fabric that goes on where it was, on as many processes as before, however it was ended.

python examples/fabric_loop.py runs/fabric
torchrun --standalone --nproc-per-node 2 examples/fabric_loop.py runs/fabric2
"""

from __future__ import annotations

import os
import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckptman

EPOCHS = 3


def main(root: str) -> int:
    fabric = Fabric(accelerator="auto", devices=int(os.environ.get("WORLD_SIZE", "1")))
    fabric.launch()
    fabric.seed_everything(0)
    inputs = torch.randn(116, 16)
    samples = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = ckptman.ResumableLoader(fabric.setup_dataloaders(samples))

    state = {"model": model, "optimizer": optimizer, "data": loader, "rng": ckptman.RNGState()}
    with ckptman.Checkpointer(root, state, save_policy=ckptman.EverySteps(5)) as checkpointer:
        step = checkpointer.restore()
        for _ in range(loader.epoch, EPOCHS):
            for features, target in loader:
                loss = nn.functional.mse_loss(model(features), target)
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
                step += 1
                checkpointer.step(step, metrics={"loss": loss})
                fabric.print(f"step {step}: loss {loss.item()!r}")
                if checkpointer.should_stop():
                    return checkpointer.exit_code
    return checkpointer.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
