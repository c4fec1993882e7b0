"""What a copy reads out of an object store."""

from __future__ import annotations

from xxhash import xxh3_128_hexdigest

from ckptman.errors import CkptmanError, CorruptError, NotFoundError
from ckptman.storage.catalog.backends.copy_source import MOST_PIN_BYTES, Reading, SourceInfo
from ckptman.storage.catalog.backends.object_store import COPYING, ObjectBackend
from ckptman.storage.catalog.catalog import Entry
from ckptman.storage.catalog.pins import PINNED
from ckptman.storage.catalog.reader_lease import GoneError
from ckptman.storage.format.manifest import parse_manifest
from ckptman.storage.format.paths import MANIFEST
from ckptman.storage.io.threads import STRIDE_BYTES


class ObjectSource:
    """A checkpoint in an object store, as it was listed. Raises: CorruptError, FormatVersionError, RootError."""

    is_remote = True

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
            data=data,
            tag=xxh3_128_hexdigest(data)[:16],
            pinned=place.read(f"{self._name}/{PINNED}", 0, there[PINNED]) if PINNED in there else None,
            remarks=tuple(f"{name} is not in the manifest: it was not copied" for name in there.keys() - beside),
            rollbacks=tuple(place.rollbacks()),
        )

    def open(self, name: str) -> Reading:
        return ObjectReading(self._place, f"{self._name}/{name}")

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


class ObjectReading:
    """An object, read by ranges."""

    piece_bytes = 2 * STRIDE_BYTES

    def __init__(self, place: ObjectBackend, name: str) -> None:
        self._place, self._name = place, name

    def read(self, offset: int, scratch: memoryview) -> memoryview:
        scratch[:] = self._place.read(self._name, offset, len(scratch))
        return scratch

    def close(self) -> None:
        pass
