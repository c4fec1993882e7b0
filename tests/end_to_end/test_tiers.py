"""A run with tiers: copies are made behind the training, and a restore takes the newest good one wherever it is."""

import shutil
import warnings

import pytest
import torch

import ckptman
from ckptman.catalog.catalog import Catalog
from ckptman.errors import ConfigError, NotFoundError
from ckptman.format.paths import journal_path
from ckptman.runtime.journal import read_journal
from tests.helpers.checkpoints import flip_byte
from tests.helpers.ranks import run_ranks


def run(root, tiers, until, *, step=None, retention=None, stop=0):
    """A run that counts and saves every 10 steps; what it has counted to is checked against where it starts."""
    state = {"count": {"n": torch.zeros(4)}}
    with ckptman.Checkpointer(
        root, state, save_policy=ckptman.EverySteps(10), retention=retention, tiers=tiers, deadline=None
    ) as checkpointer:
        start = checkpointer.restore(step=step)
        assert state["count"]["n"].tolist() == [start] * 4
        for now in range(start + 1, until + 1):
            state["count"]["n"] += 1
            checkpointer.step(now)
            if now == stop:
                raise RuntimeError("it crashed")
    return start


def steps(root):
    return [entry.step for entry in Catalog(root).scan()]


def events(root, name):
    return [each for each in read_journal(journal_path(root))[0] if each["event"] == name]


def test_a_run_that_is_finished_has_filled_its_tiers(tmp_path):
    root, far = tmp_path / "run", tmp_path / "far"
    tiers = [ckptman.Tier(far, every=4)]
    run(str(root), tiers, 80, retention=ckptman.KeepLast(1))
    assert steps(far) == [40, 80]
    assert {(each["step"], each["tier"]) for each in events(root, "drained")} == {(40, str(far)), (80, str(far))}
    assert 80 in steps(root)
    assert 10 not in steps(root)
    assert not events(root, "drain_failed")


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_several_ranks_wait_for_no_drain(tmp_path):
    root, far = tmp_path / "run", tmp_path / "far"
    assert run_ranks(2, run, str(root), [ckptman.Tier(far)], 30, limit=150) == [0, 0]
    assert steps(far) == [10, 20, 30]
    shutil.rmtree(root)
    assert run_ranks(2, run, str(root), [ckptman.Tier(far)], 40, limit=150) == [30, 30]


@pytest.mark.slow
def test_a_root_that_was_emptied_goes_on_from_a_tier(tmp_path):
    root, far = tmp_path / "run", tmp_path / "far"
    tiers = [ckptman.Tier(far, every=2)]
    assert run(str(root), tiers, 40) == 0
    shutil.rmtree(root)
    assert run(str(root), tiers, 60) == 40
    entries = Catalog(root).scan()
    assert [(entry.step, entry.sequence) for entry in entries] == [(50, 5), (60, 6)]
    assert entries[0].require_manifest().restored_from == 40
    assert steps(far) == [20, 40, 60]


@pytest.mark.slow
def test_a_damaged_copy_gives_way_to_the_next_one_of_the_same(tmp_path):
    root, far = tmp_path / "run", tmp_path / "far"
    tiers = [ckptman.Tier(far)]
    run(str(root), tiers, 40)
    flip_byte(root / "step-0000000040" / "__0_0.distcp")
    with pytest.warns(RuntimeWarning, match="skipping the checkpoint of step 40"):
        assert run(str(root), tiers, 40) == 40
    (restored,) = events(root, "restored")
    assert restored["path"] == str(far / "step-0000000040")
    flip_byte(root / "step-0000000020" / "__0_0.distcp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(str(root), tiers, 20, step=20) == 20


def test_a_run_that_crashed_breaks_its_drain_off(tmp_path):
    root, far = tmp_path / "run", tmp_path / "far"
    with pytest.raises(RuntimeError, match="it crashed"):
        run(str(root), [ckptman.Tier(far, bytes_per_second=1.0)], 40, stop=30)
    assert steps(far) == []
    assert events(root, "failed")
    assert run(str(root), [ckptman.Tier(far)], 40) in (20, 30)
    assert steps(far)[-1] == 40
    assert set(steps(root)) <= set(steps(far))


@pytest.mark.slow
def test_a_tier_that_goes_away_does_not_end_the_run(tmp_path):
    root, far = tmp_path / "run", tmp_path / "far"
    tiers = [ckptman.Tier(far)]
    run(str(root), tiers, 20)
    shutil.rmtree(far)
    with pytest.warns(RuntimeWarning, match="far"):
        assert run(str(root), tiers, 40, retention=ckptman.KeepLast(1)) == 20
    assert steps(root) == [30, 40]  # those that were not copied to where they are awaited
    assert events(root, "drain_failed")
    shutil.rmtree(root)


def test_nothing_is_started_over_where_the_only_tier_is_away(tmp_path):
    root, far = tmp_path / "run", tmp_path / "far"
    tiers = [ckptman.Tier(far)]
    run(str(root), tiers, 20)
    shutil.rmtree(far)
    for step in steps(root):
        shutil.rmtree(root / f"step-{step:010d}")
    with pytest.raises(NotFoundError, match="far"):
        run(str(root), tiers, 30)


def test_what_is_no_tier_is_refused(tmp_path):
    for tiers in ("far", [tmp_path / "far"], ckptman.Tier("far")):
        with pytest.raises(ConfigError, match="tiers"):
            run(str(tmp_path / "run"), tiers, 1)
    with pytest.raises(ConfigError, match="cannot be a tier"):
        run(str(tmp_path / "run"), [ckptman.Tier(tmp_path / "run" / "tier")], 1)
    assert not (tmp_path / "run").exists()
