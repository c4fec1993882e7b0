"""Proving that the bytes of a checkpoint are the bytes that were saved, and that they fill its tensors.

The manifest is what everything is held against: it vouches for itself, and for each file. All damage is found, not only
the first.

The chunks of all tensors have to lie inside their files, and fill each tensor exactly. Nearly all tensors are cut
along one dimension into chunks that follow each other. Those are seen to be right together, by a few operations on the
rows of all of them; the others are looked at one by one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from ckptman.errors import CorruptError, plain
from ckptman.storage.catalog.pins import PINNED
from ckptman.storage.catalog.verified import VERIFIED
from ckptman.storage.format.chunk_table import ChunkTable, TensorRecord, item_bytes
from ckptman.storage.format.coverage import first_flaw, flaw_of, has_few_corners
from ckptman.storage.format.index import Index, data_files, open_table, read_digests, read_index
from ckptman.storage.format.manifest import Manifest
from ckptman.storage.format.paths import MANIFEST, METADATA, parse_half_written
from ckptman.storage.format.value_codec import TensorRef, decode, paths_in
from ckptman.storage.integrity.damage_report import Damage, located, of_bytes, of_size
from ckptman.storage.io.file_scan import Scanned, scan, stamp_of


@dataclass(frozen=True)
class FileReport:
    """The outcome for one checkpoint: the files and bytes it is to have, and what is damaged.

    `unread`: files of which nothing was proved, for reasons that say nothing about their bytes (permissions; somebody
    wrote to them meanwhile). `remarks`: what is odd and does no harm.
    """

    files: int
    bytes: int
    damage: tuple[Damage, ...]
    unread: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """What is damaged, in sentences."""
        return tuple(map(str, self.damage))

    @property
    def good(self) -> bool:
        """Whether every byte was read and found to be what was saved."""
        return not self.damage and not self.unread


def verify_folder(
    folder: Path,
    manifest: Manifest,
    *,
    threads: int | None = None,
    done: Callable[[int], None] | None = None,
    processes: bool = False,
) -> FileReport:
    """Check every byte of every file that a manifest names, with as many threads as `scan` says.

    `done` is told the bytes that were read, from several threads. `processes`: forked ones go before the threads where
    there is much to read, which is faster; not for a process that has a device, or threads that hold locks.
    Raises: OSError where the folder cannot be listed.
    """
    damage, sizes, remarks = _compare(folder, manifest)
    suspects: dict[str, Scanned] = {}
    stamps: list[Scanned] = []

    def finish(found: Scanned) -> None:
        record = manifest.files[found.name]
        right = sizes[found.name] == record.bytes and not found.unreadable and found.refused is None
        if right and xxh3_128_hexdigest(found.blocks) == record.digest:
            found.blocks = bytearray()
        else:
            suspects[found.name] = found
        stamps.append(found)

    wanted = [(name, min(size, manifest.files[name].bytes)) for name, size in sizes.items()]
    wanted.sort(key=lambda each: -each[1])  # what is large first: what is small fills the gaps at the end
    scan(folder, wanted, manifest.block_bytes, finish=finish, threads=threads, done=done, processes=processes)
    unread = []
    for name, found in sorted(suspects.items()):
        if found.refused is not None and found.refused.errno == errno.ENOENT:
            damage.append(Damage(name, "is missing", manifest.files[name].bytes))
        elif found.refused is not None:
            unread.append(f"{name} cannot be read: {found.refused.strerror or found.refused}")
        elif sizes[name] != manifest.files[name].bytes:
            damage.append(of_size(name, sizes[name], found, folder, manifest))
        else:
            damage += of_bytes(found, folder, manifest)
    unread += [fate for found in stamps if (fate := _fate(folder, found)) is not None]
    return _report(folder, manifest, damage, unread, remarks)


def _compare(folder: Path, manifest: Manifest) -> tuple[list[Damage], dict[str, int], list[str]]:
    """A manifest against what lies in its folder, by names and sizes alone.

    What is missing or no file; the sizes in bytes of the files that are there; remarks about what the manifest does not
    know. Raises: OSError.
    """
    damage: list[Damage] = []
    sizes: dict[str, int] = {}
    with os.scandir(folder) as items:
        there = {item.name: item for item in items}
    for name, record in manifest.files.items():
        item = there.get(name)
        if item is None:
            damage.append(Damage(name, "is missing", record.bytes))
        elif not item.is_file(follow_symlinks=False):
            damage.append(Damage(name, "is not a regular file", record.bytes))
        else:
            sizes[name] = item.stat(follow_symlinks=False).st_size
    unknown = sorted(name for name in there if name not in manifest.files and not _is_beside(name))
    return damage, sizes, [f"{name} is not in the manifest: no load reads it" for name in unknown]


def check_sizes(folder: Path, manifest: Manifest) -> FileReport:
    """A manifest against what lies in its folder, by names and sizes alone: no file is read. Raises: OSError."""
    damage, sizes, remarks = _compare(folder, manifest)
    damage += [
        of_size(name, size, None, folder, manifest)
        for name, size in sizes.items()
        if size != manifest.files[name].bytes
    ]
    return _report(folder, manifest, damage, [], remarks)


def _report(
    folder: Path, manifest: Manifest, damage: list[Damage], unread: list[str], remarks: list[str]
) -> FileReport:
    if METADATA in (files := {each.file for each in damage}) and len(files) > 1:
        # No accident does that.
        why = f"if plain DCP saved over it, that is why {METADATA} is another one"
        remarks = [*remarks, f"{why}: what it saved is there for dcp.load"]
    damage = located(sorted(damage, key=lambda each: each.file), folder, manifest) if damage else []
    return FileReport(len(manifest.files), manifest.total_bytes, tuple(damage), tuple(unread), tuple(remarks))


def only_pickled(folder: Path, manifest: Manifest, index: Index) -> bool:
    """Whether a checkpoint holds what a load has to unpickle: values with no plain form, tensors of classes of their
    own. Raises: CorruptError."""
    states: dict[str, Any] = {}
    for unit in index.units:
        if unit.whole:
            states[unit.state] = decode(unit.value)
        else:
            states.setdefault(unit.state, {})[str(decode(unit.key))] = decode(unit.value)
    table = open_table(folder, manifest, index)
    plain_values = {name for name, _ in paths_in(states)}
    return not index.objects.keys() <= plain_values or any(
        (table.chunks(name).payload < 0).any() for name in index.tensors
    )


def check_coverage(folder: Path, manifest: Manifest, *, lists: bool = True, index: Index | None = None) -> list[str]:
    """What is wrong with how the chunks of each tensor fill it: each element is to be saved exactly once. And which
    plain values cannot be read, or hold a tensor that was not saved.

    `lists`: what a load needs besides, the digests of every data file's blocks, has to be there too.

    Raises: CorruptError where the index cannot be read.
    """
    index = read_index(folder, manifest) if index is None else index
    files = data_files(manifest, index)
    found = check_table(open_table(folder, manifest, index), index, files) + _unreadable_values(index)
    for name, size in files:
        try:
            if lists and size >= 0:
                read_digests(folder, name, manifest)
        except CorruptError as error:
            found.append(str(error))
    return found


def _unreadable_values(index: Index) -> list[str]:
    problems = []
    for unit in index.units:
        try:
            key, value = decode(unit.key), decode(unit.value)
            hash(key)
        except (CorruptError, TypeError) as error:
            problems.append(f"the value {plain(unit.state)} cannot be read: {error}")
            continue
        name = plain(f"{unit.state}.{key}" if isinstance(key, str) and not unit.whole else unit.state)
        lost = sorted({ref for ref in _tensors_in(value) if ref not in index.tensors})
        problems += [f"the value {name} holds the tensor {plain(ref)}, which was not saved" for ref in lost]
    return problems


def _tensors_in(value: Any) -> Iterator[str]:
    if isinstance(value, TensorRef):
        yield value.name
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each)


def _is_beside(name: str) -> bool:
    """Whether a name is one that ckptman itself leaves beside the files of the manifest."""
    half_written = parse_half_written(name) is not None and name.startswith((VERIFIED, PINNED))
    return name in (MANIFEST, VERIFIED, PINNED) or half_written


def _fate(folder: Path, found: Scanned) -> str | None:
    """What became of a file while others were read; None where it is still the one that was read."""
    try:
        same = found.stamp is None or stamp_of(os.lstat(folder / found.name)) == found.stamp
    except FileNotFoundError:
        return f"{found.name} was removed while it was verified"
    return None if same else f"{found.name} was written to while it was verified"


Files = Sequence[tuple[str, int]]
"""Names and sizes in bytes of the data files, by number; -1 where there is none."""
_GROUP_ROWS = 65536
"""Rows that are looked at together: of a checkpoint of thousands of ranks there are millions."""
_UNPROVED = "it is not proved that each element was saved once: there are too many chunks to see if two overlap"


def check_table(table: ChunkTable, index: Index, files: Files) -> list[str]:
    """What is wrong with the chunks of each tensor: they lie outside of their files, leave holes or overlap."""
    regular = _regular(table, index, files)
    problems = []
    for name, tensor in index.tensors.items():
        if name in regular:
            continue
        try:
            table.check(files, [name])
            chunks = table.chunks(name)
        except CorruptError as error:
            problems.append(str(error))
            continue
        flaw = flaw_of(chunks.offsets, chunks.sizes, tensor.shape, _UNPROVED)
        if flaw is not None and has_few_corners(chunks.offsets, tensor.shape):
            first = first_flaw(chunks.boxes(), tensor.shape)
            flaw = f"element {list(first[0])} was saved {first[1]} times, not once" if first is not None else None
        if flaw is not None:
            problems.append(f"{plain(name)} {list(tensor.shape)}: {flaw}")
    return problems


def _regular(table: ChunkTable, index: Index, files: Files) -> set[str]:
    """The tensors of which it is certain that nothing is wrong."""
    found: set[str] = set()
    waiting: dict[int, list[str]] = {}
    rows: dict[int, int] = {}
    for name, record in index.tensors.items():
        dims = len(record.shape)
        if not dims or record.count < 1 or item_bytes(record.dtype) is None or not _is_small(record):
            continue
        waiting.setdefault(dims, []).append(name)
        rows[dims] = rows.get(dims, 0) + record.count
        if rows[dims] >= _GROUP_ROWS:
            found |= _regular_of(table, index, waiting.pop(dims), files)
            rows[dims] = 0
    for names in waiting.values():
        found |= _regular_of(table, index, names, files)
    return found


def _is_small(record: TensorRecord) -> bool:
    """Whether nothing that is computed here can leave the range of an int64."""
    return min(record.shape) >= 0 and prod(max(length, 1) for length in record.shape) < 2**50


def _regular_of(table: ChunkTable, index: Index, names: Sequence[str], files: Files) -> set[str]:
    """The same, of tensors with as many dimensions. Their rows follow each other in `rows`, those of tensor t from
    `starts[t]` on."""
    try:
        table.check(files, names)
    except CorruptError:  # of one of them: then each is looked at by itself
        return set()
    parts = [table.chunks(name) for name in names]
    records = [index.tensors[name] for name in names]
    counts = np.array([len(part) for part in parts])
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    begins, lengths = (np.concatenate([getattr(part, field) for part in parts]) for field in ("offsets", "sizes"))
    shapes = np.repeat(np.array([record.shape for record in records], np.int64), counts, axis=0)
    axes = np.repeat(np.array([record.axis for record in records]), counts)[:, np.newaxis] == np.arange(shapes.shape[1])

    # Full in all dimensions but one, and in that one each begins where the one before ends.
    full = ((begins == 0) & (lengths == shapes) | axes).all(axis=1)
    begin, length, whole = (np.where(axes, each, 0).sum(axis=1) for each in (begins, lengths, shapes))
    end = begin + length
    before = np.concatenate([[0], end[:-1]])
    before[starts] = 0
    follows = begin == before
    good = np.logical_and.reduceat((lengths > 0).all(axis=1) & full & follows, starts)
    last = starts + counts - 1
    good &= end[last] == whole[last]
    return {name for name, fine in zip(names, good.tolist()) if fine}
