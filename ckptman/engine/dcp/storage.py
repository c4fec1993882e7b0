"""Storage for torch's distributed checkpoint: `dcp.save(..., storage_writer=)` and `dcp.load(..., storage_reader=)`.

The commit rides on DCP's own steps: its exchange of write results is the *arrive* that carries each rank's error to all
others, its `finish` on the leader is the commit, and the broadcast after that is the *depart*.
"""

from __future__ import annotations

import io
import os
import pickle
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckptman._torch_compat import StorageInfo, StoragePrefix, unflattened
from ckptman.engine.loading.checkpoint_reader import SavedState, read_to_load
from ckptman.engine.loading.read_tensors import NOT_USABLE, Fill, read_fills
from ckptman.engine.saving.draft import Draft, SaveInfo
from ckptman.engine.saving.index_writer import IndexWriter, RankResult, write_small
from ckptman.engine.saving.refused_values import warn_of_refused
from ckptman.engine.saving.write_plan import Described, lay_out, make_rows, refuse_meta
from ckptman.engine.saving.writer import write_rank_files
from ckptman.engine.state.file_layout import Image, Layout, PlacedBytes, pickled
from ckptman.engine.state.local_shards import is_plain
from ckptman.engine.state.snapshot import Snapshot, snapshot_of
from ckptman.errors import CkptmanError, ConfigError, CorruptError, NotFoundError
from ckptman.storage.catalog.reader_lease import refuse_gone
from ckptman.storage.format.chunk_table import pack
from ckptman.storage.format.paths import METADATA, data_name, step_number

_RESULT = "ckptman.result"
"""The name under which the result of a rank travels to the leader among DCP's write results."""


