"""Which bytes are read together: ranges of files, grouped into spans. Pure, no I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WHOLE_BYTES = 8 * 1024 * 1024
"""The largest range that can be delivered in one piece."""
_SMALL_BYTES = 8 * 1024
"""Where the parts of a span are smaller than this on average, copying them costs less than scattering them."""


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


def plan(
    wanted: Sequence[Wanted], block: int, end_of_file: int, gap_bytes: int, stride: int, unit: int = 1
) -> list[Span]:
    """The spans of the ranges of one file, which are sorted by offset. Edges lie on blocks where there are digests.

    A span has at most `stride` bytes, whole blocks, as far as no range has to be in one piece. Where it ends before
    its ranges do, it ends at a multiple of `unit`, of which a stride is a multiple too.
    """
    spans: list[Span] = []
    lows: list[int] = []
    apart: list[Span] = []

    def begin(start: int) -> Span:
        low = start - start % block
        span = Span(low, low - low % unit + stride)
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
                last = begin(start)
            span = last
            if start < span.low:  # an earlier range took these bytes as well, so they are read already
                span = spans[bisect_right(lows, start) - 1]
            stop = end
            if each.whole:
                if span is last and end > span.limit:
                    if start - start % block > span.low:
                        span = last = begin(start)
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
    """Where the bytes of a span are read to, in order, and the parts that then have to be taken from the scratch."""
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
