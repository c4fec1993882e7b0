"""What a copy reads out of an object store."""

from __future__ import annotations

from collections.abc import Mapping

from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from ckptman.errors import CkptmanError, CorruptError, NotFoundError
from ckptman.storage.catalog.backends.object_store import COPYING, ObjectBackend
from ckptman.storage.catalog.backends.source import MOST_PIN_BYTES, Done, Finish, Reading, SourceInfo
from ckptman.storage.catalog.catalog import Entry
from ckptman.storage.catalog.pins import PINNED
from ckptman.storage.catalog.reader_lease import GoneError
from ckptman.storage.format.manifest import parse_manifest
from ckptman.storage.format.paths import MANIFEST, digests_name
from ckptman.storage.io.checksums import DIGEST_BYTES, Digests, digests_bytes
from ckptman.storage.io.file_scan import Scanned
from ckptman.storage.io.threads import STRIDE_BYTES, share_out, stride_of

THREADS = 8
"""As many as wait for the network at a time, where nobody says otherwise."""


class ObjectSource:
    """A checkpoint in an object store, as it was listed. Raises: CorruptError, FormatVersionError, RootError."""

    readers = THREADS

    def __init__(self, place: ObjectBackend, entry: Entry) -> None:
        self._place, self._name = place, entry.path.name
        manifest, there = entry.require_manifest(), place.listing(self._name)
        data = place.read_whole(f"{self._name}/{MANIFEST}") or b""
        if not data or parse_manifest(f"{entry.where}/{MANIFEST}", data).to_json() != manifest.to_json():
            raise self._gone(entry.where)
        if there.get(PINNED, 0) > MOST_PIN_BYTES:
            raise CorruptError(f"{entry.where}/{PINNED} is too large to be what ckptman puts there: remove it")
        beside = {MANIFEST, PINNED, COPYING, *manifest.files}
        self.facts = SourceInfo(
            where=entry.where,
            name=self._name,
            manifest=manifest,
            sizes={name: record.bytes for name, record in manifest.files.items()},
            data=data,
            tag=xxh3_128_hexdigest(data)[:16],
            block_bytes=manifest.block_bytes,
            pinned=place.read(f"{self._name}/{PINNED}", 0, there[PINNED]) if PINNED in there else None,
            remarks=tuple(f"{name} is not in the manifest: it was not copied" for name in there.keys() - beside),
            rollbacks=tuple(place.rollbacks()),
        )

    def open(self, name: str) -> Reading:
        return _ObjectReading(self._place, f"{self._name}/{name}")

    def digests(self, name: str) -> Digests | None:
        assert self.facts.manifest is not None
        files, block, beside = self.facts.manifest.files, self.facts.block_bytes, digests_name(name)
        if beside is None or beside not in files:
            return None
        size = files[name].bytes
        blocks = self._place.read(f"{self._name}/{beside}", 0, min(digests_bytes(size, block), files[beside].bytes))
        # What is damaged itself tells nothing of others.
        return Digests(block, blocks, size) if xxh3_128_hexdigest(blocks) == files[name].digest else None

    def scan(self, *, finish: Finish, threads: int | None, done: Done) -> None:
        scan_objects(self._place, self.facts, self.facts.sizes, finish, threads, done)

    def lost(self) -> CkptmanError | None:
        gone, data = self._gone(self.facts.where), self.facts.data
        try:
            sizes = self._place.listing(self._name)
            if any(sizes.get(name) != size for name, size in self.facts.sizes.items()):
                return gone
            return None if self._place.read(f"{self._name}/{MANIFEST}", 0, len(data)) == data else gone
        except NotFoundError:
            return gone
        except CkptmanError:
            return None

    def _gone(self, where: str) -> GoneError:
        return GoneError(
            f"{where} was removed, in part or as a whole, or put again, while it was copied: ckptman list "
            f"{self._place.url} shows what is left; copy again"
        )


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


def scan_objects(
    place: ObjectBackend, facts: SourceInfo, sizes: Mapping[str, int], finish: Finish, threads: int | None, done: Done
) -> None:
    """Read objects of a checkpoint and digest their blocks, as `scan` does. Raises: NotFoundError, RootError."""
    block = facts.block_bytes
    found = {each: Scanned(each, bytearray(-(-size // block) * DIGEST_BYTES)) for each, size in sizes.items()}
    stride = stride_of(block, 4 * STRIDE_BYTES)
    pieces = [(each, low) for each, size in sizes.items() for low in range(0, size, stride)]

    def read(number: int, scratch: memoryview) -> None:
        each, low = pieces[number]
        size = min(stride, sizes[each] - low)
        data = memoryview(place.read(f"{facts.name}/{each}", low, size))
        digests = b"".join([xxh3_128_digest(data[cut : cut + block]) for cut in range(0, size, block)])
        at = low // block * DIGEST_BYTES
        found[each].blocks[at : at + len(digests)] = digests
        done(size)

    share_out(len(pieces), read, threads=threads or THREADS, scratch_bytes=0)
    for each in found.values():
        finish(each)
