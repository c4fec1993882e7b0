"""Writing the files of an export in bounded memory: tensors go from the checkpoint to their places piece by piece.

The next piece is read while one is written.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from ckptman.errors import ConfigError
from ckptman.exporting.choice import CASTS, Item
from ckptman.io.file_writer import FileWriter
from ckptman.io.filesystem import Disk
from ckptman.io.workers import STRIDE_BYTES, aligned_memory
from ckptman.loading.piecewise import PIECE_BYTES, Reader, ahead, boxes
from ckptman.loading.read import Fill
from ckptman.state.file_layout import as_bytes, view_of

_BATCH_PIECES = 1024
_ALIGN_BYTES = 64
_CAST_ELEMENTS = 256 * 1024


class Part(NamedTuple):
    """A box of a tensor that lies in one piece in the file, from `place` on: whole rows in row-major order."""

    item: Item
    place: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def saved_bytes(self) -> int:
        return math.prod(self.sizes) * self.item.dtype.itemsize


@dataclass
class FilePlan:
    """A file that is to be written. `literals`: bytes that are known, by their place. `parts` by their places, too.
    What is between is zero."""

    name: str
    size_bytes: int
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


def parts_of(item: Item, place: int) -> Iterator[Part]:
    """A tensor whose elements begin at a place of a file, cut into what is read at a time."""
    widest = max(item.dtype.itemsize, item.as_dtype.itemsize)
    for offsets, sizes in boxes(item.shape, PIECE_BYTES // widest):
        yield Part(item, place, offsets, sizes)
        place += math.prod(sizes) * item.as_dtype.itemsize


def write_files(
    folder: Path, plans: Sequence[FilePlan], reader: Reader, disk: Disk, done: Callable[[int], None] | None
) -> None:
    """Write files that nobody has made yet, and flush each to storage. The folder is not flushed.

    `done` is told the bytes of tensors that were written. Raises: CorruptError naming file and tensor, ConfigError (a
    number that the dtype of a cast cannot hold), OSError naming the file.
    """
    for plan in plans:
        with FileWriter(folder / plan.name, plan.size_bytes, disk=disk, flags=os.O_EXCL) as file:
            _fill(_Stream(file), plan, reader, done)
            file.flush()


def same_bits(reader: Reader, one: Item, other: Item) -> bool:
    """Whether two tensors of a checkpoint are the same, bit for bit. Raises: CorruptError."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    memories = _memories()
    for pair in zip(parts_of(one, 0), parts_of(other, 0)):
        found = [memory[: part.saved_bytes] for part, memory in zip(pair, memories)]
        for part, data in zip(pair, found):
            reader.read(reader.fills(part.item.source, part.offsets, part.sizes, data))
        if not torch.equal(*found):
            return False
    return True


class _Stream:
    """A file that is written from its beginning to its end: past the page cache where that can be, in whole pages from
    memory of its own. So what is written takes no memory from others, and is on its way to storage at once."""

    def __init__(self, file: FileWriter) -> None:
        self._file = file
        self._memory = aligned_memory(STRIDE_BYTES)
        self._begin = self._used = 0

    def put(self, data: memoryview | bytes, place: int) -> None:
        """Bytes behind those that were put before. What is between is zero."""
        gap = place - self._begin - self._used
        assert gap >= 0
        while gap:
            gap -= self._add(memoryview(bytes(min(gap, STRIDE_BYTES))))
        view = memoryview(data)
        while view:
            view = view[self._add(view) :]

    def flush(self) -> None:
        """Write what was put and not yet written."""
        if self._used:
            self._file.write(self._memory[: self._used], self._begin)
        self._begin, self._used = self._begin + self._used, 0

    def _add(self, data: memoryview) -> int:
        count = min(len(data), len(self._memory) - self._used)
        self._memory[self._used : self._used + count] = data[:count]
        self._used += count
        if self._used == len(self._memory):
            self.flush()
        return count


def _fill(stream: _Stream, plan: FilePlan, reader: Reader, done: Callable[[int], None] | None) -> None:
    literals = deque(sorted(plan.literals))
    for batch in ahead(_batches(reader, plan.parts)):
        for part, data in batch:
            while literals and literals[0][0] < part.place:
                stream.put(literals[0][1], literals.popleft()[0])
            written = _cast(part.item, data)  # the view below does not keep it
            stream.put(view_of(written), part.place)
            if done is not None:
                done(math.prod(part.sizes) * part.item.as_dtype.itemsize)
    for place, known in literals:
        stream.put(known, place)
    stream.flush()


def _cast(item: Item, data: torch.Tensor) -> torch.Tensor:
    """The flat bytes of a part in the dtype of the export."""
    if item.dtype == item.as_dtype:
        return data
    before = data.view(item.dtype)
    after = torch.empty(len(before), dtype=item.as_dtype, device="cpu")
    # In steps, so that what is computed on the way takes little memory.
    for low in range(0, len(before), _CAST_ELEMENTS):
        mine, other = (each[low : low + _CAST_ELEMENTS] for each in (before, after))
        other.copy_(mine)
        if bool((other.isinf() & ~mine.isinf()).any()):
            name, most = str(item.as_dtype).removeprefix("torch."), torch.finfo(item.as_dtype).max
            wider = [other for other, dtype in CASTS.items() if torch.finfo(dtype).max > most]
            raise ConfigError(
                f"{item.source} holds numbers that {name} cannot (more than {most:g}): export it as "
                f"{' or '.join(reversed(wider))}"
            )
    return as_bytes(after)


def _batches(reader: Reader, parts: Iterable[Part]) -> Iterator[list[tuple[Part, torch.Tensor]]]:
    """The parts with their bytes, as many at a time as fit. What is given stays as it is while the next ones are made.

    Raises: CorruptError.
    """
    memories = _memories()
    batch: list[tuple[Part, torch.Tensor]] = []
    fills: list[Fill] = []
    used = number = 0
    for part in parts:
        size = part.saved_bytes
        if batch and (used + size > PIECE_BYTES or len(batch) == _BATCH_PIECES):
            reader.read(fills)
            yield batch
            batch, fills, used, number = [], [], 0, (number + 1) % len(memories)
        data = memories[number][used : used + size]
        fills += reader.fills(part.item.source, part.offsets, part.sizes, data)
        batch.append((part, data))
        used += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    if batch:
        reader.read(fills)
        yield batch


def _memories() -> tuple[torch.Tensor, torch.Tensor]:
    # On the CPU whatever the default device is.
    one, other = (torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2))
    return one, other
