"""The contract of `Backend`: one suite for every implementation."""

import pytest

from ckptman.catalog.backends.backend import open_backend
from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.backends.object_store import ObjectBackend
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.rollback_records import Rollback
from ckptman.catalog.tier_identity import Whose, make_identity, mark_tier, read_mark
from ckptman.errors import CorruptError, ExistsError, NotFoundError
from ckptman.format.paths import MANIFEST
from ckptman.policies.retention_rules import KeepLast
from ckptman.transfer.copy import CopyOptions, copy_checkpoint
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


def fill(backend, source):
    for entry in Catalog(source).complete():
        copy_checkpoint(entry, backend)


def steps(backend):
    return [entry.step for entry in backend.list() if entry.complete]


def test_what_holds_nothing_lists_nothing(backend):
    backend.check_there()
    assert backend.list() == []
    assert list(backend.rollbacks()) == []
    backend.prune(KeepLast(1), lambda records: True)


def test_what_was_copied_there_is_listed_in_order_of_commit(backend, source):
    fill(backend, source)
    backend.settle()
    assert steps(backend) == [100, 200, 300]
    entry = backend.list()[0]
    assert entry.where == f"{backend.where}/{NAME}"
    assert entry.was_committed
    assert entry.may_go
    original = Catalog(source).entry(100)
    assert entry.identity == original.identity
    assert entry.record().bytes == original.record().bytes
    assert entry.record().verified, "no copy is there that was not read back"


def test_it_is_copied_back_as_it_was(backend, source, tmp_path):
    fill(backend, source)
    for entry in backend.list():
        with backend.reading(entry, "a test"):
            copied = copy_checkpoint(entry, LocalBackend(tmp_path / "back"), source=backend)
        assert copied.source == entry.where
    assert holds(tmp_path / "back") == holds(source)


def test_the_files_of_an_entry_are_read_by_range(backend, source):
    fill(backend, source)
    original = backend.open(backend.list()[0])
    assert MANIFEST not in original.facts.sizes
    for name, size in original.facts.sizes.items():
        file = original.open(name)
        try:
            found = bytes(file.read(0, size, memoryview(bytearray(max(size, 1)))))
            assert found == (source / NAME / name).read_bytes()
            assert bytes(file.read(size // 2, 1, memoryview(bytearray(1)))) == found[size // 2 : size // 2 + 1]
        finally:
            file.close()
    assert original.lost() is None


def test_what_was_deleted_is_gone_and_known_to_be(backend, source):
    fill(backend, source)
    first = backend.list()[0]
    original = backend.open(first)
    backend.prune(KeepLast(2), lambda records: True)
    assert steps(backend) == [200, 300]
    assert original.lost() is not None
    with pytest.raises(NotFoundError):
        backend.open(first)


def test_a_copy_that_is_there_is_not_made_again_and_another_is_not_replaced(backend, source, tmp_path):
    fill(backend, source)
    entry, other = Catalog(source).entry(100), commit(tmp_path / "other", 100, rows=16)
    assert copy_checkpoint(entry, backend).already
    with pytest.raises(ExistsError, match="--overwrite"):
        copy_checkpoint(other, backend)
    assert not copy_checkpoint(other, backend, CopyOptions(overwrite=True)).already
    assert {each.identity for each in backend.list() if each.step == 100} == {other.identity}


def test_a_draft_is_nothing_that_counts(backend, source):
    facts = LocalBackend(source).open(Catalog(source).entry(100)).facts
    with backend.receive(facts) as draft, draft.claimed(False):
        assert steps(backend) == []
        draft.abandon()
    assert backend.list() == []


@pytest.mark.parametrize("again", [1, 2])
def test_prune_deletes_what_no_rule_keeps(again, backend, source):
    fill(backend, source)
    backend.prune(KeepLast(1), lambda records: False)
    assert steps(backend) == [100, 200, 300]
    for _ in range(again):
        backend.prune(KeepLast(1), lambda records: [each.step for each in records][-1] == 300)
    assert steps(backend) == [300]


def test_a_note_is_created_once_and_replaced_as_a_whole(backend):
    assert backend.read_note("a.json") is None
    assert backend.create_note("a.json", b"one")
    assert not backend.create_note("a.json", b"two")
    assert backend.read_note("a.json") == b"one"
    backend.write_note("a.json", b"three")
    assert backend.read_note("a.json") == b"three"


def test_a_rollback_is_handed_on_once(backend, source):
    fill(backend, source)
    for _ in range(2):
        backend.hand_on([ROLLBACK])
    assert list(backend.rollbacks()) == [ROLLBACK]
    assert steps(backend) == [100, 200, 300]


def test_a_tier_belongs_to_one_root(backend, source):
    make_identity(source, "run")
    mark_tier(source, backend, "run", renew=False)
    mark = read_mark(backend)
    assert mark is not None
    assert mark.run_id == "run"
    backend.write_note("tier-of.json", Whose(id="0" * 32).to_json()[:-5])
    with pytest.raises(CorruptError, match=r"tier-of\.json is not what ckptman wrote there"):
        read_mark(backend)
