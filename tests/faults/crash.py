"""Death at every single file operation of a save, an async save and a prune; then a power cut that loses the unflushed.

In the store, through a file layer that dies at operation n. Through a whole run, in a process that ends at the n-th
system call that changes a file. What is left is judged by what had been told to be durable.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import ckptman
from ckptman.store.catalogue import Catalogue
from ckptman.store.durable import Disk
from ckptman.store.owner import claim
from ckptman.store.prune import execute, plan_prune
from tests.faults.limits import in_child, limit
from tests.faults.powercut import LOSSES, Flushes, survive, watched
from tests.faults.subject import State, blank, content, open_run, save_versions, version_of
from tests.faults.tally import Tally
from tests.faults.tap import DEAD, Tap
from tests.faulty_disk import WHEN, Death, FaultyDisk, faults, holds
from tests.test_store_crash import SCENES, allowed, goes_on

CASE_SECONDS = 30.0
PATIENCE_SECONDS = 1.0
"""How long a claim is watched that the power cut tore: nobody touches it here, and 30 s would tell no more."""


class EveryDisk(FaultyDisk):
    """Counts the reservation of room too."""

    def reserve(self, fd: int, size: int) -> None:
        self._do("reserve", lambda: Disk.reserve(self, fd, size))


def run(tally: Tally) -> None:
    """Every operation of every scene."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for number, name in enumerate(SCENES):
            store_scene(tally, name, Path(folder, f"store-{number}"))
        for name in RUNS:
            run_scene(tally, name, Path(folder, name.replace(" ", "-")))
    tally.notes.append("copying between tiers does not exist yet: its scene belongs into RUNS")


# ---- the store ---------------------------------------------------------------------------------------------------


def store_scene(tally: Tally, name: str, folder: Path) -> None:
    """Die before, in and after every operation of a scene of tests/test_store_crash.py."""
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


def _operations(before: Callable[[Path], None], act: Callable[[Path, Disk], object], folder: Path) -> int:
    """How many there are."""
    root, disk = folder / "counted" / "root", EveryDisk()
    root.parent.mkdir()
    before(root)
    act(root, disk)
    return len(disk.log)


def _judge_store(tally: Tally, root: Path, allowed: list[dict[int, tuple[int, str]]]) -> None:
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
    """What a run saves, as (step, version), over what `before` has saved; `keep` of KeepLast."""

    before: dict[int, int]
    saves: list[tuple[int, int]]
    keep: int = 2
    options: dict[str, object] = field(default_factory=dict)
    prunes_only: bool = False


RUNS: dict[str, Story] = {
    "first save": Story({}, [(1, 11)], options={"async_save": False}),
    "save and prune": Story({1: 1, 2: 2}, [(3, 13)], options={"async_save": False}),
    "async saves and prunes": Story({1: 1, 2: 2}, [(3, 13), (4, 14)]),
    "the same step again": Story({1: 1, 2: 2}, [(2, 12)], options={"async_save": False}),
    "prune": Story({1: 1, 2: 2, 3: 3, 4: 4}, [], keep=1, prunes_only=True),
}


def run_scene(tally: Tally, name: str, folder: Path) -> None:
    """End a run at every change of a file, and once in the middle of each of its writes."""
    story = RUNS[name]
    folder.mkdir()
    before = folder / "before"
    before.mkdir()
    if story.before:
        save_versions(before / "root", story.before)
    changes = _changes(story, before, folder / "counted")
    for number in itertools.count():
        ended = False
        for half in (False, True):
            if number < changes and not tally.takes():
                continue
            case = folder / f"case-{number}-{half:d}"
            ended = not _one_death(tally, name, story, before, case, number, half)
            shutil.rmtree(case)
        if ended:
            return


def _changes(story: Story, before: Path, case: Path) -> int:
    """About how many changes a story makes: threads do not always make them in the same order."""
    case.mkdir()
    shutil.copytree(before, case / "world")

    def act() -> int:
        tap = Tap(case / "world", -1)
        tap.install()
        _act(story, case)
        return tap.count

    end = in_child(act, CASE_SECONDS)
    assert end.in_order, f"the story cannot be told to its end: {end.error} {end.said}"
    return int(end.value)


