"""Files of random bytes, their digests, and ranges of them to be read."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptman.io import file_writer
from ckptman.io.checked_reader import Wanted
from ckptman.io.checksums import Digests, digest_file
from ckptman.io.file_reader import FileReader

KIB, MIB = 1024, 1024 * 1024
BLOCK = 128 * KIB


def random_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def digests_of(path: Path, block_bytes: int = BLOCK) -> Digests:
    size, blocks = digest_file(path, block_bytes)
    return Digests(block_bytes, b"".join(blocks), size)


def into(file: str, offset: int, size: int, label: str = "", place: bytearray | None = None) -> Wanted:
    return Wanted(file, offset, size, into=memoryview(place if place is not None else bytearray(size)), label=label)


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files written as on a file system that takes no direct I/O, and read from the page cache."""
    real = fcntl.fcntl

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, flags)

    constants = {"F_GETFL": fcntl.F_GETFL, "F_SETFL": fcntl.F_SETFL}
    monkeypatch.setattr(file_writer, "fcntl", SimpleNamespace(fcntl=refuse, **constants))
    monkeypatch.setattr(FileReader, "is_cold", lambda *_: None)
