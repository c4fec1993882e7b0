"""Loads and saves by threads, blocks and device, with raw moves beside them in the same rounds.

On two cores it still tells how often a load takes the interpreter, what a thread that computes in Python costs it, and
what `restore()` takes beyond its load.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

import ckptman
from benchmarks.engine import cache
from benchmarks.engine.contestants import CKPTMAN, DCP
from benchmarks.engine.raw import Raw
from benchmarks.engine.section import Plan, Section, say
from benchmarks.engine.state import State, bytes_of, empty_state, fill, first_difference
from benchmarks.engine.team import MeasureError, fresh
from ckptman.storage.io import file_writer
from ckptman.storage.io.threads import THREADS_ENV, cores

LARGE, SMALL = "large blocks", "blocks of 128 KiB alone"
ALONE, BESIDE = "alone", "beside a thread that computes in Python"
OF_EACH_GIB = "of each GiB"
LIMIT_SECONDS = 100.0
"""Each part ends with the rounds that it has made by then."""
_STEP = "step-0000000001"


def loads(plan: Plan) -> list[Section]:
    """Load from memory into CPU tensors and, if there is a GPU, into tensors on it."""
    state = fill(empty_state(plan.state_bytes))
    root = plan.folder("wide")
    folders = {LARGE: root / "large", SMALL: root / "small"}
    ckptman.save(state, folders[LARGE])
    with mock.patch.object(file_writer, "large_block_bytes", return_value=0):
        ckptman.save(state, folders[SMALL])
    for folder in folders.values():
        cache.warm(folder)
    calls: dict[str, Callable[[], object]] = {}
    for threads in threads_here():
        calls[f"{Raw(False, threads).name}"] = partial(Raw(False, threads).load, state, folders[LARGE])
        for blocks, folder in folders.items():
            calls[f"{CKPTMAN}, {told(threads)}, {blocks}"] = _with_threads(threads, ckptman.load, state, folder)
    sections = [_in_turn(plan, Section("wide_load", "Load from memory, by threads", "s", bytes_of(state)), calls)]
    for blocks, folder in folders.items():
        for tensor in state.values():
            tensor.zero_()
        ckptman.load(state, folder)
        if wrong := first_difference(state):
            raise MeasureError(f"a load with {blocks} gave wrong values: {wrong}")
    if plan.device == "cuda" and torch.cuda.is_available():
        there = {name: tensor.cuda() for name, tensor in state.items()}
        pinned = {name: tensor.pin_memory() for name, tensor in state.items()}
        calls = {}
        for threads in threads_here():
            calls[Raw(False, threads).name] = partial(
                _raw_to_device, Raw(False, threads), pinned, there, folders[LARGE]
            )
            calls[f"{CKPTMAN}, {told(threads)}"] = _with_threads(threads, ckptman.load, there, folders[LARGE])
        title = "Load from memory onto the GPU, by threads; raw: into pinned memory, and from there"
        sections.append(_in_turn(plan, Section("wide_load_gpu", title, "s", bytes_of(state)), calls))
        for tensor in there.values():
            tensor.zero_()
        ckptman.load(there, folders[LARGE])
        if wrong := first_difference({name: tensor.cpu() for name, tensor in there.items()}):
            raise MeasureError(f"a load onto the GPU gave wrong values: {wrong}")
    sections.append(_beside(plan, state, folders[LARGE], root))
    sections.append(_calls(plan, root))
    shutil.rmtree(root)
    return sections


def saves(plan: Plan) -> list[Section]:
    """Saves to /dev/shm until they are durable, by threads."""
    state = fill(empty_state(plan.state_bytes))
    root = Path("/dev/shm") / f"ckptman-bench-{os.getpid()}"
    calls: dict[str, Callable[[], object]] = {}

    def save(call: Callable[..., object]) -> None:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        call(state, root / "checkpoint")

    for threads in threads_here():
        calls[Raw(False, threads).name] = partial(save, Raw(False, threads).save)
        calls[f"{CKPTMAN}, {told(threads)}"] = _with_threads(threads, save, ckptman.save)
    try:
        title = "Save to /dev/shm until it is durable, by threads"
        return [_in_turn(plan, Section("wide_save", title, "s", bytes_of(state)), calls)]
    finally:
        shutil.rmtree(root, ignore_errors=True)


def restarts(plan: Plan) -> list[Section]:
    """A save, the end of the process, and a restore in a new one on the same node."""
    title = "Restart on the same node: the restore in a new process, right after a save"
    section = Section("wide_restart", title, "s", plan.state_bytes)
    beyond = Section("wide_beyond", "restore() in a new process, beyond a load of the same that is warm", "s")
    begun = time.monotonic()
    for number in range(plan.repeat + 1):
        for name in (DCP, CKPTMAN):
            root = plan.folder("wide") / "run"
            fresh(_save_and_end, name, plan.state_bytes, root)
            taken = fresh(_restore, name, plan.state_bytes, root)
            if number:
                section.add(name, taken)
        restore, load = fresh(_restore_warm, plan.state_bytes, plan.root / "wide" / "run")
        if number:
            beyond.add(CKPTMAN, max(0.0, restore - load))
        say(f"{title.lower()}: round {number} of {plan.repeat}")
        if number and time.monotonic() - begun > LIMIT_SECONDS:
            break
    shutil.rmtree(plan.root / "wide")
    return [section, beyond]


PARTS = [loads, saves, restarts]


def threads_here() -> list[int]:
    """One, two, four and so on up to the cores of this process, and at most 16."""
    return [count for count in (1, 2, 4, 8, 16) if count <= cores()]


def told(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


def _in_turn(plan: Plan, section: Section, calls: dict[str, Callable[[], object]]) -> Section:
    begun = time.monotonic()
    for number in range(plan.repeat + 1):
        for name, call in calls.items():
            taken = _seconds(call)
            if number:
                section.add(name, taken)
        say(f"{section.title.lower()}: round {number} of {plan.repeat}")
        if number and time.monotonic() - begun > LIMIT_SECONDS:
            break
    return section


def _beside(plan: Plan, state: State, folder: Path, root: Path) -> Section:
    by_dcp = root / "dcp"
    dcp.save(state, checkpoint_id=by_dcp)
    cache.warm(by_dcp)
    ways = {CKPTMAN: partial(ckptman.load, state, folder), DCP: partial(dcp.load, state, checkpoint_id=by_dcp)}
    section = Section("wide_beside", "Load from memory, alone and beside a busy Python thread", "s", bytes_of(state))
    for number in range(plan.repeat + 1):
        for name, call in ways.items():
            alone = _seconds(call)
            with _computing():
                beside = _seconds(call)
            if number:
                section.add(f"{name}, {ALONE}", alone)
                section.add(f"{name}, {BESIDE}", beside)
        say(f"{section.title.lower()}: round {number} of {plan.repeat}")
    return section


@contextlib.contextmanager
def _computing() -> Iterator[None]:
    over = False

    def compute() -> None:
        number = 0
        while not over:
            number += 1

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over = True
        thread.join()


def _calls(plan: Plan, root: Path) -> Section:
    """How often a load calls something, in all threads: for each GiB and each tensor, from two sizes of the same."""
    sizes, counts = (plan.state_bytes // 4, plan.state_bytes), []
    for size in sizes:
        state, folder = fill(empty_state(size)), root / f"calls-{size}"
        ckptman.save(state, folder)
        cache.warm(folder)
        ckptman.load(state, folder)
        counts.append(_counted(partial(ckptman.load, state, folder)))
    section = Section("wide_calls", "Calls of Python in a load, all threads", "calls")
    of_each_gib = (counts[1] - counts[0]) / (sizes[1] - sizes[0]) * 2**30
    section.add(OF_EACH_GIB, of_each_gib)
    section.add("of each tensor", (counts[1] - of_each_gib * sizes[1] / 2**30) / len(state))
    return section


def _counted(call: Callable[[], object]) -> int:
    counts: list[int] = []

    def note(frame: object, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            counts.append(1)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len(counts)


def _with_threads(threads: int, call: Callable[..., object], *arguments: object) -> Callable[[], object]:
    def run() -> object:
        with mock.patch.dict(os.environ, {THREADS_ENV: str(threads)}):
            return call(*arguments)

    return run


def _raw_to_device(raw: Raw, pinned: State, there: State, folder: Path) -> None:
    raw.load(pinned, folder)
    for name, tensor in pinned.items():
        there[name].copy_(tensor, non_blocking=True)
    torch.cuda.synchronize()


def _save_and_end(name: str, size: int, root: Path) -> None:
    state = fill(empty_state(size))
    if name == DCP:
        root.mkdir(parents=True)
        dcp.save(state, checkpoint_id=root / _STEP)
        cache.make_durable(root)
        return
    with ckptman.Checkpointer(root, {"state": state}, deadline=None) as checkpointer:
        checkpointer.save(1)


def _restore(name: str, size: int, root: Path) -> float:
    torch.set_num_threads(1)
    state = empty_state(size)
    if name == DCP:
        return _seconds(partial(dcp.load, state, checkpoint_id=root / _STEP))
    with ckptman.Checkpointer(root, {"state": state}, deadline=None) as checkpointer:
        return _seconds(checkpointer.restore)


def _restore_warm(size: int, root: Path) -> tuple[float, float]:
    """Return the seconds of a restore from memory, and of a load of the same after it."""
    cache.warm(root / _STEP)
    restore = _restore(CKPTMAN, size, root)
    state = empty_state(size)
    return restore, min(_seconds(partial(ckptman.load, {"state": state}, root / _STEP)) for _ in range(3))


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - begun
