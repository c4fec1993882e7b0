"""Whose a tier is: two runs never restore from, prune or fill each other's, and one that has lost its root goes on."""

import errno
import os
import shutil
from unittest.mock import patch

import pytest

import ckptman
from ckptman.cli.app import main
from ckptman.errors import ConfigError, CorruptError
from ckptman.policies.retention import KeepLast
from ckptman.policies.tiers import Tier
from ckptman.storage.catalog.backends.backend import open_backend
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.backends.run_store import RunStore
from ckptman.storage.catalog.tier_identity import check_tier, mark_tier, read_identity, read_mark
from ckptman.storage.catalog.tiers import claim_tiers, write_tiers
from ckptman.storage.format.paths import DOT, ROOT_ID, TIER_OF
from ckptman.storage.io.durable_files import DISK, Disk
from ckptman.storage.transfer import drain
from ckptman.storage.transfer.drain import copy_checkpoint, plan_drain
from tests.end_to_end.test_tiers import drains_here, run
from tests.helpers.checkpoints import commit
from tests.helpers.faulty_disk import on_disk
from tests.storage.catalog.test_tiers import steps

__all__ = ["drains_here"]
pytestmark = pytest.mark.usefixtures("drains_here")


@pytest.fixture
def a(tmp_path):
    return tmp_path / "a"


@pytest.fixture
def b(tmp_path):
    return tmp_path / "b"


@pytest.fixture
def far(tmp_path):
    return tmp_path / "far"


@pytest.mark.parametrize("has_run", [False, True])
def test_two_runs_do_not_share_a_tier(has_run, a, b, far):
    tiers = [Tier(far, retention=KeepLast(2))]
    if has_run:
        run(b, [], 20)
    assert run(a, tiers, 40) == 0
    before = steps(far)
    with pytest.raises(ConfigError, match=rf"is of another root, {a} .*and not of {b}: give each"):
        run(b, tiers, 20)
    assert steps(far) == before
    assert not (b / DOT / "tiers.json").exists()
    assert run(a, tiers, 60) == 40
    assert run(b, [], 20) == 20 * has_run


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_drain_leaves_alone_what_is_of_another_root(kind, a, b, far, capsys):
    there = str(far) if kind == "folder" else f"memory://{far.parent.name}/far"
    place = open_backend(there)
    for root, step in ((a, 10), (b, 50)):
        commit(root, step)
        write_tiers(root, [Tier(there)])
    assert main(["drain", str(a)]) == 0
    assert main(["drain", str(b)]) != 0
    assert f"{there} is of another root, {a}" in capsys.readouterr().err
    assert main(["drain", str(b), "--to", there]) != 0
    assert [entry.step for entry in place.list()] == [10]
    assert read_mark(place).id == read_identity(a)
    with pytest.raises(ConfigError, match=f"remove {there}/.ckptman/tier-of.json"):
        RunStore(b, [Tier(there)]).list()
    # What is due there stays until somebody has said where it is to go.
    commit(b, 60)
    assert main(["prune", str(b), "--keep-last", "1"]) == 0
    assert steps(b) == [50, 60]


@pytest.mark.parametrize("earlier", [False, True], ids=["", "of an earlier version"])
def test_nor_is_a_root_filled_that_is_named_as_a_tier(earlier, a, b, capsys):
    """One of an earlier version has no id yet, and the same run id where one was copied from the other."""
    run(a, [], 20)
    if earlier:
        (a / DOT / ROOT_ID).unlink()
        shutil.copytree(a, b)
    commit(b, 50, sequence=9)
    write_tiers(b, [Tier(a, retention=KeepLast(1))])
    assert main(["drain", str(b)]) != 0
    assert (f"a run has been started in it ({a / DOT}" if earlier else "root of a run") in capsys.readouterr().err
    assert steps(a) == [10, 20]


def test_a_tier_in_which_a_run_was_started_is_one_no_more_until_that_is_over(a, far, tmp_path, capsys):
    tiers = [Tier(far)]
    run(a, tiers, 20)
    assert main(["drain", str(far), "--to", str(tmp_path / "further")]) == 0  # that makes no root of it
    assert run(a, tiers, 30) == 20
    assert run(far, [], 40) == 30
    with pytest.raises(ConfigError, match=f"{far} is the root of a run itself.*remove {far}/.ckptman/root.json"):
        run(a, tiers, 50)
    assert main(["drain", str(a)]) == 10
    assert "is the root of a run itself" in capsys.readouterr().err
    (far / DOT / ROOT_ID).unlink()
    assert run(a, tiers, 50) == 40


def test_of_two_at_once_one_gets_the_tier(a, b, far):
    for root in (a, b):
        root.mkdir()
        claim_tiers(root, [], root.name)
    (far / DOT).mkdir(parents=True)

    def come_late(path, data):
        with on_disk(Disk()):
            mark_tier(b, LocalBackend(far), "b", renew=False)
        Disk.create_whole_file(DISK, path, data)

    late = patch.object(DISK, "create_whole_file", come_late)
    with late, pytest.raises(ConfigError, match="is of another root"):
        mark_tier(a, LocalBackend(far), "a", renew=False)
    assert read_mark(LocalBackend(far)).run_id == "b"


