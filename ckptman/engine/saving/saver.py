"""Saving, stage by stage: preflight, plan, stage, write, gather, commit; then older checkpoints go.

It runs in the training thread or behind it, one checkpoint after the other.
"""

from __future__ import annotations

import gc
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from ckptman.engine.comm.control_group import AllRanks, Channel, Contribution, RankFailed, failing_as_one
from ckptman.engine.comm.replicas import agree_on_frozen, compare_replicas
from ckptman.engine.saving.draft import Draft, SaveInfo
from ckptman.engine.saving.memory_saves import MemorySaves
from ckptman.engine.saving.refused_values import refused_tensors
from ckptman.engine.saving.retention_runner import RetentionRunner
from ckptman.engine.saving.save_checks import OnNonfinite, Stale
from ckptman.engine.saving.staging import Staged, Stager, refusal
from ckptman.engine.saving.warm_copy import why_not_kept
from ckptman.engine.saving.write_plan import (
    NameTable,
    RankFile,
    make_rank_file,
    memory_of,
    plan_for,
    tables_of_all,
)
from ckptman.engine.saving.writer import CheckpointWriter, Committed, Content, FailedStage, Health, SaveReport
from ckptman.engine.state.kept_parts import PartKeeper
from ckptman.engine.state.local_shards import refuse_unfillable
from ckptman.engine.state.named_state import is_named, is_stateful
from ckptman.engine.state.snapshot import (
    Snapshot,
    told_difference,
    unlike_on_ranks,
    value_texts,
)
from ckptman.engine.state.step_record import OptimizerHooks, updated_tensors
from ckptman.errors import CommitError, ConfigError, RankLostError, warn_only
from ckptman.policies.retention_rules import nonfinite_text
from ckptman.runtime.journal import Journal
from ckptman.runtime.stopwatch import Stopwatch
from ckptman.runtime.watchdog import Watchdog
from ckptman.storage.catalog.backends.run_store import RunStore
from ckptman.storage.catalog.writer_lock import Claim
from ckptman.storage.format.manifest import Nonfinite, Replicas
from ckptman.storage.format.paths import data_name, step_folder
from ckptman.storage.io.failure_cause import FULL
from ckptman.storage.io.threads import Task, Worker

_TRIES = 3
"""How often a save is written that finds the disk full, each time with more room."""


@dataclass(frozen=True)
class Preflight:
    """A snapshot of this rank's state, and over all ranks: the largest number of a save that failed and was not
    reported (0: none), whether any lost its channel for saves, whether the plan of every rank fits, and what the leader
    told.

    `table`, `digests`: for a plan of its own, if this rank needs one: its names, and the digests of the tables of all
    ranks, "" if a rank needs none; None: they are alike."""

    snapshot: Snapshot
    failed: int
    lost: bool
    fits: bool
    told: Any
    table: NameTable | None
    digests: Sequence[str] | None


