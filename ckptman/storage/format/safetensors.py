"""The safetensors format, as Hugging Face loads it: what its files begin with, and what lies where in them.

A file is the length of its header (8 bytes, little-endian), the header (JSON), and the elements of all tensors one
after the other, row-major and little-endian, with nothing in between. What is too large for one file is in several,
and `model.safetensors.index.json` says which tensor is in which.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ckptman.errors import ConfigError
from ckptman.storage.format.chunk_table import item_bytes
from ckptman.storage.io.safe_open import open_regular

INDEX_NAME = "model.safetensors.index.json"
DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}
"""torch's names, and those of the format."""
_NAME = re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")
_RESERVED = "__metadata__"
_FIRST = {_RESERVED: {"format": "pt", "ckptman": "export"}}
"""What each header begins with: transformers asks for the format, and we know our own files by the rest."""
_MARK = json.dumps(_FIRST, separators=(",", ":"))[:-1].encode()
_MOST_HEADER_BYTES = 100_000_000
"""What the loader of Hugging Face takes for no header any more."""
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Tensor:
    """A tensor as it is to be in a file. `dtype`: torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * (item_bytes(self.dtype) or 0)


def check(tensors: Sequence[Tensor]) -> None:
    """Raises: ConfigError, naming what the format has no form for."""
    for each in tensors:
        if each.dtype not in DTYPES:
            raise ConfigError(
                f"{each.name} has the dtype {each.dtype}, which safetensors has no form for: leave it out "
                f"(--exclude), or export to --format torch or dcp"
            )
        if each.name == _RESERVED or not each.name.isprintable():
            raise ConfigError(f"safetensors has no tensor of the name {each.name!r}: give it another (--rename)")


def share_out(tensors: Sequence[Tensor], most_bytes: int) -> list[list[Tensor]]:
    """Return the tensors of each file, in order. A file has no more than `most_bytes` of elements, or one tensor."""
    files: list[list[Tensor]] = []
    room = 0
    for each in tensors:
        if not files or each.bytes > room:
            files.append([])
            room = most_bytes
        files[-1].append(each)
        room -= each.bytes
    return files or [[]]


def file_names(count: int) -> list[str]:
    """Return the names of so many files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def is_file_name(name: str) -> bool:
    """Return whether a name is one that an export gives."""
    return name == INDEX_NAME or _NAME.fullmatch(name) is not None


def has_mark(path: Path) -> bool:
    """Return whether a file is one that `lay_out` began. Raises: CorruptError (no regular file), OSError."""
    fd = open_regular(path)
    try:
        return os.pread(fd, len(_MARK), 8) == _MARK
    finally:
        os.close(fd)


def lay_out(tensors: Sequence[Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes that a file begins with, and where in the file the elements of each tensor begin.

    Wide elements come first, and blanks end the header, so that all elements are aligned. Raises: ConfigError (too many
    tensors for one file).
    """
    header: dict[str, object] = {**_FIRST}
    places: dict[str, int] = {}
    end = 0
    for each in sorted(tensors, key=lambda each: -(item_bytes(each.dtype) or 0)):
        places[each.name] = end
        header[each.name] = {
            "dtype": DTYPES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [end, end + each.bytes],
        }
        end += each.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN_BYTES)
    if len(text) > _MOST_HEADER_BYTES:
        raise ConfigError(
            f"{len(tensors):,} tensors are too many for one file: ask for smaller ones (--max-shard-size)"
        )
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + place for name, place in places.items()}


def index_json(files: Mapping[str, Sequence[Tensor]]) -> bytes:
    """Return the bytes of `model.safetensors.index.json`: which tensor is in which file."""
    everything = [each for tensors in files.values() for each in tensors]
    index = {
        "metadata": {
            "total_parameters": sum(prod(each.shape) for each in everything),
            "total_size": sum(each.bytes for each in everything),
        },
        "weight_map": {each.name: file for file, tensors in files.items() for each in tensors},
    }
    return (json.dumps(index, indent=2) + "\n").encode()
