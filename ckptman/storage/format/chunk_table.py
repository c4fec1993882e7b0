"""The chunk table: which box of which tensor lies where. One array of integers for a whole checkpoint.

`chunks.bin` holds little-endian int64 numbers. A tensor of d dimensions has `count` consecutive rows of 4 + 2 d numbers
from number `start` on: the file's number, offset and bytes of the container in that file, offset of the payload in that
file (-1: only the container's reader knows), then offsets and sizes of the box in elements. The rows of a tensor are
sorted by their offset along `axis`, the dimension in which the chunks begin at the most places, so that the chunks that
share elements with a box are found by bisection. Four million chunks take some seconds to assemble: no row is ever an
object of Python.
"""

from __future__ import annotations

import os
import weakref
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from ckptman.errors import CorruptError
from ckptman.storage.format.coverage import Ints as Ints
from ckptman.storage.format.coverage import flaw_of
from ckptman.storage.io.failure_cause import reading
from ckptman.storage.io.safe_open import open_regular

Rows = dict[int, Ints]
"""What one rank wrote: for d dimensions an array [n, 4 + 2 d], as in the table, but with the tensor's number first."""

FRAME_BYTES = 8192
"""A container is no more than this larger than its payload."""
HEAD = 4
"""Numbers of a row before its offsets."""
LITTLE = np.dtype("<i8")
_MANY = 256
"""Candidates along one dimension from which on it pays to ask the others too."""
_REMEDY = "restore an older checkpoint, or bring this one back from a copy"
_ROWS_AT_ONCE = 16_384
_ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "quint8", "qint8", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **dict.fromkeys(("float4_e2m1fn_x2", *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32", "bcomplex32", "qint32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


def item_bytes(dtype: str) -> int | None:
    """Return bytes of one element of torch's dtype of that name; None where they are not known, or not whole."""
    return _ITEM_BYTES.get(dtype)


class TensorRecord(BaseModel):
    """A tensor: its dtype (torch's name), its global shape, and where the rows of its chunks are in the table."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    dtype: str
    shape: tuple[int, ...]
    start: int
    count: int
    axis: int


@dataclass(frozen=True)
class Chunks:
    """The chunks of one tensor: views into the table, sorted by `offsets[:, axis]`."""

    file: Ints
    offset: Ints
    bytes: Ints
    payload: Ints
    offsets: Ints
    sizes: Ints
    axis: int

    def __len__(self) -> int:
        return len(self.file)

    def boxes(self) -> list[tuple[list[int], list[int]]]:
        """Return offsets and sizes of all chunks."""
        return list(zip(self.offsets.tolist(), self.sizes.tolist()))

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> Ints:
        """Return the rows, ascending, of the chunks that have at least one element in common with a box."""
        dims = self.offsets.shape[1]
        if len(offsets) != dims or len(sizes) != dims:
            raise ValueError(f"a box of {len(offsets)} dimensions in a tensor of {dims}")
        if not len(self) or not all(size > 0 for size in sizes):
            return np.empty(0, np.int64)
        if not dims:
            return np.arange(len(self))
        if len(self) == 1:
            both = zip(offsets, sizes, self.offsets[0].tolist(), self.sizes[0].tolist())
            meets = all(low < begin + length and low + size > begin and length > 0 for low, size, begin, length in both)
            return np.arange(int(meets))
        low, high = self._reach(self.axis, offsets, sizes)
        rows: slice | Ints = slice(low, high)
        if high - low > _MANY:
            best = high - low
            for dim in self._varying:
                first, last = self._reach(dim, offsets, sizes)
                if last - first < best:
                    best, rows = last - first, np.sort(self._orders[dim][0][first:last])
        begins, lengths = self.offsets[rows], self.sizes[rows]
        box = np.array([offsets, sizes])
        keep = (begins < box[0] + box[1]) & (begins + lengths > box[0]) & (lengths > 0)
        found = np.flatnonzero(keep.all(axis=1))
        return found + low if isinstance(rows, slice) else rows[found]

    @cached_property
    def _varying(self) -> list[int]:
        """The dimensions in which not all chunks begin at the same place."""
        return [int(dim) for dim in np.flatnonzero((self.offsets != self.offsets[0]).any(axis=0))]

    @cached_property
    def _orders(self) -> dict[int, tuple[Ints, Ints, Ints]]:
        return {}

    def _reach(self, dim: int, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
        """Where, in the order of one dimension, the chunks are that can touch the box in that dimension."""
        if dim not in self._orders:
            order = np.arange(len(self)) if dim == self.axis else np.argsort(self.offsets[:, dim], kind="stable")
            begins = self.offsets[order, dim]
            # The farthest end so far only grows, even where a long chunk precedes short ones.
            self._orders[dim] = order, begins, np.maximum.accumulate(begins + self.sizes[order, dim])
        _, begins, ends = self._orders[dim]
        return bisect_right(ends, offsets[dim]), bisect_left(begins, offsets[dim] + sizes[dim])


class RowFile:
    """The numbers in a file, read when they are wanted: on a large run the whole table is larger than what is needed.

    Not mapped: a file that is cut short while it is looked at would end the process, not the load.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = open_regular(path)
        weakref.finalize(self, os.close, self._fd)
        self.size_bytes = os.fstat(self._fd).st_size

    def __len__(self) -> int:
        return self.size_bytes // LITTLE.itemsize

    def __getitem__(self, which: slice) -> Ints:
        size = (which.stop - which.start) * LITTLE.itemsize
        with reading(self._path, _REMEDY):
            data = os.pread(self._fd, size, which.start * LITTLE.itemsize)
        if len(data) != size:
            raise CorruptError(f"{self._path} ends early: it has changed since it was opened; {_REMEDY}")
        return np.frombuffer(data, LITTLE)


class ChunkTable:
    """The table of a checkpoint, from the file (by `open`) or from what `assemble` made."""

    def __init__(
        self, tensors: Mapping[str, TensorRecord], rows: Ints | RowFile, where: str = "the chunk table"
    ) -> None:
        self._tensors = tensors
        self._rows = rows
        self._where = where
        self._last: tuple[str, Chunks] | None = None

    @classmethod
    def open(cls, path: Path, tensors: Mapping[str, TensorRecord], expected_bytes: int) -> ChunkTable:
        """Return the table in a file, of which rows are read as they are wanted. Raises: CorruptError, OSError."""
        rows = RowFile(path)
        if rows.size_bytes != expected_bytes:
            raise CorruptError(f"{path} has {rows.size_bytes} bytes instead of {expected_bytes}; {_REMEDY}")
        if expected_bytes % LITTLE.itemsize:
            raise CorruptError(f"{path} is not a chunk table: {expected_bytes} bytes are not whole numbers; {_REMEDY}")
        return cls(tensors, rows, str(path))

    def chunks(self, name: str) -> Chunks:
        """Return the chunks of a tensor. Raises: KeyError; CorruptError where the table ends before them."""
        if self._last is None or self._last[0] != name:
            record, rows = self._tensors[name], self._rows_of(name)
            dims = len(record.shape)
            boxes = rows[:, HEAD : HEAD + dims], rows[:, HEAD + dims :]
            self._last = name, Chunks(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], *boxes, record.axis)
        return self._last[1]

    def whole_tensors(self) -> dict[str, tuple[int, int, int]]:
        """Return file, offset and bytes of each tensor that is one chunk, as most small tensors are, by name."""
        if isinstance(self._rows, RowFile):
            return {}
        found: dict[str, tuple[int, int, int]] = {}
        alike: dict[int, list[str]] = {}
        for name, record in self._tensors.items():
            if record.count == 1:
                alike.setdefault(len(record.shape), []).append(name)
        for dims, names in alike.items():
            starts = np.array([self._tensors[name].start for name in names], np.int64)
            rows = self._rows[starts[:, None] + np.arange(HEAD + 2 * dims)]
            is_whole = _are_whole(rows, [self._tensors[name].shape for name in names])
            places = rows[:, :3].tolist()
            found |= {name: tuple(place) for name, place, whole in zip(names, places, is_whole.tolist()) if whole}
        return found

    def check(self, files: Sequence[tuple[str, int]], names: Iterable[str] | None = None) -> None:
        """Raises: CorruptError where a row of a tensor (of these; None: of any) cannot be; KeyError.

        `files`: names and bytes, by number.
        """
        ends = np.array([size for _, size in files], np.int64)
        # Small tensors of as many dimensions are looked at together: a call of numpy costs more than a row.
        waiting: dict[int, list[str]] = {}
        counts: dict[int, int] = {}
        for name in self._tensors if names is None else names:
            record = self._tensors[name]
            shape, dims, item = record.shape, len(record.shape), item_bytes(record.dtype) or 1
            if min(shape, default=0) < 0 or max(shape, default=0) >= 2**62 or prod(shape) * item >= 2**62:
                raise self._corrupt(name, f"no tensor has the shape {list(shape)}")
            if prod(shape) and not record.count:
                raise self._corrupt(name, "no part of it was saved")
            waiting.setdefault(dims, []).append(name)
            counts[dims] = counts.get(dims, 0) + record.count
            if counts[dims] > _ROWS_AT_ONCE:
                self._check_rows(waiting.pop(dims), files, ends)
                del counts[dims]
        for together in waiting.values():
            self._check_rows(together, files, ends)

    def _rows_of(self, name: str) -> Ints:
        record = self._tensors[name]
        width = HEAD + 2 * len(record.shape)
        end = record.start + record.count * width
        if (
            record.start < 0
            or record.count < 0
            or end > len(self._rows)
            or not 0 <= record.axis < max(len(record.shape), 1)
        ):
            raise self._corrupt(name, f"its rows ({record.count} from number {record.start}) are not in the table")
        return self._rows[record.start : end].reshape(record.count, width)

    def _check_rows(self, names: Sequence[str], files: Sequence[tuple[str, int]], ends: Ints) -> None:
        """Check all rows of tensors of as many dimensions."""
        parts = [self._rows_of(name) for name in names]
        counts = [len(part) for part in parts]
        records = [self._tensors[name] for name in names]
        dims = len(records[0].shape)
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        shape = np.repeat(
            np.array([record.shape for record in records], np.int64).reshape(len(records), dims), counts, axis=0
        )
        items = np.repeat(np.array([item_bytes(record.dtype) or 0 for record in records], np.int64), counts)
        first = np.cumsum([0, *counts[:-1]])
        file, offset, size, payload = (rows[:, column] for column in range(HEAD))
        offsets, sizes = rows[:, HEAD : HEAD + dims], rows[:, HEAD + dims :]

        def require(good: NDArray[np.bool_], what: str, in_file: bool = False) -> None:
            if not good.all():
                row = int(np.argmin(good))
                of = int(np.searchsorted(first, row, side="right")) - 1
                raise self._flaw(names[of], row - int(first[of]), what, files if in_file else None)

        # Nothing here is added up before it is known to be small: what is damaged must not wrap around.
        inside = (offsets >= 0) & (sizes >= 0) & (offsets <= shape)
        require(np.all(inside & (sizes <= shape - offsets), axis=1), "lies outside of the tensor")
        require((file >= 0) & (file < len(files)), "is in a file that there is not")
        room = ends[file]
        inside = (offset >= 0) & (size >= 0) & (offset <= room)
        require(inside & (size <= room - offset), "lies outside of its file", in_file=True)
        within = payload - offset
        around = size - sizes.prod(axis=1) * items
        inside = (within >= 0) & (within <= size)
        inside &= (items == 0) | ((within <= around) & (around <= FRAME_BYTES))
        require(inside | (payload == -1), "has a payload that does not fit its container", in_file=True)
        if dims:
            axes = np.repeat(np.array([record.axis for record in records], np.int64), counts)
            begins = np.take_along_axis(offsets, axes[:, None], axis=1)[:, 0]
            in_turn = np.ones(len(rows), np.bool_)
            in_turn[1:] = begins[1:] >= begins[:-1]
            in_turn[first[first < len(rows)]] = True
            require(in_turn, "is not where its offset belongs")

    def _flaw(self, name: str, row: int, what: str, files: Sequence[tuple[str, int]] | None) -> CorruptError:
        chunks = self.chunks(name)
        flaw = (
            f"chunk {row} of {len(chunks)} {what} (offsets {chunks.offsets[row].tolist()}, "
            f"sizes {chunks.sizes[row].tolist()} of {list(self._tensors[name].shape)})"
        )
        if files is not None:
            file, size = files[int(chunks.file[row])]
            begin, length, payload = int(chunks.offset[row]), int(chunks.bytes[row]), int(chunks.payload[row])
            flaw += f": {length} bytes at {begin}, payload at {payload}, in {file} of {size} bytes"
        return self._corrupt(name, flaw)

    def _corrupt(self, name: str, flaw: str) -> CorruptError:
        return CorruptError(f"{self._where}: {name}: {flaw}; {_REMEDY}")


def assemble(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], parts: Sequence[Rows]
) -> tuple[dict[str, TensorRecord], Ints]:
    """Return the records by name, and the table, out of what all ranks wrote: `parts[i]` is in file number i.

    `tensors` are names, dtypes and shapes; a row names one by its place in this list. Chunks without elements are left
    out; of a tensor without elements one stays. `parts` is gone through twice, and only a part at a time is needed.
    Raises: ValueError naming the first tensor that the chunks do not fill exactly. Leader only.
    """
    dims_of = np.array([len(shape) for _, _, shape in tensors], np.int64)
    bare = np.array([0 in shape for _, _, shape in tensors], np.bool_)
    counts = np.zeros(len(tensors), np.int64)
    for part in parts:
        for dims, rows in part.items():
            numbers = rows[:, 0]
            if len(rows) and not 0 <= numbers.min() <= numbers.max() < len(tensors):
                raise ValueError(f"there is a chunk of a tensor that is none of the {len(tensors)}")
            for number in numbers[dims_of[numbers] != dims]:
                name, _, shape = tensors[number]
                raise ValueError(f"{name} {list(shape)}: a chunk of it has {dims} dimensions")
            counts += np.bincount(_worth(rows, dims, bare)[:, 0], minlength=len(tensors))
    counts[bare] = np.minimum(counts[bare], 1)

    table = np.empty(int((counts * (HEAD + 2 * dims_of)).sum()), np.int64)
    firsts, bodies, starts, end = np.zeros_like(counts), {}, np.zeros_like(counts), 0
    for dims in sorted(set(dims_of.tolist())):
        own, width = np.flatnonzero(dims_of == dims), HEAD + 2 * dims
        firsts[own] = np.cumsum(counts[own]) - counts[own]
        starts[own] = end + firsts[own] * width
        total = int(counts[own].sum())
        bodies[dims] = table[end : end + total * width].reshape(total, width)
        end += total * width
    filled = np.zeros_like(counts)
    for file, part in enumerate(parts):
        for dims, rows in part.items():
            rows = _worth(rows, dims, bare)
            rows = rows[np.argsort(rows[:, 0], kind="stable")]
            numbers = rows[:, 0]
            place = filled[numbers] + np.arange(len(rows)) - np.searchsorted(numbers, numbers)
            filled += np.bincount(numbers, minlength=len(tensors))
            stays = place < counts[numbers]
            target = (firsts[numbers] + place)[stays]
            bodies[dims][target] = rows[stays]
            bodies[dims][target, 0] = file

    records: dict[str, TensorRecord] = {}
    whole = np.zeros(len(tensors), np.bool_)
    for dims, body in bodies.items():
        own = np.flatnonzero((dims_of == dims) & (counts == 1))
        whole[own] = _are_whole(body[firsts[own]], [tensors[number][2] for number in own.tolist()])
    places = zip(tensors, firsts.tolist(), counts.tolist(), starts.tolist(), whole.tolist())
    for (name, dtype, shape), first, count, start, is_whole in places:
        axis = 0 if is_whole else _arrange(bodies[len(shape)][first : first + count], shape, name)
        records[name] = TensorRecord(dtype=dtype, shape=shape, start=start, count=count, axis=axis)
    return records, table


