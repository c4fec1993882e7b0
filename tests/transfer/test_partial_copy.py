"""Copies that were interrupted, taken over or made by hand: nothing is a copy that is none, and nothing stays."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from ckptman.catalog.backends import source as copysource
from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.backends.source import SourceError
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.pins import PINNED
from ckptman.catalog.writer_lock import this_process
from ckptman.cli.app import main
from ckptman.errors import BusyError, RootError
from ckptman.format import index
from ckptman.format.paths import DOT, MANIFEST, owner_path
from ckptman.io.durable_files import Disk
from ckptman.io.safe_open import read_regular
from ckptman.transfer.copy import CopyOptions, copy_checkpoint, copy_foreign
from ckptman.transfer.progress import Meter
from tests.helpers.checkpoints import commit, steps_of
from tests.helpers.faulty_disk import Death
from tests.transfer.test_copy_to_folder import STEP, copy, plain, source

__all__ = ["source"]


def names(root):
    return sorted(path.name for path in root.iterdir() if path.name != DOT)


def test_a_draft_that_another_copy_took_over_is_not_published(source, tmp_path):
    """As after `scontrol suspend`: who was silent for long is taken for dead, and what it had sealed is tidied up."""

    class Suspended(Disk):
        def sync_folder(self, path):
            super().sync_folder(path)
            if (path / MANIFEST).exists() and ".tmp-copy-" in path.name:
                other = this_process("copy", None)
                self.create_file(owner_path(path, 2), other.model_dump_json().encode() + b"\n")
                self.remove_file(path / MANIFEST)

    with pytest.raises(BusyError, match="another copy of the same checkpoint"):
        copy(source, tmp_path / "root", disk=Suspended())
    assert not (tmp_path / "root" / STEP).exists()


@pytest.mark.parametrize("of_others", [False, True])
def test_a_mount_that_goes_away_is_no_original_that_is_gone(of_others, source, tmp_path):
    folder = plain(source / "outputs", b"one")

    def go_away(meter):
        if meter.phase == "copying" and source.exists():
            source.rename(tmp_path / "away")

    means, place = CopyOptions(meter=Meter(go_away), threads=1), LocalBackend(tmp_path / "root")
    with pytest.raises(SourceError, match=r"No such file.*check the mount"):
        copy_foreign(folder, place, means) if of_others else copy_checkpoint(Catalog(source).entry(200), place, means)
    assert len(names(place.root)) == 1


def test_what_was_copied_by_hand_is_flushed_before_it_counts(source, tmp_path):
    class Watched(Disk):
        flushed: set[str] = set()  # noqa: RUF012

        def sync_file(self, fd):
            self.flushed.add(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115

        def sync_folder(self, path):
            self.flushed.add(str(path))

    for folder in (source / STEP, plain(tmp_path / "outputs", b"one")):
        disk, there = Watched(), tmp_path / "root" / folder.name
        shutil.copytree(folder, there)
        if folder.name == STEP:
            assert copy(source, tmp_path / "root", disk=disk).already
        else:
            assert copy_foreign(folder, LocalBackend(tmp_path / "root", disk)).already
        wanted = {str(path) for path in (there, *there.iterdir()) if path.name not in (MANIFEST, "verified.json")}
        assert wanted <= disk.flushed


def test_what_an_error_left_of_a_checkpoint_of_others_is_cleared_by_the_next_copy(tmp_path):
    class Full(Disk):
        def sync_file(self, fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder, root = plain(tmp_path / "outputs", b"one"), tmp_path / "root"
    with pytest.raises(RootError, match="no room"):
        copy_foreign(folder, LocalBackend(root, Full()))
    assert len(names(root)) == 1
    (root / "outputs.tmp-copy-of-mine").mkdir()
    plain(folder, b"three")
    copy_foreign(folder, LocalBackend(root))
    assert names(root) == ["outputs", "outputs.tmp-copy-of-mine"]


@pytest.mark.parametrize("where", ["aside", "trash"])
def test_of_what_was_replaced_nothing_is_left_after_a_kill_either(where, tmp_path):
    class Killed(Disk):
        def rename(self, source, target):
            super().rename(source, target)
            if f".{where}-copy-".replace("aside", "old") in target.name:
                raise Death

    folder, root = plain(tmp_path / "outputs", b"one"), tmp_path / "root"
    copy_foreign(folder, LocalBackend(root))
    (root / "outputs.old-copy-20261122").mkdir()
    plain(folder, b"three")
    disk = Killed()
    with pytest.raises(Death):
        copy_foreign(folder, LocalBackend(root, disk), CopyOptions(overwrite=True))
    assert len(names(root)) == 3
    copy_foreign(folder, LocalBackend(root), CopyOptions(overwrite=True))
    assert names(root) == ["outputs", "outputs.old-copy-20261122"]


def test_a_rollback_goes_along_with_what_is_named_by_a_link(source, tmp_path):
    assert main(["rollback", str(source), "--to-step", "100"]) == 0
    (tmp_path / "best").symlink_to(source / STEP)
    assert main(["copy", "best", "root"]) == 0
    assert steps_of(Catalog(tmp_path / "root").scan()) == []
    assert steps_of(Catalog(tmp_path / "root").scan(abandoned=True)) == [200]


@pytest.mark.parametrize("name", [MANIFEST, PINNED, "blocks-00000.bin"])
def test_with_all_what_is_beside_the_files_and_cannot_be_read_keeps_no_other_checkpoint(
    name, source, tmp_path, capsys, monkeypatch
):
    def closed(path, most_bytes):
        if (path.parent.name, path.name) == ("step-0000000100", name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))  # as of a read, which does not say of what
        return read_regular(path, most_bytes)

    for module in (copysource, index):
        monkeypatch.setattr(module, "read_regular", closed)
    assert main(["copy", "source", "root", "--all"]) == 10
    assert "step 100: not copied: " in capsys.readouterr().out
    assert steps_of(Catalog(tmp_path / "root").complete()) == [200]


def test_where_nothing_could_be_copied_nothing_is_said_to_be_there(source, tmp_path, capsys):
    commit(tmp_path / "root", 100, metrics={"loss": 1.0})
    commit(tmp_path / "root", 200, metrics={"loss": 1.0})
    assert main(["copy", "source", "root", "--all"]) == 5
    assert "there already" not in capsys.readouterr().out
