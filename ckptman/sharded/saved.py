"""What a checkpoint holds, whoever wrote it: tensors by flat name, and the plain values around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptman.errors import CorruptError, NotFoundError
from ckptman.sharded.foreign import read_foreign_metadata, read_foreign_object
from ckptman.store.index import Index, read_index
from ckptman.store.manifest import Manifest, read_manifest
from ckptman.store.names import MANIFEST, METADATA
from ckptman.store.plain import TensorRef, decode


@dataclass
class SavedState:
    """A checkpoint that can be read.

    `values` holds, for each key of the application's state, its entries or its one plain value, with each tensor as a
    `TensorRef`. `metadata` is what DCP plans with. `manifest` is None for a foreign one.
    """

    folder: Path
    metadata: Metadata
    manifest: Manifest | None
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> SavedState:
        """Raises: NotFoundError (no checkpoint there), CorruptError, FormatVersionError."""
        if (folder / MANIFEST).exists():
            manifest = read_manifest(folder)
            index = read_index(folder, manifest)
            return cls(folder, _metadata_of(index), manifest, _values_of(index))
        if (folder / METADATA).exists():
            metadata = read_foreign_metadata(folder / METADATA)
            return cls(folder, metadata, None, _foreign_values(folder, metadata))
        raise NotFoundError(
            f"{folder} is no checkpoint: it has neither {MANIFEST} nor {METADATA}. Name the folder of one step"
        )

    def tensor(self, name: str) -> TensorStorageMetadata:
        """Shape, dtype and chunks of a tensor."""
        found = self.metadata.state_dict_metadata.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise CorruptError(f"{self.folder}: {name} is referred to and not saved")
        return found


def _metadata_of(index: Index) -> Metadata:
    described: dict[str, Any] = {name: BytesStorageMetadata() for name in index.objects}
    places: dict[MetadataIndex, Any] = {
        MetadataIndex(name): _StorageInfo(at.file, at.offset, at.bytes) for name, at in index.objects.items()
    }
    for name, tensor in index.tensors.items():
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CorruptError(f"{name} has the dtype {tensor.dtype!r}, which this torch does not know")
        chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in tensor.chunks]
        described[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(tensor.shape), chunks)
        for each in tensor.chunks:
            places[MetadataIndex(name, each.offsets)] = _StorageInfo(each.at.file, each.at.offset, each.at.bytes)
    return Metadata(state_dict_metadata=described, storage_data=places)


def _values_of(index: Index) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for unit in index.units:
        if unit.whole:
            values[unit.state] = decode(unit.value)
        else:
            values.setdefault(unit.state, {})[decode(unit.key)] = decode(unit.value)
    return values


def _foreign_values(folder: Path, metadata: Metadata) -> dict[str, Any]:
    """The nested state that plain DCP flattened, rebuilt from the paths in its metadata."""
    values: dict[str, Any] = {}
    for name, described in metadata.state_dict_metadata.items():
        path = (metadata.planner_data or {}).get(name, (name,))
        if isinstance(described, TensorStorageMetadata):
            _set(values, path, TensorRef(name))
        else:
            _set(values, path, _Lazy(partial(read_foreign_object, folder, metadata, name)))
    return values


class _Lazy:
    """A plain value of a foreign checkpoint, read when it is wanted."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read


def resolve(value: Any) -> Any:
    """A value with what was not yet read, read."""
    if isinstance(value, _Lazy):
        return value.read()
    if type(value) is dict:
        return {key: resolve(each) for key, each in value.items()}
    if type(value) is list:
        return [resolve(each) for each in value]
    return value


def _set(root: dict[str, Any], path: tuple[str | int, ...], leaf: Any) -> None:
    here: Any = root
    for part, following in zip(path, (*path[1:], None)):
        is_last = following is None
        fresh: Any = leaf if is_last else ([] if isinstance(following, int) else {})
        if isinstance(here, list):
            assert isinstance(part, int)
            here.extend([None] * (part + 1 - len(here)))
            if is_last or here[part] is None:
                here[part] = fresh
        elif is_last or part not in here:
            here[part] = fresh
        here = here[part]
