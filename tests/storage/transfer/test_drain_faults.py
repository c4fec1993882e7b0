"""Drains where disks are full, mounts go away and permissions are lost: what can be copied is, and nothing is lost."""

import contextlib
import errno
import os
import shutil

import pytest

from ckptman.cli.app import main
from ckptman.errors import ExistsError, NotFoundError, RootError
from ckptman.policies.retention_rules import KeepLast
from ckptman.policies.tiers import Tier
from ckptman.storage.catalog import catalog as catalogue
from ckptman.storage.catalog.backends import copy_source
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.backends.local_draft import FolderDraft
from ckptman.storage.catalog.backends.object_store import ObjectBackend
from ckptman.storage.catalog.backends.run_store import RunStore
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.tiers import write_tiers
from ckptman.storage.io.durable_files import Disk
from ckptman.storage.transfer.copy import CopyOptions, copy_checkpoint
from ckptman.storage.transfer.drain import carry_out, plan_drain
from tests.end_to_end.test_tiers import steps
from tests.helpers.checkpoints import commit
from tests.helpers.faulty_disk import rewrite
from tests.storage.catalog.test_tiers import drain, root
from tests.storage.transfer.test_copy_to_folder import a_copy_of, a_run_in

__all__ = ["root"]

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
LOST = "step-0000000070"


@pytest.fixture
def far(root):
    """The folder of a tier that is to get everything."""
    write_tiers(root, [Tier(root.parent / "far")])
    return root.parent / "far"


def refuse(monkeypatch, owner, name, error, where):
    """Have a function raise an error for the first arguments that `where` says so of. It names what it was given."""
    real = getattr(owner, name)

    def refusing(subject, *arguments, **options):
        if where(subject):
            raise OSError(error, os.strerror(error), str(subject))
        return real(subject, *arguments, **options)

    monkeypatch.setattr(owner, name, refusing)


def test_a_root_that_is_full_is_drained_all_the_same(root, far, monkeypatch, capsys):
    """A drain is what makes room there."""
    replace_file = Disk.replace_file

    def full(self, path, data):
        if root in path.parents:
            raise FULL
        replace_file(self, path, data)

    monkeypatch.setattr(Disk, "replace_file", full)
    assert main(["drain", str(root)]) == 10
    told = capsys.readouterr()
    assert "drained.json cannot be written (No space left" in told.err
    assert "Copied 8 checkpoints" in told.out
    assert len(steps(far)) == 8


def test_a_tier_that_takes_no_rollback_keeps_no_other_from_being_filled(root, monkeypatch, capsys):
    near, far = root.parent / "near", root.parent / "far"
    write_tiers(root, [Tier(near), Tier(far)])
    assert main(["rollback", str(root), "--to-step", "70"]) == 0
    for each in (near, far):
        shutil.rmtree(each / ".ckptman")
        (each / ".ckptman").mkdir()
    refuse(monkeypatch, LocalBackend, "copy_rollbacks", errno.EACCES, lambda place: place.root == near)
    assert main(["drain", str(root)]) == 10
    assert f"{near} cannot be looked at, or written to: Permission denied" in capsys.readouterr().err
    assert steps(near) == []
    assert len(steps(far)) == 7


def test_a_file_that_cannot_be_read_keeps_no_other_checkpoint_from_being_copied(root, monkeypatch):
    refuse(monkeypatch, copy_source, "read_regular", errno.EIO, lambda path: path.parent.name == LOST)
    done = drain(root, Tier(root.parent / "far"))
    assert [each.task.entry.step for each in done if isinstance(each.error, RootError)] == [70]
    assert steps(root.parent / "far") == [10, 20, 30, 40, 50, 60, 80]


def test_a_checkpoint_that_may_not_be_looked_at_keeps_no_other_from_being_copied(root, far, monkeypatch, capsys):
    refuse(monkeypatch, catalogue, "read_manifest", errno.EACCES, lambda folder: folder == root / LOST)
    for _ in range(2):
        assert main(["drain", str(root)]) == 10
        assert f"{root / LOST} cannot be read" in capsys.readouterr().err
    assert steps(far) == [10, 20, 30, 40, 50, 60, 80]


