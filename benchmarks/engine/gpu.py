"""The same on a GPU: what a save takes from training, with and without overlap, and rates to and from storage.

One GPU is enough. The state is AdamW's, parameters and two moments, twice as large as that of the other parts: 4 GiB.
A step of large products is bound by the GPU, one of small layers with hooks by the interpreter. Each contestant has a
process of its own, which begins no further round when its time is over: all of it together takes less than 8 minutes.

It needs torch and what ckptman depends on, and neither another library nor a network. On the device "cpu" it tries out
the script, and measures nothing of use.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import ckptman
from benchmarks.engine import cache
from benchmarks.engine.contestants import CKPTMAN, DCP, SAVERS, TORCH, WARM_LOADERS
from benchmarks.engine.section import Plan, Section, last_line, say
from benchmarks.engine.stall import DCP_CACHED, Save, open_ckptman, open_dcp, open_dcp_cached
from benchmarks.engine.state import State, shapes
from benchmarks.engine.steps import DISK, SHM, Training
from benchmarks.engine.team import MeasureError, fresh

STATE = 2
"""How many times the state of the other parts."""
OVERLAP = f"{CKPTMAN}, overlap"
OVERLAP_CALL = f"{OVERLAP}, the call alone"
PINNED = "copy into pinned memory"
MEMORY = f"{CKPTMAN}, to memory"
NAMES = (CKPTMAN, OVERLAP, MEMORY, DCP, DCP_CACHED)
SAVE_SECONDS, RATE_SECONDS, LEAST_ROUNDS, LIMIT_SECONDS = 30.0, 22.0, 2, 150.0
"""After how long a process begins no further round, how many it takes all the same, and when it counts as stuck."""
QUIET_SECONDS = 1.0
TENSORS = 3
"""AdamW keeps so many tensors of each parameter's size, the parameter included."""
LAYERS = 20


def _large_products(size_bytes: int, device: torch.device) -> Training:
    """Passes that take longer than the copy, as of any model that needs a GPU."""
    width = 16 * math.ceil((size_bytes / (4 * TENSORS * LAYERS)) ** 0.5 / 16)
    torch.set_float32_matmul_precision("high")
    return Training(device, width, LAYERS, 16384 if device.type == "cuda" else 64, optimizer=_adamw(device))


