"""Removing folders file by file, no faster than is wanted: a deletion must not take the metadata server from a save."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ckptman.store.durable import Disk

Sleep = Callable[[float], object]


class Slowly:
    """Removes folders, from several threads, no more than `files_per_second` files in all of them together."""

    def __init__(
        self,
        disk: Disk,
        files_per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = time.sleep,
    ) -> None:
        self._disk, self._seconds = disk, 1 / files_per_second
        self._clock, self._sleep = clock, sleep
        self._turn = threading.Lock()
        self._next = clock()

    def __call__(self, folder: Path) -> None:
        """Remove a folder that nobody sees any more. Raises: OSError."""
        remove_by_file(folder, self._disk, self._wait)

    def _wait(self) -> None:
        with self._turn:
            now = self._clock()
            due = max(self._next, now)
            self._next = due + self._seconds
        if due > now:
            self._sleep(due - now)


def remove_by_file(folder: Path, disk: Disk, before_each: Callable[[], object]) -> None:
    """Remove a folder, with a call before each file. Links are removed, never followed. Raises: OSError."""
    with contextlib.suppress(FileNotFoundError):
        if folder.is_dir() and not folder.is_symlink():
            with os.scandir(folder) as items:
                names = [item.name for item in items if not item.is_dir(follow_symlinks=False)]
            for name in names:
                before_each()
                disk.remove_file(folder / name)
    disk.remove_tree(folder)
