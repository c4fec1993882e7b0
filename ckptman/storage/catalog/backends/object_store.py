"""Checkpoints in an object store, through fsspec: S3, and whatever else it knows.

A checkpoint is there if, and only if, its `manifest.json` is, which is put last, and the objects that it names have the
sizes it says: an object appears as a whole, so nothing is renamed. One listing tells all of that. Errors of the store
are tried again for a while, and then raised: what cannot be listed is never "no checkpoints".
"""

from __future__ import annotations

import contextlib
import errno
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckptman.errors import (
    CkptmanError,
    ConfigError,
    CorruptError,
    FormatVersionError,
    NotFoundError,
    RootError,
    masked,
    plain,
)
from ckptman.policies.retention_plan import plan
from ckptman.policies.retention_rules import Record, RetentionPolicy
from ckptman.storage.catalog.catalog import Entry, Until, commit_order
from ckptman.storage.catalog.pins import PINNED
from ckptman.storage.catalog.rollback_records import Rollback, abandoned_by, parse_rollback_file
from ckptman.storage.format.manifest import MOST_BYTES, Manifest, parse_manifest
from ckptman.storage.format.paths import DOT, MANIFEST, parse_step
from ckptman.storage.io.threads import share_out

if TYPE_CHECKING:
    from ckptman.storage.catalog.backends.copy_draft import CopyDraft
    from ckptman.storage.catalog.backends.copy_source import CopySource, SourceInfo

COPYING = "copying.json"
"""In one that is being put: whose objects they are."""
REMOVING = "removing.json"
"""In a checkpoint that is being removed: what is left without a manifest is nobody's."""
_THREADS = 16
_MOST_SECONDS = 90.0
_FINAL = (FileExistsError, PermissionError, IsADirectoryError, NotImplementedError, ValueError)
"""What is no better a moment later."""
_FINAL_NAMES = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "NoRegionError",
    "ParamValidationError",
)
_UNKNOWN = ("NotImplemented", "InvalidArgument", "InvalidRequest", "501")
"""What stores say that know no condition of a put."""
REQUEST_TRIES = 5
_FOR_S3 = {"config_kwargs": {"read_timeout": 20, "retries": {"mode": "standard", "total_max_attempts": REQUEST_TRIES}}}
"""Each request, such as a part of a file, is tried again by its client, and a whole file here: not by s3fs besides."""

T = TypeVar("T")


@dataclass(frozen=True)
class ObjectEntry(Entry):
    """What has a checkpoint's name in an object store. `sizes`: of its objects, by name.

    `path` is where it comes to lie when it is copied to a folder, `url` where it is.
    """

    url: str = field(kw_only=True)
    sizes: dict[str, int] = field(kw_only=True)

    @property
    def where(self) -> str:
        return self.url

    @property
    def in_folder(self) -> bool:
        return False

    @property
    def was_committed(self) -> bool:
        return MANIFEST in self.sizes

    @property
    def may_go(self) -> bool:
        # Objects without a manifest that can be read may be of anybody.
        return self.manifest is not None and not (self.complete and PINNED in self.sizes)

    def record(self) -> Record:
        # No copy is there that was not read back.
        pinned = "pinned when it was copied" if PINNED in self.sizes else ""
        return replace(super().record(), verified=True, pinned=pinned)


