"""Step time while a save is written in the background, against step time without one.

A step is a forward and a backward pass of many small operations, as a real one is: it needs the interpreter as much as
the cores, and feels both being taken. With one compute thread there is a core left for the save; with one a core there
is none.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.engine.contestants import CKPTMAN
from benchmarks.engine.section import Plan, Section, last_line, say
from benchmarks.engine.stall import DCP_CACHED, Save, open_ckptman, open_dcp_cached
from benchmarks.engine.state import State, empty_state, fill
from benchmarks.engine.team import MeasureError, forked

QUIET_STEPS, BUSY_STEPS = 40, 20


def open_module(state: State, root: Path, **options: Any) -> Iterator[Save]:
    """The state as the parameters of a module, in which a save looks for NaN."""
    module = nn.Module()
    for name, tensor in state.items():
        module.register_parameter(name.replace(".", "_"), nn.Parameter(tensor, requires_grad=False))
    return open_ckptman({}, root, {"model": module}, **options)


SAVERS = {
    CKPTMAN: open_module,
    f"{CKPTMAN}, which does not look for NaN": partial(open_module, nonfinite="ignore"),
    DCP_CACHED: open_dcp_cached,
}


def measure(plan: Plan) -> list[Section]:
    """One section. Call in a process of its own."""
    state = fill(empty_state(plan.state_bytes))
    root = plan.folder("steps")
    section = Section("steps", "Step time while a save is in the background, against no save", "x")
    cores = len(os.sched_getaffinity(0))
    for number in range(plan.repeat):
        for threads in sorted({1, cores}):
            for name, opened in SAVERS.items():
                row = f"{name}, {threads} compute thread{'s' * (threads > 1)} on {cores} cores"
                try:
                    section.add(row, forked(_inflation, opened, state, root, threads))
                except MeasureError as error:
                    section.missing[row] = last_line(str(error))
                shutil.rmtree(root, ignore_errors=True)
        say(f"steps: round {number + 1} of {plan.repeat}")
    return [section]


def _inflation(opened: Callable[[State, Path], Iterator[Save]], state: State, root: Path, threads: int) -> float:
    torch.set_num_threads(threads)
    root.mkdir(parents=True, exist_ok=True)
    step = Training(torch.device("cpu")).step
    with contextmanager(opened)(state, root) as save:
        save(1)()
        quiet = [step() for _ in range(QUIET_STEPS // 2)]
        busy: list[float] = []
        for number in range(2, 12):
            with ThreadPoolExecutor(1) as pool:
                written = pool.submit(save(number))
                while True:
                    seconds = step()
                    if written.done():
                        break
                    busy.append(seconds)
                written.result()
            if len(busy) >= BUSY_STEPS:
                break
        quiet += [step() for _ in range(QUIET_STEPS // 2)]
    return statistics.median(busy) / statistics.median(quiet)


class Training:
    """A small training: `step` does one step of it and returns its seconds."""

    def __init__(self, device: torch.device, width: int = 384, layers: int = 8, batch: int = 96) -> None:
        torch.manual_seed(0)
        parts: list[nn.Module] = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
        self.model = nn.Sequential(*parts).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self._x = torch.randn(batch, width, device=device)
        for _ in range(5):
            self.step()

    def step(self) -> float:
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self._x).square().mean().backward()
        self.optimizer.step()
        if self._x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun
