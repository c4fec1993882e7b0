"""AdamW and its schedule."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ckptman.train.config import OptimizerConfig


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
