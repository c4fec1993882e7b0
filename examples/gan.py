"""Two models that train against each other, each with an optimizer of its own: both are entries of one state.

python examples/gan.py runs/gan                                                 # kill it, and start it again
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ckptman

EPOCHS, NOISE = 3, 8


def main(root: str) -> int:
    torch.manual_seed(0)
    real = torch.randn(200, 2) @ torch.tensor([[2.0, 1.0], [0.0, 0.5]])
    generator = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(32, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    loader = ckptman.ResumableLoader(DataLoader(TensorDataset(real), batch_size=10, shuffle=True))

    state = {
        "generator": generator,
        "critic": critic,
        "generator_optimizer": generator_optimizer,
        "critic_optimizer": critic_optimizer,
        "data": loader,
        "rng": ckptman.RNGState(),
    }
    with ckptman.Checkpointer(root, state, save_policy=ckptman.EverySteps(10)) as checkpointer:
        step = checkpointer.restore()
        for _ in range(loader.epoch, EPOCHS):
            for (samples,) in loader:
                made = generator(torch.randn(len(samples), NOISE))
                true, false = critic(samples), critic(made.detach())
                loss = cross_entropy(true, torch.ones_like(true)) + cross_entropy(false, torch.zeros_like(false))
                critic_optimizer.zero_grad()
                loss.backward()
                critic_optimizer.step()

                told = critic(made)
                generator_loss = cross_entropy(told, torch.ones_like(told))
                generator_optimizer.zero_grad()
                generator_loss.backward()
                generator_optimizer.step()
                step += 1
                checkpointer.step(step, metrics={"loss": loss, "generator_loss": generator_loss})
                print(f"step {step}: loss {loss.item()!r}, of the generator {generator_loss.item()!r}", flush=True)
                if checkpointer.should_stop():
                    return checkpointer.exit_code
    return checkpointer.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
