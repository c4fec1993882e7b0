"""Death at every change of a file by a save, an async save, a deletion and a prune; then a power cut that loses the
unflushed.

In a store, without a run around it, and in a whole run. What is left is judged by what had been told to be durable.
"""

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import ckptman
from ckptman.engine.saving import save_checks
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.prune import execute, plan_prune
from ckptman.storage.format.paths import outcome_path, parse_step, step_folder
from tests.faults.deaths import die_everywhere, impatient
from tests.faults.subject import blank, content, open_run, save_versions, version_of
from tests.helpers.faulty_disk import holds, rewrite, save


def run(tally):
    """Every change of every scene."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for number, name in enumerate(STORES):
            die_everywhere(tally, f"store: {name}", STORES[name], Path(folder, f"store-{number}"))
        for name in RUNS:
            die_everywhere(tally, f"run: {name}", RUNS[name], Path(folder, name.replace(" ", "-")))


@dataclass
class Store:
    """What happens to a root without a run around it: it ends as it was, or with all of it done. A `Scene`."""

    fill: Callable
    work: Callable
    states: list = field(default_factory=list)
    """What the root may hold afterwards: first what it did before, last what it does when all is done."""

    def before(self, world):
        root = world / "root"
        self.fill(root)
        with tempfile.TemporaryDirectory() as folder:
            done = shutil.copytree(world, Path(folder, "world")) / "root"
            self.work(done)
            self.states = list(_between(held(root), held(done)))

    def act(self, world, tell):
        self.work(world / "root")
        tell("done")

    def judge(self, tally, world, before, told):
        root, states = world / "root", self.states[-1:] if told else self.states
        try:
            state = held(root)
        except Exception as error:
            tally.fail("lost", f"what is there is not whole: {error}")
            return
        if tally.check(state in states, "lost", f"{state} instead of one of {states}") and goes_on(tally, root):
            tally.survive()


def _between(before, after):
    """What is there while one is becoming the other: of what goes, one whole checkpoint at a time."""
    yield before
    while gone := [step for step in before if step not in after]:
        before = {step: each for step, each in before.items() if step != gone[0]}
        yield before
    if before != after:
        yield after


def held(root):
    return holds(root) if root.exists() else {}


def goes_on(tally, root):
    """Whether a save and a prune work as if nothing had been, and leave nothing behind that is not a checkpoint."""
    try:
        newest = max((sequence for sequence, _ in held(root).values()), default=0)
        saved = save(root, 400, b"after the fault")
        execute(root, plan_prune(root, ckptman.KeepLast(2)), "0123abcd-2")
        steps = held(root)
    except Exception as error:
        tally.fail("other", f"the next save or prune does not work: {type(error).__name__} {error}")
        return False
    good = tally.check(saved.sequence == newest + 1, "other", f"sequence {saved.sequence} came after {newest}")
    good &= tally.check(400 in steps and len(steps) <= 2, "other", f"the next prune left {steps}")
    left = sorted(_left(root))
    return good & tally.check(
        left == sorted(map(step_folder, steps)), "other", f"after the next prune there are {left}"
    )


def _three(root):
    for step in (100, 200, 300):
        save(root, step, b"%d" % step)


def _littered(root):
    """Three checkpoints, and what every kind of crash leaves."""
    _three(root)
    for kind in ("tmp", "trash", "old"):
        shutil.copytree(root / "step-0000000300", root / f"step-0000000300.{kind}-deadbeef")
    shutil.copytree(root / "step-0000000100", root / "step-0000000100.old-deadbeef")
    rewrite(root / "step-0000000100", sequence=4)  # saved again, after step 300
    rewrite(root / "step-0000000300", sequence=5)
    (root / "step-0000000100.tmp-deadbeef").mkdir()
    outcome_path(root).parent.mkdir()
    outcome_path(root).with_name("outcome.json.tmp-1-0123abcd").touch()


def _save(step):
    return lambda root: save(root, step, b"new")


def _delete(root):
    entry = Catalog(root).entry(100)
    LocalBackend(root).remove(entry.path, entry.path.name, "0123abcd-1")


def _prune(root):
    execute(root, plan_prune(root, ckptman.KeepLast(1)), "0123abcd-1")


STORES = {
    "the first save": Store(lambda root: None, _save(100)),
    "a save": Store(lambda root: save(root, 100, b"first"), _save(200)),
    "a save over the same step": Store(lambda root: save(root, 100, b"first"), _save(100)),
    "a save over the newest of three": Store(_three, _save(300)),
    "a save of an earlier step": Store(_three, _save(100)),
    "a deletion": Store(_three, _delete),
    "a prune": Store(_three, _prune),
    "a prune of litter": Store(_littered, _prune),
}
"""Played with errors of the disk by `io_errors`, too."""


@dataclass
class Story:
    """What a run saves, as (step, version), over what was `there`; `keep` of KeepLast. At `nonfinite` steps
    a tensor is NaN. A `Scene`."""

    there: dict[int, int]
    saves: list[tuple[int, int]]
    keep: int = 2
    options: dict[str, object] = field(default_factory=dict)
    prunes_only: bool = False
    nonfinite: frozenset[int] = frozenset()

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
        looked_at = patch.object(save_checks, "parameter_names", lambda tensors: ["one"])
        as_module = patch.object(save_checks, "module_of", lambda value: value if value is state["x"] else None)
        with looked_at, as_module, open_run(root, state, retention=ckptman.KeepLast(self.keep), **self.options) as run:
            run.restore()
            for step, version in self.saves:
                state.update(content(version))
                run.save(step)
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
        must = last[-self.keep :] + [step for step in last if step not in self.nonfinite][-1:]
        if not tally.check(all(step in held for step in must), "lost", f"{steps} are there, {must} have to be"):
            return
        versions = self._versions(durable)
        for step in steps:
            found = loaded(tally, root, step)
            if not tally.check(found in versions[step], "wrong", f"step {step} is {found}, not of {versions[step]}"):
                return
        if goes_on_as_a_run(tally, root, steps, versions, nonfinite=self.nonfinite):
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
    "saves that are not finite": Story({1: 1}, [(2, 12), (3, 1013), (4, 1014)], keep=1, nonfinite=frozenset({3, 4})),
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


def goes_on_as_a_run(tally, root, steps, versions, stay=(), nonfinite=()):
    """A run restores the newest that is not `nonfinite`, saves, prunes, and leaves nothing behind but the steps that
    `stay`."""
    state = blank()
    try:
        with warnings.catch_warnings(), impatient():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "skipping the checkpoint of step .*: NaN or infinity in tensor x.one")
            with open_run(root, state, async_save=False, retention=ckptman.KeepLast(1)) as run:
                start = run.restore()
                expected = next((step for step in reversed(steps) if step not in nonfinite), 0)
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
    names = {path.name for path in root.iterdir()} - {".ckptman"}
    for name in names:
        # Death between the two renames of a save over a step: the earlier save is still the one of that step.
        parsed = parse_step(name)
        stands_in = parsed is not None and parsed.kind == "old" and step_folder(parsed.step) not in names
        yield step_folder(parsed.step) if stands_in else name
    yield from (path.name for path in root.glob(".ckptman/*.tmp-*"))
