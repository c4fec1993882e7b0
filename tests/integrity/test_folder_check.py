"""The default level of `verify`: all damage of every kind is found, with the blocks and the tensors it touches."""

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.catalog import Entry
from ckptman.format.manifest import read_manifest
from ckptman.format.paths import METADATA, blocks_name, data_name, new_nonce, step_folder
from ckptman.integrity.damage_report import runs_of
from ckptman.integrity.folder_check import check_coverage, check_sizes, verify_folder
from ckptman.io import file_reader, file_scan
from ckptman.io.checksums import BLOCK_BYTES, digest_file
from ckptman.io.file_scan import default_threads, scan
from ckptman.io.threads import STRIDE_BYTES, THREADS_ENV
from tests.helpers.checkpoints import QuickDisk, blocks_of, index_files
from tests.helpers.faulty_disk import manifest_of

TENSORS = {"large": 5 * BLOCK_BYTES // 4, "small": 256, "tail": BLOCK_BYTES // 4}
"""Elements of float32 that each rank has of each tensor, in the order of their places: 5 blocks, 1 KiB, 1 block."""
RANKS = 2


def _save(root, step=100, seed=0):
    """A checkpoint of three tensors in two data files: large in blocks 0 to 4, small in 5, tail in 5 and 6."""
    place = LocalBackend(root, QuickDisk())
    root.mkdir(exist_ok=True)
    draft = Path(place.begin(step_folder(step), new_nonce()))
    files = {METADATA: b"nothing that anybody should unpickle"}
    parts = []
    generator = np.random.default_rng(seed)
    for rank in range(RANKS):
        at, rows = 0, []
        for number, elements in enumerate(TENSORS.values()):
            rows.append([number, at, elements * 4, at, rank * elements, elements])
            at += elements * 4
        files[data_name(rank)] = data = generator.bytes(at)
        files[blocks_name(rank)] = blocks_of(data)
        parts.append({1: np.array(rows)})
    described = [(name, "float32", (RANKS * elements,)) for name, elements in TENSORS.items()]
    files |= index_files(described, parts)
    for name, data in files.items():
        (draft / name).write_bytes(data)
    return place.commit(str(draft), manifest_of(root, step, files))


def _flip(path, *places):
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 1
    path.write_bytes(data)


def _verify(entry, **options):
    return verify_folder(entry.path, entry.require_manifest(), **options)


def test_what_is_good_is_good(tmp_path):
    entry = _save(tmp_path)
    told = []
    report = _verify(entry, done=told.append)
    assert report.good
    assert report.problems == report.unread == report.remarks == ()
    assert report.files == 7
    assert report.bytes == sum(told) == entry.require_manifest().total_bytes
    assert check_coverage(entry.path, entry.require_manifest()) == []


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_all_damage_of_all_files_is_found_at_once(threads, tmp_path):
    entry = _save(tmp_path)
    _flip(entry.path / "__0_0.distcp", 5, 2 * BLOCK_BYTES, 4 * BLOCK_BYTES - 1, 5 * BLOCK_BYTES + 7)
    _flip(entry.path / "__1_0.distcp", 6 * BLOCK_BYTES)
    _flip(entry.path / "blocks-00001.bin", 3)
    report = _verify(entry, threads=threads)
    assert [each.file for each in report.damage] == ["__0_0.distcp", "__1_0.distcp", "blocks-00001.bin"]
    first, second, third = report.damage
    assert first.blocks == ((0, 0), (2, 3), (5, 5))
    assert first.bytes == 4 * BLOCK_BYTES
    assert first.holds == ("large", "small", "tail")
    assert str(first) == (
        f"__0_0.distcp does not match its digest: 4 of 7 blocks (0, 2-3, 5; {4 * BLOCK_BYTES} bytes) have changed "
        "since they were saved; what lies there: large, small, tail"
    )
    # Its own list of digests is damaged: which block it is cannot be told, so all of it is meant.
    assert (second.blocks, second.bytes) == ((), 6 * BLOCK_BYTES + 1024)
    assert "its bytes have changed" in second.what
    assert third.what == "does not match its digest: its bytes have changed since they were saved"
    assert third.holds is None


def test_a_block_between_two_tensors_names_only_those_that_touch_it(tmp_path):
    entry = _save(tmp_path)
    _flip(entry.path / "__1_0.distcp", 3 * BLOCK_BYTES)
    (found,) = _verify(entry).damage
    assert (found.file, found.blocks, found.holds) == ("__1_0.distcp", ((3, 3),), ("large",))


def test_a_file_that_was_cut_short_says_what_of_it_is_left(tmp_path):
    entry = _save(tmp_path)
    path = entry.path / "__0_0.distcp"
    size = path.stat().st_size
    os.truncate(path, 5 * BLOCK_BYTES + 10)
    (found,) = _verify(Entry(entry.step, entry.path, entry.manifest)).damage
    assert (found.blocks, found.holds) == (((5, 6),), ("small", "tail"))
    assert found.what.startswith(f"has {5 * BLOCK_BYTES + 10} bytes instead of {size}: 2 of 7 blocks (5-6; ")
    os.truncate(path, 0)
    (found,) = _verify(entry).damage
    assert found.blocks == ((0, 6),)


def test_a_file_that_grew_may_still_hold_all_that_was_saved(tmp_path):
    entry = _save(tmp_path)
    path = entry.path / "__0_0.distcp"
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"more")
    (found,) = _verify(entry).damage
    assert (
        str(found)
        == f"__0_0.distcp has {size + 4} bytes instead of {size}; the first {size} of them are what was saved"
    )
    _flip(path, 0)
    (found,) = _verify(entry).damage
    assert (found.blocks, found.holds) == (((0, 0),), ("large",))


