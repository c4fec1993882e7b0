"""The leader's description of a save: the index, the chunk table, and `.metadata`, from which plain DCP loads.

Plain DCP pickles a graph with several objects per chunk: for 4,096 ranks and 1,000 tensors that is minutes and
gigabytes. The bytes of such a pickle are as regular as the table they come from, so they are written straight from it:
per tensor an array of records of a fixed width, constant instructions with the numbers filled in by column. What
unpickles from it is equal to what DCP would have written, and shares the objects that can be shared.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptman._torch_compat import StorageInfo
from ckptman.engine.saving.save_checks import RankEvidence
from ckptman.engine.saving.write_plan import Described
from ckptman.runtime.health.rank_report import RankHealth
from ckptman.storage.format.chunk_table import Chunks, ChunkTable, Ints, Rows, TensorRecord, assemble, unpack
from ckptman.storage.format.index import Location, index_json, objects_json, records_json
from ckptman.storage.format.manifest import FileRecord
from ckptman.storage.format.paths import CHUNKS, INDEX, METADATA, data_name
from ckptman.storage.io.checksums import BlockDigester, digest_bytes
from ckptman.storage.io.durable_files import DISK, open_new

VERSION = "1.0.0"
"""The version that plain DCP writes into its metadata."""
_SLAB = 65536
"""Chunks that are turned into instructions at a time."""
_FLUSH_BYTES = 1024 * 1024
_MOST_KEPT_BYTES = 64 * 1024 * 1024
"""A larger `.metadata` is composed anew for each save, to save memory."""
_CLASSES = (ChunkStorageMetadata, MetadataIndex, StorageInfo, torch.Size, TensorStorageMetadata, BytesStorageMetadata)
_CALL_1, _CALL_2, _CALL_3 = pickle.TUPLE1 + pickle.REDUCE, pickle.TUPLE2 + pickle.REDUCE, pickle.TUPLE3 + pickle.REDUCE


class _Sink(Protocol):
    def write(self, data: bytes | memoryview, /) -> object: ...


Field = tuple[bytes, str, Any]
"""A number in a record: its instruction, its numpy type, and its value in each row."""


@dataclass
class RankResult:
    """Per-rank result of a save, gathered on rank 0.

    `rows`: packed rows of the chunk table; None: as in the save before. Their tensors are numbered through those that
    the ranks share and then `own_tensors`. `objects`: where the pickles of plain values lie. `seen`: whether the
    parameters are those of the save before. `nonfinite`: names of tensors that hold NaN or infinity. `health`: what
    there is to say of this rank's device and node. `tied`: names of parameters that are one on this rank.
    """

    files: dict[str, FileRecord] = field(default_factory=dict)
    rows: bytes | None = None
    own_tensors: tuple[Described, ...] = ()
    objects: dict[str, tuple[int, int]] = field(default_factory=dict)
    units: list[str] = field(default_factory=list)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    buffered_because: str | None = None
    seen: RankEvidence | None = None
    nonfinite: tuple[str, ...] = ()
    health: RankHealth | None = None
    tied: list[list[str]] = field(default_factory=list)


class IndexWriter:
    """Leader only: describes what all ranks wrote. Keeps what does not change from save to save."""

    def __init__(self) -> None:
        self._rows: dict[int, Rows] = {}
        self._tensors: list[Described] = []
        self._records: dict[str, TensorRecord] = {}
        self._records_text = "{}"
        self._table: Ints = np.empty(0, np.int64)
        self._objects: list[dict[str, tuple[int, int]]] = []
        self._objects_text = "{}"
        self._paths: list[Mapping[str, tuple[str | int, ...]]] = []
        self._metadata: bytes | None = None
        """`.metadata` but for its end; None: to be composed."""

    def write_index(
        self, folder: Path, shared: Sequence[Described], results: Sequence[RankResult]
    ) -> dict[str, FileRecord]:
        """Write the index and the chunk table, and return the records of all files of the checkpoint so far.

        Raises: ValueError (the chunks of a tensor do not fill it exactly), OSError.
        """
        tensors = _number_tensors([each.own_tensors for each in results], shared)
        fresh = [rank for rank, each in enumerate(results) if each.rows is not None]
        if fresh or [each for each, _ in tensors] != self._tensors:
            for rank in fresh:
                self._rows[rank] = unpack(results[rank].rows or b"")
            self._tensors = [each for each, _ in tensors]
            renumbered = [_renumber(self._rows[rank], tensors, rank, len(shared)) for rank in range(len(results))]
            self._records, self._table = assemble(self._tensors, renumbered)
            self._records_text, self._metadata = records_json(self._records), None
        if (objects := [each.objects for each in results]) != self._objects:
            self._objects, self._metadata = objects, None
            self._objects_text = objects_json([data_name(rank) for rank in range(len(results))], objects)
        files = {name: record for each in results for name, record in each.files.items()}
        index = index_json(
            [data_name(rank) for rank in range(len(results))],
            self._records_text,
            self._objects_text,
            [unit for each in results for unit in each.units],
            sorted({tuple(names): names for each in results for names in each.tied}.values()),
        )
        return files | write_small(folder, {CHUNKS: self._table.astype("<i8").tobytes(), INDEX: index})

    def write_metadata(
        self, folder: Path, results: Sequence[RankResult], paths: Mapping[str, tuple[str | int, ...]], final: Path
    ) -> FileRecord:
        """Write `.metadata`, after `write_index`. Raises: OSError."""
        all_paths = [paths, *(each.paths for each in results)]
        if all_paths != self._paths:
            self._paths, self._metadata = all_paths, None
        fd = open_new(folder / METADATA, os.O_WRONLY | os.O_EXCL)
        with open(fd, "wb", buffering=1024 * 1024) as file:
            out = _DigestedFile(file)
            if self._metadata is not None:
                out.write(self._metadata)
            else:
                write_metadata(
                    out,
                    self._records,
                    ChunkTable(self._records, self._table),
                    [data_name(rank) for rank in range(len(results))],
                    _objects(results),
                    {name: path for each in all_paths for name, path in each.items()},
                )
                self._metadata = out.kept
            out.write(end_of_metadata(str(final), str(uuid.uuid4())))
            file.flush()
            DISK.sync_file(file.fileno())
        return out.record()


def write_small(folder: Path, files: Mapping[str, bytes]) -> dict[str, FileRecord]:
    """Write files of these names, durably, and return their records. Raises: OSError."""
    for name, data in files.items():
        DISK.write_file(folder / name, data)
    return {name: FileRecord(bytes=len(data), digest=digest_bytes(data)) for name, data in files.items()}


def _objects(results: Sequence[RankResult]) -> dict[str, Location]:
    return {
        name: Location(file=data_name(rank), offset=offset, bytes=size)
        for rank, each in enumerate(results)
        for name, (offset, size) in each.objects.items()
    }


class _DigestedFile:
    """A stream that passes bytes on and digests them. `kept`: what was written so far; None: it was too much."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digester = BlockDigester()
        self._parts: list[bytes] | None = []

    @property
    def kept(self) -> bytes | None:
        return b"".join(self._parts) if self._parts is not None else None

    def write(self, data: bytes | memoryview) -> None:
        self._digester.update(data)
        self._file.write(data)
        if self._parts is not None:
            self._parts.append(bytes(data))
            if self._digester.size_bytes > _MOST_KEPT_BYTES:
                self._parts = None

    def record(self) -> FileRecord:
        return FileRecord(bytes=self._digester.size_bytes, digest=self._digester.finish())


