"""One attempt of a run: the claim on the root, the journal and the outcome. The leader keeps them for all ranks."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

import torch

from ckptman.engine.comm.control_group import AllRanks, Channel, failing_as_one
from ckptman.engine.saving.draft import SaveInfo
from ckptman.engine.state.named_state import mesh_of
from ckptman.engine.state.snapshot import Snapshot
from ckptman.errors import (
    CkptmanError,
    ConfigError,
    CorruptError,
    RootError,
    SuspectError,
    masked,
    plain,
    warn,
    warn_only,
)
from ckptman.policies.crash_loop import MOST_IN_VAIN, starts_in_vain
from ckptman.policies.intervals import seconds_text
from ckptman.runtime.journal import Journal, events_of, suspects_of, typical_save_seconds
from ckptman.runtime.log import tell, tell_event
from ckptman.runtime.outcome import (
    CHAIN_ENV,
    OUTCOME_ENV,
    Outcome,
    attempt_number,
    end_launcher_at_exit,
    highest_attempt,
    launch_of,
    own_outcome,
    read_outcome,
    report_node,
    this_node,
    write_outcome,
)
from ckptman.runtime.requests import Requests
from ckptman.session.drain_process import Drainer
from ckptman.session.timings import process_started
from ckptman.storage.catalog.backends.run_store import RunStore
from ckptman.storage.catalog.catalog import any_will_do
from ckptman.storage.catalog.orphans import find_leftovers
from ckptman.storage.catalog.prune import PrunePlan, execute
from ckptman.storage.catalog.tiers import claim_tiers, write_tiers
from ckptman.storage.catalog.writer_lock import Claim, claim, device_of
from ckptman.storage.format.foreign import foreign_in
from ckptman.storage.format.paths import DOT, MANIFEST, METADATA, journal_path, outcome_path, parse_step
from ckptman.storage.io.durable_files import folder_mode
from ckptman.storage.io.failure_cause import FULL, cause_of, is_broken_device


@contextlib.contextmanager
def failed_start_reported(root: Path, is_leader: bool) -> Iterator[None]:
    """Tell the chain why a run could not begin: nothing else of it is on disk then."""
    try:
        yield
    except Exception as error:
        if is_leader:
            code = error.exit_code if isinstance(error, CkptmanError) else 1
            report_failed_start(root, f"{type(error).__name__}: {error}", code)
        raise


def report_failed_start(root: Path, reason: str, code: int) -> None:
    """Tell the chain, if there is one, why a run could not begin. Leader only."""
    if asked_for := os.environ.get(OUTCOME_ENV):
        with contextlib.suppress(OSError, ConfigError):
            number, now = attempt_number(os.environ), time.time()
            facts = str(root.absolute()), number, now, os.getpid(), socket.gethostname()
            write_outcome(Path(asked_for), Outcome("failed", 0, reason, code, *facts))


@dataclass
class RunSession:
    """What is known about this attempt; `claim`, `journal` and `requests` are the leader's, the others have
    None."""

    root: Path
    number: int
    run_id: str
    job_id: str | None
    finds_checkpoints: bool = False
    """Whether the root held anything that has a checkpoint's name when the attempt began."""
    save_seconds: float | None = None
    """What a save took in earlier attempts, from the decision until it was durable; None: none was measured."""
    claim: Claim | None = None
    journal: Journal | None = None
    drainer: Drainer | None = None
    requests: Requests | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the journal says of its start."""
    ended: str = ""
    """The state with which it ended; "" while it goes on."""
    _is_told: bool = False
    """Whether a watchdog has written how it ended, after which the journal hears no more of it."""

    @classmethod
    def open(cls, control: Channel, store: RunStore, run_id: str | None, total_steps: int | None = None) -> RunSession:
        """Take the root and begin. Every rank calls it. Raises, on every rank alike: BusyError, RootError."""
        session: RunSession | None = None
        try:
            with failing_as_one(), AllRanks[RunSession | None](control) as ranks:
                if control.is_leader:
                    session = _begin(store, run_id, control.world_size, total_steps)
                    ranks.mine = replace(session, claim=None, journal=None, drainer=None, requests=None)
        except BaseException:  # another rank was lost, or Ctrl-C: a notebook's next cell finds the root free
            if session is not None:
                session.release()
            raise
        return session or cast(RunSession, ranks.all[0])

    def begin(self) -> None:
        """Note on disk that the attempt runs, and under which number. Leader only."""
        if self.journal is not None:
            self.journal.bind(attempt=self.number)
        self.note("attempt_started", sync=True, **self.facts)
        self.write_outcome("running", 0, "", 0)

    def outrank(self, control: Channel, attempt: int) -> None:
        """Take a higher number than that of what this node has in memory, which may be all that is left of an attempt.
        Every rank calls it. Raises on every rank alike: OSError."""
        number = max(control.gather(attempt)) + 1
        if number > self.number:
            self.number = number
            with failing_as_one():
                control.run_on_leader(self.begin)

    def note(self, event: str, *, sync: bool = False, **fields: object) -> None:
        """Write an event to the journal; nothing on ranks that are not the leader."""
        if self.journal is not None and not self._is_told:
            self.journal.record(event, sync=sync, **fields)

    def tell(self, line: str) -> None:
        """Log a line that is no event; nothing on ranks that are not the leader."""
        if self.journal is not None:
            tell(line)

    def tell_deadline(self, deadline: float) -> None:
        """Log when the job ends (unix seconds), and whether that is too early for what a save was measured to take."""
        left_seconds = deadline - time.time()
        if math.isinf(left_seconds):
            return
        self.note("deadline", until_seconds=deadline)
        line = f"the job ends in {seconds_text(left_seconds)}"
        if left_seconds < 0:
            line = f"the job was to end {seconds_text(-left_seconds)} ago (deadline= is a unix time)"
        elif self.save_seconds is not None and left_seconds < self.save_seconds:
            line += f", which is too short for a save of {seconds_text(self.save_seconds)}"
        self.tell(line)

    def suspects(self) -> dict[int, str]:
        """Return the steps of the checkpoints that attempts crashed with, each with the reason not to load it again.

        As the journal has it now: a step that was saved anew is not one of them any more.
        """
        return suspects_of(self.root)

    def stop_crash_loop(self, restored: int | None) -> None:
        """Refuse to train on where torchrun has started the ranks again and again, and no start got anywhere.

        Called by the leader when it has `restored` a step; None: there was none. Raises: SuspectError.
        """
        launch = launch_of(os.environ)
        now = [{"event": "restored", "step": restored}]  # of which the journal hears last
        if launch and starts_in_vain([*events_of(self.root), *now], launch) > MOST_IN_VAIN:
            raise SuspectError(
                f"{self.root}: torchrun has started the ranks {MOST_IN_VAIN} times in a row from the same step, and "
                f"none of them came to a further checkpoint. This launch ends; remove the cause, which is in the log, "
                f"and start the run anew (restore(allow_suspect=True), --allow-suspect: go on trying)"
            )

    def begun_seconds(self) -> float:
        """Return when the run began, as its journal knows, in unix seconds; now, on ranks that are not the leader."""
        times = [each.get("time") for each in events_of(self.root)] if self.journal is not None else []
        return next((each for each in times if isinstance(each, int | float)), time.time())

    def committed(self) -> None:
        """Have what the tiers are to get of a durable save copied behind the training."""
        if self.drainer is not None:
            self.drainer.poke()

    def write_outcome(
        self, state: Literal["running", "finished", "stopped", "failed"], step: int, reason: str, exit_code: int
    ) -> None:
        """Say on disk how the attempt stands, because launchers swallow exit codes. Leader only. Raises: OSError."""
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
        if self.claim is not None:
            self.claim.check_mount()
        write_outcome(outcome_path(self.root), outcome)

    def end(
        self,
        state: Literal["finished", "stopped", "failed"],
        step: int,
        reason: str,
        exit_code: int,
        before_event: Callable[[], None] = lambda: None,
        **fields: object,
    ) -> None:
        """Write outcome and last event, which has the `fields` too, and between them call `before_event`: what the
        journal is still to be told. Trouble on the way is a warning, and does not hide why the attempt ended."""
        self.ended = state
        if state == "failed" and self._failed_already():
            self._is_told = True
            before_event()
            return
        if self.claim is not None:
            try:
                self.write_outcome(state, step, reason, exit_code)
            except OSError as error:
                warn(f"the outcome could not be written: {error}")
        try:
            before_event()
        finally:  # Ctrl-C
            self.note(state, sync=True, step=step, reason=reason, **fields)

    def _failed_already(self) -> bool:
        """Return whether a watchdog has said why this attempt fails: what breaks when its rank leaves comes of that."""
        if self.claim is None and self.journal is None:  # this rank says nothing in any case
            return False
        try:
            found = read_outcome(outcome_path(self.root))
        except (CorruptError, OSError):
            return False
        return found is not None and (found.state, found.attempt) == ("failed", self.number)

    def blame(self, error: BaseException) -> None:
        """Report this node to the chain where an error says that a device of it is broken. torchrun ends there."""
        if is_broken_device(error):
            end_launcher_at_exit(os.environ)
            with contextlib.suppress(OSError):
                report_node(this_node(os.environ), masked(str(error)), os.environ)

    def fail(
        self, step: int, error: BaseException, before_event: Callable[[], None], *, stall_seconds: float = 0.0
    ) -> None:
        """End with an error; `before_event` as in `end`."""
        name = type(error).__name__
        fields = {"error": name, "cause": cause_of(error), "stall_seconds": stall_seconds}
        try:
            text = f"{name}: {error}"
        except Exception:  # noqa: BLE001 a user's class of errors may have no text
            text = name
        self.end("failed", step, text, getattr(error, "exit_code", 1), before_event, **fields)

    def save_info(
        self,
        step: int,
        reason: str,
        snapshot: Snapshot,
        restored_from: int | None,
        metrics: Mapping[str, float],
        metadata: Mapping[str, Any],
        asked: Mapping[str, str],
    ) -> SaveInfo:
        """Return what the manifest of a save of this attempt says about it."""
        return SaveInfo(
            step=step,
            reason=reason,
            mesh=mesh_of(snapshot.tensors),
            run_id=self.run_id,
            job_id=self.job_id,
            attempt=self.number,
            restored_from=restored_from,
            metrics=metrics,
            metadata=metadata,
            asked=asked,
        )

    def release(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Close the journal and give the root free; before that, where the run is finished, fill the tiers, but not
        after an error in what is closed before."""
        with contextlib.ExitStack() as rest:
            if self.claim is not None:
                rest.callback(self.claim.release)
            if self.journal is not None:
                rest.callback(self.journal.close)
            if self.drainer is not None:
                try:
                    self.drainer.close(finish=self.ended == "finished" and error is None)
                except BaseException:  # Ctrl-C
                    self.drainer.close(finish=False)
                    raise


