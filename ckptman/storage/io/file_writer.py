"""Writing files: from several threads, past the page cache where the file system takes that, digested on the way.

A `FileWriter` is one file that is being written; whatever writes large files does it through one. `write_source` writes
a whole data file from a source, with the digests that are saved beside it. What was written is read back by
`io.checked_reader`. Memory beyond the source: scratch of one stride a thread, used again by later calls.

`FiniteScan` looks meanwhile whether the numbers in a file are finite. A number is NaN or infinite where all bits of its
exponent are set, or beyond that, so the largest of them, taken as integers, tells: at the speed of memory, for each
dtype alike, and without a copy.
"""

from __future__ import annotations

import errno
import fcntl
import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from ckptman.storage.io.checksums import BLOCK_BYTES, DIGEST_BYTES, Digests, digests_bytes, large_block_bytes
from ckptman.storage.io.durable_files import DISK, named, open_new
from ckptman.storage.io.threads import ALIGN_BYTES, STRIDE_BYTES, computing_threads, io_threads, relay, stride_of

_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


class Source(Protocol):
    """The bytes of a file that is about to be written."""

    @property
    def size_bytes(self) -> int:
        """A multiple of `ALIGN_BYTES`."""

    def view(self, offset: int, scratch: memoryview) -> memoryview:
        """Return bytes [offset, offset + len(scratch)): `scratch` itself, filled, or memory of the source's own.

        Any alignment will do. Called from several threads at a time.
        """


@dataclass(frozen=True)
class Written:
    """A file that is on storage. `buffered_because` is None where every byte went by direct I/O."""

    digests: Digests
    digest: str
    buffered_because: str | None

    @classmethod
    def of(cls, digests: Digests, buffered_because: str | None) -> Written:
        """Return what is known of a file from the digests of its blocks."""
        return cls(digests, xxh3_128_hexdigest(digests.blocks), buffered_because)


def write_source(
    path: Path,
    source: Source,
    *,
    threads: int | None = None,
    look: Callable[[int, memoryview], None] | None = None,
) -> Written:
    """Write a file that nobody has made yet and flush it to storage. The folder is not flushed.

    `look` is shown each piece with its offset, from several threads at a time.

    Raises: OSError with the name of the file; whatever the source raises. What was written stays for the caller to
    remove.
    """
    with FileWriter(path, source.size_bytes, flags=os.O_EXCL) as file:
        digests = write_all(file, source, threads or io_threads(), look)
    return Written.of(digests, file.buffered_because)


class Sink(Protocol):
    """Takes the pieces of a file, at any place; one that is not direct and has one thread, from front to back."""

    @property
    def is_direct(self) -> bool:
        """Whether pieces have to begin on a page, in memory and in the file."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of it."""

    def flush(self) -> None:
        """Flush it to storage."""


class InPlace:
    """A file that is what it is to be already, and whose bytes are digested only."""

    is_direct = False

    def write(self, data: memoryview, offset: int) -> None:
        """Write nothing."""

    def flush(self) -> None:
        """Flush nothing."""


