"""The index: what tensors and plain values a checkpoint holds and where they lie.

`index.json` is plain JSON, so that tools read a checkpoint with no torch and no pickle; it grows with the number of
tensors. What grows with ranks x tensors is the chunk table beside it (see `chunks`). dtypes are torch's names
(`bfloat16`), shapes are global. Plain values that only one rank has are in a file of that rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from xxhash import xxh3_128_hexdigest

from ckptman.errors import ConfigError, CorruptError, plain
from ckptman.storage.format.chunk_table import ChunkTable, TensorRecord
from ckptman.storage.format.manifest import FORMAT_VERSION, FileRecord, Manifest, parse_versioned
from ckptman.storage.format.paths import CHUNKS, INDEX, digests_name, rank_of, values_name
from ckptman.storage.io.checksums import Digests, digest_bytes, digest_file, digest_of_blocks
from ckptman.storage.io.failure_cause import reading
from ckptman.storage.io.safe_open import read_regular

MOST_BYTES = 4 * 1024**3
"""No index and no file of values is larger, and none is written that is: they are read whole, as text."""


class Location(BaseModel):
    """A range of bytes in a file of the checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    file: str
    offset: Annotated[int, Field(gt=-(2**62), lt=2**62)]
    bytes: Annotated[int, Field(gt=-(2**62), lt=2**62)]


class Unit(BaseModel):
    """One entry of the application's state: `state` is its key, `key` the entry in it (None: the state is one value).

    `key` and `value` are encoded by `format.value_codec`; a tensor in `value` is a reference to its flat name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    state: str
    key: Any = None
    whole: bool = False
    value: Any = None


class Values(BaseModel):
    """The plain values that only one rank has."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format_version: int = FORMAT_VERSION
    units: list[Unit] = []


