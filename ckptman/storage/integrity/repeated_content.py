"""Whether a later checkpoint holds anything new: told by digests of blocks, and where those do not tell, by bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ckptman.storage.format.chunk_table import Chunks, ChunkTable, Ints, item_bytes
from ckptman.storage.format.index import Index, data_files, open_table, read_digests, read_index
from ckptman.storage.format.manifest import Manifest
from ckptman.storage.integrity.damage_report import changed_blocks
from ckptman.storage.io.safe_open import open_regular

PARAMETER_BYTES = 4096
"""Smaller tensors are step counters, norms, biases: they may well stay as they are."""
_READ_BYTES = 1024 * 1024


def stale_parameters(folder: Path, manifest: Manifest, older_folder: Path, older: Manifest) -> list[str]:
    """The parameters, the largest first, if not one byte of them has changed since an older checkpoint of another step;
    else none. They are examples: smaller ones (see `parameters_of`) are not looked at.

    Only where all of them lie at the same places in both. Blocks that are nothing but a parameter are compared by their
    digests; a part of a block that holds other things too, and has changed, is read from both checkpoints.

    Raises: CorruptError where an index or a list of digests cannot be read, FormatVersionError, OSError.
    """
    size = manifest.block_bytes
    if manifest.step == older.step or size != older.block_bytes:
        return []
    index, before = read_index(folder, manifest, ranks=()), read_index(older_folder, older, ranks=())
    wanted = parameters_of(index)
    if index.files != before.files or not all(_alike(name, index, before) for name in wanted):
        return []
    table, older_table = open_table(folder, manifest, index), open_table(older_folder, older, before)
    table.check(data_files(manifest, index))
    older_table.check(data_files(older, before))
    ranges = _ranges(index, wanted, table, older_table)
    if ranges is None or not wanted:
        return []
    # What parameters share with others is read at the end: the rule is that training changed what is theirs alone.
    shared: dict[str, Ints] = {}
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    for rows in np.split(ranges, np.flatnonzero(np.diff(ranges[:, 0])) + 1):
        file = index.files[rows[0, 0]]
        if manifest.files[file] == older.files[file]:
            continue
        digests = read_digests(older_folder, file, older).blocks, read_digests(folder, file, manifest).blocks
        blocks = -(-manifest.files[file].bytes // size)
        own, shared[file] = _cut(rows[:, 1:], size, changed_blocks(*digests, blocks))
        if own:
            return []
    return [] if any(_differ(older_folder / file, folder / file, parts) for file, parts in shared.items()) else wanted


def parameters_of(index: Index) -> list[str]:
    """The tensors that are taken for parameters: floating-point ones of more than 4 KiB that are no optimizer's state.

    Where none is that large, all floating-point ones. The largest first, as the warning at save time names them.
    """
    floating = [
        (name, prod(each.shape) * (item_bytes(each.dtype) or 1))
        for name, each in index.tensors.items()
        if each.dtype.startswith(("float", "bfloat", "complex")) and "state" not in name.split(".")[:-1]
    ]
    floating.sort(key=lambda each: -each[1])
    return [name for name, size in floating if size > PARAMETER_BYTES] or [name for name, size in floating if size]


def _alike(name: str, index: Index, other: Index) -> bool:
    ours, theirs = index.tensors[name], other.tensors.get(name)
    return theirs is not None and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)


def _ranges(index: Index, names: Sequence[str], table: ChunkTable, other_table: ChunkTable) -> Ints | None:
    """Rows of a file's number, begin and end: where tensors lie. None where one does not lie there in both tables."""
    rows = [np.empty((0, 3), np.int64)]
    for name in names:
        chunks, others = table.chunks(name), other_table.chunks(name)
        if not all(map(np.array_equal, _places(chunks), _places(others))):
            return None
        item = item_bytes(index.tensors[name].dtype)
        plain = (chunks.payload >= 0) & (item is not None)
        begin = np.where(plain, chunks.payload, chunks.offset)
        end = begin + np.where(plain, chunks.sizes.prod(axis=1) * (item or 0), chunks.bytes)
        rows.append(np.stack([chunks.file, begin, end], axis=1))
    return np.concatenate(rows)


def _places(chunks: Chunks) -> tuple[Ints, ...]:
    return chunks.file, chunks.offset, chunks.bytes, chunks.payload, chunks.offsets, chunks.sizes


def _cut(ranges: Ints, size: int, changed: NDArray[np.bool_]) -> tuple[bool, Ints]:
    """Whether a block of `size` bytes that lies inside of a range has changed, and which parts of the other blocks to
    read: those in blocks that have."""
    begin, end = ranges[:, 0], ranges[:, 1]
    first, last = -(-begin // size), end // size
    # How many blocks changed before each one: a run has a changed one where the count grows along it.
    before = np.concatenate([[0], np.cumsum(changed)])
    own = bool((before[np.maximum(first, last)] > before[first]).any())
    middle = np.minimum(first * size, end)
    tail = np.maximum(last * size, middle)
    parts = np.concatenate([np.stack([begin, middle], axis=1), np.stack([tail, end], axis=1)])
    parts = parts[parts[:, 0] < parts[:, 1]]
    return own, parts[changed[parts[:, 0] // size]]


def _differ(path: Path, other: Path, parts: Ints) -> bool:
    """Whether two files differ in a part, a row of begin and end."""
    fd = other_fd = -1
    try:
        fd, other_fd = open_regular(path), open_regular(other)
        return any(
            os.pread(fd, size, at) != (data := os.pread(other_fd, size, at)) or len(data) < size
            for at, size in _pieces(parts)
        )
    finally:
        for each in {fd, other_fd} - {-1}:
            os.close(each)


def _pieces(parts: Ints) -> Iterator[tuple[int, int]]:
    """The same as places and sizes that fit the memory."""
    for begin, end in parts.tolist():
        for at in range(begin, end, _READ_BYTES):
            yield at, min(_READ_BYTES, end - at)