def _are_whole(rows: Ints, shapes: Sequence[tuple[int, ...]]) -> NDArray[np.bool_]:
    """Return which chunks, of tensors of as many dimensions, are all of their tensors."""
    boxes = np.array([(*[0] * len(shape), *shape) for shape in shapes], np.int64).reshape(
        len(rows), rows.shape[1] - HEAD
    )
    return np.array((rows[:, HEAD:] == boxes).all(axis=1), np.bool_)


def _worth(rows: Ints, dims: int, bare: NDArray[np.bool_]) -> Ints:
    """The rows that have elements, or whose tensor has none."""
    full = rows[:, HEAD + dims :].all(axis=1)
    return rows if full.all() else rows[full | bare[rows[:, 0]]]


def _arrange(rows: Ints, shape: tuple[int, ...], name: str) -> int:
    """Sort the rows of a tensor in their place, and return the axis. Raises: ValueError."""
    dims = len(shape)
    offsets, sizes = rows[:, HEAD : HEAD + dims], rows[:, HEAD + dims :]
    places = [np.unique(offsets[:, dim]) for dim in range(dims)]
    order = sorted(range(dims), key=lambda dim: -len(places[dim]))
    if len(rows) > 1 and dims:
        # Along `axis` first, in the other dimensions where they begin at the same place: a grid is then in row order.
        rows[:] = rows[np.lexsort([offsets[:, dim] for dim in reversed(order)])]
    flaw = None if _is_grid(offsets, sizes, places, order, shape) else flaw_of(offsets, sizes, shape)
    if flaw is not None:
        raise ValueError(f"{name} {list(shape)} is not filled exactly by its chunks: {flaw}")
    return order[0] if order else 0


