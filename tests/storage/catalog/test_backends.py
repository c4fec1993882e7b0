"""The contract of `Backend`: one suite for every implementation."""

import contextlib

import pytest

from ckptman.errors import CorruptError, ExistsError, NotFoundError
from ckptman.policies.retention_rules import KeepLast
from ckptman.storage.catalog.backends.backend import open_backend
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.backends.object_store import ObjectBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.rollback_records import Rollback
from ckptman.storage.catalog.tiers import TierOwner, make_identity, mark_tier, read_mark
from ckptman.storage.format.paths import MANIFEST
from ckptman.storage.transfer.copy import CopyOptions, copy_checkpoint
from tests.helpers.checkpoints import commit
from tests.helpers.faulty_disk import holds
from tests.helpers.object_store import bucket_fixture, proxy_fixture

__all__ = ["bucket_fixture", "proxy_fixture"]

NAME = "step-0000000100"
ROLLBACK = Rollback(id="0123456789abcdef", to_step=100, time_seconds=1.0, why="a spike")


@pytest.fixture(params=["folder", "memory of fsspec", "s3"])
def backend(request, tmp_path):
    if request.param == "folder":
        made = LocalBackend(tmp_path / "place")
    elif request.param == "s3":
        request.getfixturevalue("proxy")
        made = open_backend(f"s3://{request.getfixturevalue('bucket')}/runs")
    else:
        made = ObjectBackend(f"memory://contract{tmp_path.name}/runs")
    made.make_tier()
    return made


@pytest.fixture
def source(tmp_path):
    for step in (100, 200, 300):
        commit(tmp_path / "source", step)
    return tmp_path / "source"


@pytest.fixture
def filled(backend, source):
    """The backend with a copy of each checkpoint of the source."""
    for entry in Catalog(source).complete():
        copy_checkpoint(entry, backend)
    return backend


def steps(backend):
    return [entry.step for entry in backend.list() if entry.complete]


def test_what_holds_nothing_lists_nothing_and_a_draft_does_not_count(backend, source):
    backend.check_there()
    backend.prune(KeepLast(1), lambda records: True)
    facts = LocalBackend(source).open(Catalog(source).entry(100)).facts
    with backend.receive(facts) as draft, draft.claimed(False):
        assert steps(backend) == []
        draft.abandon()
    assert backend.list() == []
    assert list(backend.rollbacks()) == []


def test_what_was_copied_there_is_listed_in_order_of_commit_and_copied_back_as_it_was(filled, source, tmp_path):
    filled.settle()
    assert steps(filled) == [100, 200, 300]
    entry, original = filled.list()[0], Catalog(source).entry(100)
    assert entry.where == f"{filled.where}/{NAME}"
    assert entry.was_committed
    assert entry.may_go
    assert (entry.identity, entry.record().bytes) == (original.identity, original.record().bytes)
    assert entry.record().verified, "no copy is there that was not read back"
    for entry in filled.list():
        with filled.reading(entry, "a test"):
            copied = copy_checkpoint(entry, LocalBackend(tmp_path / "back"), source=filled)
        assert copied.source == entry.where
    assert holds(tmp_path / "back") == holds(source)


def test_the_files_of_an_entry_are_read_by_range_until_it_is_deleted(filled, source):
    first = filled.list()[0]
    original = filled.open(first)
    assert MANIFEST not in original.facts.sizes
    for name, size in original.facts.sizes.items():
        with contextlib.closing(original.open(name)) as file:
            found = bytes(file.read(0, memoryview(bytearray(size))))
            assert found == (source / NAME / name).read_bytes()
            assert bytes(file.read(size // 2, memoryview(bytearray(1)))) == found[size // 2 : size // 2 + 1]
    assert original.lost() is None
    filled.prune(KeepLast(2), lambda records: False)
    assert steps(filled) == [100, 200, 300]
    for _ in range(2):
        filled.prune(KeepLast(2), lambda records: [each.step for each in records][-1] == 300)
        assert steps(filled) == [200, 300]
    assert original.lost() is not None
    with pytest.raises(NotFoundError):
        filled.open(first)


def test_a_copy_that_is_there_is_not_made_again_and_another_is_not_replaced(backend, source, tmp_path):
    entry, other = Catalog(source).entry(100), commit(tmp_path / "other", 100, rows=16)
    assert not copy_checkpoint(entry, backend).already
    assert copy_checkpoint(entry, backend).already
    with pytest.raises(ExistsError, match="--overwrite"):
        copy_checkpoint(other, backend)
    assert not copy_checkpoint(other, backend, CopyOptions(overwrite=True)).already
    assert {each.identity for each in backend.list() if each.step == 100} == {other.identity}


def test_notes_are_created_once_replaced_as_a_whole_and_rollbacks_handed_on_once(backend):
    assert backend.read_note("a.json") is None
    assert backend.create_note("a.json", b"one")
    assert not backend.create_note("a.json", b"two")
    assert backend.read_note("a.json") == b"one"
    backend.write_note("a.json", b"three")
    assert backend.read_note("a.json") == b"three"
    for _ in range(2):
        backend.copy_rollbacks([ROLLBACK])
    assert list(backend.rollbacks()) == [ROLLBACK]
    assert backend.list() == []


def test_a_tier_belongs_to_one_root(backend, source):
    make_identity(source, "run")
    mark_tier(source, backend, "run", renew=False)
    assert read_mark(backend).run_id == "run"
    backend.write_note("tier-of.json", TierOwner(id="0" * 32).to_json()[:-5])
    with pytest.raises(CorruptError, match=r"tier-of\.json is not what ckptman wrote there"):
        read_mark(backend)
