"""A small GPT in the style of nanoGPT: batches drawn at random, a learning rate by hand, tied weights, DDP.

python examples/nanogpt.py runs/gpt                                             # kill it, and start it again
torchrun --standalone --nproc-per-node 2 examples/nanogpt.py runs/gpt2          # on several ranks
"""

from __future__ import annotations

import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckptman

STEPS, WARMUP, CONTEXT, BATCH = 60, 10, 16, 8


class GPT(nn.Module):
    """Two blocks; the head has the weights of the embedding."""

    def __init__(self, tokens: int = 64, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        block = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.head(self.blocks(self.embedding(tokens) + self.position, mask, is_causal=True))


def learning_rate(step: int) -> float:
    """Warm up, then fall like a cosine."""
    done = max(0.0, (step - WARMUP) / (STEPS - WARMUP))
    return 1e-2 * min(step / WARMUP, 0.5 + 0.5 * math.cos(math.pi * done))


def main(root: str) -> int:
    if torch.cuda.is_available():
        torch.set_default_device(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))
    rank, is_parallel = int(os.environ.get("RANK", "0")), "RANK" in os.environ
    if is_parallel:
        dist.init_process_group()
    text = torch.arange(10_000) * torch.arange(10_000) % 61  # stands for a memory-mapped file of tokens
    torch.manual_seed(1337 + rank)
    model = DistributedDataParallel(GPT()) if is_parallel else GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    # The batches follow from the generators, which are in the state; the learning rate follows from the step.
    state = {"model": model, "optimizer": optimizer, "rng": ckptman.RNGState()}
    with ckptman.Checkpointer(root, state, save_policy=ckptman.EverySteps(10)) as checkpointer:
        for step in range(checkpointer.restore() + 1, STEPS + 1):
            starts = torch.randint(len(text) - CONTEXT, (BATCH,))
            tokens = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpointer.step(step, metrics={"loss": loss})
            if rank == 0:
                print(f"step {step}: loss {loss.item()!r}", flush=True)
            if checkpointer.should_stop():
                break
    if is_parallel:
        dist.destroy_process_group()
    return checkpointer.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
