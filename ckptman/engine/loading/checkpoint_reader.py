"""Read what a checkpoint holds, whoever wrote it: tensors by flat name, and the plain values around them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptman._torch_compat import StorageInfo
from ckptman.engine.loading.restricted_unpickler import load_plain, read_foreign_metadata, transforms_in
from ckptman.engine.state.file_layout import payload_of
from ckptman.errors import CorruptError, NotFoundError, plain, warn
from ckptman.storage.catalog.reader_lease import refuse_gone
from ckptman.storage.format.chunk_table import ChunkTable, Rows, TensorRecord, assemble
from ckptman.storage.format.foreign import recognize
from ckptman.storage.format.index import (
    Index,
    Location,
    data_files,
    open_table,
    ranks_with_values,
    read_checked,
    read_digests,
    read_index,
)
from ckptman.storage.format.manifest import Manifest, missing_file, read_manifest
from ckptman.storage.format.paths import INDEX, MANIFEST, METADATA, parse_step
from ckptman.storage.format.torch_zip import PartOfFile
from ckptman.storage.format.value_codec import TensorRef, decode, leaves_in, paths_in, plain_value
from ckptman.storage.io.checked_reader import Wanted, read_wanted
from ckptman.storage.io.checksums import Digests, digest_file, digest_of_blocks
from ckptman.storage.io.safe_open import open_regular
from ckptman.storage.io.threads import SCRATCH, Scratch

MAX_LIST = 1_000_000
"""The longest list of a foreign checkpoint that is believed."""


class ChunkPlace(NamedTuple):
    """A saved box of a tensor, and the container that holds it. `payload`: -1 if it has to be looked for."""

    file: str
    offset: int
    bytes: int
    payload: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass
class SavedState:
    """A checkpoint that can be read.

    `values` holds, for each key of the application's state, its entries or its one plain value, with each tensor as a
    `TensorRef`. `manifest` is None for a foreign one, and `described` what its `.metadata` says.
    """

    folder: Path
    index: Index
    table: ChunkTable
    manifest: Manifest | None
    values: dict[str, Any] = field(default_factory=dict)
    described: Metadata | None = None
    _digests: dict[str, Digests] = field(default_factory=dict, init=False)
    _checked: set[str] = field(default_factory=set, init=False)
    """The tensors whose rows of the chunk table were checked."""

    @classmethod
    def read(cls, folder: Path, rank: int | None = None) -> SavedState:
        """Read the description of a checkpoint.

        Args:
            rank: of what each rank saved for itself, read only what is for this one; None: for all.

        Raises: NotFoundError (no checkpoint there), CorruptError, FormatVersionError.
        """
        if (folder / MANIFEST).exists():
            manifest = read_manifest(folder)
            named = parse_step(folder.name)
            if named is not None and named.step != manifest.step:
                raise CorruptError(
                    f"{folder} holds the checkpoint of step {manifest.step} under another name: load it by the name of "
                    f"its own step, or restore an older checkpoint"
                )
            index = read_index(folder, manifest, ranks=None if rank is None else _own(manifest, rank))
            return cls(folder, index, open_table(folder, manifest, index), manifest, _values_of(index, folder))
        if (folder / METADATA).exists():
            return cls.by_metadata(folder, read_foreign_metadata(folder / METADATA))
        if (other := recognize(folder)) is not None:
            other.refuse()
        raise NotFoundError(
            f"{folder} is no checkpoint: it has neither {MANIFEST} nor {METADATA}. Name the folder of one step"
        )

    @classmethod
    def by_metadata(cls, folder: Path, metadata: Metadata) -> SavedState:
        """Return a checkpoint as `.metadata` alone describes it. Raises: CorruptError (it contradicts itself)."""
        index, table = _index_of(folder, metadata)
        saved = cls(folder, index, table, None, described=metadata)
        saved.values = _foreign_values(saved, metadata)
        return saved

    def refuse_transformed(self) -> None:
        """Refuse what plain DCP transformed after torch.save, such as by compression. Raises: CorruptError."""
        changed = transforms_in(self.described) if self.described is not None else {}
        if changed:
            raise CorruptError(
                f"{self.folder} is compressed, or transformed otherwise ({plain(next(iter(changed.values())))}), which "
                f"torch alone undoes: load it by dcp.load with the extensions it was saved with, and save it again by "
                f"ckptman"
            )

    @property
    def identity(self) -> str:
        """Return what tells it from another checkpoint of the same name; "" for a foreign one."""
        return self.manifest.identity if self.manifest is not None else ""

    def tree(self, *, verify: bool = True) -> dict[str, Any]:
        """Return the state as it was saved, by key, with each tensor as a `TensorRef`, and what is read late as `Lazy`.

        What is in no value of the index, because something beside it has no form in JSON, is found by its flat name.
        """
        tree = {key: dict(value) if type(value) is dict else value for key, value in self.values.items()}
        if self.manifest is None:
            return tree
        known = {leaf.name if isinstance(leaf, TensorRef) else ".".join(map(str, at)) for at, leaf in leaves_in(tree)}
        for name in (*self.index.tensors, *self.index.objects):
            if name in known:
                continue
            top, _, rest = name.partition(".")
            entry = tree.setdefault(top, {}) if rest else None
            is_tensor = name in self.index.tensors
            leaf = TensorRef(name) if is_tensor else Lazy(partial(self.plain_value, name, verify=verify))
            if isinstance(entry, dict):
                entry[rest] = leaf
            else:
                tree[name] = leaf
        return tree

    def tensor(self, name: str) -> TensorRecord:
        """Return shape and dtype of a tensor. Raises: CorruptError."""
        if name not in self.index.tensors:
            raise CorruptError(f"{self.folder}: {name} is referred to and not saved: restore an older checkpoint")
        return self.index.tensors[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor. Raises: CorruptError."""
        text = self.tensor(name).dtype
        dtype = vars(torch).get(text)  # not getattr: that imports what torch leaves for later
        if not isinstance(dtype, torch.dtype):
            raise CorruptError(
                f"{self.folder}: {name} has the dtype {text[:100]!r}, which this torch does not know: use a newer "
                f"torch, or restore an older checkpoint"
            )
        return dtype

    def chunks_in(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[ChunkPlace]:
        """Yield the chunks of a tensor that have elements in a box. Raises: CorruptError."""
        self.check((name,))
        chunks = self.table.chunks(name)
        for row in chunks.overlapping(offsets, sizes):
            yield self._place(chunks, int(row))

    def all_chunks(self, name: str) -> Iterator[ChunkPlace]:
        """Yield all chunks of a tensor. Raises: CorruptError."""
        self.check((name,))
        chunks = self.table.chunks(name)
        for row in range(len(chunks)):
            yield self._place(chunks, row)

    def payload(self, name: str, chunk: ChunkPlace) -> int | None:
        """Return where the payload of a chunk begins in its file; None where only `torch.load` can read it."""
        if chunk.payload >= 0:
            return chunk.payload
        if self.manifest is not None:
            return None
        with open(open_regular(self.folder / chunk.file, follow=True), "rb") as file:
            file.seek(chunk.offset)
            # Only the ends of a container are looked at: zipfile seeks, and nothing reads the payload.
            inside = payload_of(
                io.BufferedReader(PartOfFile(file.fileno(), chunk.offset, chunk.bytes)), self.dtype(name), chunk.sizes
            )
        return None if inside is None else chunk.offset + inside

    def read_wanted(self, wanted: Sequence[Wanted], *, verify: bool = True, scratch: Scratch = SCRATCH) -> int:
        """Read ranges of the data files, each block checked where there are digests. Returns the bytes that were read.

        Raises: CorruptError, OSError.
        """
        known = {name: self.digests(name) for name in {each.file for each in wanted}} if verify else {}
        digests = {name: each for name, each in known.items() if each is not None}
        return read_wanted(self.folder, wanted, digests or None, scratch=scratch)

    def read_range(self, file: str, offset: int, size: int, label: str, *, verify: bool = True) -> bytearray:
        """Return bytes of a data file. Raises: CorruptError, OSError."""
        data = bytearray(size)
        self.read_wanted([Wanted(file, offset, size, into=memoryview(data), label=label)], verify=verify)
        return data

    def pickle_of(self, name: str, *, verify: bool = True) -> bytes:
        """Return the pickle of a plain value. Raises: CorruptError, OSError."""
        at = self.object(name)
        return bytes(self.read_range(at.file, at.offset, at.bytes, name, verify=verify))

    def unpickled(self, name: str, data: bytes) -> Any:
        """Load a plain value from its pickle, by the restricted unpickler. Raises: CorruptError."""
        return load_plain(io.BytesIO(data), f"{self.folder}: the value {name}")

    def plain_value(self, name: str, *, verify: bool = True) -> Any:
        """Read and load a plain value of which there is a pickle. Raises: CorruptError, OSError."""
        return self.unpickled(name, self.pickle_of(name, verify=verify))

    def object(self, name: str) -> Location:
        """Return where the pickle of a plain value lies. Raises: CorruptError."""
        if name not in self.index.objects:
            raise CorruptError(f"{self.folder}: {name} is referred to and not saved: restore an older checkpoint")
        place = self.index.objects[name]
        if self.manifest is None:
            size = size_of(self.folder / place.file)
            if size < 0:
                raise CorruptError(
                    f"{self.folder / place.file} is missing, and the value {name} is in it: restore another checkpoint"
                )
            if min(place.offset, place.bytes) < 0 or place.offset + place.bytes > size:
                raise CorruptError(
                    f"{self.folder / place.file} has {size} bytes, and the value {name} is to lie at {place.offset} + "
                    f"{place.bytes}: restore another checkpoint"
                )
        return place

    def digests(self, file: str) -> Digests | None:
        """Return the block digests of a data file; None for a foreign checkpoint. Raises: CorruptError."""
        if self.manifest is None:
            return None
        if file not in self._digests:
            self._digests[file] = read_digests(self.folder, file, self.manifest)
        return self._digests[file]

    @cached_property
    def metadata(self) -> Metadata:
        """Return what DCP plans with. It grows with the number of chunks: ckptman itself plans without it."""
        metadata = self.describe(self.index.tensors)
        described = metadata.state_dict_metadata
        for name, at in self.index.objects.items():
            described[name] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(name)] = StorageInfo(at.file, at.offset, at.bytes)
        paths = dict(paths_in(self.values, (TensorRef, Lazy)))
        if self.manifest is not None and not described.keys() <= paths.keys():
            # Only .metadata says where in the state an object is that has no plain form.
            paths = dict(self.written_metadata().planner_data or {})
        metadata.planner_data = {name: paths.get(name, (name,)) for name in described}
        return metadata

    def describe(self, names: Iterable[str]) -> Metadata:
        """Return some tensors of the chunk table as DCP describes them."""
        described: dict[str, Any] = {}
        places: dict[MetadataIndex, Any] = {}
        for name in names:
            chunks = list(self.all_chunks(name))
            boxes = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in chunks]
            properties = TensorProperties(dtype=self.dtype(name))
            described[name] = TensorStorageMetadata(properties, torch.Size(self.tensor(name).shape), boxes)
            for each in chunks:
                places[MetadataIndex(name, each.offsets)] = StorageInfo(each.file, each.offset, each.bytes)
        return Metadata(state_dict_metadata=described, storage_data=places)

    def written_metadata(self) -> Metadata:
        """Return `.metadata` as it was written, by ckptman or by plain DCP. Raises: CorruptError."""
        if self.described is not None:
            return self.described
        if self.manifest is not None:
            read_checked(self.folder, METADATA, self.manifest)
        return read_foreign_metadata(self.folder / METADATA)

    def chunk(self, index: MetadataIndex) -> ChunkPlace:
        """Return the chunk that DCP names by its offset. Raises: CorruptError."""
        offsets = tuple(index.offset or ())
        for place in self.chunks_in(index.fqn, offsets, (1,) * len(offsets)):
            if place.offsets == offsets:
                return place
        raise CorruptError(f"{self.folder}: no chunk of {index.fqn} begins at {list(offsets)}")

    @cached_property
    def _files(self) -> list[tuple[str, int]]:
        if self.manifest is not None:
            return data_files(self.manifest, self.index)
        return [(name, size_of(self.folder / name)) for name in self.index.files]

    def check(self, names: Iterable[str]) -> None:
        """Check the rows of these tensors, where not yet done; many at once are faster. Raises: CorruptError."""
        new = [name for name in names if name not in self._checked]
        if new:
            for name in new:
                self.tensor(name)
            self.table.check(self._files, new)
            self._checked.update(new)

    def check_size(self, name: str) -> None:
        """Check that as many bytes of a tensor were saved as its shape says. Raises: CorruptError."""
        record = self.tensor(name)
        self.check((name,))
        size, there = prod(record.shape) * self.dtype(name).itemsize, int(self.table.chunks(name).bytes.sum())
        if size > there:
            raise CorruptError(
                f"{self.folder}: {name} {list(record.shape)} has {size} bytes by its shape, but {there} were saved: "
                f"restore an older checkpoint"
            )

    def _place(self, chunks: Any, row: int) -> ChunkPlace:
        return ChunkPlace(
            self.index.files[int(chunks.file[row])],
            int(chunks.offset[row]),
            int(chunks.bytes[row]),
            int(chunks.payload[row]),
            tuple(chunks.offsets[row].tolist()),
            tuple(chunks.sizes[row].tolist()),
        )


