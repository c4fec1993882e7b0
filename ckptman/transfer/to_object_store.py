"""Copies into an object store, and what a copy out of one reads. Torch-free.

Objects are put under the name of the checkpoint, read back, and its manifest after them: until then nothing counts.
`copying.json` says whose objects they are meanwhile, and is put where there is none. An attempt after one that was
interrupted puts those that are missing or wrong. Two copies of the same checkpoint at a time put the same bytes twice,
and harm nothing.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from ckptman.catalog.backends.object_store import REMOVING, ObjectBackend, ObjectEntry
from ckptman.catalog.pins import PINNED
from ckptman.catalog.replaceable import has_data, is_left, is_of_a_checkpoint
from ckptman.catalog.tiers import hand_on_to
from ckptman.errors import (
    CkptmanError,
    ConfigError,
    CorruptError,
    ExistsError,
    FormatVersionError,
    NotFoundError,
    plain,
)
from ckptman.format.manifest import MOST_BYTES, parse_manifest
from ckptman.format.paths import MANIFEST, digests_name
from ckptman.io.checksums import DIGEST_BYTES, Digests, digest_of_blocks, digests_bytes
from ckptman.io.workers import STRIDE_BYTES, share_out, stride_of
from ckptman.transfer.object_put import THREADS, put_files
from ckptman.transfer.partial_copy import BusyCopyingError
from ckptman.transfer.progress import Meter, Phase
from ckptman.transfer.read_back import Means, NotReadBackError, verify
from ckptman.transfer.source import Facts, GoneError, Original, Reading, SourceError, of_source
from ckptman.transfer.to_folder import Copied

COPYING = "copying.json"
_MOST_BESIDE_BYTES = 1024 * 1024


class ObjectOriginal:
    """A checkpoint in an object store, as it was listed. Raises: CorruptError, FormatVersionError, RootError."""

    readers = THREADS

    def __init__(self, place: ObjectBackend, entry: ObjectEntry) -> None:
        self._place, self._entry = place, entry
        manifest = entry.require_manifest()
        beside = {MANIFEST, PINNED, COPYING, *manifest.files}
        self.facts = Facts(
            where=entry.url,
            name=entry.name,
            manifest=manifest,
            sizes={name: record.bytes for name, record in manifest.files.items()},
            data=entry.data,
            tag=xxh3_128_hexdigest(entry.data)[:16],
            block_bytes=manifest.block_bytes,
            pinned=_read_beside(place, entry.name, PINNED, entry.sizes),
            remarks=tuple(f"{name} is not in the manifest: it was not copied" for name in entry.sizes.keys() - beside),
            rollbacks=tuple(place.rollbacks()),
        )

    def open(self, name: str) -> Reading:
        return _ObjectReading(self._place, f"{self._entry.name}/{name}")

    def digests(self, name: str) -> Digests | None:
        files, block = self._entry.require_manifest().files, self.facts.block_bytes
        beside = digests_name(name)
        if beside is None or beside not in files:
            return None
        size = files[name].bytes
        blocks = self._place.read(
            f"{self._entry.name}/{beside}", 0, min(digests_bytes(size, block), files[beside].bytes)
        )
        # What is damaged itself tells nothing of others.
        return Digests(block, blocks, size) if xxh3_128_hexdigest(blocks) == files[name].digest else None

    def lost(self) -> CkptmanError | None:
        gone = GoneError(
            f"{self._entry.url} was removed, in part or as a whole, or put again, while it was copied: ckptman list "
            f"{self._place.url} shows what is left; copy again"
        )
        try:
            sizes = self._place.listing(self._entry.name)
            if any(sizes.get(name) != size for name, size in self.facts.sizes.items()):
                return gone
            data = self._place.read(f"{self._entry.name}/{MANIFEST}", 0, len(self._entry.data))
        except NotFoundError:
            return gone
        except CkptmanError:
            return None
        return None if data == self._entry.data else gone


class _ObjectReading:
    def __init__(self, place: ObjectBackend, name: str) -> None:
        self._place, self._name = place, name

    def read(self, offset: int, size: int, scratch: memoryview) -> memoryview:
        # Copied to where direct I/O can write it from.
        view = scratch[:size]
        view[:] = self._place.read(self._name, offset, size)
        return view

    def close(self) -> None:
        pass


def copy_to_objects(original: Original, place: ObjectBackend, means: Means) -> Copied:
    """Copy a checkpoint to an object store, read every byte of it back, and only then put its manifest.

    Raises: ConfigError (a checkpoint of others), ExistsError (something else is there), BusyError (a copy of another
    checkpoint took it over meanwhile), CorruptError (the original is damaged; what was put of it is removed),
    NotFoundError (the original was deleted meanwhile; the same), RootError (what was put stays).
    """
    facts, meter = original.facts, means.meter or Meter()
    if facts.manifest is None:
        raise ConfigError(
            f"{facts.where} has no manifest, and in an object store that is what makes a checkpoint: only those of "
            f"ckptman are copied there"
        )
    if facts.rollbacks:  # what was abandoned here must not be the newest there
        hand_on_to(place, facts.rollbacks, place.rollbacks())
    there = place.listing(facts.name)
    found = _already(original, place, there, means)
    if found is None:
        if MANIFEST in there:
            _check_original(facts, place, there, means, meter)
        _claim(place, facts, there, means.overwrite)
        before, there = there, place.listing(facts.name)
        if MANIFEST in there and MANIFEST not in before:  # another copy ended before this one had its note there
            try:
                found = _already(original, place, there, means)
            except ExistsError:
                place.remove(f"{facts.name}/{COPYING}")
                raise
    if found is not None:
        return found
    if MANIFEST in there:
        place.remove(f"{facts.name}/{MANIFEST}")  # first, so that no mixture of the two ever counts
    begun = time.monotonic()
    for name in sorted(there.keys() - {MANIFEST, COPYING, *facts.sizes}):
        place.remove(f"{facts.name}/{name}")
    try:
        same = [name for name, size in facts.sizes.items() if there.get(name) == size]
        good = _right(place, facts, same, means, meter, "looking")
        looked = time.monotonic()
        left = {name: size for name, size in facts.sizes.items() if name not in good}
        put_files(original, place, left, meter=meter, limit=means.limit, threads=means.threads)
        copied = time.monotonic()
        wrong = sorted(left.keys() - _right(place, facts, list(left), means, meter, "verifying"))
        if wrong:
            raise NotReadBackError(f"{place.url}/{facts.name}", tuple(f"{name} has other bytes" for name in wrong))
    except CkptmanError as error:
        lost = original.lost()
        if lost is not None or isinstance(error, CorruptError):
            with suppress(CkptmanError):
                _give_up(place, facts)
        if lost is not None:
            raise lost from error
        raise
    verified = time.monotonic()
    if facts.pinned is not None:
        _put(place, facts, PINNED, facts.pinned)
    _check_ours(place, facts)
    _put(place, facts, MANIFEST, facts.data)
    place.remove(f"{facts.name}/{COPYING}")
    return Copied(
        source=facts.where,
        path=f"{place.url}/{facts.name}",
        step=facts.manifest.step,
        files=len(facts.sizes),
        bytes=facts.bytes,
        already=False,
        written_bytes=sum(left.values()),
        copy_seconds=copied - looked,
        verify_seconds=looked - begun + verified - copied,  # each file was read in one of the two
        remarks=facts.remarks,
    )


def _already(original: Original, place: ObjectBackend, there: dict[str, int], means: Means) -> Copied | None:
    """The same checkpoint at the destination, all of it read again; None where nothing is in the way.

    Raises: ExistsError, RootError.
    """
    facts = original.facts
    if means.overwrite and not _may_be_replaced(place, facts, there):
        raise ExistsError(
            f"{place.url}/{facts.name} has objects in it that are of no checkpoint, such as {plain(min(there))}: move "
            f"them away, or copy to another prefix"
        )
    if MANIFEST not in there:
        return None
    begun = time.monotonic()
    problem = "" if _has_manifest(place, facts, there) else "is there, and is another checkpoint"
    if not problem:
        wrong = [name for name, size in facts.sizes.items() if there.get(name) != size]
        problem = f"is there, and is not complete: {wrong[0]}" if wrong else ""
    if not problem:  # objects have no note that says when they were read, and by whom
        names = sorted(facts.sizes)
        wrong = sorted(set(names) - _right(place, facts, names, means, means.meter or Meter(), "verifying"))
        problem = f"is damaged there: {wrong[0]} has other bytes" if wrong else ""
    if problem:
        if means.overwrite:
            return None
        raise ExistsError(
            f"{place.url}/{facts.name} {problem}: copy to another prefix, or say --overwrite to replace it"
        )
    if facts.pinned is not None and PINNED not in there:
        _put(place, facts, PINNED, facts.pinned)
    if _note(place, facts, there).get("tag") == facts.tag:  # that of another checkpoint is about to replace this one
        place.remove(f"{facts.name}/{COPYING}")
    return Copied(
        source=facts.where,
        path=f"{place.url}/{facts.name}",
        step=facts.manifest.step if facts.manifest else None,
        files=len(facts.sizes),
        bytes=facts.bytes,
        already=True,
        verify_seconds=time.monotonic() - begun,
        remarks=facts.remarks,
    )


def _may_be_replaced(place: ObjectBackend, facts: Facts, there: Mapping[str, int]) -> bool:
    """Whether what is there is a checkpoint, what is left of one, or of a copy. Raises: RootError."""
    names = {name for name in there if name} - {COPYING, REMOVING}
    is_noted = not there.keys().isdisjoint({COPYING, REMOVING})
    if not names or is_left(names) or (is_noted and is_of_a_checkpoint(names)):
        return True
    if there.get(MANIFEST, MOST_BYTES + 1) > MOST_BYTES:
        return False
    try:
        data = place.read(f"{facts.name}/{MANIFEST}", 0, there[MANIFEST])
        return bool(parse_manifest(f"{place.url}/{facts.name}/{MANIFEST}", data))
    except FormatVersionError:
        return has_data(names)
    except (CorruptError, NotFoundError):
        return False


def _claim(place: ObjectBackend, facts: Facts, there: Mapping[str, int], overwrite: bool) -> None:
    """Put the note of whose objects these are; where one is there it has to be ours. Raises: ExistsError, RootError."""
    where, name = f"{place.url}/{facts.name}", f"{facts.name}/{COPYING}"
    note = {"tag": facts.tag, "host": socket.gethostname(), "pid": os.getpid(), "time_seconds": time.time()}
    data = json.dumps(note).encode()
    if overwrite:
        place.write(name, data)
        return
    if there and COPYING not in there:
        raise ExistsError(
            f"{where} has objects in it that are of no copy, such as {plain(min(there))}: copy to another prefix, or "
            f"move them away; --overwrite replaces only what is left of a checkpoint"
        )
    if COPYING not in there and place.create(name, data):
        return
    if _note(place, facts, place.listing(facts.name)).get("tag") != facts.tag:
        raise ExistsError(
            f"{where} has objects of another checkpoint in it, of which a copy is at work or was interrupted: let that "
            f"one end, or say --overwrite to replace them"
        )


def _check_original(facts: Facts, place: ObjectBackend, there: Mapping[str, int], means: Means, meter: Meter) -> None:
    """Another checkpoint goes before what takes its place is there, so that has to be whole before it goes.

    Raises: CorruptError, SourceError.
    """
    if _has_manifest(place, facts, there):  # what is right of it stays
        return
    assert facts.manifest is not None
    with of_source(facts.where):
        report = verify(Path(facts.where), facts.manifest, means, meter)
    if report.good:
        return
    why = f"{facts.where} is not what was saved ({'; '.join((*report.problems, *report.unread)[:3])})"
    text = f"{why}, so it replaces nothing: copy another checkpoint"
    raise CorruptError(text) if report.damage else SourceError(errno.EIO, text)


def _check_ours(place: ObjectBackend, facts: Facts) -> None:
    """What was proved here is still what this copy put: the last look before the manifest. Raises: BusyError."""
    there = place.listing(facts.name)
    note = _note(place, facts, there)
    if all(there.get(name) == size for name, size in facts.sizes.items()) and (
        note.get("tag") == facts.tag or _has_manifest(place, facts, there)  # the latter: by another copy of the same
    ):
        return
    raise _TakenError(f"{place.url}/{facts.name}", str(note.get("host", "")), note.get("pid", 0))


def _give_up(place: ObjectBackend, facts: Facts) -> None:
    """Remove what was put, unless it is somebody else's by now. Raises: CkptmanError."""
    there = place.listing(facts.name)
    if MANIFEST in there or _note(place, facts, there).get("tag") != facts.tag:
        return
    for name in (*(there.keys() - {COPYING}), COPYING):  # as long as there are objects, they are known to be ours
        place.remove(f"{facts.name}/{name}")