def test_a_lost_root_goes_on_from_its_tiers_at_the_same_path(a, far, tmp_path):
    tiers = [Tier(far), Tier(tmp_path / "near")]
    run(a, tiers, 20)
    known = read_identity(a)
    shutil.rmtree(a)
    assert run(a, tiers, 40) == 20
    assert read_identity(a) == known


def test_at_another_path_by_its_run_id(a, b, far, tmp_path):
    tiers = [Tier(far)]
    run(a, tiers, 20)
    mark = read_mark(LocalBackend(far))
    shutil.rmtree(a)
    with pytest.raises(ConfigError, match=f"run_id='{mark.run_id}'"):
        run(tmp_path / "new", tiers, 40)
    with ckptman.Checkpointer(b, {"count": {"n": 0}}, tiers=tiers, deadline=None, run_id=mark.run_id) as checkpointer:
        assert checkpointer.root == b
    assert read_identity(b) == mark.id
    assert read_mark(LocalBackend(far)).root == str(b)


def test_a_root_that_was_moved_keeps_its_tiers_and_one_that_was_copied_does_not(a, b, far, tmp_path):
    tiers = [Tier(far)]
    run(a, tiers, 20)
    a.rename(b)
    assert run(b, tiers, 40) == 20
    shutil.copytree(b, tmp_path / "c")
    with pytest.raises(ConfigError, match="one of them is a copy of the other"):
        run(tmp_path / "c", tiers, 60)
    (tmp_path / "link").symlink_to(b)
    assert run(tmp_path / "link", tiers, 60) == 40


def test_a_tier_of_an_earlier_version_is_adopted_by_its_run(a, b, far):
    tiers = [Tier(far)]
    run(a, tiers, 20)
    for path in (a / DOT / ROOT_ID, far / DOT / TIER_OF):
        path.unlink()
    with pytest.raises(ConfigError, match="holds checkpoints of another run"):
        run(b, tiers, 20)
    assert run(a, tiers, 40) == 20
    assert read_mark(LocalBackend(far)).id == read_identity(a)


def test_a_mark_that_has_changed_is_no_mark(a, far):
    tiers = [Tier(far)]
    run(a, tiers, 20)
    mark = far / DOT / TIER_OF
    mark.write_bytes(mark.read_bytes().replace(b'"root": "/', b'"root": "#'))
    with pytest.raises(CorruptError, match=f"{mark} is not what ckptman wrote there.*remove it"):
        run(a, tiers, 40)
    assert TIER_OF in plan_drain(a, tiers).troubles[0].trouble
    mark.unlink()
    assert run(a, tiers, 40) == 20


def test_a_folder_of_copies_may_have_been_rolled_back(a, far):
    run(a, [], 30)
    assert main(["copy", str(a), str(far), "--all"]) == 0
    assert main(["rollback", str(far), "--to-step", "20"]) == 0
    assert run(a, [Tier(far)], 40) in (20, 30)


def test_a_root_that_nobody_may_write_to_is_drained_all_the_same(a, far, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "root.json")

    commit(a, 10)
    monkeypatch.setattr("ckptman.storage.transfer.drain.make_identity", refuse)
    main(["drain", str(a), "--to", str(far)])
    assert steps(far) == [10]


@pytest.mark.skipif(os.geteuid() != 0, reason="only the super-user may give a folder to another one")
def test_the_super_user_who_trains_in_a_folder_of_a_user_is_his_own_word(tmp_path):
    root, tier = tmp_path / "run", tmp_path / "tier"
    root.mkdir()
    os.chown(root, 4321, -1)
    for _ in range(2):
        with ckptman.Checkpointer(root, {"n": 0}, tiers=[ckptman.Tier(tier)], deadline=None) as checkpointer:
            checkpointer.save(checkpointer.restore() + 1)
    assert steps(tier) == [1, 2]
    os.chown(tier, 4321, -1)
    check_tier(root, LocalBackend(tier))


def test_a_tier_that_is_exchanged_after_the_last_copy_is_not_pruned(tmp_path, monkeypatch):
    root, tier, victim = tmp_path / "run", tmp_path / "tier", tmp_path / "victim"
    for step in (10, 20, 30):
        commit(victim, step)
        commit(root, step)

    def exchange(*arguments):
        copied = copy_checkpoint(*arguments)
        if not tier.is_symlink():
            tier.rename(tmp_path / "moved")
            tier.symlink_to(victim)
        return copied

    monkeypatch.setattr(drain, "copy_checkpoint", exchange)
    main(["drain", str(root), "--to", str(tier), "--keep-last", "1"])
    assert steps(victim) == [10, 20, 30]


@pytest.mark.skipif(os.geteuid() != 0, reason="only the super-user may give a folder to another one")
@pytest.mark.parametrize("whose", ["tier", "tiers.json", "root.json"])
def test_the_super_user_takes_nobodys_word_for_what_is_anothers(tmp_path, whose):
    root, tier = tmp_path / "run", tmp_path / "tier"
    with ckptman.Checkpointer(root, {"n": 0}, tiers=[ckptman.Tier(tier)], deadline=None) as checkpointer:
        checkpointer.save(1)
    path = tier if whose == "tier" else root / ".ckptman" / whose
    os.chown(path, 4321, -1)
    place = LocalBackend(tier)
    with pytest.raises(ConfigError, match=r"root .*chown .*, or do this as"):
        check_tier(root, place)
    os.chown(path, root.stat().st_uid, -1)
    check_tier(root, place)