def write_all(
    file: Sink,
    source: Source,
    threads: int,
    look: Callable[[int, memoryview], None] | None = None,
    *,
    block_bytes: int = BLOCK_BYTES,
    piece_bytes: int = STRIDE_BYTES,
    with_large: bool = True,
    on_error: Callable[[], None] = lambda: None,
) -> Digests:
    """Fill a file from its source and flush it to storage. Return the digests of its blocks. Raises: as
    `write_source`.

    `piece_bytes`: at most so much at a time. `with_large`: digest large blocks, too, where pieces are made of them.
    `on_error`: as of `relay`.
    """
    size, stride = source.size_bytes, stride_of(block_bytes, piece_bytes)
    blocks, large = bytearray(digests_bytes(size, block_bytes)), large_block_bytes(size, block_bytes)
    large = large if with_large and large and not stride % large else 0
    large_blocks = bytearray(digests_bytes(size, large) if large else 0)

    def prepare(number: int, scratch: memoryview) -> memoryview:
        offset = number * stride
        scratch = scratch[: min(stride, size - offset)]
        data = _flat(source.view(offset, scratch), len(scratch))
        data = _digest(data, scratch, file.is_direct, block_bytes, into=blocks, at=offset)
        for low in range(0, len(data), large) if large else ():  # while it is in the cache of the core
            at = (offset + low) // large * DIGEST_BYTES
            large_blocks[at : at + DIGEST_BYTES] = xxh3_128_digest(data[low : low + large])
        if look is not None:
            look(offset, data)
        return data

    def write(number: int, scratch: memoryview, data: memoryview) -> None:
        file.write(data, number * stride)

    # Directly the disk takes it by itself while others compute; the page cache copies it, and nobody waits.
    relay(
        -(-size // stride),
        prepare,
        write,
        first_threads=computing_threads(threads) if threads > 1 and file.is_direct else threads,
        then_threads=threads - 1 if file.is_direct else 0,
        scratch_bytes=min(stride, size),
        on_error=on_error,
    )
    file.flush()
    return Digests(block_bytes, bytes(blocks), size, large, bytes(large_blocks))


class FileWriter:
    """A file that is being written, by direct I/O as long as the file system takes that.

    Args:
        path: The file, made where it is missing. Its folder is not flushed.
        size_bytes: The room that it will need, taken at once.
        flags: More flags to open it with, such as `os.O_EXCL`.
        buffered_because: Why it is not to be written past the page cache; None: it is, where that can be.
        fd: The file, where it is open already, with the room that it needs.

    Raises: OSError with the name of the file; so does all that it does.
    """

    def __init__(
        self,
        path: Path,
        size_bytes: int,
        *,
        flags: int = 0,
        buffered_because: str | None = None,
        fd: int | None = None,
    ) -> None:
        self.buffered_because = buffered_because
        """Why not every byte goes by direct I/O; None where it does."""
        self._path = path
        if fd is not None:
            self.fd = fd
            return
        with named(path):
            self.fd = open_new(path, os.O_WRONLY | flags)
            try:
                if self.is_direct:
                    self._go_direct()
                if size_bytes:
                    DISK.reserve(self.fd, size_bytes)
            except BaseException:
                self.close()
                raise

    @property
    def is_direct(self) -> bool:
        """Whether it is written past the page cache, for which data begins on a page in memory and in the file."""
        return self.buffered_because is None

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of it. Pages from an address on a page go direct; the first that do not end that. Thread-safe."""
        while data:
            direct = self.is_direct
            try:
                with named(self._path):
                    count = DISK.write_at(self.fd, data, offset)
            except OSError as error:
                if not direct or error.errno not in _REFUSED:
                    raise
                self._go_buffered(f"a direct write was refused ({error.strerror})")
                continue
            if not count:
                raise OSError(errno.EIO, "a write wrote nothing", str(self._path))
            data, offset = data[count:], offset + count
            if data and direct and count % ALIGN_BYTES:
                self._go_buffered(f"a direct write ended after {count} bytes")

    def flush(self, size_bytes: int | None = None) -> None:
        """Flush it to storage, cut to that size where one is given."""
        with named(self._path):
            if size_bytes is not None and os.fstat(self.fd).st_size != size_bytes:
                os.ftruncate(self.fd, size_bytes)
            DISK.sync_file(self.fd)

    def close(self) -> None:
        """Close it, flushed or not."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _go_direct(self) -> None:
        # Not at open: a file system that refuses it there may have made the file all the same.
        try:
            flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self.buffered_because = f"no direct I/O on this file system ({error})"

    def _go_buffered(self, why: str) -> None:
        # The flag goes first: a thread that reads the reason may write from any address.
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.buffered_because = self.buffered_because or why


def _digest(
    data: memoryview, scratch: memoryview, direct: bool, block_bytes: int, *, into: bytearray, at: int
) -> memoryview:
    """Return the data where a write can take it from, and put the digests of its blocks into those of the file, in
    which it begins at `at`."""
    array, aligned = np.frombuffer(data, np.uint8), np.frombuffer(scratch, np.uint8)
    copied = direct and array.ctypes.data % ALIGN_BYTES != 0
    found, place = scratch if copied else data, at // block_bytes * DIGEST_BYTES
    for low in range(0, len(data), block_bytes):
        high = min(low + block_bytes, len(data))
        if copied:  # block by block: each is digested while it is in the cache of the core
            np.copyto(aligned[low:high], array[low:high])
        into[place : place + DIGEST_BYTES] = xxh3_128_digest(found[low:high])
        place += DIGEST_BYTES
    return found


def _flat(view: memoryview, size: int) -> memoryview:
    if view.nbytes != size:
        raise ValueError(f"a source gave {view.nbytes} bytes where {size} were asked for")
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


_INFINITE = {
    "float64": (8, 0x7FF0_0000_0000_0000),
    "float32": (4, 0x7F80_0000),
    "bfloat16": (2, 0x7F80),
    "float16": (2, 0x7C00),
    "float8_e5m2": (1, 0x7C),
    "float8_e4m3fn": (1, 0x7F),  # which has no infinity: this is NaN
}
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16", "bcomplex32": "bfloat16"}
_INFINITE |= {dtype: _INFINITE[part] for dtype, part in _PARTS.items()}
"""By dtype: bytes of a number, and the least of those that are not finite, as an integer without its sign."""


class Range(NamedTuple):
    """Where a tensor's numbers lie in the file: bytes [start, end)."""

    start: int
    end: int
    name: str
    dtype: str


class FiniteScan:
    """Looks at the pieces of one file, in any order and from several threads at a time.

    `ranges`: what is to be looked at, in order. `found`: names of the tensors that hold NaN or infinity.
    """

    def __init__(self, ranges: list[Range]) -> None:
        self._ranges, self._starts = ranges, [each.start for each in ranges]
        self.found: set[str] = set()

    def __call__(self, offset: int, data: memoryview) -> None:
        """Look at the bytes from `offset` on."""
        end = offset + len(data)
        for each in self._ranges[max(bisect_right(self._starts, offset) - 1, 0) : bisect_right(self._starts, end)]:
            low, high = max(each.start, offset), min(each.end, end)
            if (
                low < high
                and each.name not in self.found
                and not is_finite(data[low - offset : high - offset], each.dtype)
            ):
                self.found.add(each.name)


def can_be_infinite(dtype: str) -> bool:
    """Return whether numbers of this dtype can be NaN or infinite."""
    return dtype in _INFINITE


def is_finite(data: memoryview, dtype: str) -> bool:
    """Return whether no number in the bytes of a tensor is NaN or infinite. `dtype`: one that has such numbers."""
    size, infinite = _INFINITE[dtype]
    numbers = np.frombuffer(data, f"<i{size}")
    # With the sign bit the same ones are the largest unsigned integers.
    return bool(numbers.max() < infinite and numbers.view(f"<u{size}").max() < infinite + (1 << 8 * size - 1))
