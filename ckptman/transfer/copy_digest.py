"""Digesting a file while it is copied, and comparing with what was saved as early as that can be told. Torch-free."""

from __future__ import annotations

from xxhash import xxh3_128_digest

from ckptman.catalog.backends.source import Original
from ckptman.errors import CorruptError, plain
from ckptman.io.checksums import DIGEST_BYTES, Digests, digest_of_blocks, group_bytes
from ckptman.io.threads import STRIDE_BYTES


class OnTheWay:
    """The digests of one file of an original, taken of pieces as they pass. Several threads may bring pieces.

    `blocks`: of what has passed, 16 bytes for each block. `works`: False where blocks are larger than a piece; then
    only what is read back at the destination is compared.
    """

    def __init__(self, original: Original, name: str, size: int) -> None:
        self.block_bytes = original.facts.block_bytes
        self.works = self.block_bytes <= STRIDE_BYTES
        self.blocks = bytearray()
        self.known: Digests | None = None
        self._original, self._name, self._size = original, name, size

    def begin(self) -> None:
        """Find out what the blocks have to be. Raises: CorruptError, OSError."""
        self.blocks = bytearray(-(-self._size // self.block_bytes) * DIGEST_BYTES)
        if self.works:
            self.known = self._original.digests(self._name)

    def at(self, low: int, high: int) -> slice:
        """Where the digests of the blocks of bytes [low, high) are."""
        return slice(*(-(-offset // self.block_bytes) * DIGEST_BYTES for offset in (low, high)))

    def check(self, low: int, data: memoryview) -> None:
        """Digest a piece and compare, where that can be told already. Raises: CorruptError."""
        if not self.works or not data:
            return
        known, group = self.known, group_bytes(self.block_bytes)
        at = self.at(low, low + len(data))
        if known is not None and known.groups and low % group == 0:
            # Larger pieces are digested without holding the interpreter, so that others read and write meanwhile.
            first = low // group * DIGEST_BYTES
            found = b"".join([xxh3_128_digest(data[cut : cut + group]) for cut in range(0, len(data), group)])
            if found == known.groups[first : first + len(found)]:
                self.blocks[at] = known.blocks[at]
                return
        block = self.block_bytes
        self.blocks[at] = b"".join([xxh3_128_digest(data[cut : cut + block]) for cut in range(0, len(data), block)])
        if known is not None and self.blocks[at] != known.blocks[at]:
            numbers = range(at.start // DIGEST_BYTES, at.stop // DIGEST_BYTES)
            wrong = next(each for each in numbers if self._differs(each, known))
            raise self._changed(f"block {wrong:,} (from byte {wrong * block:,} on) has changed")

    def judge(self) -> str:
        """The digest of the whole file, now that all of it has passed. Raises: CorruptError."""
        if not self.works:
            return ""
        digest = digest_of_blocks([bytes(self.blocks)])
        manifest = self._original.facts.manifest
        if manifest is not None and digest != manifest.files[self._name].digest:
            raise self._changed()
        return digest

    def _differs(self, block: int, known: Digests) -> bool:
        at = slice(block * DIGEST_BYTES, (block + 1) * DIGEST_BYTES)
        return bytes(self.blocks[at]) != known.blocks[at]

    def _changed(self, which: str = "") -> CorruptError:
        where = self._original.facts.where
        see = "" if "://" in where else f", or run `ckptman verify {where}` to see all that is damaged"
        return CorruptError(
            f"{where}: {plain(self._name)} is not what was saved{f': {which}' if which else ''}. It was not copied: "
            f"copy another checkpoint{see}"
        )
