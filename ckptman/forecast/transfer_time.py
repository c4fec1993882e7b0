"""How long it still takes to move files: so many bytes at a bandwidth, and so many files at a rate."""

from __future__ import annotations

from dataclasses import dataclass

_MATTERS = 0.1
"""A part of the time that is less than this share of all of it is not worth telling apart."""


@dataclass(frozen=True)
class Pace:
    """What was moved in `seconds` of wall-clock time, by however many streams.

    `byte_seconds` and `file_seconds` are sums over the streams: what calls took that move bytes, and what calls took
    that are made once for each file (open, flush, close).
    """

    bytes: int
    byte_seconds: float
    files: int
    file_seconds: float
    seconds: float


@dataclass(frozen=True)
class Remaining:
    """Seconds that are left: of bytes, and of what each file costs besides its bytes."""

    byte_seconds: float
    file_seconds: float

    @property
    def seconds(self) -> float:
        return self.byte_seconds + self.file_seconds

    @property
    def both_matter(self) -> bool:
        """Whether each of the two is a part of it that is worth telling."""
        return min(self.byte_seconds, self.file_seconds) >= _MATTERS * self.seconds > 0


def remaining(pace: Pace, bytes_left: int, files_left: int) -> Remaining | None:
    """bytes / bandwidth + files / rate, at the pace so far; None as long as nothing can be said.

    The time that has passed is divided between bytes and files as the calls of all streams were: so it does not matter
    how many streams there are, nor how far they keep each other waiting.
    """
    calls = pace.byte_seconds + pace.file_seconds
    if pace.seconds <= 0 or calls <= 0 or (bytes_left and not pace.bytes):
        return None
    of_bytes = pace.seconds * pace.byte_seconds / calls
    of_files = pace.seconds * pace.file_seconds / calls
    return Remaining(
        bytes_left * of_bytes / pace.bytes if bytes_left else 0.0,
        files_left * of_files / pace.files if files_left and pace.files else 0.0,
    )
