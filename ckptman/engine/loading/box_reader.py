"""Reading any tensor of a checkpoint box by box, in bounded memory, whatever layout it was saved in."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

import torch

from ckptman.engine.loading.checkpoint_reader import ChunkPlace, SavedState
from ckptman.engine.loading.read_tensors import Fill, check_container, fills_for_box, part_wanted, read_fills
from ckptman.engine.loading.restricted_unpickler import load_plain
from ckptman.engine.state.file_layout import put
from ckptman.errors import CorruptError
from ckptman.storage.io.checksums import Digests
from ckptman.storage.io.threads import Worker

PIECE_BYTES = 16 * 1024 * 1024
"""What is read of a tensor at a time."""
BATCH_PIECES = 1024
"""The most pieces of tensors that are read together."""
_ALIGN_BYTES = 64
KEPT_BYTES = 32 * 1024 * 1024
"""Digests that are kept of a checkpoint: those of 64 GiB."""

Shape = tuple[int, ...]
T = TypeVar("T")
_END: Any = object()


class Refused(CorruptError):
    """A container holds what was saved, and only the program that saved it could load it."""


def why_refused(error: CorruptError) -> str:
    """Return in a few words what the restricted unpickler refused: torch says it in a page of advice."""
    found = re.search(r"GLOBAL (\S+)", str(error.__cause__))
    return f"it holds a {found[1]}, which is not loaded" if found else "it is no plain pickle, and is not loaded"


class BoundedState(SavedState):
    """A checkpoint of which only the digests that were used last are kept: all of them grow with it."""

    def digests(self, file: str) -> Digests | None:
        found = super().digests(file)
        if found is not None:
            self._digests[file] = self._digests.pop(file)  # the last one used is the last one dropped
            held = sum(len(each.blocks) for each in self._digests.values())
            for oldest in list(self._digests)[:-1]:
                if held <= KEPT_BYTES:
                    break
                held -= len(self._digests.pop(oldest).blocks)
        return found


def boxes(shape: Sequence[int], limit: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a tensor into boxes of at most `limit` elements, in row-major order. Yields offsets and sizes."""
    if math.prod(shape) <= limit:
        if math.prod(shape):
            yield (0,) * len(shape), tuple(shape)
        return
    # The dimension that is cut: what lies inside of it fits into a box, and what lies outside is gone through.
    dim = next(dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= limit)
    rows = limit // math.prod(shape[dim + 1 :])
    for outside in product(*(range(size) for size in shape[:dim])):
        for row in range(0, shape[dim], rows):
            sizes = (*(1 for _ in outside), min(rows, shape[dim] - row), *shape[dim + 1 :])
            yield (*outside, row, *(0 for _ in shape[dim + 1 :])), sizes


def prefetched(items: Iterator[T]) -> Iterator[T]:
    """Yield the items of an iterator, each made in another thread while the one before is used."""
    with Worker("ckptman-ahead") as pool:
        coming = pool.submit(next, items, _END)
        while (item := coming.result()) is not _END:
            coming = pool.submit(next, items, _END)
            yield item


class BoxReader:
    """Reads boxes of the tensors of one checkpoint. Every block that is read is checked.

    A container that only `torch.load` can read is read as a whole, and kept until the next one is.
    """

    def __init__(self, saved: SavedState) -> None:
        self.saved = saved
        self._held: tuple[tuple[str, int], torch.Tensor] | None = None

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `read` gives: of quantized tensors that of their values. Raises: CorruptError."""
        dtype = self.saved.dtype(name)
        return torch.float32 if str(dtype).startswith(("torch.qint", "torch.quint")) else dtype

    def fills(self, name: str, offsets: Shape, sizes: Shape, data: torch.Tensor) -> list[Fill]:
        """Return what is to be read to fill `data`, the flat bytes of a box. What cannot be read later is read at once.

        Raises: CorruptError, Refused.
        """
        found: list[Fill] = []
        for fill in fills_for_box(self.saved, name, offsets, data.view(self.dtype(name)).view(sizes)):
            payload = self.saved.payload(name, fill.chunk)
            if payload is None:
                put(fill.target, part_wanted(self._container(fill.name, fill.chunk), fill))
            else:
                found.append(replace(fill, chunk=fill.chunk._replace(payload=payload)))
        return found

    def read(self, fills: Sequence[Fill]) -> None:
        """Read what `fills` gave. Raises: CorruptError."""
        try:
            read_fills(self.saved, fills)
        except CorruptError as error:
            # What it says besides is for those who have a model that is half filled now.
            raise error.__cause__ if isinstance(error.__cause__, CorruptError) else error from None

    def _container(self, name: str, chunk: ChunkPlace) -> torch.Tensor:
        place = chunk.file, chunk.offset
        if self._held is None or self._held[0] != place:
            self._held = None
            where = f"{self.saved.folder / chunk.file}: {name}"
            data = self.saved.read_range(chunk.file, chunk.offset, chunk.bytes, name)
            try:
                tensor = load_plain(io.BytesIO(data), where)
            except CorruptError as error:
                raise Refused(f"{where}: {why_refused(error)}") from error
            check_container(tensor, chunk, where)
            try:
                self._held = place, tensor.dequantize() if tensor.is_quantized else tensor
            except (NotImplementedError, RuntimeError) as error:
                raise Refused(f"{where} cannot be dequantized: {error}") from error
        return self._held[1]


class Batch:
    """Boxes that are read together, of one large tensor or of many small ones, each from all of the readers.

    `memory`: where to, for each reader, flat bytes.
    """

    def __init__(self, readers: Sequence[BoxReader], memory: Sequence[torch.Tensor]) -> None:
        self._readers, self._memory = readers, memory
        self._fills: list[list[Fill]] = [[] for _ in readers]
        self._used = self._count = 0

    def has_room(self, size: int) -> bool:
        """Whether a box of that many bytes, for each reader, fits."""
        return self._used + size <= len(self._memory[0]) and self._count < BATCH_PIECES

    def add(self, name: str, dtypes: Sequence[torch.dtype], offsets: Shape, sizes: Shape) -> list[torch.Tensor]:
        """Add a box of a tensor, and return the flat bytes that `read` fills, for each reader.

        Raises: CorruptError, Refused.
        """
        count = math.prod(sizes)
        found = [memory[self._used :][: count * dtype.itemsize] for memory, dtype in zip(self._memory, dtypes)]
        fills = [reader.fills(name, offsets, sizes, data) for reader, data in zip(self._readers, found)]
        # Not before all are known: where one is refused, this memory is for the next tensor.
        for known, more in zip(self._fills, fills):
            known += more
        self._count += 1
        self._used += -(-count * max(dtype.itemsize for dtype in dtypes) // _ALIGN_BYTES) * _ALIGN_BYTES
        return found

    def read(self) -> None:
        """Read all of it. Raises: CorruptError."""
        for reader, fills in zip(self._readers, self._fills):
            reader.read(fills)
