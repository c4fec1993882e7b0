"""The index, the values of ranks and the chunk table of a folder: believed only if they are what the manifest names."""

import itertools
import re

import numpy as np
import pytest

from ckptman.errors import CorruptError, FormatVersionError
from ckptman.storage.catalog.catalog import Entry
from ckptman.storage.format.chunk_table import TensorRecord
from ckptman.storage.format.index import (
    Index,
    Location,
    Unit,
    open_table,
    ranks_with_values,
    read_digests,
    read_index,
    to_text,
    values_json,
)
from ckptman.storage.format.paths import CHUNKS, INDEX, blocks_name, data_name, new_nonce, step_folder, values_name
from ckptman.storage.format.value_codec import tensor_ref
from ckptman.storage.integrity.folder_check import check_coverage
from tests.helpers.checkpoints import blocks_of
from tests.helpers.faulty_disk import manifest_of

DATA = data_name(0)


def with_index(root, index, *rows, **others):
    """A folder with this index, a chunk table of these rows, one data file of 64 bytes, and other files."""
    folder = root / f"{step_folder(1)}-{new_nonce()}"
    folder.mkdir()
    files = {DATA: bytes(64), CHUNKS: np.array([*itertools.chain(*rows)], "<i8").tobytes(), **others}
    files.setdefault(blocks_name(0), blocks_of(files[DATA]))
    files[INDEX] = index if isinstance(index, bytes) else index.to_json()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder, manifest_of(root, 1, files)


def values_of(*units):
    """The plain values that only one rank has, as that rank writes them."""
    return values_json([to_text(unit.model_dump()) for unit in units])


def index_of(shape=(4,), *, files=(DATA,), count=1):
    """The index of one tensor in float32, whose rows are all there is in the table."""
    record = TensorRecord(dtype="float32", shape=shape, count=count, start=0, axis=0)
    return Index(files=list(files), tensors={"w": record})


def row(offsets=(0,), sizes=(4,), offset=0, size=16):
    """A row of the chunk table: `size` bytes at `offset` of the first file, of which all are payload."""
    return [0, offset, size, offset, *offsets, *sizes]


HALVES = row((0,), (2,), 0, 8), row((2,), (2,), 8, 8)


@pytest.mark.parametrize(
    ("at", "complaint"),
    [
        ((DATA, 49, 16), r"points outside __0_0.distcp \(49 \+ 16 bytes\)"),
        ((DATA, -1, 16), "points outside __0_0.distcp"),
        ((DATA, 0, -1), "points outside __0_0.distcp"),
        ((DATA, 65, 0), "points outside __0_0.distcp"),
        (("other", 0, 16), "points to 'other', which the manifest does not name"),
        (("../step-0000000001/data", 0, 16), "which the manifest does not name"),
        (("manifest.json", 0, 16), "which the manifest does not name"),
    ],
)
def test_an_index_that_points_elsewhere(tmp_path, at, complaint):
    file, offset, size = at
    with pytest.raises(CorruptError, match=complaint):
        read_index(*with_index(tmp_path, Index(objects={"o": Location(file=file, offset=offset, bytes=size)})))
    # A tensor points by the chunk table: to a number of the files that the index names.
    (flaw,) = check_coverage(*with_index(tmp_path, index_of(files=(file,)), row(offset=offset, size=size)))
    assert "w: chunk 0 of 1 lies outside of its file" in flaw
    assert f"in {file} of {64 if file == DATA else -1} bytes; restore" in flaw


@pytest.mark.parametrize(
    ("index", "rows", "flaws"),
    [
        (index_of(), [row()], []),
        (index_of(count=2), HALVES, []),
        (index_of(), [[0, 4, 44, 32, 0, 4]], []),
        (index_of(), [[0, 4, 44, -1, 0, 4]], []),  # only torch.load knows where
        (index_of(count=2), HALVES[::-1], ["w: chunk 1 of 2 is not where its offset belongs"]),
        (index_of(count=2), [row()], ["w: its rows (2 from number 0) are not in the table"]),
        # Elements that add up, of a tensor that is not all there.
        (index_of((8,), count=2), [row((0,)), row((2,))], ["w [8]: element [2] was saved 2 times, not once"]),
        (index_of((8,)), [row()], ["w [8]: element [4] was saved 0 times, not once"]),
    ],
)
def test_what_is_wrong_with_the_chunk_table(tmp_path, index, rows, flaws):
    """`test_chunk_table.py` has every way in which a row can be wrong."""
    found = check_coverage(*with_index(tmp_path, index, *rows))
    assert [flaw in text for flaw, text in itertools.zip_longest(flaws, found)] == [True] * len(flaws)


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
def test_an_index_or_values_of_a_rank_that_are_none(tmp_path, data):
    with pytest.raises(CorruptError, match=r"index\.json"):
        read_index(*with_index(tmp_path, data))
    with pytest.raises(CorruptError, match=r"values-00003\.json"):
        read_index(*with_index(tmp_path, Index(), **{values_name(3): data}))


