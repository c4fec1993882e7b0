"""How far a copy has come and how fast it is, and a limit to its bandwidth. Threads share both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

from ckptman.forecast.transfer_time import Pace, Remaining, remaining
from ckptman.policies.parameters import check_positive

Phase = Literal["looking", "copying", "verifying"]


class Meter:
    """Counts what is done of a phase of a copy. Whoever shows it may look at any time.

    `on_change` is called after each piece, from several threads.
    """

    def __init__(self, on_change: Callable[[Meter], None] | None = None) -> None:
        self.phase: Phase = "looking"
        self.total_bytes = self.done_bytes = self.total_files = self.done_files = 0
        self._on_change = on_change
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._skipped_bytes = 0
        self._byte_seconds = self._file_seconds = 0.0

    def begin(self, phase: Phase, total_bytes: int, total_files: int) -> None:
        """A phase begins, in which so much is to be done."""
        with self._lock:
            self.phase, self.total_bytes, self.total_files = phase, total_bytes, total_files
            self.done_bytes = self.done_files = self._skipped_bytes = 0
            self._byte_seconds = self._file_seconds = 0.0
            self._begun = time.monotonic()
        self._tell()

    def moved(self, count: int, seconds: float) -> None:
        """So many bytes were moved, by calls that took so long in all."""
        with self._lock:
            self.done_bytes += count
            self._byte_seconds += seconds
        self._tell()

    def skipped(self, count: int) -> None:
        """So many bytes need not be moved: they say nothing about the bandwidth."""
        with self._lock:
            self.done_bytes += count
            self._skipped_bytes += count
        self._tell()

    def ended_file(self, seconds: float) -> None:
        """A file is done; what it cost besides its bytes."""
        with self._lock:
            self.done_files += 1
            self._file_seconds += seconds
        self._tell()

    def remaining(self) -> Remaining | None:
        """How long this phase still takes, where that can be said."""
        with self._lock:
            pace = Pace(
                self.done_bytes - self._skipped_bytes,
                self._byte_seconds,
                self.done_files,
                self._file_seconds,
                time.monotonic() - self._begun,
            )
            bytes_left, files_left = self.total_bytes - self.done_bytes, self.total_files - self.done_files
        return remaining(pace, bytes_left, files_left)

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change(self)


class Limit:
    """Holds back whoever moves bytes, so that all threads together move no more than so many a second."""

    def __init__(self, bytes_per_second: float) -> None:
        check_positive("Limit", "bytes_per_second", bytes_per_second)
        self._rate = bytes_per_second
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, count: int) -> None:
        """Wait until so many bytes may be moved. What was not used before is not made up for."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0:
            self._over.wait(wait)

    def release(self) -> None:
        """Hold nobody back any more: what they move is not wanted."""
        self._over.set()

    def renew(self) -> None:
        """Hold back again, after a `release`."""
        self._over.clear()
