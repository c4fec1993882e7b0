"""The retention of a run at work: after each commit older checkpoints go by the plan, and where the disk is full."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from ckptman.engine.saving.draft import SaveInfo
from ckptman.errors import warn_only
from ckptman.policies.retention_plan import keeps_any, policy_mistake
from ckptman.policies.retention_rules import Record, RetentionPolicy, in_bytes, needs_capacity
from ckptman.runtime.journal import Journal
from ckptman.storage.catalog.backends.run_store import RunStore
from ckptman.storage.catalog.prune import Pruned, execute, plan_prune, write_policy
from ckptman.storage.catalog.writer_lock import Claim
from ckptman.storage.io.durable_files import DISK, remove_by_file
from ckptman.storage.io.threads import Flag, Wakeup

OnFull = Literal["fail", "prune"]
_CLOSE_SECONDS = 30.0
_JOIN_SECONDS = 5.0
_GENTLY_SECONDS = 0.05
"""Between two files that are removed, while the run saves."""
_MOST_BYTES_AHEAD = 1.1
"""Room for a save: as much as the one before took, and a little more."""
_SAVES_AHEAD = 2
"""A disk with room for fewer saves is nearly full."""


class RetentionRunner:
    """What to keep, carried out. Every rank has one; only the leader's has the `claim` and deletes."""

    def __init__(
        self,
        store: RunStore,
        policy: RetentionPolicy | None,
        on_full: OnFull,
        claim: Claim | None,
        journal: Journal | None,
    ) -> None:
        self._root, self._policy, self._on_full = store.root, policy, on_full
        self._catalogue = store.local.catalogue
        self._claim, self._journal = claim, journal
        self._needs_capacity = needs_capacity(policy)
        self.damaged: set[int] = set()
        """Commit sequences of the checkpoints that a restore has refused: they do not count."""
        self._has_saved = False
        self._remover = Remover(lambda path, error: self._failed(f"{path}: {error}"))
        self._warned = False
        self._newest_bytes = 0
        self._is_nearly_full = False
        if claim is None:
            return
        try:
            write_policy(self._root, policy)  # so that `ckptman prune` can go by the same rules
        except OSError as error:
            warn_only(f"the retention policy could not be stored, and ckptman prune will need options: {error}")

    def prune(self) -> None:
        """Delete by the plan, now that a new checkpoint is durable. Never fails a save: raises nothing.

        What goes is invisible when this returns, and is removed behind the training.
        """
        if self._claim is None:
            return
        self._has_saved = True
        try:
            self._carry_out(self._remover.add)
        except Exception as error:  # noqa: BLE001 a user's own retention policy may raise anything
            self._failed(f"{type(error).__name__}: {error}")

    def save_begins(self) -> None:
        """Let deletions give way to a save that is about to write, unless it needs the room that they make."""
        if self._claim is None:
            return
        if self._remover.pending and self._free_bytes() < self._newest_bytes * _MOST_BYTES_AHEAD:
            self._remover.drain()
        if not self._remover.pending:
            self._look_at_room(self._free_bytes())
        self._remover.slow_down(True)

    def save_ended(self) -> None:
        """Let deletions go on: the save has written, or has failed."""
        self._remover.slow_down(False)

    def make_room(self, info: SaveInfo, cause: str) -> bool:
        """Delete what may go for a save, now that the disk is full; return whether that freed anything. Leader only.

        What is deleted is what the policy would delete once the save is there; with `on_full="fail"`, only what had
        been deleted before and was still being removed. Raises: what a plan raises.
        """
        waiting = self._remover.pending
        self._remover.drain()
        steps, freed_bytes = list[int](), 0
        if self._on_full == "prune":
            coming = Record(info.step, 0, time.time(), self._newest_bytes, dict(info.metrics or {}))
            pruned, steps = self._carry_out(DISK.remove_tree, coming)
            freed_bytes = pruned.freed_bytes
        self._note("disk_full", step=info.step, cause=cause, pruned_steps=steps, freed_bytes=freed_bytes)
        if self._on_full == "prune":
            gone = f"step {', '.join(map(str, steps))} went" if steps else "no checkpoint may go"
            warn_only(
                f"the disk is full, so checkpoints were pruned for the save of step {info.step}: {gone} ({cause})"
            )
        return bool(waiting) or freed_bytes > 0

    def end(self) -> None:
        """Have the rules judge what the run went on from too, if it has saved anything since. The run ended as it
        should, and no save is running."""
        if self._has_saved:
            self.prune()

    def close(self) -> None:
        """Remove what is left to remove, as far as it goes in half a minute."""
        self._remover.close(_CLOSE_SECONDS)

    def _carry_out(self, remove: Callable[..., None], coming: Record | None = None) -> tuple[Pruned, list[int]]:
        """Plan and delete. Returns what was done, and the steps that went. Raises: what a plan raises.

        What cannot be removed is warned of, and keeps nothing else from being removed.
        """
        assert self._claim is not None
        if self._needs_capacity:
            from ckptman.runtime.deadline import run_command
            from ckptman.storage.io.mount import capacity_bytes

            self._policy = in_bytes(self._policy, capacity_bytes(self._root, run_command))
            self._needs_capacity = False
        planned = partial(plan_prune, self._root, damaged=self.damaged, wait=False, catalogue=self._catalogue)
        pending = set(self._remover.pending)  # before the folder is read: what is in it may be gone after that
        plan = planned(self._policy, coming=coming)
        records = [*(each.record for each in plan.verdicts), *([coming] if coming is not None else [])]
        if plan.deletions and (cause := policy_mistake(self._policy, records, time.time(), goes_on=True)):
            # Where other rules keep some, a metric may well come later, and until then the disk would fill up.
            if keeps_any(self._policy, records, time.time()):
                self._warn_once(f"older checkpoints are pruned by the other rules alone: {cause}")
            else:
                self._failed(cause)
                plan = planned(None)
        if plan.verdicts:
            self._newest_bytes = plan.verdicts[-1].record.bytes
        plan.leftovers[:] = [each for each in plan.leftovers if each.path not in pending]
        pruned = Pruned()
        try:
            execute(self._root, plan, self._claim.next_tag(), remove=remove, pruned=pruned, later=True)
        except Exception as error:  # noqa: BLE001 what else went is room for the save that needs it
            self._failed(f"{type(error).__name__}: {error}")
        gone = [verdict for verdict in plan.deletions if verdict.record.sequence in pruned.deleted]
        for verdict in gone:
            self._note("pruned", step=verdict.record.step, reason="; ".join(verdict.reasons))
        return pruned, [verdict.record.step for verdict in gone]

    def _free_bytes(self) -> float:
        try:
            space = os.statvfs(self._root)
        except OSError:
            return math.inf  # a save says what is wrong
        return space.f_bavail * space.f_frsize

    def _look_at_room(self, free_bytes: float) -> None:
        """Note that the disk is nearly full, when that begins."""
        is_nearly_full = free_bytes < self._newest_bytes * _SAVES_AHEAD
        if is_nearly_full and not self._is_nearly_full:
            self._note("disk_nearly_full", free_bytes=int(free_bytes), save_bytes=self._newest_bytes)
        # Not each time that a deletion makes a little room.
        self._is_nearly_full = free_bytes < self._newest_bytes * (_SAVES_AHEAD + self._is_nearly_full)

    def _failed(self, cause: str) -> None:
        self._note("prune_failed", cause=cause)
        self._warn_once(f"older checkpoints could not be pruned, and the disk fills up: {cause}")

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warn_only(text)

    def _note(self, event: str, **fields: object) -> None:
        if self._journal is not None:
            self._journal.record(event, sync=False, **fields)