def _own(manifest: Manifest, rank: int) -> list[int]:
    ranks = ranks_with_values(manifest)
    return [rank] if rank in ranks else ranks[rank % len(ranks) :][:1] if ranks else []


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; -1 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def read_to_load(folder: Path, rank: int | None = None, *, is_whole: bool = True) -> SavedState:
    """Read the description of a checkpoint that is about to be loaded, and warn where it lost its manifest.

    Rank 0, or whoever loads alone, checks that the files are those that the manifest names, by their sizes; where it
    `is_whole`.

    Raises: as `SavedState.read`; GoneError; CorruptError where a file is another, or where only torch can read it.
    """
    saved = SavedState.read(folder, rank)
    saved.refuse_transformed()
    if saved.manifest is not None and not rank and is_whole:
        _check_files(folder, saved.manifest)
    if saved.manifest is None and not rank:
        refuse_gone(folder)
    if saved.manifest is None and (folder / INDEX).exists() and not rank:
        warn(
            f"{folder} has lost its {MANIFEST}, or never got one: a copy or an adoption of it was stopped. It is "
            f"loaded as a checkpoint of plain DCP, of which no byte can be checked. Load another copy if there is one, "
            f"or end what was stopped"
        )
    return saved


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Check that no other program has saved over a checkpoint: its plain values would be those of the save before.

    Raises: CorruptError, OSError.
    """
    problem = missing_file(folder, manifest)
    record = manifest.files.get(METADATA)
    if record is not None and size_of(folder / METADATA) == record.bytes and problem is None:
        # The same state gives one of the same size.
        _, blocks = digest_file(folder / METADATA, manifest.block_bytes)
        problem = None if digest_of_blocks(blocks) == record.digest else f"{METADATA} does not match its digest"
    if problem is None:
        return
    if problem.startswith(METADATA):
        raise CorruptError(
            f"{folder}: {problem}: it is damaged, or plain DCP saved over it. Restore an older checkpoint, or bring "
            f"this one back from a copy; what plain DCP saved, dcp.load loads (docs/compatibility.md)"
        )
    raise CorruptError(
        f"{folder} is not what was saved: {problem}; restore an older checkpoint, or bring this one back from a copy"
    )


def _values_of(index: Index, folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for unit in index.units:
        try:
            if unit.whole:
                values[unit.state] = decode(unit.value)
            else:
                values.setdefault(unit.state, {})[decode(unit.key)] = decode(unit.value)
        except (CorruptError, TypeError) as error:
            raise CorruptError(
                f"{folder}: the value {unit.state[:100]!r} cannot be read: {error}; restore an older checkpoint"
            ) from error
    return values


def _index_of(folder: Path, metadata: Metadata) -> tuple[Index, ChunkTable]:
    """Return the index of a checkpoint that plain DCP wrote. Where payloads begin is not known yet."""
    files: dict[str, int] = {}
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    numbers: dict[str, int] = {}
    parts: list[dict[int, list[list[int]]]] = []
    objects: dict[str, Location] = {}
    chunks: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            numbers[name] = len(tensors)
            tensors.append((name, str(described.properties.dtype).removeprefix("torch."), tuple(described.size)))
            for each in described.chunks:
                chunks[name, tuple(each.offsets)] = tuple(each.sizes)
    for index, info in metadata.storage_data.items():
        if index.fqn not in numbers:
            objects[index.fqn] = Location(file=info.relative_path, offset=info.offset, bytes=info.length)
            continue
        offsets = tuple(index.offset or ())
        number = files.setdefault(info.relative_path, len(files))
        if number == len(parts):
            parts.append({})
        sizes = chunks.get((index.fqn, offsets))
        if sizes is None:
            raise CorruptError(
                f"{folder / METADATA} places a chunk of {index.fqn} that it does not describe: restore another "
                f"checkpoint"
            )
        row = [numbers[index.fqn], info.offset, info.length, -1, *offsets, *sizes]
        parts[number].setdefault(len(offsets), []).append(row)
    rows: list[Rows] = [{dims: np.array(each, dtype=np.int64) for dims, each in part.items()} for part in parts]
    try:
        records, table = assemble(tensors, rows)
    except (ValueError, OverflowError) as error:
        raise CorruptError(f"{folder / METADATA}: {error}; restore another checkpoint") from error
    index = Index(files=list(files), tensors=records, objects=objects)
    return index, ChunkTable(records, table, where=str(folder / METADATA))


def _foreign_values(saved: SavedState, metadata: Metadata) -> dict[str, Any]:
    """Rebuild the nested state that plain DCP flattened, from the paths in its metadata."""
    folder, values, paths = saved.folder, dict[str, Any](), metadata.planner_data or {}
    for name, described in metadata.state_dict_metadata.items():
        is_tensor = isinstance(described, TensorStorageMetadata)
        leaf = TensorRef(name) if is_tensor else Lazy(partial(saved.plain_value, name))
        _set(values, paths.get(name, (name,)), leaf, folder)
    return values


class Lazy:
    """A plain value of a foreign checkpoint, read once, when it is wanted."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = cache(read)


def resolve(value: Any) -> Any:
    """Return a value with each `Lazy` in it read, and plain values in place of instances that cannot be made here."""
    if isinstance(value, Lazy):
        return value.read()
    if type(value) is dict:
        return {plain_value(key): resolve(each) for key, each in value.items()}
    if type(value) is list:
        return [resolve(each) for each in value]
    return plain_value(value)


def _set(root: dict[str, Any], path: tuple[str | int, ...], leaf: Any, folder: Path) -> None:
    here: Any = root
    for part, following in zip(path, (*path[1:], None)):
        is_last = following is None
        fresh: Any = leaf if is_last else ([] if isinstance(following, int) else {})
        if isinstance(here, list) and isinstance(part, int) and 0 <= part <= MAX_LIST:
            here.extend([None] * (part + 1 - len(here)))
            if is_last or here[part] is None:
                here[part] = fresh
            here = here[part]
        elif isinstance(here, dict):
            if is_last or part not in here:
                here[part] = fresh
            here = here[part]
        else:
            raise CorruptError(
                f"{folder / METADATA} has a value at {path!r}, where there can be none: restore another checkpoint"
            )
