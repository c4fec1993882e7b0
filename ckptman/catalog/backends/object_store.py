"""Checkpoints in an object store, through fsspec: S3, and whatever else it knows.

A checkpoint is there if, and only if, its `manifest.json` is, which is put last, and the objects that it names have the
sizes it says: an object appears as a whole, so nothing is renamed. One listing tells all of that. Errors of the store
are tried again for a while, and then raised: what cannot be listed is never "no checkpoints". Torch-free.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ckptman.catalog.rollback_records import Rollback, abandoned_by, parse_rollback_file
from ckptman.errors import (
    CkptmanError,
    ConfigError,
    CorruptError,
    FormatVersionError,
    NotFoundError,
    RootError,
    masked,
    masked_address,
    plain,
)
from ckptman.format.manifest import MOST_BYTES, Manifest, parse_manifest
from ckptman.format.paths import DOT, MANIFEST, parse_step
from ckptman.io.workers import share_out

_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]+)://?(?P<rest>[^/].*)", re.ASCII)
_MEANT = re.compile(r"[a-z][\w+.-]+:/{2,}|s3:", re.ASCII | re.IGNORECASE)
REMOVING = "removing.json"
"""In a checkpoint that is being removed: what is left without a manifest is nobody's."""
_THREADS = 16
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
_FOR_S3 = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"total_max_attempts": 1}}}
"""It is tried again here, and in one place only."""

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """How often something is tried, and how long is waited in between: each time `factor` times as long.

    What is silent takes long to fail, so after `most_seconds` it is tried no more; but twice in any case.
    """

    attempts: int = 6
    first_seconds: float = 0.2
    factor: float = 3.0
    most_seconds: float = 90.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def ends(self, attempt: int, seconds: float) -> bool:
        """Whether so many attempts, in so many seconds, are enough."""
        return attempt >= self.attempts or (attempt > 1 and seconds > self.most_seconds)


USUAL = Patience()


@dataclass(frozen=True)
class ObjectEntry:
    """What has a checkpoint's name in an object store. Complete if `problem` is None. `sizes`: of its objects.

    `abandoned`: which rollback left it behind.
    """

    step: int
    name: str
    url: str
    manifest: Manifest | None
    data: bytes
    sizes: dict[str, int]
    problem: str | None = None
    newer_format: FormatVersionError | None = None
    abandoned: str = ""

    @property
    def path(self) -> str:
        return self.url

    @property
    def complete(self) -> bool:
        return self.problem is None

    def require_manifest(self) -> Manifest:
        """The manifest. Raises: FormatVersionError, CorruptError if this is no complete checkpoint."""
        if self.newer_format is not None:
            raise self.newer_format
        if self.manifest is None or self.problem is not None:
            raise CorruptError(f"{self.url} is not a complete checkpoint: {self.problem}. Name another step")
        return self.manifest


