"""Load: from the page cache and from a cold disk, into tensors that are there already.

From a cold disk each reads files of its own. Below the page cache there are others, of the disk and of the machine
under a virtual one: files that somebody else has read a moment ago would come from there.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from pathlib import Path

from benchmarks.engine import cache
from benchmarks.engine.contestants import COLD_LOADERS, SAVERS, WARM_LOADERS, Contestant
from benchmarks.engine.section import Plan, Section, last_line, say
from benchmarks.engine.state import State, bytes_of, empty_shared_state, fill, first_difference
from benchmarks.engine.team import MeasureError, Member


def measure(plan: Plan) -> list[Section]:
    """Both sections. Call in a process of its own: it forks, and holds the state."""
    state = fill(empty_shared_state(plan.state_bytes))
    root = plan.folder("load")
    size = bytes_of(state)
    warm = Section("load_cached", "Load from the page cache", "s", size)
    cold = Section("load_cold", "Load from a cold disk", "s", size)
    folders = _prepare(state, root, warm)
    shared = {
        each.name: folders[each.reads or each.name] for each in WARM_LOADERS if (each.reads or each.name) in folders
    }
    _rounds(plan, warm, state, WARM_LOADERS, shared, cold=False)
    own = _for_each(COLD_LOADERS, folders, root)
    _rounds(plan, cold, state, COLD_LOADERS, own, cold=True)
    shutil.rmtree(root)
    return [warm, cold]


def _for_each(loaders: list[Contestant], folders: dict[str, Path], root: Path) -> dict[str, Path]:
    """A folder for each loader. Those that several read from are copied; the last one gets the folder itself."""
    own = {}
    able = [each for each in loaders if (each.reads or each.name) in folders]
    left = Counter(each.reads or each.name for each in able)
    for each in able:
        source, own[each.name] = each.reads or each.name, root / f"own-{len(own)}"
        left[source] -= 1
        (shutil.copytree if left[source] else shutil.move)(folders[source], own[each.name])
    return own


def _prepare(state: State, root: Path, section: Section) -> dict[str, Path]:
    """The folders that are loaded from, by the name of who wrote them."""
    savers = {each.name: each for each in SAVERS}
    folders: dict[str, Path] = {}
    for name in sorted({each.reads or each.name for each in COLD_LOADERS}):
        folder = root / f"files-{len(folders)}"
        with Member(_save, savers[name], state) as member:
            try:
                member.call(folder)
                folders[name] = folder
            except MeasureError as error:
                section.missing[name] = last_line(str(error))
    return folders


def _save(contestant: Contestant, state: State, folder: Path) -> None:
    assert contestant.save is not None
    contestant.save(state, folder)
    cache.make_durable(folder)


def _rounds(
    plan: Plan, section: Section, state: State, loaders: list[Contestant], folders: dict[str, Path], cold: bool
) -> None:
    there = [each for each in loaders if each.name in folders]
    members = {each.name: Member(_load, each, state) for each in there}
    stayed = 0.0
    order = random.Random(20)
    try:
        for number in range(plan.repeat + 1):
            for each in order.sample(there, len(there)):
                if each.name not in members:
                    continue
                folder = folders[each.name]
                if cold:
                    stayed = max(stayed, cache.evict(folder))
                else:
                    cache.warm(folder)
                try:
                    if number == 0:
                        for tensor in state.values():
                            tensor.zero_()
                    seconds = members[each.name].call(folder)
                    wrong = first_difference(state) if number == 0 and not _only_moves(each) else None
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
    if cold:
        section.notes.append(f"at most {stayed:.1%} of the files was still in the page cache when a load began")


def _load(contestant: Contestant, state: State, folder: Path) -> float:
    assert contestant.load is not None
    begun = time.perf_counter()
    contestant.load(state, folder)
    return time.perf_counter() - begun


def _only_moves(contestant: Contestant) -> bool:
    return contestant.name.startswith("raw, direct")
