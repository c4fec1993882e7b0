"""The mark that every export carries, and by which it is known again: what has none is not replaced.

It lies where who loads the export passes it over, and where a file that somebody else writes in its place has none.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from ckptman.errors import CorruptError
from ckptman.format.paths import METADATA
from ckptman.format.safetensors import has_mark, is_file_name
from ckptman.io.safe_open import open_regular
from ckptman.loading.restricted_unpickler import read_foreign_metadata

_SAVE_ID = "ckptman-export-"
_SAVE_ID_BYTES = 1024
"""So near to its end the description of an export has that; those of others may have gigabytes."""
_COMMENT = b"ckptman export"
_ZIP_END = b"PK\5\6"
_ZIP_END_BYTES = 22


def save_id() -> str:
    """What the `.metadata` of an export is told apart by."""
    return f"{_SAVE_ID}{os.urandom(8).hex()}"


def commented(end: bytes) -> bytes:
    """The last bytes of a zip archive, with a comment behind them."""
    assert end.endswith(b"\0\0")  # the length of the comment that there is not
    return end[:-2] + struct.pack("<H", len(_COMMENT)) + _COMMENT


def is_export_file(path: Path) -> bool:
    """Whether a file is what `export --format torch` wrote. Raises: OSError."""
    try:
        end = _end_of(path, _ZIP_END_BYTES + len(_COMMENT))
    except CorruptError:
        return False
    return end.startswith(_ZIP_END) and end[_ZIP_END_BYTES - 2 :] == struct.pack("<H", len(_COMMENT)) + _COMMENT


def is_marked(path: Path) -> bool:
    """Whether a file of a folder is one by which an export to safetensors or dcp is known. Raises: OSError."""
    try:
        if path.name != METADATA:
            return is_file_name(path.name) and has_mark(path)
        if _SAVE_ID.encode() not in _end_of(path, _SAVE_ID_BYTES):
            return False
        described = read_foreign_metadata(path).storage_meta
        return described is not None and str(described.save_id).startswith(_SAVE_ID)
    except CorruptError:
        return False


def _end_of(path: Path, size: int) -> bytes:
    """The last bytes of a file. Raises: CorruptError (no regular file), OSError."""
    fd = open_regular(path)
    try:
        return os.pread(fd, size, max(os.fstat(fd).st_size - size, 0))
    finally:
        os.close(fd)
