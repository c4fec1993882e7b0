"""The tensors of a checkpoint, as the checks of loads and plans see them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.storage.format.chunk_table import Chunks, Ints

_ALIGN_BYTES = 64


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

    def shard_bytes(self, shards: int) -> int:
        """Bytes of a full shard in memory, aligned for the next one."""
        return -(-self.shard_rows(shards) * self.row_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def saved_tensors(state: SavedState) -> list[Saved]:
    """Return all tensors, in the order of their place on disk. Raises: CorruptError."""
    found = []
    state.check(state.index.tensors)
    for name, record in state.index.tensors.items():
        chunks = state.table.chunks(name)
        first = int(chunks.file.min()) if len(chunks) else 0
        offset = int(chunks.offset[chunks.file == first].min()) if len(chunks) else 0
        found.append((first, offset, Saved(name, record.shape, state.dtype(name))))
    return [saved for _, _, saved in sorted(found, key=lambda each: each[:2])]


def rows_of(chunks: Chunks) -> tuple[Ints, Ints]:
    """Return the first and the last row of each chunk."""
    if not chunks.offsets.shape[1]:
        return np.zeros(len(chunks), np.int64), np.ones(len(chunks), np.int64)
    return chunks.offsets[:, 0], chunks.offsets[:, 0] + chunks.sizes[:, 0]
