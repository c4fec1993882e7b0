"""The training loop, to be read from top to bottom: a run, then one step of it, then the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import ckptman
from ckptman.train.config import OptimizerConfig
from ckptman.train.dataset.batches import TokenData
from ckptman.train.launch import ErrorReport
from ckptman.train.model import Decoder, token_loss_sum
from ckptman.train.parallel import (
    World,
    build_model,
    choose_device,
    make_deterministic,
    process_group,
    seed_generators,
)
from ckptman.train.report import StepReport
from ckptman.train.setup import Setup


def train(setup: Setup, signals: ckptman.SignalHandler, errors: ErrorReport, *, allow_suspect: bool = False) -> int:
    """Train from the newest checkpoint to the last step, or until asked to stop; returns the exit code (0 or 75).

    Every rank calls it, with handlers that listen already: a signal while torch is imported counts too. Raises what
    `ckptman.Checkpointer` raises, and SystemExit(75) when asked to stop before the first step. An error in the loop is
    told before the Checkpointer waits for a save that runs, and the process group is ended.
    """
    config, run, checkpoint = setup.config, setup.config.run, setup.config.checkpoint
    limit = run.time_limit_seconds  # from the start of the process; else what Slurm says
    device = choose_device(config.parallel, setup.launch)
    if run.deterministic:
        make_deterministic()
    with (
        process_group(config.parallel, setup.launch, device, run.timeout_seconds, errors) as world,
        StepReport(setup, world) as report,
    ):
        seed_generators(run.seed, world.rank)
        data = TokenData(config.data, run.seed, world.rank, world.size)
        model = build_model(config.model, config.parallel, setup.vocab_size, run.seed, world)
        optimizer = build_optimizer(model, config.optimizer)
        scheduler = build_scheduler(optimizer, config.optimizer, run.steps)
        checkpointer = ckptman.Checkpointer(
            checkpoint.root,
            {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data, "rng": ckptman.RNGState()},
            save_policy=checkpoint.save_policy(),
            retention=checkpoint.retention(),
            signals=signals,
            deadline="auto" if limit is None else psutil.Process().create_time() + limit,
            async_save=checkpoint.async_save,
            memory=checkpoint.memory_tier(),
            total_steps=run.steps,
            timeout_seconds=run.timeout_seconds,
            watchdog=None if run.watchdog_seconds == "off" else run.watchdog_seconds,
        )
        with checkpointer, errors.at_once():
            start = checkpointer.restore(allow_suspect=allow_suspect)
            report.say(f"{setup.parameters:,} parameters on {world.size} ranks ({device.type})")
            report.begin(start)
            for step in range(start + 1, run.steps + 1):
                with checkpointer.own_work():
                    batch = data.next_batch()
                loss_sum = accumulate_gradients(model, batch, setup.batch_tokens, world)
                grad_norm = update(model, optimizer, scheduler, config.optimizer.clip_norm)
                report.add(step, data.position, loss_sum, grad_norm)
                checkpointer.step(step, metrics=report.metrics)
                if checkpointer.should_stop():
                    break
            report.flush()
    return checkpointer.exit_code


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


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW with weight decay on matrices only: norms have one dimension, and shrinking them has no meaning."""
    parameters = list(model.parameters())
    return AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=parameters[0].is_cuda,
    )


def learning_rate_factor(done_steps: int, config: OptimizerConfig, total_steps: int) -> float:
    """What the step after `done_steps` steps multiplies the learning rate with: linear up, then half a cosine down."""
    if done_steps < config.warmup_steps:
        return (done_steps + 1) / config.warmup_steps
    progress = (done_steps - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return config.final_fraction + (1 - config.final_fraction) * cosine


def build_scheduler(optimizer: AdamW, config: OptimizerConfig, total_steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda done_steps: learning_rate_factor(done_steps, config, total_steps))
