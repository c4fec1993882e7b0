"""The chunk table: what ranks wrote is put in order, found again, and refused where it cannot be."""

import contextlib
import itertools
import random
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.errors import CorruptError
from ckptman.storage.format import coverage
from ckptman.storage.format.chunk_table import HEAD, ChunkTable, TensorRecord, assemble, item_bytes, pack, unpack
from ckptman.storage.format.coverage import flaw_of


def grid(shape, cuts):
    """The boxes between cuts; cuts may repeat, which makes chunks without elements."""
    edges = [[0, *sorted(min(cut, size) for cut in own), size] for size, own in zip(shape, cuts)]
    spans = [[(a, b - a) for a, b in itertools.pairwise(own)] for own in edges]
    return [([o for o, _ in box], [s for _, s in box]) for box in itertools.product(*spans)]


def bricks(shape, rng, depth):
    """Boxes that fill a shape and form no grid: it is cut, and each part again, somewhere else."""
    if not shape or depth == 0 or prod(shape) < 2:
        return [([0] * len(shape), list(shape))]
    dim = rng.choice([dim for dim, size in enumerate(shape) if size > 1])
    at = rng.randint(1, shape[dim] - 1)
    result = []
    for begin, size in ((0, at), (at, shape[dim] - at)):
        part = (*shape[:dim], size, *shape[dim + 1 :])
        for offsets, sizes in bricks(part, rng, depth - 1):
            result.append(([o + begin * (d == dim) for d, o in enumerate(offsets)], sizes))
    return result


def spread(tensors, boxes, ranks, rng):
    """Boxes given to ranks, each with a container of its own in the rank's file."""
    owned = [{} for _ in range(ranks)]
    ends = [0] * ranks
    for number, ((_, dtype, _), own) in enumerate(zip(tensors, boxes)):
        for offsets, sizes in own:
            rank = rng.randrange(ranks)
            length = 1000 + prod(sizes) * (item_bytes(dtype) or 1)
            row = [number, ends[rank], length, ends[rank] + 640, *offsets, *sizes]
            owned[rank].setdefault(len(offsets), []).append(row)
            ends[rank] += length + rng.randrange(64)
    return [{dims: np.array(rows, np.int64) for dims, rows in each.items()} for each in owned]


def files_of(parts):
    ends = [max((int((a[:, 1] + a[:, 2]).max()) for a in part.values()), default=0) for part in parts]
    return [(f"__{rank}_0.distcp", end) for rank, end in enumerate(ends)]


def table_of(shape, boxes, seed=0):
    tensors = [("weight", "float32", shape)]
    parts = spread(tensors, [boxes], 3, random.Random(seed))
    return ChunkTable(*assemble(tensors, parts)), files_of(parts)


def by_scan(chunks, offsets, sizes):
    """The same as `overlapping`, straight from the definition."""
    found = []
    for row in range(len(chunks)):
        box = zip(chunks.offsets[row].tolist(), chunks.sizes[row].tolist(), offsets, sizes)
        if all(max(a, c) < min(a + b, c + d) for a, b, c, d in box):
            found.append(row)
    return found


# ---- what ranks wrote, put together ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_every_chunk_is_in_the_table_once(seed):
    rng = random.Random(seed)
    shapes = [tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 5))) for _ in range(rng.randint(0, 12))]
    tensors = [(f"t{i}", rng.choice(["bfloat16", "bool", "new"]), s) for i, s in enumerate(shapes)]
    boxes = [bricks(shape, rng, rng.randint(0, 5)) for shape in shapes]
    parts = spread(tensors, boxes, 4, rng)
    records, rows = assemble(tensors, parts)
    table = ChunkTable(records, rows)
    table.check(files_of(parts))
    assert list(records) == [name for name, _, _ in tensors]
    spans = []
    for number, (name, dtype, shape) in enumerate(tensors):
        record, chunks = records[name], table.chunks(name)
        assert (record.dtype, record.shape) == (dtype, shape)
        spans.append((record.start, record.start + record.count * (HEAD + 2 * len(shape))))
        assert chunks.boxes() == [(o, s) for o, s in zip(chunks.offsets.tolist(), chunks.sizes.tolist())]
        assert np.shares_memory(chunks.sizes, rows) or not shape
        found = np.column_stack(
            [chunks.file, chunks.offset, chunks.bytes, chunks.payload, chunks.offsets, chunks.sizes]
        )
        given = [
            [file, *row[1:]]
            for file, part in enumerate(parts)
            for row in part.get(len(shape), np.empty((0, 1), np.int64)).tolist()
            if row[0] == number
        ]
        assert sorted(found.tolist()) == sorted(given)
        places = [len(set(chunks.offsets[:, dim].tolist())) for dim in range(len(shape))]
        assert record.axis == (places.index(max(places)) if shape else 0)
        if shape:
            assert (np.diff(chunks.offsets[:, record.axis]) >= 0).all()
    assert [0, *(end for _, end in sorted(spans))] == [*(begin for begin, _ in sorted(spans)), len(rows)]


