"""Removing folders file by file, no faster than is wanted: a deletion must not take the metadata server from a save."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ckptman.io.durable_files import Disk
from ckptman.io.threads import Flag, Wakeup

_GENTLY_SECONDS = 0.05
"""Between two files, while a run saves."""
_CLOSE_SECONDS = 5.0


class ThrottledDelete:
    """Removes folders, from several threads, no more than `files_per_second` files in all of them together."""

    def __init__(self, disk: Disk, files_per_second: float) -> None:
        self._disk, self._seconds = disk, 1 / files_per_second
        self._turn = threading.Lock()
        self._next = time.monotonic()

    def __call__(self, folder: Path) -> None:
        """Remove a folder that nobody sees any more. Raises: OSError."""
        remove_by_file(folder, self._disk, self._wait)

    def _wait(self) -> None:
        with self._turn:
            now = time.monotonic()
            due = max(self._next, now)
            self._next = due + self._seconds
        if due > now:
            time.sleep(due - now)


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


class Remover:
    """Removes folders in a thread of its own, behind a run that goes on, and slowly while that run saves."""

    def __init__(self, disk: Disk, told: Callable[[Path, OSError], object]) -> None:
        """`told` is called, in that thread, with what could not be removed: it stays a leftover."""
        self._disk, self._told = disk, told
        self._turn, self._changed = threading.Lock(), Wakeup()
        self._queue: list[Path] = []
        self._thread: threading.Thread | None = None
        self._hurry = Flag()
        self._gently = self._closed = False

    def add(self, folder: Path) -> None:
        """Have a folder removed that nobody sees any more."""
        with self._turn:
            self._queue.append(folder)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ckptman-remove", daemon=True)
                self._thread.start()
        self._changed.notify()

    @property
    def pending(self) -> list[Path]:
        """What is still to be removed, or is being removed."""
        with self._turn:
            return list(self._queue)

    def slow_down(self, wanted: bool) -> None:
        """Whether the run saves just now."""
        self._gently = wanted

    def drain(self, timeout_seconds: float | None = None) -> bool:
        """Remove the rest as fast as can be, and wait for it. False where that took too long."""
        self._hurry.set()
        try:
            return self._changed.wait_for(lambda: not self._queue, timeout_seconds)
        finally:
            self._hurry.clear()

    def close(self, timeout_seconds: float) -> None:
        """Remove what can be in that time; the rest is a leftover, which the next attempt or a prune clears."""
        if self._thread is None:
            return
        self.drain(timeout_seconds)
        self._closed = True
        self._changed.notify()
        self._hurry.set()
        self._thread.join(_CLOSE_SECONDS)

    def _work(self) -> None:
        while True:
            self._changed.wait_for(lambda: bool(self._queue) or self._closed)
            if self._closed:
                return
            folder = self._queue[0]
            try:
                remove_by_file(folder, self._disk, self._pause)
            except _Closed:
                return
            except OSError as error:
                self._told(folder, error)
            finally:
                with self._turn:
                    self._queue.remove(folder)
                self._changed.notify()

    def _pause(self) -> None:
        if self._closed:
            raise _Closed
        if self._gently:
            self._hurry.wait(_GENTLY_SECONDS)


class _Closed(Exception):
    """The run ends: the rest is left."""
