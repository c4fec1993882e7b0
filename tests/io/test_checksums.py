"""Digests, indexes and verification: a changed byte is found, wherever it is, and so is a hole or an overlap."""

import itertools
import os
import random
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from ckptman.catalog.catalog import Catalog, Entry
from ckptman.errors import CorruptError, FormatVersionError
from ckptman.format.chunk_table import TensorRecord
from ckptman.format.coverage import first_flaw
from ckptman.format.index import Index, Location, Unit, open_table, ranks_with_values, read_index, values_json
from ckptman.format.paths import CHUNKS, INDEX, blocks_name, data_name, values_name
from ckptman.format.value_codec import tensor_ref
from ckptman.integrity.folder_check import check_coverage, verify_folder
from ckptman.io.checksums import BLOCK_BYTES, BlockDigester, digest_bytes, digest_file, digest_of_blocks
from tests.helpers.checkpoints import blocks_of
from tests.helpers.faulty_disk import manifest_of, save


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Nobody pulls the plug here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# ---- digests ---------------------------------------------------------------------------------------------------------


def by_hand(data, block_bytes):
    """The digests of `data`, straight from the definition."""
    blocks = [xxh3_128_digest(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes)]
    return blocks, xxh3_128_hexdigest(b"".join(blocks))


@given(st.binary(max_size=200), st.integers(1, 64), st.lists(st.integers(0, 200), max_size=8))
def test_a_stream_in_any_pieces(data, block_bytes, cuts):
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
def test_a_file(tmp_path, size):
    data = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(data)
    assert digest_file(tmp_path / "file", 16) == (size, by_hand(data, 16)[0])


def test_blocks_of_the_real_size(tmp_path):
    data = random.Random(0).randbytes(2 * BLOCK_BYTES + 1)
    (tmp_path / "file").write_bytes(data)
    size, blocks = digest_file(tmp_path / "file")
    assert (size, len(blocks)) == (len(data), 3)
    assert digest_of_blocks(blocks) == digest_bytes(data) == by_hand(data, BLOCK_BYTES)[1]


def test_views_of_any_shape():
    import numpy

    array = numpy.arange(24, dtype="<f4").reshape(2, 3, 4)
    empty = numpy.zeros((0, 3), dtype="<f4")
    digester = BlockDigester(7)
    for each in (empty.data, array.data, empty.data):
        digester.update(each)
    assert digester.finish() == digest_bytes(array.tobytes(), 7)


# ---- verification ----------------------------------------------------------------------------------------------------


def verified(entry, done=None):
    return verify_folder(entry.path, entry.require_manifest(), done=done)


def looked_at(root):
    """What listing and verifying find wrong with the one checkpoint of a root, or None."""
    entry = Catalog(root).entry(100)
    return entry.problem or "; ".join(verified(entry).problems) or None


def test_a_good_checkpoint(tmp_path):
    entry = save(tmp_path, 100, b"content")
    told = []
    report = verified(entry, done=told.append)
    assert report.good
    assert report.files == 6
    assert report.bytes == entry.require_manifest().total_bytes == sum(told)
    assert check_coverage(entry.path, entry.require_manifest()) == []


@pytest.mark.slow
def test_any_flipped_bit_is_found(tmp_path):
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


def test_what_is_cut_off_or_added_is_found(tmp_path):
    entry = save(tmp_path, 100)
    for path in sorted(entry.path.iterdir()):
        data = path.read_bytes()
        for changed in (data[:-1], data + b"\0", b""):
            path.write_bytes(changed)
            assert looked_at(tmp_path) is not None, path.name
            if path.name != "manifest.json":
                # Also for one who looked before it happened.
                assert f"{path.name} has {len(changed)} bytes instead of" in verified(entry).problems[0]
        path.write_bytes(data)


