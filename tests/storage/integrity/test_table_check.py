"""The quick look at all chunks together finds nothing wrong exactly where the slow look at each tensor does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.storage.format import coverage
from ckptman.storage.format.chunk_table import HEAD, ChunkTable, TensorRecord, assemble
from ckptman.storage.format.index import Index
from ckptman.storage.integrity import table_check as tablecheck
from ckptman.storage.integrity.table_check import check_table

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


def _both(records, table):
    index = INDEX.model_copy(update={"tensors": records})
    quick = check_table(ChunkTable(records, table), index, FILES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tablecheck, "_regular", lambda *_: set())
        return quick, check_table(ChunkTable(records, table), index, FILES)


def test_what_is_right_is_seen_together():
    assert _both(RECORDS, TABLE) == ([], [])
    regular = tablecheck._regular(ChunkTable(RECORDS, TABLE), INDEX, FILES)
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
    quick, slow = _both(RECORDS, table)
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
    quick, slow = _both({**RECORDS, name: RECORDS[name].model_copy(update=change)}, TABLE)
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
