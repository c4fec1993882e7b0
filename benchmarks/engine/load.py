"""Load: from the page cache, from a cold disk and right after a save, into tensors that are there already.

Below the page cache there are others, of the disk and of the machine under a virtual one, and files lie at places of
different speed. So for each round from a cold disk all files are copied anew, and those who can read the same ones do.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ckptman
from benchmarks.engine import cache
from benchmarks.engine.contestants import (
    CKPTMAN,
    COLD_LOADERS,
    DCP,
    KEPT_WARM,
    SAVERS,
    WARM_LOADERS,
    Contestant,
    raw_loaders,
)
from benchmarks.engine.section import Plan, Section, last_line, say
from benchmarks.engine.state import State, bytes_of, empty_shared_state, fill, first_difference
from benchmarks.engine.team import MeasureError, Member, forked

STEP = "step-0000000001"
WARM_SHARE = 0.99
"""The kernel may take a few pages back at any moment."""
WARM_WITHIN_SECONDS = 60.0


def measure(plan: Plan) -> list[Section]:
    """Three sections. Call in a process of its own: it forks, and holds the state."""
    state = fill(empty_shared_state(plan.state_bytes))
    root = plan.folder("load")
    size = bytes_of(state)
    warm = Section("load_cached", "Load from the page cache", "s", size)
    cold = Section("load_cold", "Load from a cold disk", "s", size)
    folders = _prepare(state, root, warm)
    _rounds(plan, warm, state, WARM_LOADERS, folders, None)
    _rounds(plan, cold, state, COLD_LOADERS, folders, root / "round")
    shutil.rmtree(root)
    return [warm, cold, _after_saves(plan, state)]


def _after_saves(plan: Plan, state: State) -> Section:
    """Save as a run does, and load in another process, as a restart on the same node does. The raw reads are of the
    file that was kept warm."""
    section = Section("load_after_save", "Load right after a save, on the same node", "s", bytes_of(fill(state)))
    (by_dcp,) = (each for each in SAVERS if each.name == DCP)
    assert by_dcp.load is not None
    savers: dict[str, Callable[..., Any]] = {
        CKPTMAN: partial(_save_as_run, keep_warm=False),
        DCP: partial(_save, by_dcp),
        KEPT_WARM: partial(_save_as_run, keep_warm=True),
    }
    run = Contestant(CKPTMAN, load=lambda state, folder: ckptman.load({"state": state}, folder))
    raw = raw_loaders(KEPT_WARM)
    members = {each.name: Member(_load, each, state) for each in (run, by_dcp, *raw)}
    members[KEPT_WARM] = Member(_load, run, state)
    warm_after: list[float] = []
    order = random.Random(20)
    try:
        for number in range(plan.repeat + 1):
            for name, save in savers.items():
                if name in section.missing:
                    continue
                run_root = plan.folder("load") / "run"
                try:
                    seconds = forked(save, state, run_root)
                except MeasureError as error:
                    section.missing[name] = last_line(str(error))
                    continue
                if name == KEPT_WARM and number:
                    warm_after.append(seconds)
                loads = [name, *(each.name for each in raw if name == KEPT_WARM)]
                for each in order.sample(loads, len(loads)):
                    for tensor in state.values() if number == 0 else ():
                        tensor.zero_()
                    taken = members[each].call(run_root if name == DCP else run_root / STEP)
                    if number:
                        section.add(each, taken)
                    elif each in savers and (wrong := first_difference(state)):
                        raise MeasureError(f"{each} loads wrong values: {wrong}")
            say(f"{section.title.lower()}: round {number} of {plan.repeat}")
    finally:
        for member in members.values():
            member.close()
    shutil.rmtree(plan.root / "load")
    section.sort(members)
    if warm_after:
        low, middle, high = min(warm_after), statistics.median(warm_after), max(warm_after)
        section.notes.append(f"all of it was warm {low:.1f}, {middle:.1f}, {high:.1f} s after it was durable")
    return section


def _save_as_run(state: State, root: Path, *, keep_warm: bool) -> float:
    """Return the seconds after the save until all of it was in the page cache, if that is asked for."""
    with ckptman.Checkpointer(root, {"state": state}, deadline=None, keep_warm=keep_warm) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        begun = time.perf_counter()
        while keep_warm and cache.resident_share(root / STEP) < WARM_SHARE:
            if time.perf_counter() - begun > WARM_WITHIN_SECONDS:
                raise MeasureError("it does not become warm: is there memory for it, on a disk of this node?")
            time.sleep(0.02)
        return time.perf_counter() - begun


def _prepare(state: State, root: Path, section: Section) -> dict[str, Path]:
    """The folders that are loaded from, by the name of who wrote them."""
    savers = {each.name: each for each in SAVERS}
    folders: dict[str, Path] = {}
    for name in sorted({each.source for each in COLD_LOADERS + WARM_LOADERS}):
        folder = root / f"files-{len(folders)}"
        with Member(_save, savers[name], state) as member:
            try:
                member.call(folder)
                folders[name] = folder
            except MeasureError as error:
                section.missing[name] = last_line(str(error))
    return folders


def _copy_anew(folders: dict[str, Path], to: Path) -> dict[str, Path]:
    """Copies at other places of the disk: the ones before go only when these are there."""
    copies = {name: to / folder.name for name, folder in folders.items()}
    for name, folder in folders.items():
        shutil.copytree(folder, copies[name])
    for folder in folders.values():
        shutil.rmtree(folder)
    return copies


def _save(contestant: Contestant, state: State, folder: Path) -> None:
    assert contestant.save is not None
    contestant.save(state, folder)
    cache.make_durable(folder)


def _rounds(
    plan: Plan,
    section: Section,
    state: State,
    loaders: list[Contestant],
    folders: dict[str, Path],
    copies: Path | None,
) -> None:
    """Let all load in turn. `copies`: from a cold disk, where copies of the folders are made for each round."""
    there = [each for each in loaders if each.source in folders]
    folders = {each.source: folders[each.source] for each in there}
    members = {each.name: Member(_load, each, state) for each in there}
    stayed = 0.0
    order = random.Random(20)
    try:
        for number in range(plan.repeat + 1):
            if copies is not None:
                folders = _copy_anew(folders, copies / str(number))
            for each in order.sample(there, len(there)):
                if each.name not in members:
                    continue
                folder = folders[each.source]
                if copies is not None:
                    stayed = max(stayed, cache.evict(folder))
                else:
                    cache.warm(folder)
                try:
                    if number == 0:
                        for tensor in state.values():
                            tensor.zero_()
                    seconds = members[each.name].call(folder)
                    wrong = first_difference(state) if number == 0 and not each.only_moves else None
                    if wrong:
                        raise MeasureError(f"loads wrong values: {wrong}")
                except MeasureError as error:
                    section.missing[each.name] = last_line(str(error))
                    members.pop(each.name).close()
                    continue
                if number:
                    section.add(each.name, seconds)
            say(f"{section.title.lower()}: round {number} of {plan.repeat}")
    finally:
        for member in members.values():
            member.close()
    section.sort(each.name for each in there)
    if copies is not None:
        section.notes.append(f"at most {stayed:.1%} of the files was still in the page cache when a load began")


def _load(contestant: Contestant, state: State, folder: Path) -> float:
    assert contestant.load is not None
    begun = time.perf_counter()
    contestant.load(state, folder)
    return time.perf_counter() - begun
