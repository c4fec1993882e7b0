"""The manifest: plain JSON that makes a folder a checkpoint. Written last, read with no torch and no pickle.

What grows with ranks x tensors is in the index files (`index`); here is one line per file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ckptman.errors import CorruptError, FormatVersionError
from ckptman.store.names import MANIFEST

FORMAT_VERSION = 1


class FileRecord(BaseModel):
    """One file of a checkpoint: size in bytes and digest (see `ckptman.store.digest`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    bytes: Annotated[int, Field(ge=0)]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class Mesh(BaseModel):
    """The device mesh of the run that saved: axis names and sizes, outermost first."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    names: tuple[str, ...]
    shape: tuple[int, ...]


class Manifest(BaseModel):
    """What a checkpoint is and what it consists of.

    `sequence` counts commits of a root, starting at 1: the newest checkpoint is the one with the highest sequence,
    not the highest step. `time_seconds` is unix time. `files` maps names inside the folder, without the manifest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format_version: int = FORMAT_VERSION
    step: Annotated[int, Field(ge=0)]
    sequence: Annotated[int, Field(ge=1)]
    time_seconds: float
    reason: str
    world_size: Annotated[int, Field(ge=1)]
    mesh: Mesh | None = None
    torch_version: str
    ckptman_version: str
    run_id: str
    job_id: str | None = None
    attempt: int = 1
    restored_from: int | None = None
    metrics: dict[str, float] = {}
    block_bytes: Annotated[int, Field(gt=0)]
    files: dict[str, FileRecord]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(record.bytes for record in self.files.values())

    def to_json(self) -> bytes:
        """The bytes of `manifest.json`. NaN and infinite metrics are kept (as JSON's common extension writes them)."""
        return (json.dumps(self.model_dump(mode="python"), indent=1) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises: FileNotFoundError (no manifest), CorruptError (does not parse), FormatVersionError (a newer ckptman).
    """
    path = folder / MANIFEST
    data = path.read_bytes()
    try:
        raw: Any = json.loads(data)
        version = raw["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} is not a manifest: {error}") from error
    # The version is looked at before the fields: a newer format may have any.
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise FormatVersionError(str(path), version, FORMAT_VERSION)
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CorruptError(f"{path} (format version {version}): {where}: {first['msg']}") from error
    for name in manifest.files:
        if not is_plain_name(name):
            raise CorruptError(f"{path} names {name!r}, which is not a plain file name in the checkpoint folder")
    return manifest


def is_plain_name(name: str) -> bool:
    """Whether a name stays in its folder: no separator, no `..`, nothing that a path could be made of."""
    return bool(name) and name not in (".", "..") and "/" not in name and "\0" not in name and os.sep not in name


def missing_file(folder: Path, manifest: Manifest) -> str | None:
    """What is wrong with the files that a manifest names, or None: each is a regular file of the size it says.

    Raises: OSError where looking itself fails.
    """
    with os.scandir(folder) as scan:
        there = {item.name: item for item in scan}
    for name, record in manifest.files.items():
        item = there.get(name)
        if item is None:
            return f"{name} is missing"
        if not item.is_file(follow_symlinks=False):
            return f"{name} is not a regular file"
        size = item.stat(follow_symlinks=False).st_size
        if size != record.bytes:
            return f"{name} has {size} bytes instead of {record.bytes}"
    return None
