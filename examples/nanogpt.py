"""A small GPT in the style of nanoGPT: random batches, accumulated gradients, GradScaler, best loss, tied weights, DDP.

python examples/nanogpt.py runs/gpt                                             # kill it, and start it again
torchrun --standalone --nproc-per-node 2 examples/nanogpt.py runs/gpt2          # on several ranks
"""

import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckptman

STEPS, WARMUP, CONTEXT, BATCH, MICRO_STEPS = 60, 10, 16, 8, 2
TEXT = torch.arange(10_000) * torch.arange(10_000) % 61  # stands for a memory-mapped file of tokens
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class GPT(nn.Module):
    def __init__(self, tokens: int = 64, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        block = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, tokens.device)
        logits = self.head(self.blocks(self.embedding(tokens) + self.position, mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_loss(model: nn.Module) -> torch.Tensor:
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH,)).tolist()
    tokens = torch.stack([TEXT[start : start + CONTEXT + 1] for start in starts]).to(DEVICE)
    with torch.autocast(DEVICE, torch.float16, enabled=DEVICE == "cuda"):
        return model(tokens[:, :-1], tokens[:, 1:])


def main(root: str) -> int:
    rank, is_parallel = int(os.environ.get("RANK", "0")), "RANK" in os.environ
    if is_parallel:
        dist.init_process_group()
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(1337 + rank)
    model = DistributedDataParallel(GPT().to(DEVICE)) if is_parallel else GPT().to(DEVICE)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler(DEVICE, growth_interval=20)
    best = ckptman.PerRank({"loss": math.inf})
    # The batches follow from the generators, and the learning rate from the step.
    state = {"model": model, "optimizer": optimizer, "scaler": scaler, "best": best, "rng": ckptman.RNGState()}
    with ckptman.Checkpointer(root, state, save_policy=10) as checkpointer:
        for step in range(checkpointer.restore() + 1, STEPS + 1):
            optimizer.param_groups[0]["lr"] = 1e-2 * min(step / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
            for _ in range(MICRO_STEPS):
                loss = batch_loss(model)
                scaler.scale(loss / MICRO_STEPS).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            best.value["loss"] = min(best.value["loss"], loss.item())
            checkpointer.step(step, metrics={"loss": loss})
            if rank == 0:
                print(f"step {step}: loss {loss.item()!r} best {best.value['loss']:.6f}", flush=True)
            if checkpointer.should_stop():
                break
    return checkpointer.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
