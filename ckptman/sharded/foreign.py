"""Reading the pickles of plain DCP and torchtitan without running what is in them.

Only the classes of torch's own checkpoint metadata are allowed: anything else in the pickle is refused by name, so no
byte of a foreign checkpoint can run code (pytorch#189308).
"""

from __future__ import annotations

import _codecs
import io
import pathlib
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ckptman.errors import CorruptError
from ckptman.store.manifest import is_plain_name

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset"},
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath", "Path"):
            return pathlib.PurePosixPath  # where it was saved: kept as a text, never opened
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of a checkpoint's metadata")


def read_foreign_metadata(path: Path) -> Metadata:
    """The `.metadata` of a checkpoint that ckptman did not write. Raises: CorruptError, OSError."""
    with path.open("rb") as file:
        try:
            metadata = _Restricted(file).load()
        except Exception as error:
            raise CorruptError(f"{path} was refused: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CorruptError(f"{path} is not the metadata of a torch distributed checkpoint")
    for info in metadata.storage_data.values():
        if not all(is_plain_name(part) for part in str(info.relative_path).split("/")):
            raise CorruptError(f"{path} points to {info.relative_path!r}, which is outside the checkpoint folder")
    return metadata


def read_foreign_object(folder: Path, metadata: Metadata, name: str) -> Any:
    """One plain value of a foreign checkpoint, by torch's restricted unpickler. Raises: CorruptError."""
    info = metadata.storage_data[MetadataIndex(name)]
    with (folder / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        data = file.read(info.length)
    return load_plain(io.BytesIO(data), f"{folder}: the value {name}")


@cache
def _numpy_globals() -> list[Any]:
    """What the pickle of a numpy array or scalar asks for: nothing of it runs code of the pickle's choice."""
    import numpy
    from numpy._core import multiarray

    reconstruct, scalar = multiarray._reconstruct, multiarray.scalar
    older = [(reconstruct, "numpy.core.multiarray._reconstruct"), (scalar, "numpy.core.multiarray.scalar")]
    dtypes = {type(numpy.dtype(kind)) for kind in numpy.typecodes["All"]}
    return [reconstruct, scalar, *older, numpy.ndarray, numpy.dtype, *dtypes, _codecs.encode]


def load_plain(data: io.BytesIO, what: str) -> Any:
    """Unpickle a value by torch's restricted unpickler. Raises: CorruptError, naming `what` was refused."""
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(data, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CorruptError(f"{what} was refused: {reason}") from error
