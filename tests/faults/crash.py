"""Death at every single file operation of a save, an async save and a prune; then a power cut that loses the unflushed.

In the store, through a file layer that dies at operation n. Through a whole run, in a process that ends at the n-th
system call that changes a file. What is left is judged by what had been told to be durable.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import ckptman
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.prune import execute, plan_prune
from ckptman.io.durable_files import Disk
from tests.faults.deaths import CASE_SECONDS, die_everywhere, impatient
from tests.faults.limits import limit
from tests.faults.powercut import LOSSES, Flushes, survive, watched
from tests.faults.subject import blank, content, open_run, save_versions, version_of
from tests.helpers.faulty_disk import WHEN, Death, FaultyDisk, faults, holds
from tests.saving.test_commit_crash import SCENES, allowed, goes_on


class EveryDisk(FaultyDisk):
    """Counts the reservation of room too."""

    def reserve(self, fd, size):
        self._do("reserve", lambda: Disk.reserve(self, fd, size))


def run(tally):
    """Every operation of every scene."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for number, name in enumerate(SCENES):
            store_scene(tally, name, Path(folder, f"store-{number}"))
        for name in RUNS:
            die_everywhere(tally, f"run: {name}", RUNS[name], Path(folder, name.replace(" ", "-")))


# ---- the store ---------------------------------------------------------------------------------------------------


def store_scene(tally, name, folder):
    """Die before, in and after every operation of a scene of tests/saving/test_commit_crash.py."""
    before, act = SCENES[name]
    folder.mkdir()
    states = allowed((before, act), folder)
    last = _operations(before, act, folder) * len(WHEN)
    for number, fault in enumerate(faults()):
        if number < last and not tally.takes():
            continue
        case = folder / f"case-{number}"
        world, disk = case / "world", EveryDisk(fault)
        world.mkdir(parents=True)
        if (folder / "before").exists():
            shutil.copytree(folder / "before", world / "root")
        with watched(Flushes(world, case / "memory")), contextlib.suppress(Death):
            act(world / "root", disk)
        told = [] if disk.struck else states[-1:]
        for loss in LOSSES:
            with (
                tally.fault(f"{name}, {fault.when} {number // 3}, losing {loss}", f"store: {name}"),
                limit(CASE_SECONDS),
            ):
                root = survive(world, case / "memory", case / loss, loss, tally.dice) / "root"
                _judge_store(tally, root, told or states)
        shutil.rmtree(case)
        if not disk.struck:
            return


def _operations(before, act, folder):
    """How many there are."""
    root, disk = folder / "counted" / "root", EveryDisk()
    root.parent.mkdir()
    before(root)
    act(root, disk)
    return len(disk.log)


def _judge_store(tally, root, allowed):
    try:
        state = holds(root) if root.exists() else {}
    except Exception as error:
        tally.fail("lost", f"what is there is not whole: {error}")
        return
    if not tally.check(state in allowed, "lost", f"{state} instead of one of {allowed}"):
        return
    try:
        goes_on(root)
    except Exception as error:
        tally.fail("other", f"the next save or prune does not work: {type(error).__name__} {error}")
        return
    tally.survive()


# ---- whole runs --------------------------------------------------------------------------------------------------


