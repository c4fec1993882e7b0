"""Errors and delays injected into every operation of a save, a prune and a copy, and into every system call of a read.

A read that fails is an error, never "nothing there", and never other bytes than were saved.
"""

import contextlib
import errno
import io
import itertools
import os
import shutil
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

from ckptman.errors import RootError
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.format.paths import run_folder, step_folder
from ckptman.storage.transfer.copy import CopyOptions, copy_checkpoint
from tests.faults.crash import STORES, Store, goes_on, held
from tests.faults.disks import CASE_SECONDS, WAYS, fail_and_go_on, judge_save
from tests.faults.limits import Ended, in_child, limit
from tests.faults.reads import READS, judge_read
from tests.faults.subject import save_versions
from tests.helpers.checkpoints import commit, note_in
from tests.helpers.faulty_disk import WHEN, Fault, FaultyDisk, faults, on_disk

OPERATIONS = 18
"""About as many as a save has: beyond it, the fault is injected until it is not reached any more."""
SYSTEM_CALLS = (
    (io, "open"),
    *((os, name) for name in ("open", "preadv", "pread", "read", "scandir", "listdir", "lstat", "stat", "fstat")),
)
READ_ERRORS = (errno.EIO, errno.ESTALE)
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EACCES)


def run(tally):
    """Every operation, every call."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        home = Path(folder)
        errors_while_saving(tally, home)
        for number, name in enumerate(STORES):
            errors_in_a_store(tally, name, STORES[name], home / f"store-{number}")
        errors_in_a_copy(tally, home / "copy")
        errors_while_reading(tally, home)
        latency(tally, home, longest_seconds=5 * tally.share**2)


class FailingDisk(FaultyDisk):
    """Fails once, at an operation counted from when it is `armed`."""

    def __init__(self, fault):
        super().__init__(None)
        self._waiting = fault
        self.reached = True

    def arm(self):
        self.log.clear()
        self.fault = self._waiting

    def disarm(self):
        self.reached = self.struck
        self.fault = None


def errors_while_saving(tally, home):
    """Each operation of a save fails once, with one error after the other."""
    for way in WAYS:
        for number in itertools.count():
            if number < OPERATIONS and not tally.takes():
                continue
            fault = Fault(number, WHEN[number % len(WHEN)], ERRORS[number % len(ERRORS)])
            disk, root = FailingDisk(fault), home / f"errors-{way}-{number}"
            with (
                tally.fault(f"{os.strerror(fault.error or 0)} at operation {number}, {way}", "an error in a save"),
                limit(CASE_SECONDS),
            ):
                with on_disk(disk):
                    ended = Ended(fail_and_go_on(root, way, disk.arm, disk.disarm))
                judge_save(tally, root, ended)
            shutil.rmtree(root)
            if not disk.reached:
                break


def faults_of(tally, operations, when=WHEN):
    """Each error in the place of each operation, in its middle and after it, without end; the share of a tally."""
    for number, fault in enumerate(faults(when=when)):
        if number >= operations * len(when) or tally.takes():
            yield Fault(fault.at, fault.when, ERRORS[fault.at % len(ERRORS)])


def errors_in_a_store(tally, name, scene, folder):
    """Each operation of a save, a deletion or a prune fails: what raises nothing has done all of it."""
    world = folder / "before"
    world.mkdir(parents=True)
    scene.before(world)
    for fault in faults_of(tally, OPERATIONS):
        root, disk = shutil.copytree(world, folder / "world") / "root", FaultyDisk(fault)
        with tally.fault(f"{name}: {fault}", "an error in a store"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* could not be removed")
            try:
                with on_disk(disk):
                    scene.work(root)
                failed = False
            except OSError as error:
                failed = tally.check(error.errno == fault.error, "other", f"{error} came of {fault}")
            before, state, after = scene.states[0], held(root), scene.states[-1]
            # A deletion that fails does not keep the others from being done.
            known = state in scene.states or after.items() <= state.items() <= before.items()
            good = tally.check(known, "lost", f"{state} instead of one of {scene.states}")
            good &= tally.check(failed or state == after, "other", f"nothing was told, and {state} is there")
            if good and goes_on(tally, root):
                tally.refused, tally.harmless = tally.refused + failed, tally.harmless + (not failed)
        shutil.rmtree(root.parent)
        if not disk.struck:
            break


def errors_in_a_copy(tally, folder):
    """Each operation of a copy fails: it says so, what is there stays, and the next copy is whole."""
    source = folder / "source"
    commit(source, 200, rows=3000)

    def copy(root):
        copy_checkpoint(Catalog(source).entry(200), LocalBackend(root), CopyOptions(threads=1))

    world = folder / "before"
    scene = Store(lambda root: commit(root, 100), copy)
    scene.before(world)
    for fault in faults_of(tally, 30, ("before",)):
        root, disk = shutil.copytree(world, folder / "world") / "root", FaultyDisk(fault)
        with tally.fault(f"a copy: {fault}", "an error in a copy"):
            try:
                with on_disk(disk):
                    copy(root)
                tally.survive()
            except RootError as error:
                tally.refuse(error)
            tally.check(held(root) in scene.states, "lost", f"{held(root)} instead of one of {scene.states}")
            if 200 in held(root):
                proof = note_in(root / step_folder(200))
                unnoted = fault.error == errno.EACCES  # who may not write the note goes without it
                tally.check(unnoted or (proof and proof.every_byte), "other", "the copy counts and is not proved")
            copy(root)
            tally.check(held(root) == scene.states[-1], "lost", f"copied again, {held(root)} is there")
        shutil.rmtree(root.parent)
        if not disk.struck:
            break


def errors_while_reading(tally, home):
    """The n-th call of each system call that reads fails, in a load, a restore and on the command line."""
    root = home / "reading"
    save_versions(root, {1: 1, 2: 2})
    for (module, call), (what, work) in tally.some(itertools.product(SYSTEM_CALLS, READS.items())):
        for number in itertools.count():
            error = OSError(READ_ERRORS[number % 2], os.strerror(READ_ERRORS[number % 2]))
            end = in_child(partial(_with_failing, module, call, number, error, work, root), CASE_SECONDS)
            ended, reached = end.value if end.value is not None else (end, True)
            if not reached:
                break
            with tally.fault(f"{call} {number} fails ({error.strerror}), {what}", "an error in a read"):
                judge_read(tally, ended)
            for lease in run_folder(root).glob("lease-*"):  # each that could not be removed is one more to be read
                lease.unlink()


def _with_failing(module, call, number, error, work, root):
    """What comes of a read, and whether the call that fails was reached."""
    with failing(module, call, number, error, root) as calls:
        try:
            ended = Ended(work(root))
        except Exception as failed:
            ended = Ended(error=failed)
    return ended, calls[0] > number


@contextlib.contextmanager
def failing(module, call, number, error, root):
    """Let the n-th call of a function of a module, of those about something under `root`, fail. Counts them."""
    real, calls = getattr(module, call), [0]

    def broken(what, *arguments, **options):
        path = str(Path(f"/proc/self/fd/{what}").readlink()) if isinstance(what, int) else os.fspath(what)
        if str(path).startswith(str(root)):
            calls[0] += 1
            if calls[0] == number + 1:
                raise OSError(error.errno, error.strerror, str(path))
        return real(what, *arguments, **options)

    setattr(module, call, broken)
    try:
        yield calls
    finally:
        setattr(module, call, real)


class SlowDisk(FaultyDisk):
    """Every operation takes its time."""

    def __init__(self, dice, longest_seconds):
        super().__init__()
        self._dice, self._longest = dice, longest_seconds
        self.is_slow = False
        self.slept_seconds = 0.0

    def slow_down(self):
        self.is_slow = True

    def recover(self):
        self.is_slow = False

    def _do(self, name, whole, half=None):
        if self.is_slow:
            seconds = self._longest * 0.02 ** self._dice.random()
            self.slept_seconds += seconds
            time.sleep(seconds)
        return super()._do(name, whole)


def latency(tally, home, longest_seconds):
    """Every operation of a save takes up to `longest_seconds`, on average a quarter: it ends well, only later."""
    for way in WAYS:
        disk, root = SlowDisk(tally.dice, longest_seconds), home / f"slow-{way}"
        with (
            tally.fault(f"up to {longest_seconds} s at each operation, {way}", "latency"),
            limit(60 + 100 * longest_seconds),
        ):
            with on_disk(disk):
                value = fail_and_go_on(root, way, disk.slow_down, disk.recover)
            judge_save(tally, root, Ended(value))
            tally.check(value["error"] is None, "other", f"a slow disk failed a save: {value['error']}")
            tally.check(disk.slept_seconds > longest_seconds, "other", "nothing was slow")
