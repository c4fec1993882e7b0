"""What is kept in an object store stays, whatever is copied over it; and nothing is called a copy that is not whole."""

import errno
import os

import pytest

from ckptman.catalog.backends.object_draft import ObjectDraft
from ckptman.catalog.backends.source import FolderReading
from ckptman.catalog.catalog import Catalog
from ckptman.cli.app import main
from ckptman.errors import BusyError, CorruptError, ExistsError, RootError
from ckptman.policies.retention_rules import KeepLast
from ckptman.policies.tiers import Tier
from ckptman.transfer.copy import copy_checkpoint
from ckptman.transfer.drain import prune_tier
from tests.catalog.test_object_store import DATA, FOLDER, MANIFEST, NOTE, other, place, root, upload
from tests.catalog.test_tiers import drain
from tests.helpers.checkpoints import commit, flip_byte
from tests.helpers.faulty_disk import Death, rewrite

__all__ = ["other", "place", "root"]


def whole(place):
    return [entry.complete for entry in place.look()]


def test_objects_that_vanish_after_they_were_read_back_are_no_copy(root, place, monkeypatch):
    """Another copy of the same checkpoint gives up: it takes what was put for its own."""

    publish = ObjectDraft.publish

    def too_late(draft, replace):
        place.remove(DATA)
        return publish(draft, replace)

    monkeypatch.setattr(ObjectDraft, "publish", too_late)
    with pytest.raises(BusyError, match="removed or replaced"):
        upload(root, place)
    assert MANIFEST not in place.listing()


def test_with_all_one_that_was_taken_over_keeps_no_other(root, place, monkeypatch, capsys):
    commit(root, 200)
    check_ours = ObjectDraft._check_ours

    def check(draft):
        if draft.where.endswith(FOLDER):
            place.remove(NOTE)
        check_ours(draft)

    monkeypatch.setattr(ObjectDraft, "_check_ours", check)
    assert main(["copy", str(root), place.url, "--all"]) == 11
    assert "step 100: not copied: " in capsys.readouterr().out
    assert [entry.step for entry in place.look() if entry.complete] == [200]


def test_a_damaged_original_replaces_no_other_checkpoint(root, other, place):
    upload(other, place)
    flip_byte(root / DATA)
    before = place.listing()
    with pytest.raises(CorruptError, match=r"is not what was saved .*it replaces nothing"):
        upload(root, place, overwrite=True)
    assert place.listing() == before
    assert whole(place) == [True]
    flip_byte(root / DATA)
    upload(root, place, overwrite=True)
    assert whole(place) == [True]


def test_who_has_nothing_to_copy_leaves_the_note_of_a_copy_that_replaces_it(root, place):
    upload(root, place)
    place.write(NOTE, b'{"tag": "0123", "host": "elsewhere", "pid": 7}')
    assert upload(root, place).already
    assert NOTE in place.listing()


@pytest.mark.parametrize("version", [None, 2])
def test_what_was_a_checkpoint_in_a_store_is_missed(version, root, place, tmp_path, capsys):
    """Damaged, or of a newer ckptman: as in a folder, the exit code says so."""
    commit(root, 200)
    assert main(["copy", str(root), place.url, "--all"]) == 0
    rewrite(root / FOLDER, format_version=version)
    place.write(MANIFEST, (root / MANIFEST).read_bytes())
    assert main(["copy", place.url, str(tmp_path / "back"), "--all"]) == (9 if version else 4)
    assert "step 100: not copied" in capsys.readouterr().out
    assert [entry.step for entry in Catalog(tmp_path / "back").scan()] == [200]


def test_a_pinned_one_that_was_abandoned_stays_where_its_step_is_saved_again(tmp_path, place):
    root, tier = tmp_path / "run", Tier(place.url)
    for step in (10, 20):
        commit(root, step)
    assert main(["pin", str(root / "step-0000000020"), "--why", "Table 2"]) == 0
    drain(root, tier)
    assert main(["rollback", str(root), "--to-step", "10"]) == 0
    commit(root, 20, rows=4)
    before = place.listing("step-0000000020")
    assert [type(each.error) for each in drain(root, tier)] == [ExistsError]
    assert place.listing("step-0000000020") == before


@pytest.mark.parametrize("after", [0, 1, 4, 8])
def test_what_a_killed_drain_was_removing_goes_with_the_next(after, tmp_path, place):
    root, tier = tmp_path / "run", Tier(place.url, retention=KeepLast(1))
    for step in (10, 20):
        copy_checkpoint(commit(root, step), place)
    removed = []
    remove = place.remove

    def killed(name):
        if len(removed) == after:
            raise Death
        removed.append(name)
        remove(name)

    place.remove = killed
    with pytest.raises(Death):
        prune_tier(tier, place)
    del place.remove
    assert place.listing("step-0000000010")
    prune_tier(tier, place)
    assert {name.partition("/")[0] for name in place.listing()} == {"step-0000000020"}


@pytest.mark.parametrize("size", [8, 2_500_000])
def test_an_original_that_cannot_be_read_keeps_no_other_from_a_store(size, tmp_path, place, monkeypatch):
    root, read = tmp_path / "run", FolderReading.read

    def broken(self, offset, size, scratch):
        if "step-0000000020" in str(self.path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path))
        return read(self, offset, size, scratch)

    commit(root, 10)
    commit(root, 20, rows=size)
    monkeypatch.setattr(FolderReading, "read", broken)
    done = {each.task.entry.step: each for each in drain(root, Tier(place.url))}
    assert done[10].copied is not None
    assert isinstance(done[20].error, RootError)
    assert "step-0000000020" in str(done[20].error)
    assert "check the mount and its permissions" in str(done[20].error)
