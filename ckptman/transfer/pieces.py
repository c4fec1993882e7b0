"""Moving the bytes of a copy: pieces of all files over a few threads, digested on the way. Torch-free.

Some threads read and digest while others write, by direct I/O where the file system takes it. A piece whose bytes are
at the destination already is not written again, and where its digests are known beforehand it is not read either.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from ckptman.catalog.backends.source import Original, Reading
from ckptman.io.checksums import digest_of_blocks
from ckptman.io.file_writer import FileWriter
from ckptman.io.filesystem import Disk
from ckptman.io.workers import ALIGN_BYTES, STRIDE_BYTES, computing_threads, io_threads, relay, stride_of
from ckptman.transfer.copy_digest import OnTheWay
from ckptman.transfer.progress import Limit, Meter


@dataclass(frozen=True)
class Moved:
    """What a copy moved. `digests`: of each file, as a manifest has them, of what was read.

    `written_bytes`: those that were not there yet. `buffered_because`: "" where every large file went by direct I/O.
    """

    digests: dict[str, str]
    written_bytes: int
    buffered_because: str


def move(
    original: Original,
    draft: Path,
    there: Mapping[str, bytes],
    *,
    disk: Disk,
    meter: Meter,
    limit: Limit | None = None,
    threads: int | None = None,
) -> Moved:
    """Bring the files of a draft to what those of the original are, each flushed to storage. The folder is not flushed.

    `there`: of the files that a draft has already, the digests of the blocks that can be read.
    Raises: CorruptError (the original is not what was saved), OSError with the name of the file.
    """
    facts = original.facts
    piece = stride_of(facts.block_bytes) if facts.block_bytes <= STRIDE_BYTES else STRIDE_BYTES
    sizes = sorted(facts.sizes.items(), key=lambda each: -each[1])  # small ones fill the gaps at the end
    files = [_File(original, draft / name, size, piece, there.get(name, b""), disk, meter) for name, size in sizes]
    starts = list(accumulate((each.pieces for each in files), initial=0))
    meter.begin("copying", facts.bytes, len(files))

    def at(number: int) -> tuple[_File, int, int]:
        which = bisect_right(starts, number) - 1
        file, low = files[which], (number - starts[which]) * piece
        return file, low, min(low + piece, file.size)

    def fetch(number: int, scratch: memoryview) -> memoryview | None:
        file, low, high = at(number)
        file.begin()
        if file.is_right(low, high):
            meter.skipped(high - low)
            return None
        if limit is not None:
            limit.take(high - low)
        return file.fetch(low, high, scratch)

    def put(number: int, scratch: memoryview, data: memoryview | None) -> None:
        file, low, _ = at(number)
        if data is not None:
            file.put(low, data, scratch)
        file.end()

    threads = threads or io_threads()
    if limit is not None:
        limit.renew()
    try:
        relay(
            starts[-1],
            fetch,
            put,
            first_threads=original.readers or computing_threads(threads),
            then_threads=max(1, threads - 1),
            scratch_bytes=max(piece, ALIGN_BYTES),
            on_error=limit.release if limit is not None else lambda: None,
        )
    finally:
        for each in files:
            each.close()
    return Moved(
        {each.name: each.digest for each in files},
        sum(each.written_bytes for each in files),
        next((each.buffered_because for each in files if each.buffered_because), ""),
    )


class _File:
    """A file on its way. Opened when its first piece is wanted, flushed and closed after its last."""

    def __init__(
        self, original: Original, path: Path, size: int, piece: int, there: bytes, disk: Disk, meter: Meter
    ) -> None:
        self.name, self.size = path.name, size
        self.pieces = max(1, -(-size // piece))
        self.digest, self.written_bytes = "", 0
        self._original, self._path, self._there = original, path, there
        self._disk, self._meter = disk, meter
        self._passing = OnTheWay(original, self.name, size)
        self._is_large = piece % ALIGN_BYTES == 0 and size >= ALIGN_BYTES
        self._left = self.pieces
        self._lock = threading.Lock()
        self._reading: Reading | None = None
        self._writer: FileWriter | None = None
        self._is_all_right = False
        self._seconds = 0.0
        """What calls took that are made once for this file."""

    @property
    def buffered_because(self) -> str:
        """Why a large file did not go by direct I/O alone; "" where it did."""
        return (self._is_large and self._writer is not None and self._writer.buffered_because) or ""

    def begin(self) -> None:
        """Open both ends. Raises: CorruptError, OSError."""
        with self._lock:
            if self._writer is not None:
                return
            begun = time.perf_counter()
            self._passing.begin()
            manifest = self._original.facts.manifest
            if manifest is not None and len(self._there) == len(self._passing.blocks) and self._passing.works:
                self._is_all_right = digest_of_blocks([self._there]) == manifest.files[self.name].digest
            if not self._is_all_right:
                self._reading = self._original.open(self.name)
            self._writer = FileWriter(
                self._path,
                self.size,
                disk=self._disk,
                flags=os.O_NOFOLLOW | os.O_NONBLOCK,
                buffered_because=None if self._is_large else "it is not in whole pages",
            )
            self._seconds += time.perf_counter() - begun

    def is_right(self, low: int, high: int) -> bool:
        """Whether the bytes [low, high) are known to be at the destination."""
        at, known = self._passing.at(low, high), self._passing.known
        if not self._is_all_right and (known is None or high == low or self._there[at] != known.blocks[at]):
            return False
        self._passing.blocks[at] = self._there[at]
        return True

    def fetch(self, low: int, high: int, scratch: memoryview) -> memoryview | None:
        """Read and check a piece. None where it need not be written. Raises: CorruptError, OSError."""
        assert self._reading is not None
        begun = time.perf_counter()
        data = self._reading.read(low, high - low, scratch)
        self._passing.check(low, data)
        self._meter.moved(0, time.perf_counter() - begun)
        at = self._passing.at(low, high)
        if self._passing.works and high > low and self._there[at] == self._passing.blocks[at]:
            self._meter.skipped(high - low)
            return None
        return data

    def put(self, low: int, data: memoryview, scratch: memoryview) -> None:
        """Write a piece. Raises: OSError."""
        assert self._writer is not None
        begun, size = time.perf_counter(), len(data)
        if self._writer.is_direct and size % ALIGN_BYTES:  # the end of the file: cut off again when it is whole
            padded = scratch[: size + -size % ALIGN_BYTES]
            padded[size:] = bytes(len(padded) - size)
            data = padded
        self._writer.write(data, low)
        with self._lock:
            self.written_bytes += size
        self._meter.moved(size, time.perf_counter() - begun)

    def end(self) -> None:
        """A piece is done; after the last one the file is flushed and judged. Raises: CorruptError, OSError."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        assert self._writer is not None
        begun = time.perf_counter()
        self._writer.flush(self.size)
        # What lies in the page cache would be compared with itself.
        with contextlib.suppress(OSError, AttributeError):
            os.posix_fadvise(self._writer.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.close()
        seconds = time.perf_counter() - begun
        if not self._writer.is_direct and self.size > STRIDE_BYTES:  # then this is when the bytes are written
            self._meter.moved(0, seconds)
            seconds = 0.0
        self._meter.ended_file(seconds + self._seconds)
        self.digest = self._passing.judge()

    def close(self) -> None:
        """Close both ends."""
        if self._reading is not None:
            self._reading.close()
        if self._writer is not None:
            self._writer.close()
        self._reading = None
