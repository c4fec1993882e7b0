"""Whether torch's own description of a checkpoint names the same places as ours: two descriptions, written apart.

A load by ckptman finds tensors by the index and the chunk table, and so does the proof of it. Plain DCP finds them by
`.metadata`. Where the two agree, no record of one was taken for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckptman.format.paths import METADATA
from ckptman.loading.checkpoint_reader import SavedState
from ckptman.loading.restricted_unpickler import read_foreign_metadata

MOST_CHUNKS = 2**18
"""Both descriptions are in memory as objects, some KB for each chunk."""


def placement_problems(state: SavedState) -> Iterator[str]:
    """How `.metadata` contradicts the chunk table, by tensor. Raises: CorruptError (it cannot be read), OSError."""
    ours, theirs = state.metadata, read_foreign_metadata(state.folder / METADATA)
    for name in sorted(ours.state_dict_metadata.keys() | theirs.state_dict_metadata.keys()):
        here, there = _described(ours, name), _described(theirs, name)
        if here != there:
            yield f"{name}: {METADATA} describes {_words(there)}, and the index {_words(here)}"
    for index, place in ours.storage_data.items():
        other = theirs.storage_data.get(index)
        if other is None or _place(other) != _place(place):
            at = f" at {list(index.offset)}" if index.offset else ""
            yield f"{index.fqn}{at}: {METADATA} looks for it in {_where(other)}, and the chunk table in {_where(place)}"


def too_many_to_compare(state: SavedState) -> bool:
    """Whether there are so many chunks that their descriptions are not to be held in memory."""
    return sum(record.count for record in state.index.tensors.values()) > MOST_CHUNKS


def _described(metadata: Metadata, name: str) -> Any:
    found = metadata.state_dict_metadata.get(name)
    if not isinstance(found, TensorStorageMetadata):
        return None if found is None else "value"
    boxes = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks)
    return found.properties.dtype, tuple(found.size), boxes


def _words(described: Any) -> str:
    if described is None:
        return "nothing of that name"
    if isinstance(described, str):
        return "a plain value"
    dtype, shape, boxes = described
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} in {len(boxes)} chunks"


def _place(info: Any) -> tuple[str, int, int]:
    return str(info.relative_path), info.offset, info.length


def _where(info: Any) -> str:
    if info is None:
        return "no file"
    name, offset, size = _place(info)
    return f"{name}, bytes {offset} to {offset + size}"
