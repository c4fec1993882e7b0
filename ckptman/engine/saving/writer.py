"""One save from end to end: begin a draft, write a file on each rank, gather what they wrote, commit.

`Checkpointer`, `ckptman.save` and `StorageWriter` all save by what is here.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ckptman.engine.comm.control_group import Channel
from ckptman.engine.saving.draft import SaveTarget
from ckptman.engine.saving.index_writer import IndexWriter, RankResult, write_small
from ckptman.engine.saving.save_checks import (
    MOST_NAMES,
    FiniteCheck,
    OnNonfinite,
    ParameterFingerprint,
    Stale,
    StaleSaves,
)
from ckptman.engine.saving.staging import Staged
from ckptman.engine.saving.write_plan import RankFile, memory_of
from ckptman.engine.state.file_layout import Image, Layout, PlacedBytes, pickled
from ckptman.engine.state.snapshot import Snapshot
from ckptman.errors import RootError
from ckptman.policies.retention_rules import nonfinite_text
from ckptman.runtime.health.rank_report import RankHealth
from ckptman.storage.format.index import values_json
from ckptman.storage.format.manifest import FileRecord, Nonfinite
from ckptman.storage.format.paths import (
    METADATA,
    blocks_name,
    data_name,
    values_name,
)
from ckptman.storage.io.durable_files import holding
from ckptman.storage.io.file_writer import FiniteScan, InPlace, Written, write_all, write_source
from ckptman.storage.io.threads import computing_threads, io_threads
from ckptman.storage.io.writer_process import WriterProcess


@dataclass
class Content:
    """What one rank writes in one save: its tensors, staged or live, and what has to be pickled. Bytes among the
    `objects` are pickles. `watch`: what is known of its parameters, where a run saves; `finite`: looks whether they are
    finite, where that is asked for."""

    file: RankFile
    tensors: Staged | Sequence[torch.Tensor]
    pickled: list[torch.Tensor] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    units: list[str] = field(default_factory=list)
    own_units: list[str] = field(default_factory=list)
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
        units = [each.text for each in snapshot.units]
        special = tensors.special if isinstance(tensors, Staged) else memory_of(file.pickled, snapshot.tensors)
        return cls(
            file,
            tensors,
            special,
            # Now, on the stream of the training: a value may hold tensors that are on a device.
            _kept_values(snapshot.objects, file.plan.objects),
            [units[number] for number in file.plan.units],
            [units[number] for number in file.plan.own_units],
            snapshot.tied,
            watch,
            finite,
        )

    def check(self) -> None:
        """Do nothing: there is something to write."""

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


@dataclass(frozen=True)
class FailedStage:
    """What a rank that could not stage takes into the save instead of a content: all the others hear of it there."""

    error: Exception

    def check(self) -> None:
        """Raise why."""
        raise self.error


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

    def keep_cached(self, path: Path, *, starts: bool) -> None:
        """Have a data file that is durable read into the page cache, in place of the one before, by the process that
        writes. `starts`: also where there is none yet."""
        self._process.keep_cached(path, starts=starts)

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

    def save(self, channel: Channel, target: SaveTarget, content: Content | FailedStage) -> Committed:
        """Write one checkpoint. Every rank calls it.

        Raises: RankFailed on every rank, RankLostError where a peer is gone or silent for longer than the timeout.
        """
        folder = channel.gather_on_leader(content.check, lambda _: target.begin())
        assert isinstance(content, Content)
        write = partial(self._write, target, target.here(folder), channel.rank, content)
        commit = partial(self._commit, target, content)
        try:
            found = channel.gather_on_leader(write, commit)
        except BaseException:
            self._leader_has_rows = False
            raise
        self._leader_has_rows = True
        self._stale_saves.committed()
        return found

    def _write(self, target: SaveTarget, folder: Path, rank: int, content: Content) -> RankResult:
        image, places, objects = content.image()
        scan = content.finite.begin() if content.finite is not None else None
        write_data = partial(self._write_data, target, content, image, scan)
        result, blocks = write_rank_files(folder, rank, image, content.own_units, write_data)
        if scan is not None:
            result.nonfinite = tuple(sorted(scan.found)[:MOST_NAMES])
            self._refuse_nonfinite(result.nonfinite)
        result.seen = self._stale_saves.compare(content.watch, image, places, blocks)
        before, self._rows = self._rows, content.file.packed_rows(places)
        result.rows = None if self._leader_has_rows and self._rows == before else self._rows
        plan = content.file.plan
        result.own_tensors, result.paths = plan.own_tensors, dict(plan.own_paths)
        result.objects, result.units, result.tied = objects, content.units, content.tied
        if self.health is not None:
            result.health = self.health.report()
        return result

    def _write_data(
        self, target: SaveTarget, content: Content, image: Image, scan: FiniteScan | None, path: Path
    ) -> Written:
        """Write the data file, or in memory let what is staged be that, shown to `scan` meanwhile; by the process
        beside this one where its memory is shared."""
        shared = image.shared()
        if target.in_memory and isinstance(content.tensors, Staged) and content.tensors.slot.become(path, image):
            found = self._process.digest(path, shared, scan) if shared is not None else None
            if found is None:
                found = Written.of(write_all(InPlace(), image, computing_threads(io_threads()), scan), None)
            return found
        written = self._process.write(path, shared, scan=scan) if shared is not None else None
        return written or write_source(path, image, look=scan)

    def _refuse_nonfinite(self, tensors: Sequence[str]) -> None:
        """Let a save fail that holds what is not finite, where the run wants that. Raises: FloatingPointError."""
        if self._nonfinite == "refuse" and (found := nonfinite_text((), tensors)):
            raise FloatingPointError(f"NaN or infinite: {found}")

    def _commit(self, target: SaveTarget, content: Content, results: list[RankResult]) -> Committed:
        plan = content.file.plan
        files = self._index.write_index(target.folder, plan.tensors, results)
        files[METADATA] = self._index.write_metadata(target.folder, results, plan.paths, target.final)
        nonfinite = None
        if content.finite is not None:
            tensors = sorted({name for each in results for name in each.nonfinite})
            nonfinite = Nonfinite(metrics=target.info.nonfinite_metrics, tensors=tuple(tensors[:MOST_NAMES]))
        target.commit(files, len(results), nonfinite)
        if self.health is not None:
            self.health.note([each.health for each in results])
        buffered_because = next((each.buffered_because for each in results if each.buffered_because), None)
        stale = self._stale_saves.judge(content.watch, [each.seen for each in results])
        return Committed(target.size_bytes, buffered_because, stale, nonfinite)


def write_rank_files(
    folder: Path,
    rank: int,
    image: Image,
    own_units: Sequence[str],
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
            small[blocks_name(rank)] = written.digests.to_bytes()
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


def _kept_values(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return what a save keeps of values: itself, if nobody can change it, or its pickle. The settings of an optimizer
    are the same few objects for all of its parameters."""
    found = list(map(values.__getitem__, names))
    distinct = dict(zip(map(id, found), found))
    kept = {known: each if isinstance(each, _FIXED) else pickled(each) for known, each in distinct.items()}
    return dict(zip(names, map(kept.__getitem__, map(id, found))))


_FIXED = (int, float, str, bool, type(None))