def test_chunks_without_elements_are_left_out():
    table, files = table_of((10, 4), grid((10, 4), [[3, 3, 3, 10], []]))
    assert table.chunks("weight").sizes.tolist() == [[3, 4], [7, 4]]
    table.check(files)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 2)])
def test_a_tensor_without_elements_keeps_one_chunk(shape):
    table, files = table_of(shape, grid(shape, [[0, 1] for _ in shape]))
    assert len(table.chunks("weight")) == 1
    table.check(files)
    assert table.chunks("weight").overlapping([0] * len(shape), list(shape)).tolist() == []


@pytest.mark.parametrize("tensors", [[], [("empty", "float32", (0, 3))]])
def test_a_table_of_nothing(tmp_path, tensors):
    """A tensor without elements needs no chunk."""
    records, rows = assemble(tensors, [])
    assert len(rows) == 0
    (tmp_path / "chunks.bin").touch()
    ChunkTable.open(tmp_path / "chunks.bin", records, 0).check([])


@pytest.mark.parametrize(
    ("shape", "boxes", "complaint"),
    [
        ((4,), [], "they hold 0 elements of 4"),
        ((4,), [([0], [3])], "they hold 3 elements of 4"),
        ((4,), [([0], [4]), ([0], [4])], "they hold 8 elements of 4"),
        ((4,), [([0], [2]), ([1], [2])], "overlap"),
        ((4,), [([1], [4])], "outside of it, offsets \\[1\\], sizes \\[4\\]"),
        ((4,), [([-1], [4])], "outside"),
        ((4,), [([0], [5]), ([2], [-1])], "outside"),
        ((), [([], []), ([], [])], "they hold 2 elements of 1"),
        ((4, 4), [([0, 0], [2, 4]), ([1, 0], [2, 4])], "overlap"),
        ((4, 4), [([0, 0], [2, 2]), ([0, 2], [2, 2]), ([2, 0], [2, 2]), ([2, 1], [2, 2])], "overlap"),
        ((4, 4), [([0, 0], [2, 2]), ([0, 0], [2, 2]), ([2, 0], [2, 2]), ([2, 2], [2, 2])], "overlap"),
        ((2, 2), [([0, 0], [1, 1]), ([1, 1], [1, 1]), ([0, 0], [1, 1]), ([1, 1], [1, 1])], "overlap"),
    ],
)
def test_what_does_not_fill_a_tensor_is_refused(shape, boxes, complaint):
    good = ("a.good", "int8", (2,))
    tensors = [good, ("the.bad", "int8", shape), ("z.bad", "int8", (7,))]
    parts = spread(tensors, [[([0], [2])], boxes, []], 2, random.Random(0))
    with pytest.raises(ValueError, match=f"^the.bad .*{complaint}"):
        assemble(tensors, parts)


def test_a_row_of_no_tensor_or_of_another_one_is_refused():
    row = np.array([[1, 0, 10, 0, 0, 4]])
    with pytest.raises(ValueError, match="none of the 1"):
        assemble([("a", "int8", (4,))], [{1: row}])
    with pytest.raises(ValueError, match=r"^b .* has 1 dimensions"):
        assemble([("a", "int8", (0,)), ("b", "int8", (2, 2))], [{1: row}])


def painted(boxes, shape):
    """Whether boxes fill a shape, each element once: counted one by one."""
    counts = np.zeros(shape, np.int64)
    for offsets, sizes in boxes:
        counts[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))] += 1
    return bool((counts == 1).all())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9))
