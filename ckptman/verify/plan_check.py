"""Proof that a checkpoint can be planned onto any number of ranks, on one core and without reading a tensor.

`main` runs in a process of its own. Called by `ckptman verify --plan-only`.

For every rank of a layout it is computed which bytes it reads (`plan_ranges`): that they are all it needs, each once,
inside the files that are there, and how many they are. That a restore would compute the same is seen for some ranks, by
calling what a restore calls. That the chunk table says where the containers really are is seen in their sizes, and for
some of them by looking at them. Not proved: the values, and that the ranks' memory suffices.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ckptman._torch_compat import local_shape_and_offset
from ckptman.errors import CorruptError
from ckptman.format.chunk_table import Chunks, Ints
from ckptman.format.coverage import flaw_of
from ckptman.loading.checkpoint_reader import SavedState
from ckptman.loading.read import _Cut, fills_for_box
from ckptman.state.tensor_container import frame_of
from ckptman.verify import proof
from ckptman.verify.chunk_files import Saved, Tensors, rows_of
from ckptman.verify.container_check import Containers
from ckptman.verify.plan_ranges import Overlaps, Readers, Reads, copies_of, overlaps, readers_of, rows_of_shards
from ckptman.verify.proof import PlanReport

RANGES_AT_A_TIME = 2_000_000
"""Ranges, and rows of the chunk table, that are in memory at a time: some 200 MB."""
LOOKUPS = 20_000
"""Parts of chunks, over all tensors of a layout, for which what is computed is compared with what a restore does."""
ROWS_ASKED = 1_000_000
"""Rows of a shard up to which torch is asked for its place: it makes a list of all of them."""
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

    `bandwidth` of the whole file system and `rank_bandwidth` of each rank, in bytes per second, give the seconds that a
    load is expected to take: the larger of all bytes by the one and those of the busiest rank by the other.

    Raises: NotFoundError, CorruptError, FormatVersionError if it cannot be read at all; ConfigError (no such mesh).
    """
    world_sizes = proof.world_sizes_with(world_sizes, mesh)
    begun = time.monotonic()
    state = SavedState.read(folder, rank=0)
    work = _Plan(state)
    for world_size in world_sizes:
        yield work.report(proof.layout_for(world_size, mesh), begun, bandwidth, rank_bandwidth)
        begun = time.monotonic()


