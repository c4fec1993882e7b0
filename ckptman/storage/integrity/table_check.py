"""Whether the chunks of all tensors lie inside their files, and fill each tensor exactly.

Nearly all tensors are cut along one dimension into chunks that follow each other. Those are seen to be right together,
by a few operations on the rows of all of them; the others are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ckptman.errors import CorruptError, plain
from ckptman.storage.format.chunk_table import ChunkTable, TensorRecord, item_bytes
from ckptman.storage.format.coverage import first_flaw, flaw_of, has_few_corners
from ckptman.storage.format.index import Index

Files = Sequence[tuple[str, int]]
"""Names and sizes in bytes of the data files, by number; -1 where there is none."""
_GROUP_ROWS = 65536
"""Rows that are looked at together: of a checkpoint of thousands of ranks there are millions."""
_UNPROVED = "it is not proved that each element was saved once: there are too many chunks to see if two overlap"


def check_table(table: ChunkTable, index: Index, files: Files) -> list[str]:
    """What is wrong with the chunks of each tensor: they lie outside of their files, leave holes or overlap."""
    regular = _regular(table, index, files)
    problems = []
    for name, tensor in index.tensors.items():
        if name in regular:
            continue
        try:
            table.check(files, [name])
            chunks = table.chunks(name)
        except CorruptError as error:
            problems.append(str(error))
            continue
        flaw = flaw_of(chunks.offsets, chunks.sizes, tensor.shape, _UNPROVED)
        if flaw is not None and has_few_corners(chunks.offsets, tensor.shape):
            first = first_flaw(chunks.boxes(), tensor.shape)
            flaw = f"element {list(first[0])} was saved {first[1]} times, not once" if first is not None else None
        if flaw is not None:
            problems.append(f"{plain(name)} {list(tensor.shape)}: {flaw}")
    return problems


def _regular(table: ChunkTable, index: Index, files: Files) -> set[str]:
    """The tensors of which it is certain that nothing is wrong."""
    found: set[str] = set()
    waiting: dict[int, list[str]] = {}
    rows: dict[int, int] = {}
    for name, record in index.tensors.items():
        dims = len(record.shape)
        if not dims or record.count < 1 or item_bytes(record.dtype) is None or not _is_small(record):
            continue
        waiting.setdefault(dims, []).append(name)
        rows[dims] = rows.get(dims, 0) + record.count
        if rows[dims] >= _GROUP_ROWS:
            found |= _regular_of(table, index, waiting.pop(dims), files)
            rows[dims] = 0
    for names in waiting.values():
        found |= _regular_of(table, index, names, files)
    return found


def _is_small(record: TensorRecord) -> bool:
    """Whether nothing that is computed here can leave the range of an int64."""
    return min(record.shape) >= 0 and prod(max(length, 1) for length in record.shape) < 2**50


def _regular_of(table: ChunkTable, index: Index, names: Sequence[str], files: Files) -> set[str]:
    """The same, of tensors with as many dimensions. Their rows follow each other in `rows`, those of tensor t from
    `starts[t]` on."""
    try:
        table.check(files, names)
    except CorruptError:  # of one of them: then each is looked at by itself
        return set()
    parts = [table.chunks(name) for name in names]
    records = [index.tensors[name] for name in names]
    counts = np.array([len(part) for part in parts])
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    begins, lengths = (np.concatenate([getattr(part, field) for part in parts]) for field in ("offsets", "sizes"))
    shapes = np.repeat(np.array([record.shape for record in records], np.int64), counts, axis=0)
    axes = np.repeat(np.array([record.axis for record in records]), counts)[:, np.newaxis] == np.arange(shapes.shape[1])

    # Full in all dimensions but one, and in that one each begins where the one before ends.
    full = ((begins == 0) & (lengths == shapes) | axes).all(axis=1)
    begin, length, whole = (np.where(axes, each, 0).sum(axis=1) for each in (begins, lengths, shapes))
    end = begin + length
    before = np.concatenate([[0], end[:-1]])
    before[starts] = 0
    follows = begin == before
    good = np.logical_and.reduceat((lengths > 0).all(axis=1) & full & follows, starts)
    last = starts + counts - 1
    good &= end[last] == whole[last]
    return {name for name, fine in zip(names, good.tolist()) if fine}
