"""Small applications that tests train, sharded in every way: the same numbers on every world size up to rounding."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptman

Mesh = tuple[int, ...]


class Position:
    """A data position: the next global sample."""

    def __init__(self):
        self.next_sample = 0

    def state_dict(self):
        return {"next_sample": self.next_sample}

    def load_state_dict(self, state):
        self.next_sample = state["next_sample"]


class App:
    """A model whose rows divide by no world size, AdamW, a schedule, a data position and random numbers."""

    def __init__(self, mesh=None, width=7, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, width), nn.Dropout(0.25), nn.Linear(width, 3, bias=False))
        if mesh is not None:
            names = ("shard",) if len(mesh) == 1 else ("replicate", "shard")
            device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
            for layer in (self.model[0], self.model[2], self.model):
                fully_shard(layer, mesh=device_mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [4, 9], gamma=0.5)
        self.position = Position()
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(1000 * seed + rank)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.position,
            "rng": ckptman.RNGState(),
            "epoch": 0,
        }

    def train_step(self):
        """One step on data that depends on the position alone, with dropout from the generators."""
        generator = torch.Generator().manual_seed(self.position.next_sample)
        batch = torch.randn(12, 5, generator=generator)
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.position.next_sample += 12
        self.state["epoch"] = self.position.next_sample // 48
        return loss.item()

    def digests(self):
        """A digest of each tensor and value as a whole, the same on every rank and for every sharding."""
        from ckptman.engine.state.snapshot import snapshot

        shot = snapshot({key: each for key, each in self.state.items() if key != "rng"}, 0)
        found = {name: _digest(tensor) for name, tensor in shot.tensors.items()}
        return found | {name: repr(value) for name, value in shot.objects.items()}


def _digest(tensor):
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    data = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{list(whole.shape)} {whole.dtype} {hashlib.sha256(data).hexdigest()}"