def _put(place: ObjectBackend, facts: Facts, name: str, data: bytes) -> None:
    """Put what is beside the files, and read it back. Raises: RootError."""
    place.write(f"{facts.name}/{name}", data)
    if place.read(f"{facts.name}/{name}", 0, len(data)) != data:
        place.remove(f"{facts.name}/{name}")
        raise NotReadBackError(f"{place.url}/{facts.name}", (f"{name} has other bytes",))


def _has_manifest(place: ObjectBackend, facts: Facts, there: Mapping[str, int]) -> bool:
    if there.get(MANIFEST) != len(facts.data):
        return False
    return place.read(f"{facts.name}/{MANIFEST}", 0, len(facts.data)) == facts.data


def _note(place: ObjectBackend, facts: Facts, there: Mapping[str, int]) -> dict[str, Any]:
    """What `copying.json` says; empty where there is none."""
    try:
        note = json.loads(_read_beside(place, facts.name, COPYING, there) or b"{}")
    except (ValueError, RecursionError, NotFoundError):
        return {}
    return note if isinstance(note, dict) else {}


def _read_beside(place: ObjectBackend, folder: str, name: str, sizes: Mapping[str, int]) -> bytes | None:
    if name not in sizes:
        return None
    if sizes[name] > _MOST_BESIDE_BYTES:
        raise CorruptError(f"{place.url}/{folder}/{name} is too large to be what ckptman puts there: remove it")
    return place.read(f"{folder}/{name}", 0, sizes[name])