class Index(BaseModel):
    """What a checkpoint holds.

    `tensors` says what each is and where its rows are in the chunk table; `files` gives the table's file numbers their
    names. `objects` places the pickles that are written for other readers; ckptman itself reads plain values from
    `units`. `tied`: names of parameters that were one, such as of an embedding and the head of a model; left out of the
    file where there are none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format_version: int = FORMAT_VERSION
    files: list[str] = []
    tensors: dict[str, TensorRecord] = {}
    objects: dict[str, Location] = {}
    units: list[Unit] = []
    tied: list[list[str]] = []

    def to_json(self) -> bytes:
        """Return the bytes of `index.json`."""
        said = self.model_dump(mode="python")
        return _to_json({name: value for name, value in said.items() if value or name != "tied"})


def read_index(folder: Path, manifest: Manifest, *, ranks: Iterable[int] | None = None) -> Index:
    """Read the index of a checkpoint, with the values that only `ranks` have; None: of all ranks.

    Raises: CorruptError (digests are checked), FormatVersionError.
    """
    index, path = _read(folder, INDEX, manifest, Index), folder / INDEX
    for at in index.objects.values():
        known = manifest.files.get(at.file)
        if known is None:
            raise CorruptError(f"{path} points to {at.file!r}, which the manifest does not name; {_remedy(folder)}")
        if at.offset < 0 or at.bytes < 0 or at.offset + at.bytes > known.bytes:
            where = f"{at.file} ({at.offset} + {at.bytes} bytes)"
            raise CorruptError(f"{path} points outside {where}; {_remedy(folder)}")
    wanted = [values_name(rank) for rank in sorted(ranks_with_values(manifest) if ranks is None else ranks)]
    own = [unit for name in wanted if name in manifest.files for unit in _read(folder, name, manifest, Values).units]
    return index.model_copy(update={"units": index.units + own})


def ranks_with_values(manifest: Manifest) -> list[int]:
    """Return the ranks that have plain values of their own, ascending."""
    ranks = [rank_of(name) for name in manifest.files if name.startswith("values-")]
    return sorted(rank for rank in ranks if rank is not None)


def open_table(folder: Path, manifest: Manifest, index: Index) -> ChunkTable:
    """Open the chunk table of a checkpoint, checked against its digest. Raises: CorruptError; OSError (`ELSEWHERE`)."""
    path, record = folder / CHUNKS, _record(folder, CHUNKS, manifest)
    with reading(path, _remedy(folder)):
        table = ChunkTable.open(path, index.tensors, record.bytes)
        size, blocks = digest_file(path, manifest.block_bytes)
    if size != record.bytes or digest_of_blocks(blocks) != record.digest:
        raise _changed(path, folder)
    return table


def data_files(manifest: Manifest, index: Index) -> list[tuple[str, int]]:
    """Return names and sizes in bytes of the data files, in the order of their numbers; -1 where a rank wrote none."""
    return [(name, manifest.files[name].bytes if name in manifest.files else -1) for name in index.files]


def read_checked(folder: Path, name: str, manifest: Manifest) -> bytes:
    """Read a whole file of a checkpoint, checked against its digest. Raises: CorruptError; OSError (`ELSEWHERE`)."""
    path, record = folder / name, _record(folder, name, manifest)
    with reading(path, _remedy(folder)):
        data = read_regular(path, record.bytes + 1)  # a byte more, to see whether it has grown
    if len(data) != record.bytes:
        raise CorruptError(f"{path} has {len(data)} bytes instead of {record.bytes}; {_remedy(folder)}")
    if digest_bytes(data, manifest.block_bytes) != record.digest:
        raise _changed(path, folder)
    return data


def read_digests(folder: Path, file: str, manifest: Manifest) -> Digests:
    """Read the digests of the blocks of a data file. Raises: CorruptError."""
    name = digests_name(file)
    if name is None or name not in manifest.files or file not in manifest.files:
        raise CorruptError(f"{folder}: {plain(file)} has no block digests; {_remedy(folder)}")
    record, data = manifest.files[file], read_checked(folder, name, manifest)
    try:
        digests = Digests.from_bytes(data, manifest.block_bytes, record.bytes)
    except CorruptError as error:
        raise CorruptError(f"{folder / name}: {error}; {_remedy(folder)}") from error
    if xxh3_128_hexdigest(digests.blocks) != record.digest:
        raise CorruptError(f"{folder}: {name} holds no digests of {plain(file)}; {_remedy(folder)}")
    return digests


def _record(folder: Path, name: str, manifest: Manifest) -> FileRecord:
    if name not in manifest.files:
        raise CorruptError(f"{folder}: the manifest does not name {name}; {_remedy(folder)}")
    return manifest.files[name]


def _changed(path: Path, folder: Path) -> CorruptError:
    return CorruptError(
        f"{path} does not match its digest: its bytes have changed since they were saved; {_remedy(folder)}"
    )


def _remedy(folder: Path) -> str:
    return f"restore an older checkpoint, or run `ckptman verify {folder}` to see what is damaged"


M = TypeVar("M", Index, Values)


def _read(folder: Path, name: str, manifest: Manifest, model: type[M]) -> M:
    path, size = folder / name, _record(folder, name, manifest).bytes
    if size > MOST_BYTES:
        raise CorruptError(
            f"{path} has {size} bytes, and no more than {MOST_BYTES} can be right: ckptman did not write it; "
            f"{_remedy(folder)}"
        )
    raw = parse_versioned(path, read_checked(folder, name, manifest))
    try:
        return model.model_validate(raw)
    except (ValidationError, RecursionError, MemoryError) as error:
        nested = "it is nested too deeply" if isinstance(error, RecursionError) else "it does not fit the memory"
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else nested
        raise CorruptError(f"{path} is not what ckptman writes there ({why}); {_remedy(folder)}") from None


def values_json(units: Sequence[str]) -> bytes:
    """Return the bytes of a `values-RRRRR.json`, given the texts of its units."""
    return _checked(f'{{"format_version":{FORMAT_VERSION},"units":{texts_json(units)}}}\n')


def index_json(
    files: Sequence[str], tensors: str, objects: str, units: Sequence[str], tied: Sequence[Sequence[str]]
) -> bytes:
    """Return the bytes of `index.json`, of which most is given as text: see `Index`."""
    fields = {
        "format_version": str(FORMAT_VERSION),
        "files": to_text(files),
        "tensors": tensors,
        "objects": objects,
        "units": texts_json(units),
        **({"tied": to_text(tied)} if tied else {}),
    }
    return _checked("{" + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}\n")


def records_json(records: Mapping[str, TensorRecord]) -> str:
    """Return the text of the records of tensors."""
    kinds = {(at.dtype, at.shape): to_text({"dtype": at.dtype, "shape": at.shape})[:-1] for at in records.values()}
    return _object_json(
        (name, f'{kinds[at.dtype, at.shape]},"start":{at.start},"count":{at.count},"axis":{at.axis}}}')
        for name, at in records.items()
    )


def objects_json(files: Sequence[str], places: Sequence[Mapping[str, tuple[int, int]]]) -> str:
    """Return the text of where pickles lie: in each file, by name, offset and bytes."""
    return _object_json(
        (name, f'{{"file":"{file}","offset":{offset},"bytes":{size}}}')
        for file, each in zip(files, places)
        for name, (offset, size) in each.items()
    )


def _object_json(members: Iterable[tuple[str, str]]) -> str:
    return f"{{{','.join([f'{encode_basestring_ascii(name)}:{text}' for name, text in members])}}}"


def texts_json(texts: Iterable[str]) -> str:
    """Return the text of a list, given those of its members."""
    return f"[{','.join(texts)}]"


def to_text(value: Any) -> str:
    """Return the text of a value in an index."""
    return json.dumps(value, separators=(",", ":"), default=dict)


def _to_json(fields: Mapping[str, Any]) -> bytes:
    return _checked(to_text(fields) + "\n")


def _checked(text: str) -> bytes:
    data = text.encode()
    if len(data) > MOST_BYTES:
        raise ConfigError(
            f"the plain values of the state take {len(data):,} bytes as text, and {MOST_BYTES:,} are the most that is "
            f"read back: put the large ones into tensors"
        )
    return data
