"""Writing the files of an export in bounded memory: tensors go from the checkpoint to their places piece by piece.

The next piece is read while one is written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import add
from pathlib import Path
from typing import NamedTuple

import torch

from ckptman.engine.loading.box_reader import PIECE_BYTES, Batch, BoxReader, Shape, boxes, prefetched
from ckptman.engine.state.file_layout import as_bytes, view_of
from ckptman.errors import ConfigError
from ckptman.storage.io.file_writer import FileWriter
from ckptman.tools.exporting.choice import CASTS, Item

_CAST_ELEMENTS = 256 * 1024


class Part(NamedTuple):
    """A box of a tensor that is contiguous in the file, from byte `place` on, in row-major order."""

    item: Item
    place: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def saved_bytes(self) -> int:
        return math.prod(self.sizes) * self.item.dtype.itemsize


@dataclass
class FilePlan:
    """A file to write. `literals`: known bytes, each with its place; `parts`: parts of tensors. Everything else is
    zero."""

    name: str
    size_bytes: int
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


def parts_of(item: Item, place: int, box: tuple[Shape, Shape] | None = None) -> Iterator[Part]:
    """Yield a tensor, or a `box` of it, in parts of a size that is read at a time. Its elements begin at byte
    `place`."""
    begin, shape = box or ((0,) * len(item.shape), item.shape)
    widest = max(item.dtype.itemsize, item.as_dtype.itemsize)
    for inside, sizes in boxes(shape, PIECE_BYTES // widest):
        yield Part(item, place, tuple(map(add, begin, inside)), sizes)
        place += math.prod(sizes) * item.as_dtype.itemsize


def write_files(folder: Path, plans: Sequence[FilePlan], reader: BoxReader, done: Callable[[int], None] | None) -> None:
    """Create the files and flush each to storage, but not the folder. `done` is told the bytes of tensors written.

    Raises: CorruptError naming file and tensor, ConfigError (a number that does not fit the dtype of a cast), OSError
    naming the file.
    """
    for plan in plans:
        # Pieces are written as they come, from any address, so not past the page cache.
        path, why = folder / plan.name, "an export is written in pieces of any size"
        with FileWriter(path, plan.size_bytes, flags=os.O_EXCL, buffered_because=why) as file:
            _fill(file, plan, reader, done)
            file.flush()


def same_bits(reader: BoxReader, one: Item, other: Item) -> bool:
    """Whether two tensors of a checkpoint are equal, bit for bit. Raises: CorruptError."""
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


def _fill(file: FileWriter, plan: FilePlan, reader: BoxReader, done: Callable[[int], None] | None) -> None:
    for place, known in plan.literals:
        file.write(memoryview(known), place)
    for batch in prefetched(_batches(reader, plan.parts)):
        for part, data in batch:
            written = _cast(part.item, data)  # the view below does not keep it
            file.write(view_of(written), part.place)
            if done is not None:
                done(math.prod(part.sizes) * part.item.as_dtype.itemsize)


def _cast(item: Item, data: torch.Tensor) -> torch.Tensor:
    """Return the flat bytes of a part in the dtype of the export. Raises: ConfigError."""
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


def _batches(reader: BoxReader, parts: Iterable[Part]) -> Iterator[list[tuple[Part, torch.Tensor]]]:
    """Yield the parts with their bytes, as many at a time as fit into memory.

    A batch stays valid while the next one is made. Raises: CorruptError.
    """
    memories = _memories()
    batch, pieces = Batch([reader], memories[:1]), list[tuple[Part, torch.Tensor]]()
    for part in parts:
        if not batch.has_room(part.saved_bytes):
            batch.read()
            yield pieces
            memories.reverse()
            batch, pieces = Batch([reader], memories[:1]), []
        (data,) = batch.add(part.item.source, [part.item.dtype], part.offsets, part.sizes)
        pieces.append((part, data))
    batch.read()
    yield pieces


def _memories() -> list[torch.Tensor]:
    return [torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2)]