def test_what_a_newer_ckptman_wrote_to_a_tier_is_not_replaced(root):
    far = Tier(root.parent / "far", every=8)
    drain(root, far)
    there = root.parent / "far" / "step-0000000080"
    rewrite(there, format_version=2)
    before = (there / "manifest.json").read_bytes()
    assert [type(each.error) for each in drain(root, far)] == [ExistsError]
    assert (there / "manifest.json").read_bytes() == before


def test_what_a_newer_ckptman_wrote_to_the_root_is_not_replaced_by_what_a_store_has(root):
    tier = Tier("memory://unkind/older")
    ObjectBackend(str(tier)).fs.store.clear()
    drain(root, tier)
    here = root / "step-0000000080"
    rewrite(here, format_version=2)
    before = (here / "manifest.json").read_bytes()
    place = RunStore(root, [tier])
    (remote,) = (each for each in place.list() if not each.in_folder and each.step == 80)
    source, may_replace = place.source_of(remote)
    with pytest.raises(ExistsError):
        copy_checkpoint(remote, LocalBackend(root), CopyOptions(overwrite=may_replace), source=source)
    assert (here / "manifest.json").read_bytes() == before


def test_a_mount_that_fails_is_a_tier_that_cannot_be_looked_at(root, monkeypatch):
    far = root.parent / "far"
    drain(root, Tier(far))
    place = RunStore(root, [Tier(far)])
    for name in ("stat", "lstat"):
        refuse(monkeypatch, os, name, errno.ESTALE, lambda path: str(path).startswith(str(far)))
    with pytest.warns(RuntimeWarning, match="cannot be looked at"):
        assert len(place.list()) == 8


def test_a_run_in_a_tier_is_an_error_and_another_drain_is_none(root, monkeypatch, capsys):
    """What is only busy is done by whoever is at it; a run that was started there is at it for weeks."""
    near, far = root.parent / "near", root.parent / "far"
    write_tiers(root, [Tier(near), Tier(far, every=8)])
    with a_run_in(near), a_copy_of(root, 80, far):
        assert main(["drain", str(root)]) == 11
    told = capsys.readouterr()
    assert f"Error: {near} is being written to by another run" in told.err
    assert f"{far}: step 80: another process is at work there" in told.out


def test_a_tier_whose_mount_goes_away_is_not_made_anew_below_it(root, far):
    plan = plan_drain(root, [Tier(far)])
    shutil.rmtree(far)
    done = list(carry_out(root, plan, lambda task: contextlib.nullcontext(CopyOptions())))
    assert {type(each.error) for each in done} == {NotFoundError}
    assert not far.exists()


def test_a_tier_that_is_full_of_what_its_rules_no_longer_keep_gets_room(root, monkeypatch):
    """A drain was killed before it had pruned there."""
    far = Tier(root.parent / "far", retention=KeepLast(2))
    write_tiers(root, [far])
    for entry in Catalog(root).complete()[:3]:
        copy_checkpoint(entry, LocalBackend(root.parent / "far"))

    def no_room(*arguments):
        if len(steps(root.parent / "far")) > 2:
            raise FULL

    monkeypatch.setattr(FolderDraft, "_check_room", no_room)
    assert {isinstance(each.error, RootError) for each in drain(root, far)} == {True}
    assert steps(root.parent / "far") == [20, 30]
    assert drain(root, far)[0].copied is not None


def test_what_crashes_left_in_a_tier_that_keeps_everything_is_cleared(root, far):
    for left in ("tmp-copy-0123456789abcdef", "trash-drain01234567-0"):
        shutil.copytree(root / "step-0000000010", far / f"step-0000000010.{left}")
    drain(root, Tier(far))
    assert {path.name for path in far.iterdir() if "." in path.name} == {".ckptman"}
    assert len(steps(far)) == 8


def test_what_is_on_its_way_to_a_store_is_no_checkpoint_that_a_restore_misses(root):
    tier = Tier("memory://unkind/on-its-way")
    place = ObjectBackend(str(tier))
    place.fs.store.clear()
    place.write("step-0000000080/__0_0.distcp", b"half")
    assert [each.complete for each in RunStore(root, [tier]).list()] == [True] * 8
    shutil.rmtree(root / "step-0000000080")
    assert [each.step for each in RunStore(root, [tier]).list() if not each.complete] == [80]
    commit(root, 80)
