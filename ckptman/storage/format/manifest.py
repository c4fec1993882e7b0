"""The manifest: plain JSON that makes a folder a checkpoint. Written last, read with no torch and no pickle.

What grows with ranks x tensors is in the index files (`index`); here is one line per file. Its last field, `digest`,
is the xxh3-128 of all bytes before it: no other file could vouch for the manifest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from pydantic_core import from_json
from xxhash import xxh3_128_hexdigest

from ckptman.errors import CorruptError, FormatVersionError, plain
from ckptman.policies.retention_rules import LATEST_SECONDS, Record
from ckptman.storage.format.paths import MANIFEST, MAX_STEP, METADATA
from ckptman.storage.format.sealed_json import seal
from ckptman.storage.io.safe_open import read_regular

FORMAT_VERSION = 1
MOST_BYTES = 64 * 1024 * 1024
"""No manifest is larger: it has three lines a rank, of some 40 bytes each."""
_REMEDY = "restore an older checkpoint, or bring this one back from a copy"
_MOST_NAME_BYTES = 255
_SEAL = re.compile(rb',\n "digest": "([0-9a-f]{32})"\n}\n\Z')
_SEAL_BYTES = 100
_HEAD = b'{\n "format_version": %d,\n' % FORMAT_VERSION

Count = Annotated[int, Field(ge=0, lt=2**31)]
Step = Annotated[int, Field(ge=0, le=MAX_STEP)]
Replicas = Literal["equal", "differ"]


class FileRecord(BaseModel):
    """One file of a checkpoint: size in bytes and digest (see `ckptman.storage.io.checksums`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    bytes: Annotated[int, Field(ge=0, lt=2**62)]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class Mesh(BaseModel):
    """The device mesh of the run that saved: axis names and sizes, outermost first."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    names: tuple[str, ...]
    shape: tuple[Count, ...]


class Nonfinite(BaseModel):
    """What a save found to be NaN or infinite: the names of metrics, and of the first of the parameters and optimizer
    tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    metrics: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()


class Manifest(BaseModel):
    """What a checkpoint is and what it consists of.

    `sequence` counts commits of a root, starting at 1: the newest checkpoint is the one with the highest sequence,
    not the highest step. `time_seconds` is unix time, or the end of its range that was exceeded, where the clock was
    broken (see `is_known_time`). `nonfinite`: None if nobody looked. `replicas`: whether what several ranks held was
    the same on all of them when it was compared, at the first save of a process; None if nobody did. `metadata`: any
    JSON values. `asked`: what the script asked of optimizers and schedules when the run began, as text. These four are
    left out of the file if they are empty. `files` maps names inside the folder, without
    the manifest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format_version: int = FORMAT_VERSION
    step: Step
    sequence: Annotated[int, Field(ge=1, lt=2**62)]
    time_seconds: Annotated[FiniteFloat, Field(ge=0, le=LATEST_SECONDS)]
    reason: str
    world_size: Annotated[Count, Field(ge=1)]
    mesh: Mesh | None = None
    torch_version: str
    ckptman_version: str
    run_id: str
    job_id: str | None = None
    attempt: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 1
    restored_from: Step | None = None
    metrics: dict[str, float] = {}
    nonfinite: Nonfinite | None = None
    replicas: Replicas | None = None
    metadata: dict[str, Any] = {}
    asked: dict[str, str] = {}
    block_bytes: Annotated[int, Field(gt=0, le=2**30)]
    files: dict[str, FileRecord]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(record.bytes for record in self.files.values())

    @property
    def identity(self) -> str:
        """What tells this checkpoint from all others, wherever it was copied: the digest of `manifest.json`."""
        return xxh3_128_hexdigest(self.to_json())

    def to_json(self) -> bytes:
        """Return the bytes of `manifest.json`. NaN and infinite metrics are kept, as a common extension writes them."""
        unsaid = {name for name in ("nonfinite", "replicas", "metadata", "asked") if getattr(self, name) in (None, {})}
        return seal(json.dumps(self.model_dump(mode="python", exclude=unsaid), indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint folder.

    Raises: FileNotFoundError (no manifest), CorruptError (not as it was written), FormatVersionError (a newer ckptman).
    """
    path = folder / MANIFEST
    return parse_manifest(path, read_regular(path, MOST_BYTES))


def facts_of(manifest: Manifest) -> Record:
    """Return what a manifest says that retention rules look at."""
    found = manifest.nonfinite or Nonfinite()
    return Record(
        manifest.step,
        manifest.sequence,
        manifest.time_seconds,
        manifest.total_bytes,
        manifest.metrics,
        nonfinite_metrics=found.metrics,
        nonfinite_tensors=found.tensors,
        attempt=manifest.attempt,
    )


def read_facts(folder: Path) -> Record | None:
    """Return what the manifest in a folder says of the order, and check its digest, but no other field: a root may hold
    thousands. None where it is not as ckptman writes one: `read_manifest` says why.

    Raises: FileNotFoundError, CorruptError, OSError: as `read_regular`.
    """
    data = read_regular(f"{folder}/{MANIFEST}", MOST_BYTES)
    sealed = _SEAL.search(data, max(0, len(data) - _SEAL_BYTES))
    if sealed is None or not data.startswith(_HEAD):
        return None
    if xxh3_128_hexdigest(data[: sealed.start()]).encode() != sealed[1]:
        return None
    try:
        raw = from_json(data)  # twice as fast as json.loads
        total_bytes, attempt = sum([each["bytes"] for each in raw["files"].values()]), raw.get("attempt", 1)
        numbers = raw["step"], raw["sequence"], total_bytes, attempt
        values = raw["time_seconds"], *raw["metrics"].values()
        if {*map(type, numbers)} != {int} or not {*map(type, values)} <= {int, float}:
            return None
        found = raw.get("nonfinite") or {"metrics": (), "tensors": ()}
        return Record(
            raw["step"],
            raw["sequence"],
            raw["time_seconds"],
            total_bytes,
            raw["metrics"],
            nonfinite_metrics=tuple(found["metrics"]),
            nonfinite_tensors=tuple(found["tensors"]),
            attempt=attempt,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def parse_manifest(path: Path | str, data: bytes) -> Manifest:
    """Parse the bytes of a manifest; `path` is for messages. Raises: CorruptError, FormatVersionError."""
    sealed = _SEAL.search(data)
    if sealed is not None and xxh3_128_hexdigest(data[: sealed.start()]).encode() != sealed[1]:
        raise CorruptError(f"{path} does not match its digest: its bytes have changed since it was saved; {_REMEDY}")
    if sealed is not None and data.startswith(_HEAD):
        # Straight from the text: half the time, which counts where a root holds thousands. What is wrong is told below.
        with contextlib.suppress(ValidationError):
            manifest = Manifest.model_validate_json(data[: sealed.start()] + b"\n}")
            if all(map(is_plain_name, manifest.files)):
                return manifest
    raw = parse_versioned(path, data)
    if sealed is None:
        raise CorruptError(f"{path} has no digest at its end: it was cut short or edited; {_REMEDY}")
    del raw["digest"]
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = _shown(".".join(str(part) for part in first["loc"]))
        what = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
        raise CorruptError(f"{path} (format version {raw['format_version']}): {where}: {what}; {_REMEDY}") from None
    for name in manifest.files:
        if not is_plain_name(name):
            raise CorruptError(
                f"{path} names {_shown(name)}, which is not a plain file name in the checkpoint folder; {_REMEDY}"
            )
    return manifest


def parse_versioned(path: Path | str, data: bytes) -> dict[str, Any]:
    """Parse the JSON object in `data`, if its format version is one we know: a newer format may have any field.

    Raises: CorruptError, FormatVersionError.
    """
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise _foreign(path, f"it {_unreadable(error)}") from error
    if not isinstance(raw, dict):
        raise _foreign(path, "it is not a JSON object")
    if "format_version" not in raw:
        raise _foreign(path, "it has no format_version")
    version = raw["format_version"]
    if type(version) is not int or version < 1:
        raise CorruptError(f"{path} has the format version {_shown(str(version))}, which there never was; {_REMEDY}")
    if version > FORMAT_VERSION:
        raise FormatVersionError(str(path), version, FORMAT_VERSION)
    return cast("dict[str, Any]", raw)


def _foreign(path: Path | str, flaw: str) -> CorruptError:
    return CorruptError(f"{path} is not what ckptman wrote there: {flaw}; {_REMEDY}")


def _unreadable(error: Exception) -> str:
    """Why no JSON could be read, in words."""
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON from line {error.lineno}, column {error.colno} on"
    if isinstance(error, UnicodeDecodeError):
        return f"is not text from byte {error.start:,} on"
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    return "does not fit the memory" if isinstance(error, MemoryError) else "has a number of too many digits"


def is_plain_name(name: str) -> bool:
    """Return whether a name stays in its folder: no separator, no `..`, nothing that a path could be made of.

    Nor anything that a terminal would obey, nor more than a file system takes: nobody saves under such names.
    """
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        return False
    return len(name.encode()) <= _MOST_NAME_BYTES


def _shown(text: str, most: int = 200) -> str:
    """A part of somebody's file, for a message: not too long, and with escapes where a terminal would obey."""
    return plain(text if len(text) <= most else f"{text[:most]}...") or "''"


def missing_file(folder: Path, manifest: Manifest) -> str | None:
    """Return what is wrong with the files that a manifest names, or None: each is a regular file of the size it says.

    Raises: OSError where looking itself fails.
    """
    return compare_names(folder, manifest)[0]


def compare_names(folder: Path, manifest: Manifest) -> tuple[str | None, frozenset[str]]:
    """Return the same, and the names that are there besides. Raises: OSError."""
    with os.scandir(folder) as scan:
        there = {item.name: item for item in scan}
    beside = frozenset(there.keys() - manifest.files.keys())
    # First the one that tells of another program that saved here.
    for name in sorted(manifest.files, key=METADATA.__ne__):
        record = manifest.files[name]
        item = there.get(name)
        if item is None:
            return f"{name} is missing", beside
        if not item.is_file(follow_symlinks=False):
            return f"{name} is not a regular file", beside
        size = item.stat(follow_symlinks=False).st_size
        if size != record.bytes:
            as_if = ", as if plain DCP had saved over it" if name == METADATA else ""
            return f"{name} has {size} bytes instead of {record.bytes}{as_if}", beside
    return None, beside
