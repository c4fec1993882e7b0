"""What a run remembers of its root between two saves: it reads what is new, and sees what others have changed."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ckptman
from ckptman.cli.app import main
from ckptman.policies.retention_rules import KeepLast
from ckptman.storage.catalog import catalog as catalogue_module
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Catalog, Listed, any_will_do
from ckptman.storage.catalog.pins import pin
from ckptman.storage.catalog.prune import execute, plan_prune
from ckptman.storage.catalog.verified import remember_damage
from ckptman.storage.format import manifest as manifest_module
from ckptman.storage.format.manifest import compare_names
from ckptman.storage.format.paths import step_folder
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
    """Counts the manifests that are read, wholly or for their facts alone, and the listings of a root."""

    def __init__(self, root, monkeypatch):
        self.manifests, self.facts = [], []
        self.listings = 0
        parse, read_facts, scandir = manifest_module.parse_manifest, manifest_module.read_facts, os.scandir

        def parsed(path, data):
            self.manifests.append(path.parent.name)
            return parse(path, data)

        def told(folder):
            self.facts.append(folder.name)
            return read_facts(folder)

        def scanned(path="."):
            self.listings += path == root
            return scandir(path)

        monkeypatch.setattr(manifest_module, "parse_manifest", parsed)
        monkeypatch.setattr(catalogue_module, "read_facts", told)
        monkeypatch.setattr(os, "scandir", scanned)

    def clear(self):
        self.manifests.clear()
        self.facts.clear()
        self.listings = 0


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
    entries = catalogue.scan(abandoned=True, until=any_will_do)
    assert [isinstance(entry, Listed) for entry in entries] == [True] * 29 + [False]
    assert (len(entries), reads.manifests, reads.listings) == (30, [step_folder(3000)], 1), "the newest is looked into"
    for entry, anew in zip(entries, Catalog(root).scan(abandoned=True), strict=True):
        assert (entry.path, entry.identity, entry.time_seconds) == (anew.path, anew.identity, anew.time_seconds)
        assert repr(entry.record()) == repr(anew.record())


def test_a_plan_lists_the_root_once_and_a_deletion_is_of_what_was_planned(root, catalogue, monkeypatch):
    reads = Reads(root, monkeypatch)
    plan = planned(catalogue)
    assert (len(plan.verdicts), reads.manifests, reads.listings) == (30, [step_folder(3000)], 1)
    reads.clear()
    plan = planned(catalogue, KeepLast(29))
    assert len(plan.deletions) == 1
    assert sorted(reads.manifests) == [step_folder(step) for step in (2800, 2900, 3000)], "the newest that stay"
    execute(root, plan, "0123abcd-1")
    assert [each.record.step for each in planned(catalogue).verdicts] == [100 * number for number in range(2, 31)]


def replace_folder(root, **fields):
    shutil.rmtree(root / step_folder(200))
    commit(root, 200, **fields)


def put_in_place(root):
    """As `ckptman copy --overwrite` does: the next save has to come after it."""
    new = commit(root.parent / "elsewhere", 200, ranks=1, sequence=77).path
    (root / step_folder(200)).rename(root.parent / "old")
    new.rename(root / step_folder(200))


def damage(root, step):
    remember_damage(root / step_folder(step), Catalog(root).entry(step).require_manifest(), "a byte")


def data_of(root, step):
    return next((root / step_folder(step)).glob("*.distcp"))


CHANGES = {
    "pin": lambda root: pin(root / step_folder(200), "Table 2", by="somebody", time_seconds=1.0),
    "remove": lambda root: shutil.rmtree(root / step_folder(200)),
    "prune": lambda root: main(["prune", str(root), "--keep-last", "5"]),
    "roll back": lambda root: main(["rollback", str(root), "--to-step", "2000"]),
    "add": lambda root: commit(root, 5000, sequence=99),
    "replace": lambda root: replace_folder(root, sequence=77),
    "put in place": put_in_place,
    "damage": lambda root: damage(root, 200),
    "damage the newest": lambda root: damage(root, 3000),
    "lose a file": lambda root: data_of(root, 200).unlink(),
    "cut short in its place": lambda root: os.truncate(data_of(root, 3000), 1),  # its folder has not changed
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_others_change_is_seen(root, catalogue, change):
    before = repr(planned(catalogue, KeepLast(10)).verdicts)
    CHANGES[change](root)
    plan, anew = planned(catalogue, KeepLast(10)), plan_prune(root, KeepLast(10), wait=False)
    assert repr(plan.verdicts) == repr(anew.verdicts) != before
    assert [(entry.step, why) for entry, why in plan.ignored] == [(entry.step, why) for entry, why in anew.ignored]
    assert catalogue.scan(until=any_will_do)[-1].sequence == Catalog(root).scan()[-1].sequence
    assert catalogue.last_sequence() == Catalog(root).last_sequence()


def test_one_that_goes_while_rollbacks_are_looked_up_fails_nothing(root, catalogue):
    CHANGES["roll back"](root)
    (gone,) = (each for each in catalogue.scan(abandoned=True, until=any_will_do) if each.step == 200)
    assert isinstance(gone, Listed)
    again = replace(gone)  # whose identity nobody has asked for
    CHANGES["remove"](root)
    assert again.identity == ""
    assert 200 not in [entry.step for entry in catalogue.scan(abandoned=True, until=any_will_do)]


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


def test_what_was_written_a_moment_ago_is_looked_into_again(root, catalogue, monkeypatch):
    """Its folder may have the same times when it has changed since."""
    old, new = step_folder(100), step_folder(200)
    os.utime(root / new)
    catalogue.scan()
    entries = catalogue.scan(until=any_will_do)
    reads = Reads(root, monkeypatch)
    assert catalogue.confirm(entries[:2])
    assert reads.manifests == [new]
    os.utime(root / old)
    reads.clear()
    assert catalogue.confirm(entries[:2])
    assert reads.manifests == [old, new]


def test_only_what_is_wanted_is_looked_into(root, monkeypatch):
    for step in (2900, 3000):
        data_of(root, step).unlink()
    reads = Reads(root, monkeypatch)
    looked = []
    monkeypatch.setattr(catalogue_module, "compare_names", lambda *of: looked.append(of[0].name) or compare_names(*of))
    entries = Catalog(root).scan(until=lambda entry: entry.step <= 2700)
    assert looked == [step_folder(step) for step in (3000, 2900, 2800, 2700)]
    assert (len(reads.facts), reads.manifests) == (30, looked)
    assert [entry.complete for entry in entries] == [True] * 28 + [False] * 2
    assert [isinstance(entry, Listed) for entry in entries] == [True] * 26 + [False] * 4
    reads.clear()
    (entry,) = Catalog(root).scan(step=400)
    assert (entry.step, reads.manifests) == (400, [step_folder(400)])


def test_what_a_file_system_does_not_tell_is_read_again(root, monkeypatch):
    """FUSE gives all names one inode where its server does not know any."""
    names = Catalog(root).names()
    monkeypatch.setattr(Catalog, "names", lambda self: dict.fromkeys(names, 0))
    catalogue = Catalog(root, remember=True)
    assert catalogue.last_sequence() == 30
    replace_folder(root, sequence=77)
    assert catalogue.last_sequence() == 77
    assert catalogue.scan(until=any_will_do)[-1].step == 200


@pytest.mark.parametrize("told", [lambda inode: 0, lambda inode: inode + 1])
def test_a_plan_comes_to_an_end_whatever_inodes_are_told(root, monkeypatch, told):
    """Of an overlay, or through FUSE, a listing may tell others than a look at a folder."""
    monkeypatch.setattr(catalogue_module, "_told", told)
    CHANGES["pin"](root)
    damage(root, 2500)
    catalogue = Catalog(root, remember=True)
    for _ in range(2):
        plan, anew = planned(catalogue, KeepLast(10)), plan_prune(root, KeepLast(10), wait=False)
        assert repr(plan.verdicts) == repr(anew.verdicts)
        assert [entry.step for entry, _ in plan.ignored] == [2500]
    os.utime(root / step_folder(2400))
    assert repr(planned(catalogue, KeepLast(10)).verdicts) == repr(anew.verdicts)


def test_what_counts_among_many_is_looked_into_before_one_goes(root):
    """A rule that counts relies on each that it keeps; one that goes by steps on what is next to what goes."""
    for step in (1500, 2000, 2500):
        damage(root, step)
    rule = KeepLast(24)
    plan = planned(Catalog(root, remember=True), rule)
    assert repr(plan.verdicts) == repr(plan_prune(root, rule, wait=False).verdicts)
    assert [each.record.step for each in plan.deletions] == [100, 200, 300]


def test_what_is_not_complete_is_not_planned_with_again(root, catalogue, monkeypatch):
    """It has a good manifest, by which alone it counts."""
    catalogue = Catalog(root, remember=True)
    data_of(root, 2900).unlink()
    plan, anew = planned(catalogue, KeepLast(2)), plan_prune(root, KeepLast(2), wait=False)
    assert [each.record.step for each in plan.verdicts if each.keep] == [2800, 3000]
    assert repr(plan.verdicts) == repr(anew.verdicts)
    reads = Reads(root, monkeypatch)
    planned(catalogue, KeepLast(29))
    assert reads.manifests.count(step_folder(2900)) == 1


@pytest.fixture
def saving(tmp_path):
    """A run that goes on after 12 checkpoints."""
    root, state, never = tmp_path / "run", {"x": torch.zeros(8)}, ckptman.OnStop()
    with ckptman.Checkpointer(root, dict(state), save_policy=never, deadline=None) as checkpointer:
        for step in range(1, 13):
            checkpointer.save(step)
    settle(root)
    keep = ckptman.KeepEvery(steps=2) | KeepLast(1)
    options = {"retention": keep, "deadline": None, "async_save": False}
    with ckptman.Checkpointer(root, dict(state), save_policy=never, **options) as checkpointer:
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
        assert reads.facts == reads.manifests == [step_folder(step)], "for its place in the order, and to look into it"
        assert reads.listings == 2
        settle(root)
        reads.clear()
    checkpointer.save(21)
    settle(root)
    reads.clear()
    checkpointer.save(22)
    read = reads.manifests
    assert not (root / step_folder(21)).exists()
    assert len(read) <= 10, "with those that stay, and what goes, before and after it is taken"
    assert reads.listings == 2
