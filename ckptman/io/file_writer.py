"""Parallel file I/O with block digests: a file is written from a source, and ranges of files are read where they go.

Writing is in this file and uses direct I/O where the file system takes it; reading is in `ckptman.io.range_reader`.
Digests and blocks are those of `ckptman.io.checksums`. Torch-free. Memory beyond sources and destinations: scratch of
one stride a thread (up to three where ranges are wanted whole), used again by later calls unless it is large.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from ckptman.io.checksums import BLOCK_BYTES, DIGEST_BYTES, Digests, digests_bytes, group_bytes
from ckptman.io.filesystem import Disk, open_new
from ckptman.io.range_reader import ReadReport, read_wanted
from ckptman.io.spans import Wanted
from ckptman.io.workers import ALIGN_BYTES, STRIDE_BYTES, computing_threads, io_threads, relay, share_out, stride_of

__all__ = [
    "ALIGN_BYTES",
    "STRIDE_BYTES",
    "Digests",
    "ReadReport",
    "Source",
    "Target",
    "Wanted",
    "Written",
    "io_threads",
    "read_wanted",
    "write_source",
]

_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


class Source(Protocol):
    """The bytes of a file that is about to be written."""

    size_bytes: int
    """A multiple of `ALIGN_BYTES`."""

    def view(self, offset: int, scratch: memoryview) -> memoryview:
        """Bytes [offset, offset + len(scratch)): `scratch` itself, filled, or memory of the source's own.

        Any alignment will do. Called from several threads at a time.
        """


@dataclass(frozen=True)
class Written:
    """A file that is on storage. `buffered_because` is None where every byte went by direct I/O."""

    digests: Digests
    digest: str
    buffered_because: str | None


def write_source(
    path: Path,
    source: Source,
    *,
    disk: Disk,
    block_bytes: int = BLOCK_BYTES,
    threads: int | None = None,
    direct: bool = True,
) -> Written:
    """Write a file that nobody has made yet and flush it to storage. The folder is not flushed.

    Raises: OSError with the name of the file; whatever the source raises. What was written stays for the caller to
    remove.
    """
    group = group_bytes(block_bytes)
    stride = stride_of(group or block_bytes)
    size = source.size_bytes
    fd = open_new(path, os.O_WRONLY | os.O_EXCL)
    try:
        target = Target(path, fd, disk)
        if not direct:
            target.buffered_because = "direct I/O was not asked for"
        elif size % ALIGN_BYTES or block_bytes % ALIGN_BYTES:
            target.buffered_because = f"{size} bytes in blocks of {block_bytes} are no multiple of {ALIGN_BYTES}"
        else:
            target.go_direct()
        with _named(path):
            disk.reserve(fd, size)
        blocks = bytearray(digests_bytes(size, block_bytes))
        groups = bytearray(digests_bytes(size, group) if group else 0)

        def prepare(number: int, scratch: memoryview) -> memoryview:
            offset = number * stride
            scratch = scratch[: min(stride, size - offset)]
            data = _flat(source.view(offset, scratch), len(scratch))
            data, of_blocks, of_groups = target.prepare(data, scratch, block_bytes, group or stride)
            _place(blocks, offset // block_bytes, of_blocks)
            if group:
                _place(groups, offset // group, of_groups)
            return data

        def write(number: int, scratch: memoryview, data: memoryview) -> None:
            target.write(data, number * stride)

        strides, threads = -(-size // stride), threads or io_threads()
        if target.buffered_because is None and threads > 1:
            relay(
                strides,
                prepare,
                write,
                first_threads=computing_threads(threads),
                then_threads=threads - 1,
                scratch_bytes=stride,
            )
        else:  # who writes to the page cache copies, and waits for nothing
            share_out(
                strides,
                lambda number, scratch: write(number, scratch, prepare(number, scratch)),
                threads=threads,
                scratch_bytes=stride,
            )
        with _named(path):
            disk.sync_file(fd)
    finally:
        os.close(fd)
    digests = Digests(block_bytes, bytes(blocks), size, bytes(groups))
    return Written(digests, xxh3_128_hexdigest(blocks), target.buffered_because)


class Target:
    """The file being written, and whether by direct I/O."""

    def __init__(self, path: Path, fd: int, disk: Disk) -> None:
        self._path, self._fd, self._disk = path, fd, disk
        self.buffered_because: str | None = "direct I/O was not tried"

    def go_direct(self) -> None:
        """Write past the page cache from now on, where the file system takes that."""
        # Not at open: a file system that refuses it there may have made the file all the same.
        try:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        except (OSError, AttributeError) as error:
            if isinstance(error, OSError) and error.errno not in _REFUSED:
                raise
            self.buffered_because = f"no direct I/O on this file system ({error})"
        else:
            self.buffered_because = None

    def go_buffered(self, why: str) -> None:
        # The flag goes first: a thread that reads the reason may write from any address.
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.buffered_because = self.buffered_because or why

    def prepare(
        self, data: memoryview, scratch: memoryview, block: int, group: int
    ) -> tuple[memoryview, list[bytes], list[bytes]]:
        """The data where a write can take it from, and the digests of its blocks and of its groups."""
        array, aligned = np.frombuffer(data, np.uint8), np.frombuffer(scratch, np.uint8)
        copied = self.buffered_because is None and array.ctypes.data % ALIGN_BYTES != 0
        found = scratch if copied else data
        blocks, groups = [], []
        for low in range(0, len(data), group):  # each is digested while it is in the cache of the core
            high = min(low + group, len(data))
            if copied:
                np.copyto(aligned[low:high], array[low:high])
            blocks += [xxh3_128_digest(found[at : min(at + block, high)]) for at in range(low, high, block)]
            groups.append(xxh3_128_digest(found[low:high]))
        return found, blocks, groups

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of it. Pages from an address on a page go direct; the first that do not end that."""
        while data:
            direct = self.buffered_because is None
            try:
                with _named(self._path):
                    count = self._disk.write_at(self._fd, data, offset)
            except OSError as error:
                if not direct or error.errno not in _REFUSED:
                    raise
                self.go_buffered(f"a direct write was refused ({error.strerror})")
                continue
            if not count:
                raise OSError(errno.EIO, "a write wrote nothing", str(self._path))
            data, offset = data[count:], offset + count
            if data and direct and count % ALIGN_BYTES:
                self.go_buffered(f"a direct write ended after {count} bytes")


def _place(table: bytearray, number: int, digests: list[bytes]) -> None:
    table[number * DIGEST_BYTES : (number + len(digests)) * DIGEST_BYTES] = b"".join(digests)


def _flat(view: memoryview, size: int) -> memoryview:
    if view.nbytes != size:
        raise ValueError(f"a source gave {view.nbytes} bytes where {size} were asked for")
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
