"""A loop as people write it first, with a loader of the kind that is named: python stop_program.py ROOT KIND."""

import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import ckptman

KINDS = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "spawned": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
}


def main(root, kind):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(400, 8)), batch_size=4, shuffle=True, **KINDS[kind])
    state = {"model": model, "optimizer": optimizer, "data": ckptman.ResumableLoader(loader)}
    with ckptman.Checkpointer(root, state | {"rng": ckptman.RNGState()}, save_policy=100_000) as checkpointer:
        step = checkpointer.restore()
        while not checkpointer.should_stop():
            for (batch,) in state["data"]:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                checkpointer.step(step)
                print(f"step {step}", flush=True)
                if checkpointer.should_stop():
                    break
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(checkpointer.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