def test_flaws_are_found_exactly(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 4)))
    boxes = bricks(shape, rng, rng.randint(0, 4))
    for _ in range(rng.randint(0, 2)):
        offsets, sizes = rng.choice(boxes)
        other = rng.randrange(len(boxes))
        moved = [rng.randint(0, whole - size) for whole, size in zip(shape, sizes)]
        boxes[other] = (moved if rng.random() < 0.7 else offsets, sizes)
    flaw = flaw_of(np.array([o for o, _ in boxes]), np.array([s for _, s in boxes]), shape)
    assert (flaw is None) == painted(boxes, shape), (boxes, shape, flaw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "_CORNERS", 0)
        by_pairs = flaw_of(np.array([o for o, _ in boxes]), np.array([s for _, s in boxes]), shape)
    assert (by_pairs is None) == (flaw is None), by_pairs
    tensors = [("weight", "int8", shape)]
    parts = spread(tensors, [boxes], 2, rng)
    with contextlib.nullcontext() if flaw is None else pytest.raises(ValueError, match=r"^weight "):
        assemble(tensors, parts)


@pytest.mark.parametrize("part", ["offset", "size"])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_grid_with_one_edge_moved_is_no_grid(dim, by, part):
    boxes, tensors = grid((6, 8, 4), [[3], [2, 5], [2]]), [("weight", "int8", (6, 8, 4))]
    assemble(tensors, spread(tensors, [boxes], 3, random.Random(1)))
    boxes[7][part == "size"][dim] += by
    with pytest.raises(ValueError, match="not filled exactly"):
        assemble(tensors, spread(tensors, [boxes], 3, random.Random(1)))


def test_flaws_of_a_shape_of_too_many_corners():
    """Pairs are looked at instead."""
    shape = (2,) * 40
    boxes = bricks(shape, random.Random(1), 6)
    offsets, sizes = np.array([o for o, _ in boxes]), np.array([s for _, s in boxes])
    assert flaw_of(offsets, sizes, shape) is None
    assert "elements of" in str(flaw_of(offsets[1:], sizes[1:], shape))


# ---- finding chunks --------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.booleans())
def test_overlaps(seed, as_grid):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 12) for _ in range(rng.randint(0, 4)))
    cuts = [[rng.randint(0, size) for _ in range(rng.randint(0, 4))] for size in shape]
    table, _ = table_of(shape, grid(shape, cuts) if as_grid else bricks(shape, rng, 6), seed)
    chunks = table.chunks("weight")
    for _ in range(5):
        offsets = [rng.randint(0, size) for size in shape]
        sizes = [rng.randint(0, size - offset) for size, offset in zip(shape, offsets)]
        assert chunks.overlapping(offsets, sizes).tolist() == by_scan(chunks, offsets, sizes)
    assert chunks.overlapping([0] * len(shape), shape).tolist() == list(range(len(chunks)))


def test_overlaps_in_a_table_that_nobody_assembled():
    """A long chunk before short ones, chunks on top of each other, and some without elements."""
    boxes = [[0, 0, 9, 2], [0, 0, 1, 2], [1, 0, 0, 2], [3, 1, 2, 1], [3, 1, 2, 1], [6, 0, 1, 2]]
    rows = np.array([[0, 0, 0, 0, *box] for box in boxes], np.int64).reshape(-1)
    record = TensorRecord(dtype="int8", shape=(9, 2), start=0, count=6, axis=0)
    chunks = ChunkTable({"w": record}, rows).chunks("w")
    for a, b in itertools.combinations(range(10), 2):
        for offset, size in ((0, 1), (1, 1), (0, 2)):
            assert chunks.overlapping([a, offset], [b - a, size]).tolist() == by_scan(
                chunks, [a, offset], [b - a, size]
            )


def test_a_grid_is_not_scanned():
    """64 x 64 chunks, and a strip along each dimension: 64 of them, and hardly more are looked at."""
    table, _ = table_of((640, 640), grid((640, 640), [list(range(10, 640, 10))] * 2))
    chunks = table.chunks("weight")
    for box in (([0, 5], [640, 3]), ([5, 0], [3, 640])):
        found = chunks.overlapping(*box)
        assert found.tolist() == by_scan(chunks, *box)
        assert len(found) == 64
    assert sorted(chunks._orders) == [0, 1]


