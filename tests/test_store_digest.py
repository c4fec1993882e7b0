"""Digests, indexes and verification: a changed byte is found, wherever it is, and so is a hole or an overlap."""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from ckptman.errors import CorruptError, FormatVersionError
from ckptman.store.catalogue import Catalogue, Entry
from ckptman.store.digest import BLOCK_BYTES, BlockDigester, digest_bytes, digest_file, digest_of_blocks
from ckptman.store.index import Chunk, Index, Location, TensorRecord, Unit, merge, read_index
from ckptman.store.manifest import Manifest
from ckptman.store.verify import Box, check_coverage, find_flaw, verify_files
from tests.faulty_disk import manifest_of, save


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# ---- digests ---------------------------------------------------------------------------------------------------------


def by_hand(data: bytes, block_bytes: int) -> tuple[list[bytes], str]:
    """The digests of `data`, straight from the definition."""
    blocks = [xxh3_128_digest(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes)]
    return blocks, xxh3_128_hexdigest(b"".join(blocks))


@given(st.binary(max_size=200), st.integers(1, 64), st.lists(st.integers(0, 200), max_size=8))
def test_a_stream_in_any_pieces(data: bytes, block_bytes: int, cuts: list[int]) -> None:
    digester = BlockDigester(block_bytes)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(places):
        digester.update(data[begin:end])
    blocks, whole = by_hand(data, block_bytes)
    assert digester.finish() == whole
    assert digester.blocks == blocks
    assert digester.size_bytes == len(data)
    assert digest_of_blocks(blocks) == digest_bytes(data, block_bytes) == whole


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31, 32, 33, 100])
def test_a_file(tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(data)
    assert digest_file(tmp_path / "file", 16) == (size, by_hand(data, 16)[0])


def test_blocks_of_the_real_size(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(2 * BLOCK_BYTES + 1)
    (tmp_path / "file").write_bytes(data)
    size, blocks = digest_file(tmp_path / "file")
    assert (size, len(blocks)) == (len(data), 3)
    assert digest_of_blocks(blocks) == digest_bytes(data) == by_hand(data, BLOCK_BYTES)[1]


def test_views_of_any_shape() -> None:
    import numpy

    array = numpy.arange(24, dtype="<f4").reshape(2, 3, 4)
    empty = numpy.zeros((0, 3), dtype="<f4")
    digester = BlockDigester(7)
    for each in (empty.data, array.data, empty.data):
        digester.update(each)
    assert digester.finish() == digest_bytes(array.tobytes(), 7)


# ---- verification ----------------------------------------------------------------------------------------------------


def looked_at(root: Path) -> str | None:
    """What listing and verifying find wrong with the one checkpoint of a root, or None."""
    entry = Catalogue(root).entry(100)
    return entry.problem or "; ".join(verify_files(entry).problems) or None


def test_a_good_checkpoint(tmp_path: Path) -> None:
    entry = save(tmp_path, 100, b"content")
    told: list[int] = []
    report = verify_files(entry, done=told.append)
    assert report.good
    assert report.files == 4
    assert report.bytes == entry.require_manifest().total_bytes == sum(told)
    assert check_coverage(entry.path, entry.require_manifest()) == []


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 100).path
    dice = random.Random(7)
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for bit in dice.sample(range(8 * len(data)), 60):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            assert looked_at(tmp_path) is not None, f"bit {bit} of {path.name}"
        path.write_bytes(data)
    assert looked_at(tmp_path) is None


def test_what_is_cut_off_or_added_is_found(tmp_path: Path) -> None:
    entry = save(tmp_path, 100)
    for path in sorted(entry.path.iterdir()):
        data = path.read_bytes()
        for changed in (data[:-1], data + b"\0", b""):
            path.write_bytes(changed)
            assert looked_at(tmp_path) is not None, path.name
            if path.name != "manifest.json":
                # Also for one who looked before it happened.
                assert f"{path.name} has {len(changed)} bytes instead of" in verify_files(entry).problems[0]
        path.write_bytes(data)


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    entry = save(tmp_path, 100)
    (entry.path / "__0_0.distcp").unlink()
    assert verify_files(entry, ["__0_0.distcp"]).problems == ("__0_0.distcp cannot be read: No such file or directory",)
    assert verify_files(entry, ["__1_0.distcp"]).good
    with pytest.raises(CorruptError, match="is missing"):
        verify_files(Catalogue(tmp_path).entry(100))


# ---- indexes ---------------------------------------------------------------------------------------------------------


def with_index(root: Path, *indexes: Index | bytes, size: int = 64) -> tuple[Path, Manifest]:
    """A checkpoint folder with these indexes beside one data file of `size` bytes."""
    folder = save(root, 1).path
    files = {"data": bytes(size)}
    for rank, index in enumerate(indexes):
        files[f"index-{rank:05d}.json"] = index if isinstance(index, bytes) else index.to_json()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder, manifest_of(root, 1, files)


def one_chunk(shape: tuple[int, ...] = (4,), **changes: Any) -> Index:
    chunk = {"offsets": (0,) * len(shape), "sizes": shape, "at": Location(file="data", offset=0, bytes=16), **changes}
    return Index(tensors={"w": TensorRecord(dtype="float32", shape=shape, chunks=[Chunk(**chunk)])})


@pytest.mark.parametrize(
    ("at", "complaint"),
    [
        (Location(file="data", offset=49, bytes=16), r"points outside data \(49 \+ 16 bytes\)"),
        (Location(file="data", offset=-1, bytes=16), "points outside data"),
        (Location(file="data", offset=0, bytes=-1), "points outside data"),
        (Location(file="data", offset=65, bytes=0), "points outside data"),
        (Location(file="other", offset=0, bytes=16), "points to 'other', which the manifest does not name"),
        (Location(file="../step-0000000001/data", offset=0, bytes=16), "which the manifest does not name"),
        (Location(file="manifest.json", offset=0, bytes=16), "which the manifest does not name"),
    ],
)
def test_an_index_that_points_elsewhere(tmp_path: Path, at: Location, complaint: str) -> None:
    for index in (one_chunk(at=at), Index(objects={"o": at})):
        with pytest.raises(CorruptError, match=complaint):
            read_index(*with_index(tmp_path, index))


@pytest.mark.parametrize(
    "changes",
    [{"offsets": (1,)}, {"offsets": (-1,)}, {"sizes": (5,)}, {"sizes": (-4,)}, {"sizes": (4, 1)}, {"offsets": ()}],
)
def test_a_chunk_outside_of_its_tensor(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match=r"w \[4\] has a chunk outside of it: offsets"):
        read_index(*with_index(tmp_path, one_chunk(**changes)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"format_version": 1, "surprise": 1}',
        b'{"format_version": 1, "tensors": []}',
        b'{"format_version": -1}',
        b'{"format_version": 1, "tensors": {"w": {"dtype": "float32", "shape": [4], "chunks": [{}]}}}',
    ],
)
def test_an_index_that_is_none(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CorruptError, match=r"index-00000\.json"):
        read_index(*with_index(tmp_path, data))


