"""A copy on its way into an object store: objects under their final names, which count once the manifest is there.

`copying.json` says whose objects they are meanwhile, and is put where there is none. Two copies of the same checkpoint
at a time put the same bytes twice, and harm nothing. On S3 a large file is put in parts, several at a time, each tried
again by itself. On other stores of fsspec it is put from its first byte to its last.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from ckptman.errors import CkptmanError, ConfigError, ExistsError, NotFoundError, plain
from ckptman.storage.catalog.backends.drafts import BusyCopyingError, NotReadBackError, Writing
from ckptman.storage.catalog.backends.object_source import THREADS, scan_objects
from ckptman.storage.catalog.backends.object_store import COPYING, REMOVING, ObjectBackend, size_problem
from ckptman.storage.catalog.backends.source import Done, Finish, SourceInfo
from ckptman.storage.catalog.overwrite import are_replaceable
from ckptman.storage.catalog.pins import PINNED
from ckptman.storage.format.manifest import MOST_BYTES, parse_manifest
from ckptman.storage.format.paths import MANIFEST
from ckptman.storage.io.threads import STRIDE_BYTES, stride_of

PART_BYTES = 4 * STRIDE_BYTES
MOST_PARTS = 10_000
"""S3 takes no more for one object."""


class ObjectDraft:
    """See `CopyDraft`."""

    in_place = True

    def __init__(self, place: ObjectBackend, facts: SourceInfo) -> None:
        if facts.manifest is None:
            raise ConfigError(
                f"{facts.where} has no manifest, and in an object store that is what makes a checkpoint: only those "
                f"of ckptman are copied there"
            )
        self._place, self._facts, self._name = place, facts, facts.name
        self._has_parts = hasattr(place.fs, "call_s3")
        self._judged: dict[str, int] = {}
        self._replaces = False
        self.writers, self.in_order = THREADS, not self._has_parts
        self.where = self.draft = f"{place.url}/{facts.name}"

    def difference(self) -> str | None:
        there = self._judged = self._place.listing(self._name)
        if MANIFEST not in there:
            return None
        if not self._has_manifest(there):
            return "is there, and is another checkpoint"
        wrong = self._problem(there)
        return f"is there, and is not complete: {wrong}" if wrong else ""

    def may_replace(self) -> bool:
        there = self._place.listing(self._name)
        names = {name for name in there if name} - {COPYING, REMOVING}
        is_noted = not there.keys().isdisjoint({COPYING, REMOVING})

        def read() -> object:
            size, name = there.get(MANIFEST, 0), f"{self._name}/{MANIFEST}"
            return parse_manifest(name, self._place.read(name, 0, size) if size <= MOST_BYTES else b"")

        return are_replaceable(names, read, is_noted=is_noted)

    def target_is_abandoned(self) -> bool:
        return False

    def is_verified(self) -> bool:
        return False  # objects have no note that says when they were read, and by whom

    def note_verified_copy(self) -> None:
        """Nothing: see `is_verified`."""

    def settle(self) -> Sequence[str]:
        if self._facts.pinned is not None and PINNED not in self._place.listing(self._name):
            self._put(PINNED, self._facts.pinned)
        if self._is_noted():  # the note of another checkpoint is about to replace this one
            self._place.remove(f"{self._name}/{COPYING}")
        return []

    @contextmanager
    def claimed(self, replace: bool) -> Iterator[None]:
        if replace and not self.may_replace():
            found = min(self._place.listing(self._name), default="")
            raise ExistsError(
                f"{self.where} has objects in it that are of no checkpoint, such as {plain(found)}: move them away, or "
                f"copy to another prefix"
            )
        self._replaces = replace
        self._begin()
        yield

    def tidy(self) -> dict[str, int]:
        # What was judged, and not what is there by now: another copy of the same checkpoint may have ended meanwhile.
        there = self._judged
        if COPYING not in there:  # there was a manifest when this copy began, which went before it was judged
            self._begin()
        if MANIFEST in there:
            self._place.remove(f"{self._name}/{MANIFEST}")  # first, so that no mixture of the two ever counts
        for name in sorted(there.keys() - {MANIFEST, COPYING, *self._facts.sizes}):
            self._place.remove(f"{self._name}/{name}")
        return {name: size for name, size in self._facts.sizes.items() if there.get(name) == size}

    def piece_bytes(self) -> int:
        least = max(PART_BYTES, -(-max(self._facts.sizes.values(), default=0) // (MOST_PARTS // 2)))
        return stride_of(self._facts.block_bytes, least)

    def writer(self, name: str, size: int) -> Writing:
        path, piece = f"{self._name}/{name}", self.piece_bytes()
        return _Whole(self._place, path) if size <= piece else _Parts(self._place, path, piece)

    def put_in_order(self, name: str, pieces: Callable[[], Iterator[memoryview]]) -> None:
        path = f"{self._name}/{name}"
        self._place.ask("written", partial(self._put_once, path, pieces), path)

    def _put_once(self, path: str, pieces: Callable[[], Iterator[memoryview]]) -> None:
        file: Any = self._place.fs.open(f"{self._place.prefix}/{path}", "wb", block_size=PART_BYTES)
        try:
            for piece in pieces():
                file.write(bytes(piece))
        except BaseException:
            # To close it would make an object of what there is.
            with suppress(Exception):
                file.discard()
            raise
        file.close()

    def scan(
        self, sizes: Mapping[str, int], *, final: bool, finish: Finish, threads: int | None, done: Done
    ) -> Sequence[str]:
        scan_objects(self._place, self._facts, sizes, finish, threads, done)
        return []

    def uncache(self, *, final: bool) -> bool:
        return False

    def publish(self, replace: bool) -> str:
        if self._facts.pinned is not None:
            self._put(PINNED, self._facts.pinned)
        self._check_ours()
        self._put(MANIFEST, self._facts.data)
        self._place.remove(f"{self._name}/{COPYING}")
        return self.where

    def abandon(self) -> None:
        with suppress(CkptmanError):
            if not self._is_noted():  # somebody else's by now
                return
            there = self._place.listing(self._name)
            # The note last: as long as there are objects, they are ours. With a manifest there they are a checkpoint.
            ours = there.keys() - {COPYING} if COPYING in there and MANIFEST not in there else ()
            for name in (*ours, COPYING):
                self._place.remove(f"{self._name}/{name}")

    def _begin(self) -> None:
        """Put the note of whose objects these are; where one is there it has to be ours, or is taken over.

        Raises: ExistsError, RootError.
        """
        path = f"{self._name}/{COPYING}"
        note = {"tag": self._facts.tag, "host": socket.gethostname(), "pid": os.getpid(), "time_seconds": time.time()}
        data = json.dumps(note).encode()
        if self._replaces:
            self._place.write(path, data)
            return
        there = self._place.listing(self._name)
        if MANIFEST in there:  # another copy ended this very moment: whoever begins looks at that again
            return
        if there and COPYING not in there:
            raise ExistsError(
                f"{self.where} has objects in it that are of no copy, such as {plain(min(there))}: copy to another "
                f"prefix, or move them away; --overwrite replaces only what is left of a checkpoint"
            )
        if (COPYING in there or not self._place.create(path, data)) and not self._is_noted():
            raise ExistsError(
                f"{self.where} has objects of another checkpoint in it, of which a copy is at work or was interrupted: "
                f"let that one end, or say --overwrite to replace them"
            )

    def _is_noted(self) -> bool:
        return bool(self._note().get("tag") == self._facts.tag)

    def _note(self) -> dict[str, Any]:
        """Whose objects are being put under this name, as `_begin` wrote it; empty where nobody says."""
        try:
            note = json.loads(self._place.read_whole(f"{self._name}/{COPYING}") or b"{}")
        except (ValueError, RecursionError):
            return {}
        return note if isinstance(note, dict) else {}

    def _problem(self, there: dict[str, int]) -> str | None:
        assert self._facts.manifest is not None
        return size_problem(self._facts.manifest, there)

    def _has_manifest(self, there: dict[str, int]) -> bool:
        data = self._facts.data
        return there.get(MANIFEST) == len(data) and self._place.read(f"{self._name}/{MANIFEST}", 0, len(data)) == data

    def _check_ours(self) -> None:
        """What was proved here is still what this copy put: the last look before the manifest. Raises: BusyError."""
        there, note = self._place.listing(self._name), self._note()
        # With the manifest there, another copy of the same checkpoint was quicker.
        is_ours = note.get("tag") == self._facts.tag or self._has_manifest(there)
        if is_ours and not self._problem(there):
            return
        host, pid = str(note.get("host", "")), note.get("pid", 0)
        by = f", by a copy of another checkpoint (host {host}, pid {pid})" if host else ""
        text = (
            f"{self.where}: its objects were removed or replaced while they were put{by}, so the copy does not count: "
            f"let the other one end, and copy again"
        )
        raise BusyCopyingError(self.where, host, pid, None, text)

    def _put(self, name: str, data: bytes) -> None:
        """Put what is beside the files, and read it back. Raises: RootError."""
        self._place.write(f"{self._name}/{name}", data)
        if self._place.read(f"{self._name}/{name}", 0, len(data)) != data:
            self._place.remove(f"{self._name}/{name}")
            raise NotReadBackError(self.where, (f"{name} has other bytes",))


class _Whole:
    """An object that is put by one call."""

    buffered_because = ""

    def __init__(self, place: ObjectBackend, name: str) -> None:
        self._place, self._name, self._data = place, name, b""

    def write(self, data: memoryview, offset: int, scratch: memoryview) -> None:
        self._data = bytes(data)

    def finish(self) -> None:
        self._place.write(self._name, self._data)

    def close(self) -> None:
        self._data = b""


class _Parts:
    """An object that is put in parts. It appears when its last part has come."""

    buffered_because = ""

    def __init__(self, place: ObjectBackend, name: str, part: int) -> None:
        self._place, self._name, self._part = place, name, part
        self._upload: str = self._ask("create_multipart_upload")["UploadId"]
        self._tags: dict[int, str] = {}

    def write(self, data: memoryview, offset: int, scratch: memoryview) -> None:
        number = offset // self._part + 1
        answer = self._ask("upload_part", PartNumber=number, UploadId=self._upload, Body=bytes(data))
        self._tags[number] = answer["ETag"]

    def finish(self) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._tags.items())]
        with suppress(NotFoundError):  # it was done, and the answer was lost: what is there is read back anyway
            self._ask("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
        self._upload = ""

    def close(self) -> None:
        if self._upload:
            with suppress(CkptmanError):
                self._ask("abort_multipart_upload", UploadId=self._upload)
        self._upload = ""

    def _ask(self, method: str, **arguments: Any) -> Any:
        bucket, key, _ = self._place.fs.split_path(f"{self._place.prefix}/{self._name}")
        call = self._place.fs.call_s3
        return self._place.ask("written", lambda: call(method, Bucket=bucket, Key=key, **arguments), self._name)
