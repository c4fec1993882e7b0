"""Death at every change that a copy or a drain makes to files, then a power cut: of one by hand, and beside a run.

The original stays what it was. The copy is there with every byte, or it is not there, and the same command finishes it.
What retention took from the root, because a tier has it, the tier has.
"""

import contextlib
import os
import tempfile
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import ckptman
from ckptman.storage.catalog.tiers import read_tiers, write_tiers
from ckptman.storage.format.paths import step_folder
from ckptman.storage.transfer import drain
from ckptman.storage.transfer.copy import CopyOptions
from tests.faults.crash import goes_on_as_a_run, loaded
from tests.faults.deaths import die_everywhere, impatient
from tests.faults.reads import command
from tests.faults.subject import blank, content, open_run, save_versions, version_of
from tests.helpers.faulty_disk import holds

ROOT, NEAR, FAR = "root", "near", "far"
VERSIONS = {1: 1, 2: 2, 3: 13, 50: 99}
"""What each step is that a run saves here. Those up to 2 are there before."""
OTHER = 22
LITTLE = 0.02
"""A share of this and less is of one scene, drawn by chance: to begin all of them would take longer than the rest."""


def run(tally):
    """Every change of every scene; and each time the same is done again, and the power is cut after that."""
    os.environ["CKPTMAN_IO_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for number, name in enumerate(SCENES if tally.share > LITTLE else tally.some(SCENES)):
            die_everywhere(tally, name, SCENES[name], Path(folder, f"{number}"), again=True)


# A copy by hand.


@dataclass(frozen=True)
class Copying:
    """`ckptman copy` of a root that holds steps 1 and 2 to one that holds `first`."""

    first: Literal["nothing", "a copy of step 1", "another step 2"]
    options: tuple[str, ...] = ()

    def before(self, world):
        save_versions(world / ROOT, {1: 1})
        if self.first == "a copy of step 1":
            _ckptman("copy", world / ROOT, world / NEAR)
        elif self.first == "another step 2":
            save_versions(world / NEAR, {2: OTHER})
        save_versions(world / ROOT, {2: 2})

    def act(self, world, tell):
        self._copy(world)
        tell("copied")

    def judge(self, tally, world, before, told):
        if not tally.check(_bytes(world / ROOT) == _bytes(before / ROOT), "lost", "the original was changed"):
            return
        held = _held(tally, world / NEAR)
        old = {"a copy of step 1": {1: 1}, "another step 2": {2: OTHER}}.get(self.first, {})
        new = {**old, 2: 2}
        wanted = [new] if told else [old, new]
        if held is None or not tally.check(held in wanted, "lost", f"{held} is there, not one of {wanted}"):
            return
        try:
            with _strict():
                self._copy(world)
        except Exception as error:
            tally.fail("other", f"copying again does not work: {error}")
            return
        held = _held(tally, world / NEAR)
        if not tally.check(held == new, "lost", f"copied again, {held} is there"):
            return
        versions = {step: {version} for step, version in VERSIONS.items()}
        # The copy was read back, and retention keeps the newest of which that is known.
        if goes_on_as_a_run(tally, world / NEAR, sorted(new), versions, stay=(2,)):
            tally.survive()

    def _copy(self, world):
        _ckptman("copy", world / ROOT, world / NEAR, *self.options)


# Beside a run, and in its tiers.


@dataclass(frozen=True)
class Draining:
    """Checkpoints go to other places, and then by retention. `way`: a run copies all itself; it has tiers; or a job
    drains a root in which nobody runs, and prunes it."""

    way: Literal["copy", "tiers", "job"]

    def before(self, world):
        save_versions(world / ROOT, {1: 1})
        _ckptman("copy", world / ROOT, world / NEAR)
        save_versions(world / ROOT, {2: 2})
        if self.way == "job":
            save_versions(world / ROOT, {3: VERSIONS[3]})

    def act(self, world, tell):
        if self.way == "job":
            self._work(world)
            tell("copied 1 2 3")
            return
        state = content(0)
        with self._run(world, state) as run:
            if run.restore() < 3:
                self._save(world, run, state, 3)
                tell("saved 3")
        # What an attempt before did not come to.
        self._copy_all(world)
        tell("copied 1 2 3")

    def judge(self, tally, world, before, told):
        held = {name: _held(tally, world / name) for name in (ROOT, NEAR, FAR)}
        root, near, far = held[ROOT], held[NEAR], held[FAR]
        if root is None or near is None or far is None:
            return
        new = 3 if self.way == "job" or told or 3 in {**root, **near, **far} else 2
        steps = list(range(1, new + 1))
        copied = [int(step) for line in told for step in line.split()[1:] if line.startswith("copied")]
        # What a killed run had not told, the next one may have copied before it was durable in the root.
        last = 3 if self.way == "job" or "saved 3" in told else 2
        good = tally.check(max(root, default=0) >= last, "lost", f"step {last} was told, and the root has {root}")
        for step in steps:
            good &= tally.check(step in root or step in near, "lost", f"step {step} is neither in the root nor copied")
        good &= tally.check(all(step in near for step in (1, *copied)), "lost", f"{copied} was copied, {near} is there")
        good &= tally.check(self.way == "copy" or not copied or 3 in far, "lost", f"{far} is in the far tier")
        for name, there in held.items():
            assert there is not None
            good &= tally.check(
                all(VERSIONS.get(step) == version for step, version in there.items()), "wrong", f"{name} has {there}"
            )
        for path in (before / ROOT).glob("step-*"):
            same = not (world / ROOT / path.name).exists() or _bytes(world / ROOT / path.name) == _bytes(path)
            good &= tally.check(same, "lost", f"the original {path.name} was changed")
        newest = max(root) if self.way == "copy" else steps[-1]
        if good and self._goes_on(tally, world, steps, newest):
            tally.survive()

    def _goes_on(self, tally, world, steps, last):
        """The next run, which restores step `last`, or the next job, finishes what was begun, and leaves nothing."""
        try:
            with _strict():
                if self.way == "job":
                    self._work(world)
                else:
                    if self.way == "copy":  # before the retention of the run takes it
                        self._copy_all(world)
                    state = blank()
                    with self._run(world, state) as run:
                        start = run.restore()
                        wrong = f"restored step {start}, {version_of(state)}, instead of {last}"
                        if not tally.check((start, version_of(state)) == (last, VERSIONS[last]), "lost", wrong):
                            return False
                        self._save(world, run, state, 50)
                    steps = [*steps, 50]
        except Exception as error:
            tally.fail("other", f"it does not go on: {type(error).__name__}: {error}")
            return False
        newest = [step_folder(steps[-1])]
        wanted = {ROOT: newest, NEAR: [*map(step_folder, steps)], FAR: newest if self.way != "copy" else []}
        found = {name: _names(world / name) for name in wanted}
        if not tally.check(found == wanted, "lost", f"in the end there is {found}"):
            return False
        # A tier is cleared when something new goes there.
        halves = [path.name for path in (world / ROOT).glob(".ckptman/*.tmp-*")]
        return tally.check(not halves, "other", f"in the end there are {halves}")

    def _tiers(self, world):
        return [ckptman.Tier(world / NEAR), ckptman.Tier(world / FAR, retention=ckptman.KeepLast(1))]

    @contextmanager
    def _run(self, world, state):
        options = {"tiers": self._tiers(world)} if self.way == "tiers" else {}
        keep = ckptman.KeepLast(1)
        with (
            mock.patch("ckptman.session.run_session.Drainer", _DrainsHere),
            open_run(world / ROOT, state, async_save=False, retention=keep, **options) as run,
        ):
            yield run

    def _save(self, world, run, state, step):
        if self.way == "copy":
            self._copy_all(world)
        state.update(content(VERSIONS[step]))
        run.save(step)
        if self.way == "copy":
            self._copy_all(world)

    def _copy_all(self, world):
        if self.way == "copy":
            _ckptman("copy", world / ROOT, world / NEAR, "--all")
        else:
            _ckptman("drain", world / ROOT)

    def _work(self, world):
        write_tiers(world / ROOT, self._tiers(world))
        _ckptman("drain", world / ROOT)
        _ckptman("prune", world / ROOT, "--keep-last", "1")


class _DrainsHere:
    """A `Drainer` that copies in this process, so that the death of one is the death of both."""

    def __init__(self, root, journal):
        self._root = root

    def poke(self):
        plan = drain.plan_drain(self._root, read_tiers(self._root))
        drain.prepare(self._root, plan)
        for each in drain.carry_out(self._root, plan, lambda task: contextlib.nullcontext(CopyOptions(threads=1))):
            if each.error is not None:
                raise each.error

    def close(self, *, finish):
        pass


SCENES = {
    "copy: to a new root": Copying("nothing"),
    "copy: all, and one is there": Copying("a copy of step 1", ("--all",)),
    "copy: over another": Copying("another step 2", ("--overwrite",)),
    "copy: by a run that prunes": Draining("copy"),
    "drain: to the tiers of a run": Draining("tiers"),
    "drain: by a job, then a prune": Draining("job"),
}


def _held(tally, root):
    """What a root holds. None: something in it is neither whole nor invisible, and that is told."""
    try:
        return {step: loaded(tally, root, step) for step in sorted(holds(root))} if root.exists() else {}
    except Exception as error:
        tally.fail("lost", f"what is in {root.name} is not whole: {error}")
        return None


def _ckptman(*arguments):
    """Run a command. Raises: RuntimeError with what it said, where it fails."""
    code, said = command(*arguments)
    if code:
        raise RuntimeError(f"ckptman {arguments[0]} ended with {code}: {said}")


@contextmanager
def _strict():
    """No warnings; and a claim that a power cut tore is not watched for half a minute."""
    with warnings.catch_warnings(), impatient():
        warnings.simplefilter("error")
        yield


def _bytes(folder):
    """Every file below, but what a root says of who is at work in it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("lease-"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _names(root):
    return sorted(path.name for path in root.iterdir() if path.name != ".ckptman") if root.exists() else []
