"""The retention of a run at work: after each commit older checkpoints go by the plan, and where the disk is full."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.prune import Pruned, execute, plan_prune
from ckptman.catalog.stored_policy import write_policy
from ckptman.catalog.writer_lock import Claim
from ckptman.errors import warn
from ckptman.io.throttled_delete import Remover
from ckptman.policies.retention import keeps_any, slip
from ckptman.policies.retention_rules import Record, RetentionPolicy, in_bytes, needs_capacity
from ckptman.runtime.journal import Journal
from ckptman.saving.writer import SaveInfo

OnFull = Literal["fail", "prune"]
_CLOSE_SECONDS = 30.0
_MOST_BYTES_AHEAD = 1.1
"""Room for a save: as much as the one before took, and a little more."""


class RetentionRunner:
    """What to keep, carried out. Every rank has one; only the leader's has the `claim` and deletes."""

    def __init__(
        self,
        backend: LocalBackend,
        policy: RetentionPolicy | None,
        on_full: OnFull,
        claim: Claim | None,
        journal: Journal | None,
    ) -> None:
        self._root, self._policy, self._on_full = backend.root, policy, on_full
        self._catalogue = backend.catalogue
        self._claim, self._journal, self._disk = claim, journal, backend.disk
        self._needs_capacity = needs_capacity(policy)
        self._damaged: set[int] = set()
        self._held = contextlib.ExitStack()
        self._has_saved = False
        self._remover = Remover(backend.disk, self._not_removed)
        self._warned = False
        self._newest_bytes = 0
        if claim is not None:
            self._store()

    def restored(self, damaged: set[int], held: contextlib.ExitStack) -> None:
        """Note that the run goes on from a checkpoint, which `held` keeps as long as it lasts. `damaged`: commit
        sequences of those that were refused, and do not count."""
        self._damaged = damaged
        self._held.close()
        self._held = held

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
        if self._remover.pending and self._is_short():
            self._remover.drain()
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
            pruned, steps = self._carry_out(self._disk.remove_tree, coming)
            freed_bytes = pruned.freed_bytes
        self._note("disk_full", step=info.step, cause=cause, pruned_steps=steps, freed_bytes=freed_bytes)
        if self._on_full == "prune":
            gone = f"step {', '.join(map(str, steps))} went" if steps else "no checkpoint may go"
            _warn(f"the disk is full, so checkpoints were pruned for the save of step {info.step}: {gone} ({cause})")
        return bool(waiting) or freed_bytes > 0

    def close(self, *, tidy: bool) -> None:
        """Remove what is left to remove, as far as it goes in half a minute. `tidy`: the run ended as it should, so the
        rules judge what it went on from, if it has saved anything since."""
        self._held.close()
        if tidy and self._has_saved:
            self.prune()
        self._remover.close(_CLOSE_SECONDS)

    def _carry_out(self, remove: Callable[..., None], coming: Record | None = None) -> tuple[Pruned, list[int]]:
        """Plan and delete. Returns what was done, and the steps that went. Raises: what a plan raises.

        What cannot be removed is warned of, and keeps nothing else from being removed.
        """
        assert self._claim is not None
        if self._needs_capacity:
            from ckptman.doctor.quota import capacity_bytes

            self._policy = in_bytes(self._policy, capacity_bytes(self._root))
            self._needs_capacity = False
        planned = partial(plan_prune, self._root, damaged=self._damaged, wait=False, catalogue=self._catalogue)
        plan = planned(self._policy, coming=coming)
        records = [*(each.record for each in plan.verdicts), *([coming] if coming is not None else [])]
        if plan.deletions and (cause := slip(self._policy, records, time.time(), goes_on=True)):
            # Where other rules keep some, a metric may well come later, and until then the disk would fill up.
            if keeps_any(self._policy, records, time.time()):
                self._warn_once(f"older checkpoints are pruned by the other rules alone: {cause}")
            else:
                self._failed(cause)
                plan = planned(None)
        if plan.verdicts:
            self._newest_bytes = plan.verdicts[-1].record.bytes
        pending = set(self._remover.pending)
        plan.leftovers[:] = [each for each in plan.leftovers if each.path not in pending]
        pruned = Pruned()
        try:
            execute(self._root, plan, self._claim.next_tag(), self._disk, remove=remove, pruned=pruned)
        except Exception as error:  # noqa: BLE001 what else went is room for the save that needs it
            self._failed(f"{type(error).__name__}: {error}")
        gone = [verdict for verdict in plan.deletions if verdict.record.sequence in pruned.deleted]
        for verdict in gone:
            self._note("pruned", step=verdict.record.step, reason="; ".join(verdict.reasons))
        return pruned, [verdict.record.step for verdict in gone]

    def _is_short(self) -> bool:
        try:
            space = os.statvfs(self._root)
        except OSError:
            return True
        return space.f_bavail * space.f_frsize < self._newest_bytes * _MOST_BYTES_AHEAD

    def _store(self) -> None:
        """Store the policy, so that `ckptman prune` can go by the same rules."""
        try:
            write_policy(self._root, self._policy, self._disk)
        except OSError as error:
            _warn(f"the retention policy could not be stored, and ckptman prune will need options: {error}")

    def _not_removed(self, path: object, error: OSError) -> None:
        self._failed(f"{path}: {error}")

    def _failed(self, cause: str) -> None:
        self._note("prune_failed", cause=cause)
        self._warn_once(f"older checkpoints could not be pruned, and the disk fills up: {cause}")

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            _warn(text)

    def _note(self, event: str, **fields: object) -> None:
        if self._journal is not None:
            self._journal.record(event, sync=False, **fields)


def _warn(text: str) -> None:
    with contextlib.suppress(Warning):  # one that is an error must not undo a save, nor keep a rank from the others
        warn(text)
