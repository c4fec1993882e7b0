"""A loop with Accelerate that goes on where it was, on as many processes as before, however it was ended.

python examples/accelerate_loop.py runs/accelerate
torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py runs/accelerate
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckptman

EPOCHS = 3


def main(root: str) -> int:
    set_seed(0)
    # Without a GPU, Accelerate lets the processes of a launcher train alone, unless it is told cpu=True.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    inputs = torch.randn(116, 16)
    samples = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    model, optimizer, schedule, samples = accelerator.prepare(model, optimizer, schedule, samples)

    loader = ckptman.ResumableLoader(samples)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": loader, "rng": ckptman.RNGState()}
    with ckptman.Checkpointer(root, state, save_policy=ckptman.EverySteps(5)) as checkpointer:
        step = checkpointer.restore()
        accelerator.print(f"goes on after step {step}: epoch {loader.epoch}, batch {loader.batch}", flush=True)
        for _ in range(loader.epoch, EPOCHS):
            for features, target in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(features), target)
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if not accelerator.sync_gradients:
                    continue
                step += 1  # of the optimizer: what is accumulated in between is in no checkpoint
                checkpointer.step(step, metrics={"loss": loss})
                accelerator.print(f"step {step}: loss {loss.item()!r}", flush=True)
                if checkpointer.should_stop():
                    return checkpointer.exit_code
    accelerator.end_training()
    return checkpointer.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
