"""A file that is read from end to end, piece by piece, each block digested while it lies in the cache. Torch-free."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import cast

from xxhash import xxh3_128, xxh3_128_digest

from ckptman.errors import CorruptError
from ckptman.io.checksums import DIGEST_BYTES
from ckptman.io.range_reader import DIRECT_BYTES, UNREADABLE
from ckptman.io.safe_open import open_regular
from ckptman.io.workers import ALIGN_BYTES, STRIDE_BYTES, aligned_memory, stride_of

BATCH_BYTES = 2 * 1024 * 1024
"""What one call reads out of the page cache: a call for less costs more a byte, and after one for more the first bytes
have left the cache of the core before they are digested."""
_MAP_FIXED = 0x10  # the module mmap has no name for it

Stamp = tuple[int, int, int]
"""Inode, size and modification time (ns): what changes when somebody writes to a file or puts another in its place."""


@dataclass
class Scanned:
    """A file that was read.

    `blocks`: the digests of its blocks, 16 bytes each. `unreadable`: blocks that the disk did not give, and why.
    `refused`: what kept all of it from being read, where that says nothing about its bytes (permissions, no memory).
    """

    name: str
    blocks: bytearray
    unreadable: dict[int, str] = field(default_factory=dict)
    refused: OSError | None = None
    stamp: Stamp | None = None


def stamp_of(found: os.stat_result) -> Stamp:
    """What a file is known by, to see later whether it is still the same."""
    return found.st_ino, found.st_size, found.st_mtime_ns


class Hand:
    """The scratch memory of one thread, cut into blocks once and for all."""

    def __init__(self, scratch: memoryview, block_bytes: int) -> None:
        self.scratch, self._block_bytes = scratch, block_bytes
        self._blocks = [scratch[at : at + block_bytes] for at in range(0, STRIDE_BYTES - block_bytes + 1, block_bytes)]

    def digests(self, size: int) -> bytes:
        """The digests of the blocks in the first `size` bytes; the last block may be shorter."""
        whole, rest = divmod(size, self._block_bytes)
        found = b"".join(map(xxh3_128_digest, self._blocks[:whole]))
        return found + xxh3_128_digest(self.scratch[size - rest : size]) if rest else found


class Window(Hand):
    """Addresses at which pieces of files are seen one after the other, in place of one another, cut into blocks once.

    They begin where a huge page does: then what the page cache keeps in large folios takes a few entries to map.
    """

    def __init__(self, block_bytes: int) -> None:
        super().__init__(aligned_memory(STRIDE_BYTES), block_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.scratch))

    def show(self, fd: int, low: int, size: int) -> None:
        """Show the bytes of a file from `low` on. Raises: OSError; then the addresses may not be used any more."""
        if _mmap(self._address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, low) != self._address:
            raise OSError(ctypes.get_errno(), "the file cannot be mapped")


class Pieces:
    """The first so many bytes of files, cut into numbered pieces of one stride; the last of a file may be shorter."""

    def __init__(self, folder: Path, sizes: Sequence[tuple[str, int]], block_bytes: int) -> None:
        self.block_bytes, self.piece_bytes = block_bytes, stride_of(block_bytes)
        self.sources = [Source(folder / name, name, size, block_bytes) for name, size in sizes]
        self._starts = list(accumulate((-(-size // self.piece_bytes) for _, size in sizes), initial=0))

    @property
    def count(self) -> int:
        return self._starts[-1]

    def by_file(self) -> Iterator[tuple[int, int]]:
        """First piece of each file, and that of the next one; files without bytes have none."""
        return ((first, stop) for first, stop in pairwise(self._starts) if stop > first)

    def at(self, number: int) -> tuple[Source, int, int]:
        """A piece: its file, and its bytes [low, high)."""
        return next(self.runs(range(number, number + 1)))

    def runs(self, numbers: range) -> Iterator[tuple[Source, int, int]]:
        """Pieces that follow one another: each of their files, and its bytes [low, high)."""
        begin = numbers.start
        while begin < numbers.stop:
            which = bisect_right(self._starts, begin) - 1
            first, stop = self._starts[which], min(numbers.stop, self._starts[which + 1])
            source = self.sources[which]
            yield source, (begin - first) * self.piece_bytes, min((stop - first) * self.piece_bytes, source.size)
            begin = stop

    def begin_cold(self) -> bool:
        """Whether the first of them has to come from the disk. Leaves its file closed."""
        if not self.count:
            return False
        source, low, high = self.at(0)
        fd = source.open_once()
        cold = fd >= 0 and source.is_cold(fd, low, high)
        source.close()
        return cold


class Source:
    """A file that is being read: opened when it is wanted, closed after the last byte."""

    def __init__(self, path: Path, name: str, size: int, block_bytes: int) -> None:
        self.size, self.block_bytes, self._left = size, block_bytes, size
        self.scanned = Scanned(name, bytearray())
        self._path = path
        self._batch_bytes = max(block_bytes, BATCH_BYTES // block_bytes * block_bytes)
        self._fd = self._direct_fd = -1
        self._takes_direct = hasattr(os, "O_DIRECT") and block_bytes % ALIGN_BYTES == 0
        self._can_tell = hasattr(os, "RWF_NOWAIT")
        self._lock = threading.Lock()

    def open_once(self) -> int:
        """The open file; -1 where it could not be opened."""
        with self._lock:
            if self._fd < 0 and self.scanned.refused is None:
                try:
                    self._fd = open_regular(self._path)
                    self.scanned.stamp = self.scanned.stamp or stamp_of(os.fstat(self._fd))
                    # Only now: the digests of all files would be much at a time.
                    self.scanned.blocks = bytearray(-(-self.size // self.block_bytes) * DIGEST_BYTES)
                except CorruptError:
                    self.scanned.refused = OSError(errno.EINVAL, "it is no regular file")
                except MemoryError:
                    self.scanned.refused = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
                except OSError as error:
                    self.scanned.refused = error
            return self._fd if self.scanned.refused is None else -1

    def read(self, low: int, high: int, hand: Hand) -> None:
        """Digest the blocks of bytes [low, high), a piece."""
        fd = self.open_once()
        try:
            if fd < 0:
                return
            if self.block_bytes > STRIDE_BYTES:
                self.keep(low, self._digest_large(fd, low, high, hand))
            elif self.is_cold(fd, low, high) and self._read_direct(fd, low, high, hand):
                self.keep(low, hand.digests(high - low))
            else:
                for begin in range(low, high, self._batch_bytes):
                    self._read_batch(fd, begin, min(begin + self._batch_bytes, high), hand)
        except OSError as error:
            if error.errno in UNREADABLE:
                self._lose(low, high, error)
            else:
                self.scanned.refused = self.scanned.refused or error

    def digest_where_it_lies(self, low: int, high: int, hand: Hand, window: Window) -> bytes:
        """The digests of the same blocks. What is in the page cache is digested there: nothing is copied.

        Whoever meets a page that is gone, because the file was cut short or the disk does not give it, is killed by
        SIGBUS: never call it in a process that matters. Raises: OSError; then the window is lost.
        """
        fd = self.open_once()
        if self._is_cached(fd, low):
            window.show(fd, low, high - low)
            return window.digests(high - low)
        if self.is_cold(fd, low, high) and self._read_direct(fd, low, high, hand):
            return hand.digests(high - low)
        found = b""
        for begin in range(low, high, self._batch_bytes):
            size = min(self._batch_bytes, high - begin)
            if _fill(fd, hand.scratch[:size], begin) < size:
                raise OSError(errno.ENODATA, "the file has ended")
            found += hand.digests(size)
        return found

    def keep(self, low: int, digests: bytes) -> None:
        """Take in the digests of the blocks from byte `low` on."""
        at = low // self.block_bytes * DIGEST_BYTES
        self.scanned.blocks[at : at + len(digests)] = digests

    def end(self, count: int) -> bool:
        """So many bytes less to read. Whether they were the last."""
        with self._lock:
            self._left -= count
            last = not self._left
        if last:
            self.close()
        return last

    def close(self) -> None:
        """Let go of the file, until it is wanted again."""
        with self._lock:
            for fd in {self._fd, self._direct_fd} - {-1}:
                os.close(fd)
            self._fd = self._direct_fd = -1

    def is_cold(self, fd: int, low: int, high: int) -> bool:
        """Whether much is wanted, of which the first is not in the page cache, where the file system can say so."""
        return self._takes_direct and high - low >= DIRECT_BYTES and self._is_cached(fd, low) is False

    def _is_cached(self, fd: int, low: int) -> bool | None:
        """Whether a byte is in the page cache; None where the file system cannot say."""
        if not self._can_tell:
            return None
        try:
            return bool(os.preadv(fd, [bytearray(1)], low, os.RWF_NOWAIT))
        except BlockingIOError:
            return False
        except OSError:  # an error of the disk comes again with the read itself
            self._can_tell = False
            return None

    def _read_batch(self, fd: int, low: int, high: int, hand: Hand) -> None:
        try:
            count = _fill(fd, hand.scratch[: high - low], low)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            if high - low <= self.block_bytes:
                self._lose(low, high, error)
            else:  # which of them is it?
                for begin in range(low, high, self.block_bytes):
                    self._read_batch(fd, begin, min(begin + self.block_bytes, high), hand)
            return
        if count < high - low:
            count -= count % self.block_bytes
            self._lose(low + count, high, OSError(0, "the file was cut short while it was read"))
        self.keep(low, hand.digests(count))

    def _digest_large(self, fd: int, low: int, high: int, hand: Hand) -> bytes:
        hasher, at = xxh3_128(), low
        while at < high:
            view = hand.scratch[: min(STRIDE_BYTES, high - at)]
            count = _fill(fd, view, at)
            hasher.update(view[:count])
            at += count
            if count < len(view):
                self._lose(low, high, OSError(0, "the file was cut short while it was read"))
                break
        return hasher.digest()

    def _read_direct(self, fd: int, low: int, high: int, hand: Hand) -> bool:
        """Read past the page cache, in one call. False where that was refused or gave less: the page cache will say."""
        with self._lock:
            if self._direct_fd < 0 and self._takes_direct:
                with suppress(OSError, CorruptError):
                    self._direct_fd = open_regular(self._path, direct=True)
                # Another file may have taken its name since it was opened first.
                self._takes_direct = self._direct_fd >= 0 and os.path.sameopenfile(fd, self._direct_fd)
            if not self._takes_direct:
                return False
        size = high - low
        try:
            return os.preadv(self._direct_fd, [hand.scratch[: -(-size // ALIGN_BYTES) * ALIGN_BYTES]], low) >= size
        except OSError:
            self._takes_direct = False
            return False

    def _lose(self, low: int, high: int, error: OSError) -> None:
        why = error.strerror or str(error)
        for block in range(low // self.block_bytes, -(-high // self.block_bytes)):
            self.scanned.unreadable[block] = why


def _find_mmap() -> Callable[[int, int, int, int, int, int], int | None]:
    found = ctypes.CDLL(None, use_errno=True).mmap
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    found.restype = ctypes.c_void_p
    return cast("Callable[[int, int, int, int, int, int], int | None]", found)


_mmap = _find_mmap()


def _fill(fd: int, view: memoryview, offset: int) -> int:
    """Read to a view; the bytes there were: fewer than it holds only where the file ends. Raises: OSError."""
    filled = os.preadv(fd, [view], offset)
    while filled < len(view):
        count = os.preadv(fd, [view[filled:]], offset + filled)
        if not count:
            break
        filled += count
    return filled