class _Plan:
    """A checkpoint that is planned onto layouts, and what is wrong with its chunk table whatever the layout."""

    def __init__(self, state: SavedState) -> None:
        self._state = state
        self._block_bytes = 1 if state.manifest is None else state.manifest.block_bytes
        self._problems: list[str] = []
        self._unproved: list[str] = []
        self._file_sizes = self._look_at_files()
        self._tensors = list(self._sound_tensors())
        self._look_at_containers()
        self._problems += _shared_bytes(state, self._tensors)

    def report(
        self, layout: tuple[int, ...], begun: float, bandwidth: float | None, rank_bandwidth: float | None
    ) -> PlanReport:
        """The plan of one layout."""
        world_size = math.prod(layout)
        reads = Reads(world_size, self._file_sizes, self._block_bytes)
        problems = [f"on {proof.text_of(layout)}: {why}" for why in self._plan(layout, reads)]
        total, most = int(reads.bytes.sum()), int(reads.bytes.max())
        seconds = [each / speed for each, speed in ((total, bandwidth), (most, rank_bandwidth)) if speed is not None]
        return PlanReport(
            world_size=world_size,
            problems=proof.shown([*self._problems, *problems]),
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
        for saved in self._tensors:
            yield from _differs_from_torch(saved, layout)
        purse = 0.0
        for block in self._blocks(layout):
            income = LOOKUPS * len(block) / layout[-1] / max(len(self._tensors), 1)
            for saved, parts in readers_of(self._tensors, layout, block):
                chunks = self._state.table.chunks(saved.name)
                purse += income
                for readers in parts:
                    found = overlaps(chunks, readers)
                    yield from self._short(saved, chunks, readers, found)
                    yield from self._add(saved, chunks, readers, found, reads)
                    # Both ends and what lies evenly between, for as long as the purse lasts: it may run into debt.
                    costs = 1 + np.bincount(found.reader, minlength=len(readers.low))
                    for number in _spread(np.flatnonzero(readers.high > readers.low), purse / costs.mean()):
                        if purse > 0:
                            purse -= int(costs[number])
                            yield from self._differs_from_restore(saved, chunks, readers, number)
            reads.settle()

    def _blocks(self, layout: tuple[int, ...]) -> Iterator[range]:
        """The shards in blocks whose ranges can be in memory together."""
        shards = layout[-1]
        rows = sum(self._state.index.tensors[each.name].count * copies_of(each, layout) for each in self._tensors)
        expected = len(self._tensors) * math.prod(layout) + rows
        step = max(1, shards * RANGES_AT_A_TIME // max(expected, 1))
        for first in range(0, shards, step):
            yield range(first, min(first + step, shards))

    def _short(self, saved: Saved, chunks: Chunks, readers: Readers, found: Overlaps) -> Iterator[str]:
        """Ranks that do not get exactly as many elements as they need."""
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

    def _add(self, saved: Saved, chunks: Chunks, readers: Readers, found: Overlaps, reads: Reads) -> Iterator[str]:
        start, end = _bytes_of(saved, chunks, found, self._state.manifest is not None)
        file = chunks.file[found.chunk]
        outside = np.flatnonzero((start < 0) | (end > self._file_sizes[file]))
        if len(outside):
            at = int(outside[0])
            name, rank = self._state.index.files[int(file[at])], readers.ranks[0, found.reader[at]]
            yield (
                f"rank {rank}: {saved.name}: bytes {start[at]} to {end[at]} of {name}, which has "
                f"{max(int(self._file_sizes[file[at]]), 0)} bytes"
            )
        ranks = readers.ranks[:, found.reader]
        copies = len(ranks)
        reads.add(ranks.reshape(-1), np.tile(file, copies), np.tile(start, copies), np.tile(end, copies))

    def _differs_from_restore(self, saved: Saved, chunks: Chunks, readers: Readers, number: int) -> Iterator[str]:
        """Whether for one reader a restore reads something else than was computed here."""
        low, high, rank = int(readers.low[number]), int(readers.high[number]), readers.ranks[0, number]
        begins, ends = rows_of(chunks)
        here = np.flatnonzero((begins < high) & (ends > low) & chunks.sizes.all(axis=1))
        part = Overlaps(np.zeros_like(here), here, np.maximum(begins[here], low), np.minimum(ends[here], high))
        start, end = _bytes_of(saved, chunks, part, self._state.manifest is not None)
        known = chunks.payload[here] >= 0
        ranges = zip(np.where(known, start, -1).tolist(), np.where(known, end, -1).tolist())
        mine = sorted((self._state.index.files[file], *where) for file, where in zip(chunks.file[here], ranges))
        try:
            theirs = sorted(_restore_reads(self._state, saved, low, high))
        except CorruptError as error:
            yield f"rank {rank}: {error}"
            return
        if mine != theirs:
            yield (
                f"rank {rank}: {saved.name}: a restore reads {_few(theirs)} for rows {low} to {high - 1}, and it "
                f"should be {_few(mine)}"
            )

    def _look_at_files(self) -> Ints:
        """Sizes of the data files, by number; -1 where there is none."""
        sizes = []
        known = {} if self._state.manifest is None else self._state.manifest.files
        for name in self._state.index.files:
            try:
                size = (self._state.folder / name).stat().st_size
            except OSError:
                size = -1
            if name in known and size != known[name].bytes:
                found = f"has {size} bytes" if size >= 0 else "is missing, with"
                self._problems.append(f"{name} {found} instead of {known[name].bytes}")
            sizes.append(size)
        return np.array(sizes, np.int64)

    def _sound_tensors(self) -> Iterator[Saved]:
        """The tensors of which no row of the table is one that cannot be."""
        for name, record in self._state.index.tensors.items():
            try:
                next(self._state.all_chunks(name), None)
                saved = Saved(name, record.shape, self._state.dtype(name))
            except CorruptError as error:
                self._problems.append(str(error))
                continue
            chunks = self._state.table.chunks(name)
            flaw = flaw_of(chunks.offsets, chunks.sizes, record.shape) if len(chunks) else None
            if flaw is not None:
                self._problems.append(f"{name} {list(record.shape)} was not saved exactly once: {flaw}")
            yield saved

    def _look_at_containers(self) -> None:
        """Whether the containers are where, and as large as, the table says: all by arithmetic, some by looking."""
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
        containers = Containers(Tensors(self._state))
        for saved, row in [*odd[:CONTAINERS], *seen[::step][:CONTAINERS]]:
            self._problems += containers.problems(saved, [row])
        unsure = len(odd) if self._state.manifest is not None else total
        if unsure > CONTAINERS:
            self._unproved.append(
                f"where the elements of {unsure} of {total} saved chunks begin: another torch laid out their "
                f"containers, of which {min(CONTAINERS, unsure)} were looked at"
            )


def _spread(numbers: Ints, count: float) -> list[int]:
    """So many of some numbers, both ends and evenly between them."""
    places = np.linspace(0, len(numbers) - 1, int(min(max(count, 1), len(numbers)))).astype(int)
    found: list[int] = numbers[places].tolist()
    return found


def _bytes_of(saved: Saved, chunks: Chunks, found: Overlaps, is_ours: bool) -> tuple[Ints, Ints]:
    """The bytes of a file [start, end) that hold what readers and chunks have in common."""
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


def _restore_reads(state: SavedState, saved: Saved, low: int, high: int) -> Iterator[tuple[str, int, int]]:
    """What a restore reads for rows [low, high): file, and bytes [start, end); -1 where the container is looked at."""
    shape = (high - low, *saved.shape[1:]) if saved.shape else ()
    memory = torch.empty(shape, dtype=torch.uint8, device="meta")  # of its own dtype, some could not be narrowed
    for fill in fills_for_box(state, saved.name, (low, *[0] * (len(shape) - 1))[: len(shape)], memory):
        if fill.chunk.payload < 0:
            yield fill.chunk.file, -1, -1
            continue
        ranges = list(_Cut(fill, saved.dtype, _leave).from_payload(fill.chunk.payload))
        if sum(each.bytes for each in ranges) != fill.target.numel() * saved.dtype.itemsize:
            raise CorruptError(f"{saved.name}: a restore reads more or less of rows {low} to {high - 1} than they are")
        yield fill.chunk.file, min(each.offset for each in ranges), max(each.offset + each.bytes for each in ranges)


def _leave(target: torch.Tensor, source: torch.Tensor) -> None:
    """Where no tensor is."""


def _differs_from_torch(saved: Saved, layout: tuple[int, ...]) -> Iterator[str]:
    """Whether torch shards a tensor into other rows than was computed here: looked at for a few shards."""
    if not saved.shape or saved.rows > ROWS_ASKED * layout[-1]:
        return
    placements: list[Placement] = [*[Replicate()] * (len(layout) - 1), Shard(0)]
    last_full = max(-(-saved.rows // -(-saved.rows // layout[-1])) - 1, 0) if saved.rows else 0
    for number in {0, layout[-1] // 2, last_full, layout[-1] - 1}:
        coordinate = [*[0] * (len(layout) - 1), number]
        sizes, offsets = local_shape_and_offset(saved.shape, layout, coordinate, placements)
        low, high = rows_of_shards(saved, layout[-1], np.array([number], np.int64))
        # Of an empty shard, torch says where it begins in its own way.
        if sizes[0] != high[0] - low[0] or (sizes[0] and offsets[0] != low[0]):
            yield f"{saved.name}: shard {number} is rows {offsets[0]} + {sizes[0]} by torch, not {low[0]} to {high[0]}"


def _as_written(saved: Saved, chunks: Chunks) -> NDArray[np.bool_]:
    """Chunks whose containers are as large, and have their payloads as far inside, as torch writes them."""
    good: NDArray[np.bool_] = chunks.payload == -1
    for sizes in _distinct(chunks.sizes):
        try:
            frame = frame_of(saved.dtype, tuple(sizes.tolist()))
        except (RuntimeError, MemoryError):  # larger than the memory of this machine
            continue
        like = (chunks.sizes == sizes).all(axis=1) & (chunks.bytes == frame.size_bytes)
        good |= like & (chunks.payload - chunks.offset == len(frame.head))
    return good


def _distinct(sizes: Ints) -> Iterator[Ints]:
    """The rows that differ from each other. Where there are few, that is most of the speed of this module."""
    left = sizes
    while len(left):
        yield left[0]
        left = left[(left != left[0]).any(axis=1)]


def _shared_bytes(state: SavedState, tensors: Sequence[Saved]) -> Iterator[str]:
    """Bytes of a file that belong to two chunks by the chunk table."""
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
        for at in twice[: proof.PROBLEMS_SHOWN].tolist():
            one, other = (tensors[int(owner[each])].name for each in (at, at + 1))
            yield (
                f"bytes {offset[at + 1]} to {min(offset[at] + size[at], offset[at + 1] + size[at + 1])} of "
                f"{state.index.files[int(file[at])]} belong to a chunk of {one} and to another of {other}"
            )


def _few(ranges: Sequence[tuple[str, int, int]]) -> str:
    told = [f"{file}[{start}:{end}]" for file, start, end in ranges[:2]]
    return ", ".join(told) + (f" and {len(ranges) - 2} more" if len(ranges) > 2 else "") if told else "nothing"


def main(arguments: Sequence[str]) -> int:
    """Plan what a request (JSON) asks for. Prints a JSON object for each world size, or one with an error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    request = json.loads(arguments[0])
    speeds = request["bandwidth"], request["rank_bandwidth"]
    return proof.answer(map(asdict, plan(Path(request["folder"]), request["world_sizes"], request["mesh"], *speeds)))
