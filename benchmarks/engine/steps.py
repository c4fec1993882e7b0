"""What training loses to a save that is written in the background, on one thread, with other cores idle beside it.

A step is a forward and a backward pass. One of many small layers with hooks needs the interpreter more than the cores,
and feels it being taken; one of large products needs the core and the memory.
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

import torch
from torch import nn

from benchmarks.engine.contestants import CKPTMAN, DCP
from benchmarks.engine.section import Plan, Section, last_line, say
from benchmarks.engine.stall import Save, open_ckptman, open_dcp
from benchmarks.engine.state import State, empty_state, fill
from benchmarks.engine.team import MeasureError, forked

QUIET_STEPS = 40
SAVES = 3
DISK, SHM = "disk", "/dev/shm"
SGD = partial(torch.optim.SGD, lr=1e-4)


def open_module(state: State, root: Path) -> Iterator[Save]:
    """The state as the parameters of a module, in which a save looks for NaN."""
    module = nn.Module()
    for name, tensor in state.items():
        module.register_parameter(name.replace(".", "_"), nn.Parameter(tensor, requires_grad=False))
    return open_ckptman({}, root, {"model": module})


SAVERS = {CKPTMAN: open_module, DCP: open_dcp}


class Training:
    """A small training: `step` does one step of it and returns its seconds. `idle_bytes`: of a parameter that gets a
    gradient only once, so that it makes the state larger and no step longer."""

    def __init__(
        self,
        device: torch.device,
        width: int,
        layers: int,
        batch: int,
        *,
        hooks: bool = False,
        optimizer: Callable[..., torch.optim.Optimizer] = SGD,
        idle_bytes: int = 0,
    ) -> None:
        torch.manual_seed(0)
        parts: list[nn.Module] = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
        self.model = nn.Sequential(*parts).to(device)
        for part in parts if hooks else ():
            part.register_forward_hook(lambda *_: None)
            part.register_full_backward_hook(lambda *_: None)
        if idle_bytes:
            idle = nn.Parameter(torch.rand(idle_bytes // 4, device=device))
            idle.grad = torch.zeros_like(idle)
            self.model.register_parameter("idle", idle)
        self.optimizer = optimizer(self.model.parameters())
        self._x = torch.randn(batch, width, device=device)
        for _ in range(5):
            self.step()

    def step(self) -> float:
        begun = time.perf_counter()
        self.model(self._x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun


LOOPS: dict[str, Callable[[], Training]] = {
    "60 small layers with hooks": lambda: Training(torch.device("cpu"), 32, 60, 8, hooks=True),
    "large products": lambda: Training(torch.device("cpu"), 1024, 4, 256),
}


def measure(loop: str, plan: Plan) -> list[Section]:
    """Two sections of one loop. Call in a process of its own."""
    state = fill(empty_state(plan.state_bytes))
    inflation = Section(f"steps, {loop}", f"Step time while a save is in the background, over no save, {loop}", "x")
    lost = Section(
        f"steps_lost, {loop}", f"Training lost to one save in the background, besides its stall, {loop}", "s"
    )
    places = {DISK: plan.folder("steps")}
    if os.access(SHM, os.W_OK):
        places[SHM] = Path(SHM) / f"ckptman-bench-{os.getpid()}"
    for number in range(plan.repeat):
        for place, root in places.items():
            for name, opened in SAVERS.items():
                row = f"{name}, {place}, {loop}"
                try:
                    ratio, seconds = forked(_beside_saves, opened, state, root, loop)
                    inflation.add(row, ratio)
                    lost.add(row, seconds)
                except MeasureError as error:
                    inflation.missing[row] = last_line(str(error))
                shutil.rmtree(root, ignore_errors=True)
        say(f"steps, {loop}: round {number + 1} of {plan.repeat}")
    return [inflation, lost]


PARTS = [partial(measure, loop) for loop in LOOPS]


def _beside_saves(
    opened: Callable[[State, Path], Iterator[Save]], state: State, root: Path, loop: str
) -> tuple[float, float]:
    """Return step time during saves over that without, and the seconds lost to each: medians of a few saves. The time
    of all steps counts, less that of as many undisturbed ones, before and after."""
    torch.set_num_threads(1)
    root.mkdir(parents=True, exist_ok=True)
    step = LOOPS[loop]().step
    ratios, lost = [], []
    with contextmanager(opened)(state, root) as save:
        save(1)()
        for number in range(2, 2 + SAVES):
            before = statistics.median(step() for _ in range(QUIET_STEPS))
            with ThreadPoolExecutor(1) as pool:
                written = pool.submit(save(number))
                busy: list[float] = []
                while not written.done() or not busy:
                    busy.append(step())
                written.result()
            quiet = (before + statistics.median(step() for _ in range(QUIET_STEPS))) / 2
            ratios.append(statistics.mean(busy) / quiet)
            lost.append(sum(busy) - len(busy) * quiet)
            for old in root.glob("dcp-*"):
                shutil.rmtree(old)
    return statistics.median(ratios), statistics.median(lost)