def test_an_index_of_a_newer_format(tmp_path: Path) -> None:
    with pytest.raises(FormatVersionError, match="format version 2"):
        read_index(*with_index(tmp_path, b'{"format_version": 2, "anything": true}'))


def test_an_index_is_checked_against_its_digest(tmp_path: Path) -> None:
    """A plain value lives in the index: a changed learning rate must not be believed."""
    unit = Unit(state="optimizer", key="lr", value=0.125)
    folder, manifest = with_index(tmp_path, Index(units=[unit]))
    assert read_index(folder, manifest).units == [unit]
    path = folder / "index-00000.json"
    path.write_bytes(path.read_bytes().replace(b"0.125", b"0.625"))
    with pytest.raises(CorruptError, match="does not match its digest"):
        read_index(folder, manifest)


def test_indexes_of_all_ranks_become_one(tmp_path: Path) -> None:
    second = one_chunk(shape=(8,), offsets=(4,), sizes=(4,))
    first = one_chunk(shape=(8,), offsets=(0,), sizes=(4,))
    for index, value in ((first, "leader"), (second, "other")):
        index.units.append(Unit(state="app", key="both", value=value))
        index.units.append(Unit(state="app", key=value, value=1))
    # Equal as Python sees it, and two keys all the same.
    first.units.append(Unit(state="app", key=1, value="int"))
    second.units.append(Unit(state="app", key=True, value="bool"))
    folder, manifest = with_index(tmp_path, first, second)
    whole = read_index(folder, manifest)
    assert [chunk.offsets for chunk in whole.tensors["w"].chunks] == [(0,), (4,)]
    assert [(unit.key, unit.value) for unit in whole.units] == [
        *(("both", "leader"), ("leader", 1), (1, "int")),
        *(("other", 1), (True, "bool")),
    ]
    assert len(first.tensors["w"].chunks) == 1, "what was merged is left as it was"
    assert check_coverage(folder, manifest) == []


