"""Whether torch's own description of a checkpoint names the same places as ours: two descriptions, written apart.

A load by ckptman finds tensors by the index and the chunk table, and so does the proof of it. Plain DCP finds them by
`.metadata`. Where the two agree, no record of one was taken for another.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.engine.loading.restricted_unpickler import read_foreign_metadata
from ckptman.storage.format.paths import METADATA

MOST_CHUNKS = 2**18
"""Both descriptions are in memory as objects, some KB for each chunk."""


def check_placement(state: SavedState) -> tuple[list[str], list[str]]:
    """Return how `.metadata` contradicts the chunk table, by tensor, and what of that is not proved.

    A checkpoint of plain DCP has no second description. Raises: CorruptError (it cannot be read), OSError.
    """
    if state.manifest is None:
        return [], []
    if sum(record.count for record in state.index.tensors.values()) > MOST_CHUNKS:
        return [], [f"that {METADATA}, which plain DCP reads, names the same places: there are too many chunks"]
    ours, theirs = state.metadata, read_foreign_metadata(state.folder / METADATA)
    problems = []
    for name in sorted(ours.state_dict_metadata.keys() | theirs.state_dict_metadata.keys()):
        here, there = _described(ours, name), _described(theirs, name)
        if here != there:
            problems.append(f"{name}: {METADATA} describes {_words(there)}, and the index {_words(here)}")
    for index, place in ours.storage_data.items():
        here, there = _where(place), _where(theirs.storage_data.get(index))
        if here != there:
            at = f" at {list(index.offset)}" if index.offset else ""
            problems.append(f"{index.fqn}{at}: {METADATA} looks for it in {there}, and the chunk table in {here}")
    return problems, []


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


def _where(info: Any) -> str:
    if info is None:
        return "no file"
    return f"{info.relative_path}, bytes {info.offset} to {info.offset + info.length}"