def test_an_index_of_a_newer_format(tmp_path):
    newer = b'{"format_version": 2, "anything": true}'
    for folder in (with_index(tmp_path, newer), with_index(tmp_path, Index(), **{values_name(0): newer})):
        with pytest.raises(FormatVersionError, match="format version 2"):
            read_index(*folder)


SWAPPED = np.array([row((0,), (2,), 8, 8), row((2,), (2,), 0, 8)], "<i8").tobytes()
DIGEST = "does not match its digest"


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        (INDEX, lambda data: data.replace(b"0.125", b"0.625"), DIGEST),
        (INDEX, lambda data: data[:-1], r"has \d+ bytes instead of \d+"),
        (values_name(1), lambda data: data.replace(b"0.125", b"0.625"), DIGEST),
        (values_name(1), lambda data: data[:-1], r"has \d+ bytes instead of \d+"),
        (CHUNKS, lambda data: SWAPPED, DIGEST),  # two chunks that change places look right
        (CHUNKS, lambda data: data[:-8], "has 88 bytes instead of 96"),
        (CHUNKS, lambda data: data + bytes(8), "has 104 bytes instead of 96"),
        (CHUNKS, lambda data: b"", "has 0 bytes instead of 96"),
        (blocks_name(0), lambda data: bytes(len(data)), DIGEST),
        (blocks_name(0), lambda data: data[:-1], "has 15 bytes instead of 16"),
    ],
)
def test_each_file_is_checked_against_the_manifest(tmp_path, name, change, complaint):
    """A plain value lives in the index: a changed learning rate must not be believed."""
    unit = Unit(state="optimizer", key="lr", value=0.125)
    own = Unit(state="rng", key="seed", value=0.125)
    index = index_of(count=2).model_copy(update={"units": [unit]})
    folder, manifest = with_index(tmp_path, index, *HALVES, **{values_name(1): values_of(own)})

    def read():
        index = read_index(folder, manifest)
        return index.units, len(open_table(folder, manifest, index).chunks("w")), read_digests(folder, DATA, manifest)

    assert read()[:2] == ([unit, own], 2)
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    with pytest.raises(CorruptError, match=f"{name} {complaint}.*; restore an older checkpoint"):
        read()


@pytest.mark.parametrize("name", [INDEX, CHUNKS])
def test_an_index_or_table_that_the_manifest_does_not_name(tmp_path, name):
    folder, manifest = with_index(tmp_path, index_of(), row())
    files = {each: record for each, record in manifest.files.items() if each != name}
    with pytest.raises(CorruptError, match=f"the manifest does not name {name}"):
        check_coverage(folder, manifest.model_copy(update={"files": files}))


def test_a_data_file_without_digests(tmp_path):
    folder, manifest = with_index(tmp_path, index_of(), row(), **{blocks_name(0): b""})
    (flaw,) = check_coverage(folder, manifest)
    assert re.search(r"blocks-00000\.bin holds no digests of __0_0\.distcp; restore", flaw)
    assert check_coverage(folder, manifest, lists=False) == []


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
        with pytest.raises(CorruptError, match=r"values-00001\.json cannot be read: No such file .*; restore"):
            read_index(folder, manifest, ranks=ranks)


NOT_SAVED = "holds the tensor x, which was not saved"
UNKNOWN = "cannot be read: an encoded value of kind"


@pytest.mark.parametrize(
    ("unit", "problem"),
    [
        ({"key": "w", "value": tensor_ref("w")}, None),
        ({"key": "w", "value": tensor_ref("x")}, f"the value m.w {NOT_SAVED}"),
        ({"whole": True, "value": {"a": [tensor_ref("x"), {"b": tensor_ref("w")}]}}, f"the value m {NOT_SAVED}"),
        ({"whole": True, "value": {"~": "no", "v": 1}}, f"the value m {UNKNOWN}"),
        ({"key": {"~": "no", "v": 1}, "value": 1}, f"the value m {UNKNOWN}"),
        ({"key": {"~": "int", "v": "f" * 9999}, "value": tensor_ref("x")}, f"the value m {NOT_SAVED}"),
        ({"key": [1], "value": 1}, "the value m cannot be read: unhashable"),
    ],
)
@pytest.mark.parametrize("of_a_rank", [False, True])
def test_plain_values_that_cannot_be_loaded(tmp_path, unit, problem, of_a_rank):
    units = [Unit(state="m", **unit)]
    index = index_of().model_copy(update={"units": [] if of_a_rank else units})
    others = {values_name(0): values_of(*units)} if of_a_rank else {}
    found = check_coverage(*with_index(tmp_path, index, row(), **others))
    assert len(found) == (problem is not None)
    assert problem is None or found[0].startswith(problem)


def test_an_entry_that_does_not_count_has_no_manifest(tmp_path):
    with pytest.raises(CorruptError, match="is not a complete checkpoint: nothing in it"):
        Entry(1, tmp_path, None, "nothing in it").require_manifest()
