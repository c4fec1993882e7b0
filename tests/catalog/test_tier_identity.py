"""Whose a tier is: two runs never restore from, prune or fill each other's, and one that has lost its root goes on."""

import errno
import json
import shutil

import pytest

import ckptman
from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.backends.object_store import ObjectBackend
from ckptman.catalog.backends.tiered import TieredBackend
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.tier_identity import mark_tier, read_identity, read_mark
from ckptman.catalog.tiers import claim_tiers, write_tiers
from ckptman.cli.app import main
from ckptman.errors import ConfigError, CorruptError
from ckptman.format.paths import DOT, ROOT_ID, TIER_OF
from ckptman.io.durable_files import Disk
from ckptman.policies.retention import KeepLast
from ckptman.policies.tiers import Tier
from ckptman.transfer.drain import plan_drain
from tests.end_to_end.test_tiers import run
from tests.helpers.checkpoints import commit
from tests.helpers.object_store import bucket_fixture, proxy_fixture

__all__ = ["bucket_fixture", "proxy_fixture"]


def steps(root):
    return [entry.step for entry in Catalog(root).scan()]


@pytest.mark.slow
def test_two_runs_do_not_share_a_tier(tmp_path):
    tiers = [ckptman.Tier(tmp_path / "far", retention=ckptman.KeepLast(2))]
    assert run(str(tmp_path / "a"), tiers, 40) == 0
    before = steps(tmp_path / "far")
    with pytest.raises(ConfigError, match=rf"is of another root, {tmp_path}/a .*and not of {tmp_path}/b: give each"):
        run(str(tmp_path / "b"), tiers, 20)
    assert steps(tmp_path / "far") == before
    assert not (tmp_path / "b" / DOT / "tiers.json").exists()
    assert run(str(tmp_path / "a"), tiers, 60) == 40
    assert run(str(tmp_path / "b"), [], 20) == 0


def test_nor_where_both_have_run_before(tmp_path):
    assert run(str(tmp_path / "b"), [], 20) == 0
    tiers = [ckptman.Tier(tmp_path / "far")]
    assert run(str(tmp_path / "a"), tiers, 40) == 0
    with pytest.raises(ConfigError, match="is of another root"):
        run(str(tmp_path / "b"), tiers, 40)


def test_a_drain_leaves_alone_what_is_of_another_root(tmp_path, capsys):
    far = tmp_path / "far"
    for name, step in (("a", 10), ("b", 50)):
        commit(tmp_path / name, step)
        write_tiers(tmp_path / name, [Tier(far)])
    assert main(["drain", str(tmp_path / "a")]) == 0
    assert main(["drain", str(tmp_path / "b")]) != 0
    assert f"{far} is of another root, {tmp_path / 'a'}" in capsys.readouterr().err
    assert main(["drain", str(tmp_path / "b"), "--to", str(far)]) != 0
    assert steps(far) == [10]
    # What is due there stays until somebody has said where it is to go.
    commit(tmp_path / "b", 60)
    assert main(["prune", str(tmp_path / "b"), "--keep-last", "1"]) == 0
    assert steps(tmp_path / "b") == [50, 60]


def test_nor_is_a_root_filled_that_is_named_as_a_tier(tmp_path):
    run(str(tmp_path / "a"), [], 20)
    commit(tmp_path / "b", 50)
    write_tiers(tmp_path / "b", [Tier(tmp_path / "a", retention=KeepLast(1))])
    assert main(["drain", str(tmp_path / "b")]) != 0
    assert steps(tmp_path / "a") == [10, 20]


def test_nor_one_that_an_earlier_version_made(tmp_path, capsys):
    """It has no id yet, and the same run id where one was copied from the other."""
    run(str(tmp_path / "a"), [], 20)
    (tmp_path / "a" / DOT / ROOT_ID).unlink()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    commit(tmp_path / "b", 50, sequence=9)
    write_tiers(tmp_path / "b", [Tier(tmp_path / "a", retention=KeepLast(1))])
    assert main(["drain", str(tmp_path / "b")]) != 0
    assert f"a run has been started in it ({tmp_path / 'a' / DOT}" in capsys.readouterr().err
    assert steps(tmp_path / "a") == [10, 20]


def test_a_folder_of_copies_may_have_been_rolled_back(tmp_path):
    run(str(tmp_path / "a"), [], 30)
    assert main(["copy", str(tmp_path / "a"), str(tmp_path / "far"), "--all"]) == 0
    assert main(["rollback", str(tmp_path / "far"), "--to-step", "20"]) == 0
    assert run(str(tmp_path / "a"), [ckptman.Tier(tmp_path / "far")], 40) in (20, 30)


def test_a_root_that_nobody_may_write_to_is_drained_all_the_same(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "root.json")

    commit(tmp_path / "a", 10)
    monkeypatch.setattr("ckptman.transfer.drain.make_identity", refuse)
    main(["drain", str(tmp_path / "a"), "--to", str(tmp_path / "far")])
    assert steps(tmp_path / "far") == [10]


