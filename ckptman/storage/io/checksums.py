"""Digests of files, block by block, so that whoever reads a slice can check exactly the bytes it read.

A file is cut into blocks of `BLOCK_BYTES`; each has an xxh3-128 digest (Collet, https://xxhash.com). The digest of the
file is the xxh3-128 of its block digests one after the other. xxh3 finds accidents, not forgers.

A large data file has digests of large blocks besides. Each digest is a call that waits its turn for the interpreter, so
that many threads which check small blocks are slower than few. A slice is checked by small blocks, and whatever covers
a large one by that: 16 times fewer calls, and no byte more is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128, xxh3_128_digest, xxh3_128_hexdigest

from ckptman.errors import CorruptError
from ckptman.storage.io.safe_open import open_regular

BLOCK_BYTES = 128 * 1024
"""Small, because a rank that reads a slice reads whole blocks at both ends of it; and large enough for xxhash to digest
one without the interpreter's lock, so that neither training nor other threads wait for it."""
LARGE_BLOCK_BYTES = 2 * 1024 * 1024
"""What is read and checked at a time: no more, so that it is still in the cache of the core when it is digested."""
DIGEST_BYTES = 16
_LARGE = b"large\0\0\0"
_MOST_LARGE_BYTES = 2**30
_READ_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Digests:
    """The digests of the blocks of one file, 16 bytes each, and the size of that file.

    `large`: those of its large blocks, of `large_block_bytes` each; there are none where that is 0.
    """

    block_bytes: int
    blocks: bytes
    size_bytes: int
    large_block_bytes: int = 0
    large: bytes = b""

    def to_bytes(self) -> bytes:
        """Return what is saved of them: those of the blocks, then a head and those of the large blocks."""
        if not self.large_block_bytes:
            return self.blocks
        return self.blocks + _LARGE + self.large_block_bytes.to_bytes(8, "little") + self.large

    @classmethod
    def from_bytes(cls, data: bytes, block_bytes: int, size_bytes: int) -> Digests:
        """Return what `to_bytes` gave; other bytes behind the digests of the blocks are left alone.

        Raises: CorruptError (what is there of large blocks cannot be).
        """
        end = digests_bytes(size_bytes, block_bytes)
        blocks, head, large = data[:end], data[end : end + DIGEST_BYTES], data[end + DIGEST_BYTES :]
        if not head.startswith(_LARGE) or len(head) < DIGEST_BYTES:
            return cls(block_bytes, blocks, size_bytes)
        size = int.from_bytes(head[len(_LARGE) :], "little")
        if not 0 < size <= _MOST_LARGE_BYTES or size % block_bytes or len(large) != digests_bytes(size_bytes, size):
            raise CorruptError(f"{size_bytes} bytes in blocks of {block_bytes} have no large blocks of {size} bytes")
        return cls(block_bytes, blocks, size_bytes, size, large)


def large_block_bytes(size_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Return the size of the large blocks of a file; 0: it needs none."""
    return LARGE_BLOCK_BYTES if size_bytes > LARGE_BLOCK_BYTES and not LARGE_BLOCK_BYTES % block_bytes else 0


def digests_bytes(size_bytes: int, block_bytes: int) -> int:
    """Return how many bytes the digests of a file of this size are, cut into blocks of that size."""
    return -(-size_bytes // block_bytes) * DIGEST_BYTES


class BlockDigester:
    """Digests a stream as it passes. `update` in any pieces, then `finish` once."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._room = block_bytes
        self._current = xxh3_128()
        self.blocks: list[bytes] = []
        self.size_bytes = 0

    def update(self, data: bytes | memoryview) -> None:
        """Digest what comes next."""
        view = memoryview(data)
        if not view.nbytes:  # a view with a zero in its shape cannot be cast
            return
        view, block, at = view.cast("B"), self._block_bytes, 0
        self.size_bytes += len(view)
        while at < len(view):
            if self._room == block and at + block <= len(view):
                self.blocks.append(xxh3_128_digest(view[at : at + block]))
                at += block
                continue
            piece = view[at : at + self._room]
            self._current.update(piece)
            self._room -= len(piece)
            at += len(piece)
            if not self._room:
                self._close_block()

    def finish(self) -> str:
        """Return the digest of the whole stream, as 32 hexadecimal characters."""
        if self._room < self._block_bytes:
            self._close_block()
        return digest_of_blocks(self.blocks)

    def _close_block(self) -> None:
        self.blocks.append(self._current.digest())
        self._current.reset()
        self._room = self._block_bytes


def digest_segments(segments: Sequence[memoryview], block_bytes: int) -> list[bytes]:
    """Return the digests of the blocks that segments make one after the other; the last block may be shorter."""
    if len(segments) == 1:  # as a rule, and in half the time
        (whole,) = segments
        return [xxh3_128_digest(whole[at : at + block_bytes]) for at in range(0, len(whole), block_bytes)]
    digester = BlockDigester(block_bytes)
    for segment in segments:
        digester.update(segment)
    digester.finish()
    return digester.blocks


def digest_of_blocks(blocks: Sequence[bytes]) -> str:
    """Return the digest of a file from the digests of its blocks."""
    return xxh3_128_hexdigest(b"".join(blocks))


def digest_bytes(data: bytes | memoryview, block_bytes: int = BLOCK_BYTES) -> str:
    """Return the digest of a file that holds `data`."""
    digester = BlockDigester(block_bytes)
    digester.update(data)
    return digester.finish()


def digest_file(
    path: Path, block_bytes: int = BLOCK_BYTES, *, done: Callable[[int], None] | None = None
) -> tuple[int, list[bytes]]:
    """Size in bytes and block digests of a regular file, read once from front to back.

    `done`: called with the bytes of each read. Raises: CorruptError (it is no file), OSError.
    """
    digester = BlockDigester(block_bytes)
    with open(open_regular(path), "rb", buffering=0) as file:
        buffer = memoryview(bytearray(max(1, min(_READ_BYTES, os.fstat(file.fileno()).st_size))))
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            digester.update(buffer[:count])
            if done is not None:
                done(count)
    digester.finish()
    return digester.size_bytes, digester.blocks