def _number_tensors(
    own: Sequence[Sequence[Described]], shared: Sequence[Described]
) -> list[tuple[Described, dict[int, int]]]:
    """Return all tensors, each with the number that each rank gave it among its own."""
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


def write_metadata(
    out: _Sink,
    tensors: Mapping[str, TensorRecord],
    table: ChunkTable,
    files: Sequence[str],
    objects: Mapping[str, Location],
    paths: Mapping[str, tuple[str | int, ...]],
) -> None:
    """Write the pickle of a `Metadata`, all but `end_of_metadata`. `files` by number; `paths`: where each flat name was
    in the state dict.

    Memory: that of the table, and some MB. Leader only.
    """
    stream = _Stream(out)
    whole = table.whole_tensors()
    tables = {name: table.chunks(name) for name in tensors if name not in whole}
    folders = stream.remember_all(_text(name) for name in files)
    kinds = {record.dtype: record for record in tensors.values()}
    properties = {dtype: stream.remember(_properties(getattr(torch, dtype))) for dtype in kinds}
    names: dict[str, int] = {}
    places: dict[str, int] = {}

    stream.write(_global(Metadata) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT)
    stream.write(_text("state_dict_metadata") + pickle.EMPTY_DICT)
    kinds_of_whole: dict[tuple[str, tuple[int, ...]], tuple[bytes, int]] = {}
    """What describes tensors of one dtype and shape that are one chunk, and the number of its offsets."""
    for name, record in tensors.items():
        if name in whole:
            kind = record.dtype, record.shape
            if kind not in kinds_of_whole:
                kinds_of_whole[kind] = stream.whole(properties[record.dtype], record.shape)
            names[name] = stream.put(_text(name))
            described, places[name] = kinds_of_whole[kind]
            stream.write(described)
            continue
        sizes, which = _sizes(tables[name])
        boxes = stream.remember_all(stream.size(size) for size in sizes)
        names[name] = stream.put(_text(name))
        stream.write(stream.the(TensorStorageMetadata) + _get(properties[record.dtype]) + stream.size(record.shape))
        places[name] = stream.chunks(tables[name].offsets, boxes + which)
        stream.write(_CALL_3 + pickle.SETITEM)
    for name in objects:
        names[name] = stream.put(_text(name))
        stream.write(stream.the(BytesStorageMetadata) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.SETITEM)
    stream.write(pickle.SETITEM)

    stream.write(_text("planner_data") + _fragment(dict(paths)) + pickle.SETITEM)
    stream.write(_text("storage_data") + pickle.EMPTY_DICT)
    for name in tensors:
        if name in whole:
            stream.whole_storage(whole[name], names[name], places[name], folders)
        else:
            stream.storage(tables[name], names[name], places[name], folders)
    for name, each in objects.items():
        stream.write(stream.the(MetadataIndex) + _get(names[name]) + _CALL_1)
        info = _text(each.file) + _integer(each.offset) + _integer(each.bytes)
        stream.write(stream.the(StorageInfo) + info + _CALL_3 + pickle.SETITEM)
    stream.write(pickle.SETITEM)
    stream.flush()


