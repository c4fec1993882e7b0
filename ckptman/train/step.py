"""One optimizer step: micro-batches forward and backward, one reduction, clipping, update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckptman.train.model import Decoder, token_loss_sum
from ckptman.train.parallel import World


def accumulate_gradients(model: Decoder, micro_batches: Sequence[Tensor], global_tokens: int, world: World) -> Tensor:
    """Forward and backward of one global batch; returns this rank's sum of token losses, float64, on its device.

    Afterwards the gradients are those of the mean over all `global_tokens`, whatever share of them this rank had: the
    loss is a *sum* over tokens, divided by the global number of tokens, times the world size because FSDP averages
    over the ranks. Every rank calls it with the same number of micro-batches.
    """
    scale = world.size / global_tokens
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    for index, batch in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)  # gradients stay on this rank until the last micro-batch
        weight = 1.0
        if not len(batch):
            # The others gather parameters for theirs; this rank has to join in, with a sample that counts for nothing.
            batch, weight = batch.new_zeros(1, batch.shape[1]), 0.0
        if world.device.type == "cuda":
            batch = batch.pin_memory()  # from other memory the copy would wait for the device
        batch = batch.to(world.device, non_blocking=True)
        loss = token_loss_sum(model(batch[:, :-1]), batch[:, 1:])
        torch.autograd.backward(loss * (weight * scale))
        loss_sum += loss.detach() * weight
    return loss_sum


def update(model: Decoder, optimizer: Optimizer, scheduler: LRScheduler, clip_norm: float) -> Tensor:
    """Clip by the global gradient norm, then one optimizer and schedule step; returns the norm, on the device."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # summed over the ranks once, here, and not for each parameter it is used on
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip_norm, norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return norm
