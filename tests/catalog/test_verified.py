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

from ckptman.catalog.catalog import Catalog
from ckptman.catalog.prune import execute, plan_prune
from ckptman.catalog.verified import VERIFIED, forget_verified, identify, note_verified
from ckptman.format.manifest import missing_file
from ckptman.io.durable_files import DISK
from ckptman.policies.retention import KeepLast
from tests.helpers.checkpoints import commit, note_in, steps_of
from tests.helpers.faulty_disk import Death, FaultyDisk, faults

BOTH = ("digests", "coverage")


def _note(entry, levels=BOTH, now=1000.0, disk=DISK, **more):
    version = more.pop("version", "0.1.0")
    identity = identify(entry.path, entry.require_manifest())
    with mock.patch("time.time", return_value=now), mock.patch("ckptman.catalog.verified.__version__", version):
        note_verified(entry.path, identity, levels=levels, disk=disk, **more)


def _read(entry):
    note = note_in(entry.path)
    assert note is not None
    return note


def test_what_was_proved_is_remembered_beside_the_manifest(tmp_path):
    entry = commit(tmp_path, 100)
    before = (entry.path / "manifest.json").read_bytes()
    assert note_in(entry.path) is None
    assert not entry.record().verified
    _note(entry, world_sizes=[4, 1, 4], meshes=[(2, 2)], plan_world_sizes=[1024])
    note = _read(entry)
    assert (note.time_seconds, note.ckptman_version, note.levels) == (1000.0, "0.1.0", BOTH)
    assert (note.world_sizes, note.meshes, note.plan_world_sizes) == ((1, 4), ((2, 2),), (1024,))
    assert entry.record().verified
    assert (entry.path / "manifest.json").read_bytes() == before
    assert missing_file(entry.path, entry.require_manifest()) is None


def test_what_is_weaker_adds_and_takes_nothing_away(tmp_path):
    entry = commit(tmp_path, 100)
    _note(entry, world_sizes=[8], version="0.1.0")
    _note(entry, ("coverage",), now=2000.0, plan_world_sizes=[4096], version="0.2.0")
    note = _read(entry)
    assert (note.time_seconds, note.ckptman_version, note.levels) == (1000.0, "0.1.0", BOTH)
    assert (note.world_sizes, note.plan_world_sizes) == ((8,), (4096,))
    _note(entry, now=3000.0, version="0.2.0")
    note = _read(entry)
    assert (note.time_seconds, note.ckptman_version) == (3000.0, "0.2.0")
    assert (note.world_sizes, note.plan_world_sizes) == ((8,), (4096,))


def test_what_was_only_planned_is_not_verified(tmp_path):
    entry = commit(tmp_path, 100)
    _note(entry, ("coverage",), plan_world_sizes=[4096])
    assert not _read(entry).every_byte
    assert not entry.record().verified


def test_a_note_from_elsewhere_does_not_count(tmp_path):
    one, other = commit(tmp_path, 100), commit(tmp_path, 200)
    _note(one)
    shutil.copy(one.path / VERIFIED, other.path / VERIFIED)
    assert note_in(other.path) is None
    _note(other, ("coverage",))
    assert _read(other).levels == ("coverage",)  # and adds nothing either


def test_a_copy_of_the_folder_was_not_verified(tmp_path):
    entry = commit(tmp_path, 100)
    _note(entry)
    shutil.copytree(entry.path, tmp_path / "copy" / entry.path.name)
    assert note_in(tmp_path / "copy" / entry.path.name) is None
    entry.path.rename(tmp_path / "elsewhere")
    assert note_in(tmp_path / "elsewhere") is not None


def test_a_step_that_is_saved_again_was_not_verified(tmp_path):
    entry = commit(tmp_path, 100)
    _note(entry)
    note = (entry.path / VERIFIED).read_bytes()
    again = commit(tmp_path, 100)
    assert note_in(again.path) is None
    (again.path / VERIFIED).write_bytes(note)
    assert note_in(again.path) is None


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 2},
        {"format_version": "1"},
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
def test_a_lie_is_not_believed(change, tmp_path):
    entry = commit(tmp_path, 100)
    _note(entry)
    raw = json.loads((entry.path / VERIFIED).read_bytes())
    (entry.path / VERIFIED).write_text(json.dumps({**raw, **change}))
    assert note_in(entry.path) is None or change == {"format_version": "1"}
    _note(entry)
    assert _read(entry).levels == BOTH


