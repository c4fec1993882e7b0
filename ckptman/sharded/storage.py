"""Storage for torch's distributed checkpoint: the same files that plain DCP reads, digested, indexed and committed.

`StorageWriter` and `StorageReader` work with `dcp.save(..., storage_writer=)` and `dcp.load(..., storage_reader=)`.
The commit rides on DCP's own steps: its exchange of write results is the *arrive* that carries each rank's error to all
others, its `finish` on the leader is the commit, and the broadcast after that is the *depart*.
"""

from __future__ import annotations

import io
import os
import pickle
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import ckptman
from ckptman.errors import CorruptError, ExistsError
from ckptman.sharded.foreign import load_plain
from ckptman.sharded.saved import SavedState
from ckptman.sharded.state import Snapshot, snapshot_of
from ckptman.store.digest import BLOCK_BYTES, BlockDigester, digest_bytes
from ckptman.store.durable import DISK, Disk
from ckptman.store.index import Chunk, Index, Location, TensorRecord
from ckptman.store.manifest import FileRecord, Manifest, Mesh
from ckptman.store.names import METADATA, index_name, parse_step
from ckptman.store.place import FolderPlace, Place
from ckptman.store.verify import check_file

_RECORDS = "ckptman.files"
"""The name under which a rank's file records travel to the leader among its write results."""


@dataclass(frozen=True)
class SaveInfo:
    """What the manifest says besides sizes and digests."""

    step: int = 0
    reason: str = "saved by dcp.save"
    world_size: int = 1
    mesh: Mesh | None = None
    run_id: str = ""
    job_id: str | None = None
    attempt: int = 1
    restored_from: int | None = None
    metrics: Mapping[str, float] | None = None


class StorageWriter(FileSystemWriter):
    """Writes one checkpoint: data files by DCP, digests on the way, an index per rank, and the commit.

    Args: `path`, the folder that appears when, and only when, the save is complete. An existing one raises ExistsError
    unless `overwrite`; it then stays until the new one takes its place.
    Raises, through DCP on every rank: OSError (disk full, quota), ExistsError, ConfigError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        info: SaveInfo | None = None,
        overwrite: bool = False,
        place: Place | None = None,
        tag: str | None = None,
        disk: Disk = DISK,
        on_commit: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(path, sync_files=False, overwrite=True)
        self._final = Path(path)
        self._info = info
        self._overwrite = overwrite
        self._place = place or FolderPlace(self._final.parent, disk)
        self._tag = tag or os.urandom(4).hex()
        self._disk = disk
        self._on_commit = on_commit
        self._draft: str | None = None
        self._digests: dict[str, BlockDigester] = {}
        self.fs = _DigestingFileSystem(disk, self._digests)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._final = Path(checkpoint_id)
            self._place = FolderPlace(self._final.parent, self._disk)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not self._overwrite and os.path.lexists(self._final):
            raise ExistsError(f"{self._final} exists already: save under another name, or say overwrite=True")
        if isinstance(self._place, FolderPlace):
            self._place.make()
        self._draft = self._place.begin(self._final.name, self._tag)
        return [
            replace(plan, storage_data=_Assignment(f"__{rank}_", rank, self._draft)) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files durably, then the index that says where everything lies."""
        assignment: _Assignment = plan.storage_data
        folder = Path(assignment.draft)
        self.path = folder
        self._digests.clear()
        results = super().write_data(plan, planner).wait()
        records = {name: (each.size_bytes, each.finish()) for name, each in self._digests.items()}
        index = _make_index(plan, planner, results, self._digests, with_bare_units=assignment.rank == 0)
        data = index.to_json()
        self._disk.write_file(folder / index_name(assignment.rank), data)
        records[index_name(assignment.rank)] = (len(data), digest_bytes(data))
        self._digests.clear()
        results.append(WriteResult(MetadataIndex(_RECORDS), 0, records))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Leader only, when all ranks have written: describe, then commit."""
        assert self._draft is not None
        files: dict[str, FileRecord] = {}
        places: dict[MetadataIndex, Any] = {}
        for result in (each for rank in results for each in rank):
            if result.index.fqn == _RECORDS:
                files |= {
                    name: FileRecord(bytes=size, digest=text) for name, (size, text) in result.storage_data.items()
                }
            else:
                places[result.index] = result.storage_data
        metadata.storage_data = places
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self._final), save_id=self.save_id)
        metadata.version = "1.0.0"
        pickled = pickle.dumps(metadata)
        self._disk.write_file(Path(self._draft) / METADATA, pickled)
        files[METADATA] = FileRecord(bytes=len(pickled), digest=digest_bytes(pickled))
        if self._on_commit is not None:
            self._on_commit()
        self._place.commit(self._draft, self._manifest(files, len(results)))
        self._draft = None

    def abandon(self) -> None:
        """Leader only, after a failed save: remove what was written. Never raises."""
        if self._draft is not None:
            self._place.abandon(self._draft)
            self._draft = None

    def _manifest(self, files: dict[str, FileRecord], world_size: int) -> Manifest:
        name = parse_step(self._final.name)
        info = self._info or SaveInfo(step=name.step if name else 0, world_size=world_size)
        # Outside a root, under a name that is not a step's, there are no others to come after.
        others = self._place.list() if name else []
        sequence = 1 + max((entry.sequence for entry in others), default=0)
        return Manifest(
            step=info.step,
            sequence=sequence,
            time_seconds=time.time(),
            reason=info.reason,
            world_size=info.world_size,
            mesh=info.mesh,
            torch_version=torch.__version__,
            ckptman_version=ckptman.__version__,
            run_id=info.run_id,
            job_id=info.job_id,
            attempt=info.attempt,
            restored_from=info.restored_from,
            metrics=dict(info.metrics or {}),
            block_bytes=BLOCK_BYTES,
            files=files,
        )


class StorageReader(FileSystemReader):
    """Reads what ckptman, plain DCP or torchtitan wrote, never by an unrestricted unpickler.

    With `verify` (the default) each file that a rank needs is checked against its digest before any of it reaches a
    tensor. What plain DCP wrote has no digests. Raises: CorruptError, NotFoundError, FormatVersionError.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        super().__init__(path)
        self._verify = verify
        self._saved: SavedState | None = None

    @property
    def saved(self) -> SavedState:
        """What the checkpoint holds: read once."""
        if self._saved is None:
            self._saved = SavedState.read(Path(self.path))
        return self._saved

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._saved = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.saved.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._verify and (manifest := self.saved.manifest) is not None:
            for name in sorted({self.storage_data[item.storage_index].relative_path for item in plan.items}):
                problem = check_file(Path(self.path), name, manifest.files[name], manifest.block_bytes)
                if problem:
                    raise CorruptError(f"{self.path}: {problem}")
        return super().read_data(plan, _Screen(planner, str(self.path)))  # type: ignore[arg-type]