def _one_death(tally: Tally, name: str, story: Story, before: Path, case: Path, number: int, half: bool) -> bool:
    """Whether the process died; the run may have ended before that number."""
    case.mkdir()
    world, told = case / "world", case / "told"
    shutil.copytree(before, world)

    def act() -> None:
        with watched(Flushes(world, case / "memory")):
            Tap(world, number, half).install()
            _act(story, case)

    end = in_child(act, CASE_SECONDS)
    if not end.in_order and (end.hung or end.status != DEAD << 8):
        tally.fail("hang" if end.hung else "other", f"{name}: the run itself failed: {end.error or end.said}")
        return False
    durable = [tuple(map(int, line.split())) for line in told.read_text().splitlines()] if told.exists() else []
    for loss in LOSSES:
        with (
            tally.fault(f"{name}, change {number}{' (half)' * half}, losing {loss}", f"run: {name}"),
            limit(CASE_SECONDS),
        ):
            root = survive(world, case / "memory", case / loss, loss, tally.dice) / "root"
            _judge_run(tally, root, story, durable)
    return end.status != 0


def _act(story: Story, case: Path) -> None:
    """The story, told line by line in `case/told` as it becomes durable."""
    root = case / "world" / "root"
    root.parent.mkdir(parents=True, exist_ok=True)
    os.environ["CKPTMAN_IO_THREADS"] = "1"
    if story.prunes_only:
        execute(root, plan_prune(root, ckptman.KeepLast(story.keep)), "tag") if root.exists() else None
        return
    told = os.open(case / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    state: State = content(0)
    with open_run(root, state, retention=ckptman.KeepLast(story.keep), **story.options) as run:
        run.restore()
        for step, version in story.saves:
            state.update(content(version))
            run.save(step)
            if story.options.get("async_save") is False:
                os.write(told, f"{step} {version}\n".encode())
        run.wait()
        os.write(told, "".join(f"{step} {version}\n" for step, version in story.saves).encode())


def _judge_run(tally: Tally, root: Path, story: Story, told: list[tuple[int, ...]]) -> None:
    try:
        held = {step: sequence for step, (sequence, _) in holds(root).items()} if root.exists() else {}
    except Exception as error:
        tally.fail("lost", f"what is there is not whole: {error}")
        return
    steps = sorted(held, key=lambda step: held[step])
    last = list(story.before)
    for step, _ in told:
        last = [each for each in last if each != step] + [step]
    for step, _ in story.saves:
        if step in held and step not in last:
            last.append(step)  # committed, and not yet told
    must = last[-story.keep :]
    if not tally.check(all(step in held for step in must), "lost", f"{steps} are there, {must} have to be"):
        return
    versions = _versions(story, told)
    for step in steps:
        found = _loaded(tally, root, step)
        if not tally.check(found in versions[step], "wrong", f"step {step} is {found}, not one of {versions[step]}"):
            return
    if _goes_on(tally, root, steps, versions):
        tally.survive()


def _versions(story: Story, told: list[tuple[int, ...]]) -> dict[int, set[int]]:
    """Which versions each step may be."""
    found: dict[int, set[int]] = {step: {version} for step, version in story.before.items()}
    for step, version in story.saves:
        found.setdefault(step, set()).add(version)
    for step, version in told:
        found[step] = {version}
    return found


def _loaded(tally: Tally, root: Path, step: int) -> int | None:
    state = blank()
    try:
        ckptman.load(state, Catalogue(root).entry(step).path)
    except ckptman.CkptmanError as error:
        tally.fail("lost", f"step {step} does not load: {error}")
    return version_of(state)


def _goes_on(tally: Tally, root: Path, steps: list[int], versions: dict[int, set[int]]) -> bool:
    """A run restores the newest, saves, prunes, and leaves nothing behind."""
    state = blank()
    try:
        with warnings.catch_warnings(), mock.patch.dict(claim.__kwdefaults__, patience_seconds=PATIENCE_SECONDS):
            warnings.simplefilter("error")
            with open_run(root, state, async_save=False, retention=ckptman.KeepLast(1)) as run:
                start = run.restore()
                expected = steps[-1] if steps else 0
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
    return tally.check(left == ["step-0000000050"], "other", f"after the next save there are {left}")


def _left(root: Path) -> Iterator[str]:
    for path in root.iterdir():
        if path.name != ".ckptman":
            yield path.name
    yield from (path.name for path in root.glob(".ckptman/*.tmp-*"))
