"""Files of random bytes, their digests, and ranges of them to be read."""

from __future__ import annotations

import random
from pathlib import Path

from ckptman.io.checked_reader import Wanted
from ckptman.io.checksums import Digests, digest_file, group_bytes

KIB, MIB = 1024, 1024 * 1024
BLOCK = 128 * KIB


def random_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def digests_of(path: Path, block_bytes: int = BLOCK, *, groups: bool = True) -> Digests:
    size, blocks = digest_file(path, block_bytes)
    of_groups = digest_file(path, group_bytes(block_bytes))[1] if groups and group_bytes(block_bytes) else []
    return Digests(block_bytes, b"".join(blocks), size, b"".join(of_groups))


def into(file: str, offset: int, size: int, label: str = "", place: bytearray | None = None) -> Wanted:
    return Wanted(file, offset, size, into=memoryview(place if place is not None else bytearray(size)), label=label)
