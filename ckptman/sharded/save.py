"""Saving: stage, write, commit, prune; in the training thread or behind it, one save at a time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ckptman.errors import CommitError, RankLostError
from ckptman.monitor.journal import Journal
from ckptman.policy.retention import RetentionPolicy
from ckptman.sharded.planner import SnapshotPlanner
from ckptman.sharded.ranks import Channel, RankFailed
from ckptman.sharded.staging import Stager, borrow
from ckptman.sharded.state import Snapshot
from ckptman.sharded.storage import SaveInfo, StorageWriter
from ckptman.store.durable import DISK, Disk
from ckptman.store.names import step_folder
from ckptman.store.owner import Claim
from ckptman.store.place import FolderPlace
from ckptman.store.prune import execute, plan_prune


@dataclass(frozen=True)
class SaveReport:
    """A save that is durable. `stall_seconds`: training was blocked; `durable_seconds`: from the decision on."""

    step: int
    stall_seconds: float
    durable_seconds: float


class Saver:
    """Writes checkpoints of one run. Every rank has one; only the leader's has the `claim` and prunes."""

    def __init__(
        self,
        place: FolderPlace,
        channel: Channel,
        journal: Journal | None,
        claim: Claim | None,
        retention: RetentionPolicy | None,
        *,
        background: bool,
        disk: Disk = DISK,
    ) -> None:
        self._place, self._journal, self._claim = place, journal, claim
        self.channel = channel
        """What the ranks talk over while they save. One that has `lost` a rank is replaced before the next save."""
        self.damaged: set[int] = set()
        """Commit sequences of checkpoints that were refused: retention does not count them."""
        self._retention, self._disk = retention, disk
        self._stager = Stager() if background else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckptman-save") if background else None
        self._running: Future[SaveReport] | None = None
        self._number = 0
        self._warned = False
        self.failed = 0
        """The number of the save that has failed in the background without anybody being told; 0: none."""
        self.told = 0
        """The number of the last save whose failure the training loop was told, counted from 1."""

    def save(self, snapshot: Snapshot, info: SaveInfo) -> SaveReport | None:
        """Save. In the background, returns None as soon as the private copy is made; `wait` gives the report.

        Raises: CommitError, on every rank alike. Called by every rank, with no save running.
        """
        begun = time.monotonic()
        self._number += 1
        self._note("save_begun", step=info.step, reason=info.reason)
        if self._pool is None or self._stager is None:
            try:
                return self._write(snapshot, borrow(snapshot), info, begun, None)
            finally:
                self.told, self.failed = self._number, 0
        # A rank that cannot stage takes its failure along into the save, where all the others hear of it.
        staged: Mapping[str, Any] | Exception
        try:
            staged = self._stager.stage(snapshot)
        except Exception as error:  # noqa: BLE001 out of memory comes in many classes
            staged = error
        stall_seconds = time.monotonic() - begun
        self._note("save_staged", step=info.step, seconds=stall_seconds)
        self._running = self._pool.submit(self._write, snapshot, staged, info, begun, stall_seconds)
        return None

    def wait(self) -> SaveReport | None:
        """Wait for the save in the background, if there is one. Raises: CommitError if it failed."""
        running, self._running = self._running, None
        if running is None:
            return None
        try:
            return running.result()
        finally:
            self.told, self.failed = max(self.told, self.failed), 0

    def poll(self) -> SaveReport | None:
        """The report of a save in the background that has succeeded, once."""
        if self._running is None or not self._running.done() or self._running.exception() is not None:
            return None
        return self.wait()

    def close(self) -> None:
        """Stop the background thread. What runs is waited for."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _write(
        self,
        snapshot: Snapshot,
        staged: Mapping[str, Any] | Exception,
        info: SaveInfo,
        begun: float,
        stall_seconds: float | None,
    ) -> SaveReport:
        writer = StorageWriter(
            Path(self._place.root) / step_folder(info.step),
            info=info,
            overwrite=True,
            place=self._place,
            tag=self._claim.next_tag() if self._claim else None,
            disk=self._disk,
            on_commit=self._claim.check if self._claim else None,
        )
        try:
            write_through(self.channel, writer, snapshot, staged)
        except RankFailed as error:
            self._give_up(writer, info.step, error.failure.rank, error.failure.text, error)
        except RankLostError as error:
            self._give_up(writer, info.step, -1, error.cause, error)
        seconds = time.monotonic() - begun
        self._note("save_durable", sync=True, step=info.step, seconds=seconds, reason=info.reason)
        self._prune()
        return SaveReport(info.step, seconds if stall_seconds is None else stall_seconds, seconds)

    def _give_up(self, writer: StorageWriter, step: int, rank: int, cause: str, error: Exception) -> None:
        if self.channel.is_leader:
            writer.abandon()
        self._note("save_failed", step=step, rank=rank, cause=cause)
        self.failed = self._number
        raise CommitError(step, rank, cause) from error

    def _prune(self) -> None:
        """Only now that the new checkpoint is durable may older ones go. A failure here never fails a save."""
        if self._claim is None:
            return
        try:
            plan = plan_prune(self._place.root, self._retention, damaged=self.damaged)
            execute(self._place.root, plan, self._claim.next_tag(), self._disk)
        except Exception as error:  # noqa: BLE001 a user's own retention policy may raise anything
            self._note("prune_failed", cause=f"{type(error).__name__}: {error}")
            if not self._warned:
                text = f"older checkpoints could not be pruned, and the disk fills up: {type(error).__name__}: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                self._warned = True
            return
        for verdict in plan.verdicts:
            if not verdict.keep:
                self._note("pruned", step=verdict.record.step, reason="; ".join(verdict.reasons))

    def _note(self, event: str, *, sync: bool = False, **fields: object) -> None:
        if self._journal is not None:
            self._journal.record(event, sync=sync, **fields)


def write_through(
    channel: Channel, writer: StorageWriter, snapshot: Snapshot, staged: Mapping[str, Any] | Exception
) -> None:
    """Take one save through DCP's planner and writer: plan, write, commit. Every rank calls it.

    `staged` may be the reason why this rank has nothing to write. Raises: RankFailed on every rank, RankLostError
    where a peer is gone or silent for longer than the timeout.
    """
    planner = SnapshotPlanner(snapshot, {} if isinstance(staged, Exception) else staged)
    described: list[Any] = []

    def plan() -> SavePlan:
        if isinstance(staged, Exception):
            raise staged
        planner.set_up_planner({}, None, channel.is_leader)
        writer.reset()
        writer.set_up_storage_writer(channel.is_leader)
        return writer.prepare_local_plan(planner.create_local_plan())

    def divide(plans: list[SavePlan]) -> list[SavePlan]:
        divided, metadata = planner.create_global_plan(plans)
        described.append(metadata)
        return writer.prepare_global_plan(divided)

    mine = channel.through_leader(plan, divide)

    def write() -> list[WriteResult]:
        return writer.write_data(planner.finish_plan(mine), planner).wait()

    def commit(results: list[list[WriteResult]]) -> list[None]:
        writer.finish(described[0], results)
        return [None] * channel.world_size

    channel.through_leader(write, commit)
