"""How long an async save keeps training waiting: the first one, the second and those after it.

A warm memcpy of the same tensors is taken right before each save, in the same process, so that a ratio has both of its
sides from the same second.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import ckptman
from benchmarks.engine.contestants import CKPTMAN, DCP, join_alone
from benchmarks.engine.section import Plan, Section, last_line, say
from benchmarks.engine.state import State, bytes_of, empty_state, fill
from benchmarks.engine.team import MeasureError, forked

SAVES = 3
DCP_CACHED = "plain DCP, cached stager"
Save = Callable[[int], Callable[[], object]]
"""Stages save number n and returns how to wait until it is written."""


def measure(plan: Plan) -> list[Section]:
    """Two sections: seconds, and stalls as multiples of the memcpy before them. Call in a process of its own."""
    state = fill(empty_state(plan.state_bytes))
    root = plan.folder("stall")
    seconds = Section("stall", "Stall of an async save", "s", bytes_of(state))
    ratios = Section("stall_ratio", "Stall of an async save, as a multiple of a warm memcpy", "x")
    for number in range(plan.repeat):
        for name, opened in SAVERS.items():
            try:
                pairs = forked(_stalls, opened, state, root)
            except MeasureError as error:
                seconds.missing[name] = last_line(str(error))
                continue
            for save, (stall, memcpy, memcpy_two) in enumerate(pairs):
                which = f"{name}, {'first' if save == 0 else 'later'}"
                seconds.add(which, stall)
                seconds.add("memcpy, 1 thread", memcpy)
                seconds.add("memcpy, 2 threads", memcpy_two)
                ratios.add(which, stall / memcpy)
            ratios.add(f"{name}, first to second", pairs[0][0] / pairs[1][0])
            shutil.rmtree(root)
        say(f"stall: round {number + 1} of {plan.repeat}")
    return [seconds, ratios]


def _stalls(opened: Callable[[State, Path], Iterator[Save]], state: State, root: Path) -> list[tuple[float, ...]]:
    """Of each save: its stall, a memcpy by one thread and one by two."""
    buffers = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    found: list[tuple[float, ...]] = []
    root.mkdir(parents=True, exist_ok=True)
    with contextmanager(opened)(state, root) as save:
        for number in range(1, SAVES + 1):
            memcpy = min(memcpy_seconds(state, buffers) for _ in range(3))
            two = min(memcpy_seconds(state, buffers, 2) for _ in range(3))
            begun = time.perf_counter()
            wait = save(number)
            found.append((time.perf_counter() - begun, memcpy, two))
            wait()
    return found


def memcpy_seconds(state: State, buffers: State, threads: int = 1) -> float:
    """Copy every tensor into memory that was written before."""
    parts = [list(state)[i::threads] for i in range(threads)]

    def copy(names: list[str]) -> None:
        for name in names:
            buffers[name].copy_(state[name])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, [[]] * threads))
        begun = time.perf_counter()
        list(pool.map(copy, parts))
        return time.perf_counter() - begun


def open_ckptman(
    state: State,
    root: Path,
    also: Mapping[str, nn.Module | torch.optim.Optimizer] | None = None,
    **options: Any,
) -> Iterator[Save]:
    whole: dict[str, Any] = {"state": state, **(also or {})}
    with ckptman.Checkpointer(
        root / "run", whole, async_save=True, deadline=None, retention=ckptman.KeepLast(1), **options
    ) as checkpointer:
        checkpointer.restore()

        def save(step: int) -> Callable[[], object]:
            checkpointer.save(step)
            return checkpointer.wait

        yield save


def open_dcp(state: State, root: Path) -> Iterator[Save]:
    join_alone()
    yield lambda step: _settled(dcp.async_save(state, checkpoint_id=root / f"dcp-{step}"))


def open_dcp_cached(state: State, root: Path) -> Iterator[Save]:
    """At its best: one stager for all saves, and two writer threads."""
    join_alone()
    there = torch.cuda.is_available()
    stager = DefaultStager(StagingOptions(there, False, there, there))

    def save(step: int) -> Callable[[], object]:
        writer = dcp.FileSystemWriter(root / f"best-{step}", thread_count=2, sync_files=True)
        return _settled(dcp.async_save(state, storage_writer=writer, async_stager=stager))

    try:
        yield save
    finally:
        stager.close()


def _settled(response: object) -> Callable[[], object]:
    """Wait until the tensors may change; returns how to wait until they are written."""
    staged, written = getattr(response, "staging_completion", None), getattr(response, "upload_completion", response)
    if staged is not None:
        staged.result()
    return written.result  # type: ignore[attr-defined, no-any-return]


SAVERS: dict[str, Callable[[State, Path], Iterator[Save]]] = {
    CKPTMAN: open_ckptman,
    DCP: open_dcp,
    DCP_CACHED: open_dcp_cached,
}