def test_a_box_of_other_dimensions_is_refused():
    table, _ = table_of((4, 4), [([0, 0], [4, 4])])
    with pytest.raises(ValueError, match="a box of 1 dimensions in a tensor of 2"):
        table.chunks("weight").overlapping([0], [4])


# ---- the file, and what is wrong with it -----------------------------------------------------------------------------


def saved(path):
    tensors = [("scale", "float32", ()), ("weight", "bfloat16", (8, 6))]
    parts = spread(tensors, [[([], [])], grid((8, 6), [[3], [2, 4]])], 2, random.Random(5))
    records, rows = assemble(tensors, parts)
    path.write_bytes(rows.astype("<i8").tobytes())
    return records, rows, files_of(parts)


def test_the_file_is_read_as_it_is_wanted(tmp_path):
    records, rows, files = saved(tmp_path / "chunks.bin")
    table = ChunkTable.open(tmp_path / "chunks.bin", records, rows.nbytes)
    table.check(files)
    for name in records:
        table.check(files, [name])
    chunks = table.chunks("weight")
    assert chunks.sizes.sum(axis=0).tolist() == [3 * 8, 2 * 6]
    with pytest.raises(ValueError, match="read-only"):
        chunks.sizes[0, 0] = 1
    with pytest.raises(KeyError):
        table.chunks("bias")
    (tmp_path / "chunks.bin").write_bytes(b"")
    with pytest.raises(CorruptError, match="ends early"):
        table.chunks(next(name for name in records if name != "weight"))


def test_a_file_of_another_size(tmp_path):
    records, rows, _ = saved(tmp_path / "chunks.bin")
    with pytest.raises(CorruptError, match=f"chunks.bin has {rows.nbytes} bytes instead of {rows.nbytes + 8}; restore"):
        ChunkTable.open(tmp_path / "chunks.bin", records, rows.nbytes + 8)
    (tmp_path / "odd.bin").write_bytes(b"123456789")
    with pytest.raises(CorruptError, match="not whole numbers"):
        ChunkTable.open(tmp_path / "odd.bin", records, 9)
    with pytest.raises(FileNotFoundError):
        ChunkTable.open(tmp_path / "other.bin", records, 8)


WEIGHT = 4  # where the rows of the tensor begin, of 8 numbers each
HUGE = 2**63 - 1


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (0, 2, "is in a file that there is not"),
        (0, -1, "is in a file that there is not"),
        (1, -8, "lies outside of its file"),
        (1, HUGE, "lies outside of its file"),
        (2, -1, "lies outside of its file"),
        (2, HUGE, "lies outside of its file"),
        (3, -2, "has a payload that does not fit its container"),
        (3, -HUGE - 1, "has a payload that does not fit its container"),
        (3, HUGE, "has a payload that does not fit its container"),
        (4, -1, "lies outside of the tensor"),
        (4, 9, "lies outside of the tensor"),
        (5, HUGE, "lies outside of the tensor"),
        (6, HUGE, "lies outside of the tensor"),
        (7, -1, "lies outside of the tensor"),
    ],
)
@pytest.mark.parametrize("row", [0, 3, 5])
def test_a_row_that_cannot_be(tmp_path, row, place, value, complaint):
    records, rows, files = saved(tmp_path / "chunks.bin")
    rows[WEIGHT + 8 * row + place] = value
    with pytest.raises(CorruptError, match=f"weight: chunk {row} of 6 {complaint}.*restore an older checkpoint"):
        ChunkTable(records, rows).check(files, ["weight"])
    with pytest.raises(CorruptError, match="weight"):
        ChunkTable(records, rows).check(files)


def test_rows_in_another_order(tmp_path):
    records, rows, files = saved(tmp_path / "chunks.bin")
    body = rows[WEIGHT:].reshape(6, 8)
    assert records["weight"].axis == 1
    body[[1, 3]] = body[[3, 1]]
    with pytest.raises(CorruptError, match="chunk 3 of 6 is not where its offset belongs"):
        ChunkTable(records, rows).check(files)


