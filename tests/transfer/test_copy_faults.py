"""A copy that dies or fails at any operation leaves the destination as it was or with the whole copy, and goes on."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptman.catalog import writer_lock as owner
from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.catalog import Catalog
from ckptman.errors import CkptmanError, RootError
from ckptman.format.paths import DOT
from ckptman.io.durable_files import Disk
from ckptman.transfer.copy import CopyOptions, copy_checkpoint
from tests.helpers.checkpoints import commit, note_in
from tests.helpers.faulty_disk import Death, FaultyDisk, faults, holds

STEP = 200


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Nobody pulls the plug here: what counts is the order of operations."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def dead(monkeypatch):
    """Whoever died in this process is dead, although its pid is alive, and is not watched for half a minute."""
    monkeypatch.setattr(owner, "process_lives", lambda claimant: False)
    monkeypatch.setattr(owner, "PATIENCE_SECONDS", 0)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("source")
    commit(root, 100)
    commit(root, STEP, rows=3000)
    return root


def copy(source, root, disk, **means):
    place = LocalBackend(root, disk)
    return copy_checkpoint(Catalog(source).entry(STEP), place, CopyOptions(threads=1, **means))


@pytest.mark.slow
@pytest.mark.parametrize("before", ["nothing", "another", "the same step"])
@pytest.mark.usefixtures("dead")
def test_death_at_any_operation_leaves_the_old_set_or_the_new_one(source, before, tmp_path):
    old = {}
    model = tmp_path / "model"
    if before != "nothing":
        commit(model, 100 if before == "another" else STEP, rows=16)
        old = holds(model)
    whole = tmp_path / "whole"
    copy(source, whole, Disk())
    new = {**old, **holds(whole)}
    struck = 0
    for number, fault in enumerate(faults()):
        root = tmp_path / f"root-{number}"
        if model.exists():
            shutil.copytree(model, root)
        disk = FaultyDisk(fault)
        try:
            copy(source, root, disk, overwrite=True)
        except Death:
            struck += 1
        assert disk.struck == disk.dead
        if root.exists():
            assert holds(root) in (old, new), fault
        if (root / f"step-{STEP:010d}").exists() and holds(root) == new:
            # No moment at which it counts and is not proved.
            note = note_in(root / f"step-{STEP:010d}")
            assert note is not None, fault
            assert note.every_byte, fault
        copy(source, root, Disk(), overwrite=True)
        assert holds(root) == new, fault
        assert not (root / f"step-{STEP:010d}" / DOT).exists()
        assert {parsed.kind for _, parsed in Catalog(root).leftovers()} <= {"old", "trash"}, fault
        shutil.rmtree(root)
        if not disk.struck:
            break
    assert struck > 30


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EROFS])
@pytest.mark.usefixtures("dead")
def test_an_error_at_any_operation_is_told_and_harms_nothing(source, code, tmp_path):
    failed = 0
    for number, fault in enumerate(faults(code, ("before",))):
        root = tmp_path / f"root-{number}"
        commit(root, 100)
        old = holds(root)
        disk = FaultyDisk(fault)
        try:
            copy(source, root, disk)
        except CkptmanError as error:
            failed += 1
            assert isinstance(error, RootError)
            assert str(error)
        assert 100 in holds(root)
        if STEP not in holds(root):
            assert holds(root) == old
        copy(source, root, Disk())
        assert sorted(holds(root)) == [100, STEP]
        shutil.rmtree(root)
        if not disk.struck:
            break
    assert failed > 10


def copies_forever(source, root):
    """Copy, tell, delete, again and again."""
    os.fsync = lambda fd: None
    while True:
        for entry in Catalog(source).complete():
            copied = copy_checkpoint(entry, LocalBackend(root), CopyOptions(threads=2))
            print(copied.step, flush=True)
        for entry in Catalog(root).complete():
            LocalBackend(root).remove(entry.path, entry.path.name, os.urandom(4).hex())


def kill_again_and_again(tmp_path, kills, seed):
    """Kill a process that copies at random moments. What counts at the destination is whole and proved, each time."""
    print(f"seed {seed}")
    dice = random.Random(seed)
    source, root = tmp_path / "source", tmp_path / "root"
    for step in (100, 200, 300):
        commit(source, step, rows=60_000, ranks=3)
    LocalBackend(root).make()
    for number in range(kills):
        command = [sys.executable, "-m", "tests.transfer.test_copy_faults", str(source), str(root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as child:
            assert child.stdout is not None
            try:
                child.stdout.readline()
                time.sleep(dice.uniform(0, 0.05))
            finally:
                child.send_signal(dice.choice([signal.SIGKILL, signal.SIGTERM]))
            child.stdout.read()
        assert child.returncode < 0, "it ended by itself"
        for step in holds(root):
            note = note_in(root / f"step-{step:010d}")
            assert note is not None, f"kill {number}"
            assert note.every_byte
    for entry in Catalog(source).complete():
        copy_checkpoint(entry, LocalBackend(root))
    assert holds(root) == holds(source)
    assert not [parsed for _, parsed in Catalog(root).leftovers() if parsed.kind == "tmp"]


@pytest.mark.slow
def test_ten_kills(tmp_path):
    kill_again_and_again(tmp_path, 10, seed=random.randrange(2**32))


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_three_hundred_kills(tmp_path):
    kill_again_and_again(tmp_path, 300, seed=random.randrange(2**32))


if __name__ == "__main__":
    copies_forever(Path(sys.argv[1]), Path(sys.argv[2]))
