"""The default level of `verify`: all damage of every kind is found, with the blocks and the tensors it touches."""

import errno
import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.format import coverage
from ckptman.storage.format.chunk_table import HEAD, ChunkTable, TensorRecord, assemble
from ckptman.storage.format.index import Index
from ckptman.storage.format.paths import METADATA, blocks_name, data_name, new_nonce, step_folder
from ckptman.storage.integrity import folder_check
from ckptman.storage.integrity.damage_report import runs_of
from ckptman.storage.integrity.folder_check import check_coverage, check_sizes, check_table, verify_folder
from ckptman.storage.io import file_reader, file_scan
from ckptman.storage.io.checksums import BLOCK_BYTES
from tests.helpers.checkpoints import blocks_of, index_files, quick_disk
from tests.helpers.faulty_disk import manifest_of

TENSORS = {"large": 5 * BLOCK_BYTES // 4, "small": 256, "tail": BLOCK_BYTES // 4}
"""Elements of float32 that each rank has of each tensor, in the order of their places: 5 blocks, 1 KiB, 1 block."""
SIZE = 4 * sum(TENSORS.values())
RANKS = 2
FIRST, SECOND = data_name(0), data_name(1)


@quick_disk()
def _save(root, step=100, seed=0):
    """A checkpoint of three tensors in two data files: large in blocks 0 to 4, small in 5, tail in 5 and 6."""
    place = LocalBackend(root)
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


@pytest.fixture
def entry(tmp_path):
    return _save(tmp_path)


def _flip(path, *places):
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 1
    path.write_bytes(data)


def _verify(entry, **options):
    return verify_folder(entry.path, entry.require_manifest(), **options)


def _open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_is_good_is_good(entry):
    told = []
    report = _verify(entry, done=told.append)
    assert report.good
    assert report.problems == report.unread == report.remarks == ()
    assert report.files == 7
    assert report.bytes == sum(told) == entry.require_manifest().total_bytes
    assert check_coverage(entry.path, entry.require_manifest()) == []


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_all_damage_of_all_files_is_found_at_once(threads, entry):
    _flip(entry.path / FIRST, 5, 2 * BLOCK_BYTES, 4 * BLOCK_BYTES - 1, 5 * BLOCK_BYTES + 7)
    _flip(entry.path / SECOND, 6 * BLOCK_BYTES)
    _flip(entry.path / "blocks-00001.bin", 3)
    first, second, third = _verify(entry, threads=threads).damage
    assert (first.file, first.blocks, first.bytes) == (FIRST, ((0, 0), (2, 3), (5, 5)), 4 * BLOCK_BYTES)
    assert str(first) == (
        f"__0_0.distcp does not match its digest: 4 of 7 blocks (0, 2-3, 5; {4 * BLOCK_BYTES} bytes) have changed "
        "since they were saved; what lies there: large, small, tail"
    )
    # Its own list of digests is damaged: which block it is cannot be told, so all of it is meant.
    assert (second.file, second.blocks, second.bytes) == (SECOND, (), SIZE)
    assert "its bytes have changed" in second.what
    assert str(third) == "blocks-00001.bin does not match its digest: its bytes have changed since they were saved"


def _remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def _resize(size):
    return lambda folder: os.truncate(folder / FIRST, size)


def _swap(folder):
    (folder / FIRST).rename(folder / "aside")
    (folder / SECOND).rename(folder / FIRST)
    (folder / "aside").rename(folder / SECOND)


def _both(one, other):
    return lambda folder: (one(folder), other(folder))


def _change(name):
    return lambda folder: _flip(folder / name, 0)


CHANGED = "have changed since they were saved"
CUT, GROWN = f"{FIRST} has {5 * BLOCK_BYTES + 10} bytes instead of {SIZE}", f"{FIRST} has {SIZE + 4} bytes instead"
ALL = "what lies there: large, small, tail"


@pytest.mark.parametrize(
    ("harm", "problems"),
    [
        (_resize(5 * BLOCK_BYTES + 10), [(CUT, "2 of 7 blocks (5-6; 132096 bytes) are gone", "there: small, tail")]),
        (_resize(0), [("has 0 bytes", "7 of 7 blocks (0-6; ", ALL)]),
        (_resize(SIZE + 4), [(GROWN, f"the first {SIZE} of them are what was saved")]),
        (_both(_resize(SIZE + 4), _change(FIRST)), [(GROWN, "1 of 7 blocks (0; ", "what lies there: large")]),
        (_both(_remove(FIRST), _change(SECOND)), [(f"{FIRST} is missing; {ALL}",), (SECOND, "1 of 7 blocks (0; ")]),
        (_remove(FIRST, "index.json"), [(f"{FIRST} is missing",), ("index.json is missing",)]),
        (_both(_remove("index.json"), _change(FIRST)), [(FIRST, "(0; 131072 bytes)", CHANGED), ("index.json",)]),
        (_both(_remove("blocks-00000.bin"), _change(FIRST)), [(FIRST, f"its bytes {CHANGED}", ALL), ("blocks-00000",)]),
        (_swap, [(FIRST, f"it holds what was saved as {SECOND}"), (SECOND, f"it holds what was saved as {FIRST}")]),
    ],
)
def test_damage_in_words(harm, problems, entry):
    harm(entry.path)
    found = _verify(entry).problems
    assert len(found) == len(problems)
    for text, parts in zip(found, problems):
        assert all(part in text for part in parts), (text, parts)
    if not (entry.path / "index.json").exists():
        assert "what lies there" not in "".join(found)


def test_an_older_file_under_the_new_name_is_damage(tmp_path):
    older, newer = _save(tmp_path, 100, seed=1), _save(tmp_path, 200, seed=2)
    for name in (FIRST, "blocks-00000.bin"):
        shutil.copyfile(older.path / name, newer.path / name)
    assert [(each.file, each.bytes) for each in _verify(newer).damage] == [(FIRST, SIZE), ("blocks-00000.bin", 112)]


@pytest.mark.parametrize("name", [FIRST, "index.json"])
@pytest.mark.parametrize("what", ["link", "folder", "pipe"])
def test_what_is_no_file_is_not_opened(what, name, entry, tmp_path):
    path = entry.path / name
    path.rename(tmp_path / "real")
    {"link": lambda: path.symlink_to(tmp_path / "real"), "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}[what]()
    (found,) = _verify(entry).damage
    assert str(found).startswith(f"{name} is not a regular file")


def test_files_that_nobody_knows_are_a_remark(entry):
    for name in ("core.123", "verified.json", "verified.json.tmp-12-0123abcd"):
        (entry.path / name).touch()
    report = _verify(entry)
    assert report.good
    assert report.remarks == ("core.123 is not in the manifest: no load reads it",)


def test_sizes_alone_find_what_names_and_sizes_tell(entry):
    manifest = entry.require_manifest()
    _flip(entry.path / FIRST, 0)
    assert check_sizes(entry.path, manifest).good
    os.truncate(entry.path / FIRST, 1)
    (entry.path / "chunks.bin").unlink()
    assert [each.file for each in check_sizes(entry.path, manifest).damage] == [FIRST, "chunks.bin"]


def test_a_file_that_may_not_be_read_is_not_called_damaged(entry, monkeypatch):
    real = file_reader.open_regular

    def refuse(path, **_):
        if path.name == SECOND:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(file_reader, "open_regular", refuse)
    report = _verify(entry)
    assert (report.good, report.damage) == (False, ())
    assert report.unread == (f"{SECOND} cannot be read: Permission denied",)


def test_blocks_that_the_disk_does_not_give_are_named(entry, monkeypatch):
    _flip(entry.path / FIRST, 0)
    bad = 3 * BLOCK_BYTES + 5
    real, inode = os.preadv, (entry.path / FIRST).stat().st_ino

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


def test_what_happens_to_a_file_while_others_are_read(entry):
    wrote = []

    def write(done):
        if not wrote:
            wrote.append(done)
            _flip(entry.path / FIRST, 0)

    def remove(name):
        return _verify(entry, threads=1, done=lambda _: (entry.path / name).unlink(missing_ok=True))

    report = _verify(entry, threads=1, done=write)
    assert not report.good
    assert report.unread == (f"{FIRST} was written to while it was verified",)
    _flip(entry.path / FIRST, 0)
    report = remove("chunks.bin")  # before it was read
    assert (report.problems, report.unread) == (("chunks.bin is missing",), ())
    assert remove(FIRST).unread == (f"{FIRST} was removed while it was verified",)


def test_damage_is_found_apart_too(entry, monkeypatch):
    monkeypatch.setattr(file_scan, "LEAST_BYTES", 0)  # processes are worth it whatever there is to read
    _flip(entry.path / SECOND, 3 * BLOCK_BYTES)
    (entry.path / "chunks.bin").unlink()
    found = _verify(entry, processes=True).damage
    assert [(each.file, each.blocks) for each in found] == [(SECOND, ((3, 3),)), ("chunks.bin", ())]


def test_what_is_called_from_the_threads_may_fail(entry):
    def stop(done):
        raise KeyboardInterrupt

    before = _open_files()
    with pytest.raises(KeyboardInterrupt):
        _verify(entry, threads=2, done=stop)
    assert _open_files() == before


@given(st.sets(st.integers(0, 200)))
def test_runs_are_the_numbers(numbers):
    runs = list(runs_of(sorted(numbers)))
    assert [number for first, last in runs for number in range(first, last + 1)] == sorted(numbers)
    assert all(later - last > 1 for (_, last), (later, _) in itertools.pairwise(runs))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return _save(tmp_path_factory.mktemp("kept"))


@settings(max_examples=150)
@given(data=st.data())
def test_any_flips_are_found_exactly(kept, data):
    entry, manifest = kept, kept.require_manifest()
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


FILES = [("__0_0.distcp", 2**20), ("__1_0.distcp", 2**16), ("__2_0.distcp", -1)]
ODD = [0, 1, -1, 2, 3, 5, 64, 8192, 2**16, 2**31, 2**50, 2**62, 2**63 - 1, -(2**62), -(2**63)]


def _saved():
    """Tensors of one to three dimensions: whole, in slabs along each dimension, and as a grid."""
    described, at = [], 0
    parts = {}
    cuts = {
        "whole": ((6,), [((0,), (6,))]),
        "slabs": ((7,), [((0,), (3,)), ((3,), (3,)), ((6,), (1,))]),
        "rows": ((4, 3), [((0, 0), (2, 3)), ((2, 0), (2, 3))]),
        "columns": ((4, 3), [((0, 0), (4, 1)), ((0, 1), (4, 2))]),
        "grid": ((4, 4), [((i, j), (2, 2)) for i in (0, 2) for j in (0, 2)]),
        "deep": ((2, 3, 2), [((0, i, 0), (2, 1, 2)) for i in range(3)]),
        "empty": ((0, 3), []),
    }
    for number, (name, (shape, boxes)) in enumerate(cuts.items()):
        described.append((name, "float32", shape))
        for offsets, sizes in boxes:
            size = int(np.prod(sizes)) * 4
            parts.setdefault(len(shape), []).append([number, at, size + 100, at + 60, *offsets, *sizes])
            at += size + 100
    halves = [{}, {}]
    for dims, each in parts.items():
        table = np.array(each)
        halves[0][dims], halves[1][dims] = table[::2], table[1::2]
    return assemble(described, halves)


RECORDS, TABLE = _saved()
INDEX = Index(files=[name for name, _ in FILES], tensors=RECORDS)


def _both_tables(records, table):
    index = INDEX.model_copy(update={"tensors": records})
    quick = check_table(ChunkTable(records, table), index, FILES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_check, "_regular", lambda *_: set())
        return quick, check_table(ChunkTable(records, table), index, FILES)


def test_what_is_right_is_seen_together():
    assert _both_tables(RECORDS, TABLE) == ([], [])
    regular = folder_check._regular(ChunkTable(RECORDS, TABLE), INDEX, FILES)
    assert regular == {"whole", "slabs", "rows", "columns", "deep"}


@settings(max_examples=600)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(TABLE) - 1), st.sampled_from(ODD)), min_size=1, max_size=3),
    added=st.booleans(),
)
def test_both_looks_find_the_same(changes, added):
    table = TABLE.copy()
    with np.errstate(over="ignore"):
        for place, value in changes:
            table[place] = table[place] + value if added else value
    quick, slow = _both_tables(RECORDS, table)
    assert quick == slow


