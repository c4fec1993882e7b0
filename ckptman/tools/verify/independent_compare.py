"""Comparing what was loaded with what was saved, by another way than it was loaded.

It shares nothing with `loading.read_tensors` and `io.checked_reader` but the chunk table, on purpose: an error of
theirs must not hide itself. Which chunks touch some rows follows from arithmetic over all of them. Whole blocks are
compared by the digests that were made of them when they were saved; what lies in the first and the last block of a
range, and what has no digests, with the bytes of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_128_digest

from ckptman.engine.loading.checkpoint_reader import ChunkPlace
from ckptman.errors import CorruptError
from ckptman.storage.format.chunk_table import Chunks, Ints
from ckptman.storage.format.coverage import flaw_of
from ckptman.storage.io.checksums import DIGEST_BYTES, Digests
from ckptman.storage.io.threads import share_out
from ckptman.tools.verify.chunk_files import Bytes, Saved, Tensors, rows_of

PIECE_BYTES = 256 * 1024
"""What is read and compared at a time: it stays in the cache of the core."""


class LoadedRows(NamedTuple):
    """Rows [first, last) of a tensor as they were loaded, and their bytes."""

    saved: Saved
    first: int
    last: int
    data: Bytes


@dataclass
class _Part:
    """The rows of a shard that lie in one chunk, and how many of their elements differ.

    `changed`: places where the file holds what was loaded, but not what was saved.
    """

    shard: int
    chunk: ChunkPlace
    low: int
    high: int
    elements: int
    wrong: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Piece:
    """Loaded bytes and their place in the file. `digests`: of the blocks that they are, if they are whole blocks."""

    part: _Part
    offset: int
    here: Bytes
    digests: bytes = b""


class IndependentCompare:
    """Compares loaded rows with a checkpoint, in one process with a few threads. One caller at a time."""

    def __init__(self, tensors: Tensors, threads: int = 1) -> None:
        self._tensors, self._threads = tensors, threads

    def problems(self, shards: Sequence[LoadedRows]) -> Iterator[str]:
        """Yield how what was loaded differs from what was saved."""
        parts: list[_Part] = []
        pieces: list[_Piece] = []
        for number, shard in enumerate(shards):
            try:
                for part, here in self._parts(number, shard):
                    parts.append(part)
                    pieces += self._pieces(part, here, shard.saved)
            except (CorruptError, OSError, RuntimeError) as error:
                yield f"{shard.saved.name}: {_text(error)}"

        def check(number: int, scratch: memoryview) -> None:
            piece = pieces[number]
            if piece.digests and b"".join(_digests_of(piece)) == piece.digests:
                return
            there = self._tensors.file(piece.part.chunk.file).read(piece.offset, piece.here.nbytes, scratch)
            item_bytes = shards[piece.part.shard].saved.dtype.itemsize
            if not _compare(piece.part, item_bytes, piece.here, there) and piece.digests:
                piece.part.changed.append(piece.offset + _first_wrong(piece))

        try:
            longest = max((piece.here.nbytes for piece in pieces), default=0)
            share_out(len(pieces), check, threads=self._threads, scratch_bytes=max(longest, PIECE_BYTES))
        except (CorruptError, OSError) as error:
            yield _text(error)
        for part in parts:
            about = f"{shards[part.shard].saved.name}: rows {part.low} to {part.high - 1}"
            if part.wrong:
                wrong = f"{sum(part.wrong)} of {part.elements} elements"
                yield f"{about} differ from what is in {part.chunk.file}: {wrong}"
            if part.changed:
                yield f"{about} are not what was saved: {part.chunk.file} has changed at byte {min(part.changed)}"

    def _parts(self, number: int, shard: LoadedRows) -> Iterator[tuple[_Part, Bytes]]:
        """Yield the parts of a shard, each with its bytes as [rows, ...]. Raises: CorruptError (they do not make it
        up)."""
        saved, first, last = shard.saved, shard.first, shard.last
        chunks = self._tensors.chunks(saved)
        begins, ends = rows_of(chunks)
        low, high = np.maximum(begins, first), np.minimum(ends, last)
        near = np.flatnonzero((low < high) & chunks.sizes[:, 1:].all(axis=1))
        if shard.data.nbytes and not _are_in_turn(chunks, near, low, high, shard):
            offsets = np.column_stack([low[near] - first, chunks.offsets[near, 1:]])
            sizes = np.column_stack([high[near] - low[near], chunks.sizes[near, 1:]])
            flaw = flaw_of(offsets, sizes, (last - first, *saved.shape[1:])) if saved.shape else "it is saved twice"
            if flaw is not None:
                raise CorruptError(f"rows {first} to {last - 1} were not saved exactly once: {flaw}")
        for row in near.tolist():
            chunk = self._tensors.chunk(chunks, row)
            begin, end = int(low[row]), int(high[row])
            here = _box(shard, begin - first, end - first, chunk)
            yield _Part(number, chunk, begin, end, here.nbytes // saved.dtype.itemsize), here

    def _pieces(self, part: _Part, here: Bytes, saved: Saved) -> Iterator[_Piece]:
        """Yield the pieces of a part to compare; a part that only torch can read is compared at once."""
        inside = part.low - (part.chunk.offsets[0] if saved.shape else 0)
        payload = self._tensors.payload(saved, part.chunk)
        if payload is None:
            there = self._tensors.torch_load(saved, part.chunk)[inside : inside + part.high - part.low]
            _compare(part, saved.dtype.itemsize, here, there)
            return
        offset = payload + inside * (here.nbytes // len(here))
        digests = self._tensors.state.digests(part.chunk.file)
        if digests is not None and here.flags.c_contiguous and offset % saved.dtype.itemsize == 0:
            yield from _in_blocks(part, here.reshape(-1), offset, digests)
        else:
            for at, piece in _cut(here.reshape(-1) if here.flags.c_contiguous else here, offset):
                yield _Piece(part, at, piece)


def _are_in_turn(chunks: Chunks, near: Ints, low: Ints, high: Ints, shard: LoadedRows) -> bool:
    """Whether chunks as wide as the tensor follow each other and make up a shard, as most do."""
    begins, ends = [shard.first, *high[near].tolist()], [*low[near].tolist(), shard.last]
    return begins == ends and bool((chunks.sizes[near, 1:] == shard.saved.shape[1:]).all())


def _box(shard: LoadedRows, low: int, high: int, chunk: ChunkPlace) -> Bytes:
    """Return the bytes of local rows [low, high) that are in the columns of a chunk, as [rows, ...]."""
    shape, item = shard.saved.shape, shard.saved.dtype.itemsize
    rows = shard.data.reshape(shard.last - shard.first, shard.saved.row_bytes)[low:high]
    if chunk.sizes[1:] == shape[1:]:
        return rows
    *outer, (begin, size) = zip(chunk.offsets[1:], chunk.sizes[1:])
    columns = rows.reshape(high - low, *shape[1:-1], shape[-1] * item)
    beyond = [slice(at, at + length) for at, length in outer]
    where = (slice(None), *beyond, slice(begin * item, (begin + size) * item))
    return columns[where]


def _in_blocks(part: _Part, here: Bytes, offset: int, digests: Digests) -> Iterator[_Piece]:
    """Cut flat bytes, at `offset` of their file, into whole blocks and what is around them."""
    block, end = digests.block_bytes, offset + len(here)
    low, high = -(-offset // block) * block, min(end, digests.size_bytes) // block * block
    low, high = (low, high) if low < high else (end, end)
    step = max(block, PIECE_BYTES // block * block)
    for at, piece in _cut(here[: low - offset], offset):
        yield _Piece(part, at, piece)
    for at in range(low, high, step):
        stop = min(at + step, high)
        wanted = digests.blocks[at // block * DIGEST_BYTES : stop // block * DIGEST_BYTES]
        yield _Piece(part, at, here[at - offset : stop - offset], wanted)
    for at, piece in _cut(here[high - offset :], high):
        yield _Piece(part, at, piece)


def _first_wrong(piece: _Piece) -> int:
    """Return where in a piece the first block begins that does not match its digest."""
    found = _digests_of(piece)
    wanted = [piece.digests[at : at + DIGEST_BYTES] for at in range(0, len(piece.digests), DIGEST_BYTES)]
    number = next((number for number, pair in enumerate(zip(found, wanted)) if pair[0] != pair[1]), 0)
    return number * (len(piece.here) // len(wanted))


def _digests_of(piece: _Piece) -> list[bytes]:
    data = piece.here.data
    block = len(data) * DIGEST_BYTES // len(piece.digests)
    return [xxh3_128_digest(data[at : at + block]) for at in range(0, len(data), block)]


def _cut(here: Bytes, offset: int) -> Iterator[tuple[int, Bytes]]:
    """Cut bytes that are contiguous in a file, from `offset` on, into pieces that are compared at a time."""
    if not here.nbytes:
        return
    if here.nbytes <= PIECE_BYTES:
        yield offset, here
    elif here.ndim == 1:
        for at in range(0, len(here), PIECE_BYTES):
            yield offset + at, here[at : at + PIECE_BYTES]
    else:
        row_bytes = here.nbytes // len(here)
        rows = PIECE_BYTES // row_bytes
        for at in range(0, len(here), max(rows, 1)):
            if rows:
                yield offset + at * row_bytes, here[at : at + rows]
            else:
                yield from _cut(here[at], offset + at * row_bytes)


def _compare(part: _Part, item_bytes: int, here: Bytes, there: Bytes) -> int:
    """Return how many elements differ, and note it in the part."""
    # Bytes, not values: NaN equals NaN, and 0.0 is not -0.0.
    there = there.reshape(here.shape)
    if np.array_equal(here, there):
        return 0
    part.wrong.append(int((here != there).reshape(-1, item_bytes).any(axis=1).sum()))
    return part.wrong[-1]


def _text(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