class StorageWriter(FileSystemWriter):
    """Write one checkpoint: a data file per rank, laid out first and filled in parallel; an index; and the commit.

    Args:
        path: the folder, which appears when the save is complete, and not before.
        step: optimizer steps completed, of what is saved at `path`; rank 0's counts. None, and where `dcp.save` is
            given another `checkpoint_id`: that of a name such as step-0000000100, or 0.
        overwrite: replace an existing checkpoint at `path`; it stays until the new one takes its place.

    Raises:
        ConfigError: `step` is no step, or `path` is the name of another one.

    Raises, through DCP on every rank:
        OSError: the disk is full, or over quota.
        ExistsError: `path` exists, and `overwrite` is False or it is not a checkpoint.
        ConfigError: a value cannot be saved.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        overwrite: bool = False,
    ) -> None:
        super().__init__(path, sync_files=False, overwrite=True)
        self._overwriting = overwrite
        self._step_of_path = Path(path), None if step is None else step_number(step)
        self._begin_draft(Path(path))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._draft.abandon()
        self._begin_draft(Path(checkpoint_id or self._draft.final))

    def _begin_draft(self, final: Path) -> None:
        path, step = self._step_of_path
        info = SaveInfo.for_path(final, "saved by dcp.save", step if final == path else None)
        self._draft = Draft(final, info, overwrite=self._overwriting)
        # DCP tells nobody that another rank has failed: the draft goes when the leader's writer is used again, or goes.
        self._abandon = weakref.finalize(self, _abandon, self._draft, os.getpid())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_abandon"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._abandon = weakref.finalize(self, _abandon, self._draft, os.getpid())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True) and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                "use_collectives=False leaves each rank a checkpoint of its own: StorageWriter writes one"
            )
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        folder = self._draft.begin()
        return [replace(plan, storage_data=_Assignment(f"__{rank}_", rank, folder)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files durably, and say what lies where."""
        with self._abandoned_on_error():
            assignment: _Assignment = plan.storage_data
            if not Path(assignment.draft).is_dir():
                raise ConfigError(
                    f"{assignment.draft} is not there any more: DCP's plan caching hands out the plan of an earlier "
                    f"save. Say enable_plan_caching=False: StorageWriter plans quickly, and Checkpointer keeps its own "
                    f"plan"
                )
            snapshot = _snapshot_behind(planner)
            image, placed = _lay_out(plan, planner, {name for unit in snapshot.units for name in unit.names})
            result, _ = write_rank_files(Path(assignment.draft), assignment.rank, image, ())
            result.own_tensors, result.rows = _describe(placed)
            result.objects = {item.index.fqn: (at.offset, at.bytes) for item, at in placed if _is_object(item)}
            result.units = _units(snapshot, placed, with_bare_units=assignment.rank == 0)
            name = data_name(assignment.rank)
            results = [WriteResult(item.index, at.bytes, StorageInfo(name, at.offset, at.bytes)) for item, at in placed]
            future: Future[list[WriteResult]] = Future()
            future.set_result([*results, WriteResult(MetadataIndex(_RESULT), 0, result)])
            return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Describe what all ranks have written, then commit. Leader only."""
        with self._abandoned_on_error():
            saved: list[RankResult] = []
            metadata.storage_data = {}
            for result in (each for rank in results for each in rank):
                if isinstance(result.storage_data, RankResult):
                    saved.append(result.storage_data)
                else:
                    metadata.storage_data[result.index] = result.storage_data
            metadata.storage_meta = StorageMeta(checkpoint_id=str(self._draft.final), save_id=self.save_id)
            metadata.version = "1.0.0"
            try:
                files = IndexWriter().write_index(self._draft.folder, (), saved)
            except ValueError as error:
                raise ConfigError(
                    f"{error}. A checkpoint holds whole tensors: let all ranks that hold parts of them save it "
                    f"together (without no_dist, in a process group of them all)"
                ) from error
            files |= write_small(self._draft.folder, {METADATA: pickle.dumps(metadata)})
            self._draft.commit(files, len(results))

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._abandon()
            raise


class StorageReader(FileSystemReader):
    """Reads what ckptman, plain DCP or torchtitan wrote, never by an unrestricted unpickler.

    Only the byte ranges that this rank needs are read (and small gaps between them), in parallel and straight into the
    tensors where their memory allows it. Each rank reads by itself: `ckptman.load` reads once what several need.

    Args:
        path: the folder of one checkpoint.
        verify: check every block that is read against its digest before `dcp.load` returns. What plain DCP wrote has no
            digests.

    Raises, through DCP on every rank: CorruptError, NotFoundError, FormatVersionError.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        super().__init__(path)
        self._verify = verify
        self._saved: SavedState | None = None

    @property
    def saved(self) -> SavedState:
        """What the checkpoint holds: read once."""
        if self._saved is None:
            self._saved = read_to_load(Path(self.path))
        return self._saved

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._saved = None

    def read_metadata(self) -> Metadata:  # with `kwargs`, DCP would ask the ranks one by one
        self._saved = None  # by which each load begins: another checkpoint may have taken the place of the last one
        try:
            with self._telling(""):
                written = self.saved.written_metadata()
            known = self.saved.described or self.saved.metadata  # of ours, the index counts
        except Exception as error:  # noqa: BLE001 it is raised by whoever looks at the metadata
            return cast(Metadata, _Unreadable(error))
        meta = replace(written.storage_meta or StorageMeta(), load_id=self.load_id)
        return replace(known, storage_meta=meta, version=written.version)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        fills, tensors, values = [], [], []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                values.append(item)
                continue
            target = planner.resolve_tensor(item).detach()
            if target.size() != torch.Size(item.lengths):
                raise ConfigError(f"{item.dest_index.fqn}: {list(item.lengths)} are read into {list(target.size())}")
            chunk = self.saved.chunk(item.storage_index)
            fills.append(Fill(item.storage_index.fqn, chunk, tuple(item.storage_offsets), target))
            tensors.append((item, target))
        # Values first: what is damaged there is found before a tensor is touched.
        with self._telling(""):
            loaded = [(item, self._value(item)) for item in values]
        with self._telling(f" {NOT_USABLE}"):
            read_fills(self.saved, fills, verify=self._verify)
        for item, target in tensors:
            planner.commit_tensor(item, target)
        for item, value in loaded:
            planner.load_bytes(item, value)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @contextmanager
    def _telling(self, left: str) -> Iterator[None]:
        try:
            yield
        except (CorruptError, NotFoundError, OSError) as error:
            refuse_gone(Path(self.path))
            if isinstance(error, CkptmanError):
                raise
            raise CorruptError(
                f"{self.path} cannot be read: {error}. Check the mount and its permissions.{left}"
            ) from error

    def _value(self, item: ReadItem) -> io.BytesIO:
        # torch's own planner unpickles values without restriction: it is given what the restricted unpickler made.
        name = item.storage_index.fqn
        value = self.saved.plain_value(name, verify=self._verify)
        safe = io.BytesIO()
        torch.save(value, safe)
        safe.seek(0)
        return safe