@pytest.mark.slow
def test_a_tier_in_which_a_run_was_started_is_one_no_more_until_that_is_over(tmp_path, capsys):
    root, far = tmp_path / "run", tmp_path / "far"
    run(str(root), [ckptman.Tier(far)], 20)
    assert main(["drain", str(far), "--to", str(tmp_path / "further")]) == 0  # that makes no root of it
    assert run(str(root), [ckptman.Tier(far)], 30) == 20
    assert run(str(far), [], 40) == 30
    with pytest.raises(ConfigError, match=f"{far} is the root of a run itself.*remove {far}/.ckptman/root.json"):
        run(str(root), [ckptman.Tier(far)], 50)
    assert main(["drain", str(root)]) == 10
    assert "is the root of a run itself" in capsys.readouterr().err
    (far / DOT / ROOT_ID).unlink()
    assert run(str(root), [ckptman.Tier(far)], 50) == 40


@pytest.mark.slow
def test_a_lost_root_goes_on_from_its_tiers_at_the_same_path(tmp_path):
    root, tiers = tmp_path / "run", [ckptman.Tier(tmp_path / "far"), ckptman.Tier(tmp_path / "near")]
    run(str(root), tiers, 20)
    known = read_identity(root)
    shutil.rmtree(root)
    assert run(str(root), tiers, 40) == 20
    assert read_identity(root) == known


def test_at_another_path_by_its_run_id(tmp_path):
    tiers = [Tier(tmp_path / "far")]
    run(str(tmp_path / "old"), tiers, 20)
    mark = read_mark(LocalBackend(tmp_path / "far"))
    assert mark is not None
    shutil.rmtree(tmp_path / "old")
    with pytest.raises(ConfigError, match=f"run_id='{mark.run_id}'"):
        run(str(tmp_path / "new"), tiers, 40)
    state = {"n": 0}
    options = {"tiers": tiers, "deadline": None, "run_id": mark.run_id}
    with ckptman.Checkpointer(tmp_path / "new2", {"count": state}, **options) as checkpointer:
        assert checkpointer.root == tmp_path / "new2"
    assert read_identity(tmp_path / "new2") == mark.id
    renewed = read_mark(LocalBackend(tmp_path / "far"))
    assert renewed is not None
    assert renewed.root == str(tmp_path / "new2")


@pytest.mark.slow
def test_a_root_that_was_moved_keeps_its_tiers_and_one_that_was_copied_does_not(tmp_path):
    tiers = [ckptman.Tier(tmp_path / "far")]
    run(str(tmp_path / "a"), tiers, 20)
    (tmp_path / "a").rename(tmp_path / "b")
    assert run(str(tmp_path / "b"), tiers, 40) == 20
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    with pytest.raises(ConfigError, match="one of them is a copy of the other"):
        run(str(tmp_path / "c"), tiers, 60)
    (tmp_path / "link").symlink_to(tmp_path / "b")
    assert run(str(tmp_path / "link"), tiers, 60) == 40


@pytest.mark.slow
def test_a_tier_of_an_earlier_version_is_adopted_by_its_run(tmp_path):
    root, far = tmp_path / "run", tmp_path / "far"
    run(str(root), [ckptman.Tier(far)], 20)
    for path in (root / DOT / ROOT_ID, far / DOT / TIER_OF):
        path.unlink()
    with pytest.raises(ConfigError, match="holds checkpoints of another run"):
        run(str(tmp_path / "other"), [ckptman.Tier(far)], 20)
    assert run(str(root), [ckptman.Tier(far)], 40) == 20
    mark = read_mark(LocalBackend(far))
    assert mark is not None
    assert mark.id == read_identity(root)


def test_of_two_at_once_one_gets_the_tier(tmp_path):
    far = tmp_path / "far"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        claim_tiers(tmp_path / name, [], name)
    (far / DOT).mkdir(parents=True)

    class Late(Disk):
        def create_whole_file(self, path, data):
            mark_tier(tmp_path / "b", LocalBackend(far), "b", renew=False)
            super().create_whole_file(path, data)

    with pytest.raises(ConfigError, match="is of another root"):
        mark_tier(tmp_path / "a", LocalBackend(far, Late()), "a", renew=False)
    mark = read_mark(LocalBackend(far))
    assert mark is not None
    assert mark.run_id == "b"


@pytest.mark.slow
def test_a_mark_that_has_changed_is_no_mark(tmp_path):
    root, far = tmp_path / "run", tmp_path / "far"
    run(str(root), [ckptman.Tier(far)], 20)
    mark = far / DOT / TIER_OF
    mark.write_bytes(mark.read_bytes().replace(b'"root": "/', b'"root": "#'))
    with pytest.raises(CorruptError, match=f"{mark} is not what ckptman wrote there.*remove it"):
        run(str(root), [ckptman.Tier(far)], 40)
    assert TIER_OF in plan_drain(root, [Tier(far)]).troubles[0].trouble
    mark.unlink()
    assert run(str(root), [ckptman.Tier(far)], 40) == 20


@pytest.mark.slow
def test_the_same_of_an_object_store(tmp_path, bucket):
    url = f"s3://{bucket}/run"
    for name, step in (("a", 10), ("b", 50)):
        commit(tmp_path / name, step)
        write_tiers(tmp_path / name, [Tier(url)])
    assert main(["drain", str(tmp_path / "a")]) == 0
    assert main(["drain", str(tmp_path / "b")]) != 0
    assert [each.step for each in ObjectBackend(url).look()] == [10]
    with pytest.raises(ConfigError, match=f"remove {url}/.ckptman/tier-of.json"):
        TieredBackend(tmp_path / "b", [Tier(url)]).list()
    assert json.loads(ObjectBackend(url).read_whole(f"{DOT}/{TIER_OF}") or b"")["id"] == read_identity(tmp_path / "a")
