"""How far a copy has come, and a limit to its bandwidth. Threads share both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

from ckptman.policies.parameters import check_positive

Phase = Literal["looking", "copying", "verifying"]


class Meter:
    """Counts what is done of a phase of a copy. Whoever shows it may look at any time.

    `on_change` is called after each piece, from several threads.
    """

    def __init__(self, on_change: Callable[[Meter], None] | None = None) -> None:
        self.phase: Phase = "looking"
        self.total_bytes = self.done_bytes = 0
        self._on_change = on_change
        self._lock = threading.Lock()

    def begin(self, phase: Phase, total_bytes: int) -> None:
        """A phase begins, in which so much is to be done."""
        with self._lock:
            self.phase, self.total_bytes, self.done_bytes = phase, total_bytes, 0
        self._tell()

    def moved(self, count: int) -> None:
        """So many bytes are done."""
        with self._lock:
            self.done_bytes += count
        self._tell()

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change(self)


class Limit:
    """Holds back whoever moves bytes, so that all threads together move no more than so many a second."""

    def __init__(self, bytes_per_second: float) -> None:
        check_positive("Limit", "bytes_per_second", bytes_per_second)
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, count: int, over: threading.Event) -> None:
        """Wait until so many bytes may be moved, or it is over. What was not used before is not made up for."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0:
            over.wait(wait)
