"""The zip archives that torch.save writes: read so that everybody who reads them finds the same in them.

A zip archive is read from its end, where its directory is told. What torch reads it with and Python's zipfile look for
that end in different ways: in a file that was made for it, each finds a directory of its own.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from typing import Any, BinaryIO

LOCAL_HEADER_BYTES = 30
_BEGIN = b"PK\x03\x04"
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_NO_ARCHIVE = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, struct.error, EOFError, RuntimeError, KeyError),
    *(IndexError, OverflowError),
)
"""What zipfile raises, besides ValueError, on bytes that are no archive."""
_ENDS_BYTES = _END_64.size + _LOCATOR.size + _END.size


class PartOfFile(io.RawIOBase):
    """A part of an open file as a file of its own. `where`: what to call it."""

    def __init__(self, fd: int, start: int, size: int, where: str = "") -> None:
        self.where = where
        self._fd, self._start, self._size, self._position = fd, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if position < 0:
            raise ValueError("negative seek position")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = os.preadv(self._fd, [view[: max(0, self._size - self._position)]], self._start + self._position)
        self._position += count
        return count


def records(file: BinaryIO) -> list[zipfile.ZipInfo]:
    """Return the records of an archive that begins with the first of them and ends with its directory and its end.

    Raises: ValueError where it is no such archive, OSError.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    begins = file.read(len(_BEGIN)) == _BEGIN
    file.seek(max(size - _ENDS_BYTES, 0))
    count = _count(file.read(_ENDS_BYTES), size) if begins else None
    try:
        with zipfile.ZipFile(file) as archive:
            found = archive.infolist()
    except _NO_ARCHIVE as error:
        raise ValueError(str(error)) from error
    if len(found) != count:
        raise ValueError("it is not an archive from its first byte to its last")
    return found


def data_start(header: bytes | bytearray) -> int:
    """Return where the data of a record begins, counted from its local header (APPNOTE.TXT 4.3.7)."""
    return LOCAL_HEADER_BYTES + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def data_at(file: BinaryIO, record: zipfile.ZipInfo) -> int:
    """Return where the data of a record begins in its archive. Raises: ValueError, OSError."""
    file.seek(record.header_offset)
    header = file.read(LOCAL_HEADER_BYTES)
    if len(header) < LOCAL_HEADER_BYTES or not header.startswith(_BEGIN):
        raise ValueError(f"{record.filename[:80]} does not begin where its archive says")
    return record.header_offset + data_start(header)


def _count(end: bytes, size: int) -> int | None:
    """How many records there are, by the last bytes of an archive; None if it does not end where its directory does."""
    if len(end) < _END.size:
        return None
    magic, _, _, _, count, directory_bytes, directory, comment_bytes = _END.unpack(end[-_END.size :])
    begin = size - _END.size
    locator = end[-_END.size - _LOCATOR.size : -_END.size]
    if locator.startswith(b"PK\x06\x07"):
        # An archive that may be larger than 4 GiB, as torch always writes it: the numbers are in another record.
        begin = size - _ENDS_BYTES
        if begin != _LOCATOR.unpack(locator)[2] or not end.startswith(b"PK\x06\x06"):
            return None
        *_, count, directory_bytes, directory = _END_64.unpack(end[: _END_64.size])
    is_end = magic == b"PK\x05\x06" and not comment_bytes and directory + directory_bytes == begin
    return int(count) if is_end else None
