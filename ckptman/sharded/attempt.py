"""One attempt of a run: the claim on the root, the journal and the outcome. The leader keeps them for all ranks."""

from __future__ import annotations

import errno
import os
import socket
import time
import uuid
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckptman.errors import NotFoundError, RootError
from ckptman.lifecycle.outcome import OUTCOME_ENV, Outcome, attempt_number, write_outcome
from ckptman.monitor.journal import Journal, read_journal
from ckptman.sharded.ranks import Channel
from ckptman.store.durable import Disk
from ckptman.store.names import journal_path, outcome_path
from ckptman.store.owner import Claim, claim
from ckptman.store.place import FolderPlace
from ckptman.store.prune import clear, find_leftovers


@dataclass
class Attempt:
    """What is known about this attempt; `claim` and `journal` are the leader's, the others have None."""

    root: Path
    number: int
    run_id: str
    job_id: str | None
    finds_checkpoints: bool = False
    """Whether the root held complete checkpoints when the attempt began."""
    claim: Claim | None = None
    journal: Journal | None = None

    @classmethod
    def open(cls, talk: Channel, place: FolderPlace, run_id: str | None, disk: Disk) -> Attempt:
        """Take the root and begin. Every rank calls it. Raises, through RankFailed: BusyError, RootError."""
        kept: list[Attempt] = []

        def begin() -> Attempt:
            kept.append(_begin(place, run_id, talk.world_size, disk))
            return replace(kept[0], claim=None, journal=None)

        told = talk.ask_leader(begin)
        return kept[0] if kept else told

    def note(self, event: str, *, sync: bool = False, **fields: object) -> None:
        """Write an event to the journal; nothing on ranks that are not the leader."""
        if self.journal is not None:
            self.journal.record(event, sync=sync, **fields)

    def write_outcome(
        self, state: Literal["running", "finished", "stopped", "failed"], step: int, reason: str, exit_code: int
    ) -> None:
        """Leader only: say on disk how the attempt stands, because launchers swallow exit codes. Raises: OSError."""
        outcome = Outcome(
            state=state,
            step=step,
            reason=reason,
            exit_code=exit_code,
            root=str(self.root.absolute()),
            attempt=self.number,
            time_seconds=time.time(),
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        # The chain's copy first: if the root's disk is full, whoever decides about the next attempt still learns why.
        asked_for = os.environ.get(OUTCOME_ENV)
        if asked_for:
            write_outcome(Path(asked_for), outcome)
        write_outcome(outcome_path(self.root), outcome)

    def end(self, state: Literal["finished", "stopped", "failed"], step: int, reason: str, exit_code: int) -> None:
        """Write outcome and last event. Trouble on the way is told and does not hide why the attempt ended."""
        if self.claim is not None:
            try:
                self.write_outcome(state, step, reason, exit_code)
            except OSError as error:
                warnings.warn(f"the outcome could not be written: {error}", RuntimeWarning, stacklevel=3)
        self.note(state, sync=True, step=step, reason=reason)

    def release(self) -> None:
        """Close the journal and give the root free."""
        if self.journal is not None:
            self.journal.close()
        if self.claim is not None:
            self.claim.release()


def _begin(place: FolderPlace, run_id: str | None, world_size: int, disk: Disk) -> Attempt:
    place.make()
    entries = place.list()
    manifests = [entry.manifest for entry in entries if entry.manifest is not None]
    run_id = run_id or (manifests[-1].run_id if manifests else "") or uuid.uuid4().hex[:12]
    job_id = os.environ.get("SLURM_JOB_ID")
    held = _claim(place.root, run_id, job_id, disk)
    try:
        # What killed saves left may be what fills the disk, so it goes before the first save and not after it.
        _clear_leftovers(place.root, held.next_tag(), disk)
        finds = any(entry.complete for entry in entries)
        attempt = Attempt(place.root, _number(place.root), run_id, job_id, finds, held)
        attempt.journal = Journal(journal_path(place.root), disk=disk)
        attempt.journal.bind(attempt=attempt.number)
        where = {"host": held.owner.host, "pid": held.owner.pid, "job_id": job_id, "world_size": world_size}
        attempt.note("attempt_started", sync=True, run_id=run_id, **where)
        attempt.write_outcome("running", 0, "", 0)
    except BaseException:
        held.release()
        raise
    return attempt


def _claim(root: Path, run_id: str, job_id: str | None, disk: Disk) -> Claim:
    try:
        return claim(root, run_id, job_id, disk=disk)
    except RootError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _clear_leftovers(root, f"full-{os.urandom(4).hex()}", disk)
        return claim(root, run_id, job_id, disk=disk)


def _clear_leftovers(root: Path, tag: str, disk: Disk) -> None:
    try:
        clear(root, find_leftovers(root), tag, disk)
    except OSError as error:
        warnings.warn(f"leftovers in {root} could not be removed: {error}", RuntimeWarning, stacklevel=3)


def _number(root: Path) -> int:
    """Which attempt this is: one more than the journal knows, or what the chain says if that is more."""
    try:
        events, _ = read_journal(journal_path(root))
    except NotFoundError:
        events = []
    known = len([event for event in events if event.get("event") == "attempt_started"])
    return max(known + 1, attempt_number(os.environ))
