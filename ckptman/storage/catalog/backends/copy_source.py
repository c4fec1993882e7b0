"""What a copy reads: a checkpoint in a folder."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_128_hexdigest

from ckptman.errors import CkptmanError, CorruptError, RootError, plain
from ckptman.storage.catalog.pins import PINNED
from ckptman.storage.catalog.reader_lease import GoneError, is_gone
from ckptman.storage.catalog.rollback_records import Rollback, read_rollbacks
from ckptman.storage.catalog.verified import VERIFIED, Verified, read_verified
from ckptman.storage.format.manifest import MOST_BYTES, Manifest, parse_manifest
from ckptman.storage.format.paths import MANIFEST, parse_half_written, step_folder
from ckptman.storage.io.file_reader import FileReader
from ckptman.storage.io.safe_open import read_regular
from ckptman.storage.io.threads import ALIGN_BYTES, STRIDE_BYTES

AGAIN = "what was copied stays: copy again for the rest"
MOST_PIN_BYTES = 1024 * 1024


class SourceError(RootError):
    """What is to be copied cannot be read: that says nothing about other checkpoints. Not where the destination is."""


@contextlib.contextmanager
def blaming_source(where: Path | str) -> Iterator[None]:
    """Raise errors of the system as SourceError."""
    try:
        yield
    except CkptmanError:
        raise
    except OSError as error:
        raise refused(SourceError, error, where) from error


def refused(kind: type[RootError], error: OSError, where: Path | str) -> RootError:
    """An error of a file system as one of ours. `where`: in case that it does not say."""
    return kind(
        error.errno or errno.EIO,
        f"{plain(error.filename or where)}: {error.strerror or error}: check the mount and its permissions; {AGAIN}",
    )


class Reading(Protocol):
    """One file that is being read, from several threads."""

    piece_bytes: int
    """How much is best read at a time."""

    def read(self, offset: int, scratch: memoryview) -> memoryview:
        """Fill `scratch`, and return it. Raises: CorruptError (it is shorter), OSError."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class SourceInfo:
    """What is to be copied.

    `where`: for messages. `name`: of its folder, which a copy keeps. `data`: the bytes of `manifest.json`. `tag`: tells
    it from every other, and comes out the same when it is asked for again. `rollbacks`: of the place where it lies;
    they go along, so that what is abandoned there is not the newest elsewhere.
    """

    where: str
    name: str
    manifest: Manifest
    data: bytes
    tag: str
    pinned: bytes | None = None
    proved: Verified | None = None
    remarks: tuple[str, ...] = field(default=())
    rollbacks: tuple[Rollback, ...] = ()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of its files, by name, without the manifest."""
        return {name: record.bytes for name, record in self.manifest.files.items()}

    @property
    def bytes(self) -> int:
        return self.manifest.total_bytes


class CopySource(Protocol):
    """A checkpoint that is to be copied, wherever it lies."""

    facts: SourceInfo
    is_remote: bool
    """Whether it comes through a network, which several threads wait for at a time."""

    def open(self, name: str) -> Reading:
        """One of its files. Raises: CorruptError (it is none, or has another size), OSError."""

    def lost(self) -> CkptmanError | None:
        """Why it can never be copied any more: it was deleted, or saved again. None where it is still what it was."""


class FolderSource:
    """A checkpoint of ours in a folder. `manifest`: as it was when it was chosen.

    Raises: CorruptError, GoneError (it was deleted meanwhile, or another one is there now), SourceError.
    """

    is_remote = False

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        with blaming_source(folder):
            self.facts = _facts(folder, manifest)

    def open(self, name: str) -> Reading:
        return FolderReading(self._folder / name, self.facts.sizes[name])

    def lost(self) -> CkptmanError | None:
        try:
            same = _manifest_bytes(self._folder) == self.facts.data and not is_gone(self._folder)
            return None if same else _gone_or_away(self._folder)
        except (OSError, CorruptError):
            return None


class FolderReading:
    """A file of a folder. What is not in the page cache is read past it, so that a copy pushes nothing out of it."""

    piece_bytes = STRIDE_BYTES

    def __init__(self, path: Path, size: int) -> None:
        self.path, self._reader = path, FileReader(path)
        there = os.fstat(self._reader.open()).st_size
        if there != size:
            self._reader.close()
            raise CorruptError(f"{path} has {there} bytes instead of {size}: copy another checkpoint")

    def read(self, offset: int, scratch: memoryview) -> memoryview:
        reader, size = self._reader, len(scratch)
        cold = offset % ALIGN_BYTES == 0 and reader.is_cold(offset, size)
        filled = reader.read_direct(offset, size, scratch) if cold else 0
        try:
            if filled < size:
                filled += reader.read([scratch[filled:]], offset + filled)
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise
        if filled < size:
            raise CorruptError(f"{self.path} was cut short while it was copied: copy another checkpoint")
        return scratch

    def close(self) -> None:
        self._reader.close()


def _facts(folder: Path, manifest: Manifest) -> SourceInfo:
    data = _manifest_bytes(folder)
    # As bytes: NaN is not equal to itself.
    if data is None or parse_manifest(folder / MANIFEST, data).to_json() != manifest.to_json():
        raise _gone(folder)
    note = read_verified(folder, manifest)
    if note is not None and note.damaged:
        raise CorruptError(
            f"{folder} is damaged, as was found before: {note.damaged}. A copy would be, too: copy another "
            f"checkpoint, or run `ckptman verify {folder}` again if this one was repaired"
        )
    beside = {MANIFEST, VERIFIED, PINNED, *manifest.files}
    names = sorted(os.listdir(folder))  # noqa: PTH208 names alone are wanted
    unknown = [name for name in names if name not in beside and parse_half_written(name) is None]
    return SourceInfo(
        where=str(folder),
        name=step_folder(manifest.step),
        manifest=manifest,
        data=data,
        tag=xxh3_128_hexdigest(data)[:16],
        pinned=_pinned(folder),
        proved=note,
        remarks=tuple(f"{plain(name)} is not in the manifest: it was not copied" for name in unknown),
        rollbacks=tuple(read_rollbacks(folder.resolve().parent).values()),
    )


def _manifest_bytes(folder: Path) -> bytes | None:
    try:
        return read_regular(folder / MANIFEST, MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _pinned(folder: Path) -> bytes | None:
    try:
        return read_regular(folder / PINNED, MOST_PIN_BYTES)
    except FileNotFoundError:
        return None
    except (CorruptError, OSError) as error:
        # A copy that has lost its pin would be deleted one day.
        raise SourceError(
            getattr(error, "errno", None) or errno.EIO,
            f"{folder / PINNED} cannot be read ({getattr(error, 'strerror', None) or error}): it says why this "
            f"checkpoint is kept, and has to travel with it; check its permissions, or remove it",
        ) from error


def _gone(folder: Path) -> GoneError:
    return GoneError(
        f"{folder} was deleted, or saved again, since it was looked at: nothing of it was copied; copy again"
    )


def _gone_or_away(folder: Path) -> GoneError | None:
    """None where what it was in is not there either: a mount that is away has lost nothing."""
    return _gone(folder) if os.path.lexists(folder.parent) else None
