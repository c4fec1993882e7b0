"""A model that FSDP2 shards, and data that is shared out anew: the run may go on on any number of ranks.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py runs/fsdp2    # kill it, and start it on as many as you like
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import ckptman

EPOCHS, SAMPLES_OF_A_STEP, MICRO_BATCHES = 4, 24, 2


def main(root: str) -> int:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(240, 16)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).to(kind)
    mesh = init_device_mesh(kind, (world_size,))
    for layer in [*model[::2], model]:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Each step has the same samples on any number of ranks.
    sampler = ckptman.ElasticSampler(len(data), seed=0)
    batch_size = SAMPLES_OF_A_STEP // MICRO_BATCHES // world_size
    loader = ckptman.ResumableLoader(DataLoader(data, batch_size=batch_size, sampler=sampler))

    state = {"model": model, "optimizer": optimizer, "data": loader, "rng": ckptman.RNGState()}
    with ckptman.Checkpointer(root, state, save_policy=ckptman.EverySteps(5)) as checkpointer:
        step = checkpointer.restore()
        for _ in range(loader.epoch, EPOCHS):
            for features, target in loader:
                loss = nn.functional.mse_loss(model(features.to(kind)), target.to(kind))
                (loss / MICRO_BATCHES).backward()
                if loader.batch % MICRO_BATCHES:
                    continue  # gradients are in no checkpoint: step() is called once they are used
                norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                checkpointer.step(step, metrics={"loss": loss, "norm": norm})
                dist.all_reduce(total := loss.detach().clone())
                if dist.get_rank() == 0:
                    print(f"step {step}: loss {total.item() / world_size!r}", flush=True)
                if checkpointer.should_stop():
                    break
            if checkpointer.should_stop():
                break
    dist.destroy_process_group()
    return checkpointer.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
