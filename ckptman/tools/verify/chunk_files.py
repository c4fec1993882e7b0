"""Saved tensors, their chunks, and the bytes in the files, by plain `preadv`.

On purpose nothing here is shared with what a load reads with (`loading.read_tensors`, `io.checked_reader`).
"""

from __future__ import annotations

import io
import math
import os
import weakref
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ckptman.engine.loading.checkpoint_reader import ChunkPlace, SavedState
from ckptman.engine.loading.restricted_unpickler import load_plain
from ckptman.errors import CorruptError
from ckptman.storage.format.chunk_table import Chunks, Ints
from ckptman.storage.format.torch_zip import PartOfFile
from ckptman.storage.io.safe_open import open_regular

Bytes = NDArray[np.uint8]
_OPEN_FILES = 64


@dataclass(frozen=True)
class Saved:
    """A tensor as the checkpoint describes it. `shape` is global."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Length of dimension 0; a tensor without dimensions counts as one row."""
        return self.shape[0] if self.shape else 1

    def shard_rows(self, shards: int) -> int:
        """Rows of a full shard, as `torch.chunk` cuts them. A tensor without dimensions is whole in each."""
        return -(-self.rows // shards)


class Tensors:
    """The chunks of a checkpoint and their bytes, in one process."""

    def __init__(self, state: SavedState) -> None:
        self.state = state
        self._open = lru_cache(_OPEN_FILES)(File)
        self._payloads: dict[tuple[str, int], int | None] = {}

    def file(self, name: str) -> File:
        """Open a file by its name. Raises: CorruptError (not a regular file), OSError."""
        return self._open(self.state.folder / name, self.state.manifest is None)

    def chunks(self, saved: Saved) -> Chunks:
        """Return all chunks of a tensor. Raises: CorruptError if one of them is impossible."""
        self.state.check((saved.name,))
        return self.state.table.chunks(saved.name)

    def chunk(self, chunks: Chunks, row: int) -> ChunkPlace:
        """Return one of them."""
        columns = chunks.file, chunks.offset, chunks.bytes, chunks.payload
        file, offset, size, payload = (int(column[row]) for column in columns)
        offsets, sizes = tuple(chunks.offsets[row].tolist()), tuple(chunks.sizes[row].tolist())
        return ChunkPlace(self.state.index.files[file], offset, size, payload, offsets, sizes)

    def payload(self, saved: Saved, chunk: ChunkPlace) -> int | None:
        """Return where the payload of a chunk begins in its file; None if only torch can tell."""
        if chunk.payload >= 0:
            return chunk.payload
        key = chunk.file, chunk.offset
        if key not in self._payloads:
            self._payloads[key] = self.state.payload(saved.name, chunk)
        return self._payloads[key]

    def torch_load(self, saved: Saved, chunk: ChunkPlace) -> Bytes:
        """Return the elements that `torch.load` finds, as bytes [rows, ...]. Raises: CorruptError."""
        where = f"{self.state.folder / chunk.file}: {saved.name}"
        data = io.BytesIO(self.file(chunk.file).bytes(chunk.offset, chunk.bytes))
        tensor = load_plain(data, where)
        if not isinstance(tensor, torch.Tensor):
            raise CorruptError(f"{chunk.file} holds no tensor at byte {chunk.offset}")
        if (tensor.dtype, tuple(tensor.shape)) != (saved.dtype, chunk.sizes):
            raise CorruptError(
                f"{chunk.file} holds {tensor.dtype} {list(tensor.shape)} instead of {saved.dtype} {list(chunk.sizes)}"
            )
        plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        rows = chunk.sizes[0] if chunk.sizes else 1
        return plain.reshape(rows, -1) if plain.nbytes else plain.reshape(rows, 0)


class File:
    """A file that is read by offset, and closed when it is no longer referenced."""

    def __init__(self, path: Path, follow: bool) -> None:
        self._path = path
        self._fd = open_regular(path, follow=follow)
        weakref.finalize(self, os.close, self._fd)

    def read(self, offset: int, size: int, scratch: memoryview) -> Bytes:
        """Read bytes [offset, offset + size) into the scratch. Raises: CorruptError (the file ends before), OSError."""
        view, done = scratch[:size], 0
        while done < size:
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if not count:
                raise CorruptError(f"{self._path} ends at byte {offset + done}, within a tensor")
            done += count
        return np.frombuffer(view, np.uint8)

    def bytes(self, offset: int, size: int) -> bytes:
        """Read the same into new memory."""
        memory = bytearray(size)
        self.read(offset, size, memoryview(memory))
        return bytes(memory)

    def part(self, offset: int, size: int) -> PartOfFile:
        """Return a range of it as a file of its own."""
        return PartOfFile(self._fd, offset, size, f"what begins at byte {offset} of {self._path.name}")


def rows_of(chunks: Chunks) -> tuple[Ints, Ints]:
    """Return the first and the last row of each chunk."""
    if not chunks.offsets.shape[1]:
        return np.zeros(len(chunks), np.int64), np.ones(len(chunks), np.int64)
    return chunks.offsets[:, 0], chunks.offsets[:, 0] + chunks.sizes[:, 0]
