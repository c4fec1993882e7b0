"""Reading ranges of files straight to where they go, checked block by block.

Ranges are sorted into spans. What lies in the page cache is read from there straight to its place; a large span that
does not is read by direct I/O through scratch memory, which on a fast disk takes half the time. With digests a span is
made of whole blocks, and each of them is checked before `deliver` sees a byte of it and before the call returns.

Each call of Python waits its turn for the interpreter, so there are few of them for each byte: in long spans, two for
each large block.
"""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from xxhash import xxh3_128, xxh3_128_digest

from ckptman.errors import CorruptError
from ckptman.storage.io.checksums import DIGEST_BYTES, Digests, digest_segments
from ckptman.storage.io.failure_cause import UNREADABLE
from ckptman.storage.io.file_reader import DIRECT_BYTES, FileReader, after
from ckptman.storage.io.threads import (
    ALIGN_BYTES,
    COLD_STRIDE_BYTES,
    SCRATCH,
    STRIDE_BYTES,
    Scratch,
    computing_threads,
    cores,
    loading_threads,
    preferred,
    relay,
    stride_of,
)

WHOLE_BYTES = 8 * 1024 * 1024
"""The largest range that can be delivered in one piece."""
GAP_BYTES = 64 * 1024
_SMALL_BYTES = 8 * 1024
"""Where the parts of a span are smaller than this on average, copying them costs less than scattering them."""
_CHECKED_BYTES = 512 * 1024
"""What is read, checked and copied at a time where there are digests of small blocks alone: all while it lies in the
cache of the core."""
_WARM_STRIDE_BYTES = 64 * 1024 * 1024
"""The longest span of what goes straight from the page cache to its place."""
_SCRATCH_BYTES = 256 * 1024 * 1024
"""What all threads may have to work in, however many cores there are."""
_LONG_BYTES = 1024 * 1024
_SPANS_EACH = 4
"""How many spans each thread is to have at least, so that all of them end at about the same time."""
_LOOKS = 8
"""At how many places of a range it is seen whether all of it is in the page cache."""
_MISSING = (errno.ENOENT, errno.ENOTDIR)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A range of bytes of a file that somebody needs: placed in `into`, or handed to `deliver` as (bytes, position).

    `into` is writable and as long as the range. `deliver` is called from worker threads with one piece after the other,
    in any order, or, with `whole`, once; the memory is used again when it returns. `label` names the tensor in errors.
    """

    file: str
    offset: int
    bytes: int
    into: memoryview | None = None
    deliver: Callable[[memoryview, int], None] | None = None
    whole: bool = False
    label: str = ""


def read_wanted(
    folder: Path,
    wanted: Iterable[Wanted],
    digests: Mapping[str, Digests] | None,
    *,
    threads: int | None = None,
    scratch: Scratch = SCRATCH,
) -> int:
    """Read ranges of the files of a folder, each byte once as far as possible. With digests, check every block read.

    Destinations may be filled in part when an error is raised. `scratch`: where what is handed to `deliver` lies.
    Returns how many bytes were read.

    Raises: CorruptError where a file is missing, has another size, ends early, cannot be read or differs from its
    digests; whatever `deliver` raises; ValueError where a range is no range.
    """
    chosen: dict[_File, list[Wanted]] = {}
    for name, ranges in groupby(sorted(wanted, key=lambda each: (each.file, each.offset)), lambda each: each.file):
        if digests is not None and name not in digests:
            raise CorruptError(f"{folder / name} has no digests: what was read from it cannot be checked")
        file = _File(folder / name, None if digests is None else digests[name])
        chosen[file] = list(ranges)
        for each in chosen[file]:
            file.admit(each)
    try:
        with preferred():
            _read_chosen(chosen, threads or loading_threads(), scratch)
    finally:
        for file in chosen:
            file.reader.close()
    return sum(file.read_bytes for file in chosen)


def _read_chosen(chosen: Mapping[_File, Sequence[Wanted]], threads: int, scratch: Scratch) -> None:
    cold = _begins_cold(chosen)
    threads = min(threads, _SCRATCH_BYTES // (2 * STRIDE_BYTES))
    if cold is False:  # nothing is waited for: more threads than cores would only take turns
        threads = min(threads, max(2, cores()))
    is_relayed = bool(cold) and threads > 1
    most_bytes = STRIDE_BYTES
    if is_relayed:
        most_bytes = min(COLD_STRIDE_BYTES, _SCRATCH_BYTES // (2 * threads))
    elif cold is False and all(file.is_straight for file in chosen):
        each_bytes = sum(file.wanted_bytes for file in chosen) // (_SPANS_EACH * threads)
        most_bytes = min(
            max(each_bytes // STRIDE_BYTES, 1) * STRIDE_BYTES, _WARM_STRIDE_BYTES, _SCRATCH_BYTES // threads
        )
    spans: list[tuple[_File, Span]] = []
    for file, ranges in chosen.items():
        stride = stride_of(file.step_bytes, most_bytes)
        planned = plan(ranges, file.block_bytes, file.size_bytes, GAP_BYTES, stride)
        file.spans_left = len(planned)
        spans += [(file, span) for span in planned]
    around = 2 * ALIGN_BYTES if any(file.block_bytes % ALIGN_BYTES for file in chosen) else 0
    scratch_bytes = max((span.bytes for _, span in spans), default=0) + around

    def fetch(number: int, buffer: memoryview) -> int | None:
        file, span = spans[number]
        return file.fetch(span, buffer)

    def finish(number: int, buffer: memoryview, fetched: int | None) -> None:
        file, span = spans[number]
        file.finish(span, buffer, fetched)

    relay(
        len(spans),
        fetch,
        finish,
        first_threads=threads - 1 if is_relayed else threads,
        then_threads=computing_threads(threads) if is_relayed else 0,
        scratch_bytes=scratch_bytes,
        scratch=scratch,
    )


def _begins_cold(chosen: Mapping[_File, Sequence[Wanted]]) -> bool | None:
    """Whether the longest range has to come from a disk; None where that cannot be told, or is so in part."""
    ranges = ((each, file) for file, ranges in chosen.items() for each in ranges)
    longest, file = max(ranges, key=lambda found: found[0].bytes, default=(None, None))
    if longest is None or file is None:
        return None
    if longest.bytes < DIRECT_BYTES:
        return None
    looks = (file.is_cold_at(longest, number * longest.bytes // _LOOKS) for number in range(_LOOKS))
    first = next(looks)
    return None if first is False and any(looks) else first


# ---- which bytes are read together -----------------------------------------------------------------------------

Part = tuple[int, int, Wanted]
"""Bytes [start, stop) of the file, which belong to a range."""


class Span:
    """A run of bytes [low, high) that is read together, and the parts of ranges in it. It grows up to `limit`."""

    __slots__ = ("high", "limit", "low", "parts")

    def __init__(self, low: int, limit: int) -> None:
        self.low, self.high, self.limit = low, low, limit
        self.parts: list[Part] = []

    @property
    def bytes(self) -> int:
        return self.high - self.low

    def wanted(self, low: int = 0, high: int = 1 << 62) -> Iterator[Wanted]:
        """Yield what is wanted of bytes [low, high) of the file."""
        return (each for start, stop, each in self.parts if start < high and stop > low)


def plan(wanted: Sequence[Wanted], block: int, end_of_file: int, gap_bytes: int, stride: int) -> list[Span]:
    """Return the spans of the ranges of one file, sorted by offset. Edges lie on blocks where there are digests.

    A span has at most `stride` bytes, whole blocks, as far as no range has to be in one piece: it ends at a multiple of
    that, so that large blocks are not cut. One that begins with a small range is shorter: it may have to go through
    scratch as a whole.
    """
    spans: list[Span] = []
    lows: list[int] = []
    apart: list[Span] = []

    def begin(start: int, each: Wanted) -> Span:
        low, short = start - start % block, stride_of(block, STRIDE_BYTES)
        reach = stride if each.bytes >= _LONG_BYTES else min(stride, short)
        span = Span(low, low - low % reach + reach)
        spans.append(span)
        lows.append(low)
        return span

    def up(end: int) -> int:
        return min(end + -end % block, end_of_file)

    last: Span | None = None
    for each in wanted:
        start, end = each.offset, each.offset + each.bytes
        while start < end:
            if last is None or start >= last.limit or start - start % block > last.high + gap_bytes:
                last = begin(start, each)
            span = last
            if start < span.low:  # an earlier range took these bytes as well, so they are read already
                span = spans[bisect_right(lows, start) - 1]
            stop = end
            if each.whole:
                if span is last and end > span.limit:
                    if start - start % block > span.low:
                        span = last = begin(start, each)
                    span.limit = max(span.limit, up(end))
                elif span is not last and end > span.high:
                    span = Span(start - start % block, up(end))
                    apart.append(span)
            else:
                stop = min(end, span.limit if span is last else span.high)
            span.parts.append((start, stop, each))
            span.high = max(span.high, up(stop))
            start = stop
    return spans + apart


def lay_out(span: Span, scratch: memoryview) -> tuple[list[memoryview], list[Part]]:
    """Return where the bytes of a span are read to, in order, and the parts that are then taken from the scratch."""
    parts = span.parts
    if len(parts) * _SMALL_BYTES > len(scratch):
        return [scratch], parts
    segments, copies = [], []
    cursor = reached = low = span.low
    for part in parts:
        start, stop, each = part
        if start < reached:  # two want the same bytes
            return [scratch], parts
        reached = stop
        if each.into is None:
            copies.append(part)
            continue
        if start > cursor:
            segments.append(scratch[cursor - low : start - low])
        segments.append(each.into[start - each.offset : stop - each.offset])
        cursor = stop
    if cursor < span.high:
        segments.append(scratch[cursor - low :])
    return segments, copies


# ---- one file --------------------------------------------------------------------------------------------------


class _File:
    """A file of which spans are read: opened for the first of them, closed after the last."""

    def __init__(self, path: Path, digests: Digests | None) -> None:
        self._path, self._digests = path, digests
        # What others wrote may be stored as links; ours, of which the digests are known, never is.
        self.reader = FileReader(path, follow=digests is None)
        self.block_bytes = 1 if digests is None else digests.block_bytes
        self.size_bytes = 1 << 62 if digests is None else digests.size_bytes
        self.step_bytes = 1
        """What is read and checked at a time; 1: all that is at hand."""
        if digests is not None:
            self.step_bytes = digests.large_block_bytes or stride_of(digests.block_bytes, _CHECKED_BYTES)
        self.is_straight, self.wanted_bytes = True, 0
        self.spans_left = self.read_bytes = 0
        self._lock = threading.Lock()

    def admit(self, each: Wanted) -> None:
        """Raises: ValueError or CorruptError where a range cannot be one of this file."""
        if each.offset < 0 or each.bytes < 0 or (each.whole and each.bytes > WHOLE_BYTES):
            raise ValueError(f"no range to read: {each.offset} + {each.bytes} bytes of {each.file}")
        if (each.into is None) == (each.deliver is None) or (each.into is not None and len(each.into) != each.bytes):
            raise ValueError(f"{each.bytes} bytes of {each.file} need one destination, of that many bytes")
        if each.offset + each.bytes > self.size_bytes:
            raise self._flaw(f"has {self.size_bytes} bytes and is to give {each.offset} + {each.bytes} bytes", [each])
        self.is_straight &= each.into is not None
        self.wanted_bytes += each.bytes

    def is_cold_at(self, each: Wanted, position: int) -> bool | None:
        """Return whether a byte of a range is not in the page cache; None where that cannot be told."""
        span = Span(each.offset, each.offset + each.bytes)
        span.parts.append((each.offset, span.limit, each))
        self._open(span)
        return self.reader.is_cold(each.offset + position, DIRECT_BYTES)

    def is_cold(self, span: Span) -> bool | None:
        """Return whether a large span begins with what is not in the page cache; None where that cannot be told."""
        self._open(span)
        return self.reader.is_cold(span.low, span.bytes)

    def fetch(self, span: Span, scratch: memoryview) -> int | None:
        """Read a span to scratch memory if it has to come from a disk. Returns how much of it was; None: it has not."""
        return self.reader.read_direct(span.low, span.bytes, scratch) if self.is_cold(span) else None

    def finish(self, span: Span, scratch: memoryview, fetched: int | None) -> None:
        """Fill the destinations of a span from what was fetched, or read it to them: checked batch by batch."""
        done = fetched or 0
        if fetched is not None:
            inside = span.low % ALIGN_BYTES
            scratch = scratch[inside : inside + span.bytes]
            segments, copies = [scratch], span.parts
        else:
            scratch = scratch[: span.bytes]
            segments, copies = lay_out(span, scratch)
        fd, offset = self._open(span), span.low
        step = span.bytes if self._digests is None else self.step_bytes
        inside = offset % step if self._digests is not None else 0
        in_runs = not copies and self._digests is not None and self._digests.large_block_bytes > 0
        ready = _by_batch(copies, offset - inside, step)
        for number, (batch, size) in enumerate(_batches(segments, step, step - inside, in_runs=in_runs)):
            there = min(done, size)
            done -= there
            if not there and size > step:
                self._read_run(span, fd, offset, batch[0], size)
                offset += size
                continue
            if there < size:
                self._read_batch(span, offset + there, after(batch, there), size - there)
            if self._digests is not None:
                self._check(span, offset, batch, size)
            for start, stop, each in ready.get(number, ()):  # now, while it lies in the cache of the core
                piece = scratch[start - span.low : stop - span.low]
                if each.into is not None:
                    _copy(each.into[start - each.offset : stop - each.offset], piece)
                elif each.deliver is not None:
                    each.deliver(piece, start - each.offset)
            offset += size
        with self._lock:
            self.read_bytes += len(scratch)
            self.spans_left -= 1
            last = not self.spans_left
        if last:
            self.reader.close()

    def _open(self, span: Span) -> int:
        try:
            fd = self.reader.open()
        except CorruptError:
            raise self._flaw("is not a regular file", span.wanted()) from None
        except OSError as error:
            if error.errno in _MISSING:
                raise self._flaw("is missing", span.wanted()) from error
            if error.errno in UNREADABLE:
                raise self._unreadable(error, span.low, span.high, span) from error
            raise
        found = self.reader.found.st_size
        if self._digests is not None and found != self.size_bytes:
            what = f"has {found} bytes instead of {self.size_bytes}: it has changed since it was saved"
            raise self._flaw(what, span.wanted())
        return fd

    def _read_run(self, span: Span, fd: int, offset: int, segment: memoryview, size: int) -> None:
        """Read and check several steps that go to one place, with no more calls than that takes."""
        assert self._digests is not None
        step, large = self.step_bytes, self._digests.large
        at = offset // step * DIGEST_BYTES
        for low in range(0, size, step):
            piece = segment[low : low + step]
            try:
                is_right = (
                    os.preadv(fd, (piece,), offset + low) == step
                    and xxh3_128_digest(piece) == large[at : at + DIGEST_BYTES]
                )
            except OSError:
                is_right = False
            if not is_right:  # a short read, or blocks of one size only; else this says what is wrong
                self._read_batch(span, offset + low, [piece], step)
                self._check(span, offset + low, [piece], step)
            at += DIGEST_BYTES

    def _read_batch(self, span: Span, offset: int, batch: list[memoryview], size: int) -> None:
        try:
            count = self.reader.read(batch, offset)
        except OSError as error:
            if error.errno in UNREADABLE:
                raise self._unreadable(error, offset, offset + size, span) from error
            error.filename = error.filename or str(self._path)
            raise
        if count < size:
            low, high, found = offset + count, offset + size, os.fstat(self.reader.open()).st_size
            what = f"has only {found} bytes and ends before {self._where(low, high)} does"
            raise self._flaw(what, span.wanted(low, high))

    def _check(self, span: Span, offset: int, segments: Sequence[memoryview], size: int) -> None:
        assert self._digests is not None
        large = self._digests.large_block_bytes
        if large and not offset % large and size == min(large, self.size_bytes - offset):
            at, digester = offset // large * DIGEST_BYTES, xxh3_128()
            for segment in segments:
                digester.update(segment)
            if digester.digest() == self._digests.large[at : at + DIGEST_BYTES]:
                return
        found = b"".join(digest_segments(segments, self.block_bytes))
        at = offset // self.block_bytes * DIGEST_BYTES
        if found == self._digests.blocks[at : at + len(found)]:
            return
        for number in range(0, len(found), DIGEST_BYTES):
            if found[number : number + DIGEST_BYTES] != self._digests.blocks[at + number : at + number + DIGEST_BYTES]:
                low = offset + number // DIGEST_BYTES * self.block_bytes
                high = min(low + self.block_bytes, self.size_bytes)
                what = f"does not match its digests in {self._where(low, high)}: these bytes have changed since they"
                raise self._flaw(f"{what} were saved", span.wanted(low, high))

    def _where(self, low: int, high: int) -> str:
        if self._digests is None:
            return f"bytes {low} to {high}"
        return f"block {low // self.block_bytes} (bytes {low} to {high})"

    def _unreadable(self, error: OSError, low: int, high: int, span: Span) -> CorruptError:
        return self._flaw(f"cannot be read in {self._where(low, high)}: {error.strerror}", span.wanted(low, high))

    def _flaw(self, what: str, wanted: Iterable[Wanted]) -> CorruptError:
        names = list(dict.fromkeys(each.label for each in wanted if each.label))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        of = f" (of {', '.join(names[:3])}{more})" if names else ""
        remedy = f"restore an older checkpoint, or run `ckptman verify {self._path.parent}` to see what is damaged"
        return CorruptError(f"{self._path} {what}{of}; {remedy}")


def _batches(
    segments: list[memoryview], step: int, first: int, *, in_runs: bool
) -> Iterator[tuple[list[memoryview], int]]:
    """Cut segments into batches of `step` bytes in all, the first of `first`; the last may be shorter. `in_runs`: steps
    that lie in one segment are one batch."""
    batch: list[memoryview] = []
    size, room = 0, first
    for segment in segments:
        at, end = 0, len(segment)
        while at < end:
            most = (end - at) // step * step if in_runs and not batch and room == step else 0
            part = segment[at : at + (most or room)]
            count = most or min(room, end - at)
            batch.append(part)
            at, size, room = at + count, size + count, room - count
            if room <= 0:
                yield batch, size
                batch, size, room = [], 0, step
    if batch:
        yield batch, size


def _by_batch(parts: Iterable[Part], low: int, step: int) -> dict[int, list[Part]]:
    """Cut parts of a span at batches of `step` bytes from `low` on: what can be handed out after each of them."""
    found: dict[int, list[Part]] = {}
    for start, stop, each in parts:
        while start < stop:
            number = ((stop - 1 if each.whole else start) - low) // step
            end = min(stop, low + (number + 1) * step)
            found.setdefault(number, []).append((start, end, each))
            start = end
    return found


def _copy(into: memoryview, piece: memoryview) -> None:
    # As memoryviews they would be copied under the interpreter's lock.
    np.frombuffer(into, np.uint8)[:] = np.frombuffer(piece, np.uint8)
