"""The training loop, to be read from top to bottom. Everything it needs is in the files beside it."""

from __future__ import annotations

from typing import Literal

import psutil

import ckptman
from ckptman.train.dataset.batches import TokenData
from ckptman.train.optim import build_optimizer, build_scheduler
from ckptman.train.parallel import build_model, choose_device, make_deterministic, process_group, seed_generators
from ckptman.train.report import Report
from ckptman.train.setup import Setup
from ckptman.train.step import accumulate_gradients, update


def train(setup: Setup, signals: ckptman.SignalHandler, *, allow_suspect: bool = False) -> int:
    """Train from the newest checkpoint to the last step, or until asked to stop; returns the exit code (0 or 75).

    Every rank calls it, with handlers that listen already: a signal while torch is imported counts too. Raises what
    `ckptman.Checkpointer` raises, and SystemExit(75) when asked to stop before the first step.
    """
    config, run, checkpoint = setup.config, setup.config.run, setup.config.checkpoint
    device = choose_device(config.parallel, setup.launch)
    if run.deterministic:
        make_deterministic()
    with (
        process_group(config.parallel, setup.launch, device, run.timeout_seconds) as world,
        Report(setup, world) as report,
    ):
        seed_generators(run.seed, world.rank)
        data = TokenData(config.data, run.seed, world.rank, world.size)
        model = build_model(config.model, config.parallel, setup.vocab_size, run.seed, world)
        optimizer = build_optimizer(model, config.optimizer)
        scheduler = build_scheduler(optimizer, config.optimizer, run.steps)
        with ckptman.Checkpointer(
            checkpoint.root,
            {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data, "rng": ckptman.RNGState()},
            save_policy=checkpoint.save_policy(),
            retention=checkpoint.retention(),
            signals=signals,
            deadline=_deadline(run.time_limit_seconds),
            async_save=checkpoint.async_save,
            timeout_seconds=run.timeout_seconds,
            watchdog=None if run.watchdog_seconds == "off" else run.watchdog_seconds,
        ) as checkpointer:
            start = checkpointer.restore(allow_suspect=allow_suspect)
            report.say(f"{setup.parameters:,} parameters on {world.size} ranks ({device.type}), from step {start}")
            report.begin(start)
            for step in range(start + 1, run.steps + 1):
                loss_sum = accumulate_gradients(model, data.next_batch(), data.batch_tokens, world)
                grad_norm = update(model, optimizer, scheduler, config.optimizer.clip_norm)
                report.add(step, data.position, loss_sum, grad_norm)
                if reason := checkpointer.step(step, metrics=report.metrics):
                    report.say(f"step {step}: saving ({reason})")
                if checkpointer.should_stop():
                    break
            report.flush()
    return checkpointer.exit_code


def _deadline(time_limit_seconds: float | None) -> float | Literal["auto"]:
    """Unix seconds at which this process has to be gone; "auto" leaves it to what Slurm says."""
    if time_limit_seconds is None:
        return "auto"
    return psutil.Process().create_time() + time_limit_seconds
