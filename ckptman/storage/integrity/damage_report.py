"""What is wrong with the files of a checkpoint, in words: which blocks of them, and which tensors lie there.

Where a file does not match its digest, the digests of its blocks (`blocks-RRRRR.bin`) tell which of them changed, and
the chunk table tells what lies there: as far as these are whole themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from ckptman.errors import CorruptError
from ckptman.storage.format.chunk_table import Ints
from ckptman.storage.format.index import open_table, read_digests, read_index
from ckptman.storage.format.manifest import Manifest
from ckptman.storage.io.checksums import DIGEST_BYTES
from ckptman.storage.io.file_scan import Scanned

NAMES_SHOWN = 3
RUNS_SHOWN = 6
LOCATED = 256
"""What lies there is looked up for so many pieces of damage: of a checkpoint that lost more, little is left to say."""
CHANGED = "have changed since they were saved"
Runs = tuple[tuple[int, int], ...]
"""First and last of each run of blocks, ascending."""


@dataclass(frozen=True)
class Damage:
    """One thing about one file that is not as it was saved; `str` gives the whole sentence.

    `what` in words. `blocks`: those that are wrong, unreadable or gone; none: the whole file is meant, or it is not
    known which. `bytes`: how many bytes that is, at most. `holds`: the tensors and values that lie there; None: it was
    not looked up, or cannot be told.
    """

    file: str
    what: str
    bytes: int
    blocks: Runs = ()
    holds: tuple[str, ...] | None = None

    def __str__(self) -> str:
        if self.holds is None:
            return f"{self.file} {self.what}"
        shown = ", ".join(self.holds[:NAMES_SHOWN]) or "no tensor"
        more = f" and {len(self.holds) - NAMES_SHOWN} more" if len(self.holds) > NAMES_SHOWN else ""
        return f"{self.file} {self.what}; what lies there: {shown}{more}"


def of_size(name: str, size: int, scanned: Scanned | None, folder: Path, manifest: Manifest) -> Damage:
    """The damage of a file that has another size: which of its blocks are still there."""
    record = manifest.files[name]
    what = f"has {size} bytes instead of {record.bytes}"
    changed = None if scanned is None else _changed(scanned, folder, manifest)
    if changed is None:
        return Damage(name, what, record.bytes)
    runs = runs_of(changed)
    if not runs:
        return Damage(name, f"{what}; the first {record.bytes} of them are what was saved", 0)
    lost = _bytes_of(runs, name, manifest)
    return Damage(name, f"{what}: {_blocks(runs, name, manifest)} are gone or {CHANGED}", lost, runs)


def of_bytes(scanned: Scanned, folder: Path, manifest: Manifest) -> Iterator[Damage]:
    """The damage of a file that has its size, and was read as far as the disk gave it."""
    name, record = scanned.name, manifest.files[scanned.name]
    for why in sorted(set(scanned.unreadable.values())):
        runs = runs_of(sorted(block for block, each in scanned.unreadable.items() if each == why))
        what = f"cannot be read in {_blocks(runs, name, manifest)}: {why}"
        yield Damage(name, what, _bytes_of(runs, name, manifest), runs)
    changed = _changed(scanned, folder, manifest)
    if changed is None:
        if not scanned.unreadable:
            yield Damage(name, f"does not match its digest: {_instead(scanned, manifest)}", record.bytes)
    elif rest := [block for block in changed if block not in scanned.unreadable]:
        runs = runs_of(rest)
        what = f"does not match its digest: {_blocks(runs, name, manifest)} {CHANGED}"
        if len(rest) == _count(name, manifest):
            what = f"does not match its digest: {_instead(scanned, manifest)}"
        yield Damage(name, what, _bytes_of(runs, name, manifest), runs)


def located(damage: Sequence[Damage], folder: Path, manifest: Manifest) -> list[Damage]:
    """The same, with what lies there where that is a data file; as it is where the index is not whole either."""
    try:
        index = read_index(folder, manifest, ranks=())
        table = open_table(folder, manifest, index)
    except (CorruptError, OSError):
        return list(damage)
    numbers = {name: number for number, name in enumerate(index.files)}
    places = [at for at, each in enumerate(damage) if each.bytes and each.file in numbers][:LOCATED]
    found: dict[int, list[str]] = {at: [] for at in places}
    ranges = {at: _ranges(damage[at], manifest) for at in places}
    by_file: dict[int, list[int]] = {}
    for at in places:
        by_file.setdefault(numbers[damage[at].file], []).append(at)
    for name in index.tensors if places else ():
        try:
            chunks = table.chunks(name)
        except (CorruptError, OSError):  # the check of the table tells
            continue
        for number in by_file.keys() & set(np.unique(chunks.file).tolist()):
            mine = chunks.file == number
            begins, sizes = chunks.offset[mine], chunks.bytes[mine]
            for at in by_file[number]:
                if _touch(ranges[at], begins, sizes):
                    found[at].append(name)
    for name, place in index.objects.items():
        for at in by_file.get(numbers.get(place.file, -1), ()):
            if _touch(ranges[at], np.array([place.offset]), np.array([place.bytes])):
                found[at].append(f"the value {name}")
    return [replace(each, holds=tuple(found[at])) if at in found else each for at, each in enumerate(damage)]


def runs_of(numbers: Sequence[int]) -> Runs:
    """Ascending numbers as runs, first and last of each: 1, 2, 3, 7 are (1, 3) and (7, 7)."""
    each = np.array(numbers, np.int64)
    runs = np.split(each, np.flatnonzero(np.diff(each) != 1) + 1)
    return tuple((int(run[0]), int(run[-1])) for run in runs if len(run))


def changed_blocks(ours: bytes, theirs: bytes, count: int) -> NDArray[np.bool_]:
    """Which of `count` blocks of two files differ, by their digests; those that only one of them has do."""
    first, second = (np.frombuffer(each, np.uint64).reshape(-1, 2) for each in (ours, theirs))
    both = min(len(first), len(second), count)
    changed = np.ones(count, np.bool_)
    changed[:both] = (first[:both] != second[:both]).any(axis=1)
    return changed


def _changed(scanned: Scanned, folder: Path, manifest: Manifest) -> list[int] | None:
    """The numbers of the blocks that are not what was saved, ascending; None where nothing tells."""
    try:
        expected = read_digests(folder, scanned.name, manifest).blocks
    except CorruptError:
        return None
    count = len(expected) // DIGEST_BYTES
    numbers: list[int] = np.flatnonzero(changed_blocks(expected, bytes(scanned.blocks), count)).tolist()
    return numbers


def _instead(scanned: Scanned, manifest: Manifest) -> str:
    """What a file holds of which no block is right, or none can be told from the others."""
    size, digest = manifest.files[scanned.name].bytes, xxh3_128_hexdigest(scanned.blocks)
    for other, record in manifest.files.items():
        if not scanned.unreadable and (record.digest, record.bytes) == (digest, size):
            return f"it holds what was saved as {other}"
    return f"its bytes {CHANGED}"


def _blocks(runs: Runs, name: str, manifest: Manifest) -> str:
    """`3 of 8192 blocks (5, 7-8; 98304 bytes)`."""
    shown = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs[:RUNS_SHOWN])
    more = ", ..." if len(runs) > RUNS_SHOWN else ""
    count = sum(last + 1 - first for first, last in runs)
    total = _count(name, manifest)
    return f"{count} of {total} block{'s' * (total > 1)} ({shown}{more}; {_bytes_of(runs, name, manifest)} bytes)"


def _count(name: str, manifest: Manifest) -> int:
    return -(-manifest.files[name].bytes // manifest.block_bytes)


def _bytes_of(runs: Runs, name: str, manifest: Manifest) -> int:
    size, end = manifest.block_bytes, manifest.files[name].bytes
    return sum(min((last + 1) * size, end) - first * size for first, last in runs)


def _ranges(damage: Damage, manifest: Manifest) -> list[tuple[int, int]]:
    """The bytes that are meant, [low, high)."""
    size = manifest.block_bytes
    whole = [(0, manifest.files[damage.file].bytes)]
    return [(first * size, (last + 1) * size) for first, last in damage.blocks] or whole


def _touch(ranges: Sequence[tuple[int, int]], begins: Ints, sizes: Ints) -> bool:
    """Whether one of some pieces has bytes in one of some ranges, which ascend and do not overlap."""
    lows = np.array([low for low, _ in ranges], np.int64)
    highs = np.array([high for _, high in ranges], np.int64)
    at = np.searchsorted(highs, begins, side="right")
    inside = at < len(lows)
    return bool((inside & (lows[np.minimum(at, len(lows) - 1)] < begins + sizes)).any())