class _Screen:
    """Stands before a planner and lets no pickle through to it that holds more than plain values and tensors.

    torch's own planner unpickles values without restriction. What the restricted unpickler reads to its end cannot
    make the unrestricted one run code either: both follow the same instructions.
    """

    def __init__(self, planner: LoadPlanner, where: str) -> None:
        self._planner, self._where = planner, where

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        load_plain(value, f"{self._where}: the value {read_item.storage_index.fqn}")
        value.seek(0)
        self._planner.load_bytes(read_item, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)


@dataclass
class _Assignment(_StoragePrefix):
    """What the leader tells a rank: its file prefix, its number, and the folder to write to."""

    rank: int
    draft: str


class _DigestingFileSystem(FileSystem):
    """DCP's file system with files that are digested as they are written, and flushed to storage when closed."""

    def __init__(self, disk: Disk, digests: dict[str, BlockDigester]) -> None:
        self._disk = disk
        self._digests = digests

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[IO[bytes], None, None]:  # type: ignore[override]
        digester = self._digests[Path(path).name] = BlockDigester()
        with open(path, mode, buffering=1024 * 1024) as raw:
            stream = _DigestingStream(raw, digester)
            try:
                yield stream  # type: ignore[misc]
            except Exception:
                # torch hides why a write failed behind an error of its own.
                if stream.error is not None:
                    raise stream.error from None
                raise
            raw.flush()
            self._disk.sync_file(raw.fileno())


class _DigestingStream(io.RawIOBase):
    """A write-only stream that passes bytes on and digests them. Going back is refused: it would make a lie of both."""

    def __init__(self, raw: IO[bytes], digester: BlockDigester) -> None:
        self._raw = raw
        self._digester = digester
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digester.update(data)
        try:
            self._raw.write(data)
        except OSError as error:
            self.error = error
            raise
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self._digester.size_bytes

    def flush(self) -> None:
        self._raw.flush()

    def close(self) -> None:
        # DCP closes what it is given and its context closes the file: the file belongs to the context.
        pass


def _make_index(
    plan: SavePlan,
    planner: SavePlanner,
    results: list[WriteResult],
    digests: Mapping[str, BlockDigester],
    with_bare_units: bool,
) -> Index:
    tensors: dict[str, TensorRecord] = {}
    objects: dict[str, Location] = {}
    items = {item.index: item for item in plan.items}
    firsts: set[str] = set()
    for result in results:
        item, info = items[result.index], result.storage_data
        at = Location(file=info.relative_path, offset=info.offset, bytes=info.length)
        if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
            objects[item.index.fqn] = at
            firsts.add(item.index.fqn)
            continue
        data = item.tensor_data
        dtype = str(data.properties.dtype).removeprefix("torch.")
        record = tensors.setdefault(item.index.fqn, TensorRecord(dtype=dtype, shape=tuple(data.size), chunks=[]))
        record.chunks.append(Chunk(offsets=tuple(data.chunk.offsets), sizes=tuple(data.chunk.sizes), at=at))
        if not any(data.chunk.offsets):
            firsts.add(item.index.fqn)
    # Of all ranks that hold a part of an entry, the one that writes its first part tells what it is.
    units = [
        unit
        for unit, names in _snapshot_behind(planner).units
        if not names.isdisjoint(firsts) or (with_bare_units and not names)
    ]
    blocks = {name: b"".join(each.blocks).hex() for name, each in digests.items()}
    return Index(tensors=tensors, objects=objects, units=units, blocks=blocks)


def _snapshot_behind(planner: SavePlanner) -> Snapshot:
    known = getattr(planner, "snapshot", None)
    if isinstance(known, Snapshot):
        return known
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    flat: dict[str, Any] = getattr(planner, "state_dict", {})
    mappings = getattr(planner, "mappings", None)
    return snapshot_of(unflatten_state_dict(flat, mappings) if mappings else flat)
