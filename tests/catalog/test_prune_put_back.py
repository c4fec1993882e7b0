"""A prune that cannot put back what it has renamed away: it stays in the trash with every byte, and that is said."""

import contextlib
import errno
import itertools
import os

import pytest

from ckptman.catalog import prune as prune_module
from ckptman.catalog import reader_lease as lease_module
from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.pins import pin, read_pin
from ckptman.catalog.prune import execute, plan_prune
from ckptman.catalog.reader_lease import lease
from ckptman.catalog.writer_lock import claim
from ckptman.cli.app import main
from ckptman.format.manifest import read_manifest
from ckptman.integrity.folder_check import verify_folder
from ckptman.io.durable_files import DISK, Disk
from ckptman.policies.retention import KeepLast
from ckptman.runtime.journal import Journal, read_journal
from ckptman.saving.retention_runner import RetentionRunner
from tests.helpers.faulty_disk import holds, save

NAME = "step-0000000100"
numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Nobody pulls the plug here, and no reader waits for the prune in whose midst it comes."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(lease_module, "_PASS_SECONDS", 0.0)


@pytest.fixture
def root(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step)
    return tmp_path


class OneWay(Disk):
    """Somebody does something when a checkpoint has become trash, which cannot be renamed back."""

    def __init__(self, meanwhile):
        self._meanwhile = meanwhile
        self.refuses = True

    def rename(self, source, target):
        if self.refuses and ".trash-" in source.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        super().rename(source, target)
        if (what := self._meanwhile) is not None and ".trash-" in target.name:
            self._meanwhile = None
            what()


def trash(root):
    return sorted(root.glob(f"{NAME}.trash-*"))


def is_whole(folder):
    return verify_folder(folder, read_manifest(folder), threads=1).good


def prune(root, disk):
    execute(root, plan_prune(root, KeepLast(1)), f"0123abcd-{next(numbers)}", disk)


def test_what_a_reader_wants_stays_in_the_trash_and_comes_back(root):
    before = holds(root)
    with contextlib.ExitStack() as readers:
        disk = OneWay(lambda: readers.enter_context(lease(root, [NAME], what="restore")))
        with pytest.raises(OSError, match="stays under this name, as it cannot be put back: in use by restore") as told:
            prune(root, disk)
        (left,) = trash(root)
        assert (told.value.errno, told.value.filename) == (errno.EBUSY, str(left))
        assert is_whole(left)
        assert sorted(holds(root)) == [300], "what nobody wanted is gone all the same"
        for _ in range(2):
            with contextlib.suppress(OSError):
                prune(root, disk)
            assert is_whole(left)
        disk.refuses = False
        prune(root, disk)
        assert holds(root) == {step: before[step] for step in (100, 300)}
        assert read_pin(root / NAME) is None
    prune(root, disk)
    assert holds(root) == {300: before[300]}
    assert trash(root) == []


def test_one_that_was_pinned_meanwhile_comes_back_as_well(root):
    before = holds(root)
    disk = OneWay(lambda: pin(trash(root)[0], "Table 2", by="me", time_seconds=1.0, disk=DISK))
    with pytest.raises(OSError, match="cannot be put back: pinned: Table 2"):
        prune(root, disk)
    (left,) = trash(root)
    prune(root, disk)
    assert is_whole(left)
    prune(root, DISK)
    assert holds(root) == {step: before[step] for step in (100, 300)}
    note = read_pin(root / NAME)
    assert note is not None
    assert note.why == "Table 2"


def test_where_the_step_was_saved_again_both_are_there(root):
    before = holds(root)
    with contextlib.ExitStack() as readers:

        def meanwhile():
            save(root, 100, b"another")
            readers.enter_context(lease(root, [NAME], what="restore"))

        disk = OneWay(meanwhile)
        disk.refuses = False  # nothing is renamed over what has the name by now
        with pytest.raises(OSError, match="cannot be put back: in use by restore"):
            prune(root, disk)
        (left,) = trash(root)
        assert is_whole(left)
        now = holds(root)
        assert sorted(now) == [100, 300]
        assert now[100] != before[100]
        prune(root, DISK)
        assert is_whole(left)
    prune(root, DISK)
    assert holds(root) == {100: now[100]}, "the newest"
    assert trash(root) == []


def test_what_a_rollback_may_need_is_not_cleared_by_the_next_prune(root):
    before = holds(root)

    def roll_back():
        assert main(["rollback", str(root), "--to-step", "200"]) == 0

    disk = OneWay(roll_back)
    with pytest.raises(OSError, match="cannot be put back: the root was rolled back since the plan was made"):
        prune(root, disk)
    (left,) = trash(root)
    assert sorted(holds(root)) == [200], "which was to go"
    prune(root, disk)
    assert is_whole(left)
    prune(root, DISK)
    assert holds(root) == {step: before[step] for step in (100, 200)}
    note = read_pin(root / NAME)
    assert note is not None
    assert note.why == "a prune could not put it back: the root was rolled back since the plan was made"


def test_the_command_says_so(root, monkeypatch, capsys):
    with contextlib.ExitStack() as readers:
        disk = OneWay(lambda: readers.enter_context(lease(root, [NAME], what="verify")))
        monkeypatch.setattr(prune_module.execute, "__defaults__", (disk,))
        assert main(["prune", str(root), "--keep-last", "1"]) == 10
        told = capsys.readouterr().err
        assert f"{trash(root)[0]} cannot be removed (it stays under this name, as it cannot be put back: in use" in told
        assert is_whole(trash(root)[0])


def test_a_run_says_so_and_goes_on(root):
    journal, claimed = Journal(root / "journal.jsonl"), claim(root, "run", None)
    with contextlib.ExitStack() as readers:
        disk = OneWay(lambda: readers.enter_context(lease(root, [NAME], what="verify")))
        keeper = RetentionRunner(LocalBackend(root, disk), KeepLast(1), "fail", claimed, journal)
        with pytest.warns(RuntimeWarning, match="could not be pruned.* cannot be put back: in use by verify"):
            keeper.prune()
        (left,) = trash(root)
        save(root, 400)
        keeper.prune()
        assert is_whole(left), "not even for the one who took it"
        keeper.close(tidy=False)
    assert sorted(holds(root)) == [400]
    journal.close()
    claimed.release()
    events, _ = read_journal(root / "journal.jsonl")
    told = [(each["event"], each.get("step")) for each in events]
    assert told == [("prune_failed", None), ("pruned", 200), ("pruned", 300)], "of what went besides, and after that"
