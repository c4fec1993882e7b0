"""`verified.json`: it says what was proved of the checkpoint that it lies in, of that one alone, and never too much."""

import errno
import json
import os
import shutil
import threading
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptman.policies.retention_plan import KeepLast
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.catalog.prune import execute, plan_prune
from ckptman.storage.catalog.verified import VERIFIED, forget_verified, identify, note_verified
from ckptman.storage.format.manifest import missing_file
from tests.helpers.checkpoints import commit, note_in, steps_of
from tests.helpers.faulty_disk import WHEN, Death, FaultyDisk, faults, on_disk

BOTH = ("digests", "coverage")


@pytest.fixture
def entry(tmp_path):
    return commit(tmp_path / "root", 100)


def note(entry, levels=BOTH, now=1000.0, version="0.1.0", **more):
    identity = identify(entry.path, entry.require_manifest())
    with mock.patch("time.time", return_value=now), mock.patch("ckptman.storage.catalog.verified.__version__", version):
        note_verified(entry.path, identity, levels=levels, **more)


def noted(entry):
    """When, with which version, and how it was verified; and for which numbers of ranks."""
    found = note_in(entry.path)
    return (found.time_seconds, found.ckptman_version, found.levels), (found.world_sizes, found.plan_world_sizes)


def test_what_was_proved_is_remembered_beside_the_manifest(entry):
    before = (entry.path / "manifest.json").read_bytes()
    assert note_in(entry.path) is None
    assert not entry.record().verified
    note(entry, world_sizes=[4, 1, 4], meshes=[(2, 2)], plan_world_sizes=[1024])
    assert noted(entry) == ((1000.0, "0.1.0", BOTH), ((1, 4), (1024,)))
    assert note_in(entry.path).meshes == ((2, 2),)
    assert entry.record().verified
    assert (entry.path / "manifest.json").read_bytes() == before
    assert missing_file(entry.path, entry.require_manifest()) is None


def test_what_is_weaker_adds_and_takes_nothing_away(entry):
    note(entry, world_sizes=[8])
    note(entry, ("coverage",), now=2000.0, plan_world_sizes=[4096], version="0.2.0")
    assert noted(entry) == ((1000.0, "0.1.0", BOTH), ((8,), (4096,)))
    note(entry, now=3000.0, version="0.2.0")
    assert noted(entry) == ((3000.0, "0.2.0", BOTH), ((8,), (4096,)))


def test_what_was_only_planned_is_not_verified(entry):
    note(entry, ("coverage",), plan_world_sizes=[4096])
    assert not note_in(entry.path).every_byte
    assert not entry.record().verified


def test_a_note_counts_for_the_folder_and_the_save_it_was_made_of(entry, tmp_path):
    note(entry)
    text = (entry.path / VERIFIED).read_bytes()
    other = commit(tmp_path / "root", 200)
    (other.path / VERIFIED).write_bytes(text)
    assert note_in(other.path) is None
    note(other, ("coverage",))
    assert note_in(other.path).levels == ("coverage",), "and adds nothing either"
    copy = tmp_path / "copy" / entry.path.name
    shutil.copytree(entry.path, copy)
    assert note_in(copy) is None
    again = commit(tmp_path / "root", 100)
    assert note_in(again.path) is None
    (again.path / VERIFIED).write_bytes(text)
    assert note_in(again.path) is None
    note(again)
    again.path.rename(tmp_path / "elsewhere")
    assert note_in(tmp_path / "elsewhere") is not None


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 2},
        {"manifest_digest": "0" * 32},
        {"files_digest": "0" * 32},
        {"levels": ["everything"]},
        {"time_seconds": "yesterday"},
        {"time_seconds": float("inf")},
        {"world_sizes": [0]},
        {"world_sizes": "all"},
        {"more": 1},
        {"ckptman_version": "9" * 101},
    ],
)
def test_a_lie_is_not_believed(change, entry):
    note(entry)
    raw = json.loads((entry.path / VERIFIED).read_bytes())
    (entry.path / VERIFIED).write_text(json.dumps({**raw, **change}))
    assert note_in(entry.path) is None
    note(entry)
    assert note_in(entry.path).levels == BOTH


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.rename(path.with_name("note")).with_name(VERIFIED).symlink_to("note"),
        lambda path: path.unlink() or os.mkfifo(path),
        lambda path: path.write_bytes(path.read_bytes() + b" " * 2**20),
        lambda path: path.write_bytes(path.read_bytes()[:-5]),
        lambda path: path.write_bytes(b"[" * 200_000),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink() or path.mkdir(),
    ],
    ids=["link", "pipe", "huge", "no JSON", "deep", "empty", "folder"],
)
def test_what_is_no_note_is_none(spoil, entry):
    path = entry.path / VERIFIED
    note(entry)
    spoil(path)
    assert note_in(entry.path) is None
    assert not entry.record().verified
    if not path.is_dir():
        note(entry)
        assert note_in(entry.path).levels == BOTH
        assert not path.is_symlink()


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_no_bytes_of_a_note_make_anything_fail(data, entry):
    (entry.path / VERIFIED).write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
    assert note_in(entry.path) is None
    assert not entry.record().verified


def test_it_is_taken_back(entry):
    forget_verified(entry.path)  # nothing there: no error
    note(entry)
    forget_verified(entry.path)
    assert not (entry.path / VERIFIED).exists()


@pytest.mark.parametrize(("error", "when", "least"), [(None, WHEN, 5), (errno.EROFS, ("before",), 1)])
def test_a_crash_or_a_disk_that_refuses_leaves_the_old_note_or_the_new_one(error, when, least, tmp_path):
    for number, fault in enumerate(faults(error, when)):
        entry, disk = commit(tmp_path / str(number), 100), FaultyDisk(fault)
        note(entry)
        try:
            with on_disk(disk):
                note(entry, now=2000.0)
        except Death:
            assert error is None
        except OSError as refused:
            assert refused.errno == error
        assert note_in(entry.path).time_seconds in (1000.0, 2000.0)
        assert missing_file(entry.path, entry.require_manifest()) is None
        if not disk.struck:
            break
    assert number > least


def test_several_at_once_leave_a_note_that_holds(entry):
    identity = identify(entry.path, entry.require_manifest())

    def verify(number):
        note_verified(entry.path, identity, levels=BOTH, world_sizes=[number])

    threads = [threading.Thread(target=verify, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = note_in(entry.path)
    assert found.levels == BOTH
    assert found.world_sizes
    assert set(found.world_sizes) <= set(range(1, 9))
    assert [path.name for path in entry.path.iterdir() if path.name.startswith(VERIFIED)] == [VERIFIED]


def test_retention_keeps_the_newest_that_was_verified(tmp_path):
    entries = [commit(tmp_path, step) for step in (100, 200, 300, 400)]
    note(entries[0])
    note(entries[1])
    note(entries[2], ("coverage",), plan_world_sizes=[8])
    plan = plan_prune(tmp_path, KeepLast(1))
    assert [(each.record.step, each.reasons[0]) for each in plan.verdicts if each.keep] == [
        (200, "newest verified"),
        (400, "newest"),
    ]
    execute(tmp_path, plan, "0123abcd-1")
    assert steps_of(Catalog(tmp_path).scan()) == [200, 400]
