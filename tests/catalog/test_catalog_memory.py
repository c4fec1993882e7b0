"""What a run remembers of its root between two saves: it reads what is new, and sees what others have changed."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ckptman
from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.catalog import Catalog, Remembered
from ckptman.catalog.pins import pin
from ckptman.catalog.prune import execute, plan_prune
from ckptman.catalog.verified import identify, note_damaged, remember_damage
from ckptman.cli.app import main
from ckptman.format import manifest as manifest_module
from ckptman.format.paths import step_folder
from ckptman.io.durable_files import DISK
from ckptman.policies.retention_rules import KeepLast
from tests.helpers.checkpoints import commit

LONG_AGO = 1_700_000_000


def settle(root):
    """Date the folders of all checkpoints back: what was written a moment ago is not remembered.

    Not what a prune has renamed: it is being removed, behind the training.
    """
    for folder in root.glob("step-" + "[0-9]" * 10):
        if folder.stat().st_mtime != LONG_AGO:
            os.utime(folder, (LONG_AGO, LONG_AGO))


class Reads:
    """Counts the manifests that are read, and the listings of a root."""

    def __init__(self, root, monkeypatch):
        self.manifests = []
        self.listings = self.scans = 0
        parse, listdir, scandir = manifest_module.parse_manifest, os.listdir, os.scandir

        def parsed(path, data):
            self.manifests.append(path.parent.name)
            return parse(path, data)

        def listed(path="."):
            self.listings += os.fspath(path) == str(root)
            return listdir(path)

        def scanned(path="."):
            self.scans += path == root
            return scandir(path)

        monkeypatch.setattr(manifest_module, "parse_manifest", parsed)
        monkeypatch.setattr(os, "listdir", listed)
        monkeypatch.setattr(os, "scandir", scanned)

    def clear(self):
        self.manifests.clear()
        self.listings = self.scans = 0


@pytest.fixture
def root(tmp_path):
    for number in range(1, 31):
        commit(tmp_path, 100 * number, ranks=1, sequence=number, metrics={"loss": float("nan")})
    settle(tmp_path)
    return tmp_path


@pytest.fixture
def catalogue(root):
    found = Catalog(root, remember=True)
    found.scan(abandoned=True)
    return found


def planned(catalogue, policy=None):
    return plan_prune(catalogue.root, policy, wait=False, catalogue=catalogue)


def test_what_has_not_changed_is_not_read_again(root, catalogue, monkeypatch):
    reads = Reads(root, monkeypatch)
    entries = catalogue.scan(abandoned=True, recall=True)
    assert all(isinstance(entry, Remembered) for entry in entries)
    assert (len(entries), reads.manifests, reads.listings) == (30, [], 1)
    anew = Catalog(root).scan(abandoned=True)
    assert [(each.step, each.sequence, each.time_seconds, each.path) for each in entries] == [
        (each.step, each.sequence, each.time_seconds, each.path) for each in anew
    ]
    assert [repr(each.record()) for each in entries] == [repr(each.record()) for each in anew]
    assert [each.identity for each in entries] == [each.identity for each in anew]


def test_a_plan_lists_the_root_once_and_a_deletion_is_of_what_was_planned(root, catalogue, monkeypatch):
    reads = Reads(root, monkeypatch)
    plan = planned(catalogue)
    assert (len(plan.verdicts), reads.manifests, reads.listings) == (30, [], 1)
    plan = planned(catalogue, KeepLast(29))
    assert len(plan.deletions) == 1
    assert sorted(reads.manifests) == [step_folder(step) for step in (2800, 2900, 3000)], "the newest that stay"
    execute(root, plan, "0123abcd-1")
    assert [each.record.step for each in planned(catalogue).verdicts] == [100 * number for number in range(2, 31)]


def _pin(root):
    pin(root / step_folder(200), "Table 2", by="somebody", time_seconds=1.0, disk=DISK)


def _remove(root):
    shutil.rmtree(root / step_folder(200))


def _prune(root):
    assert main(["prune", str(root), "--keep-last", "5"]) == 0


def _roll_back(root):
    assert main(["rollback", str(root), "--to-step", "2000"]) == 0


def _add(root):
    commit(root, 5000, sequence=99)


def _replace(root):
    shutil.rmtree(root / step_folder(200))
    commit(root, 200, sequence=77)


def _damage(root):
    entry = Catalog(root).entry(200)
    found = identify(entry.path, entry.require_manifest())
    note_damaged(entry.path, found, "a byte", DISK)


def _lose_a_file(root):
    next((root / step_folder(200)).glob("*.distcp")).unlink()


CHANGES = [_pin, _remove, _prune, _roll_back, _add, _replace, _damage, _lose_a_file]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_what_others_change_is_seen(root, catalogue, change):
    before = repr(planned(catalogue, KeepLast(10)).verdicts)
    change(root)
    plan, anew = planned(catalogue, KeepLast(10)), plan_prune(root, KeepLast(10), wait=False)
    assert repr(plan.verdicts) == repr(anew.verdicts) != before
    assert [(entry.step, why) for entry, why in plan.ignored] == [(entry.step, why) for entry, why in anew.ignored]
    assert catalogue.scan(recall=True)[-1].sequence == Catalog(root).scan()[-1].sequence


def test_what_was_cut_short_in_its_place_pushes_out_nothing(root, catalogue):
    """Nothing in its folder has changed but the size of a file."""
    data = next((root / step_folder(3000)).glob("*.distcp"))
    os.truncate(data, 1)
    plan = planned(catalogue, KeepLast(1))
    assert [each.record.step for each in plan.verdicts if each.keep] == [2900]
    assert [entry.step for entry, _ in plan.ignored] == [3000]


def test_one_that_goes_while_rollbacks_are_looked_up_fails_nothing(root, catalogue):
    _roll_back(root)
    (gone,) = (each for each in catalogue.scan(abandoned=True, recall=True) if each.step == 200)
    assert isinstance(gone, Remembered)
    again = replace(gone)  # whose identity nobody has asked for
    _remove(root)
    assert again.identity == ""
    assert 200 not in [entry.step for entry in catalogue.scan(abandoned=True, recall=True)]


def test_one_that_was_replaced_since_the_plan_is_not_deleted(root, catalogue):
    plan = planned(catalogue, KeepLast(29))
    shutil.rmtree(root / step_folder(100))
    commit(root, 100, sequence=99)
    assert not execute(root, plan, "0123abcd-1").deleted
    assert Catalog(root).entry(100).sequence == 99


def test_a_step_that_is_saved_again_is_read_anew(root):
    place = LocalBackend(root)
    assert place.last_sequence() == 30
    draft = place.begin(step_folder(200), "0123abcd-1")
    source = root / step_folder(200)
    manifest = Catalog(root).entry(200).require_manifest().model_copy(update={"sequence": 31})
    for name in manifest.files:
        shutil.copyfile(source / name, Path(draft) / name)
    place.commit(draft, manifest)
    assert place.last_sequence() == 31, "although the root was looked at a moment ago"
    plan = plan_prune(root, KeepLast(1), wait=False, catalogue=place.catalogue)
    assert [each.record.step for each in plan.verdicts if each.keep] == [200]


def test_what_was_written_a_moment_ago_is_looked_at_again(tmp_path):
    commit(tmp_path, 100, sequence=1)
    catalogue = Catalog(tmp_path, remember=True)
    catalogue.scan()
    (entry,) = catalogue.scan(recall=True)
    assert not isinstance(entry, Remembered)


@pytest.fixture
def saving(tmp_path):
    """A run that goes on after 12 checkpoints."""
    root, state, never = tmp_path / "run", {"x": torch.zeros(8)}, ckptman.OnStop()
    with ckptman.Checkpointer(root, dict(state), save_policy=never, deadline=None) as checkpointer:
        for step in range(1, 13):
            checkpointer.save(step)
    settle(root)
    keep = ckptman.KeepEvery(steps=2) | KeepLast(1)
    with ckptman.Checkpointer(
        root, dict(state), save_policy=never, retention=keep, deadline=None, async_save=False
    ) as checkpointer:
        assert checkpointer.restore() == 12
        yield root, checkpointer


def test_a_save_reads_the_manifests_that_are_new_and_lists_the_root_twice(saving, monkeypatch):
    """Twice: for its place in the order before it is committed, with inodes, and for what may go after that."""
    root, checkpointer = saving
    checkpointer.save(14)  # all of an odd step go
    settle(root)
    reads = Reads(root, monkeypatch)
    for step in (16, 18, 20):
        checkpointer.save(step)
        assert reads.manifests == [step_folder(step - 2), step_folder(step)], "the one before has settled by now"
        assert (reads.scans > 0, reads.listings) == (True, 1)
        settle(root)
        reads.clear()
    checkpointer.save(21)
    reads.clear()
    settle(root)
    checkpointer.save(22)
    read = reads.manifests
    assert not (root / step_folder(21)).exists()
    assert len(read) <= 10, "with those that stay, and what goes, before and after it is taken"
    assert (reads.scans > 0, reads.listings) == (True, 1)


def test_what_has_become_incomplete_counts_no_more_at_once(root, catalogue):
    next((root / step_folder(300)).glob("*.distcp")).unlink()
    catalogue.scan()
    assert [each.record.step for each in planned(catalogue).verdicts if each.record.step == 300] == []


def test_what_a_verify_noted_a_moment_ago_is_seen(root, catalogue):
    remember_damage(root / step_folder(3000), Catalog(root).entry(3000).require_manifest(), "a bit is wrong")
    kept = [each.record.step for each in planned(catalogue, KeepLast(2)).verdicts if each.keep]
    assert {2800, 2900} <= set(kept), "what is damaged counts for nothing"


def test_a_folder_that_another_process_has_put_in_place_of_one_counts_at_once(root, catalogue):
    """As `ckptman copy --overwrite` does: the next save has to come after it."""
    new = commit(root.parent / "elsewhere", 200, ranks=1, sequence=77).path
    (root / step_folder(200)).rename(root.parent / "old")
    new.rename(root / step_folder(200))
    assert catalogue.last_sequence() == 77