def test_what_cannot_be_read_is_told(tmp_path):
    entry = save(tmp_path, 100)
    (entry.path / "__0_0.distcp").unlink()
    assert verified(entry).problems == ("__0_0.distcp is missing; what lies there: weight",)
    with pytest.raises(CorruptError, match="is missing"):
        verified(Catalog(tmp_path).entry(100))


# ---- indexes ---------------------------------------------------------------------------------------------------------


DATA = data_name(0)


def with_index(root, index, *rows, **others):
    """A checkpoint folder with this index, a chunk table of these rows, one data file of 64 bytes, and other files."""
    folder = save(root, 1).path
    files = {DATA: bytes(64), CHUNKS: np.array([*itertools.chain(*rows)], "<i8").tobytes(), **others}
    files.setdefault(blocks_name(0), blocks_of(files[DATA]))
    files[INDEX] = index if isinstance(index, bytes) else index.to_json()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder, manifest_of(root, 1, files)


def values_of(*units):
    """The plain values that only one rank has, as that rank writes them."""
    return values_json([unit.model_dump() for unit in units])


def index_of(shape=(4,), *, files=(DATA,), count=1, **at):
    """The index of one tensor in float32, whose rows are all there is in the table."""
    record = TensorRecord(dtype="float32", shape=shape, count=count, **{"start": 0, "axis": 0, **at})
    return Index(files=list(files), tensors={"w": record})


def flaws_of(folder, manifest):
    """All that is wrong with the chunk table, a line each; where it is no table at all, why."""
    try:
        return "\n".join(check_coverage(folder, manifest))
    except CorruptError as error:
        return str(error)


def row(offsets=(0,), sizes=(4,), offset=0, size=16):
    """A row of the chunk table: `size` bytes at `offset` of the first file, of which all are payload."""
    return [0, offset, size, offset, *offsets, *sizes]


@pytest.mark.parametrize(
    ("at", "complaint"),
    [
        (Location(file=DATA, offset=49, bytes=16), r"points outside __0_0.distcp \(49 \+ 16 bytes\)"),
        (Location(file=DATA, offset=-1, bytes=16), "points outside __0_0.distcp"),
        (Location(file=DATA, offset=0, bytes=-1), "points outside __0_0.distcp"),
        (Location(file=DATA, offset=65, bytes=0), "points outside __0_0.distcp"),
        (Location(file="other", offset=0, bytes=16), "points to 'other', which the manifest does not name"),
        (Location(file="../step-0000000001/data", offset=0, bytes=16), "which the manifest does not name"),
        (Location(file="manifest.json", offset=0, bytes=16), "which the manifest does not name"),
    ],
)
def test_an_index_that_points_elsewhere(tmp_path, at, complaint):
    with pytest.raises(CorruptError, match=complaint):
        read_index(*with_index(tmp_path, Index(objects={"o": at})))
    # A tensor points by the chunk table: to a number of the files that the index names.
    table = index_of(files=(at.file,)), row(offset=at.offset, size=at.bytes)
    there = f"in {at.file} of {64 if at.file == DATA else -1} bytes"
    assert re.search(
        f"w: chunk 0 of 1 lies outside of its file .*, {re.escape(there)}; restore",
        flaws_of(*with_index(tmp_path, *table)),
    )


@pytest.mark.parametrize("number", [-1, 1, 2**40])
def test_a_chunk_in_a_file_that_there_is_not(tmp_path, number):
    assert re.search(
        "w: chunk 0 of 1 is in a file that there is not",
        flaws_of(*with_index(tmp_path, index_of(), [number, *row()[1:]])),
    )


@pytest.mark.parametrize("payload", [-2, 3, 47, 52, 2**62])
def test_a_payload_that_its_container_does_not_hold(tmp_path, payload):
    assert re.search(
        f"does not fit its container .*: 44 bytes at 4, payload at {payload}, in",
        flaws_of(*with_index(tmp_path, index_of(), [0, 4, 44, payload, 0, 4])),
    )
    assert check_coverage(*with_index(tmp_path, index_of(), [0, 4, 44, 32, 0, 4])) == []
    assert check_coverage(*with_index(tmp_path, index_of(), [0, 4, 44, -1, 0, 4])) == [], "only torch.load knows where"


