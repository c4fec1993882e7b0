"""One save from end to end: begin a draft, write a file on each rank, gather what they wrote, commit.

`Checkpointer`, `ckptman.save` and `StorageWriter` all save by what is here.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

import ckptman
from ckptman.engine.comm.control_group import Channel
from ckptman.engine.saving.finite_check import MOST_NAMES, FiniteCheck, OnNonfinite
from ckptman.engine.saving.index_writer import IndexWriter, RankResult, write_small
from ckptman.engine.saving.staging import Staged
from ckptman.engine.saving.stale_saves import ParameterFingerprint, Stale, StaleSaves
from ckptman.engine.saving.write_plan import RankFile, memory_of
from ckptman.engine.state.file_layout import Image, Layout, PlacedBytes, pickled
from ckptman.engine.state.named_state import Snapshot
from ckptman.errors import ConfigError, ExistsError, RootError
from ckptman.policies.retention_rules import nonfinite_text, time_to_store
from ckptman.runtime.health.rank_report import RankHealth
from ckptman.storage.catalog.backends.backend import check_folder
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.overwrite import may_be_replaced
from ckptman.storage.catalog.reader_lease import lease
from ckptman.storage.catalog.writer_lock import Claim
from ckptman.storage.format.chunk_table import pack
from ckptman.storage.format.index import values_json
from ckptman.storage.format.manifest import FileRecord, Manifest, Mesh, Nonfinite, Replicas
from ckptman.storage.format.paths import (
    METADATA,
    blocks_name,
    data_name,
    new_nonce,
    parse_step,
    step_folder,
    values_name,
)
from ckptman.storage.io.checksums import BLOCK_BYTES
from ckptman.storage.io.durable_files import holding
from ckptman.storage.io.file_writer import Written, write_source
from ckptman.storage.io.finite_scan import FiniteScan
from ckptman.storage.io.writer_process import WriterProcess


@dataclass(frozen=True)
class SaveInfo:
    """What the manifest says besides sizes and digests."""

    step: int = 0
    reason: str = "saved by dcp.save"
    mesh: Mesh | None = None
    run_id: str = ""
    job_id: str | None = None
    attempt: int = 1
    restored_from: int | None = None
    metrics: Mapping[str, float] | None = None
    metadata: Mapping[str, Any] | None = None
    asked: Mapping[str, str] | None = None
    replicas: Replicas | None = None

    @property
    def nonfinite_metrics(self) -> tuple[str, ...]:
        """The first of the metrics that are NaN or infinite."""
        return tuple(name for name, value in (self.metrics or {}).items() if not math.isfinite(value))[:MOST_NAMES]

    @classmethod
    def for_path(cls, final: Path, reason: str, step: int | None = None) -> SaveInfo:
        """Return what is known of a save that no run makes; `step` None: that of its name, or 0 where it tells none.

        Raises: ConfigError where its name is that of another step.
        """
        name = parse_step(final.name)
        if step is not None and name is not None and name.step != step:
            raise ConfigError(f"{final} is the name of step {name.step}, not of step={step}: save under another name")
        return cls(step if step is not None else name.step if name else 0, reason)


@dataclass
class Content:
    """What one rank writes in one save: its tensors, staged or live, and what has to be pickled. Bytes among the
    `objects` are pickles. `watch`: what is known of its parameters, where a run saves; `finite`: looks whether they are
    finite, where that is asked for."""

    file: RankFile
    tensors: Staged | Sequence[torch.Tensor]
    pickled: list[torch.Tensor] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    units: list[dict[str, Any]] = field(default_factory=list)
    own_units: list[dict[str, Any]] = field(default_factory=list)
    tied: list[list[str]] = field(default_factory=list)
    watch: ParameterFingerprint | None = None
    finite: FiniteCheck | None = None

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        file: RankFile,
        tensors: Staged | Sequence[torch.Tensor],
        watch: ParameterFingerprint | None = None,
        finite: FiniteCheck | None = None,
    ) -> Content:
        """Return the content of a snapshot. Nothing in it but `tensors` changes with the state, if they are staged."""
        special = tensors.special if isinstance(tensors, Staged) else memory_of(file.pickled, snapshot.tensors)
        return cls(
            file,
            tensors,
            special,
            # Now, on the stream of the training: a value may hold tensors that are on a device.
            {name: _kept(snapshot.objects[name]) for name in file.plan.objects},
            [snapshot.units[number].as_unit() for number in file.plan.units],
            [snapshot.units[number].as_unit() for number in file.plan.own_units],
            snapshot.tied,
            watch,
            finite,
        )

    def image(self) -> tuple[Image, list[PlacedBytes], dict[str, tuple[int, int]]]:
        """Return the data file as it will be, with the places of the pickled tensors and objects in it. Waits until
        what is staged is copied."""
        if isinstance(self.tensors, Staged):
            self.tensors.wait()
        layout = Layout(self.file.end)
        places = [layout.add_bytes(pickled(each)) for each in self.pickled]
        objects = {}
        for name, value in self.objects.items():
            place = layout.add_bytes(value if isinstance(value, bytes) else pickled(value))
            objects[name] = (place.offset, place.bytes)
        if isinstance(self.tensors, Staged):
            slot = self.tensors.slot
            return Image(layout.literals, slot.memory, slot.fd), places, objects
        tensors = [(place.payload, each) for place, each in zip(self.file.places, self.tensors)]
        return Image([*self.file.literals, *tensors, *layout.literals]), places, objects


class Draft:
    """A save that nobody sees yet, in a folder beside its final name. Leader only.

    Args:
        backend: of the root of a run; None: of the folder that `final` is in.
        claim: the run's, on its root; None where whoever saves has none.
    """

    def __init__(
        self,
        final: Path,
        info: SaveInfo,
        *,
        overwrite: bool,
        backend: LocalBackend | None = None,
        claim: Claim | None = None,
    ) -> None:
        self.final, self.info = final, info
        self._overwrite, self._claim = overwrite, claim
        self._backend = backend or LocalBackend(final.parent.absolute())
        self.size_bytes = 0
        """Of all files but the manifest, once it is committed."""
        self._folder: str | None = None
        self._held = contextlib.ExitStack()

    @classmethod
    def of_run(cls, backend: LocalBackend, info: SaveInfo, claim: Claim | None) -> Draft:
        """Return a draft of the step of `info` in the root of a run, which replaces what was saved of that step."""
        final = backend.root / step_folder(info.step)
        return cls(final, info, overwrite=True, backend=backend, claim=claim)

    def begin(self) -> str:
        """Make the folder that all ranks write to, and return its path.

        Raises: ConfigError (an address), ExistsError, RootError, OSError.
        """
        if self._claim is not None:
            self._claim.check()
        else:
            check_folder(self.final)
        if os.path.lexists(self.final):
            if not self._overwrite:
                raise ExistsError(f"{self.final} exists already: save under another name, or say overwrite=True")
            if not may_be_replaced(self.final):
                raise ExistsError(f"{self.final} is no checkpoint, and is not replaced by one: name another path")
        self._backend.make(is_there=self._claim is not None)
        tag = self._claim.next_tag() if self._claim is not None else new_nonce()
        if self._claim is None and parse_step(self.final.name) is not None:
            # A run's claim on its root says that it is alive; whoever saves without one says so of this save.
            self._held.enter_context(lease(self.final.parent, [f"{self.final.name}.tmp-{tag}"], what="save"))
        self._folder = self._backend.begin(self.final.name, tag)
        self._held.enter_context(holding(self.folder))
        return self._folder

    @property
    def folder(self) -> Path:
        """Where `begin` made it."""
        assert self._folder is not None
        return Path(self._folder)

    def commit(self, files: dict[str, FileRecord], world_size: int, nonfinite: Nonfinite | None = None) -> None:
        """Make it a checkpoint. Raises: OSError, BusyError."""
        folder = str(self.folder)
        if self._claim is not None:
            self._claim.check()
        manifest = self._manifest(files, world_size, nonfinite)
        self._backend.commit(folder, manifest)
        self._folder, self.size_bytes = None, manifest.total_bytes
        self._held.close()

    def abandon(self) -> None:
        """Remove what was written, after a failed save. Never raises."""
        folder, self._folder = self._folder, None
        if folder is not None:
            self._backend.abandon(folder)
        self._held.close()

    def _manifest(self, files: dict[str, FileRecord], world_size: int, nonfinite: Nonfinite | None) -> Manifest:
        info = self.info
        return Manifest(
            step=info.step,
            # Outside a root, under a name that is not a step's, there are no others to come after.
            sequence=1 + (self._backend.last_sequence() if parse_step(self.final.name) else 0),
            time_seconds=time_to_store(time.time()),
            reason=info.reason,
            world_size=world_size,
            mesh=info.mesh,
            torch_version=torch.__version__,
            ckptman_version=ckptman.__version__,
            run_id=info.run_id,
            job_id=info.job_id,
            attempt=info.attempt,
            restored_from=info.restored_from,
            metrics=dict(info.metrics or {}),
            metadata=dict(info.metadata or {}),
            asked=dict(info.asked or {}),
            nonfinite=nonfinite,
            replicas=info.replicas if world_size > 1 else None,
            block_bytes=BLOCK_BYTES,
            files=files,
        )


@dataclass(frozen=True)
class SaveReport:
    """A save that counts. `stall_seconds`: training was blocked; `durable_seconds`: from the decision until it did."""

    step: int
    stall_seconds: float
    durable_seconds: float


class Committed(NamedTuple):
    """What is known of a save that was committed: the size of all its files but the manifest; why some bytes did not go
    by direct I/O; whether it is a stale one; what in it is not finite, None where nobody looked."""

    size_bytes: int
    buffered_because: str | None
    stale: Stale | None
    nonfinite: Nonfinite | None


class Health(Protocol):
    """The health of a run. Neither call raises."""

    def report(self) -> RankHealth | None:
        """Return what this rank has to say since the last call. Every rank."""

    def note(self, reports: Sequence[RankHealth | None]) -> None:
        """Take in what all ranks have said. Leader only."""


class CheckpointWriter:
    """Takes contents to storage, one after the other. Every rank has one."""

    def __init__(self, nonfinite: OnNonfinite = "ignore") -> None:
        self._nonfinite = nonfinite
        self._finite_check: FiniteCheck | None = None
        self._index = IndexWriter()
        self._process = WriterProcess()
        self._stale_saves = StaleSaves()
        self.health: Health | None = None
        """What each rank has to say of its health goes with what it wrote."""
        self._rows = b""
        """The rows of the chunk table that this rank wrote last."""
        self._leader_has_rows = False

    def close(self) -> None:
        """End the process that writes."""
        self._process.close()

    def keep_cached(self, path: Path) -> None:
        """Have a data file that is durable read into the page cache, in place of the one before."""
        self._process.keep_cached(path)

    def watch(
        self, step: int, file: RankFile, snapshot: Snapshot, state: Mapping[str, Any], updates: int
    ) -> ParameterFingerprint:
        """Note what is known of the parameters when a save begins, in the training thread, to see whether a save holds
        anything new. `updates`: optimizer steps so far."""
        return self._stale_saves.watch(step, file, snapshot, state, updates)

    def finite_check(self, file: RankFile, snapshot: Snapshot, state: Mapping[str, Any]) -> FiniteCheck | None:
        """Return what will look whether what a save holds is finite, in the training thread; None: nobody looks."""
        if self._nonfinite == "ignore":
            return None
        if self._finite_check is None or self._finite_check.file is not file:
            self._finite_check = FiniteCheck(file, snapshot, state)
        return self._finite_check

    def save(self, channel: Channel, draft: Draft, content: Content | Exception) -> Committed:
        """Write one checkpoint. `content` may be the reason why this rank has nothing to write. Every rank calls it.

        Raises: RankFailed on every rank, RankLostError where a peer is gone or silent for longer than the timeout.
        """
        folder = channel.gather_on_leader(partial(_check, content), lambda _: draft.begin())
        assert isinstance(content, Content)
        write = partial(self._write, Path(folder), channel.rank, content)
        commit = partial(self._commit, draft, content)
        try:
            found = channel.gather_on_leader(write, commit)
        except BaseException:
            self._leader_has_rows = False
            raise
        self._leader_has_rows = True
        self._stale_saves.committed()
        return found

    def _write(self, folder: Path, rank: int, content: Content) -> RankResult:
        image, places, objects = content.image()
        scan = content.finite.begin() if content.finite is not None else None
        write_data = partial(self._write_data, content, image, scan)
        result, blocks = write_rank_files(folder, rank, image, content.own_units, write_data)
        if scan is not None:
            result.nonfinite = tuple(sorted(scan.found)[:MOST_NAMES])
            self._refuse_nonfinite(result.nonfinite)
        result.seen = self._stale_saves.compare(content.watch, image, places, blocks)
        before, self._rows = self._rows, pack(content.file.rows(places))
        result.rows = None if self._leader_has_rows and self._rows == before else self._rows
        plan = content.file.plan
        result.own_tensors, result.paths = plan.own_tensors, dict(plan.own_paths)
        result.objects, result.units, result.tied = objects, content.units, content.tied
        if self.health is not None:
            result.health = self.health.report()
        return result

    def _write_data(self, content: Content, image: Image, scan: FiniteScan | None, path: Path) -> Written:
        """Write the data file, shown to `scan` meanwhile, by the process beside this one where its memory is shared."""
        shared = image.shared()
        written = self._process.write(path, shared, scan=scan) if shared is not None else None
        return written or write_source(path, image, look=scan)

    def _refuse_nonfinite(self, tensors: Sequence[str]) -> None:
        """Let a save fail that holds what is not finite, where the run wants that. Raises: FloatingPointError."""
        if self._nonfinite == "refuse" and (found := nonfinite_text((), tensors)):
            raise FloatingPointError(f"NaN or infinite: {found}")

    def _commit(self, draft: Draft, content: Content, results: list[RankResult]) -> Committed:
        plan = content.file.plan
        files = self._index.write_index(draft.folder, plan.tensors, results)
        files[METADATA] = self._index.write_metadata(draft.folder, results, plan.paths, draft.final)
        nonfinite = None
        if content.finite is not None:
            tensors = sorted({name for each in results for name in each.nonfinite})
            nonfinite = Nonfinite(metrics=draft.info.nonfinite_metrics, tensors=tuple(tensors[:MOST_NAMES]))
        draft.commit(files, len(results), nonfinite)
        if self.health is not None:
            self.health.note([each.health for each in results])
        buffered_because = next((each.buffered_because for each in results if each.buffered_because), None)
        stale = self._stale_saves.judge(content.watch, [each.seen for each in results])
        return Committed(draft.size_bytes, buffered_because, stale, nonfinite)


def write_rank_files(
    folder: Path,
    rank: int,
    image: Image,
    own_units: Sequence[Mapping[str, Any]],
    write_data: Callable[[Path], Written] | None = None,
) -> tuple[RankResult, bytes]:
    """Write the files of one rank, durably; the data file by `write_data` where that is given.

    Returns what they are, and the digests of the data file's blocks.

    Raises: OSError.
    """
    result, blocks = RankResult(), b""
    small: dict[str, bytes] = {}
    with _in_draft(folder), holding(folder):
        if image.size_bytes:
            path = folder / data_name(rank)
            written = write_data(path) if write_data is not None else write_source(path, image)
            blocks = written.digests.blocks
            result.files[data_name(rank)] = FileRecord(bytes=image.size_bytes, digest=written.digest)
            result.buffered_because = written.buffered_because
            small[blocks_name(rank)] = blocks
        if own_units:
            small[values_name(rank)] = values_json(own_units)
        result.files |= write_small(folder, small)
    return result, blocks


@contextlib.contextmanager
def _in_draft(folder: Path) -> Iterator[None]:
    """Say of a draft that is gone why that may be."""
    try:
        yield
    except FileNotFoundError as error:
        if os.path.lexists(folder):
            raise
        raise RootError(
            errno.ENOENT,
            f"{folder.parent}: the folder of this save is gone: see whether the file system is still mounted, or who "
            f"removed it",
        ) from error


def _check(content: Content | Exception) -> None:
    if isinstance(content, Exception):
        raise content


def _kept(value: Any) -> Any:
    """Return what a save keeps of a value: itself, where nobody can change it, or its pickle."""
    return value if isinstance(value, (int, float, str, bool, type(None))) else pickled(value)