@pytest.mark.parametrize("name", ["whole", "slabs", "rows", "columns", "deep"])
@pytest.mark.parametrize(
    "change",
    [
        *({"dtype": "float64"}, {"dtype": "no such"}, {"count": 1}, {"count": 0}),
        *({"start": 10**9}, {"axis": 1}, {"axis": 7}, {"shape": (2**40, 2**40, 2**40)}),
    ],
)
def test_both_find_the_same_wrong_records(name, change):
    shape = change.get("shape")
    if isinstance(shape, tuple):
        change = {"shape": shape[: len(RECORDS[name].shape)]}
    quick, slow = _both_tables({**RECORDS, name: RECORDS[name].model_copy(update=change)}, TABLE)
    assert quick == slow


def test_rows_have_the_width_that_is_assumed_here():
    assert sum(record.count * (HEAD + 2 * len(record.shape)) for record in RECORDS.values()) == len(TABLE)


def _first_elements(dims):
    """Boxes of a tensor of 2 x 2 x ...: the half where the first index is 0, of the rest the half where the second is,
    and so on. All but the last element."""
    numbers = range(dims)
    offsets = [[1] * number + [0] * (dims - number) for number in numbers]
    sizes = [[1] * (number + 1) + [2] * (dims - number - 1) for number in numbers]
    return np.array(offsets, np.int64), np.array(sizes, np.int64)


