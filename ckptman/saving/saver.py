"""Saving: plan, stage, write, commit, prune; in the training thread or behind it, one checkpoint after the other."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.writer_lock import Claim
from ckptman.comm.control import Channel, RankFailed
from ckptman.errors import CommitError, ConfigError, RankLostError
from ckptman.format.paths import step_folder
from ckptman.io.failure_cause import FULL
from ckptman.io.filesystem import DISK, Disk
from ckptman.io.wakeup import Task, Worker
from ckptman.runtime.host_memory import available_bytes
from ckptman.runtime.journal import Journal
from ckptman.runtime.watchdog import Watchdog
from ckptman.saving.draft import Draft, SaveInfo
from ckptman.saving.loadable import refused_tensors
from ckptman.saving.rank_file import RankFile, make_rank_file
from ckptman.saving.retention_runner import RetentionRunner
from ckptman.saving.staging import Staged, Stager
from ckptman.saving.stale_saves import Judge, Moment, Seen, Watch, Watcher, watch_for
from ckptman.saving.write_plan import make_plan, signature_of
from ckptman.saving.writer import CheckpointWriter, Content
from ckptman.state.named_state import Snapshot

_TRIES = 3
"""How often a save is written that finds the disk full, each time with more room."""
RESERVE_BYTES = 512 * 1024 * 1024
"""Host memory that staging leaves to each rank: what a save takes besides, and some for the user's own program."""


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
        place: LocalBackend,
        channel: Channel,
        journal: Journal | None,
        claim: Claim | None,
        keeper: RetentionRunner,
        watchdog: Watchdog,
        *,
        background: bool,
        disk: Disk = DISK,
        available: Callable[[], int] = available_bytes,
    ) -> None:
        self._place, self._journal, self._claim, self._watchdog = place, journal, claim, watchdog
        self.channel = channel
        """What the ranks talk over while they save. One that has `lost` a rank is replaced before the next save."""
        self.keeper = keeper
        self._disk, self._available = disk, available
        self._pool = Worker("ckptman-save") if background else None
        self._stager = Stager(self._may_take, lambda: self._pool is None or self._pool.idle) if background else None
        self._running: deque[Task[SaveReport]] = deque()
        self._writing = CheckpointWriter(disk)
        self._judge = Judge()
        self._watch: Watch | None = None
        self._file: RankFile | None = None
        self._neighbours = 1
        self._asynchronous = background
        self._staged: list[Staged] = []
        self._number = 0
        self._warned: set[str] = set()
        self.failed = 0
        """The number of the save that has failed in the background without anybody being told; 0: none."""
        self.told = 0
        """The number of the last save whose failure the training loop was told, counted from 1."""

    @property
    def has_begun(self) -> bool:
        """Whether a save was begun."""
        return self._number > 0

    def knows(self, snapshot: Snapshot) -> bool:
        """Whether the plan that was made fits a snapshot."""
        return self._file is not None and self._file.plan.signature == signature_of(snapshot)

    def prepare(self, control: Channel, snapshot: Snapshot) -> None:
        """Make the plan, and take and warm the memory that the first save needs. Every rank calls it, over `control`.

        Raises: ConfigError on every rank alike.
        """
        file = None

        def plan() -> tuple[str, int, int]:
            nonlocal file
            file = make_rank_file(snapshot, made)
            if refused := list(refused_tensors(file.special(snapshot))):
                raise ConfigError("; ".join(refused))
            # What an earlier plan holds is given back before the new slot is taken.
            held = self._stager.held_bytes if self._stager is not None else 0
            return socket.gethostname(), file.end, self._available() + held

        made = make_plan(snapshot, control)
        try:
            needs = control.run_on_all(plan)
        except RankFailed as failed:
            raise failed.as_ckptman_error() from failed
        assert file is not None
        self._file = file
        self._neighbours = sum(host == socket.gethostname() for host, _, _ in needs)
        if self._stager is not None:
            self._prepare_slot(control, file, snapshot, _too_little(needs))

    def _prepare_slot(self, control: Channel, file: RankFile, snapshot: Snapshot, refusal: str | None) -> None:
        stager, pool = self._stager, self._pool
        assert stager is not None
        assert pool is not None

        def take() -> None:
            stager.prepare(file, file.memory(snapshot))
            pool.start()  # a save that finds no thread must not wait for one until its slot holds another

        self._asynchronous = True
        if refusal is not None:
            self._refuse(refusal)
            return
        try:
            control.run_on_all(take)
        except RankFailed as failed:  # out of memory comes in many classes
            self._refuse(
                f"rank {failed.failure.rank} could not take memory for a private copy, or start a thread to write it: "
                f"{failed.failure.text}"
            )

    def save(
        self,
        snapshot: Snapshot,
        info: SaveInfo,
        overlapped: Collection[str] = (),
        watcher: Watcher | None = None,
    ) -> SaveReport | None:
        """Save. In the background, returns None as soon as the private copy is made; `wait` gives the report.

        `overlapped`: flat names of tensors that may still be copied when this returns; `hold` waits for them.
        `watcher`: knows which tensors should have changed since the save before; where none has, a warning says so.
        Raises: CommitError, on every rank alike. Called by every rank, after `prepare` of a snapshot of this kind.
        """
        begun = time.monotonic()
        self._number += 1
        number, file = self._number, self._file
        assert file is not None
        watch = self._watch_for(file, snapshot, watcher)
        moment = watcher.moment(info.step) if watcher is not None else Moment(info.step)
        self._note("save_begun", step=info.step, reason=info.reason)
        if self._running:
            self._note("save_queued", step=info.step)
        if self._pool is None or self._stager is None or not self._asynchronous or _is_leaving():
            content_or_error: Content | Exception
            try:
                content_or_error = Content.of(snapshot, file, file.memory(snapshot), watch)
            except Exception as error:  # noqa: BLE001
                content_or_error = error
            try:
                return self._write(number, content_or_error, info, moment, begun, None)
            finally:
                self.told, self.failed = self._number, 0
        # A rank that cannot stage takes its failure along into the save, where all the others hear of it.
        staged = None
        try:
            later = {number for number, piece in enumerate(file.pieces) if piece.name in overlapped}
            staged = self._stager.stage(file, file.memory(snapshot), later)
            content_or_error = Content.of(snapshot, file, staged, watch)
            self._staged += [staged] if later else []
        except BaseException as error:
            if staged is not None:
                staged.release()
            if not isinstance(error, Exception):  # Ctrl-C, after which somebody may go on
                raise
            content_or_error = error
        stall_seconds = time.monotonic() - begun
        self._note("save_staged", step=info.step, seconds=stall_seconds)
        try:
            work = (number, content_or_error, info, moment, begun, stall_seconds)
            self._running.append(self._pool.submit(self._write, *work))
        except RuntimeError:  # closed; after anything else the save may run, and the slot is its own
            if staged is not None:
                staged.release()
            raise
        return None

    def hold(self) -> None:
        """Before the state changes: wait until what is being copied is copied."""
        while self._staged:
            self._staged[-1].hold()
            self._staged.pop()  # only now: after a Ctrl-C the next one waits again

    def wait(self) -> tuple[list[SaveReport], CommitError | None]:
        """Wait for the saves in the background: the reports of those that succeeded, and the error of the first that
        did not."""
        reports: list[SaveReport] = []
        failure: CommitError | None = None
        while self._running:
            self._running[0].wait()  # still there after a Ctrl-C, for who waits again
            try:
                reports.append(self._running.popleft().result())
            except CommitError as error:
                failure = failure or error
        self.told, self.failed = max(self.told, self.failed), 0
        return reports, failure

    def wait_together(self, control: Channel, step: int) -> tuple[list[SaveReport], CommitError | None]:
        """The same with what the other ranks know: one that failed fails all. Every rank calls it, over `control`."""
        reports, failure = self.wait()
        # A rank that was lost at the last moment may have been lost for some only: they go on together all the same.
        outcomes = control.gather((failure is not None, self.told))
        self.told = max(told for _, told in outcomes)
        if failure is None and any(failed for failed, _ in outcomes):
            failure = CommitError(step, -1, "another rank reports that its part of it failed")
        return reports, failure

    def poll(self) -> list[SaveReport]:
        """The reports of saves in the background that have succeeded since the last call."""
        reports = []
        while self._running and self._running[0].done() and self._running[0].error is None:
            reports.append(self._running.popleft().result())
        return reports

    def close(self, *, tidy: bool = False) -> None:
        """Stop the background threads. What runs is waited for. `tidy`: the run ended as it should."""
        if self._pool is not None:
            self._pool.close()
        if self._stager is not None:
            self._stager.close()
        self.keeper.close(tidy=tidy)

    def _write(
        self,
        number: int,
        content: Content | Exception,
        info: SaveInfo,
        moment: Moment,
        begun: float,
        stall_seconds: float | None,
    ) -> SaveReport:
        draft: Draft | None = None
        try:
            for tries_left in reversed(range(_TRIES)):
                draft = self._draft(info)
                try:
                    with self._watchdog.saving(info.step):
                        buffered_because, seen = self._writing.save(self.channel, draft, content)
                    break
                except RankFailed as error:
                    # What it wrote goes first: it may be what fills the disk.
                    draft.abandon()
                    if not tries_left or not self._make_room(error, info):
                        raise
        except RankFailed as error:
            self._give_up(number, draft, info.step, error.failure.rank, error.failure.text, error)
        except RankLostError as error:
            self._give_up(number, draft, info.step, -1, error.cause, error)
        except Exception as error:  # noqa: BLE001 whatever it is, the training loop has to hear of it
            self._give_up(number, draft, info.step, -1, f"{type(error).__name__}: {error}", error)
        finally:
            self.keeper.save_ended()
            if isinstance(content, Content) and isinstance(content.tensors, Staged):
                content.tensors.release()
        seconds = time.monotonic() - begun
        try:
            self._note("save_durable", sync=True, step=info.step, seconds=seconds, reason=info.reason)
            if buffered_because is not None and "buffered" not in self._warned:
                self._warned.add("buffered")
                self._note("direct_io_unavailable", reason=buffered_because)
            self.keeper.prune()
        except Exception as error:  # noqa: BLE001 the save is durable: a warning that is an error must not undo it
            self._note("prune_failed", cause=f"{type(error).__name__}: {error}")
        self._judge_freshness(moment, seen)
        return SaveReport(info.step, seconds if stall_seconds is None else stall_seconds, seconds)

    def _draft(self, info: SaveInfo) -> Draft:
        self.keeper.save_begins()
        return Draft(
            Path(self._place.root) / step_folder(info.step),
            info,
            overwrite=True,
            place=self._place,
            tag=self._claim.next_tag() if self._claim else None,
            disk=self._disk,
            on_commit=self._claim.check if self._claim else None,
        )

    def _give_up(
        self, number: int, draft: Draft | None, step: int, rank: int, cause: str, error: Exception
    ) -> NoReturn:
        self.failed = number
        if self.channel.is_leader and draft is not None:
            draft.abandon()
        self._note("save_failed", step=step, rank=rank, cause=cause)
        raise CommitError(step, rank, cause) from error

    def _make_room(self, error: RankFailed, info: SaveInfo) -> bool:
        """Where a save failed because the disk is full: whether there is more room now, and it is worth another try.

        Every rank calls it, as every rank has the error. Raises: RankFailed, RankLostError.
        """
        if error.failure.errno not in FULL:
            return False
        return self.channel.run_on_leader(lambda: self.keeper.make_room(info, error.failure.text))

    def _watch_for(self, file: RankFile, snapshot: Snapshot, watcher: Watcher | None) -> Watch | None:
        if watcher is None:
            return None
        if self._watch is None or self._watch.file is not file:
            self._watch = None
            with contextlib.suppress(Exception):  # not to know what should change is no reason not to save
                self._watch = watch_for(file, watcher.names(snapshot))
        return self._watch

    def _judge_freshness(self, moment: Moment, seen: Seen | None) -> None:
        if not self.channel.is_leader:
            return
        stale = self._judge.stale(moment, seen)
        if stale is None:
            return
        self._note(
            "stale",
            step=stale.step,
            previous_step=stale.previous_step,
            updates=stale.updates,
            count=stale.count,
            names=stale.names,
        )
        if stale.first:
            with contextlib.suppress(Warning):  # one that is an error must not undo a save that is durable
                warnings.warn(stale.text, RuntimeWarning, stacklevel=2)

    def _refuse(self, reason: str) -> None:
        """Saves block training from now on, because there is no memory to stage in."""
        self._asynchronous = False
        if self._stager is not None:
            self._stager.give_back()
        self._note("async_refused", reason=reason)
        if self.channel.is_leader:
            self.warn_once("async", f"saves will block training until they are durable: {reason}")

    def _may_take(self, size_bytes: int) -> bool:
        """Whether there is memory for one more slot, also if all ranks of this host want one now."""
        return self._available() >= self._neighbours * (size_bytes + RESERVE_BYTES)

    def warn_once(self, what: str, text: str) -> None:
        """A warning of a kind that comes once in the life of a process."""
        if what not in self._warned:
            self._warned.add(what)
            with contextlib.suppress(Warning):  # one that is an error must not keep the leader from the others
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _note(self, event: str, *, sync: bool = False, **fields: object) -> None:
        if self._journal is not None:
            self._journal.record(event, sync=sync, **fields)


def _is_leaving() -> bool:
    """Whether the interpreter is past its last statement: it does no more work in the background then."""
    return not threading.main_thread().is_alive()


def _too_little(needs: Sequence[tuple[str, int, int]]) -> str | None:
    """Which host has too little memory for the slots of all its ranks; None: each has enough.

    `needs`: for each rank its host, the bytes it needs and the bytes that host has left.
    """
    for host in dict.fromkeys(host for host, _, _ in needs):
        here = [(need, left) for name, need, left in needs if name == host]
        need = sum(each for each, _ in here) + RESERVE_BYTES * len(here)
        left = min(each for _, each in here)
        if need > left:
            return (
                f"a private copy for async saves needs {need / 2**30:.1f} GiB of host memory on {host}, and "
                f"{left / 2**30:.1f} GiB are left there. Say async_save=False, or ask for more memory (sbatch --mem)"
            )
    return None