class _Unreadable:
    """Stands for metadata that cannot be read, and raises why as soon as it is looked at: DCP of torch 2.11 drops what
    `read_metadata` itself raises, and says no more than that there is none."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


@dataclass
class _Assignment(StoragePrefix):
    """What the leader tells a rank: its file prefix, its number, and the folder to write to."""

    rank: int
    draft: str


def _abandon(draft: Draft, pid: int) -> None:
    # A process that was forked meanwhile has the writer too, and the save is not its own.
    if os.getpid() == pid:
        draft.abandon()


def _is_object(item: WriteItem) -> bool:
    return item.type == WriteItemType.BYTE_IO or item.tensor_data is None


def _is_as_described(item: WriteItem, tensor: torch.Tensor) -> bool:
    """Return whether a tensor is what the plan says: a planner may cast it on its way to storage, and not say so."""
    data = item.tensor_data
    return data is not None and (data.properties.dtype, data.chunk.sizes) == (tensor.dtype, tensor.shape)


def _lay_out(
    plan: SavePlan, planner: SavePlanner, encoded: Container[str]
) -> tuple[Image, list[tuple[WriteItem, PlacedBytes]]]:
    """Lay out what a rank writes. What has to be pickled, and a load will refuse, is told by a warning: all but what is
    `encoded` too."""
    plain: list[tuple[WriteItem, torch.Tensor]] = []
    others: list[tuple[WriteItem, bytes]] = []
    special: list[tuple[str, torch.Tensor]] = []
    values: list[tuple[str, Callable[[], bytes]]] = []
    for item in plan.items:
        data = planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            others.append((item, data.getvalue()))
            if item.index.fqn not in encoded:
                values.append((item.index.fqn, data.getvalue))
            continue
        refuse_meta(data, item.index.fqn)
        if is_plain(tensor := data.detach()) and _is_as_described(item, tensor):
            plain.append((item, tensor))
        else:
            others.append((item, pickled(tensor)))
            special.append((item.index.fqn, tensor))
    warn_of_refused(special, values)
    order, places, literals, end = lay_out([(each.dtype, tuple(each.shape)) for _, each in plain])
    layout = Layout(end)
    placed = [(plain[number][0], at) for number, at in zip(order, places)]
    payloads = [(at.payload, plain[number][1]) for number, at in zip(order, places)]
    placed += [(item, layout.add_bytes(data)) for item, data in others]
    return Image([*literals, *layout.literals, *payloads]), placed


def _describe(placed: list[tuple[WriteItem, PlacedBytes]]) -> tuple[tuple[Described, ...], bytes]:
    tensors: dict[str, Described] = {}
    entries = []
    for item, at in placed:
        if _is_object(item):
            continue
        data, name = item.tensor_data, item.index.fqn
        assert data is not None
        tensors.setdefault(name, (name, str(data.properties.dtype).removeprefix("torch."), tuple(data.size)))
        entries.append((name, data.chunk.offsets, data.chunk.sizes, at))
    number = {name: i for i, name in enumerate(tensors)}
    return tuple(tensors.values()), pack(
        make_rows((number[name], offsets, sizes, at) for name, offsets, sizes, at in entries)
    )


def _units(snapshot: Snapshot, placed: list[tuple[WriteItem, PlacedBytes]], with_bare_units: bool) -> list[str]:
    # Of all ranks that hold a part of an entry, the one that writes its first part tells what it is.
    firsts = {
        item.index.fqn
        for item, _ in placed
        if _is_object(item) or (item.tensor_data is not None and not any(item.tensor_data.chunk.offsets))
    }
    bare = with_bare_units
    return [each.text for each in snapshot.units if not firsts.isdisjoint(each.names) or (bare and not each.names)]


def _snapshot_behind(planner: SavePlanner) -> Snapshot:
    flat: dict[str, Any] = getattr(planner, "state_dict", {})
    mappings = getattr(planner, "mappings", None)
    return snapshot_of(unflattened(flat, mappings) if mappings else flat, strict=False)