def _begin(store: RunStore, run_id: str | None, world_size: int, total_steps: int | None) -> RunSession:
    _check_privacy()
    store.make()
    device = device_of(store.root)
    if store.tiers:
        store.run_ids = _run_ids(store.root, run_id)
    entries = store.list(abandoned=True, until=any_will_do)
    if not entries:
        refuse_other_checkpoints(store.root)
    manifests = [entry.manifest for entry in entries if entry.manifest is not None]
    given = run_id is not None
    run_id = run_id or (manifests[-1].run_id if manifests else _last_run_id(store.root)) or uuid.uuid4().hex[:12]
    if not given:
        _warn_of_copy(store.root, run_id)
    job_id = os.environ.get("SLURM_JOB_ID")
    held = _claim(store.root, run_id, job_id, device)
    try:
        # What killed saves left may be what fills the disk, so it goes before the first save and not after it.
        _clear_leftovers(store.root, held.next_tag())
        # Looked at again: until the claim was ours, another run may have saved.
        finds = bool(entries or store.list(abandoned=True, until=any_will_do))
        events = events_of(store.root)
        saves = typical_save_seconds(events)
        highest = highest_attempt(store.root, [each.attempt for each in entries])
        number = max(highest + 1, attempt_number(os.environ))
        session = RunSession(store.root, number, run_id, job_id, finds, saves, held)
        session.journal = Journal(journal_path(store.root), tell=tell_event)
        session.journal.rotate()
        claim_tiers(store.root, store.tiers, run_id, store.run_ids)
        if store.tiers:
            write_tiers(store.root, store.tiers)
            session.drainer = Drainer(store.root.absolute(), session.journal)
        facts = {"host": held.owner.host, "pid": held.owner.pid, "job_id": job_id, "world_size": world_size}
        told = {"launch": launch_of(os.environ), "chain": os.environ.get(CHAIN_ENV), "total_steps": total_steps}
        facts |= {name: value for name, value in told.items() if value}
        # The process of a notebook may be days old.
        facts["process_seconds"] = time.time() if "ipykernel" in sys.modules else process_started()
        session.facts = {"run_id": run_id, **facts}
        session.begin()
        session.requests = Requests(held, session.journal)
    except BaseException:
        held.release()
        raise
    return session