def test_missing_files_are_all_named_with_what_is_lost(tmp_path):
    entry = _save(tmp_path)
    (entry.path / "__0_0.distcp").unlink()
    (entry.path / "blocks-00001.bin").unlink()
    _flip(entry.path / "__1_0.distcp", 0)
    found = _verify(entry).damage
    assert [str(each) for each in found] == [
        "__0_0.distcp is missing; what lies there: large, small, tail",
        "__1_0.distcp does not match its digest: its bytes have changed since they were saved; "
        "what lies there: large, small, tail",
        "blocks-00001.bin is missing",
    ]


def test_without_an_index_nothing_is_said_of_tensors(tmp_path):
    entry = _save(tmp_path)
    _flip(entry.path / "__0_0.distcp", 0)
    (entry.path / "index.json").unlink()
    first, second = _verify(entry).damage
    assert (first.blocks, first.holds) == (((0, 0),), None)
    assert str(second) == "index.json is missing"


def test_two_files_that_changed_places_are_recognised(tmp_path):
    entry = _save(tmp_path)
    one, other = entry.path / "__0_0.distcp", entry.path / "__1_0.distcp"
    one.rename(entry.path / "aside")
    other.rename(one)
    (entry.path / "aside").rename(other)
    texts = _verify(entry).problems
    assert len(texts) == 2
    assert "__0_0.distcp does not match its digest: it holds what was saved as __1_0.distcp" in texts[0]
    assert "__1_0.distcp does not match its digest: it holds what was saved as __0_0.distcp" in texts[1]


def test_an_older_file_under_the_new_name_is_damage(tmp_path):
    older, newer = _save(tmp_path, 100, seed=1), _save(tmp_path, 200, seed=2)
    for name in ("__0_0.distcp", "blocks-00000.bin"):
        shutil.copyfile(older.path / name, newer.path / name)
    found = _verify(newer).damage
    assert [each.file for each in found] == ["__0_0.distcp", "blocks-00000.bin"]
    assert found[0].bytes == (newer.path / "__0_0.distcp").stat().st_size


