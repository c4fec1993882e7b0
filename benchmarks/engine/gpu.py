"""The same on a GPU: stall against the copy into pinned memory, with and without overlap, rates, and step time.

Nothing here needs more than one GPU. `device` may be the CPU, which tries out the script and measures nothing of use.
"""

from __future__ import annotations

import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import cache
from benchmarks.engine.contestants import CKPTMAN, DCP, SAVERS, TORCH, WARM_LOADERS
from benchmarks.engine.section import Plan, Section, last_line, say
from benchmarks.engine.stall import DCP_CACHED, SAVES, open_ckptman, open_dcp, open_dcp_cached
from benchmarks.engine.state import State, bytes_of, empty_state, fill
from benchmarks.engine.steps import QUIET_STEPS, Training
from benchmarks.engine.team import MeasureError, fresh

OVERLAP = f"{CKPTMAN}, overlap"
NAMES = (CKPTMAN, OVERLAP, DCP, DCP_CACHED)
SHM = Path("/dev/shm")


def measure(plan: Plan, device: str = "cuda") -> list[Section]:
    """Four sections; each sample comes from a process of its own."""
    stall = Section("gpu_stall", "GPU: stall of an async save", "s", plan.state_bytes)
    ratio = Section("gpu_stall_ratio", "GPU: stall as a multiple of the copy into pinned memory", "x")
    steps = Section("gpu_steps", "GPU: step time while a save is in the background, against no save", "x")
    root = plan.folder("gpu")
    for number in range(plan.repeat):
        for name in NAMES:
            try:
                pairs, inflation = fresh(_stalls, name, plan.state_bytes, root, device)
            except MeasureError as error:
                stall.missing[name] = last_line(str(error))
                continue
            for save, (seconds, copy) in enumerate(pairs):
                which = f"{name}, {'first' if save == 0 else 'later'}"
                stall.add(which, seconds)
                stall.add("copy into pinned memory", copy)
                ratio.add(which, seconds / copy)
            steps.add(name, inflation)
            shutil.rmtree(root, ignore_errors=True)
        say(f"gpu: stall, round {number + 1} of {plan.repeat}")
    return [stall, ratio, steps, *_rates(plan, device)]


def _stalls(name: str, state_bytes: int, root: Path, device: str) -> tuple[list[tuple[float, float]], float]:
    """Of each save its stall and the pinned copy before it; and by how much a save in the background slows a step.

    The stall is what the training loop loses: the call itself and, where the copy overlaps, what the step after it
    takes longer: there the copy is waited for. The optimizer is part of what is saved, and its step waits.
    """
    size = {"width": 2048, "batch": 16384} if device == "cuda" else {}
    training = Training(torch.device(device), **size)
    step = training.step
    own = dict(training.model.state_dict())
    state = on_device(state_bytes - bytes_of(own), device)
    everything = state | own
    pinned = {key: torch.zeros(each.shape, pin_memory=each.is_cuda) for key, each in everything.items()}
    if name in (CKPTMAN, OVERLAP):
        also: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
        opened = open_ckptman(state, root, also, **({"overlap": True} if name == OVERLAP else {}))
    else:
        opened = (open_dcp if name == DCP else open_dcp_cached)(everything, root)
    pairs: list[tuple[float, float]] = []
    root.mkdir(parents=True, exist_ok=True)
    with contextmanager(lambda: opened)() as save:
        busy: list[float] = []
        for number in range(1, SAVES + 1):
            copy = min(_pinned_copy(everything, pinned) for _ in range(3))
            quiet = [step() for _ in range(QUIET_STEPS)]
            usual = statistics.median(quiet)
            begun = time.perf_counter()
            wait = save(number)
            stalled = time.perf_counter() - begun
            first = step()
            pairs.append((stalled + max(0.0, first - usual) * (name == OVERLAP), copy))
            with ThreadPoolExecutor(1) as pool:
                written = pool.submit(wait)
                while not written.done():
                    busy.append(step())
                written.result()
    return pairs, statistics.median(busy or quiet) / statistics.median(quiet)


def on_device(state_bytes: int, device: str) -> State:
    return {key: each.to(device) for key, each in fill(empty_state(state_bytes)).items()}


def _pinned_copy(state: State, pinned: State) -> float:
    _settle()
    begun = time.perf_counter()
    for key, tensor in state.items():
        pinned[key].copy_(tensor, non_blocking=True)
    _settle()
    return time.perf_counter() - begun


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _rates(plan: Plan, device: str) -> list[Section]:
    """Save until durable from the GPU and load onto it, on memory and on disk."""
    places = {"disk": plan.root} | ({"/dev/shm": SHM / "ckptman-bench"} if SHM.is_dir() else {})
    sections = []
    for what in ("save", "load"):
        for place, root in places.items():
            title = f"GPU: {what} {'until durable, ' if what == 'save' else ', page cache, '}{place}".replace(" ,", ",")
            section = Section(f"gpu_{what}_{place.rpartition('/')[2]}", title, "s", plan.state_bytes)
            folder = root / "gpu-rate"
            folder.mkdir(parents=True, exist_ok=True)
            for _ in range(plan.repeat):
                for name in (CKPTMAN, DCP, TORCH):
                    try:
                        section.add(name, fresh(_seconds, what, name, plan.state_bytes, folder, device))
                    except MeasureError as error:
                        section.missing[name] = last_line(str(error))
            shutil.rmtree(folder)
            say(title)
            sections.append(section)
    shutil.rmtree(places.get("/dev/shm", plan.root / "none"), ignore_errors=True)
    return sections


def _seconds(what: str, name: str, state_bytes: int, folder: Path, device: str) -> float:
    """Of the second time, when pinned buffers and the like are there."""
    state = on_device(state_bytes, device)
    saver = next(each.save for each in SAVERS if each.name == name)
    loader = next(each.load for each in WARM_LOADERS if each.name == name)
    assert saver is not None
    assert loader is not None
    seconds = 0.0
    for number in range(2):
        path = folder / f"{number}"
        _settle()
        begun = time.perf_counter()
        saver(state, path)
        cache.make_durable(path)
        saved = time.perf_counter()
        loader(state, path)
        _settle()
        seconds = saved - begun if what == "save" else time.perf_counter() - saved
        shutil.rmtree(path)
    return seconds