@pytest.mark.parametrize("changes", [{"offsets": (1,)}, {"offsets": (-1,)}, {"sizes": (5,)}, {"sizes": (-4,)}])
def test_a_chunk_outside_of_its_tensor(tmp_path, changes):
    assert re.search(
        r"w: chunk 0 of 1 lies outside of the tensor \(offsets \[.* of \[4\]\)",
        flaws_of(*with_index(tmp_path, index_of(), row(**changes))),
    )


@pytest.mark.parametrize(
    "changes", [{"count": 2}, {"count": -1}, {"start": 1}, {"start": -1}, {"axis": 1}, {"axis": -1}]
)
def test_rows_that_are_not_in_the_table(tmp_path, changes):
    assert re.search(
        r"chunks\.bin: w: its rows .* are not in the table", flaws_of(*with_index(tmp_path, index_of(**changes), row()))
    )
    # Rows of other widths: of a tensor with more dimensions, or with fewer.
    for shape in ((4, 1), ()):
        assert re.search(r"chunks\.bin: w: ", flaws_of(*with_index(tmp_path, index_of(shape, count=2), row())))


def test_rows_that_are_not_in_order(tmp_path):
    """A reader that looks for a chunk by bisection would not find it."""
    rows = row((0,), (2,), 0, 8), row((2,), (2,), 8, 8)
    assert check_coverage(*with_index(tmp_path, index_of(count=2), *rows)) == []
    assert re.search(
        "w: chunk 1 of 2 is not where its offset belongs",
        flaws_of(*with_index(tmp_path, index_of(count=2), *reversed(rows))),
    )


NO_INDEX = [
    b"",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"format_version": 1, "surprise": 1}',
    b'{"format_version": 1, "tensors": []}',
    b'{"format_version": 1, "units": {}}',
    b'{"format_version": -1}',
    b'{"format_version": 1, "tensors": {"w": {"dtype": "float32", "shape": [4], "chunks": [{}]}}}',
]


@pytest.mark.parametrize("data", NO_INDEX)
def test_an_index_that_is_none(tmp_path, data):
    with pytest.raises(CorruptError, match=r"index\.json"):
        read_index(*with_index(tmp_path, data))


@pytest.mark.parametrize("data", NO_INDEX)
def test_values_of_a_rank_that_are_none(tmp_path, data):
    with pytest.raises(CorruptError, match=r"values-00003\.json"):
        read_index(*with_index(tmp_path, Index(), **{values_name(3): data}))


@pytest.mark.parametrize("data", [b"\0", bytes(47), bytes(49)])
def test_a_table_that_is_none(tmp_path, data):
    assert re.search(
        r"chunks\.bin is not a chunk table: \d+ bytes are not whole numbers",
        flaws_of(*with_index(tmp_path, index_of(), **{CHUNKS: data})),
    )


def test_an_index_of_a_newer_format(tmp_path):
    newer = b'{"format_version": 2, "anything": true}'
    with pytest.raises(FormatVersionError, match="format version 2"):
        read_index(*with_index(tmp_path, newer))
    with pytest.raises(FormatVersionError, match="format version 2"):
        read_index(*with_index(tmp_path, Index(), **{values_name(0): newer}))


def test_an_index_is_checked_against_its_digest(tmp_path):
    """A plain value lives in the index: a changed learning rate must not be believed."""
    unit = Unit(state="optimizer", key="lr", value=0.125)
    own = Unit(state="rng", key="seed", value=0.125)
    folder, manifest = with_index(tmp_path, Index(units=[unit]), **{values_name(1): values_of(own)})
    assert read_index(folder, manifest).units == [unit, own]
    for name in (INDEX, values_name(1)):
        data = (folder / name).read_bytes()
        for changed, complaint in (
            (data.replace(b"0.125", b"0.625"), "does not match its digest"),
            (data[:-1], f"has {len(data) - 1} bytes instead of {len(data)}"),
        ):
            (folder / name).write_bytes(changed)
            with pytest.raises(CorruptError, match=f"{name} {complaint}.*; restore an older checkpoint"):
                read_index(folder, manifest)
        (folder / name).write_bytes(data)
    assert read_index(folder, manifest).units == [unit, own]


