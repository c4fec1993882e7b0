"""Making the chunk table of what each rank wrote: sent in few bytes, sorted, refused where a tensor is not filled."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from ckptman.format.chunk_table import HEAD, LITTLE, Ints, Rows, TensorRecord
from ckptman.format.coverage import flaw_of


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
    for (name, dtype, shape), first, count, start in zip(tensors, firsts.tolist(), counts.tolist(), starts.tolist()):
        axis = _arrange(bodies[len(shape)][first : first + count], shape, name)
        records[name] = TensorRecord(dtype=dtype, shape=shape, start=start, count=count, axis=axis)
    return records, table


def _worth(rows: Ints, dims: int, bare: NDArray[np.bool_]) -> Ints:
    """The rows that have elements, or whose tensor has none."""
    full = rows[:, HEAD + dims :].all(axis=1)
    return rows if full.all() else rows[full | bare[rows[:, 0]]]


def _arrange(rows: Ints, shape: tuple[int, ...], name: str) -> int:
    """Sort the rows of a tensor in their place, and return the axis. Raises: ValueError."""
    dims = len(shape)
    if len(rows) == 1 and rows[0, HEAD:].tolist() == [*[0] * dims, *shape]:
        return 0
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
