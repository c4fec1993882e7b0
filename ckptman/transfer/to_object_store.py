"""Copies into an object store, and what a copy out of one reads. Torch-free.

Objects are put under the name of the checkpoint, read back, and its manifest after them: until then nothing counts.
`copying.json` says whose objects they are meanwhile, and is put where there is none. An attempt after one that was
interrupted puts those that are missing or wrong. Two copies of the same checkpoint at a time put the same bytes twice,
and harm nothing.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_128_digest

from ckptman.catalog.backends.object_source import THREADS
from ckptman.catalog.backends.object_store import COPYING, REMOVING, ObjectBackend
from ckptman.catalog.backends.source import Facts, Original, SourceError, of_source
from ckptman.catalog.pins import PINNED
from ckptman.catalog.replaceable import has_data, is_left, is_of_a_checkpoint
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
from ckptman.format.paths import MANIFEST
from ckptman.io.checksums import DIGEST_BYTES, digest_of_blocks
from ckptman.io.workers import STRIDE_BYTES, share_out, stride_of
from ckptman.transfer.object_put import put_files
from ckptman.transfer.partial_copy import BusyCopyingError
from ckptman.transfer.progress import Meter, Phase
from ckptman.transfer.read_back import Means, NotReadBackError, verify
from ckptman.transfer.to_folder import Copied


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
    place.hand_on(facts.rollbacks)  # what was abandoned here must not be the newest there
    there = place.listing(facts.name)
    found = _already(original, place, there, means)
    if found is None:
        if MANIFEST in there:
            _check_original(facts, place, there, means, meter)
        place.begin(facts.name, facts.tag, replace=means.overwrite)
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
    if place.note_of(facts.name).get("tag") == facts.tag:  # that of another checkpoint is about to replace this one
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
    note = place.note_of(facts.name)
    if all(there.get(name) == size for name, size in facts.sizes.items()) and (
        note.get("tag") == facts.tag or _has_manifest(place, facts, there)  # the latter: by another copy of the same
    ):
        return
    raise _TakenError(f"{place.url}/{facts.name}", str(note.get("host", "")), note.get("pid", 0))


def _give_up(place: ObjectBackend, facts: Facts) -> None:
    """Remove what was put, unless it is somebody else's by now. Raises: CkptmanError."""
    if place.note_of(facts.name).get("tag") == facts.tag:
        place.abandon(facts.name)


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
