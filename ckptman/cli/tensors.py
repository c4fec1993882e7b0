"""What there is to say about the tensors of a checkpoint, told from its index alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptman.storage.format.chunk_table import ChunkTable
    from ckptman.storage.format.index import Index

Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a chunk, in elements."""


@dataclass(frozen=True)
class TensorFacts:
    """A tensor as saved. `shape`: global; `sharding`: in words; `bytes`: of its elements, without their containers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: int
    sharding: str
    bytes: int


def tensors_of(index: Index, table: ChunkTable) -> list[TensorFacts]:
    """Return the tensors of a checkpoint, by name."""
    return [
        tensor_facts(name, each.shape, each.dtype, table.chunks(name).boxes())
        for name, each in sorted(index.tensors.items())
    ]


def foreign_tensors(path: Path) -> tuple[list[TensorFacts], list[str], list[str]]:
    """Return the tensors of what plain DCP or torchtitan wrote, the names of its plain values, and what transformed it.

    Its description is a pickle, so this needs torch. Raises: CorruptError.
    """
    from ckptman.engine.loading.restricted_unpickler import read_foreign_metadata, transforms_in
    from ckptman.storage.format.paths import METADATA

    tensors, values = [], []
    metadata = read_foreign_metadata(path / METADATA)
    found: dict[str, Any] = dict(metadata.state_dict_metadata)
    for name, described in sorted(found.items()):
        if hasattr(described, "chunks"):
            dtype = str(described.properties.dtype).removeprefix("torch.")
            boxes = [(chunk.offsets, chunk.sizes) for chunk in described.chunks]
            tensors.append(tensor_facts(name, described.size, dtype, boxes))
        else:
            values.append(name)
    return tensors, values, sorted({*transforms_in(metadata).values()})


def tensor_facts(name: str, shape: Sequence[int], dtype: str, boxes: Sequence[Box]) -> TensorFacts:
    """Describe a tensor that was saved in these chunks."""
    from ckptman.storage.format.chunk_table import item_bytes

    # What nobody knows the size of is one of the many one-byte floats.
    total = prod(shape) * (item_bytes(dtype) or 1)
    return TensorFacts(name, tuple(shape), dtype, len(boxes), sharding(shape, boxes), total)


def sharding(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return how a tensor was cut, in words: `whole`, `4 shards along dim 0`, `2 x 2 shards along dims 0, 1`, `5
    chunks`."""
    if len(boxes) == 1:
        return "whole"
    cuts = [len({tuple(offsets)[dim] for offsets, _ in boxes}) for dim in range(len(shape))]
    dims = [dim for dim, parts in enumerate(cuts) if parts > 1]
    if not dims or prod(cuts) != len(boxes):
        return f"{len(boxes)} chunks"
    if len(dims) == 1:
        return f"{len(boxes)} shards along dim {dims[0]}"
    return f"{' x '.join(str(cuts[dim]) for dim in dims)} shards along dims {', '.join(map(str, dims))}"