@dataclass
class Story:
    """What a run saves, as (step, version), over what was `there`; `keep` of KeepLast. At `spoilt` steps
    the loss is NaN. A `Scene`."""

    there: dict[int, int]
    saves: list[tuple[int, int]]
    keep: int = 2
    options: dict[str, object] = field(default_factory=dict)
    prunes_only: bool = False
    spoilt: frozenset[int] = frozenset()

    def before(self, world):
        if self.there:
            save_versions(world / "root", self.there)

    def act(self, world, tell):
        """The story, told line by line as it becomes durable."""
        root = world / "root"
        os.environ["CKPTMAN_IO_THREADS"] = "1"
        if self.prunes_only:
            execute(root, plan_prune(root, ckptman.KeepLast(self.keep)), "0123abcd-1") if root.exists() else None
            return
        state = content(0)
        with open_run(root, state, retention=ckptman.KeepLast(self.keep), **self.options) as run:
            run.restore()
            for step, version in self.saves:
                state.update(content(version))
                run.save(step, {"loss": math.nan} if step in self.spoilt else None)
                if self.options.get("async_save") is False:
                    tell(f"{step} {version}")
            run.wait()
            for step, version in self.saves:
                tell(f"{step} {version}")

    def judge(self, tally, world, before, told):
        root, durable = world / "root", [tuple(map(int, line.split())) for line in told]
        try:
            held = {step: sequence for step, (sequence, _) in holds(root).items()} if root.exists() else {}
        except Exception as error:
            tally.fail("lost", f"what is there is not whole: {error}")
            return
        steps = sorted(held, key=lambda step: held[step])
        last = list(self.there)
        for step, _ in durable:
            last = [each for each in last if each != step] + [step]
        for step, _ in self.saves:
            if step in held and step not in last:
                last.append(step)  # committed, and not yet told
        must = last[-self.keep :] + [step for step in last if step not in self.spoilt][-1:]
        if not tally.check(all(step in held for step in must), "lost", f"{steps} are there, {must} have to be"):
            return
        versions = self._versions(durable)
        for step in steps:
            found = loaded(tally, root, step)
            if not tally.check(found in versions[step], "wrong", f"step {step} is {found}, not of {versions[step]}"):
                return
        if goes_on_as_a_run(tally, root, steps, versions, spoilt=self.spoilt):
            tally.survive()

    def _versions(self, told):
        """Which versions each step may be."""
        found = {step: {version} for step, version in self.there.items()}
        for step, version in self.saves:
            found.setdefault(step, set()).add(version)
        for step, version in told:
            found[step] = {version}
        return found


RUNS = {
    "first save": Story({}, [(1, 11)], options={"async_save": False}),
    "save and prune": Story({1: 1, 2: 2}, [(3, 13)], options={"async_save": False}),
    "async saves and prunes": Story({1: 1, 2: 2}, [(3, 13), (4, 14)]),
    "the same step again": Story({1: 1, 2: 2}, [(2, 12)], options={"async_save": False}),
    "saves that are not finite": Story({1: 1}, [(2, 12), (3, 13), (4, 14)], keep=1, spoilt=frozenset({3, 4})),
    "prune": Story({1: 1, 2: 2, 3: 3, 4: 4}, [], keep=1, prunes_only=True),
}


def loaded(tally, root, step):
    """The version that a step loads as."""
    state = blank()
    try:
        ckptman.load(state, Catalog(root).entry(step).path)
    except ckptman.CkptmanError as error:
        tally.fail("lost", f"step {step} does not load: {error}")
    return version_of(state)


def goes_on_as_a_run(tally, root, steps, versions, stay=(), spoilt=()):
    """A run restores the newest that is not `spoilt`, saves, prunes, and leaves nothing behind but the steps that
    `stay`."""
    state = blank()
    try:
        with warnings.catch_warnings(), impatient():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "skipping the checkpoint of step .*: NaN or infinity in metric loss")
            with open_run(root, state, async_save=False, retention=ckptman.KeepLast(1)) as run:
                start = run.restore()
                expected = next((step for step in reversed(steps) if step not in spoilt), 0)
                if not tally.check(start == expected, "lost", f"restored {start} instead of {expected}"):
                    return False
                if start and not tally.check(version_of(state) in versions[start], "wrong", f"step {start} is another"):
                    return False
                state.update(content(99))
                run.save(50)
    except Exception as error:
        tally.fail("other", f"the next run does not go on: {type(error).__name__}: {error}")
        return False
    left = sorted(_left(root))
    wanted = [f"step-{step:010d}" for step in (*stay, 50)]
    return tally.check(left == wanted, "other", f"after the next save there are {left}")


def _left(root):
    for path in root.iterdir():
        if path.name != ".ckptman":
            yield path.name
    yield from (path.name for path in root.glob(".ckptman/*.tmp-*"))