def _small_layers(size_bytes: int, device: torch.device) -> Training:
    return Training(device, 32, 60, 8, hooks=True, optimizer=_adamw(device), idle_bytes=size_bytes // TENSORS)


def _adamw(device: torch.device) -> Callable[..., torch.optim.Optimizer]:
    return partial(torch.optim.AdamW, lr=1e-4, fused=device.type == "cuda")


LOOPS = {"large products": _large_products, "60 small layers with hooks": _small_layers}


class Saved(NamedTuple):
    """Seconds of one save, and by how much a step beside it takes longer.

    `copy`: into pinned memory, right before; `call`: until the save returns; `stall`: that and, with overlap, what the
    step after it takes longer: its optimizer waits for the copy; `lost`: by all steps until it is written.
    """

    copy: float
    call: float
    stall: float
    inflation: float
    lost: float


def beside_saves(loop: str, plan: Plan) -> list[Section]:
    """Four sections of one loop."""
    size = STATE * plan.state_bytes
    stall = Section(f"gpu_stall, {loop}", f"GPU: stall of an async save, {loop}", "s", size)
    ratio = Section(f"gpu_stall_ratio, {loop}", f"GPU: stall over a copy into pinned memory, {loop}", "x")
    steps = Section(f"gpu_steps, {loop}", f"GPU: step time beside a save in the background, over no save, {loop}", "x")
    lost = Section(f"gpu_lost, {loop}", f"GPU: training lost to one save, besides its stall, {loop}", "s")
    sections = [stall, ratio, steps, lost]
    for name in NAMES:
        root = plan.folder("gpu")
        until = time.monotonic() + SAVE_SECONDS
        try:
            saves = fresh(_saves, name, loop, size, root, plan, until, limit_seconds=LIMIT_SECONDS)
        except MeasureError as error:
            print(error, file=sys.stderr)
            stall.missing[name] = last_line(str(error))
            continue
        finally:
            shutil.rmtree(root, ignore_errors=True)
        for number, each in enumerate(saves):
            which = f"{name}, {'later' if number else 'first'}"
            stall.add(which, each.stall)
            stall.add(PINNED, each.copy)
            ratio.add(which, each.stall / each.copy)
            if name == OVERLAP and number:
                stall.add(OVERLAP_CALL, each.call)
            if number:
                steps.add(name, each.inflation)
                lost.add(name, each.lost)
        say(f"gpu, {loop}: {name}")
    return sections


def _saves(name: str, loop: str, size_bytes: int, root: Path, plan: Plan, until: float) -> list[Saved]:
    """A first save, and as many more as there are to be rounds and is time for."""
    training = LOOPS[loop](size_bytes, torch.device(plan.device))
    state = _tensors(training)
    pinned = _pinned_like(state)
    root.mkdir(parents=True, exist_ok=True)
    found: list[Saved] = []
    with contextmanager(_open)(name, training, state, root) as save:
        while len(found) <= plan.repeat and (len(found) < LEAST_ROUNDS or time.monotonic() < until):
            copy = min(_copy_seconds(state, pinned) for _ in range(3))
            found.append(_save(save, len(found) + 1, training.step, copy, name == OVERLAP))
            for old in root.iterdir():
                if old.name != "run":  # which prunes what is in it itself
                    shutil.rmtree(old)
    return found


def _save(save: Save, number: int, step: Callable[[], float], copy: float, overlap: bool) -> Saved:
    quiet = statistics.median(_quiet(step))
    begun = time.perf_counter()
    wait = save(number)
    call = time.perf_counter() - begun
    first = step()
    stall = call + max(0.0, first - quiet) if overlap else call
    busy = [] if overlap else [first]
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(wait)
        while not written.done() or not busy:
            busy.append(step())
        written.result()
    return Saved(copy, call, stall, statistics.mean(busy) / quiet, sum(busy) - len(busy) * quiet)


def _quiet(step: Callable[[], float]) -> Iterator[float]:
    """Undisturbed steps, at least five."""
    spent, number = 0.0, 0
    while spent < QUIET_SECONDS or number < 5:
        seconds = step()
        spent, number = spent + seconds, number + 1
        yield seconds


def _open(name: str, training: Training, state: State, root: Path) -> Iterator[Save]:
    if name in (CKPTMAN, OVERLAP):
        also = {"model": training.model, "optimizer": training.optimizer}
        return open_ckptman({}, root, also, overlap=name == OVERLAP)
    if name == MEMORY:
        return open_memory(training, root)
    return (open_dcp if name == DCP else open_dcp_cached)(state, root)


def open_memory(training: Training, root: Path) -> Iterator[Save]:
    """Saves to the memory of this node alone, and none to disk."""
    state = {"model": training.model, "optimizer": training.optimizer}
    path = Path(SHM) / f"ckptman-bench-memory-{os.getpid()}"
    path.mkdir()
    memory = ckptman.MemoryTier(ckptman.EverySteps(1), copies=1, path=path)
    with ckptman.Checkpointer(
        root / "run", state, save_policy=ckptman.EverySteps(10**9), deadline=None, memory=memory
    ) as checkpointer:
        checkpointer.restore()

        def save(step: int) -> Callable[[], object]:
            assert checkpointer._memory is not None
            saves = checkpointer._memory.saves
            assert not saves.off, saves.off
            checkpointer.step(step)
            return saves.wait

        yield save
    shutil.rmtree(path)


def _tensors(training: Training) -> State:
    """All that is saved, by name: the live memory."""
    found = {f"model.{name}": each for name, each in training.model.state_dict().items()}
    for number, entries in training.optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{number}.{key}": each for key, each in entries.items()}
    return found


def _pinned_like(state: State) -> State:
    """One run of pinned memory, in which each tensor has its place. It is registered as it is, until the process ends:
    torch's own pool rounds up to a power of two."""
    assert {each.dtype for each in state.values()} == {torch.float32}
    memory = torch.zeros(sum(each.numel() for each in state.values()))
    if any(each.is_cuda for each in state.values()):
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        assert not int(code), f"{memory.nbytes} bytes cannot be pinned: {code}"
    parts = memory.split([each.numel() for each in state.values()])
    return {name: part.view(each.shape) for part, (name, each) in zip(parts, state.items())}


def _copy_seconds(state: State, pinned: State) -> float:
    _settle(state)
    begun = time.perf_counter()
    for key, tensor in state.items():
        pinned[key].copy_(tensor, non_blocking=True)
    _settle(state)
    return time.perf_counter() - begun


def _settle(state: State) -> None:
    if any(each.is_cuda for each in state.values()):
        torch.cuda.synchronize()


def rates(plan: Plan) -> list[Section]:
    """Save until durable from the GPU, and load onto it from the page cache: on disk and in memory."""
    size = STATE * plan.state_bytes
    places = {DISK: plan.folder("gpu"), SHM: Path(SHM) / f"ckptman-bench-gpu-{os.getpid()}"}
    sections = []
    for place, root in places.items():
        save = Section(f"gpu_save, {place}", f"GPU: save until durable, {place}", "s", size)
        load = Section(f"gpu_load, {place}", f"GPU: load, page cache, {place}", "s", size)
        sections += [save, load]
        if not root.parent.is_dir() or shutil.disk_usage(root.parent).free < 2 * size:
            save.missing[place] = load.missing[place] = f"no room for {2 * size / 2**30:.1f} GiB"
            continue
        for name in (CKPTMAN, DCP, TORCH):
            root.mkdir(exist_ok=True)
            until = time.monotonic() + RATE_SECONDS
            try:
                moved = fresh(_moves, name, size, root, plan, until, limit_seconds=LIMIT_SECONDS)
            except MeasureError as error:
                print(error, file=sys.stderr)
                save.missing[name] = load.missing[name] = last_line(str(error))
                continue
            finally:
                shutil.rmtree(root, ignore_errors=True)
            save.add(name, *(saved for saved, _ in moved))
            load.add(name, *(loaded for _, loaded in moved))
            say(f"gpu, rates, {place}: {name}")
    return sections


def _moves(name: str, size_bytes: int, root: Path, plan: Plan, until: float) -> list[tuple[float, float]]:
    """Seconds of each save and of each load. Before the first, one that is compared, and makes pinned buffers."""
    state = {key: torch.rand(shape, device=plan.device) for key, shape in shapes(size_bytes).items()}
    expected = {key: each.clone() for key, each in state.items()}
    saver = next(each.save for each in SAVERS if each.name == name)
    loader = next(each.load for each in WARM_LOADERS if each.name == name)
    assert saver is not None
    assert loader is not None
    found: list[tuple[float, float]] = []
    for number in range(plan.repeat + 1):
        if number >= LEAST_ROUNDS and time.monotonic() > until:
            break
        path = root / f"{number}"
        _settle(state)
        begun = time.perf_counter()
        saver(state, path)
        cache.make_durable(path)
        saved = time.perf_counter() - begun
        cache.warm(path)
        for each in state.values():
            each.zero_()
        _settle(state)
        begun = time.perf_counter()
        loader(state, path)
        _settle(state)
        found.append((saved, time.perf_counter() - begun))
        shutil.rmtree(path)
        if wrong := next((key for key, each in expected.items() if not torch.equal(state[key], each)), None):
            raise MeasureError(f"loads wrong values: {wrong}")
    return found[1:]


PARTS: list[Callable[[Plan], list[Section]]] = [*(partial(beside_saves, loop) for loop in LOOPS), rates]
