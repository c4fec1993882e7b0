"""Whether a checkpoint that is exported is still the one that was opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptman.errors import CkptmanError, CorruptError, NotFoundError
from ckptman.sharded.saved import SavedState
from ckptman.store.names import MANIFEST, METADATA

Stamp = tuple[int, int, int]
"""Bytes of a file, when it was written last (nanoseconds), and its inode: another one where it was replaced."""


class Opened:
    """How the files of a checkpoint were before the first look at it. `saved`: what was found then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: SavedState | None = None
        try:
            with os.scandir(folder) as items:
                self._before = {item.name: _stamp(folder / item.name) for item in items}
        except OSError:  # there is none, or its names may not be read: then nobody can tell
            self._before = {}

    def lost(self) -> NotFoundError | None:
        """Why what is there now is no longer what was opened; None where it is, as far as anybody can tell."""
        for name in self._names() if self._before else ():
            try:
                now = _stamp(self.folder / name)
            except OSError:  # then nobody can tell
                continue
            before = self._before.get(name)
            # The data files of ours have digests: one that is there and has changed is damaged, unless all else has.
            if now != before and (now is None or name in (MANIFEST, METADATA) or MANIFEST not in self._before):
                what = f"{name} is gone" if now is None else f"{name} was written to"
                return NotFoundError(
                    f"{self.folder} was deleted, or saved again, while it was exported ({what}): nothing was made of "
                    f"it; try again, or export another checkpoint"
                )
        return None

    def check(self) -> None:
        """See that everything that was read is of one checkpoint, where no digests have told so. Raises:
        NotFoundError."""
        lost = self.lost() if MANIFEST not in self._before else None
        if lost is not None:
            raise lost

    def _names(self) -> list[str]:
        if self.saved is None:
            return [MANIFEST, METADATA]
        if self.saved.manifest is not None:
            return [MANIFEST, *self.saved.manifest.files]
        index = self.saved.index
        return [METADATA, *sorted({*index.files, *(place.file for place in index.objects.values())})]


@contextmanager
def opened(folder: Path) -> Iterator[Opened]:
    """A checkpoint that is read until the block ends. Raises: NotFoundError in place of an error that came of it having
    been deleted or saved again meanwhile."""
    found = Opened(folder)
    try:
        yield found
    except (CorruptError, OSError) as error:
        if isinstance(error, CkptmanError) and not isinstance(error, CorruptError):
            raise
        lost = found.lost()
        if lost is None:
            raise
        raise lost from error


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino
