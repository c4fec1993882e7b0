"""An object store as a tier: filled, pruned, and gone on from where the root has lost everything."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptman
from ckptman.errors import CkptmanError
from ckptman.store import objects
from ckptman.store.catalogue import Catalogue
from ckptman.store.objects import ObjectPlace, Patience
from tests.object_store import Proxy, bucket_fixture, proxy_fixture
from tests.test_tiers_run import run

__all__ = ["bucket_fixture", "proxy_fixture"]


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried at once, in this process."""
    monkeypatch.setattr(objects.ObjectPlace.__init__, "__defaults__", (Patience(attempts=2, first_seconds=0.0),))


def steps_in(url: str) -> list[int]:
    return [entry.step for entry in ObjectPlace(url).look() if entry.complete]


def test_a_root_that_was_emptied_goes_on_from_an_object_store(tmp_path: Path, bucket: str) -> None:
    root, url = tmp_path / "run", f"s3://{bucket}/runs/a"
    tiers = [ckptman.Tier(url, every=2, retention=ckptman.KeepLast(2))]
    run(str(root), tiers, 80, retention=ckptman.KeepLast(1))
    assert steps_in(url) == [60, 80]
    shutil.rmtree(root)
    assert run(str(root), tiers, 80) == 80
    entries = Catalogue(root).scan()
    assert [(entry.step, entry.sequence) for entry in entries] == [(80, 8)]
    shutil.rmtree(root)
    assert run(str(root), tiers, 70, step=60) == 60
    assert [entry.sequence for entry in Catalogue(root).scan()] == [6, 9]


def test_a_store_that_cannot_be_asked_is_no_reason_to_start_over(tmp_path: Path, bucket: str, proxy: Proxy) -> None:
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