def test_a_payload_must_fit_unless_nobody_knows_where_it_is(tmp_path):
    records, rows, files = saved(tmp_path / "chunks.bin")
    length = rows[WEIGHT + 2]
    rows[WEIGHT + 3] = rows[WEIGHT + 1] + length - 1
    with pytest.raises(CorruptError, match="chunk 0 of 6 has a payload"):
        ChunkTable(records, rows).check(files)
    other = records["weight"].model_copy(update={"dtype": "of_tomorrow"})
    ChunkTable({"weight": other}, rows).check(files)
    rows[WEIGHT + 3] = -1
    ChunkTable(records, rows).check(files)


@pytest.mark.parametrize(
    "change", [{"start": -8}, {"start": 5}, {"start": 2**70}, {"count": 7}, {"count": -1}, {"axis": 2}, {"axis": -1}]
)
def test_a_record_that_cannot_be(tmp_path, change):
    records, rows, files = saved(tmp_path / "chunks.bin")
    table = ChunkTable({"weight": records["weight"].model_copy(update=change)}, rows, "chunks.bin")
    for use in (lambda: table.check(files), lambda: table.chunks("weight")):
        with pytest.raises(CorruptError, match=r"^chunks.bin: weight: its rows .* are not in the table"):
            use()


@pytest.mark.parametrize("shape", [(-8, 6), (2**62, 6), (2**40, 2**30), (2**70, 0)])
def test_a_shape_that_cannot_be(tmp_path, shape):
    records, rows, files = saved(tmp_path / "chunks.bin")
    table = ChunkTable({"weight": records["weight"].model_copy(update={"shape": shape})}, rows)
    with pytest.raises(CorruptError, match="no tensor has the shape"):
        table.check(files)


# ---- on the way to the leader ----------------------------------------------------------------------------------------


def test_packed_rows_are_small_and_come_back():
    rng = np.random.default_rng(0)
    rows = np.empty((1000, 8), np.int64)
    rows[:, 0] = np.arange(1000)
    rows[:, 2] = rng.integers(1, 10**8, 1000)
    rows[:, 1] = np.concatenate([[0], np.cumsum(rows[:-1, 2] + rng.integers(0, 64, 999))])
    rows[:, 3] = rows[:, 1] + 640
    rows[:, 4:] = rng.integers(0, 10**5, (1000, 4))
    packed = pack({2: rows})
    assert len(packed) < 20_000, "nothing repeats here, and still it is below 20 kB"
    assert (unpack(packed)[2] == rows).all()
    rows[:, 4:] = rng.integers(0, 10**5, (7, 4))[np.arange(1000) % 7]
    assert len(pack({2: rows})) < 6_000


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**9))
def test_packing_loses_nothing(seed):
    rng = np.random.default_rng(seed)
    rows = {}
    for dims in rng.permutation(6)[: rng.integers(0, 6)].tolist():
        shape = (int(rng.integers(0, 5)), HEAD + 2 * dims)
        rows[dims] = rng.integers(-(2 ** rng.integers(1, 63)), 2 ** rng.integers(1, 63), shape)
    back = unpack(pack(rows))
    assert list(back) == list(rows)
    for dims, array in rows.items():
        assert back[dims].shape == array.shape
        assert (back[dims] == array).all()


def test_thousands_of_ranks_are_a_matter_of_seconds():
    """Half a million chunks: well below the time limit even where every row would cost microseconds once."""
    ranks, count = 512, 1000
    tensors = [(f"layers.{i}", "bfloat16", (ranks * 4, 16 + i % 5)) for i in range(count)]
    parts = []
    for rank in range(ranks):
        rows = np.empty((count, 8), np.int64)
        rows[:, 0] = np.arange(count)
        rows[:, 1] = 2048 * np.arange(count)
        rows[:, 2:4] = 2048, -1
        rows[:, 4:6] = 4 * rank, 0
        rows[:, 6], rows[:, 7] = 4, 16 + np.arange(count) % 5
        parts.append({2: rows})
    parts = [unpack(pack(part)) for part in parts]
    records, rows = assemble(tensors, parts)
    table = ChunkTable(records, rows)
    table.check([("file", 2048 * count)] * ranks)
    assert rows.size == ranks * count * 8
    for name, _, shape in tensors:
        assert table.chunks(name).overlapping([6, 0], [4, shape[1]]).tolist() == [1, 2]
