"""Whether a tensor is the same in two checkpoints, by the digests of its blocks: next to nothing is read."""

from __future__ import annotations

import os

import numpy as np

from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.errors import CorruptError
from ckptman.storage.format.paths import digests_name
from ckptman.storage.io.checksums import DIGEST_BYTES
from ckptman.storage.io.safe_open import open_regular

PIECE_BYTES = 4 * 1024 * 1024


def digests_agree(a: SavedState, b: SavedState, name: str) -> bool:
    """Whether a tensor of the same dtype and shape has the same places and digests in both.

    If not, the tensor may be the same nevertheless. Changes on disk after the save are not seen. Raises: CorruptError.
    """
    if a.manifest is None or b.manifest is None or a.manifest.block_bytes != b.manifest.block_bytes:
        return False
    for saved in (a, b):
        saved.check([name])
    ours, theirs = a.table.chunks(name), b.table.chunks(name)
    if a.index.files != b.index.files or not all(
        np.array_equal(getattr(ours, column), getattr(theirs, column))
        for column in ("file", "offset", "bytes", "payload", "offsets", "sizes")
    ):
        return False
    has_payload = ours.payload >= 0
    begins = np.where(has_payload, ours.payload, ours.offset)
    lengths = np.where(has_payload, ours.sizes.prod(axis=1) * a.dtype(name).itemsize, ours.bytes)
    places = zip(ours.file.tolist(), begins.tolist(), lengths.tolist())
    return all(_agree(a, b, a.index.files[file], begin, begin + length, name) for file, begin, length in places)


def same_containers(a: SavedState, b: SavedState, name: str) -> bool | None:
    """Whether the containers of a tensor have the same bytes; None if it was cut differently. Raises: CorruptError."""
    ours, theirs = ({chunk[4:]: chunk for chunk in saved.all_chunks(name)} for saved in (a, b))
    if ours.keys() != theirs.keys():
        return None
    return all(
        mine.bytes == theirs[box].bytes
        and _same_bytes(a, b, (mine.file, mine.offset), (theirs[box].file, theirs[box].offset), mine.bytes, name)
        for box, mine in ours.items()
    )


def _agree(a: SavedState, b: SavedState, file: str, low: int, high: int, name: str) -> bool:
    """Whether bytes [low, high) of a data file are equal in both, by the digests of the file or of its blocks."""
    assert a.manifest is not None
    assert b.manifest is not None
    if low == high or a.manifest.files.get(file) == b.manifest.files.get(file):
        return True
    size = a.manifest.block_bytes
    first, last = low // size, -(-high // size)
    ours, theirs = _block_digests(a, file, first, last), _block_digests(b, file, first, last)
    if ours is None or theirs is None or len(ours) != (last - first) * DIGEST_BYTES:
        return False
    if ours == theirs:
        return True
    begin, end = -(-low // size), high // size
    inner = slice((begin - first) * DIGEST_BYTES, (end - first) * DIGEST_BYTES)
    if begin >= end or ours[inner] != theirs[inner]:
        return False
    # The blocks at its ends are shared with other tensors, which may have changed: read these bytes.
    edges = [(low, begin * size), (end * size, high)]
    return all(_same_bytes(a, b, (file, edge), (file, edge), stop - edge, name) for edge, stop in edges)


def _block_digests(saved: SavedState, file: str, first: int, last: int) -> bytes | None:
    """Return the digests of blocks [first, last), unchecked: damaged ones agree with nothing. None: unavailable."""
    name = digests_name(file)
    if name is None:
        return None
    try:
        with open(open_regular(saved.folder / name), "rb") as digests:
            return os.pread(digests.fileno(), (last - first) * DIGEST_BYTES, first * DIGEST_BYTES)
    except (CorruptError, OSError):
        return None


def _same_bytes(
    a: SavedState, b: SavedState, ours: tuple[str, int], theirs: tuple[str, int], size: int, name: str
) -> bool:
    for at in range(0, size, PIECE_BYTES):
        length = min(PIECE_BYTES, size - at)
        mine = a.read_range(ours[0], ours[1] + at, length, name)
        if mine != b.read_range(theirs[0], theirs[1] + at, length, name):
            return False
    return True
