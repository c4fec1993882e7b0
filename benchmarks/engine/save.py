"""Save until durable: the bytes, their files and their folders are on storage when the clock stops."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

from benchmarks.engine import cache
from benchmarks.engine.contestants import SAVERS, Contestant
from benchmarks.engine.section import Plan, Section, last_line, say
from benchmarks.engine.state import State, bytes_of, empty_shared_state, empty_state, fill, first_difference
from benchmarks.engine.team import MeasureError, Member, forked


def measure(plan: Plan) -> list[Section]:
    """One section. Call in a process of its own: it forks, and holds the state."""
    state = fill(empty_shared_state(plan.state_bytes))
    root = plan.folder("save")
    section = Section("save_durable", "Save until durable", "s", bytes_of(state))
    members = {each.name: Member(_save, each, state) for each in SAVERS}
    order = random.Random(20)
    try:
        for number in range(plan.repeat + 1):
            for each in order.sample(SAVERS, len(SAVERS)):
                if each.name not in members:
                    continue
                folder = root / "checkpoint"
                try:
                    seconds = members[each.name].call(folder)
                    if number:
                        section.add(each.name, seconds)
                    elif wrong := forked(_wrong, each, plan.state_bytes, folder):
                        raise MeasureError(f"saves wrong values: {wrong}")
                except MeasureError as error:
                    section.missing[each.name] = last_line(str(error))
                    members.pop(each.name).close()
                shutil.rmtree(folder, ignore_errors=True)
                os.sync()
            say(f"save until durable: round {number} of {plan.repeat}")
    finally:
        for member in members.values():
            member.close()
    shutil.rmtree(root)
    section.sort(each.name for each in SAVERS)
    return [section]


def _save(contestant: Contestant, state: State, folder: Path) -> float:
    assert contestant.save is not None
    begun = time.perf_counter()
    contestant.save(state, folder)
    cache.make_durable(folder)
    return time.perf_counter() - begun


def _wrong(contestant: Contestant, state_bytes: int, folder: Path) -> str | None:
    """The first tensor that does not come back, for those that can load what they wrote."""
    if contestant.load is None or contestant.only_moves:
        return None
    state = empty_state(state_bytes)
    contestant.load(state, folder)
    return first_difference(state)
