"""What was proved about a checkpoint, or found damaged, and when: `verified.json` beside its manifest, never inside it.

A note for people and for retention, not a proof: whoever can write to the folder can write anything there. It counts
for the very files that were verified, as long as nobody has written to them: neither for a later save of the same step
nor for a copy of the folder, whose bytes nobody has looked at.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from xxhash import xxh3_128_hexdigest

from ckptman import __version__
from ckptman.errors import CorruptError, warn
from ckptman.storage.format.manifest import MOST_BYTES as MANIFEST_BYTES
from ckptman.storage.format.manifest import Manifest
from ckptman.storage.format.paths import MANIFEST
from ckptman.storage.format.sealed_json import SealError, seal, unseal
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.safe_open import read_regular

VERIFIED = "verified.json"
FORMAT_VERSION = 1
_MOST_BYTES = 1024 * 1024
_MOST_TEXT = 1000
Level = Literal["digests", "coverage"]
"""digests: every byte of every file was read and is what was saved. coverage: each element was saved exactly once."""
Count = Annotated[int, Field(ge=1, lt=2**31)]


class Verified(BaseModel):
    """What was proved. `time_seconds` (unix time) is when the strongest of `levels` was proved last, and
    `ckptman_version` by what.

    `world_sizes`: it was loaded on so many processes, bit for bit. `meshes`: the same, as HSDP on such a mesh.
    `plan_world_sizes`: it was planned onto so many ranks. `damaged`: what of it is not what was saved, where something
    is not; then nothing else is proved. `manifest_digest`, `files_digest`: which files.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format_version: int = FORMAT_VERSION
    time_seconds: FiniteFloat
    ckptman_version: Annotated[str, Field(max_length=100)]
    levels: tuple[Level, ...]
    world_sizes: tuple[Count, ...] = ()
    meshes: tuple[tuple[Count, ...], ...] = ()
    plan_world_sizes: tuple[Count, ...] = ()
    damaged: Annotated[str, Field(max_length=_MOST_TEXT)] = ""
    manifest_digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    files_digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]

    @property
    def every_byte(self) -> bool:
        """Whether all its bytes were read back and found to be what was saved."""
        return "digests" in self.levels


@dataclass(frozen=True)
class Identity:
    """The files of a checkpoint: the xxh3-128 of the bytes of its manifest, and of the name, inode, size and time of
    each file. A copy does not share it, nor does a file that was written to."""

    manifest: str
    files: str


def identify(folder: Path, manifest: Manifest) -> Identity:
    """The files that lie in a folder now, of those that its manifest names.

    Raises: CorruptError (the manifest is no regular file), FileNotFoundError (it is gone), OSError.
    """
    data = read_regular(folder / MANIFEST, MANIFEST_BYTES)
    with os.scandir(folder) as items:
        there = {item.name: item for item in items}
    stamps = []
    for name in (MANIFEST, *sorted(manifest.files)):
        found = there[name].stat(follow_symlinks=False) if name in there else None
        stamps.append((name, *((found.st_ino, found.st_size, found.st_mtime_ns) if found else ())))
    return Identity(xxh3_128_hexdigest(data), xxh3_128_hexdigest(repr(stamps).encode()))


def read_verified(folder: Path, manifest: Manifest) -> Verified | None:
    """What was proved about the checkpoint in a folder; None where nothing was, or what is noted is about other files.

    A note that cannot be read is none: it is not worth failing for.
    """
    note = _read(folder)
    try:
        return note if note is not None and _is_about(note, identify(folder, manifest)) else None
    except (CorruptError, OSError):
        return None


def note_verified(
    folder: Path,
    identity: Identity,
    *,
    levels: Iterable[Level],
    world_sizes: Iterable[int] = (),
    meshes: Iterable[tuple[int, ...]] = (),
    plan_world_sizes: Iterable[int] = (),
) -> None:
    """Note what was proved just now about the files `identity`, beside what was proved about it before.

    What is weaker than what is there adds to it and takes nothing away. What was found damaged stays so until every
    byte was found to be right. Raises: OSError (the folder is read-only).
    """
    proved: dict[str, set[Any]] = {
        "levels": set(levels),
        "world_sizes": set(world_sizes),
        "meshes": set(meshes),
        "plan_world_sizes": set(plan_world_sizes),
    }
    every_byte = "digests" in proved["levels"]
    proved_by: dict[str, Any] = {}
    old = _read(folder)
    if old is not None and _is_about(old, identity):
        if old.damaged and not every_byte:
            return
        if old.every_byte and not every_byte:
            proved_by = {"time_seconds": old.time_seconds, "ckptman_version": old.ckptman_version}
        for name, values in proved.items():
            values.update(getattr(old, name))
    in_order = {name: sorted(values, reverse=name == "levels") for name, values in proved.items()}
    new = _note(identity, **in_order, **proved_by)
    if new != old:
        _write(folder, new)


def note_damaged(folder: Path, identity: Identity, what: str) -> None:
    """Note that the files `identity` are not what was saved, in place of what was proved about them before.

    Raises: OSError (the folder is read-only).
    """
    _write(folder, _note(identity, levels=(), damaged=what[:_MOST_TEXT]))


def remember_damage(folder: Path, manifest: Manifest, what: str) -> None:
    """The same of the files that lie there now, as far as it can be noted: so that no retention counts them, and
    deletes good ones. Called by whoever was refused them."""

    with contextlib.suppress(OSError, CorruptError):
        note_damaged(folder, identify(folder, manifest), what)


def forget_verified(folder: Path) -> None:
    """Take back what was proved: it no longer holds. Raises: OSError (the folder is read-only)."""
    path = folder / VERIFIED
    note = _read(folder)
    if os.path.lexists(path) and not (note is not None and note.damaged):
        DISK.remove_file(path)
        DISK.sync_folder(folder)


def _note(identity: Identity, **fields: Any) -> Verified:
    """A note of now, with these fields."""
    now: dict[str, Any] = {"time_seconds": time.time(), "ckptman_version": __version__}
    return Verified(manifest_digest=identity.manifest, files_digest=identity.files, **now | fields)


def _write(folder: Path, note: Verified) -> None:
    DISK.replace_file(folder / VERIFIED, seal(json.dumps(note.model_dump(mode="json"), indent=1).encode()))


def _read(folder: Path) -> Verified | None:
    try:
        # A root can hold thousands, few of which have a note: a path that is put together as text costs less.
        path = os.path.join(folder, VERIFIED)
        note = Verified.model_validate_json(unseal(path, read_regular(path, _MOST_BYTES)))
    except SealError:
        # A warning that is an error must not fail who only lists.
        with contextlib.suppress(Warning):
            warn(f"{path} is passed over, because its bytes have changed: ckptman verify writes it anew")
        return None
    except (CorruptError, OSError, ValidationError, RecursionError):
        return None
    return note if note.format_version == FORMAT_VERSION else None


def _is_about(note: Verified, identity: Identity) -> bool:
    return (note.manifest_digest, note.files_digest) == (identity.manifest, identity.files)