def _right(
    place: ObjectBackend, facts: Facts, names: Sequence[str], means: Means, meter: Meter, phase: Phase
) -> set[str]:
    """Those of the files whose objects were read and are what was saved. Raises: RootError."""
    assert facts.manifest is not None
    blocks = {name: bytearray(-(-facts.sizes[name] // facts.block_bytes) * DIGEST_BYTES) for name in names}
    stride = stride_of(facts.block_bytes, 4 * STRIDE_BYTES)
    pieces = [(name, low) for name in names for low in range(0, facts.sizes[name], stride)]
    meter.begin(phase, sum(facts.sizes[name] for name in names), 0)

    def read(number: int, scratch: memoryview) -> None:
        name, low = pieces[number]
        size = min(stride, facts.sizes[name] - low)
        if means.limit is not None:
            means.limit.take(size)
        data = memoryview(place.read(f"{facts.name}/{name}", low, size))
        block = facts.block_bytes
        found = b"".join([xxh3_128_digest(data[cut : cut + block]) for cut in range(0, size, block)])
        at = low // block * DIGEST_BYTES
        blocks[name][at : at + len(found)] = found
        meter.moved(size, 1.0)

    share_out(len(pieces), read, threads=means.threads or THREADS, scratch_bytes=0)
    manifest = facts.manifest
    return {name for name in names if digest_of_blocks([bytes(blocks[name])]) == manifest.files[name].digest}


class _TakenError(BusyCopyingError):
    def __init__(self, root: str, host: str, pid: int, job_id: str | None = None) -> None:
        super().__init__(root, host, pid, job_id)
        by = f", by a copy of another checkpoint (host {host}, pid {pid})" if host else ""
        self.args = (
            f"{root}: its objects were removed or replaced while they were put{by}, so the copy does not count: let "
            f"the other one end, and copy again",
        )