def find_url(written: str) -> str | None:
    """The address of an object store, as in `s3://bucket/prefix`; None where this is a path. A path of Python has lost
    one of the slashes.

    Raises: ConfigError where nothing is written, or what is meant for an address and is none, or has a secret in it.
    """
    text = written.strip()
    if not text:
        raise ConfigError("a path is empty where a folder or an address is meant: is a variable not set?")
    if (_URL.match(text) or _MEANT.match(text)) and masked_address(text) != text:
        raise ConfigError(
            f"{plain(masked_address(text))} has a secret in it, and an address is shown and stored: take it out, and "
            f"give credentials in the environment, such as AWS_PROFILE, or in the file of the store, such as ~/.aws"
        )
    found = _URL.fullmatch(text)
    if found and found["protocol"] != "file":
        return f"{found['protocol']}://{found['rest'].rstrip('/')}"
    if _MEANT.match(text):
        raise ConfigError(
            f"{plain(text)} is no address such as s3://bucket/prefix: correct it (is a variable not set?). A folder is "
            f"named without a protocol, and one that has this very name is ./{plain(text)}"
        )
    return None


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raises: ConfigError where a folder to save to is the address of an object store."""
    if (url := find_url(os.fspath(path))) is not None:
        raise ConfigError(
            f"{plain(url)} is an object store, and saves go to a folder: save to one, and have its checkpoints copied "
            f"there by tiers=[Tier({url!r})], or by ckptman copy"
        )


class ObjectBackend:
    """Checkpoints under a prefix of an object store. Several threads may use one. Raises: ConfigError."""

    def __init__(self, url: str, patience: Patience | None = None, **options: Any) -> None:
        self.url, self._patience = url.rstrip("/"), patience or USUAL
        protocol, _, rest = self.url.partition("://")
        if not rest or rest.startswith("/"):
            raise ConfigError(f"{url} names no bucket: give one, as in s3://bucket/prefix")
        try:
            import fsspec

            # An instance of our own: those that are shared keep the endpoint of whoever made them.
            options = {
                "skip_instance_cache": True,
                "use_listings_cache": False,
                **(_FOR_S3 if protocol == "s3" else {}),
                **options,
            }
            self.fs, prefix = fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            raise ConfigError(
                f"{url}: what reads {protocol} is not installed ({error}): pip install 'ckptman[s3]', or the package "
                f"of fsspec for this store"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{url} is no address of an object store: {masked(str(error))}") from error
        self.prefix = prefix.strip("/")
        if hasattr(self.fs, "retries"):
            self.fs.retries = 1

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

    def look(self, *, abandoned: bool = False) -> list[ObjectEntry]:
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
        share_out(
            len(names),
            lambda number, scratch: entries.append(self._entry(names[number], folders[names[number]])),
            threads=_THREADS,
            scratch_bytes=0,
        )
        entries = [
            replace(each, abandoned=left.get(each.require_manifest().identity, "")) if left and each.complete else each
            for each in entries
        ]
        return sorted((each for each in entries if abandoned or not each.abandoned), key=_commit_order)

    def rollbacks(self, listing: Mapping[str, int] | None = None) -> list[Rollback]:
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
        """A range of an object. Raises: NotFoundError, RootError."""

        def get() -> bytes:
            data: bytes = self.fs.cat_file(f"{self.prefix}/{name}", start=offset, end=offset + size)
            if len(data) != size:
                raise OSError(errno.EIO, f"{len(data)} bytes came instead of {size}")
            return data

        return self.ask("read", get, name) if size else b""

    def read_whole(self, name: str) -> bytes | None:
        """All of a small object; None where there is none. Raises: RootError."""

        def get() -> bytes:
            data: bytes = self.fs.cat_file(f"{self.prefix}/{name}")
            return data

        try:
            return self.ask("read", get, name)
        except NotFoundError:
            return None

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
        try:
            self.ask("removed", lambda: self.fs.rm_file(f"{self.prefix}/{name}"), name)
        except NotFoundError:
            pass

    def delete(self, entry: ObjectEntry) -> None:
        """Remove a checkpoint, or what is left of one that was being removed. Raises: RootError."""
        self.write(f"{entry.name}/{REMOVING}", b"{}\n")
        # The manifest first, from then on it is no checkpoint; and what tells that last.
        for name in (MANIFEST, *sorted(entry.sizes.keys() - {MANIFEST, REMOVING}), REMOVING):
            self.remove(f"{entry.name}/{name}")

    def ask(self, done: str, call: Callable[[], T], name: str) -> T:
        """Ask the store for something, again where it is busy or away. Raises: NotFoundError, RootError."""
        wait, begun = self._patience.first_seconds, self._patience.clock()
        for attempt in range(1, self._patience.attempts + 1):
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
                if final or self._patience.ends(attempt, self._patience.clock() - begun):
                    raise self._failure(done, name, error, attempt) from error
            self._patience.sleep(wait * random.uniform(0.5, 1.5))
            wait *= self._patience.factor
        raise AssertionError("a last attempt ends")

    def _entry(self, name: str, sizes: dict[str, int]) -> ObjectEntry:
        step = int(name.rpartition("-")[2])
        url = f"{self.url}/{name}"
        if MANIFEST not in sizes:
            return ObjectEntry(step, name, url, None, b"", sizes, "it has no manifest.json")
        if sizes[MANIFEST] > MOST_BYTES:
            return ObjectEntry(step, name, url, None, b"", sizes, "its manifest.json is too large to be one")
        try:
            data = self.read(f"{name}/{MANIFEST}", 0, sizes[MANIFEST])
            manifest = parse_manifest(f"{url}/{MANIFEST}", data)
        except NotFoundError:
            return ObjectEntry(step, name, url, None, b"", sizes, "it was removed meanwhile")
        except FormatVersionError as error:
            why = f"format version {error.found} is newer than this ckptman"
            return ObjectEntry(step, name, url, None, b"", sizes, why, error)
        except CorruptError as error:
            return ObjectEntry(step, name, url, None, b"", sizes, str(error))
        return ObjectEntry(step, name, url, manifest, data, sizes, _problem(step, manifest, sizes))

    def _failure(self, done: str, name: str, error: Exception, attempts: int) -> RootError:
        times = f" {attempts} times" if attempts > 1 else ""
        why = plain(masked(getattr(error, "strerror", None) or str(error) or type(error).__name__))
        return RootError(
            getattr(error, "errno", None) or errno.EIO,
            f"{self.url}: {plain(name)} could not be {done}{times} ({type(error).__name__}: {why}). That says nothing "
            f"of what is there: check endpoint, network and credentials, and try again",
        )


def _problem(step: int, manifest: Manifest, sizes: dict[str, int]) -> str | None:
    if manifest.step != step:
        return f"its manifest is of step {manifest.step}"
    for name, record in manifest.files.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != record.bytes:
            return f"{name} has {sizes[name]} bytes instead of {record.bytes}"
    return None


def _commit_order(entry: ObjectEntry) -> tuple[int, float, int]:
    manifest = entry.manifest
    return (manifest.sequence, manifest.time_seconds, entry.step) if manifest else (0, 0.0, entry.step)
