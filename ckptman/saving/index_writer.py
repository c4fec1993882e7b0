"""What a save writes besides tensors: each rank's digests and values, and the leader's description of the whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ckptman.format.chunk_table import ChunkTable, Ints, Rows, TensorRecord
from ckptman.format.index import Index, Location, values_json
from ckptman.format.manifest import FileRecord
from ckptman.format.paths import CHUNKS, INDEX, METADATA, blocks_name, data_name, values_name
from ckptman.format.table_assembly import assemble, unpack
from ckptman.io.checksums import BlockDigester, digest_bytes
from ckptman.io.file_writer import write_source
from ckptman.io.filesystem import Disk, holding, open_new
from ckptman.saving.dcp_metadata import StoredObject, write_metadata
from ckptman.saving.stale_saves import Seen
from ckptman.saving.write_plan import Described
from ckptman.state.file_layout import Image


@dataclass
class Part:
    """What one rank tells the leader about what it wrote.

    `rows`: its packed rows of the chunk table; None: they are as in the last save. Their tensors are counted through
    those that the ranks share and then `own_tensors`. `objects`: where the pickles of plain values lie. `seen`: whether
    its parameters are those of the save before.
    """

    files: dict[str, FileRecord] = field(default_factory=dict)
    rows: bytes | None = None
    own_tensors: tuple[Described, ...] = ()
    objects: dict[str, tuple[int, int]] = field(default_factory=dict)
    units: list[dict[str, Any]] = field(default_factory=list)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    buffered_because: str | None = None
    seen: Seen | None = None


def write_part(
    folder: Path,
    rank: int,
    image: Image,
    own_units: Sequence[Mapping[str, Any]],
    disk: Disk,
    look: Callable[[bytes], Seen | None] | None = None,
) -> Part:
    """Write the files of one rank, durably, and say what they are. `look` is shown the digests of the data file's
    blocks. Raises: OSError."""
    part = Part()
    with holding(folder):
        if image.size_bytes:
            written = write_source(folder / data_name(rank), image, disk=disk)
            digests = written.digests
            part.files[data_name(rank)] = FileRecord(bytes=digests.size_bytes, digest=written.digest)
            part.buffered_because = written.buffered_because
            part.seen = look(digests.blocks) if look is not None else None
            _write(folder, blocks_name(rank), digests.blocks + digests.groups, part.files, disk)
        if own_units:
            _write(folder, values_name(rank), values_json(own_units), part.files, disk)
    return part


class IndexWriter:
    """Leader only: describes what all ranks wrote. Keeps what does not change from save to save."""

    def __init__(self) -> None:
        self._rows: dict[int, Rows] = {}
        self._tensors: list[Described] = []
        self._records: dict[str, TensorRecord] = {}
        self._table: Ints = np.empty(0, np.int64)

    def describe(self, folder: Path, shared: Sequence[Described], parts: Sequence[Part], disk: Disk) -> Index:
        """Write the index and the chunk table; their files are added to the first part's.

        Raises: ValueError (the chunks of a tensor do not fill it exactly), OSError.
        """
        tensors = _number([part.own_tensors for part in parts], shared)
        fresh = [rank for rank, part in enumerate(parts) if part.rows is not None]
        if fresh or [each for each, _ in tensors] != self._tensors:
            for rank in fresh:
                self._rows[rank] = unpack(parts[rank].rows or b"")
            self._tensors = [each for each, _ in tensors]
            renumbered = [_renumber(self._rows[rank], tensors, rank, len(shared)) for rank in range(len(parts))]
            self._records, self._table = assemble(self._tensors, renumbered)
        index = Index(
            files=[data_name(rank) for rank in range(len(parts))],
            tensors=self._records,
            objects={
                name: Location(file=data_name(rank), offset=offset, bytes=size)
                for rank, part in enumerate(parts)
                for name, (offset, size) in part.objects.items()
            },
        )
        units = [unit for part in parts for unit in part.units]
        _write(folder, CHUNKS, self._table.astype("<i8").tobytes(), parts[0].files, disk)
        _write(folder, INDEX, index.to_json(units), parts[0].files, disk)
        return index

    def write_metadata(
        self,
        folder: Path,
        index: Index,
        paths: Mapping[str, tuple[str | int, ...]],
        final: Path,
        save_id: str,
        disk: Disk,
    ) -> FileRecord:
        """Write `.metadata`, from which plain DCP loads. Raises: OSError."""
        objects = {name: StoredObject(each.file, each.offset, each.bytes) for name, each in index.objects.items()}
        table = ChunkTable(index.tensors, self._table)
        fd = open_new(folder / METADATA, os.O_WRONLY | os.O_EXCL)
        with open(fd, "wb", buffering=1024 * 1024) as file:
            out = _DigestedFile(file)
            write_metadata(out, index.tensors, table, index.files, objects, paths, str(final), save_id)  # type: ignore[arg-type]
            file.flush()
            disk.sync_file(file.fileno())
        return out.record()


class _DigestedFile:
    """A stream that passes bytes on and digests them."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._digester = BlockDigester()

    def write(self, data: bytes | memoryview) -> int:
        self._digester.update(data)
        self._file.write(data)
        return len(data)

    def record(self) -> FileRecord:
        return FileRecord(bytes=self._digester.size_bytes, digest=self._digester.finish())


def _write(folder: Path, name: str, data: bytes, files: dict[str, FileRecord], disk: Disk) -> None:
    disk.write_file(folder / name, data)
    files[name] = FileRecord(bytes=len(data), digest=digest_bytes(data))


def _number(own: Sequence[Sequence[Described]], shared: Sequence[Described]) -> list[tuple[Described, dict[int, int]]]:
    """All tensors, each with the number that each rank gave it among its own."""
    found: dict[str, tuple[Described, dict[int, int]]] = {each[0]: (each, {}) for each in shared}
    for rank, tensors in enumerate(own):
        for number, each in enumerate(tensors):
            known, numbers = found.setdefault(each[0], (each, {}))
            if known != each:
                raise ValueError(f"{each[0]} is {known[1:]} on one rank and {each[1:]} on rank {rank}")
            numbers[rank] = number
    return list(found.values())


def _renumber(rows: Rows, tensors: list[tuple[Described, dict[int, int]]], rank: int, shared: int) -> Rows:
    own = {numbers[rank]: number for number, (_, numbers) in enumerate(tensors) if rank in numbers}
    if not own:
        return rows
    to = np.array([*range(shared), *(own[each] for each in range(len(own)))], dtype=np.int64)
    return {dims: np.concatenate([to[each[:, :1]], each[:, 1:]], axis=1) for dims, each in rows.items()}