@pytest.mark.parametrize("name", ["__0_0.distcp", "index.json"])
@pytest.mark.parametrize("what", ["link", "folder", "pipe"])
def test_what_is_no_file_is_not_opened(what, name, tmp_path):
    entry = _save(tmp_path)
    path = entry.path / name
    path.rename(tmp_path / "real")
    {"link": lambda: path.symlink_to(tmp_path / "real"), "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}[what]()
    (found,) = _verify(entry).damage
    assert str(found).startswith(f"{name} is not a regular file")


def test_files_that_nobody_knows_are_a_remark(tmp_path):
    entry = _save(tmp_path)
    for name in ("core.123", "verified.json", "verified.json.tmp-12-0123abcd"):
        (entry.path / name).touch()
    report = _verify(entry)
    assert report.good
    assert report.remarks == ("core.123 is not in the manifest: no load reads it",)


def test_sizes_alone_find_what_names_and_sizes_tell(tmp_path):
    entry = _save(tmp_path)
    manifest = entry.require_manifest()
    _flip(entry.path / "__0_0.distcp", 0)
    assert check_sizes(entry.path, manifest).good
    os.truncate(entry.path / "__0_0.distcp", 1)
    (entry.path / "chunks.bin").unlink()
    assert [each.file for each in check_sizes(entry.path, manifest).damage] == ["__0_0.distcp", "chunks.bin"]


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    entry = _save(tmp_path)
    real = file_reader.open_regular

    def refuse(path, **_):
        if path.name == "__1_0.distcp":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(file_reader, "open_regular", refuse)
    report = _verify(entry)
    assert not report.good
    assert report.damage == ()
    assert report.unread == ("__1_0.distcp cannot be read: Permission denied",)


def test_blocks_that_the_disk_does_not_give_are_named(tmp_path, monkeypatch):
    entry = _save(tmp_path)
    _flip(entry.path / "__0_0.distcp", 0)
    bad = 3 * BLOCK_BYTES + 5
    real, inode = os.preadv, (entry.path / "__0_0.distcp").stat().st_ino

    def fail(fd, buffers, offset, *flags):
        size = sum(map(len, buffers))
        if os.fstat(fd).st_ino == inode and offset <= bad < offset + size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", fail)
    unreadable, changed = _verify(entry).damage
    assert unreadable.blocks == ((3, 3),)
    assert f"cannot be read in 1 of 7 blocks (3; {BLOCK_BYTES} bytes): Input/output error" in str(unreadable)
    assert (changed.blocks, changed.holds) == (((0, 0),), ("large",))


def test_a_file_that_is_written_to_meanwhile_is_not_proved(tmp_path):
    entry = _save(tmp_path)
    wrote = []

    def write(done):
        if not wrote:
            wrote.append(done)
            _flip(entry.path / "__0_0.distcp", 0)

    report = _verify(entry, threads=1, done=write)
    assert not report.good
    assert report.unread == ("__0_0.distcp was written to while it was verified",)


def test_a_file_that_goes_away_meanwhile_is_missing(tmp_path):
    entry = _save(tmp_path)
    report = _verify(entry, threads=1, done=lambda _: (entry.path / "chunks.bin").unlink(missing_ok=True))
    assert [str(each) for each in report.damage] == ["chunks.bin is missing"]
    assert report.unread == ()


def test_a_file_that_is_removed_after_it_was_read_is_not_proved(tmp_path):
    entry = _save(tmp_path)
    report = _verify(entry, threads=1, done=lambda _: (entry.path / "__0_0.distcp").unlink(missing_ok=True))
    assert report.unread == ("__0_0.distcp was removed while it was verified",)


@pytest.mark.parametrize("block", [512, 4096, 12288, BLOCK_BYTES, 6 * 1024 * 1024])
@pytest.mark.parametrize("cold", [False, True])
def test_digests_are_those_of_one_reading_whatever_the_blocks(block, cold, tmp_path, monkeypatch):
    if cold:
        monkeypatch.setattr(file_scan.ScanFile, "is_cold", lambda *_: True)
    sizes = {"empty": 0, "one": 1, "page": 4096, "odd": 3 * block + 77, "long": 2 * STRIDE_BYTES + block + 5}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(np.random.default_rng(size).bytes(size))
    found = {}
    scan(tmp_path, list(sizes.items()), block, finish=lambda each: found.update({each.name: each}), threads=3)
    assert found.keys() == sizes.keys()
    for name, size in sizes.items():
        assert (size, bytes(found[name].blocks)) == (size, b"".join(digest_file(tmp_path / name, block)[1]))


@pytest.fixture
def apart(monkeypatch):
    """Processes are worth it whatever there is to read."""
    monkeypatch.setattr(file_scan, "LEAST_BYTES", 0)
    return monkeypatch


def _digests(folder, sizes, **more):
    found = {}
    scan(folder, list(sizes.items()), BLOCK_BYTES, finish=lambda each: found.update({each.name: each}), **more)
    return found


def _assert_right(folder, found, sizes):
    assert found.keys() == sizes.keys()
    for name, size in sizes.items():
        assert (size, bytes(found[name].blocks)) == (size, b"".join(digest_file(folder / name)[1]))
        assert (found[name].unreadable, found[name].refused) == ({}, None)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    sizes = {"a": 3 * STRIDE_BYTES + 1, "b": 0, "c": 5000, "d": 2 * STRIDE_BYTES, "e": STRIDE_BYTES + BLOCK_BYTES + 7}
    for name, size in sizes.items():
        (folder / name).write_bytes(np.random.default_rng(size).bytes(size))
    return folder, sizes


@pytest.mark.parametrize("cached", [True, False, None])
def test_processes_find_the_same_digests(cached, large, apart):
    folder, sizes = large
    apart.setattr(file_reader.FileReader, "is_cached", lambda *_: cached)
    # Nothing is left for this process to read.
    apart.setattr(file_scan.ScanFile, "read", lambda *_: pytest.fail("not apart"))
    told = []
    _assert_right(folder, _digests(folder, sizes, threads=2, processes=True, done=told.append), sizes)
    assert sum(told) == sum(sizes.values())


def test_what_a_process_that_died_left_undone_is_read_here(large, apart):
    folder, sizes = large
    real, here = file_scan.ScanFile.digests, os.getpid()

    def die(self, low, high, *more):
        if os.getpid() == here:
            return real(self, low, high, *more)
        if low == STRIDE_BYTES:
            os.kill(os.getpid(), signal.SIGBUS)  # as a page does that is gone
        if low == 2 * STRIDE_BYTES:
            raise OSError(errno.EIO, "as a disk does")
        return real(self, low, high, *more)

    apart.setattr(file_scan.ScanFile, "digests", die)
    for processes in (1, 2, 5):
        _assert_right(folder, _digests(folder, sizes, threads=processes, processes=True), sizes)


def test_where_there_can_be_no_process_threads_do_it(large, apart):
    folder, sizes = large

    def refuse():
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    apart.setattr(os, "fork", refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    _assert_right(folder, _digests(folder, sizes, threads=2, processes=True), sizes)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_no_process_outlives_an_interruption(large, apart):
    folder, sizes = large

    def stop(done):
        raise KeyboardInterrupt

    before, others = len(list(Path("/proc/self/fd").iterdir())), set(psutil.Process().children())
    with pytest.raises(KeyboardInterrupt):
        _digests(folder, sizes, threads=3, processes=True, done=stop)
    left = set(psutil.Process().children()) - others
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


ORPHANS = """
import os, signal, sys, time
from pathlib import Path
from ckptman.io import file_scan
file_scan.LEAST_BYTES = 0
file_scan.MOST_PIECES = 1
real = file_scan.ScanFile.digests
def slow(*arguments):
    time.sleep(0.2)
    return real(*arguments)
file_scan.ScanFile.digests = slow
folder = Path(sys.argv[1])
sizes = [(path.name, path.stat().st_size) for path in folder.iterdir()] * 40
print("begun", flush=True)
file_scan.scan(folder, sizes, 32768, finish=lambda each: None, threads=3, processes=True,
               done=lambda size: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_processes_whose_parent_was_killed_end_too(large):
    command = [sys.executable, "-c", ORPHANS, str(large[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        # They have our pipe, too: it ends when the last of them has ended.
        assert process.communicate(timeout=20)[0] == "begun\n"
    assert process.returncode == -signal.SIGKILL


def test_damage_is_found_apart_too(tmp_path, apart):
    entry = _save(tmp_path)
    _flip(entry.path / "__1_0.distcp", 3 * BLOCK_BYTES)
    (entry.path / "chunks.bin").unlink()
    found = verify_folder(entry.path, entry.require_manifest(), processes=True).damage
    assert [(each.file, each.blocks) for each in found] == [("__1_0.distcp", ((3, 3),)), ("chunks.bin", ())]


def test_threads_follow_the_cores_or_the_environment(monkeypatch):
    monkeypatch.delenv(THREADS_ENV, raising=False)
    assert 1 <= default_threads() <= 8
    monkeypatch.setenv(THREADS_ENV, "3")
    assert default_threads() == 3


def test_what_is_called_from_the_threads_may_fail(tmp_path):
    entry = _save(tmp_path)

    def stop(done):
        raise KeyboardInterrupt

    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(KeyboardInterrupt):
        _verify(entry, threads=2, done=stop)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@given(st.sets(st.integers(0, 200)))
def test_runs_are_the_numbers(numbers):
    runs = list(runs_of(sorted(numbers)))
    assert [number for first, last in runs for number in range(first, last + 1)] == sorted(numbers)
    assert all(later - last > 1 for (_, last), (later, _) in itertools.pairwise(runs))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flips_are_found_exactly(data, tmp_path):
    entry = _once(tmp_path)
    manifest = entry.require_manifest()
    name = data.draw(st.sampled_from(sorted(manifest.files)))
    places = data.draw(st.sets(st.integers(0, manifest.files[name].bytes - 1), min_size=1, max_size=6))
    _flip(entry.path / name, *places)
    try:
        (found,) = _verify(entry).damage
        assert found.file == name
        if name.endswith(".distcp"):
            wrong = {place // BLOCK_BYTES for place in places}
            told = {block for first, last in found.blocks for block in range(first, last + 1)}
            assert told == wrong
            assert set(found.holds or ()) == {each for block in wrong for each in _in_block(block)}
    finally:
        _flip(entry.path / name, *places)


def _in_block(block):
    at, names = 0, set()
    for name, elements in TENSORS.items():
        if at < (block + 1) * BLOCK_BYTES and block * BLOCK_BYTES < at + elements * 4:
            names.add(name)
        at += elements * 4
    return names


def _once(tmp_path):
    path = tmp_path / step_folder(100)
    return Entry(100, path, read_manifest(path)) if path.exists() else _save(tmp_path)
