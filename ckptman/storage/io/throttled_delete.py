"""Removing folders no faster than is wanted: a deletion must not take the metadata server from a save."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from ckptman.storage.io.durable_files import remove_by_file


class ThrottledDelete:
    """Removes folders, from several threads, no more than `files_per_second` files in all of them together."""

    def __init__(self, files_per_second: float) -> None:
        self._seconds = 1 / files_per_second
        self._turn = threading.Lock()
        self._next = time.monotonic()

    def __call__(self, folder: Path) -> None:
        """Remove a folder that nobody sees any more. Raises: OSError."""
        remove_by_file(folder, self._wait)

    def _wait(self) -> None:
        with self._turn:
            now = time.monotonic()
            due = max(self._next, now)
            self._next = due + self._seconds
        if due > now:
            time.sleep(due - now)