class Remover:
    """Removes folders in a thread of its own, behind a run that goes on, and slowly while that run saves."""

    def __init__(self, told: Callable[[Path, OSError], object]) -> None:
        """`told` is called, in that thread, with what could not be removed: it stays a leftover."""
        self._told = told
        self._turn, self._changed = threading.Lock(), Wakeup()
        self._queue: list[Path] = []
        self._thread: threading.Thread | None = None
        self._hurry = Flag()
        self._gently = self._closed = False

    def add(self, folder: Path) -> None:
        """Have a folder removed that nobody sees any more."""
        with self._turn:
            self._queue.append(folder)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ckptman-remove", daemon=True)
                self._thread.start()
        self._changed.notify()

    @property
    def pending(self) -> list[Path]:
        """What is still to be removed, or is being removed."""
        with self._turn:
            return list(self._queue)

    def slow_down(self, wanted: bool) -> None:
        """Whether the run saves just now."""
        self._gently = wanted

    def drain(self, timeout_seconds: float | None = None) -> bool:
        """Remove the rest as fast as can be, and wait for it. False where that took too long."""
        self._hurry.set()
        try:
            return self._changed.wait_for(lambda: not self._queue, timeout_seconds)
        finally:
            self._hurry.clear()

    def close(self, timeout_seconds: float) -> None:
        """Remove what can be in that time; the rest is a leftover, which the next attempt or a prune clears."""
        if self._thread is None:
            return
        self.drain(timeout_seconds)
        self._closed = True
        self._changed.notify()
        self._hurry.set()
        self._thread.join(_JOIN_SECONDS)

    def _work(self) -> None:
        while True:
            self._changed.wait_for(lambda: bool(self._queue) or self._closed)
            if self._closed:
                return
            folder = self._queue[0]
            try:
                remove_by_file(folder, self._pause)
            except _Closed:
                return
            except OSError as error:
                self._told(folder, error)
            finally:
                with self._turn:
                    self._queue.remove(folder)
                self._changed.notify()

    def _pause(self) -> None:
        if self._closed:
            raise _Closed
        if self._gently:
            self._hurry.wait(_GENTLY_SECONDS)


class _Closed(Exception):
    """The run ends: the rest is left."""