def test_the_chunk_table_is_checked_against_its_digest(tmp_path):
    """Two chunks that change places look right, and are not."""
    rows = row((0,), (2,), 0, 8), row((2,), (2,), 8, 8)
    folder, manifest = with_index(tmp_path, index_of(count=2), *rows)
    index = read_index(folder, manifest)
    assert len(open_table(folder, manifest, index).chunks("w")) == 2
    swapped = np.array([row((0,), (2,), 8, 8), row((2,), (2,), 0, 8)], "<i8").tobytes()
    for changed in (swapped, swapped[:-8], swapped + bytes(8), b""):
        (folder / CHUNKS).write_bytes(changed)
        complaint = "does not match its digest" if changed == swapped else f"has {len(changed)} bytes instead of 96"
        with pytest.raises(CorruptError, match=rf"chunks\.bin {complaint}.*; restore an older checkpoint"):
            open_table(folder, manifest, index)


@pytest.mark.parametrize("name", [INDEX, CHUNKS])
def test_an_index_or_table_that_the_manifest_does_not_name(tmp_path, name):
    folder, manifest = with_index(tmp_path, index_of(), row())
    files = {each: record for each, record in manifest.files.items() if each != name}
    assert re.search(
        f"the manifest does not name {name}", flaws_of(folder, manifest.model_copy(update={"files": files}))
    )


def test_values_of_all_ranks_come_together(tmp_path):
    shared = [Unit(state="app", key="both", value="leader"), Unit(state="app", key=1, value="int")]
    # Equal as Python sees it, and two keys all the same.
    own = {rank: [Unit(state="app", key=True, value=f"rank {rank}")] for rank in (10, 2, 123_456)}
    files = {values_name(rank): values_of(*units) for rank, units in own.items()}
    index = index_of((8,), count=2).model_copy(update={"units": shared})
    folder, manifest = with_index(tmp_path, index, row((0,)), row((4,), offset=16), **files)

    def values(ranks):
        return [(unit.key, unit.value) for unit in read_index(folder, manifest, ranks=ranks).units]

    of_all = [("both", "leader"), (1, "int")]
    assert values(None) == [*of_all, (True, "rank 2"), (True, "rank 10"), (True, "rank 123456")]
    assert [type(key) for key, _ in values(None)] == [str, int, bool, bool, bool]
    assert values([10]) == [*of_all, (True, "rank 10")]
    assert values([3]) == values([]) == of_all, "a rank that has none"
    assert ranks_with_values(manifest) == [2, 10, 123_456]
    assert check_coverage(folder, manifest) == []


def test_what_one_rank_alone_has_is_not_read_by_others(tmp_path):
    """A damaged file of one rank is that rank's trouble, and that of who asks for all."""
    files = {values_name(rank): values_of(Unit(state="rng", value=rank)) for rank in (0, 1)}
    folder, manifest = with_index(tmp_path, Index(), **files)
    (folder / values_name(1)).unlink()
    assert [unit.value for unit in read_index(folder, manifest, ranks=[0]).units] == [0]
    for ranks in ([1], None):
        with pytest.raises(
            CorruptError, match=r"values-00001\.json cannot be read: No such file or directory; restore"
        ):
            read_index(folder, manifest, ranks=ranks)


# ---- coverage --------------------------------------------------------------------------------------------------------


def brute_force(boxes, shape):
    for element in itertools.product(*map(range, shape)):
        times = sum(
            all(o <= e < o + s for o, s, e in zip(offsets, sizes, element, strict=True)) for offsets, sizes in boxes
        )
        if times != 1:
            return element, times
    return None


