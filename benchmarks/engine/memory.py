"""Peak host memory of a save and of a load beyond the state and the staging buffers.

VmHWM, the highest resident set, is set back before the call and read after it; what was resident before is taken off.
A save of a tiny state comes first, so that imports do not count. Before the async save that is measured there were two
others: its staging buffers are part of what was resident.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.engine.contestants import CKPTMAN, CKPTMAN_IN_DCP, DCP, TORCH, WARM_LOADERS
from benchmarks.engine.contestants import SAVERS as SYNC_SAVERS
from benchmarks.engine.section import Plan, Section, last_line, say
from benchmarks.engine.stall import DCP_CACHED, SAVERS
from benchmarks.engine.state import empty_state, fill
from benchmarks.engine.team import MeasureError, fresh

NAMES = (CKPTMAN, CKPTMAN_IN_DCP, DCP, TORCH)
MIB = 1 << 20


def sizes(plan: Plan) -> tuple[int, int]:
    """A quarter of the state, and all of it: flat is what does not grow between them."""
    return plan.state_bytes // 4, plan.state_bytes


def measure(plan: Plan) -> list[Section]:
    """One section, in MiB; a row has one sample for each of two sizes."""
    section = Section("memory", "Peak host memory beyond state and staging", "MiB")
    section.notes.append(" and ".join(f"{size / 2**30:.3g} GiB" for size in sizes(plan)) + ": one sample each")
    names = {"save": NAMES, "load": NAMES, "async save": (CKPTMAN, DCP_CACHED)}
    for what, name in ((what, name) for what, taking_part in names.items() for name in taking_part):
        row = f"{name}, {what}"
        for size in sizes(plan):
            folder = plan.folder("memory")
            try:
                section.add(row, fresh(_peak, what, name, size, folder) / MIB)
            except MeasureError as error:
                section.missing[row] = last_line(str(error))
            shutil.rmtree(folder, ignore_errors=True)
        say(f"memory: {row}")
    return [section]


def _peak(what: str, name: str, size: int, folder: Path) -> int:
    torch.set_num_threads(1)
    state = fill(empty_state(size))
    if what == "async save":
        with contextmanager(SAVERS[name])(state, folder) as save:
            for step in (1, 2):
                save(step)()
            return _growth(lambda: save(3)())
    saver = next(each for each in SYNC_SAVERS if each.name == name)
    loader = next(each for each in WARM_LOADERS if each.name == name)
    assert saver.save is not None
    assert loader.load is not None
    tiny = fill(empty_state(MIB))
    saver.save(tiny, folder / "tiny")
    loader.load(tiny, folder / "tiny")
    if what == "save":
        return _growth(lambda: saver.save(state, folder / "checkpoint"))  # type: ignore[misc]
    fresh(_save, name, size, folder / "checkpoint")
    return _growth(lambda: loader.load(state, folder / "checkpoint"))  # type: ignore[misc]


def _save(name: str, size: int, folder: Path) -> None:
    saver = next(each for each in SYNC_SAVERS if each.name == name)
    assert saver.save is not None
    saver.save(fill(empty_state(size)), folder)


def _growth(call: Callable[[], object]) -> int:
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