def _problems(offsets, sizes, shape, axis=0):
    heads = np.array([[0, 0, 0, -1]] * len(offsets), np.int64)
    record = {"w": TensorRecord(dtype="no such", shape=shape, start=0, count=len(offsets), axis=axis)}
    table = np.hstack([heads, offsets, sizes]).reshape(-1)
    return check_table(ChunkTable(record, table), INDEX.model_copy(update={"tensors": record}), FILES)


def test_an_overlap_and_a_hole_of_the_same_size_in_too_many_dimensions_for_corners():
    dims = 23
    offsets, sizes = _first_elements(dims)
    last = np.ones((1, dims), np.int64)
    assert _problems(np.vstack([offsets, last]), np.vstack([sizes, last]), (2,) * dims) == []
    (problem,) = _problems(np.vstack([offsets, offsets[-1:]]), np.vstack([sizes, last]), (2,) * dims)
    assert problem.endswith("chunks 22 and 23 overlap")
    empty = np.vstack([sizes, last, 0 * last])
    assert _problems(np.vstack([offsets, last, last]), empty, (2,) * dims) == [], "a rank that has nothing"


def test_what_is_not_proved_is_no_good_news(monkeypatch):
    monkeypatch.setattr(coverage, "_CORNERS", 100)
    offsets = np.array([(i, j) for i in range(9) for j in range(9)], np.int64)
    grid, twice = (offsets, np.ones_like(offsets), (9, 9)), offsets.copy()
    twice[-1] = twice[-2]
    assert _problems(*grid) == []
    assert _problems(twice, *grid[1:]) == ["w [9, 9]: chunks 79 and 80 overlap"]
    monkeypatch.setattr(coverage, "_ENDS", 100)
    for each in (offsets, twice):
        (problem,) = _problems(each, *grid[1:])
        assert problem.startswith("w [9, 9]: it is not proved that each element was saved once")
    assert "hold 80 elements of 81" in str(coverage.flaw_of(offsets[1:], grid[1][1:], (9, 9)))
