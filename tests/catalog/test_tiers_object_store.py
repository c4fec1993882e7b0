"""An object store as a tier: filled, pruned, and gone on from where the root has lost everything."""

import shutil

import pytest
import torch

import ckptman
from ckptman.catalog.backends.object_store import ObjectBackend
from ckptman.catalog.backends.tiered import TieredBackend
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.tiers import write_tiers
from ckptman.cli.app import main
from ckptman.errors import CkptmanError
from tests.end_to_end.test_tiers import run
from tests.helpers.checkpoints import commit, flip_byte
from tests.helpers.object_store import bucket_fixture, proxy_fixture

__all__ = ["bucket_fixture", "proxy_fixture"]
pytestmark = pytest.mark.timeout(400)  # each drain is a process that imports what talks to the store


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    """What is tried again is tried at once, in this process."""
    monkeypatch.setattr(ObjectBackend, "attempts", 2)
    monkeypatch.setattr(ObjectBackend, "first_seconds", 0.0)


def steps_in(url):
    return [entry.step for entry in ObjectBackend(url).look() if entry.complete]


@pytest.mark.slow
def test_a_root_that_was_emptied_goes_on_from_an_object_store(tmp_path, bucket):
    root, url = tmp_path / "run", f"s3://{bucket}/runs/a"
    tiers = [ckptman.Tier(url, every=2, retention=ckptman.KeepLast(2))]
    run(str(root), tiers, 80, retention=ckptman.KeepLast(1))
    assert steps_in(url) == [60, 80]
    shutil.rmtree(root)
    assert run(str(root), tiers, 80) == 80
    entries = Catalog(root).scan()
    assert [(entry.step, entry.sequence) for entry in entries] == [(80, 8)]
    shutil.rmtree(root)
    assert run(str(root), tiers, 70, step=60) == 60
    assert [entry.sequence for entry in Catalog(root).scan()] == [6, 9]


@pytest.mark.slow
def test_a_store_that_cannot_be_asked_is_no_reason_to_start_over(tmp_path, bucket, proxy):
    root, url = tmp_path / "run", f"s3://{bucket}/runs/a"
    run(str(root), [ckptman.Tier(url)], 20)
    proxy.first(2, "503", lambda request: request.lists)
    with pytest.warns(RuntimeWarning, match="cannot be looked at"):
        assert run(str(root), [ckptman.Tier(url)], 20) == 20
    shutil.rmtree(root)
    proxy.always("503", lambda request: request.lists)
    with pytest.raises(CkptmanError, match="That says nothing of what is there"):
        run(str(root), [ckptman.Tier(url)], 20)
    proxy.always("503", lambda request: False)
    shutil.rmtree(root)
    assert run(str(root), [ckptman.Tier(url)], 20) == 20


@pytest.mark.slow
def test_what_the_root_has_lost_a_part_of_is_fetched_again(tmp_path, bucket):
    root, url = tmp_path / "run", f"s3://{bucket}/runs/a"
    tiers = [ckptman.Tier(url)]
    run(str(root), tiers, 30)
    (root / "step-0000000030" / "__0_0.distcp").unlink()
    with pytest.warns(RuntimeWarning, match="skipping the checkpoint of step 30"):
        assert run(str(root), tiers, 30) == 30
    flip_byte(root / "step-0000000030" / "__0_0.distcp")
    with pytest.warns(RuntimeWarning, match="skipping the checkpoint of step 30"):
        assert run(str(root), tiers, 30) == 30
    assert main(["verify", str(root)]) == 0


@pytest.mark.slow
def test_a_store_is_looked_at_before_anything_is_started(tmp_path, bucket):
    root, url = tmp_path / "run", f"s3://{bucket}/runs/a"
    tiers = [ckptman.Tier(url)]
    run(str(root), tiers, 20)
    shutil.rmtree(root)
    state = {"count": {"n": torch.zeros(4)}}
    with ckptman.Checkpointer(str(root), state, tiers=tiers, deadline=None) as checkpointer:
        assert checkpointer.restore(path=tmp_path / "pretrained") == 20


def test_pins_and_rollbacks_hold_in_a_store(tmp_path, bucket):
    root, url = tmp_path / "run", f"s3://{bucket}/runs/a"
    tiers = [ckptman.Tier(url, retention=ckptman.KeepLast(1))]
    for step in (10, 20, 30):
        commit(root, step)
    assert main(["pin", str(root / "step-0000000010"), "--why", "paper"]) == 0
    write_tiers(root, tiers)
    for later in ((20, 30), (30,), ()):
        for step in later:
            (root / f"step-{step:010d}").rename(tmp_path / f"{step}")
        assert main(["drain", str(root)]) == 0
        for step in later:
            (tmp_path / f"{step}").rename(root / f"step-{step:010d}")
    assert steps_in(url) == [10, 30]
    assert main(["rollback", str(root), "--to-step", "20"]) == 0
    assert [entry.step for entry in TieredBackend(root, tiers).list()] == [10, 10, 20]
    again = commit(root, 30, rows=4)
    assert main(["drain", str(root)]) == 0
    entries = ObjectBackend(url).look()
    assert [entry.step for entry in entries] == [10, 30]
    assert entries[1].require_manifest().identity == again.identity


@pytest.mark.slow
def test_what_others_put_below_the_name_of_a_checkpoint_stays(tmp_path, bucket):
    root, tier = tmp_path / "run", ckptman.Tier(f"s3://{bucket}/runs/a")
    commit(root, 10)
    write_tiers(root, [tier])
    place, name = ObjectBackend(str(tier)), "step-0000000010/results.json"
    place.write(name, b"theirs")
    assert main(["drain", str(root)]) == 5
    assert place.read(name, 0, 6) == b"theirs"
    assert steps_in(str(tier)) == []