class ObjectBackend:
    """Checkpoints under a prefix of an object store. Several threads may use one. Raises: ConfigError."""

    attempts = 6
    """How often something is tried."""
    first_seconds = 0.2
    """How long is waited before the second attempt; before each further one, three times as long."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        protocol, _, rest = self.url.partition("://")
        if not rest or rest.startswith("/"):
            raise ConfigError(f"{url} names no bucket: give one, as in s3://bucket/prefix")
        try:
            import fsspec

            # An instance of our own: those that are shared keep the endpoint of whoever made them.
            for_s3 = _FOR_S3 if protocol == "s3" else {}
            self.fs, prefix = fsspec.core.url_to_fs(
                self.url, skip_instance_cache=True, use_listings_cache=False, **for_s3
            )
        except ImportError as error:
            raise ConfigError(
                f"{url}: what reads {protocol} is not installed ({error}): pip install 'ckptman[s3]', or the package "
                f"of fsspec for this store"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{url} is no address of an object store: {masked(str(error))}") from error
        if hasattr(self.fs, "retries"):
            self.fs.retries = 1
        self.where = self.url
        self.prefix = prefix.strip("/")

    def listing(self, below: str = "") -> dict[str, int]:
        """Names, below the prefix, and sizes of all objects there, from one listing.

        Raises: NotFoundError (no such bucket), RootError.
        """
        start = f"{self.prefix}/{below}".rstrip("/")

        def list_all() -> dict[str, Any]:
            self.fs.invalidate_cache()
            found: dict[str, Any] = self.fs.find(start, detail=True, withdirs=False)
            return found

        found = self.ask("listed", list_all, start)
        return {
            name[len(start) + 1 :]: int(info["size"])
            for name, info in ((name.lstrip("/"), info) for name, info in found.items())
            if name.startswith(f"{start}/") and not name.endswith("/")
        }

    def list(self, *, abandoned: bool = False, step: int | None = None, until: Until | None = None) -> list[Entry]:
        return list(self._found(abandoned))

    def look(self, *, abandoned: bool = False) -> Sequence[ObjectEntry]:
        """All checkpoints, in order of commit; those with no readable manifest first.

        `abandoned`: also those that a rollback left behind.

        Raises: NotFoundError (there is nothing under this prefix), RootError, CorruptError (what was abandoned cannot
        be told).
        """
        listing = self.listing()
        if not listing:
            raise NotFoundError(f"there is nothing under {self.url}: check bucket, prefix and endpoint")
        left = abandoned_by(self.rollbacks(listing))
        folders: dict[str, dict[str, int]] = {}
        for name, size in listing.items():
            folder, slash, rest = name.partition("/")
            parsed = parse_step(folder)
            if slash and parsed is not None and parsed.kind == "step":
                folders.setdefault(folder, {})[rest] = size
        names = sorted(folders)
        entries: list[ObjectEntry] = []

        def look_at(number: int, scratch: memoryview) -> None:
            entry = self._entry(names[number], folders[names[number]])
            why = left.get(entry.identity, "") if left and entry.complete else ""
            if abandoned or not why:
                entries.append(replace(entry, abandoned=why))

        share_out(len(names), look_at, threads=_THREADS, scratch_bytes=0)
        return sorted(entries, key=commit_order)

    def rollbacks(self, listing: Mapping[str, int] | None = None) -> Sequence[Rollback]:
        """The rollbacks that are written down here. `listing`: of all that is here, where there is one.

        Raises: RootError, CorruptError, FormatVersionError.
        """
        if listing is None:
            listing = {f"{DOT}/{name}": size for name, size in self.listing(DOT).items()}
        names = sorted(name for name in listing if name.startswith(f"{DOT}/rollback-"))
        for name in names:
            if listing[name] > MOST_BYTES:
                raise CorruptError(
                    f"{self.url}/{name} has {listing[name]} bytes, and no more than {MOST_BYTES} can be right: it is "
                    f"no rollback that ckptman wrote; remove it"
                )
        return [parse_rollback_file(f"{self.url}/{name}", self.read(name, 0, listing[name])) for name in names]

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return a range of an object. Raises: NotFoundError, RootError."""

        def get() -> bytes:
            data: bytes = self.fs.cat_file(f"{self.prefix}/{name}", start=offset, end=offset + size)
            if len(data) != size:
                raise OSError(errno.EIO, f"{len(data)} bytes came instead of {size}")
            return data

        return self.ask("read", get, name) if size else b""

    def read_whole(self, name: str) -> bytes | None:
        """Return all of a small object; None where there is none. Raises: RootError."""
        try:
            data: bytes = self.ask("read", lambda: self.fs.cat_file(f"{self.prefix}/{name}"), name)
        except NotFoundError:
            return None
        return data

    def write(self, name: str, data: bytes) -> None:
        """Put an object, as a whole. Raises: RootError."""
        self.ask("written", lambda: self.fs.pipe_file(f"{self.prefix}/{name}", data), name)

    def create(self, name: str, data: bytes) -> bool:
        """Put an object where there is none; whether that was so. A store that cannot tell takes it in any case.

        Raises: RootError.
        """
        path = f"{self.prefix}/{name}"

        def put() -> bool:
            try:
                self.fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                code = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code", "")
                if code == "PreconditionFailed":
                    return False
                if code not in _UNKNOWN:
                    raise
                self.fs.pipe_file(path, data)
            return True

        return self.ask("written", put, name)

    def remove(self, name: str) -> None:
        """Remove an object; one that is gone is no error. Raises: RootError."""
        with contextlib.suppress(NotFoundError):
            self.ask("removed", lambda: self.fs.rm_file(f"{self.prefix}/{name}"), name)

    def open(self, entry: Entry) -> CopySource:
        from ckptman.storage.catalog.backends.object_source import (
            ObjectSource,  # numpy, which a listing can do without
        )

        return ObjectSource(self, entry)

    def receive(self, facts: SourceInfo) -> AbstractContextManager[CopyDraft]:
        from ckptman.storage.catalog.backends.object_draft import ObjectDraft

        draft = ObjectDraft(self, facts)
        self.copy_rollbacks(facts.rollbacks)  # first: what was abandoned there must not be the newest here
        return contextlib.nullcontext(draft)

    def reading(self, entry: Entry, what: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def read_note(self, name: str) -> bytes | None:
        return self.read_whole(f"{DOT}/{name}")

    def create_note(self, name: str, data: bytes) -> bool:
        return self.create(f"{DOT}/{name}", data)

    def write_note(self, name: str, data: bytes) -> None:
        self.write(f"{DOT}/{name}", data)

    def copy_rollbacks(self, rollbacks: Sequence[Rollback]) -> None:
        known = {each.id for each in self.rollbacks()} if rollbacks else set[str]()
        for each in rollbacks:
            if each.id not in known:
                self.write(f"{DOT}/rollback-{each.id}.json", each.to_json())

    def make_tier(self) -> None:
        """Nothing: a prefix is made by what is put there."""

    def check_there(self) -> None:
        """Nothing: who lists is told."""

    def settle(self) -> None:
        """Nothing: an object that is there is durable."""

    def prune(self, policy: RetentionPolicy | None, is_meant: Callable[[Sequence[Record]], bool]) -> None:
        if policy is None:
            return
        there = self._found(abandoned=True)
        for entry in there:
            if REMOVING in entry.sizes and not entry.was_committed:  # by a prune that was killed
                self._delete(entry)
        entries = [entry for entry in there if entry.complete]
        # Of two that share a number each gets a verdict.
        records = [replace(entry.record(), sequence=number) for number, entry in enumerate(entries, 1)]
        if not is_meant(records):
            return
        for verdict in plan(records, policy, now_seconds=time.time()):
            if not verdict.keep:
                self._delete(entries[verdict.record.sequence - 1])

    def ask(self, done: str, call: Callable[[], T], name: str, most_seconds: float = _MOST_SECONDS) -> T:
        """Ask the store for something, again where it is busy or away, but not after `most_seconds`.

        Raises: NotFoundError, RootError.
        """
        wait, begun = self.first_seconds, time.monotonic()
        attempt = 0
        while True:
            attempt += 1
            try:
                return call()
            except CkptmanError:
                raise
            except FileNotFoundError as error:
                why = plain(masked(str(error)))
                raise NotFoundError(
                    f"{self.url}: {plain(name)} is not there ({why}): check bucket, prefix and endpoint"
                ) from error
            except Exception as error:
                final = isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES
                # What is silent takes long to fail: after a while it is tried no more, but twice in any case.
                late = attempt > 1 and time.monotonic() - begun > most_seconds
                if final or late or attempt >= self.attempts:
                    raise self._failure(done, name, error, attempt) from error
            time.sleep(wait * random.uniform(0.5, 1.5))
            wait *= 3

    def _delete(self, entry: Entry) -> None:
        """Remove a checkpoint, or what is left of one that was being removed. Raises: RootError."""
        name = entry.path.name
        self.write(f"{name}/{REMOVING}", b"{}\n")
        # The manifest first, from then on it is no checkpoint; and what tells that last.
        for each in (MANIFEST, *sorted(self.listing(name).keys() - {MANIFEST, REMOVING}), REMOVING):
            self.remove(f"{name}/{each}")

    def _found(self, abandoned: bool) -> Sequence[ObjectEntry]:
        try:
            return self.look(abandoned=abandoned)
        except NotFoundError:  # nothing below a prefix: it is made by what is put there
            return []

    def _entry(self, name: str, sizes: dict[str, int]) -> ObjectEntry:
        url = f"{self.url}/{name}"
        found = ObjectEntry(int(name.rpartition("-")[2]), Path(url), None, url=url, sizes=sizes, beside=frozenset())
        if MANIFEST not in sizes:
            return replace(found, problem="it has no manifest.json")
        if sizes[MANIFEST] > MOST_BYTES:
            return replace(found, problem="its manifest.json is too large to be one")
        try:
            manifest = parse_manifest(f"{url}/{MANIFEST}", self.read(f"{name}/{MANIFEST}", 0, sizes[MANIFEST]))
        except NotFoundError:
            return replace(found, problem="it was removed meanwhile")
        except FormatVersionError as error:
            why = f"format version {error.found} is newer than this ckptman"
            return replace(found, problem=why, newer_format=error)
        except CorruptError as error:
            return replace(found, problem=str(error))
        problem = f"its manifest is of step {manifest.step}" if manifest.step != found.step else None
        return replace(found, manifest=manifest, problem=problem or size_problem(manifest, sizes))

    def _failure(self, done: str, name: str, error: Exception, attempts: int) -> RootError:
        times = f" {attempts} times" if attempts > 1 else ""
        why = plain(masked(getattr(error, "strerror", None) or str(error) or type(error).__name__))
        return RootError(
            getattr(error, "errno", None) or errno.EIO,
            f"{self.url}: {plain(name)} could not be {done}{times} ({type(error).__name__}: {why}). That says nothing "
            f"of what is there: check endpoint, network and credentials, and try again",
        )


def size_problem(manifest: Manifest, sizes: Mapping[str, int]) -> str | None:
    """Return what is wrong with the objects that a manifest names, by their sizes; None where all are right."""
    for name, record in manifest.files.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != record.bytes:
            return f"{name} has {sizes[name]} bytes instead of {record.bytes}"
    return None
