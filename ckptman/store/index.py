"""The index: where each tensor and each plain value of a checkpoint lies. One JSON file per rank that wrote.

Plain JSON, so that tools read a checkpoint with no torch and no pickle. dtypes are torch's names (`bfloat16`), shapes
are global, offsets and sizes of a chunk are in elements, `offset` and `bytes` place its container in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ckptman.errors import CorruptError
from ckptman.store.digest import digest_bytes
from ckptman.store.manifest import FORMAT_VERSION, Manifest, parse_versioned


class Location(BaseModel):
    """A range of bytes in a file of the checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    file: str
    offset: int
    bytes: int


class Chunk(BaseModel):
    """A box of a tensor, as one rank wrote it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: Location


class TensorRecord(BaseModel):
    """A tensor: its global shape, its dtype, and the chunks of it in this index."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


class Unit(BaseModel):
    """One entry of the application's state: `state` is its key, `key` the entry in it (None: the state is one value).

    `key` and `value` are encoded by `ckptman.store.plain`; a tensor in `value` is a reference to its flat name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    state: str
    key: Any = None
    whole: bool = False
    value: Any = None


class Index(BaseModel):
    """What one rank wrote, or, after `merge`, the whole checkpoint.

    `objects` places the pickles that are written for other readers; ckptman itself reads plain values from `units`.
    `blocks` holds the block digests (see `ckptman.store.digest`) of each data file, as one hexadecimal text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format_version: int = FORMAT_VERSION
    tensors: dict[str, TensorRecord] = {}
    objects: dict[str, Location] = {}
    units: list[Unit] = []
    blocks: dict[str, str] = {}

    def to_json(self) -> bytes:
        """The bytes of the index file."""
        return (json.dumps(self.model_dump(mode="python"), separators=(",", ":")) + "\n").encode()


def merge(indexes: Iterable[Index]) -> Index:
    """One index out of those of all ranks. Of units that several ranks wrote, the first counts.

    Raises: CorruptError where two ranks do not agree what a tensor is.
    """
    whole = Index()
    seen: set[tuple[str, str]] = set()
    for index in indexes:
        for name, tensor in index.tensors.items():
            known = whole.tensors.setdefault(name, tensor.model_copy(update={"chunks": []}))
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise CorruptError(
                    f"{name} is {known.dtype} {list(known.shape)} in one index and "
                    f"{tensor.dtype} {list(tensor.shape)} in another"
                )
            known.chunks.extend(tensor.chunks)
        for unit in index.units:
            identity = (unit.state, json.dumps(unit.key))
            if identity not in seen:
                seen.add(identity)
                whole.units.append(unit)
        whole.objects.update(index.objects)
        whole.blocks.update(index.blocks)
    return whole


def read_index(folder: Path, manifest: Manifest) -> Index:
    """The merged index of a checkpoint. Raises: CorruptError (its digests are checked), FormatVersionError, OSError."""
    names = sorted(name for name in manifest.files if name.startswith("index-") and name.endswith(".json"))
    return merge(_read_one(folder / name, manifest) for name in names)


def _read_one(path: Path, manifest: Manifest) -> Index:
    data, record = path.read_bytes(), manifest.files[path.name]
    if len(data) != record.bytes or digest_bytes(data, manifest.block_bytes) != record.digest:
        raise CorruptError(f"{path} does not match its digest: its bytes have changed since they were saved")
    raw = parse_versioned(path, data)
    try:
        index = Index.model_validate(raw)
    except (ValidationError, RecursionError) as error:
        raise CorruptError(f"{path} is not an index: {error}") from error
    for location in index.objects.values():
        _check_location(path, location, manifest)
    for name, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            _check_location(path, chunk.at, manifest)
            if not _is_box_of(chunk, tensor.shape):
                raise CorruptError(
                    f"{path}: {name} {list(tensor.shape)} has a chunk outside of it: "
                    f"offsets {list(chunk.offsets)}, sizes {list(chunk.sizes)}"
                )
    return index


def _check_location(path: Path, location: Location, manifest: Manifest) -> None:
    known = manifest.files.get(location.file)
    if known is None:
        raise CorruptError(f"{path} points to {location.file!r}, which the manifest does not name")
    if location.offset < 0 or location.bytes < 0 or location.offset + location.bytes > known.bytes:
        raise CorruptError(f"{path} points outside {location.file} ({location.offset} + {location.bytes} bytes)")


def _is_box_of(chunk: Chunk, shape: tuple[int, ...]) -> bool:
    return len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape)
    )
