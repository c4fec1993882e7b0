"""Moving the bytes of a copy: pieces of all files over a few threads, digested on the way.

Into a folder, some threads read and digest while others write, by direct I/O where the file system takes it. Into an
object store each thread does both, as both wait for a network. A piece whose bytes are at the destination already is
not written again, and where its digests are known beforehand it is not read either.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from xxhash import xxh3_128_digest

from ckptman.errors import CorruptError, plain
from ckptman.storage.catalog.backends.drafts import CopyDraft, Writing
from ckptman.storage.catalog.backends.source import CopySource, Reading, blaming_source
from ckptman.storage.io.checksums import DIGEST_BYTES, Digests, digest_of_blocks, digests_bytes
from ckptman.storage.io.threads import ALIGN_BYTES, STRIDE_BYTES, computing_threads, io_threads, relay, share_out
from ckptman.storage.transfer.progress import Limit, Meter


@dataclass(frozen=True)
class Moved:
    """What a copy moved. `digests`: of each file, as a manifest has them, of what was read.

    `written`: the files that were not right before. `written_bytes`: what was not there yet. `buffered_because`: ""
    where every large file went by direct I/O.
    """

    digests: dict[str, str]
    written: frozenset[str]
    written_bytes: int
    buffered_because: str


def move(
    original: CopySource,
    draft: CopyDraft,
    there: Mapping[str, bytes],
    *,
    meter: Meter,
    limit: Limit | None = None,
    threads: int | None = None,
) -> Moved:
    """Bring the files of a draft to what those of the original are, each durable by itself.

    `there`: of the files that a draft has already, the digests of the blocks that can be read.
    Raises: CorruptError (the original is not what was saved), SourceError, OSError with the name of the file.
    """
    sizes, piece = dict(original.facts.sizes), draft.piece_bytes()
    if draft.in_place:  # what is not right there is written as a whole
        sizes = {name: size for name, size in sizes.items() if not _is_right(original, name, there.get(name))}
        there = {}
    in_order = sorted(sizes.items(), key=lambda each: -each[1])  # small ones fill the gaps at the end
    files = [_File(original, draft, name, size, piece, there.get(name, b""), meter) for name, size in in_order]
    starts = list(accumulate((each.pieces for each in files), initial=0))
    meter.begin("copying", sum(sizes.values()), len(files))

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

    threads, scratch_bytes = threads or draft.writers or io_threads(), max(piece, ALIGN_BYTES)
    if limit is not None:
        limit.renew()
    try:
        if draft.in_order:
            share_out(
                len(files),
                lambda number, scratch: files[number].put_in_order(piece, scratch, limit),
                threads=threads,
                scratch_bytes=scratch_bytes,
            )
        elif draft.in_place:  # both ends wait for a network: one thread does both, with one piece in memory
            share_out(
                starts[-1],
                lambda number, scratch: put(number, scratch, fetch(number, scratch)),
                threads=threads,
                scratch_bytes=scratch_bytes,
            )
        else:
            relay(
                starts[-1],
                fetch,
                put,
                first_threads=original.readers or computing_threads(threads),
                then_threads=max(1, threads - 1),
                scratch_bytes=scratch_bytes,
                on_error=limit.release if limit is not None else lambda: None,
            )
    finally:
        for each in files:
            each.close()
    return Moved(
        {each.name: each.digest for each in files},
        frozenset(sizes),
        sum(each.written_bytes for each in files),
        next((each.buffered_because for each in files if each.buffered_because), ""),
    )


def _is_right(original: CopySource, name: str, blocks: bytes | None) -> bool:
    manifest = original.facts.manifest
    return blocks is not None and manifest is not None and digest_of_blocks([blocks]) == manifest.files[name].digest


class _File:
    """A file on its way. Opened when its first piece is wanted, made durable and closed after its last.

    Its blocks are digested as they pass, and compared with what was saved as early as that can be told.
    """

    def __init__(
        self, original: CopySource, draft: CopyDraft, name: str, size: int, piece: int, there: bytes, meter: Meter
    ) -> None:
        self.name, self.size = name, size
        self.pieces = max(1, -(-size // piece))
        self.digest, self.buffered_because, self.written_bytes = "", "", 0
        self._original, self._draft, self._there, self._meter = original, draft, there, meter
        self._block = original.facts.block_bytes
        self._blocks = bytearray()
        """The digests of what has passed."""
        self._known: Digests | None = None
        """What they have to be, where that is known before all of it has passed."""
        self._left = self.pieces
        self._lock = threading.Lock()
        self._reading: Reading | None = None
        self._writing: Writing | None = None
        self._is_all_right = False
        self._seconds = 0.0
        """What calls took that are made once for this file."""

    def begin(self) -> None:
        """Open both ends. Raises: CorruptError, OSError."""
        with self._lock:
            if self._reading is not None or self._writing is not None:
                return
            begun = time.perf_counter()
            self._blocks = bytearray(digests_bytes(self.size, self._block))
            with blaming_source(self._original.facts.where):
                self._known = self._original.digests(self.name)
                if len(self._there) == len(self._blocks):
                    self._is_all_right = _is_right(self._original, self.name, self._there)
                if not self._is_all_right:
                    self._reading = self._original.open(self.name)
            if not self._draft.in_order:
                self._writing = self._draft.writer(self.name, self.size)
            self._seconds += time.perf_counter() - begun

    def is_right(self, low: int, high: int) -> bool:
        """Whether the bytes [low, high) are known to be at the destination."""
        at, known = self._at(low, high), self._known
        if not self._is_all_right and (known is None or high == low or self._there[at] != known.blocks[at]):
            return False
        self._blocks[at] = self._there[at]
        return True

    def fetch(self, low: int, high: int, scratch: memoryview) -> memoryview | None:
        """Read and check a piece. None where it need not be written. Raises: CorruptError, OSError."""
        assert self._reading is not None
        begun = time.perf_counter()
        with blaming_source(self._original.facts.where):
            data = self._reading.read(low, high - low, scratch)
        at = self._at(low, high)
        self._blocks[at] = self._digests_of(low, data)
        self._meter.moved(0, time.perf_counter() - begun)
        if high > low and self._there[at] == self._blocks[at]:
            self._meter.skipped(high - low)
            return None
        return data

    def put(self, low: int, data: memoryview, scratch: memoryview) -> None:
        """Write a piece. Raises: OSError."""
        assert self._writing is not None
        begun, size = time.perf_counter(), len(data)
        self._writing.write(data, low, scratch)
        with self._lock:
            self.written_bytes += size
        self._meter.moved(size, time.perf_counter() - begun)

    def put_in_order(self, piece: int, scratch: memoryview, limit: Limit | None) -> None:
        """Bring all of it, from front to back. Raises: CorruptError, OSError."""
        self.begin()
        self._draft.put_in_order(self.name, lambda: self._pieces(piece, scratch, limit))
        self.written_bytes = self.size
        self.close()
        self._meter.ended_file(self._seconds)

    def _pieces(self, piece: int, scratch: memoryview, limit: Limit | None) -> Iterator[memoryview]:
        done = 0
        try:
            for low in range(0, self.size, piece):
                high = min(low + piece, self.size)
                if limit is not None:
                    limit.take(high - low)
                data = self.fetch(low, high, scratch)
                assert data is not None
                begun = time.perf_counter()
                yield data
                self._meter.moved(high - low, time.perf_counter() - begun)
                done += high - low
            self.digest = self._judge()  # before there is an object
        except BaseException:
            self._meter.moved(-done, 0.0)
            raise

    def end(self) -> None:
        """A piece is done; after the last one the file is judged and made durable. Raises: CorruptError, OSError."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        assert self._writing is not None
        self.digest = self._judge()  # before there is an object
        begun = time.perf_counter()
        self._writing.finish()
        self.buffered_because = self._writing.buffered_because
        self.close()
        seconds = time.perf_counter() - begun
        if self.buffered_because and self.size > STRIDE_BYTES:  # then this is when the bytes are written
            self._meter.moved(0, seconds)
            seconds = 0.0
        self._meter.ended_file(seconds + self._seconds)

    def close(self) -> None:
        """Close both ends."""
        if self._reading is not None:
            self._reading.close()
        if self._writing is not None:
            self._writing.close()
        self._reading = None

    def _at(self, low: int, high: int) -> slice:
        """Where the digests of the blocks of bytes [low, high) are."""
        return slice(*(-(-offset // self._block) * DIGEST_BYTES for offset in (low, high)))

    def _digests_of(self, low: int, data: memoryview) -> bytes:
        """Digest the blocks of a piece, and compare where that can be told already. Raises: CorruptError."""
        known, block = self._known, self._block
        expected = known.blocks[self._at(low, low + len(data))] if known is not None else None
        found = b"".join([xxh3_128_digest(data[cut : cut + block]) for cut in range(0, len(data), block)])
        if expected is not None and found != expected:
            cuts = range(0, len(found), DIGEST_BYTES)
            at = next(cut for cut in cuts if found[cut : cut + DIGEST_BYTES] != expected[cut : cut + DIGEST_BYTES])
            wrong = low // block + at // DIGEST_BYTES
            raise self._changed(f": block {wrong:,} (from byte {wrong * block:,} on) has changed")
        return found

    def _judge(self) -> str:
        """Return the digest of all of it, once it has passed. Raises: CorruptError."""
        digest, manifest = digest_of_blocks([bytes(self._blocks)]), self._original.facts.manifest
        if manifest is not None and digest != manifest.files[self.name].digest:
            raise self._changed()
        return digest

    def _changed(self, which: str = "") -> CorruptError:
        where = self._original.facts.where
        see = "" if "://" in where else f", or run `ckptman verify {where}` to see all that is damaged"
        return CorruptError(
            f"{where}: {plain(self.name)} is not what was saved{which}. It was not copied: copy another checkpoint{see}"
        )
