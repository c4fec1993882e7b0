"""What the loop tells people and programs: losses collected on the device, a progress display, and a step log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor

from ckptman.runtime.journal import Journal
from ckptman.train.parallel import World
from ckptman.train.setup import Setup
from ckptman.train.size import peak_tflops


class Report:
    """Collects what each step gives, and tells it every `run.log_every` steps; only there the device is waited for.

    `metrics` holds the mean loss of the last steps that were told: what a checkpoint is labelled with.
    On the terminal of rank 0 it is a progress display, elsewhere plain lines; with `run.log` every step is also one
    JSON line with step, loss (and its exact bits in `loss_hex`), grad_norm, tokens and seconds of the step, and the
    data position after it.
    """

    def __init__(self, setup: Setup, world: World, clock: Callable[[], float] = time.perf_counter) -> None:
        self._run, self._world, self._clock = setup.config.run, world, clock
        self._batch_tokens, self._batch = setup.batch_tokens, setup.config.data.global_batch
        self._flops_per_token = setup.flops_per_token
        self._peak_flops = _peak_flops(self._run.peak_tflops, world)
        self.metrics: dict[str, float] = {}
        self._waiting: list[tuple[int, int, Tensor, Tensor]] = []
        self._since = clock()
        self._log = Journal(self._run.log) if self._run.log and world.leads else None
        self._display: Progress | None = None
        self._task = TaskID(0)
        if world.leads and sys.stdout.isatty():
            self._display = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )

    def __enter__(self) -> Report:
        if self._display:
            self._display.start()
            self._task = self._display.add_task("", total=self._run.steps)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._display:
            self._display.stop()
        if self._log:
            self._log.close()

    def say(self, line: str) -> None:
        """One line for people, on rank 0."""
        if self._display:
            self._display.console.print(line, highlight=False, markup=False)
        elif self._world.leads:
            print(line, flush=True)

    def begin(self, step: int) -> None:
        """The clock starts here: what came before was initialisation."""
        self._since = self._clock()
        if self._display:
            self._display.update(self._task, completed=step)

    def add(self, step: int, position: int, loss_sum: Tensor, grad_norm: Tensor) -> None:
        """Take note of a step; every `run.log_every` steps, tell. Every rank calls it, with its own `loss_sum`."""
        self._waiting.append((step, position, loss_sum, grad_norm))
        if step % self._run.log_every == 0:
            self.flush()

    def flush(self) -> None:
        """Tell what waits. A collective: every rank calls it at the same step."""
        if not self._waiting:
            return
        steps, positions, loss_sums, norms = zip(*self._waiting)
        self._waiting = []
        sums = torch.stack(loss_sums)
        dist.all_reduce(sums)
        losses = (sums / self._batch_tokens).tolist()
        grad_norms = torch.stack(norms).tolist()
        now = self._clock()
        seconds, self._since = (now - self._since) / len(steps), now
        self.metrics = {"loss": sum(losses) / len(losses)}
        if not self._world.leads:
            return
        if self._log:
            for step, position, loss, norm in zip(steps, positions, losses, grad_norms):
                self._log.record(
                    "step",
                    step=step,
                    loss=loss,
                    loss_hex=float(loss).hex(),
                    grad_norm=norm,
                    tokens=self._batch_tokens,
                    seconds=seconds,
                    position=position,
                )
        self._tell(steps[-1], losses[-1], grad_norms[-1], self._batch_tokens / seconds)

    def _tell(self, step: int, loss: float, grad_norm: float, tokens_per_second: float) -> None:
        text = f"loss {loss:.4f}  grad norm {grad_norm:.3f}  {tokens_per_second:,.0f} tokens/s"
        if self._peak_flops:
            text += f"  MFU {100 * tokens_per_second * self._flops_per_token / self._peak_flops:.1f} %"
        if self._display:
            self._display.update(self._task, completed=step, description=text)
        else:
            print(f"step {step}/{self._run.steps}  {text}", flush=True)


def _peak_flops(override_tflops: float | None, world: World) -> float | None:
    """What all devices together could do, in FLOP/s; None on CPUs and for a GPU that is not in the table."""
    tflops = override_tflops
    if tflops is None and world.device.type == "cuda":
        tflops = peak_tflops(torch.cuda.get_device_name(world.device))
    return tflops * 1e12 * world.size if tflops else None
