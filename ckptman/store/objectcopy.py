"""Copies into an object store, and what a copy out of one reads. Torch-free.

Objects are put under the name of the checkpoint, read back, and its manifest after them: until then nothing counts.
`copying.json` says whose objects they are meanwhile. An attempt after one that was interrupted puts those that are
missing or wrong. Two copies of the same checkpoint at a time put the same bytes twice, and harm nothing.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from ckptman.errors import CkptmanError, ConfigError, CorruptError, ExistsError, NotFoundError
from ckptman.store.copyfolder import Copied
from ckptman.store.copyproof import Means, NotReadBackError
from ckptman.store.copysource import Facts, GoneError, Original, Reading
from ckptman.store.digest import DIGEST_BYTES, Digests, digest_of_blocks
from ckptman.store.meter import Meter
from ckptman.store.names import MANIFEST
from ckptman.store.objectput import THREADS, put_files
from ckptman.store.objects import ObjectEntry, ObjectPlace
from ckptman.store.parallel import STRIDE_BYTES, share_out, stride_of
from ckptman.store.pins import PINNED

COPYING = "copying.json"
_MOST_BESIDE_BYTES = 1024 * 1024


class ObjectOriginal:
    """A checkpoint in an object store, as it was listed. Raises: CorruptError, FormatVersionError, RootError."""

    readers = THREADS

    def __init__(self, place: ObjectPlace, entry: ObjectEntry) -> None:
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
        )

    def open(self, name: str) -> Reading:
        return _ObjectReading(self._place, f"{self._entry.name}/{name}")

    def digests(self, name: str) -> Digests | None:
        return None  # they are in another object; what the whole file has to be, the manifest says

    def lost(self) -> CkptmanError | None:
        gone = GoneError(f"{self._entry.url} was removed, or put again, while it was copied: copy again")
        try:
            data = self._place.read(f"{self._entry.name}/{MANIFEST}", 0, len(self._entry.data))
        except NotFoundError:
            return gone
        except CkptmanError:
            return None
        return None if data == self._entry.data else gone


class _ObjectReading:
    def __init__(self, place: ObjectPlace, name: str) -> None:
        self._place, self._name = place, name

    def read(self, offset: int, size: int, scratch: memoryview) -> memoryview:
        # Copied to where direct I/O can write it from.
        view = scratch[:size]
        view[:] = self._place.read(self._name, offset, size)
        return view

    def close(self) -> None:
        pass


def copy_to_objects(original: Original, place: ObjectPlace, means: Means) -> Copied:
    """Copy a checkpoint to an object store, read every byte of it back, and only then put its manifest.

    Raises: ConfigError (a checkpoint of others), ExistsError, CorruptError (the original is damaged; what was put of it
    is removed), NotFoundError (the original was deleted meanwhile; the same), RootError (what was put stays).
    """
    facts, meter = original.facts, means.meter or Meter()
    if facts.manifest is None:
        raise ConfigError(
            f"{facts.where} has no manifest, and in an object store that is what makes a checkpoint: only those of "
            f"ckptman are copied there"
        )
    there = place.listing(facts.name)
    if MANIFEST in there:
        if (found := _already(original, place, there, means)) is not None:
            return found
        place.remove(f"{facts.name}/{MANIFEST}")  # first, so that no mixture of the two ever counts
    _say_whose(place, facts, there, means.overwrite)
    begun = time.monotonic()
    for name in sorted(there.keys() - {MANIFEST, COPYING, *facts.sizes}):
        place.remove(f"{facts.name}/{name}")
    try:
        same = [name for name, size in facts.sizes.items() if there.get(name) == size]
        good = _right(place, facts, same, means, meter, "looking")
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
                for name in (*place.listing(facts.name), COPYING):
                    place.remove(f"{facts.name}/{name}")
        if lost is not None:
            raise lost from error
        raise
    verified = time.monotonic()
    if facts.pinned is not None:
        place.write(f"{facts.name}/{PINNED}", facts.pinned)
    place.write(f"{facts.name}/{MANIFEST}", facts.data)
    place.remove(f"{facts.name}/{COPYING}")
    return Copied(
        source=facts.where,
        path=f"{place.url}/{facts.name}",
        step=facts.manifest.step,
        files=len(facts.sizes),
        bytes=facts.bytes,
        already=False,
        written_bytes=sum(left.values()),
        copy_seconds=copied - begun,
        verify_seconds=verified - copied,
        remarks=facts.remarks,
    )


def _already(original: Original, place: ObjectPlace, there: dict[str, int], means: Means) -> Copied | None:
    """What is there, where it is the same checkpoint; None where it may be replaced. Raises: ExistsError."""
    facts = original.facts
    # Whoever put the manifest had read everything back before.
    data = place.read(f"{facts.name}/{MANIFEST}", 0, there[MANIFEST]) if there[MANIFEST] == len(facts.data) else b""
    problem = "" if data == facts.data else "is there, and is another checkpoint"
    if not problem:
        wrong = [name for name, size in facts.sizes.items() if there.get(name) != size]
        problem = f"is there, and is not complete: {wrong[0]}" if wrong else ""
    if problem:
        if means.overwrite:
            return None
        raise ExistsError(
            f"{place.url}/{facts.name} {problem}: copy to another prefix, or say --overwrite to replace it"
        )
    if COPYING in there:
        place.remove(f"{facts.name}/{COPYING}")
    step = facts.manifest.step if facts.manifest else None
    path = f"{place.url}/{facts.name}"
    return Copied(facts.where, path, step, len(facts.sizes), facts.bytes, already=True, remarks=facts.remarks)


def _say_whose(place: ObjectPlace, facts: Facts, there: dict[str, int], overwrite: bool) -> None:
    """Put the note of whose objects these are, unless another one is there. Raises: ExistsError."""
    name = f"{facts.name}/{COPYING}"
    if COPYING in there and not overwrite:
        try:
            tag = json.loads(_read_beside(place, facts.name, COPYING, there) or b"").get("tag")
        except (ValueError, AttributeError):
            tag = None
        if tag == facts.tag:
            return
        raise ExistsError(
            f"{place.url}/{facts.name} has objects of another checkpoint in it, of which a copy is at work or was "
            f"interrupted: let that one end, or say --overwrite to replace them"
        )
    note = {"tag": facts.tag, "host": socket.gethostname(), "time_seconds": time.time()}
    place.write(name, json.dumps(note).encode())


def _read_beside(place: ObjectPlace, folder: str, name: str, sizes: dict[str, int]) -> bytes | None:
    if name not in sizes:
        return None
    if sizes[name] > _MOST_BESIDE_BYTES:
        raise CorruptError(f"{place.url}/{folder}/{name} is too large to be what ckptman puts there: remove it")
    return place.read(f"{folder}/{name}", 0, sizes[name])


def _right(place: ObjectPlace, facts: Facts, names: Sequence[str], means: Means, meter: Meter, phase: str) -> set[str]:
    """Those of the files whose objects were read and are what was saved. Raises: RootError."""
    assert facts.manifest is not None
    blocks = {name: bytearray(-(-facts.sizes[name] // facts.block_bytes) * DIGEST_BYTES) for name in names}
    stride = stride_of(facts.block_bytes, 4 * STRIDE_BYTES)
    pieces = [(name, low) for name in names for low in range(0, facts.sizes[name], stride)]
    meter.begin("looking" if phase == "looking" else "verifying", sum(facts.sizes[name] for name in names), 0)

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