@st.composite
def tilings(draw):
    """A tensor cut by random guillotine cuts, and then, perhaps, spoilt: a box lost, moved, grown or doubled."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    boxes = [((0,) * len(shape), shape)]
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
def test_flaws_are_found_exactly(tiling):
    shape, boxes = tiling
    assert first_flaw(boxes, shape) == brute_force(boxes, shape)


def test_a_hole_and_an_overlap_of_the_same_size(tmp_path):
    """The elements add up; the tensor is not all there."""
    halves = [row((offset,), (4,)) for offset in (0, 2)]
    both, first = index_of((8,), count=2), index_of((8,))
    assert check_coverage(*with_index(tmp_path, both, *halves)) == ["w [8]: element [2] was saved 2 times, not once"]
    assert check_coverage(*with_index(tmp_path, first, halves[0])) == ["w [8]: element [4] was saved 0 times, not once"]


@pytest.mark.parametrize(
    ("unit", "problem"),
    [
        (Unit(state="m", key="w", value=tensor_ref("w")), None),
        (Unit(state="m", key="w", value=tensor_ref("x")), "the value m.w holds the tensor x, which was not saved"),
        (
            Unit(state="m", whole=True, value={"a": [1, tensor_ref("x"), {"b": tensor_ref("w")}]}),
            "the value m holds the tensor x, which was not saved",
        ),
        (
            Unit(state="m", whole=True, value={"~": "no", "v": 1}),
            "the value m cannot be read: an encoded value of kind",
        ),
        (Unit(state="m", key={"~": "no", "v": 1}, value=1), "the value m cannot be read: an encoded value of kind"),
        (
            Unit(state="m", key={"~": "int", "v": "f" * 9999}, value=tensor_ref("x")),
            "the value m holds the tensor x, which was not saved",
        ),
        (Unit(state="m", key=[1], value=1), "the value m cannot be read: unhashable"),
    ],
)
@pytest.mark.parametrize("of_a_rank", [False, True])
def test_plain_values_that_cannot_be_loaded(tmp_path, unit, problem, of_a_rank):
    index = index_of()
    others = {values_name(0): values_of(unit)} if of_a_rank else {}
    folder = with_index(tmp_path, index if of_a_rank else index.model_copy(update={"units": [unit]}), row(), **others)
    found = check_coverage(*folder)
    assert len(found) == (problem is not None)
    assert problem is None or found[0].startswith(problem)


def test_scalars_and_empty_tensors():
    assert first_flaw([((), ())], ()) is None
    assert first_flaw([], ()) == ((), 0)
    assert first_flaw([((), ()), ((), ())], ()) == ((), 2)
    assert first_flaw([], (0, 3)) is None
    assert first_flaw([((0, 0), (0, 3)), ((0, 0), (0, 3))], (0, 3)) is None
    assert first_flaw([((0,), (0,)), ((0,), (4,)), ((4,), (0,))], (4,)) is None, "ranks with nothing to save"


def grid(rows, columns):
    return [((row * 2, column * 3), (2, 3)) for row in range(rows) for column in range(columns)]


@pytest.mark.parametrize(("rows", "columns"), [(16_384, 1), (1, 16_384), (128, 128)])
def test_many_chunks_take_no_quadratic_time(rows, columns):
    boxes = grid(rows, columns)
    random.Random(0).shuffle(boxes)
    begun = time.process_time()
    assert first_flaw(boxes, (rows * 2, columns * 3)) is None
    assert first_flaw(boxes[:-1], (rows * 2, columns * 3)) is not None
    # A second or so on a slow machine; comparing all pairs takes minutes.
    assert time.process_time() - begun < 10


def test_an_entry_that_does_not_count_has_no_manifest(tmp_path):
    with pytest.raises(CorruptError, match="is not a complete checkpoint: nothing in it"):
        Entry(1, tmp_path, None, "nothing in it").require_manifest()
