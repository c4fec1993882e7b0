"""What is kept in an object store stays, whatever is copied over it; and nothing is called a copy that is not whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptman.catalog.backends.object_draft import ObjectDraft
from ckptman.catalog.backends.object_store import ObjectBackend
from ckptman.catalog.backends.source import FolderReading
from ckptman.catalog.catalog import Catalog
from ckptman.cli.app import main
from ckptman.errors import BusyError, CorruptError, ExistsError, RootError
from ckptman.policies.retention_rules import KeepLast
from ckptman.policies.tiers import Tier
from ckptman.transfer.copy import copy_checkpoint
from ckptman.transfer.drain import prune_tier
from tests.catalog.test_object_store import DATA, FOLDER, MANIFEST, NOTE, Told, other, place, root, upload
from tests.catalog.test_tiers import drain
from tests.helpers.checkpoints import commit, flip_byte
from tests.helpers.faulty_disk import Death, rewrite

__all__ = ["other", "place", "root"]


def whole(place: ObjectBackend) -> list[bool]:
    return [entry.complete for entry in place.look()]


def test_objects_that_vanish_after_they_were_read_back_are_no_copy(
    root: Path, place: ObjectBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another copy of the same checkpoint gives up: it takes what was put for its own."""

    publish = ObjectDraft.publish

    def too_late(draft: ObjectDraft, replace: bool) -> str:
        place.remove(DATA)
        return publish(draft, replace)

    monkeypatch.setattr(ObjectDraft, "publish", too_late)
    with pytest.raises(BusyError, match="removed or replaced"):
        upload(root, place)
    assert MANIFEST not in place.listing()


def test_with_all_one_that_was_taken_over_keeps_no_other(
    root: Path, place: ObjectBackend, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    commit(root, 200)
    check_ours = ObjectDraft._check_ours

    def check(draft: ObjectDraft) -> None:
        if draft.where.endswith(FOLDER):
            place.remove(NOTE)
        check_ours(draft)

    monkeypatch.setattr(ObjectDraft, "_check_ours", check)
    assert main(["copy", str(root), place.url, "--all"]) == 11
    assert "step 100: not copied: " in capsys.readouterr().out
    assert [entry.step for entry in place.look() if entry.complete] == [200]


def test_a_damaged_original_replaces_no_other_checkpoint(root: Path, other: Path, place: ObjectBackend) -> None:
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


def test_who_has_nothing_to_copy_leaves_the_note_of_a_copy_that_replaces_it(root: Path, place: ObjectBackend) -> None:
    upload(root, place)
    place.write(NOTE, b'{"tag": "0123", "host": "elsewhere", "pid": 7}')
    assert upload(root, place).already
    assert NOTE in place.listing()


@pytest.mark.parametrize("version", [None, 2])
def test_what_was_a_checkpoint_in_a_store_is_missed(
    version: int | None, root: Path, place: ObjectBackend, tmp_path: Path, capsys: Told
) -> None:
    """Damaged, or of a newer ckptman: as in a folder, the exit code says so."""
    commit(root, 200)
    assert main(["copy", str(root), place.url, "--all"]) == 0
    rewrite(root / FOLDER, format_version=version)
    place.write(MANIFEST, (root / MANIFEST).read_bytes())
    assert main(["copy", place.url, str(tmp_path / "back"), "--all"]) == (9 if version else 4)
    assert "step 100: not copied" in capsys.readouterr().out
    assert [entry.step for entry in Catalog(tmp_path / "back").scan()] == [200]


def test_a_pinned_one_that_was_abandoned_stays_where_its_step_is_saved_again(
    tmp_path: Path, place: ObjectBackend
) -> None:
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
def test_what_a_killed_drain_was_removing_goes_with_the_next(after: int, tmp_path: Path, place: ObjectBackend) -> None:
    root, tier = tmp_path / "run", Tier(place.url, retention=KeepLast(1))
    for step in (10, 20):
        copy_checkpoint(commit(root, step), place)
    removed: list[str] = []
    remove = place.remove

    def killed(name: str) -> None:
        if len(removed) == after:
            raise Death
        removed.append(name)
        remove(name)

    place.remove = killed  # type: ignore[method-assign]
    with pytest.raises(Death):
        prune_tier(tier, place)
    del place.remove
    assert place.listing("step-0000000010")
    prune_tier(tier, place)
    assert {name.partition("/")[0] for name in place.listing()} == {"step-0000000020"}


@pytest.mark.parametrize("size", [8, 2_500_000])
def test_an_original_that_cannot_be_read_keeps_no_other_from_a_store(
    size: int, tmp_path: Path, place: ObjectBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, read = tmp_path / "run", FolderReading.read

    def broken(self: FolderReading, offset: int, size: int, scratch: memoryview) -> memoryview:
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