def _is_grid(offsets: Ints, sizes: Ints, places: Sequence[Ints], order: Sequence[int], shape: tuple[int, ...]) -> bool:
    """Whether chunks in row order, outer dimensions first, are all those between the places where any begins."""
    form = [len(places[dim]) for dim in order]
    if not len(offsets) or prod(form) != len(offsets):
        return False
    for at, dim in enumerate(order):
        along = [-1 if other == at else 1 for other in range(len(order))]
        begins, steps = places[dim].reshape(along), np.diff(places[dim], append=shape[dim]).reshape(along)
        if places[dim][0] or steps.min() <= 0 or (sizes[:, dim].reshape(form) != steps).any():
            return False
        if (offsets[:, dim].reshape(form) != begins).any():
            return False
    return True


def pack(rows: Rows) -> bytes:
    """Pack the rows of one rank, small enough to be sent: some ten bytes a row where shapes repeat."""
    columns = [np.array([len(rows), *(number for dims in rows for number in (dims, len(rows[dims])))], LITTLE)]
    for array in rows.values():
        packed = array.T.astype(LITTLE)
        packed[3] -= packed[1]
        packed[1, 1:] -= array[:-1, 1] + array[:-1, 2]
        packed[0, 1:] -= array[:-1, 0]
        columns.append(packed.reshape(-1))
    # All first bytes, then all second bytes: the upper ones are zero.
    planes = np.concatenate(columns).view(np.uint8).reshape(-1, 8).T
    return zlib.compress(planes.tobytes(), 1)


def unpack(data: bytes) -> Rows:
    """Return what `pack` was given."""
    planes = np.frombuffer(zlib.decompress(data), np.uint8).reshape(8, -1)
    numbers = np.ascontiguousarray(planes.T).view(LITTLE).reshape(-1)
    groups = int(numbers[0])
    rows: Rows = {}
    begin = 1 + 2 * groups
    for dims, count in numbers[1:begin].reshape(groups, 2).tolist():
        width = HEAD + 2 * dims
        packed = numbers[begin : begin + width * count].reshape(width, count).copy()
        begin += width * count
        packed[1, 1:] += packed[2, :-1]
        packed[:2] = np.cumsum(packed[:2], axis=1)
        packed[3] += packed[1]
        rows[dims] = np.ascontiguousarray(packed.T)
    return rows
