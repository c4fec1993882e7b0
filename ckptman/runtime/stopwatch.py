"""How long a call takes, and the parts of it one after the other: a log line says what a clock outside shows."""

from __future__ import annotations

import time


class Stopwatch:
    """Runs from the beginning of a call on. Its parts add up to the whole."""

    def __init__(self) -> None:
        self.begun = self._ended = time.monotonic()
        """On the monotonic clock, in seconds."""
        self.parts: dict[str, float] = {}
        """Seconds by part, in the order in which they ended first."""

    def ends(self, part: str) -> None:
        """End a part of the call, which began where the one before ended. One that comes again goes on."""
        now = time.monotonic()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._ended
        self._ended = now

    @property
    def seconds(self) -> float:
        """From the beginning until the last part ended."""
        return self._ended - self.begun
