"""What there is to say about a saved tensor, told from its index alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptman.format.chunk_table import ChunkTable
    from ckptman.format.index import Index

Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a chunk, in elements."""

_ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class TensorFacts:
    """A tensor as saved. `shape` is global; `sharding` in words; `bytes` of the elements, without their containers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: int
    sharding: str
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        """The same, for JSON."""
        return asdict(self)


def tensors_of(index: Index, table: ChunkTable) -> list[TensorFacts]:
    """The tensors of a checkpoint, by name."""
    return [
        tensor_facts(name, each.shape, each.dtype, table.chunks(name).boxes())
        for name, each in sorted(index.tensors.items())
    ]


def tensor_facts(name: str, shape: Sequence[int], dtype: str, boxes: Sequence[Box]) -> TensorFacts:
    """What is known about a tensor that was saved in these chunks."""
    # What is not in the table is one of the many one-byte floats.
    total = prod(shape) * _ITEM_BYTES.get(dtype, 1)
    return TensorFacts(name, tuple(shape), dtype, len(boxes), sharding(shape, boxes), total)


def sharding(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """How a tensor was cut, in words: `whole`, `4 shards along dim 0`, `2 x 2 shards along dims 0, 1`, `5 chunks`."""
    if len(boxes) == 1:
        return "whole"
    cuts = [len({tuple(offsets)[dim] for offsets, _ in boxes}) for dim in range(len(shape))]
    dims = [dim for dim, parts in enumerate(cuts) if parts > 1]
    if not dims or prod(cuts) != len(boxes):
        return f"{len(boxes)} chunks"
    if len(dims) == 1:
        return f"{len(boxes)} shards along dim {dims[0]}"
    return f"{' x '.join(str(cuts[dim]) for dim in dims)} shards along dims {', '.join(map(str, dims))}"