def refuse_other_checkpoints(root: Path, *, below: bool = False) -> None:
    """Refuse to start in a root without checkpoints of a run over or beside what lies there under other names.

    `below`: look at what is in it too. Raises: ConfigError where the root, or something in it, is a checkpoint.
    """
    folders = [root]
    if below:
        with os.scandir(root) as items:
            there = [item.name for item in items if not item.is_file(follow_symlinks=False)]
        folders += [root / name for name in sorted(there) if name != DOT and parse_step(name) is None]
    marks = (each / name for each in folders for name in (MANIFEST, METADATA))
    found = next((mark for mark in marks if os.path.lexists(mark)), None)
    if found is not None:
        where = "it is" if found.parent == root else f"{found.parent} is"
        raise ConfigError(
            f"{root} holds no checkpoints of a run, but {where} a checkpoint itself (there is a {found.name}): nothing "
            f"is started at 0 there. Name another root, or start from a checkpoint: restore(path={str(found.parent)!r})"
        )
    names = os.listdir(root) if below else []  # noqa: PTH208 names alone are wanted
    if others := [each for each in foreign_in(root, names) if each.is_of_a_run]:
        raise ConfigError(
            f"{root} holds no checkpoints of ckptman, but {others[-1].path} is one of {others[-1].writer}: nothing is "
            f"started at 0 there. Name another root, or resume by {others[-1].writer}"
        )


