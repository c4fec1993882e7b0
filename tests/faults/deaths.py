"""A scene that is played again and again, and dies at another change of a file each time; then a power cut.

What is left is judged by what had been told. Where a scene wants that, the same is begun once more after the death, and
comes to its end, and the power is cut only then: what a killed process did and did not flush is seen by the next one.
"""

import itertools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from unittest import mock

from ckptman.storage.catalog import liveness
from tests.faults.limits import in_child, limit
from tests.faults.powercut import LOSSES, Flushes, survive, watched
from tests.faults.tap import DEAD, Tap

CASE_SECONDS = 30.0
SILENT_SECONDS = 1.0
"""How long a claim is watched that was torn: nobody touches it here, and 30 s would tell no more."""
AFTER_A_KILL = ("everything", "some")


class Scene(Protocol):
    """What happens in a world, and what has to be there afterwards. A world is a folder that holds roots."""

    def before(self, world):
        """Fill a new world with what is there before."""

    def act(self, world, tell):
        """Change it, and `tell` a line once what that says is durable. Called in a process of its own."""

    def judge(self, tally, world, before, told):
        """Look at what is left of a world: either it fails the tally or survives. `before`: what it was like."""


@dataclass(frozen=True)
class _Case:
    """One death: `world` is always at the same place, so that paths in it stay what they were."""

    folder: Path
    before: Path

    @property
    def world(self):
        return self.folder / "world"

    @property
    def dead(self):
        """The world that died, out of the way."""
        return self.folder / "dead"

    @property
    def memory(self):
        return self.folder / "memory"

    def tell(self, line):
        told = os.open(self.folder / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(told, f"{line}\n".encode())
        os.close(told)

    @property
    def told(self):
        path = self.folder / "told"
        return path.read_text().splitlines() if path.exists() else []


def die_everywhere(tally, name, scene, folder, *, again=False, losses=LOSSES):
    """End a scene at every change of a file, and once in the middle of each of its writes.

    `again`: then play it once more to its end, too, before the power is cut. Of what is lost at once there are then
    two variants for each death, and not all `losses`.
    """
    folder.mkdir()
    before = folder / "before"
    before.mkdir()
    scene.before(before)
    count, writes = _rehearse(scene, before, folder / "counted")
    for number in itertools.count():
        for half in (False, True):
            if number < count and (not tally.takes() or (half and number not in writes)):
                continue
            case = _Case(folder / f"case-{number}-{half:d}", before)
            died = _one_death(tally, name, scene, case, number, half, again, losses)
            shutil.rmtree(case.folder)
            if not died:
                return


def _rehearse(scene, before, folder):
    """About how many changes a scene makes, and which of them write: threads do not always make them in one order."""
    folder.mkdir()
    case = _Case(folder, before)
    shutil.copytree(before, case.world)

    def act():
        tap = Tap(case.world, -1)
        tap.install()
        scene.act(case.world, case.tell)
        return tap.count, tap.writes

    end = in_child(act, CASE_SECONDS)
    assert end.in_order, f"the scene cannot be played to its end: {end.error} {end.said}"
    count, writes = end.value
    return count, writes


def _one_death(tally, name, scene, case, number, half, again, losses):
    """Whether the process died; the scene may have ended before that number."""
    case.folder.mkdir()
    shutil.copytree(case.before, case.world)
    end = _play(scene, case, Tap(case.world, number, half))
    died = end.status == DEAD << 8 and not end.hung
    if not died and not end.in_order:
        _complain(tally, name, end)
        return False
    title = f"{name}, change {number}{' (half)' * half}"
    _cut_the_power(tally, name, scene, case, title, tally.dice.sample(losses, 2) if again else losses)
    if again and died and not half:
        case.dead.rename(case.world)
        end = _play(scene, case, None)
        if not end.in_order:
            _complain(tally, f"{title}, begun again", end)
        else:
            _cut_the_power(tally, name, scene, case, f"{title}, begun again", (tally.dice.choice(AFTER_A_KILL),))
    return died


def _play(scene, case, tap):
    def act():
        with watched(Flushes(case.world, case.memory)):
            if tap is not None:
                tap.install()
            scene.act(case.world, case.tell)

    with impatient():
        return in_child(act, CASE_SECONDS)


def impatient():
    """Inside, a torn claim is watched for a second."""
    return mock.patch.object(liveness, "SILENT_SECONDS", SILENT_SECONDS)


def _complain(tally, what, end):
    tally.fail("hang" if end.hung else "other", f"{what}: the scene itself failed: {end.error or end.said}")


def _cut_the_power(tally, name, scene, case, title, losses):
    case.world.rename(case.dead)
    for loss in losses:
        with tally.fault(f"{title}, losing {loss}", name), limit(CASE_SECONDS):
            survive(case.dead, case.memory, case.world, loss, tally.dice)
            scene.judge(tally, case.world, case.before, case.told)
        shutil.rmtree(case.world, ignore_errors=True)
