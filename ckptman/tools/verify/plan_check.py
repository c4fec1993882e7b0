"""Proof that a checkpoint can be planned onto any number of ranks, on one core and without reading a tensor.

`main` runs in a process of its own. Called by `ckptman verify --plan-only`, once the chunk table is known to lie inside
the files and to cover each tensor (`integrity.folder_check`).

For every rank of a layout it is computed which bytes it reads (`plan_ranges`): that they are all it needs, each once,
and how many they are. That the table says where the containers really are is seen in their sizes, and for some of them
by looking at them. Not proved: the values, and that the ranks' memory suffices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ckptman.engine.loading.checkpoint_reader import SavedState, size_of
from ckptman.errors import CorruptError
from ckptman.storage.format.chunk_table import Chunks, Ints
from ckptman.tools.verify import reports
from ckptman.tools.verify.plan_ranges import Overlaps, Readers, Reads, bytes_of, copies_of, overlaps, readers_of
from ckptman.tools.verify.reports import PlanReport
from ckptman.tools.verify.saved_tensors import Saved
from ckptman.tools.verify.witness import Witness, frame_if_any

RANGES_AT_A_TIME = 2_000_000
"""Ranges, and rows of the chunk table, that are in memory at a time: some 200 MB."""
CONTAINERS = 64
"""How many containers are looked at."""


def plan(
    folder: Path,
    world_sizes: Sequence[int],
    mesh: Sequence[int] | None = None,
    bandwidth: float | None = None,
    rank_bandwidth: float | None = None,
) -> Iterator[PlanReport]:
    """Plan a load on each of these numbers of ranks. Layouts are those of `reshard_check.check`.

    `bandwidth` of the whole file system and `rank_bandwidth` of each rank, in bytes per second, give the expected
    seconds of a load: the larger of all bytes by the one and those of the busiest rank by the other.

    Raises: NotFoundError, CorruptError, FormatVersionError if it cannot be read at all; ConfigError (no such mesh).
    """
    world_sizes = reports.world_sizes_with(world_sizes, mesh)
    begun = time.monotonic()
    state = SavedState.read(folder, rank=0)
    work = _Plan(state)
    for world_size in world_sizes:
        yield work.report(reports.layout_for(world_size, mesh), begun, bandwidth, rank_bandwidth)
        begun = time.monotonic()


class _Plan:
    """A checkpoint that is planned onto layouts, and the problems of its chunk table, whatever the layout."""

    def __init__(self, state: SavedState) -> None:
        self._state = state
        self._block_bytes = 1 if state.manifest is None else state.manifest.block_bytes
        self._file_sizes = np.array([size_of(state.folder / name) for name in state.index.files], np.int64)
        state.check(state.index.tensors)
        self._tensors = [Saved(name, each.shape, state.dtype(name)) for name, each in state.index.tensors.items()]
        self._unproved: list[str] = []
        self._problems = [*self._container_problems(), *_shared_bytes(state, self._tensors)]

    def report(
        self, layout: tuple[int, ...], begun: float, bandwidth: float | None, rank_bandwidth: float | None
    ) -> PlanReport:
        """Plan one layout."""
        world_size = math.prod(layout)
        reads = Reads(world_size, self._file_sizes, self._block_bytes)
        problems = [f"on {reports.text_of(layout)}: {why}" for why in self._plan(layout, reads)]
        total, most = int(reads.bytes.sum()), int(reads.bytes.max())
        seconds = [each / speed for each, speed in ((total, bandwidth), (most, rank_bandwidth)) if speed is not None]
        return PlanReport(
            world_size=world_size,
            problems=reports.shown([*self._problems, *problems]),
            bytes_total=total,
            bytes_per_rank_max=most,
            bytes_per_rank_mean=total / world_size,
            files_per_rank_max=int(reads.files.max()),
            ranges_total=reads.ranges,
            seconds=time.monotonic() - begun,
            load_seconds=max(seconds, default=None),
            wanted_bytes=reads.wanted_bytes,
            unproved=self._unproved,
        )

    def _plan(self, layout: tuple[int, ...], reads: Reads) -> Iterator[str]:
        for block in self._blocks(layout):
            for saved, parts in readers_of(self._tensors, layout, block):
                chunks = self._state.table.chunks(saved.name)
                for readers in parts:
                    found = overlaps(chunks, readers)
                    yield from _short(saved, chunks, readers, found)
                    start, end = bytes_of(saved, chunks, found, self._state.manifest is not None)
                    ranks = readers.ranks[:, found.reader]
                    copies = len(ranks)
                    file = np.tile(chunks.file[found.chunk], copies)
                    reads.add(ranks.reshape(-1), file, np.tile(start, copies), np.tile(end, copies))
            reads.settle()

    def _blocks(self, layout: tuple[int, ...]) -> Iterator[range]:
        """Yield the shards in blocks whose ranges fit into memory together."""
        shards = layout[-1]
        rows = sum(self._state.index.tensors[each.name].count * copies_of(each, layout) for each in self._tensors)
        expected = len(self._tensors) * math.prod(layout) + rows
        step = max(1, shards * RANGES_AT_A_TIME // max(expected, 1))
        for first in range(0, shards, step):
            yield range(first, min(first + step, shards))

    def _container_problems(self) -> Iterator[str]:
        """Yield containers with another place or size than the table says: all by arithmetic, some by looking."""
        odd: list[tuple[Saved, int]] = []
        seen: list[tuple[Saved, int]] = []
        total = 0
        for saved in self._tensors:
            chunks = self._state.table.chunks(saved.name)
            total += len(chunks)
            if self._state.manifest is not None:
                odd += [(saved, row) for row in np.flatnonzero(~_as_written(saved, chunks)).tolist()]
            if len(chunks):
                seen.append((saved, len(seen) * 7919 % len(chunks)))
        step = max(1, len(seen) // CONTAINERS)
        witness = Witness(self._state, None)
        for saved, row in [*odd[:CONTAINERS], *seen[::step][:CONTAINERS]]:
            (chunk,) = islice(self._state.all_chunks(saved.name), row, row + 1)
            try:
                if why := witness.misplaced(saved.dtype, chunk, self._state.payload(saved.name, chunk)):
                    yield f"{saved.name}: chunk {row} {why}"
            except (CorruptError, OSError) as error:
                yield f"{saved.name}: {str(error).partition(chr(10))[0]}"
        unsure = len(odd) if self._state.manifest is not None else total
        if unsure > CONTAINERS:
            self._unproved.append(
                f"where the elements of {unsure} of {total} saved chunks begin: another torch laid out their "
                f"containers, of which {min(CONTAINERS, unsure)} were looked at"
            )


def _short(saved: Saved, chunks: Chunks, readers: Readers, found: Overlaps) -> Iterator[str]:
    """Yield the ranks that do not get exactly as many elements as they need."""
    inner = chunks.sizes[:, 1:].prod(axis=1)
    got = np.zeros(len(readers.low), np.int64)
    np.add.at(got, found.reader, (found.high - found.low) * inner[found.chunk])
    need = (readers.high - readers.low) * math.prod(saved.shape[1:])
    wrong = np.flatnonzero(got != need)
    if len(wrong):
        more = readers.ranks[:, wrong].size - 1
        first = f"rank {readers.ranks[0, wrong[0]]}" + (f" and {more} more" if more else "")
        number = int(wrong[0])
        yield f"{first}: of {need[number]} elements of {saved.name} that are needed, {got[number]} were saved"


def _as_written(saved: Saved, chunks: Chunks) -> NDArray[np.bool_]:
    """Return which containers have the size, and the place of the payload, that torch gives them."""
    good: NDArray[np.bool_] = chunks.payload == -1
    for sizes in _distinct(chunks.sizes):
        frame = frame_if_any(saved.dtype, tuple(sizes.tolist()))
        if frame is not None:
            like = (chunks.sizes == sizes).all(axis=1) & (chunks.bytes == frame.size_bytes)
            good |= like & (chunks.payload - chunks.offset == len(frame.head))
    return good


def _distinct(sizes: Ints) -> Iterator[Ints]:
    """Yield the distinct rows. Where there are few, that is most of the speed of this module."""
    left = sizes
    while len(left):
        yield left[0]
        left = left[(left != left[0]).any(axis=1)]


def _shared_bytes(state: SavedState, tensors: Sequence[Saved]) -> Iterator[str]:
    """Yield the bytes of a file that belong to two chunks by the chunk table."""
    rows = sum(state.index.tensors[saved.name].count for saved in tensors)
    passes = -(-rows // (2 * RANGES_AT_A_TIME))
    for number in range(passes):
        columns: list[tuple[Ints, Ints, Ints, Ints]] = []
        for which, saved in enumerate(tensors):
            chunks = state.table.chunks(saved.name)
            mine = chunks.file % passes == number
            owner = np.full(int(mine.sum()), which)
            columns.append((chunks.file[mine], chunks.offset[mine], chunks.bytes[mine], owner))
        file, offset, size, owner = (np.concatenate(column) for column in zip(*columns))
        order = np.lexsort((offset, file))
        file, offset, size, owner = file[order], offset[order], size[order], owner[order]
        twice = np.flatnonzero((file[1:] == file[:-1]) & (offset[1:] < offset[:-1] + size[:-1]))
        for at in twice[: reports.PROBLEMS_SHOWN].tolist():
            one, other = (tensors[int(owner[each])].name for each in (at, at + 1))
            yield (
                f"bytes {offset[at + 1]} to {min(offset[at] + size[at], offset[at + 1] + size[at + 1])} of "
                f"{state.index.files[int(file[at])]} belong to a chunk of {one} and to another of {other}"
            )


def main(arguments: Sequence[str]) -> int:
    """Answer a request: a plan for each world size."""
    return reports.serve(arguments, lambda request: map(asdict, plan(Path(request.pop("folder")), **request)))
