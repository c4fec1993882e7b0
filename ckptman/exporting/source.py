"""Whether a checkpoint that is exported is still the one that was opened."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptman.errors import CkptmanError, CorruptError, NotFoundError
from ckptman.format.paths import MANIFEST, METADATA
from ckptman.io.file_scan import Stamp, stamp_of
from ckptman.loading.checkpoint_reader import SavedState
from ckptman.loading.piecewise import Frugal


class Opened:
    """How the files of a checkpoint were before they were read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._saved: SavedState | None = None
        try:
            names = os.listdir(folder)  # noqa: PTH208 names alone are wanted
        except OSError:  # there is none, or its names may not be read
            names = []
        self._before = _stamps(folder, {MANIFEST, METADATA, *names})

    def read(self) -> SavedState:
        """What is to be exported. Raises: NotFoundError, CorruptError, FormatVersionError, OSError."""
        self._saved = Frugal.read(self.folder)
        self._saved.refuse_transformed()
        # What was not listed: files that others keep in folders, and all where names may not be read.
        self._before |= _stamps(self.folder, [name for name in self._names() if name not in self._before])
        return self._saved

    def lost(self) -> NotFoundError | None:
        """Why what is there now is no longer what was opened; None where it is, as far as anybody can tell."""
        is_ours = self._saved is not None and self._saved.manifest is not None
        for name, now in _stamps(self.folder, self._names()).items():
            changed = name in self._before and now != self._before[name]
            # The data files of ours have digests: one that is there and has changed is damaged, unless all else has.
            if changed and (now is None or name in (MANIFEST, METADATA) or not is_ours):
                what = f"{name} is gone" if now is None else f"{name} was written to"
                return NotFoundError(
                    f"{self.folder} was deleted, or saved again, while it was exported ({what}): nothing was made of "
                    f"it; try again, or export another checkpoint"
                )
        return None

    def check(self) -> None:
        """See that everything that was read is of one checkpoint, where no digests have told so. Raises:
        NotFoundError."""
        if self._saved is None or self._saved.manifest is None:
            lost = self.lost()
            if lost is not None:
                raise lost

    def _names(self) -> list[str]:
        if self._saved is None:
            return [MANIFEST, METADATA]
        if self._saved.manifest is not None:
            return [MANIFEST, *self._saved.manifest.files]
        index = self._saved.index
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


def _stamps(folder: Path, names: Iterable[str]) -> dict[str, Stamp | None]:
    """What files are known by; None where there is none. Those of which nobody can tell are left out."""
    found: dict[str, Stamp | None] = {}
    for name in names:
        try:
            found[name] = stamp_of((folder / name).stat())
        except (FileNotFoundError, NotADirectoryError):
            found[name] = None
        except OSError:
            continue
    return found