@pytest.mark.parametrize("what", ["link", "folder", "pipe", "huge", "deep", "no JSON", "empty"])
def test_what_is_no_note_is_none(what, tmp_path):
    entry = commit(tmp_path, 100)
    _note(entry)
    path = entry.path / VERIFIED
    good = path.read_bytes()
    path.unlink()
    if what == "link":
        (tmp_path / "note").write_bytes(good)
        path.symlink_to(tmp_path / "note")
    elif what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(
            {"huge": good + b" " * 2**20, "deep": b"[" * 200_000, "no JSON": good[:-5], "empty": b""}[what]
        )
    assert note_in(entry.path) is None
    assert not entry.record().verified
    if what != "folder":
        _note(entry)
        assert _read(entry).levels == BOTH
        assert not path.is_symlink()


@pytest.mark.slow
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_no_bytes_of_a_note_make_anything_fail(data, tmp_path):
    folder = tmp_path / "step-0000000100"
    entry = Catalog(tmp_path).entry(100) if folder.exists() else commit(tmp_path, 100)
    (folder / VERIFIED).write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
    assert note_in(folder) is None
    assert not entry.record().verified


def test_it_is_taken_back(tmp_path):
    entry = commit(tmp_path, 100)
    forget_verified(entry.path, DISK)  # nothing there: no error
    _note(entry)
    forget_verified(entry.path, DISK)
    assert not (entry.path / VERIFIED).exists()


def test_a_crash_leaves_the_old_note_or_the_new_one(tmp_path):
    for number, fault in enumerate(faults()):
        entry = commit(tmp_path / str(number), 100)
        _note(entry)
        disk = FaultyDisk(fault)
        try:
            _note(entry, now=2000.0, disk=disk)
        except Death:
            pass
        assert _read(entry).time_seconds in (1000.0, 2000.0)
        assert missing_file(entry.path, entry.require_manifest()) is None
        if not disk.struck:
            break
    assert number > 5


def test_a_disk_that_refuses_leaves_the_old_note_and_no_litter(tmp_path):
    for number, fault in enumerate(faults(errno.EROFS, ("before",))):
        entry = commit(tmp_path / str(number), 100)
        _note(entry)
        disk = FaultyDisk(fault)
        try:
            _note(entry, now=2000.0, disk=disk)
        except OSError as error:
            assert error.errno == errno.EROFS
        assert _read(entry).time_seconds in (1000.0, 2000.0)
        if not disk.struck:
            break
    assert number > 1


def test_several_at_once_leave_a_note_that_holds(tmp_path):
    entry = commit(tmp_path, 100)
    identity = identify(entry.path, entry.require_manifest())
    threads = [
        threading.Thread(
            target=note_verified,
            args=(entry.path, identity),
            kwargs={"levels": BOTH, "world_sizes": [number], "disk": DISK},
        )
        for number in range(1, 9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    note = _read(entry)
    assert note.levels == BOTH
    assert set(note.world_sizes) <= set(range(1, 9))
    assert note.world_sizes
    assert [path.name for path in entry.path.iterdir() if path.name.startswith(VERIFIED)] == [VERIFIED]


def test_retention_keeps_the_newest_that_was_verified(tmp_path):
    for step in (100, 200, 300, 400):
        commit(tmp_path, step)
    for step in (100, 200):
        _note(Catalog(tmp_path).entry(step))
    _note(Catalog(tmp_path).entry(300), ("coverage",), plan_world_sizes=[8])
    plan = plan_prune(tmp_path, KeepLast(1))
    assert [(each.record.step, each.keep) for each in plan.verdicts] == [
        (100, False),
        (200, True),
        (300, False),
        (400, True),
    ]
    assert plan.verdicts[1].reasons == ("newest verified",)
    execute(tmp_path, plan, "0123abcd-1")
    assert steps_of(Catalog(tmp_path).scan()) == [200, 400]
    assert not list(tmp_path.glob("*trash*"))
