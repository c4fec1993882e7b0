"""An image classifier as people train it: loader workers, augmentation, warm-up, EMA weights, early stopping, DDP.

python examples/vision.py runs/vision                                             # kill it, and start it again
torchrun --standalone --nproc-per-node 2 examples/vision.py runs/vision2          # on several ranks
"""

import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import ckptman

EPOCHS, PATIENCE, BATCH = 12, 1, 8


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Noise with stripes of four kinds, mirrored at random for training."""

    def __init__(self, mirrored: bool) -> None:
        self.mirrored = mirrored

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        image = 3 * noise + torch.sin(torch.arange(8.0) * (index % 4 + 1))
        return image.flip(-1) if self.mirrored and torch.rand(()) < 0.5 else image, index % 4


def main(root: str) -> int:
    if is_parallel := "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    model = DistributedDataParallel(net) if is_parallel else net
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = LambdaLR(optimizer, lambda steps: min(1.0, (steps + 1) / 10))  # warm-up
    images = Subset(Images(mirrored=True), range(80))
    validation = DataLoader(Subset(Images(mirrored=False), range(80, 112)), batch_size=32)
    sampler = DistributedSampler(images) if is_parallel else None
    batches = DataLoader(images, BATCH, sampler is None, sampler, num_workers=2, persistent_workers=True)
    loader, stopper = ckptman.ResumableLoader(batches), {"best": math.inf, "bad_epochs": 0}
    state = {"model": model, "ema": ema, "optimizer": optimizer, "schedule": schedule, "data": loader}
    state |= {"stopper": stopper, "rng": ckptman.RNGState()}
    with ckptman.Checkpointer(root, state, save_policy=5) as checkpointer:
        step = checkpointer.restore()
        while loader.epoch < EPOCHS and stopper["bad_epochs"] <= PATIENCE:
            for inputs, labels in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                schedule.step()
                ema.update_parameters(net)
                checkpointer.step(step := step + 1, metrics={"loss": loss})
                if os.environ.get("RANK", "0") == "0":
                    print(f"step {step}: loss {loss.item()!r}", flush=True)
                if checkpointer.should_stop():
                    return checkpointer.exit_code
            with torch.no_grad():
                val_loss = torch.stack([cross_entropy(ema(inputs), labels) for inputs, labels in validation]).mean()
            if is_parallel:  # BatchNorm statistics differ between ranks, and all have to stop in the same epoch
                dist.broadcast(val_loss, src=0)
            stopper["bad_epochs"] = 0 if val_loss.item() < stopper["best"] else stopper["bad_epochs"] + 1
            stopper["best"] = min(stopper["best"], val_loss.item())
    return checkpointer.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
