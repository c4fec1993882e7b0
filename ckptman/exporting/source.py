"""Whether a checkpoint that is exported is still the one that was opened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptman.errors import CkptmanError, CorruptError, NotFoundError
from ckptman.format.paths import MANIFEST, METADATA
from ckptman.io.file_scan import Stamp, stamp_of
from ckptman.loading.box_reader import BoundedState
from ckptman.loading.checkpoint_reader import SavedState


class ExportSource:
    """The files of a checkpoint as they were before it was read: inode, size and times of each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamps = _stamps(folder, (MANIFEST, METADATA))

    def read(self) -> SavedState:
        """Read its index. Raises: NotFoundError, CorruptError, FormatVersionError, OSError."""
        saved = BoundedState.read(self._folder)
        saved.refuse_transformed()
        if saved.manifest is None:  # the data files of ours have digests, which tell more
            self._stamps.pop(MANIFEST, None)  # it may be adopted meanwhile
            places = saved.index.objects.values()
            self._stamps |= _stamps(self._folder, {*saved.index.files, *(place.file for place in places)})
        return saved

    def check(self) -> None:
        """Raise NotFoundError if the checkpoint was deleted or saved again since it was opened."""
        for name, now in _stamps(self._folder, sorted(self._stamps)).items():
            if now != self._stamps[name]:
                what = f"{name} is gone" if now is None else f"{name} was written to"
                raise NotFoundError(
                    f"{self._folder} was deleted, or saved again, while it was exported ({what}): nothing was made of "
                    f"it; try again, or export another checkpoint"
                )


@contextmanager
def opened(folder: Path) -> Iterator[ExportSource]:
    """Open a checkpoint; an error that came of its being deleted or saved again meanwhile becomes a NotFoundError."""
    source = ExportSource(folder)
    try:
        yield source
    except (CorruptError, OSError) as error:
        if not isinstance(error, CkptmanError) or isinstance(error, CorruptError):
            source.check()
        raise


def _stamps(folder: Path, names: Iterable[str]) -> dict[str, Stamp | None]:
    """Return what each file is known by; None where there is none. Those that cannot be looked at are left out."""
    found: dict[str, Stamp | None] = {}
    for name in names:
        try:
            found[name] = stamp_of((folder / name).stat())
        except (FileNotFoundError, NotADirectoryError):
            found[name] = None
        except OSError:
            continue
    return found