def end_of_metadata(checkpoint_id: str, save_id: str) -> bytes:
    """Return the end of the pickle of a `Metadata`: what is another one in each save."""
    meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id)
    return (
        _text("storage_meta")
        + _fragment(meta)
        + pickle.SETITEM
        + _text("version")
        + _text(VERSION)
        + pickle.SETITEM
        + pickle.BUILD
        + pickle.STOP
    )


class _Stream:
    """Writes instructions, and counts what the unpickler will have in its memo."""

    def __init__(self, out: _Sink) -> None:
        self._out = out
        self._waiting = bytearray()
        self._remembered = 0
        self.write(pickle.PROTO + bytes([4]))
        self._classes: dict[type, int] = {each: self.remember(_global(each)) for each in _CLASSES}

    def write(self, data: bytes | memoryview) -> None:
        self._waiting += data
        if len(self._waiting) >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        self._out.write(memoryview(self._waiting))
        self._waiting = bytearray()

    def put(self, data: bytes) -> int:
        """Write what makes an object, and remember it. Its number in the memo."""
        self.write(data + pickle.MEMOIZE)
        self._remembered += 1
        return self._remembered - 1

    def remember(self, data: bytes) -> int:
        """Do the same, and take it off the stack."""
        number = self.put(data)
        self.write(pickle.POP)
        return number

    def remember_all(self, each: Iterator[bytes]) -> int:
        """Remember several objects. The number of the first; the others follow."""
        first = self._remembered
        for data in each:
            self.remember(data)
        return first

    def the(self, known: type) -> bytes:
        return pickle.BINGET + bytes([self._classes[known]])

    def size(self, numbers: Sequence[int]) -> bytes:
        """Return a `torch.Size`."""
        return self.the(torch.Size) + _fragment(tuple(numbers)) + _CALL_1

    def chunks(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> int:
        """Return the list of a tensor's chunks; `sizes` are numbers in the memo. The number of the first chunk's
        offsets."""
        first = self._remembered
        self.write(pickle.EMPTY_LIST)
        for begin in range(0, len(offsets), _SLAB):
            part = slice(begin, begin + _SLAB)
            numbers: list[bytes | Field] = [_number(offsets[part, dim]) for dim in range(offsets.shape[1])]
            size: list[bytes | Field] = [
                self.the(torch.Size) + pickle.MARK,
                *numbers,
                pickle.TUPLE + _CALL_1 + pickle.MEMOIZE,
            ]
            record = [self.the(ChunkStorageMetadata), *size, _getter(sizes[part]), _CALL_2]
            self._records(len(offsets[part]), record, pickle.APPENDS)
        self._remembered += len(offsets)
        return first

    def whole(self, properties: int, shape: Sequence[int]) -> tuple[bytes, int]:
        """Remember the offsets of a tensor that is one chunk. Returns what completes the entry of each such tensor,
        after its name, and the number of the offsets."""
        offsets, sizes = self.remember(self.size([0] * len(shape))), self.remember(self.size(shape))
        chunk = self.the(ChunkStorageMetadata) + _get(offsets) + _get(sizes) + _CALL_2
        described = self.the(TensorStorageMetadata) + _get(properties) + _get(sizes)
        return described + pickle.EMPTY_LIST + chunk + pickle.APPEND + _CALL_3 + pickle.SETITEM, offsets

    def whole_storage(self, place: tuple[int, int, int], name: int, offsets: int, files: int) -> None:
        """Write where a tensor lies that is one chunk: file, offset and bytes."""
        file, offset, size = place
        key = self.the(MetadataIndex) + _get(name) + _get(offsets) + _integer(0) + _CALL_3
        info = self.the(StorageInfo) + _get(files + file) + _integer(offset) + _integer(size) + _CALL_3
        self.write(key + info + pickle.SETITEM)

    def storage(self, chunks: Chunks, name: int, offsets: int, files: int) -> None:
        """Where the chunks lie: pairs for the dictionary that is on top of the stack."""
        for begin in range(0, len(chunks), _SLAB):
            part = slice(begin, begin + _SLAB)
            rows = np.arange(begin, begin + len(chunks.file[part]))
            key: list[bytes | Field] = [
                self.the(MetadataIndex) + _get(name),
                _getter(offsets + rows),
                _number(rows),
                _CALL_3,
            ]
            place = [_getter(files + chunks.file[part]), _number(chunks.offset[part]), _number(chunks.bytes[part])]
            self._records(len(rows), [*key, self.the(StorageInfo), *place, _CALL_3], pickle.SETITEMS)

    def _records(self, count: int, layout: Sequence[bytes | Field], close: bytes) -> None:
        sample, kinds = b"", []
        columns = []
        for part in layout:
            if isinstance(part, bytes):
                sample += part
                kinds.append(f"V{len(part)}")
                continue
            opcode, kind, values = part
            columns.append((f"f{len(kinds) + 1}", values))
            sample += opcode + bytes(np.dtype(kind).itemsize)
            kinds += [f"V{len(opcode)}", kind]
        records = np.empty(count, _layout(tuple(kinds)))
        plain = records.view(np.uint8).reshape(count, len(sample))
        plain[:] = np.frombuffer(sample, np.uint8)
        for column, values in columns:
            records[column] = values
        self.write(pickle.MARK)
        self.write(plain.reshape(-1).data)
        self.write(close)


@lru_cache(256)
def _layout(kinds: tuple[str, ...]) -> np.dtype[np.void]:
    return np.dtype([(f"f{place}", kind) for place, kind in enumerate(kinds)])


def _number(values: NDArray[np.int64]) -> Field:
    """Return integers, by the shortest instruction that fits them all."""
    low, high = int(values.min()), int(values.max())
    if low >= 0 and high < 2**8:
        return pickle.BININT1, "u1", values
    if low >= 0 and high < 2**16:
        return pickle.BININT2, "<u2", values
    if low >= -(2**31) and high < 2**31:
        return pickle.BININT, "<i4", values
    return pickle.LONG1 + bytes([8]), "<i8", values


def _integer(number: int) -> bytes:
    """Return one integer."""
    if 0 <= number < 2**31:
        return pickle.BININT + struct.pack("<i", number)
    return _fragment(number)


def _getter(numbers: NDArray[np.int64]) -> Field:
    """Return objects out of the memo."""
    return pickle.LONG_BINGET, "<u4", numbers


def _get(number: int) -> bytes:
    return pickle.LONG_BINGET + struct.pack("<I", number)


def _sizes(chunks: Chunks) -> tuple[list[list[int]], NDArray[np.int64]]:
    """Return the sizes that occur, and which of them each chunk has."""
    sizes = chunks.sizes
    if not len(sizes) or (sizes == sizes[0]).all():
        return sizes[:1].tolist(), np.zeros(len(sizes), np.int64)
    extent = (sizes.max(axis=0) + 1).tolist()
    if sizes.min() < 0 or prod(extent) >= 2**63:
        distinct, which = np.unique(sizes, axis=0, return_inverse=True)
        return distinct.tolist(), which.reshape(-1)
    # The same, ten times as fast: one number for each.
    numbers, which = np.unique(np.ravel_multi_index(tuple(sizes.T), extent), return_inverse=True)
    return np.column_stack(np.unravel_index(numbers, extent)).tolist(), which


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def _global(known: type) -> bytes:
    return pickle.GLOBAL + f"{known.__module__}\n{known.__qualname__}\n".encode()


def _properties(dtype: torch.dtype) -> bytes:
    """Return a `TensorProperties` that every torch reads: without the strides of 2.15, at which older ones stop."""
    state = TensorProperties(dtype).__getstate__()[:5]  # type: ignore[no-untyped-call]
    return _global(TensorProperties) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + _fragment(state) + pickle.BUILD


def _fragment(value: object) -> bytes:
    """Return the instructions that make a value, to be put among others: without memo, header and end."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=3, fix_imports=False)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]
