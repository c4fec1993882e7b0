"""Progress of a run, for people and programs: losses collected on the device, a progress display, a step log."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor

from ckptman.runtime.journal import Journal
from ckptman.train.parallel import World
from ckptman.train.setup import Setup, peak_tflops


class StepReport(ExitStack):
    """Collects the results of each step, and reports every `run.log_every` steps; only then it waits for the device.

    `metrics` holds the mean loss of the steps reported last, the label of the next checkpoint.
    On the terminal of rank 0 it is a progress display, elsewhere plain lines; with `run.log` every step is also one
    JSON line with step, loss (and its exact bits in `loss_hex`), grad_norm, tokens and seconds of the step, and the
    data position after it.
    """

    def __init__(self, setup: Setup, world: World) -> None:
        super().__init__()
        self._setup, self._run, self._world = setup, setup.config.run, world
        self.metrics: dict[str, float] = {}
        self._waiting: list[tuple[int, int, Tensor, Tensor]] = []
        self._since = time.perf_counter()
        self._log: Journal | None = None
        if self._run.log and world.leads:
            self._log = Journal(self._run.log)
            self.callback(self._log.close)
        self._display: Progress | None = None
        self._task = TaskID(0)
        if world.leads and sys.stdout.isatty():
            text = TextColumn("{task.description}")
            columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), text, TimeRemainingColumn()
            self._display = self.enter_context(Progress(*columns))
            self._task = self._display.add_task("", total=self._run.steps)

    def say(self, line: str) -> None:
        """Print one line, on rank 0."""
        if self._display:
            self._display.console.print(line, highlight=False, markup=False)
        elif self._world.leads:
            print(line, flush=True)

    def begin(self, step: int) -> None:
        """Start the clock, after the initialisation."""
        self._since = time.perf_counter()
        if self._display:
            self._display.update(self._task, completed=step)

    def add(self, step: int, position: int, loss_sum: Tensor, grad_norm: Tensor) -> None:
        """Note a step, and report every `run.log_every` steps. Every rank calls it, with its own `loss_sum`."""
        self._waiting.append((step, position, loss_sum, grad_norm))
        if step % self._run.log_every == 0:
            self.flush()

    def flush(self) -> None:
        """Report the steps noted so far. A collective: every rank calls it at the same step."""
        if not self._waiting:
            return
        steps, positions, loss_sums, norms = zip(*self._waiting)
        self._waiting = []
        sums = torch.stack(loss_sums)
        dist.all_reduce(sums)
        losses = (sums / self._setup.batch_tokens).tolist()
        grad_norms = torch.stack(norms).tolist()
        now = time.perf_counter()
        seconds, self._since = (now - self._since) / len(steps), now
        self.metrics = {"loss": sum(losses) / len(losses)}
        if self._log:
            for step, position, loss, norm in zip(steps, positions, losses, grad_norms):
                self._log.record(
                    "step",
                    step=step,
                    loss=loss,
                    loss_hex=float(loss).hex(),
                    grad_norm=norm,
                    tokens=self._setup.batch_tokens,
                    seconds=seconds,
                    position=position,
                )
        tokens_per_second = self._setup.batch_tokens / seconds
        text = f"loss {losses[-1]:.4f}  grad norm {grad_norms[-1]:.3f}  {tokens_per_second:,.0f} tokens/s"
        if peak := self._peak_flops():
            text += f"  MFU {100 * tokens_per_second * self._setup.flops_per_token / peak:.1f} %"
        if self._display:
            self._display.update(self._task, completed=steps[-1], description=text)
        else:
            self.say(f"step {steps[-1]}/{self._run.steps}  {text}")

    def _peak_flops(self) -> float | None:
        """Return the peak of all devices together in FLOP/s; None on CPUs and for a GPU that is not in the table."""
        tflops = self._run.peak_tflops
        if tflops is None and self._world.device.type == "cuda":
            tflops = peak_tflops(torch.cuda.get_device_name(self._world.device))
        return tflops * 1e12 * self._world.size if tflops else None
