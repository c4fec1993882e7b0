"""Which ranks read which bytes in a load, for all ranks at a time: arithmetic on arrays, no rank and no tensor.

The twin of what each rank does for itself in `loading.read_tensors` and `loading.exchange`, seen from the other side:
chunks look for the ranks that need them. Tests hold it against both. Shards are rows as `torch.chunk` cuts them; R
replicas of a shard read it together, as `loading.exchange` has it on one node, each an equal length of the line of all
its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptman.engine.loading.exchange import BAND_BYTES, MEMBERS, SHARED_BYTES
from ckptman.storage.format.chunk_table import Chunks, Ints
from ckptman.storage.io.checked_reader import GAP_BYTES
from ckptman.tools.verify.saved_tensors import Saved, rows_of


class Readers(NamedTuple):
    """Rows [low, high) of a tensor, disjoint and ascending; `ranks` [n, len(low)]: the n ranks that read each."""

    low: Ints
    high: Ints
    ranks: Ints


class Overlaps(NamedTuple):
    """Where readers meet chunks: numbers of both, and the rows [low, high) that they have in common."""

    reader: Ints
    chunk: Ints
    low: Ints
    high: Ints


@dataclass
class _Group:
    """Replicas that read together, from number `first` on. Per shard: bytes of its line, and how far it was cut."""

    first: int
    members: int
    total: Ints
    start: Ints


def readers_of(
    tensors: Sequence[Saved], layout: tuple[int, ...], shards: range
) -> Iterator[tuple[Saved, list[Readers]]]:
    """Yield for each tensor, in the order of the line, which ranks read what of these shards."""
    replicas, count = (1, *layout)[-2:]
    numbers = np.array(shards, np.int64)
    firsts = range(0, replicas, MEMBERS)
    groups = [
        _Group(first, min(MEMBERS, replicas - first), np.zeros_like(numbers), np.zeros_like(numbers))
        for first in firsts
    ]
    line = sorted(tensors, key=lambda saved: saved.name)
    for saved in line:
        low, high = rows_of_shards(saved, count, numbers)
        for group in groups:
            together = _is_shared(saved, group.members, high - low)
            group.total += np.where(together, (high - low) * saved.row_bytes, 0)
    for saved in line:
        if saved.shape:
            yield saved, [each for group in groups for each in _readers(saved, group, count, numbers)]
        else:  # whole on every rank
            everyone = (np.arange(replicas)[:, None] * count + numbers).reshape(-1, 1)
            yield saved, [Readers(np.zeros(1, np.int64), np.ones(1, np.int64), everyone)]


def rows_of_shards(saved: Saved, count: int, numbers: Ints) -> tuple[Ints, Ints]:
    """Return the first and the last row of some of `count` shards."""
    share = saved.shard_rows(count)
    return np.minimum(numbers * share, saved.rows), np.minimum((numbers + 1) * share, saved.rows)


def copies_of(saved: Saved, layout: tuple[int, ...]) -> int:
    """Return about how many ranks read each element of a tensor."""
    if not saved.shape:
        return math.prod(layout)
    replicas, count = (1, *layout)[-2:]
    together = _is_shared(saved, min(replicas, MEMBERS), rows_of_shards(saved, count, np.zeros(1, np.int64))[1])
    return -(-replicas // MEMBERS) if together.all() else replicas


def overlaps(chunks: Chunks, readers: Readers) -> Overlaps:
    """Return all that readers and chunks have in common."""
    begins, ends = rows_of(chunks)
    first = np.searchsorted(readers.high, begins, "right")
    last = np.searchsorted(readers.low, ends, "left")
    count = np.where(chunks.sizes.all(axis=1), np.maximum(last - first, 0), 0)
    chunk = np.repeat(np.arange(len(chunks)), count)
    reader = np.arange(len(chunk)) + np.repeat(first - np.cumsum(count) + count, count)
    low = np.maximum(readers.low[reader], begins[chunk])
    high = np.minimum(readers.high[reader], ends[chunk])
    some = high > low
    return Overlaps(reader[some], chunk[some], low[some], high[some])


def bytes_of(saved: Saved, chunks: Chunks, found: Overlaps, is_ours: bool) -> tuple[Ints, Ints]:
    """Return the bytes [start, end) of the files that hold what readers and chunks have in common."""
    begins, _ = rows_of(chunks)
    row = chunks.sizes[:, 1:].prod(axis=1)[found.chunk] * saved.dtype.itemsize
    payload = chunks.payload[found.chunk]
    # In a foreign container the place of the payload is not known, but it is less than what is around it.
    begin = np.where(payload >= 0, payload, chunks.offset[found.chunk])
    start = begin + (found.low - begins[found.chunk]) * row
    end = start + (found.high - found.low) * row
    if is_ours and (payload < 0).any():  # only torch can read these, and it reads them whole
        start = np.where(payload >= 0, start, chunks.offset[found.chunk])
        end = np.where(payload >= 0, end, (chunks.offset + chunks.bytes)[found.chunk])
    return start, end


class Reads:
    """The ranges of files that each rank reads, and their totals."""

    def __init__(self, ranks: int, file_sizes: Ints, block_bytes: int) -> None:
        self._file_sizes, self._block_bytes = file_sizes, block_bytes
        self.bytes, self.files = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        self.ranges = self.wanted_bytes = 0
        self._waiting: list[tuple[Ints, Ints, Ints]] = []

    def add(self, rank: Ints, file: Ints, start: Ints, end: Ints) -> None:
        """Add bytes [start, end) of files, each read by one rank."""
        self.ranges += len(rank)
        self.wanted_bytes += int((end - start).sum())
        # Narrow while they wait: there are millions.
        self._waiting.append((rank * len(self._file_sizes) + file, start, end))

    def settle(self) -> None:
        """Count what was added since the last time. All ranges of a rank have to be settled together."""
        if not self._waiting:
            return
        key, start, end = (np.concatenate(column) for column in zip(*self._waiting))
        self._waiting = []
        order = np.lexsort((start, key))
        key, start, end = key[order], start[order], end[order]
        rank, file = np.divmod(key, len(self._file_sizes))
        # Whole blocks, as far as the file goes; what is near to each other is read in one call, with the gap.
        low = start - start % self._block_bytes
        high = np.maximum(np.minimum(end + -end % self._block_bytes, self._file_sizes[file]), end)
        is_other = np.ones(len(key), np.bool_)
        is_other[1:] = key[1:] != key[:-1]
        is_apart = is_other.copy()
        is_apart[1:] |= low[1:] > high[:-1] + GAP_BYTES
        firsts = np.flatnonzero(is_apart)
        read = np.maximum.reduceat(high, firsts) - low[firsts]
        # Not by weights of bincount: as floating-point numbers they are exact up to 2 ** 53 only.
        np.add.at(self.bytes, rank[firsts], read)
        self.files += np.bincount(rank[is_other], minlength=len(self.files))


def _readers(saved: Saved, group: _Group, count: int, numbers: Ints) -> Iterator[Readers]:
    low, high = rows_of_shards(saved, count, numbers)
    replicas = np.arange(group.first, group.first + group.members)[:, None]
    together = _is_shared(saved, group.members, high - low)
    alone = ~together
    if alone.any():
        yield Readers(low[alone], high[alone], replicas * count + numbers[alone])
    if not together.any():
        return
    rows, total, start = (high - low)[together, None], group.total[together, None], group.start[together, None]
    edges = total * np.arange(group.members + 1) // group.members
    cuts = low[together, None] + np.clip(-((start - edges) // saved.row_bytes), 0, rows)
    ranks = (replicas * count + numbers[together]).T
    yield Readers(cuts[:, :-1].reshape(-1), cuts[:, 1:].reshape(-1), ranks.reshape(1, -1))
    group.start += np.where(together, (high - low) * saved.row_bytes, 0)


def _is_shared(saved: Saved, members: int, rows: Ints) -> NDArray[np.bool_]:
    """Whether the replicas of shards of so many rows read them together (see `loading.exchange`)."""
    can = members > 1 and bool(saved.shape) and saved.row_bytes <= BAND_BYTES // members
    return (rows * saved.row_bytes >= SHARED_BYTES) & can