def _warn_of_copy(root: Path, run_id: str) -> None:
    """Warn of a root that was copied: trackers take it for the run that it is a copy of."""
    with contextlib.suppress(CkptmanError, OSError):
        told, path = own_outcome(root), outcome_path(root)
        if told is not None and (before := outcome_path(Path(told.root))).exists() and not before.samefile(path):
            warn_only(
                f"{root} is a copy of {plain(told.root)}, and goes on as the same run ({run_id}), also for W&B and "
                f"MLflow. To make it another one, name it: Checkpointer(run_id=...)"
            )


def _check_privacy() -> None:
    try:
        folder_mode()
    except OSError as error:
        raise ConfigError(error.strerror or str(error)) from None


def _claim(root: Path, run_id: str, job_id: str | None, device: int) -> Claim:
    """`device`: that of the root when it was listed."""
    try:
        return claim(root, run_id, job_id, device=device)
    except RootError as error:
        if error.errno not in FULL:
            raise
        _clear_leftovers(root, f"full-{os.urandom(4).hex()}")
        return claim(root, run_id, job_id, device=device)


def _clear_leftovers(root: Path, tag: str) -> None:
    try:
        execute(root, PrunePlan([], {}, find_leftovers(root), []), tag)
    except OSError as error:
        warn(f"leftovers in {root} could not be removed: {error}")


def _run_ids(root: Path, run_id: str | None) -> frozenset[str]:
    """Return the ids that the run has, and had in earlier attempts."""
    with contextlib.suppress(OSError):
        past = {str(event["run_id"]) for event in events_of(root) if event.get("run_id")}
        return frozenset({*past, *([run_id] if run_id else [])})
    return frozenset([run_id] if run_id else [])


def _last_run_id(root: Path) -> str:
    """Return the id of the last attempt that saved nothing to disk; "" where there was none."""
    with contextlib.suppress(OSError):
        named = [str(event["run_id"]) for event in events_of(root) if event.get("run_id")]
        return named[-1] if named else ""
    return ""


def metric_numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics that are numbers; of others a warning is all that comes, because a label must not cost a save.

    Raises: ConfigError (no mapping).
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics are numbers by name, such as {{'loss': 0.5}}, not a {type(metrics).__name__}")
    numbers = {}
    for name, value in (metrics or {}).items():
        try:
            numbers[str(name)] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except Exception as error:  # noqa: BLE001 a user's own class may raise anything
            warn_only(f"the metric {name!r} is not a number and is left out: {error}")
    return numbers
