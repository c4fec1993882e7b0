"""A copy on its way into an object store: objects under their final names, which count once the manifest is there.

`copying.json` says whose objects they are meanwhile, and is put where there is none. Two copies of the same checkpoint
at a time put the same bytes twice, and harm nothing. A file is put from its first byte to its last, in parts where the
store has such; several files are put at a time.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from ckptman.errors import CkptmanError, ExistsError, plain
from ckptman.storage.catalog.backends.copy_draft import BusyCopyingError, Incoming, NotReadBackError
from ckptman.storage.catalog.backends.copy_source import Reading, SourceInfo
from ckptman.storage.catalog.backends.object_source import ObjectReading
from ckptman.storage.catalog.backends.object_store import COPYING, REMOVING, ObjectBackend, size_problem
from ckptman.storage.catalog.overwrite import are_replaceable
from ckptman.storage.catalog.pins import PINNED
from ckptman.storage.format.manifest import MOST_BYTES, parse_manifest
from ckptman.storage.format.paths import MANIFEST
from ckptman.storage.io.threads import STRIDE_BYTES

PART_BYTES = 4 * STRIDE_BYTES
MOST_PARTS = 10_000
"""S3 takes no more for one object."""


class ObjectDraft:
    """See `CopyDraft`."""

    in_place, is_remote = True, True

    def __init__(self, place: ObjectBackend, facts: SourceInfo) -> None:
        self._place, self._facts, self._name = place, facts, facts.name
        self._judged: dict[str, int] = {}
        self._replaces = False
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

    def put(self, file: Incoming, threads: int) -> None:
        path = f"{self._name}/{file.name}"
        # However long a file takes: each request of it has a limit of its own.
        self._place.ask("written", partial(self._put_once, path, file), path, math.inf)

    def _put_once(self, path: str, file: Incoming) -> None:
        part = max(PART_BYTES, -(-file.size_bytes // (MOST_PARTS // 2)))
        stream: Any = self._place.fs.open(f"{self._place.prefix}/{path}", "wb", block_size=part)
        try:
            # One thread, so from front to back; and checked before there is an object.
            file.pass_to(_Sink(stream), 1)
            with suppress(FileNotFoundError):  # it was done, and the answer was lost: it is read back anyway
                stream.close()
        except BaseException:
            with suppress(Exception):
                stream.closed = True  # to close it would make an object of what there is
            with suppress(Exception):
                stream.discard()
            raise

    def uncache(self, names: Iterable[str], *, final: bool, flush: bool) -> bool:
        return False

    def open(self, name: str, *, final: bool) -> Reading:
        return ObjectReading(self._place, f"{self._name}/{name}")

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


class _Sink:
    """An object that is being put."""

    is_direct = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: memoryview, offset: int) -> None:
        self._stream.write(bytes(data))

    def flush(self) -> None:
        """Nothing: it is durable once it is there."""
