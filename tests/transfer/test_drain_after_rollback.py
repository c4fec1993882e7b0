"""Tiers that meet rollbacks, damage, and mounts that are away: nothing is lost, and nothing abandoned comes back."""

import shutil
from dataclasses import replace

import pytest

from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.backends.tiered import TieredBackend
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.tiers import awaited, read_tiers, write_tiers
from ckptman.cli.app import main
from ckptman.errors import RootError
from ckptman.format.paths import drained_path
from ckptman.policies.retention_rules import KeepBest, KeepLast
from ckptman.policies.tiers import Tier
from ckptman.transfer.copy import copy_checkpoint
from ckptman.transfer.drain import plan_drain, prune_tier
from tests.catalog.test_tiers import drain, root, steps
from tests.helpers.checkpoints import commit, flip_byte

__all__ = ["root"]


# ---- rollbacks and tiers ---------------------------------------------------------------------------------------------


def taken(root, *tiers):
    """The step that a restore would take."""
    return TieredBackend(root, tiers).list()[-1].step


def test_a_step_that_was_saved_again_goes_to_the_tier_as_well(root):
    far = Tier(root.parent / "far")
    drain(root, far)
    assert main(["rollback", str(root), "--to-step", "60"]) == 0
    again = commit(root, 70, rows=4)
    assert [(each.task.entry.step, each.error) for each in drain(root, far)] == [(70, None)]
    assert Catalog(root.parent / "far").entry(70).identity == again.identity
    assert steps(root.parent / "far") == [10, 20, 30, 40, 50, 60, 70]
    assert drain(root, far) == []


def test_what_only_a_tier_has_is_rolled_back_too(root):
    far = Tier(root.parent / "far")
    drain(root, far)
    assert main(["prune", str(root), "--keep-steps", "20", "--keep-last", "1"]) == 0
    assert steps(root) == [20, 80]
    assert main(["rollback", str(root), "--to-step", "20"]) == 0
    assert taken(root, far) == 20
    shutil.rmtree(root)
    root.mkdir()
    assert taken(root, far) == 20
    assert main(["rollback", str(root.parent / "far"), "--undo"]) == 0
    assert taken(root, far) == 80


def test_one_can_go_back_to_what_only_a_tier_has(root):
    far = Tier(root.parent / "far")
    drain(root, far)
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert main(["rollback", str(root), "--to-step", "30"]) == 0
    assert taken(root, far) == 30
    shutil.rmtree(root.parent / "far")
    assert main(["rollback", str(root), "--to-step", "20"]) == 3  # nobody can tell what is there


def test_a_rule_of_a_tier_counts_nothing_that_was_abandoned(root):
    best = Tier(root.parent / "best", retention=KeepBest("loss"))
    commit(root, 90, metrics={"loss": -5.0})
    drain(root, best)
    assert main(["rollback", str(root), "--to-step", "80"]) == 0
    commit(root, 90, rows=4, metrics={"loss": -1.0})
    drain(root, best)
    assert [entry.record().metrics["loss"] for entry in Catalog(root.parent / "best").scan()] == [-1.0]


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_a_damaged_copy_is_no_copy_and_is_made_again(root):
    far = Tier(root.parent / "far", every=8)
    drain(root, far)
    commit(root, 90)
    bad = root.parent / "far" / "step-0000000080"
    flip_byte(bad / "__0_0.distcp")
    assert main(["verify", str(bad)]) == 4
    assert main(["prune", str(root), "--keep-last", "1"]) == 0
    assert steps(root) == [80, 90]
    assert [(each.task.entry.step, each.error) for each in drain(root, far)] == [(80, None)]
    assert main(["verify", str(bad)]) == 0


def test_a_damaged_original_is_read_once(root):
    flip_byte(root / "step-0000000070" / "__0_0.distcp")
    far = Tier(root.parent / "far")
    assert [each.task.entry.step for each in drain(root, far) if each.error] == [70]
    assert drain(root, far) == []


def test_a_tier_of_which_nothing_counts_is_no_reason_to_start_over(root):
    far = Tier(root.parent / "far", every=8)
    drain(root, far)
    (root.parent / "far" / "step-0000000080" / "__0_0.distcp").unlink()
    shutil.rmtree(root)
    root.mkdir()
    (entry,) = TieredBackend(root, [far]).list()
    assert entry.problem == "__0_0.distcp is missing"


def test_a_tier_that_is_an_empty_mount_point_is_away(root):
    far = root.parent / "far"
    write_tiers(root, [Tier(far)])
    shutil.rmtree(far)
    far.mkdir()
    assert "check the mount" in plan_drain(root, read_tiers(root)).troubles[0].trouble
    with pytest.raises(RootError, match="is it mounted"):
        write_tiers(root, [Tier(root.parent / "mount" / "far")])


def test_a_run_that_is_at_work_believes_the_last_drain(root, monkeypatch):
    far = Tier(root.parent / "far", every=4)
    drain(root, far)
    commit(root, 90)
    records = [entry.record() for entry in Catalog(root).scan()]
    shutil.rmtree(root.parent / "far")
    assert awaited(root, records, 0, look=False) == {}
    assert {records[place].step for place in awaited(root, records, 0)} == {40, 80}
    drained_path(root).unlink()
    assert {records[place].step for place in awaited(root, records, 0, look=False)} == {40, 80}


def test_numbers_go_on_where_a_tier_is_away(root):
    far = Tier(root.parent / "far")
    drain(root, far)
    for step in steps(root)[2:]:
        shutil.rmtree(root / f"step-{step:010d}")
    (root.parent / "far").rename(root.parent / "away")
    place = TieredBackend(root, [far])
    with pytest.warns(RuntimeWarning, match="cannot be looked at"):
        place.list()
    assert place.last_sequence() == 8


def test_a_slip_in_the_rules_of_a_tier_deletes_nothing_there(tmp_path):
    root, far = tmp_path / "run", tmp_path / "far"
    tier = Tier(far, retention=KeepBest("lozz"))
    for step in (10, 20, 30):
        commit(root, step, metrics={"loss": 1.0})
    write_tiers(root, [tier])
    for step in (10, 20, 30):
        copy_checkpoint(Catalog(root).entry(step), LocalBackend(far))
    with pytest.warns(RuntimeWarning, match="nothing is deleted in .*far: no checkpoint has the metric 'lozz'"):
        prune_tier(tier, LocalBackend(far))
    assert len(Catalog(far).scan()) == 3
    prune_tier(replace(tier, retention=KeepBest("lozz") | KeepLast(1)), LocalBackend(far))
    assert len(Catalog(far).scan()) == 1