@pytest.mark.parametrize("shape", [(8,), (4, 1)])
def test_ranks_that_do_not_agree_what_a_tensor_is(shape: tuple[int, ...]) -> None:
    with pytest.raises(CorruptError, match=r"w is float32 \[4\] in one index and float32"):
        merge([one_chunk((4,)), one_chunk(shape)])


# ---- coverage --------------------------------------------------------------------------------------------------------


def brute_force(boxes: list[Box], shape: tuple[int, ...]) -> tuple[tuple[int, ...], int] | None:
    for element in itertools.product(*map(range, shape)):
        times = sum(
            all(o <= e < o + s for o, s, e in zip(offsets, sizes, element, strict=True)) for offsets, sizes in boxes
        )
        if times != 1:
            return element, times
    return None


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut by random guillotine cuts, and then, perhaps, spoilt: a box lost, moved, grown or doubled."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[dim]))
        for begin, size in ((0, cut), (cut, sizes[dim] - cut)):
            boxes.append(
                (
                    tuple(o + begin * (d == dim) for d, o in enumerate(offsets)),
                    tuple(size if d == dim else s for d, s in enumerate(sizes)),
                )
            )
    for _ in range(draw(st.integers(0, 2))):
        begins = tuple(draw(st.integers(0, size)) for size in shape)
        extra = (begins, tuple(draw(st.integers(0, size - begin)) for begin, size in zip(begins, shape, strict=True)))
        how = draw(st.sampled_from(["lost", "more", "moved"]))
        if boxes and how != "more":
            boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        if how != "lost":
            boxes.append(extra)
    return shape, draw(st.permutations(boxes))


@given(tilings())
@settings(max_examples=400, deadline=None)
def test_flaws_are_found_exactly(tiling: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = tiling
    assert find_flaw(boxes, shape) == brute_force(boxes, shape)


def test_a_hole_and_an_overlap_of_the_same_size(tmp_path: Path) -> None:
    """The elements add up; the tensor is not all there."""
    halves = [
        one_chunk((8,), offsets=(offset,), sizes=(4,), at=Location(file="data", offset=0, bytes=16))
        for offset in (0, 2)
    ]
    assert check_coverage(*with_index(tmp_path, *halves)) == ["w [8]: element [2] was saved 2 times, not once"]
    assert check_coverage(*with_index(tmp_path, halves[0])) == ["w [8]: element [4] was saved 0 times, not once"]


def test_scalars_and_empty_tensors() -> None:
    assert find_flaw([((), ())], ()) is None
    assert find_flaw([], ()) == ((), 0)
    assert find_flaw([((), ()), ((), ())], ()) == ((), 2)
    assert find_flaw([], (0, 3)) is None
    assert find_flaw([((0, 0), (0, 3)), ((0, 0), (0, 3))], (0, 3)) is None
    assert find_flaw([((0,), (0,)), ((0,), (4,)), ((4,), (0,))], (4,)) is None, "ranks with nothing to save"


def grid(rows: int, columns: int) -> list[Box]:
    return [((row * 2, column * 3), (2, 3)) for row in range(rows) for column in range(columns)]


@pytest.mark.parametrize(("rows", "columns"), [(16_384, 1), (1, 16_384), (128, 128)])
def test_many_chunks_take_no_quadratic_time(rows: int, columns: int) -> None:
    boxes = grid(rows, columns)
    random.Random(0).shuffle(boxes)
    begun = time.process_time()
    assert find_flaw(boxes, (rows * 2, columns * 3)) is None
    assert find_flaw(boxes[:-1], (rows * 2, columns * 3)) is not None
    # A second or so on a slow machine; comparing all pairs takes minutes.
    assert time.process_time() - begun < 10


def test_an_entry_that_does_not_count_is_not_verified(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="is not a complete checkpoint: nothing in it"):
        verify_files(Entry(1, tmp_path, None, "nothing in it"))