class Saver:
    """Writes checkpoints of one run. Every rank has one; only the leader's has the `claim` and prunes.

    Args:
        channel: what the ranks talk over while they save.
        hooks: of the optimizers in the state; their next step waits for what is still being copied.
        background: copy to host memory, and write from there in a thread.
        overlap: what optimizer steps alone change may still be copied when `save` returns.
        nonfinite: whether a save that holds NaN or infinity is marked, or fails, or nobody looks.
        keep_warm: keep the newest checkpoint in the page cache if memory allows. None: only if memory is plentiful.
    """

    def __init__(
        self,
        store: RunStore,
        channel: Channel,
        journal: Journal | None,
        claim: Claim | None,
        retention: RetentionRunner,
        watchdog: Watchdog,
        hooks: OptimizerHooks,
        *,
        background: bool,
        overlap: bool = False,
        nonfinite: OnNonfinite = "ignore",
        keep_warm: bool | None = None,
    ) -> None:
        self._store, self._journal, self._claim, self._watchdog = store, journal, claim, watchdog
        self.channel, self.retention, self._hooks, self._overlap = channel, retention, hooks, overlap
        hooks.before_step = self.wait_staged
        self._stager = Stager(Worker("ckptman-save")) if background else None
        self._asynchronous = background
        self._running: deque[Task[SaveReport]] = deque()
        self._staged: list[Staged] = []
        self._writer = CheckpointWriter(nonfinite)
        self._keep_warm = keep_warm
        self._neighbours = 1
        """How many ranks this host has, this one included."""
        self._parts = PartKeeper()
        self._file: RankFile | None = None
        self._replicas: Replicas | None = None
        """What the comparison found that the first save with this plan made."""
        self._is_compared = False
        self._has_memory = False
        """Whether it is known of all ranks whether they have the memory for this plan."""
        self._number = 0
        self._warned: set[str] = set()
        self.failed = 0
        """The number of the save that has failed in the background and was not reported; 0: none."""
        self.reported = 0
        """The number of the last save whose failure was reported to the training loop, counted from 1."""

    @property
    def has_saved(self) -> bool:
        """Whether a save of this attempt has begun; alike on every rank."""
        return self._number > 0

    def report_health(self, health: Health) -> None:
        """Let each save bring what the ranks have to say of their health to the leader."""
        self._writer.health = health

    # ---- the stages --------------------------------------------------------------------------------------------

    def preflight(
        self, control: Channel, state: Mapping[str, Any], verb: str, of_leader: Callable[[], object] = lambda: None
    ) -> Preflight:
        """Take a snapshot of what is to be saved, and see that it can be: a value that one rank cannot save must not
        leave the others waiting. Every rank calls it, over `control`.

        Args:
            verb: What this rank was asked to do, such as "save()".
            of_leader: What the leader has to tell the others: `Preflight.told`.

        Raises: ConfigError, on every rank alike.
        """
        agree_on_frozen(control, state)
        shot: Snapshot | None = None
        table: NameTable | None = None

        def look() -> Contribution:
            nonlocal shot, table
            with self._hooks.ignored(), _no_collection():
                shot = self._parts.snapshot(state, control.rank)
            filled = [each for each in self._parts.walked if is_named(state[each]) or not is_stateful(state[each])]
            for part in shot.parts:
                for name, tensor in part.tensors.items() if part.key in filled else ():
                    refuse_unfillable(name, tensor)
            fits = self._file is not None and self._file.plan.signature == shot.signature
            table = None if fits else NameTable.of(shot)
            told = of_leader() if control.is_leader else None
            values = self._parts.digests(shot), table.digest if table is not None else ""
            return Contribution(values, None, (self.failed, self.channel.lost, not fits), told)

        with failing_as_one():
            met = control.agree(verb, look)
        assert shot is not None
        if met.unlike is not None and (differing := unlike_on_ranks([each for each, _ in met.unlike])) is not None:
            texts = control.gather(value_texts(shot, differing[0]) if control.rank in differing[1:] else {})
            raise ConfigError(told_difference(*differing, texts))
        failed, lost, is_other = met.maxima
        digests = [digest for _, digest in met.unlike] if met.unlike is not None else None
        return Preflight(shot, failed, bool(lost), not is_other, met.told, table, digests)

    def plan(self, control: Channel, found: Preflight) -> None:
        """Agree on who writes what, and begin to take and warm the memory that the first save needs. Every rank calls
        it, over `control`, while no save is running.

        Raises: ConfigError, on every rank alike.
        """
        snapshot, digests, here = found.snapshot, found.digests, socket.gethostname()
        table = found.table or NameTable.of(snapshot)
        if digests is not None and "" in digests:  # of a rank whose own plan fits still
            digests = control.gather(table.digest)
        tables = tables_of_all(control, table, digests)
        with failing_as_one(), AllRanks[tuple[str, int, int]](control) as needs:
            file = make_rank_file(snapshot, plan_for(snapshot, tables, control.rank))
            if refused := list(refused_tensors(file.special(snapshot))):
                raise ConfigError("; ".join(refused))
            needs.mine = self._stager.needs(file) if self._stager is not None else (here, 0, 0)
        self._file, self._replicas, self._is_compared, self._has_memory = file, None, False, False
        self._neighbours = sum(host == here for host, _, _ in needs.all)
        if self._stager is None:
            return
        self._stager.neighbours = self._neighbours
        self._asynchronous = True
        if reason := refusal(needs.all):
            self._block_from_now_on(reason)
            return
        try:
            with AllRanks[None](control):
                self._stager.prepare(file, file.memory(snapshot))
                self._stager.saves.start()  # now: a save that finds no thread would hold its slot for ever
        except RankFailed as failed:  # out of memory comes in many classes
            self._cannot_stage(failed)

    def _take_memory(self, control: Channel) -> None:
        """See that every rank has the memory that `plan` asked for. Every rank calls it, over `control`."""
        if self._stager is None or not self._asynchronous:
            return
        try:
            with AllRanks[None](control):
                self._stager.wait()
        except RankFailed as failed:
            self._cannot_stage(failed)
        self._has_memory = True  # last: whoever was interrupted looks again

    def _cannot_stage(self, failed: RankFailed) -> None:
        self._block_from_now_on(
            f"rank {failed.failure.rank} could not take memory for a private copy, or start a thread to write it: "
            f"{failed.failure.text}"
        )

    def pin_some(self, seconds: float) -> None:
        """Pin memory that saves copy into, for about so long, between two steps."""
        if self._stager is not None:
            self._stager.pin_some(seconds)

    def compare(self, control: Channel, state: Mapping[str, Any], snapshot: Snapshot) -> Replicas | None:
        """Compare what several ranks hold, which is saved once for all of them. Every rank calls it, over `control`,
        after `plan`. Raises: ConfigError, on every rank alike."""
        assert self._file is not None
        found = compare_replicas(control, snapshot, self._file.plan.shared, state)
        for number, text in enumerate(found.warnings):
            self._warn_once(f"replicas {number}", text)
        if found.drift is not None:
            self._note("replicas_differ", **found.drift)
        return found.replicas

    def save(
        self,
        control: Channel,
        state: Mapping[str, Any],
        snapshot: Snapshot,
        info: SaveInfo,
        watch: Stopwatch,
        *,
        to_disk: bool = True,
        memory: MemorySaves | None = None,
    ) -> SaveReport | None:
        """Stage and write. In the background, returns None as soon as the copy is made; `wait` gives the report.

        Args:
            watch: started when the call began; records how long each part of the save takes.
            memory: where the same copy becomes a checkpoint in memory; `to_disk` False: there alone.

        Every rank calls it, after `plan` of a snapshot of this kind. Raises, on every rank alike: CommitError;
        ConfigError, where ranks differ in what one of them saves for all.
        """
        if not self._has_memory:
            self._take_memory(control)
        watch.ends("wait")
        if not to_disk:
            self._save_to_memory(control, state, snapshot, info, memory, watch)
            return None
        self._number += 1
        assert self._file is not None
        self._note("save_begun", step=info.step, reason=info.reason)
        blocks = self._stager is None or not self._asynchronous or _is_leaving()
        if self._running:
            self._note("save_queued", step=info.step)
        if self._running or blocks:  # from here on it waits for files
            self._watchdog.beat("save", info.step)
        if self._stager is None or blocks:
            content, info = self._compared(control, state, snapshot, info, None)
            watch.ends("stage")
            try:
                return self._write(self._number, content, info, watch, None)
            finally:
                self.reported, self.failed = self._number, 0
        content, info = self._compared(control, state, snapshot, info, self._stager)
        watch.ends("stage")
        self._note("save_staged", step=info.step, seconds=watch.seconds)
        if memory is not None:
            memory.begin(content, info, watch.begun, watch.seconds)
        write = partial(self._write, self._number, content, info, watch, watch.seconds)
        try:
            self._running.append(self._stager.saves.submit(write))
        except RuntimeError:  # closed; after anything else the save may run, and the slot is its own
            _release(content)
            raise
        return None

    def _save_to_memory(
        self,
        control: Channel,
        state: Mapping[str, Any],
        snapshot: Snapshot,
        info: SaveInfo,
        memory: MemorySaves | None,
        watch: Stopwatch,
    ) -> None:
        if memory is None or self._stager is None or not self._asynchronous or _is_leaving():
            return
        content, info = self._compared(control, state, snapshot, info, self._stager)
        watch.ends("stage")
        memory.begin(content, info, watch.begun, watch.seconds)
        if isinstance(content, Content) and isinstance(content.tensors, Staged):
            content.tensors.slot.free = True  # but for the checkpoint that it becomes

    def _compared(
        self,
        control: Channel,
        state: Mapping[str, Any],
        snapshot: Snapshot,
        info: SaveInfo,
        stager: Stager | None,
    ) -> tuple[Content | FailedStage, SaveInfo]:
        """Stage, and compare what several ranks hold, once for each plan: when it has been copied, so that nothing
        changes in between. Raises: ConfigError, and then the save has failed."""
        content = self._stage(state, snapshot, info.step, stager)
        if not self._is_compared:
            try:
                self._replicas, self._is_compared = self.compare(control, state, snapshot), True
            except BaseException as error:
                _release(content)
                self._note("save_failed", step=info.step, rank=-1, cause=str(error))
                raise
        return content, replace(info, replicas=self._replicas)

    def _stage(
        self, state: Mapping[str, Any], snapshot: Snapshot, step: int, stager: Stager | None
    ) -> Content | FailedStage:
        """Return what is to be written; without a stager the live tensors."""
        file, staged = self._file, None
        assert file is not None
        try:
            watch = self._writer.watch(step, file, snapshot, state, self._hooks.count)
            finite = self._writer.finite_check(file, snapshot, state)
            if stager is None:
                return Content.of(snapshot, file, file.memory(snapshot), watch, finite)
            memory = file.memory(snapshot)  # apart from the parameters: `p.data = ...` must not change what is copied
            names: Collection[str] = updated_tensors(state, snapshot) if self._may_overlap(memory) else ()
            later = {number for number, piece in enumerate(file.pieces) if piece.name in names} if names else set()
            staged = stager.stage(file, memory, later, memory_of(file.pickled, snapshot.tensors))
            content = Content.of(snapshot, file, staged, watch, finite)
        except BaseException as error:
            if staged is not None:
                staged.release()
            if not isinstance(error, Exception):  # Ctrl-C, after which somebody may go on
                raise
            return FailedStage(error)
        if later:
            self._staged.append(staged)
        return content

    def _write(
        self,
        number: int,
        content: Content | FailedStage,
        info: SaveInfo,
        watch: Stopwatch,
        stall_seconds: float | None,
    ) -> SaveReport:
        """Write, gather, commit; in the background thread, or in the training thread where that waits."""
        watch.ends("wait")
        try:
            committed = self._commit(content, info)
        except RankFailed as error:
            self._give_up(number, CommitError(info.step, error.failure.rank, error.failure.text), error)
        except RankLostError as error:
            self._give_up(number, CommitError(info.step, -1, error.cause), error)
        except Exception as error:  # noqa: BLE001 whatever it is, the training loop has to hear of it
            self._give_up(number, CommitError(info.step, -1, f"{type(error).__name__}: {error}"), error)
        finally:
            self.retention.save_ended()
            _release(content)
        watch.ends("write")
        seconds = watch.seconds
        report = SaveReport(info.step, seconds if stall_seconds is None else stall_seconds, seconds)
        try:
            facts = {"seconds": seconds, "stall_seconds": report.stall_seconds, "bytes": committed.size_bytes}
            self._note("save_durable", sync=True, step=info.step, **facts, reason=info.reason, parts=watch.parts)
            if committed.buffered_because is not None and "buffered" not in self._warned:
                self._warned.add("buffered")
                self._note("direct_io_unavailable", reason=committed.buffered_because)
            self.retention.prune()
            if self._keep_warm is not False:
                self._keep_cached(info.step)
        except Exception as error:  # noqa: BLE001 the save is durable: a warning that is an error must not undo it
            self._note("prune_failed", cause=f"{type(error).__name__}: {error}")
        if self.channel.is_leader:
            self._report(info.step, committed)
        return report

    def _commit(self, content: Content | FailedStage, info: SaveInfo) -> Committed:
        """Write a draft and make it a checkpoint; where the disk is full, once more with more room. Raises: RankFailed,
        RankLostError, and whatever else went wrong on this rank."""
        tries_left = _TRIES
        while True:
            tries_left -= 1
            self.retention.save_begins()
            draft = Draft.of_run(self._store, info, self._claim)
            try:
                with self._watchdog.saving(info.step):
                    return self._writer.save(self.channel, draft, content)
            except RankFailed as error:
                draft.abandon()  # what it wrote may be what fills the disk
                if not tries_left or not self._make_room(error, info):
                    raise
            except Exception:
                draft.abandon()
                raise

    def _make_room(self, error: RankFailed, info: SaveInfo) -> bool:
        """Return whether the disk was full and has more room now, so that it is worth another try. Every rank calls it,
        as every rank has the error. Raises: RankFailed, RankLostError."""
        if error.failure.errno not in FULL:
            return False
        return self.channel.run_on_leader(lambda: self.retention.make_room(info, error.failure.text))

    def _give_up(self, number: int, failure: CommitError, error: Exception) -> NoReturn:
        self.failed = number
        self._note("save_failed", step=failure.step, rank=failure.rank, cause=failure.cause)
        raise failure from error

    @property
    def stager(self) -> Stager | None:
        """What makes the private copies; None: there are none, as saves block."""
        return self._stager if self._asynchronous else None

    @property
    def slot_bytes(self) -> int:
        """Host memory of one private copy of this rank's part."""
        return self._file.end if self._file is not None else 0

    @property
    def is_writing(self) -> bool:
        """Whether a save is being written behind the training."""
        return any(not each.done() for each in self._running)

    # ---- how saves end -----------------------------------------------------------------------------------------

    def wait_staged(self) -> None:
        """Wait until what is being copied is copied, before the state changes."""
        for staged in self._staged:
            staged.wait_staged()
        # Until it is complete, each waits: the next optimizer may step on another stream, or after a Ctrl-C here.
        self._staged = [staged for staged in self._staged if not staged.is_complete]

    def wait(self) -> tuple[list[SaveReport], CommitError | None]:
        """Wait for the saves in the background; return the reports of those that succeeded, and the error of the first
        that did not."""
        reports: list[SaveReport] = []
        failure: CommitError | None = None
        while self._running:
            self._running[0].wait()  # still there after a Ctrl-C, for who waits again
            try:
                reports.append(self._running.popleft().result())
            except CommitError as error:
                failure = failure or error
        self.reported, self.failed = max(self.reported, self.failed), 0
        return reports, failure

    def poll(self) -> list[SaveReport]:
        """Return the reports of saves in the background that have succeeded since the last call."""
        reports = []
        while self._running and self._running[0].done() and self._running[0].error is None:
            reports.append(self._running.popleft().result())
        return reports

    def close(self) -> None:
        """Stop the background threads. What runs is waited for."""
        if self._stager is not None:
            self._stager.saves.close()
            self._stager.close()
        self._writer.close()
        self.retention.close()

    def _may_overlap(self, memory: Sequence[torch.Tensor]) -> bool:
        """Return whether optimizer steps alone change what they change, and each of them waits before it does."""
        if not self._overlap or all(each.device.type == "cpu" for each in memory):
            return self._overlap
        called = self._hooks.called_since()
        if self._hooks.graphed:
            self._warn_once(
                "graph",
                "a step of an optimizer was captured into a graph, or may be (capturable=True), and a graph that is "
                "replayed does not wait for a copy: saves do not overlap, and training waits for theirs. Say "
                "overlap=False, or make the optimizers without capturable=True and step them outside of graphs",
            )
        return called and not self._hooks.graphed

    # ---- what is reported --------------------------------------------------------------------------------------

    def _report_stale(self, stale: Stale) -> None:
        self._note(
            "stale",
            step=stale.step,
            previous_step=stale.previous_step,
            updates=stale.updates,
            count=stale.count,
            names=stale.names,
        )
        if stale.first:
            warn_only(stale.text)

    def _report(self, step: int, committed: Committed) -> None:
        found = committed.nonfinite or Nonfinite()
        if committed.stale is not None and not found.tensors:  # NaN stays NaN, which is no news besides
            self._report_stale(committed.stale)
        if found.metrics or found.tensors:
            self._note("nonfinite", step=step, metrics=found.metrics, tensors=found.tensors)
        if found.tensors:
            self._warn_once(
                "nonfinite",
                f"the checkpoint of step {step} is not finite (NaN or infinity in "
                f"{nonfinite_text((), found.tensors)}), and those that follow may not be either: the newest finite one "
                f"is kept, and a restore goes back to it. See where it begins: ckptman list {self._store.root}",
            )

    def _keep_cached(self, step: int) -> None:
        """Have what this rank wrote in the page cache, where there is memory for it."""
        path = self._store.root / step_folder(step) / data_name(self.channel.rank)
        try:
            reason = why_not_kept(path, self._neighbours, is_asked=self._keep_warm is True)
        except OSError:  # this rank wrote nothing, or the checkpoint is gone again
            return
        if reason is None:
            self._writer.keep_cached(path, starts=self._keep_warm is True)
        elif self._keep_warm and "warm" not in self._warned:
            self._note("not_kept_warm", step=step, reason=reason)
            self._warn_once("warm", f"the newest checkpoint is not kept in the page cache: {reason}")

    def _block_from_now_on(self, reason: str) -> None:
        """Save in the training thread from now on: there is no memory to stage in."""
        self._asynchronous = False
        if self._stager is not None:
            self._stager.give_back()
        self._note("async_refused", reason=reason)
        self._warn_once("async", f"saves will block training until they are durable: {reason}")

    def _warn_once(self, what: str, text: str) -> None:
        """Warn on the leader, once in the life of a process."""
        if self.channel.is_leader and what not in self._warned:
            self._warned.add(what)
            warn_only(text)

    def _note(self, event: str, *, sync: bool = False, **fields: object) -> None:
        if self._journal is not None:
            self._journal.record(event, sync=sync, **fields)


def _release(content: Content | FailedStage) -> None:
    """Free the slot in which it was staged, if it was."""
    if isinstance(content, Content) and isinstance(content.tensors, Staged):
        content.tensors.release()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hold off garbage collection, which in a large program takes longer than all that is done inside."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _is_leaving() -> bool:
    """Return whether the interpreter is past its last statement: it does no more work in the background then."""
    return not threading.main_thread().is_alive()
