"""The Checkpointer: what a training loop talks to."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from ckptman._tracebacks import short_traceback
from ckptman.data.persistent_workers import warn_of_persistent_workers
from ckptman.data.resumable_loader import ResumableLoader
from ckptman.engine.comm.control_group import Channel, Contribution, await_ranks, failing_as_one
from ckptman.engine.comm.replicas import agree_on_frozen
from ckptman.engine.loading.allowed_mismatches import AllowedMismatches
from ckptman.engine.loading.other_weights import OtherWeights
from ckptman.engine.saving.memory_saves import MemorySaves
from ckptman.engine.saving.retention_runner import OnFull, RetentionRunner
from ckptman.engine.saving.save_checks import OnNonfinite
from ckptman.engine.saving.saver import Preflight, Saver
from ckptman.engine.saving.writer import SaveReport
from ckptman.engine.state.module_checks import GrownBuffers, refuse_one_way_modules
from ckptman.engine.state.modules import Trainable, UnwrappedState, module_of
from ckptman.engine.state.named_state import is_settled
from ckptman.engine.state.optimizers import asked_settings, replaced, texts_of
from ckptman.engine.state.snapshot import Snapshot, check_plain_values
from ckptman.engine.state.step_record import OptimizerHooks, Recorded, StepRecorder
from ckptman.engine.state.unsaved_values import SavedPlainValues, UnsavedValues, modules_of_user, optimizers_of_user
from ckptman.errors import (
    EXIT_AGAIN,
    EXIT_OK,
    CkptmanError,
    CommitError,
    ConfigError,
    SuspectError,
    warn,
    warn_only,
)
from ckptman.policies.retention_plan import RetentionPolicy
from ckptman.policies.save_policies import Decision, OnStop, SavePolicy
from ckptman.policies.tiers import MemoryTier, Tier
from ckptman.run import checkpoint_at
from ckptman.runtime.deadline import deadline_from_environment
from ckptman.runtime.log import show_by_default
from ckptman.runtime.notify import Notify
from ckptman.runtime.outcome import code_for_again, end_launcher_at_exit
from ckptman.runtime.signals import SignalHandler, free_signals
from ckptman.runtime.stopwatch import Stopwatch
from ckptman.runtime.tracker import Tracker
from ckptman.session.arguments import (
    check_arguments,
    check_metrics,
    check_trackers,
    metadata_of,
    policies_of,
    total_step_number,
)
from ckptman.session.open_root import OpenRoot, RunningCall, one_at_a_time, tell_left_open
from ckptman.session.restorer import Restorer
from ckptman.session.run_health import RunHealth, thresholds_of
from ckptman.session.run_health import Setting as HealthSetting
from ckptman.session.run_health import finish as finish_health
from ckptman.session.run_memory import RunMemory, age_on_disk, newest_on_disk
from ckptman.session.run_notes import RunNotes, check_notify
from ckptman.session.run_session import RunSession, failed_start_reported, metric_numbers
from ckptman.session.step_consensus import Agreed, StepConsensus, stop_text
from ckptman.session.step_reporter import BestMetrics, StepReporter
from ckptman.session.timings import Timings, process_started
from ckptman.session.watchdog_actions import RankWatchdog, Setting
from ckptman.storage.catalog.backends.run_store import RunStore
from ckptman.storage.format.paths import MAX_STEP, step_number

_REGULAR = (None, EXIT_OK, EXIT_AGAIN)
"""Codes of a SystemExit with which a loop leaves its block in order."""
_PIN_SECONDS = 0.01
"""For about how long a step pins memory, until all of it is: one tensor at least."""
_Decisions = tuple[Decision | None, Decision | None]


class _Step(NamedTuple):
    """A step that ended and is not saved, and what there was to see then."""

    step: int
    metrics: Mapping[str, Any] | None
    state: Recorded


def _copied(metric: Any) -> Any:
    """Return a metric that does not change when the loop uses its tensor again."""
    if isinstance(metric, torch.Tensor):
        return metric.detach().clone()
    try:
        return copy.copy(metric)
    except Exception:  # noqa: BLE001 what cannot be copied is no number, and a save says so
        return metric


def _saves_on_stop(policy: SavePolicy) -> bool:
    return any(isinstance(each, OnStop) for each in getattr(policy, "policies", (policy,)))


def _outlook(timings: Timings, policy: SavePolicy, memory: MemorySaves | None) -> dict[str, Any]:
    """Return what the journal is to know besides the steps: the next save, and what is in memory."""
    step = memory.saved_step if memory is not None else None
    return timings.outlook(policy) | ({} if step is None else {"memory_step": step})


class Checkpointer:
    """Save and restore a training run, and say when to stop.

        with ckptman.Checkpointer(
            "runs/italia-9b/checkpoints",
            {"model": model, "optimizer": optimizer, "data": loader, "rng": ckptman.RNGState()},
            save_policy=ckptman.InitTimeInterval(factor=4),
            retention=ckptman.KeepLast(3) | ckptman.KeepBest("loss", count=2),
        ) as checkpointer:
            start = checkpointer.restore()
            for step in range(start + 1, total_steps + 1):
                loss = train_step(next(batches))
                checkpointer.step(step, metrics={"loss": loss})
                if checkpointer.should_stop():
                    break
        sys.exit(checkpointer.exit_code)

    Args:
        root: Directory of the checkpoints of one run, created if it is missing.
        state: What to save, by name: modules, optimizers, LR schedulers, any object with `state_dict` and
            `load_state_dict`, nested dicts, tensors, plain values. `restore` fills tensors in place and replaces plain
            values in this mapping.
        save_policy: When to save (see `ckptman.policies`). An integer: every so many steps. None: `InitTimeInterval()`.
        retention: Which checkpoints to keep. An integer: the last so many. None: all.
        signals: "auto": handle the signals that ask a job to stop until the Checkpointer is closed (see
            `SignalHandler`), except those that other code handles, outside the main thread, and SIGINT in a notebook or
            a shell. True: handle all of them. False: none. Or a SignalHandler that was entered.
        deadline: When the job ends, in unix seconds. "auto" asks Slurm; None: never.
        async_save: Copy to host memory and write in the background. False: block until the save is durable. If the
            copy does not fit into host memory, saves block, and a warning says so.
        run_id: Name of the run in manifests and journal. None: that of the newest checkpoint in `root`, or a new one.

    Other Parameters:
        save_on_stop: Save and leave when a signal asks to stop, and before the deadline, whatever the policy says.
            False: only if the policy has `OnStop()` or `BeforeDeadline()`.
        on_full: What to do if the disk is full. "fail": the save fails. "prune": delete at once what `retention` would
            delete after the save, and save again.
        tiers: More storage locations to copy checkpoints to in the background, nearest first (see `policies.tiers`).
        memory: Also save to the memory of the nodes, more often (see `MemoryTier`). None: to disk alone. If that is
            impossible, a warning says why, and training continues with the disk alone.
        overlap: Let the copy to host memory run during the next forward and backward; only the next `optimizer.step`
            waits for it. Only for what the optimizers in `state` update, and only if nothing else writes to it. Has no
            effect if steps are captured into graphs.
        nonfinite: What to do about NaN and infinity in parameters and optimizer state. "keep": mark the checkpoint; the
            newest finite one is never deleted, and `restore` prefers it. "refuse": the save fails. "ignore": do not
            look, and restore the newest.
        keep_warm: After each save, read the checkpoint back into the page cache of this node, so that a restart on this
            node loads it from memory. Only on file systems of the node itself. True: if memory is free, else a warning
            says why not. None: if that takes at most a quarter of the free memory. False: never.
        trackers: Receive each step and each event, on rank 0 (see `Tracker`).
        notify: A shell command, or a function that takes a dict. Called if the run stalls, crashes or ends, or if the
            disk is nearly full (see `docs/stopping.md`). None: the command of the chain, if it has one.
        timeout_seconds: How long a rank waits for the others, in seconds.
        watchdog: Seconds after which a step that does not end counts as stuck and the process is ended (see
            `policies.hang_timeout`). "auto": 600 with several ranks or in a chain (555 with NCCL, whose own timeout is
            600), otherwise none. None: no watchdog.
        health: Monitor GPUs and nodes; report anomalies and stragglers (see `HealthThresholds`). "auto": with default
            thresholds. None: off.
        total_steps: Last step of the run, for `ckptman status` to estimate when it ends. None: unknown.
        metadata: Plain values to note in each checkpoint, such as the configuration and the commit of the code; at most
            64 KiB of JSON. `ckptman show` and `Run` show them.

    Raises:
        BusyError: another run writes to the root.
        RootError: the root cannot be made or read.
        ConfigError: an argument is invalid, or a rank did not create a Checkpointer.

    Use it in a `with` block, or call `close` at the end. What happens (restores, saves, stops) is told on rank 0 by the
    logger "ckptman", which writes to standard error where nobody has configured logging.

    Every rank makes one and calls the same methods in the same order. A failed save, also one in the background, is
    raised by the next call of `step`, `save`, `wait` or the end of the `with` block, on every rank, as CommitError;
    after it the run can save again.
    """

    @short_traceback
    def __init__(
        self,
        root: str | os.PathLike[str],
        state: MutableMapping[str, Any],
        *,
        save_policy: SavePolicy | int | None = None,
        retention: RetentionPolicy | int | None = None,
        signals: SignalHandler | bool | Literal["auto"] | None = "auto",
        deadline: float | Literal["auto"] | None = "auto",
        async_save: bool = True,
        run_id: str | None = None,
        save_on_stop: bool = True,
        on_full: OnFull = "fail",
        tiers: Sequence[Tier] = (),
        memory: MemoryTier | None = None,
        overlap: bool = False,
        nonfinite: OnNonfinite = "keep",
        keep_warm: bool | None = None,
        trackers: Sequence[Tracker] = (),
        notify: Notify | None = None,
        timeout_seconds: float = 1800.0,
        watchdog: Setting = "auto",
        health: HealthSetting = "auto",
        total_steps: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self._policy, keeps = policies_of(save_policy, save_on_stop, retention)
        check_arguments(root, state, keeps, on_full, nonfinite, deadline, timeout_seconds, watchdog, signals)
        check_trackers(trackers)
        check_notify(notify)
        self._metadata = metadata_of(metadata)
        thresholds = thresholds_of(health)
        show_by_default()
        await_ranks(timeout_seconds)
        self.root, self.state = Path(root), state
        self._state = UnwrappedState(state)
        self._noting = [each for each in self._state.values() if isinstance(each, Trainable | ResumableLoader)]
        """The entries that note each step."""
        self._control = Channel(timeout_seconds)
        with failing_as_one():
            self._control.agree("Checkpointer()", lambda: check_plain_values(self._state))
        self._control.neighbours  # noqa: B018 while all are here
        OpenRoot.take_over(self.root.absolute())
        root = self.root.absolute()  # the process may go to another folder
        starting = failed_start_reported(self.root, self._control.is_leader)
        with starting, contextlib.ExitStack() as undone:  # a notebook's next cell finds the root free, whatever happens
            self._watchdog = RankWatchdog(watchdog, self._control, root)
            undone.callback(self._watchdog.close)
            self._listening = undone.enter_context(contextlib.ExitStack())
            hearing = undone.enter_context(contextlib.ExitStack())  # what hears of events until the journal is closed
            self._store = RunStore(root, tiers)
            self._session = RunSession.open(self._control, self._store, run_id, total_step_number(total_steps))
            undone.push(self._session.release)
            undone.callback(self._watchdog.close)  # before tiers are filled, which may take long
            self._signals = self._listen(signals)
            with failing_as_one():
                end = self._control.run_on_leader(
                    lambda: deadline_from_environment(os.environ) if deadline == "auto" else deadline
                )
            self._notes = RunNotes(notify, self._session, os.environ)
            hearing.callback(self._notes.close)
            self._watchdog.opened(self._control, self._session, self._notes)
            self._timeout_seconds, self._nonfinite = timeout_seconds, nonfinite
            self._working = undone.enter_context(contextlib.ExitStack())
            """What works behind the training."""
            self._hooks = OptimizerHooks(self._state)
            self._working.callback(self._hooks.close)
            self._saver = Saver(
                self._store,
                Channel(timeout_seconds),
                self._session.journal,
                self._session.claim,
                RetentionRunner(self._store, keeps, on_full, self._session.claim, self._session.journal),
                self._watchdog,
                self._hooks,
                background=async_save,
                overlap=overlap,
                nonfinite=nonfinite,
                keep_warm=keep_warm,
            )
            self._working.callback(self._saver.close)
            self._memory = None
            if memory is not None:
                channel = partial(Channel, timeout_seconds)
                self._memory = RunMemory.open(memory, self._control, self._session, self._saver, nonfinite, channel)
            if self._memory is not None:
                undone.callback(self._memory.close)
                self._working.callback(self._memory.saves.close)
            self._timings = Timings(process_started(), end, durable_seconds=self._session.save_seconds)
            self._hooks.before_step = self._timings.stall.around(self._saver.wait_staged)
            self._reporter: StepReporter | None = None
            if self._control.is_leader:
                memory_saves = self._memory.saves if self._memory is not None else None
                outlook = partial(_outlook, self._timings, self._policy, memory_saves)
                self._reporter = StepReporter(
                    self._session, self._control.world_size, trackers, self._timings.stall, outlook
                )
                hearing.callback(self._reporter.close)
            self._recorder = StepRecorder(self._state, self._hooks)
            self._consensus = StepConsensus(
                self._control,
                self._policy,
                self._timings,
                self._signals,
                self._saver,
                self._recorder,
                self._session.requests,
            )
            self._consensus.memory = self._memory.saves if self._memory is not None else None
            self._health = None
            if thresholds is not None:
                values = self._state.values()
                self._health = RunHealth(
                    thresholds, self._control, self._session, self._watchdog, self._timings, values
                )
                self._saver.report_health(self._health)
                self._working.callback(self._health.close)
            self._held = self._working.enter_context(contextlib.ExitStack())
            """Keeps the checkpoint that the run went on from, as long as the run lasts."""
            self._restored_from: int | None = None
            in_memory = self._memory is not None and self._memory.restore.finds_any()
            self._ready = not (self._session.finds_checkpoints or in_memory)
            self._rehearsed = self._has_warned_of_nan = False
            modules = (module for each in self._state.values() if (module := module_of(each)) is not None)
            self._best_metrics = BestMetrics(keeps)
            self._grown_buffers = GrownBuffers(self._state)
            self._asked = texts_of(asked_settings(self._state))
            """What the script asked of optimizers and schedules when the run began."""
            self._unsaved_values = UnsavedValues(
                lambda: modules_of_user(modules) | optimizers_of_user(self._state.values())
            )
            self._shot: Snapshot | None = None
            """What was saved last, until the step ends."""
            self._last: _Step | None = None
            self._stepped = False
            self._pid = os.getpid()
            self._stop: str | None = None
            self._told_stop = self._went_on = False
            """Whether the loop has asked since then, and whether it has gone on: to its own end, if it never asked."""
            self._total_steps = total_step_number(total_steps)
            self._closed = False
            self._running = RunningCall()
            for each in self._noting:
                if isinstance(each, ResumableLoader):
                    each.note_step(has_ended=False)
            with failing_as_one():
                unsettled = self._control.agree(
                    "Checkpointer()", lambda: Contribution(maxima=(not (self._ready and is_settled(self._state)),))
                )
            if not any(unsettled.maxima):
                self._rehearse_early("Checkpointer()")
            who = f" on rank {self._control.rank}" if self._control.distributed else ""
            self._opened = OpenRoot(self.root.absolute(), self._fail)
            where = f"{self.root}{who}"
            self._left_open = weakref.finalize(self, tell_left_open, where, self._opened, self._listening)
            if self._signals is not None and self._control.is_leader:
                what = "saving" if _saves_on_stop(self._policy) else "stopping"
                text = f"{what} after this step or the next, then exit code {EXIT_AGAIN}"
                self._listening.enter_context(self._signals.announcing(text))
            if end is not None:
                self._session.tell_deadline(end)
            self._opened.held = undone.pop_all()

    def __repr__(self) -> str:
        step = f"step {self._last_step}" if self._stepped or self._ready else "not restored"
        return f"Checkpointer({str(self.root)!r}, {step}{', closed' if self._closed else ''}, {self._policy!r})"

    @property
    def _last_step(self) -> int:
        """The last step that ended or was saved; before the first, the one training starts from."""
        return max(self._timings.previous_step, self._last.step if self._last is not None else 0)

    def _listen(self, signals: SignalHandler | bool | str | None) -> SignalHandler | None:
        """Return what notes signals from now on."""
        if isinstance(signals, SignalHandler) or not signals:
            return signals or None
        if signals is True:
            return self._listening.enter_context(SignalHandler())
        free, others = free_signals()
        for line in others:
            self._session.tell(f"{line}: it is left to that, and saves nothing here")
        return self._listening.enter_context(SignalHandler(free)) if free else None

    # ---- what a loop calls -------------------------------------------------------------------------------------

    @short_traceback
    @one_at_a_time
    def restore(
        self,
        step: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        only: str | Sequence[str] | None = None,
        rename: Sequence[tuple[str, str]] = (),
        allow_suspect: bool = False,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
    ) -> int:
        """Load the newest good checkpoint into `state`, on any number of ranks, and return its step; 0 on a fresh run.

        Damaged and incomplete checkpoints are skipped with a warning, and so are those that hold NaN or infinity (see
        `nonfinite`) while there is a finite one; there is no way from damaged checkpoints to a fresh start. Every rank
        calls it, once, before the first step.

        Args:
            step: load the checkpoint of this step; None: the newest good one.
            path: the checkpoint that a *new* run starts from, also one of plain `dcp.save`; or the root of another
                run, for its newest. The run starts at the step of that checkpoint, or at 0 if it has none. Ignored
                once the run has checkpoints of its own, so that each attempt of a chain can be given the same `path`.
            only: with `path`: the entry of the state to load, such as "model", or several. The others stay as they
                are, and the run starts at step 0.
            rename: with `path`: pairs of a regular expression and its replacement, applied in order to the names in
                the checkpoint, such as `[(r"^model\\.encoder\\.", "model.backbone.")]`.
            allow_suspect: load also a checkpoint after which the run crashed twice at the same step. Otherwise it is
                skipped, unless `step` names it.
            missing: patterns of what the state has and the checkpoint may lack, such as `["schedule", "model.head.*"]`.
                A pattern names an entry of the state and all that is under it. What is missing stays as it is.
            unexpected: patterns of what the checkpoint has and the state does not; it is left there.
                Each attempt of a chain may give both lists alike: what is in state and checkpoint is restored.

        Returns:
            The step to go on from; training goes on with the next one.

        Raises:
            NotFoundError: there is no such step or path.
            CorruptError: nothing good is left (SuspectError: nothing that did not crash the run twice; or torchrun has
                restarted the ranks at this step again and again).
            FormatVersionError: a newer ckptman wrote it.
            MismatchError: names or shapes differ that are not accepted, found before a byte is copied.
            RootError: the root cannot be read.
            ConfigError: a folder in the root is a checkpoint, but not one of a run; a pattern of `missing` names
                nothing; or ranks differ in the arguments.
            SystemExit: with `exit_code`, a signal asked to stop meanwhile: there is nothing to save yet.
        """
        watch = Stopwatch()
        self._check_usable()
        self._watchdog.beat("restore", 0)
        accepted, others = self._agree_on_restore(
            (str(step), str(path), str(allow_suspect)),
            partial(AllowedMismatches.of, missing, unexpected),
            partial(OtherWeights.of, only, rename, self._state),
        )
        if path is None and others != OtherWeights():
            raise ConfigError(
                "restore(only=, rename=) is for the checkpoint of another run: name that, with path=. Of a checkpoint "
                "of this run, restore() accepts what differs with missing= and unexpected="
            )
        try:
            if self._saver.has_saved:  # it may still be in progress, and be the one to load
                self._wait()
        except CommitError as error:
            warn(str(error))
        if self._memory is not None:
            self._memory.saves.wait()
        prefer_finite = self._nonfinite != "ignore"
        beat = partial(self._watchdog.beat, "restore", 0)
        beat()
        memory = self._memory.restore if self._memory is not None else None
        watch.ends("agree")
        restorer = Restorer(self._control, self._store, self._session, beat, accepted, prefer_finite, watch, memory)
        asked = asked_settings(self._state)
        self._grown_buffers = GrownBuffers(self._state)  # what is made until now, a new process makes too
        with failing_as_one():
            if path is None or self._session.finds_checkpoints or restorer.finds_in_memory():
                found = restorer.best(self._state, step, allow_suspect=allow_suspect)
            else:
                found = restorer.at(self._state, self._control.run_on_leader(partial(checkpoint_at, path)), others)
        if found is None:
            accepted.check_keys(self._control, self._state)
            agree_on_frozen(self._control, self._state)
            self._session.tell(f"fresh start: {self.root} holds no checkpoint yet")
        elif changes := replaced(asked, asked_settings(self._state), restorer.asked):
            self._session.tell(f"{changes}, as saved: to use what the script asks for, set it after restore()")
        self._asked = texts_of(asked) | {**restorer.asked}
        self._hooks.called_since()  # what a restore makes an optimizer do is no step of the training
        self._restored_from, self._ready = found, True
        self._last, self._stepped, self._rehearsed = None, False, False
        self._held.close()
        self._held.enter_context(restorer.held)
        self._saver.retention.damaged = restorer.damaged
        on_disk = age_on_disk(self._session, restorer.on_disk) if restorer.from_memory else None
        self._timings.start(found or 0, found is not None, on_disk)
        if found and on_disk is not None and on_disk[0] != found:
            self._last = self._record(found, None)  # not on disk yet: the end of the run saves it

        def look() -> Contribution:
            if self._control.is_leader and not allow_suspect:
                self._session.stop_crash_loop(found)
            return Contribution(maxima=(not is_settled(self._state), self._consensus.stop_flag()))

        with failing_as_one():
            is_unsettled, stop = self._control.agree("restore()", look).maxima
        if not is_unsettled:
            self._rehearse_early("restore()")
        watch.ends("prepare")
        if restorer.restored:
            self._session.note("restored", **restorer.restored, seconds=watch.seconds, parts=watch.parts)
        if self._reporter is not None:
            self._reporter.starts(found or 0)
        self._leave_if(stop_text(stop))
        self._watchdog.beat("start", 0)
        return found or 0

    @short_traceback
    @one_at_a_time
    def step(self, step: int, metrics: Mapping[str, Any] | None = None) -> str | None:
        """End optimizer step `step`, and save if it is time.

        Every rank calls it after every step. On a step without a save this costs one small exchange between the ranks
        that is not waited for: what a rank wants (a signal came, a save failed, the leader's policy is due) is known to
        all at the end of the next step.

        Args:
            step: number of the step that has ended, counted from 1; a loop that counts from 0 calls `step(i + 1)`.
            metrics: numbers by name for the manifest and `KeepBest`; the leader's count. A loss may stay on its device:
                it is read in a save, and in the background, without waiting for the device.

        Returns:
            Why it saved, or None.

        Raises:
            CommitError: this save or the one before failed.
            ConfigError: the state cannot be saved, the policy raised, ranks are at different steps, or `step` is not
                above the last one.
        """
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            step = step_number(step)
        if self._closed or os.getpid() != self._pid:
            self._check_usable()
        if step <= self._timings.previous_step:
            self._refuse_step(step)
        check_metrics(metrics)
        if self._stop is not None:
            self._go_on_after_stop()
        if not self._rehearsed:
            self._rehearse()
            warn_of_persistent_workers(self._state.values())
        for each in self._noting:
            each.note_step()
        if self._health is not None:
            self._health.step_ended()
        if (news := self._timings.step_ended()) is not None:
            self._session.note(news[0], step=step, **news[1])
        if reports := self._saver.poll():
            self._account_for(reports, None)
        if self._memory is not None:
            self._memory.account(self._timings.memory_saves)
        agreed = self._consensus.at(step)
        stride = max(1, step - self._timings.previous_step)
        reason = None
        try:
            if agreed is not None:
                reason = self._act(step, metrics, agreed)
            if reason is None:
                with self._timings.stall:
                    self._saver.pin_some(_PIN_SECONDS)
        finally:
            self._last, self._stepped = self._record(step, metrics), True
            if self._reporter is not None:
                self._reporter.step_ended(step, self._last.metrics, is_saved=reason is not None)
            self._timings.step_begins(after=step)
            self._watchdog.beat("step", step)
        if self._stop is None:
            self._consensus.ahead(step + stride)
        if self._control.is_leader:
            saved = SavedPlainValues(self._state, self._shot) if self._shot is not None else None
            self._unsaved_values.end_step(is_saved=reason is not None, saved=saved)
            self._best_metrics.note(step, metrics, is_saved=reason is not None)
        self._shot = None
        return reason

    @short_traceback
    @one_at_a_time
    def save(self, step: int, metrics: Mapping[str, Any] | None = None, *, reason: str = "asked for") -> None:
        """Save now, whatever the policy says. Every rank calls it.

        Args:
            step: number of the step that the state is of.
            metrics: as in `step`.
            reason: what the manifest says about why it was saved.

        Raises:
            CommitError: this save or the one before failed.
            ConfigError: the state cannot be saved.
        """
        self._check_usable()
        step = step_number(step)
        if step < self._timings.previous_step:
            self._refuse_step(step)
        for each in self._noting:
            each.note_step()
        self._save("save()", step, metrics, lambda: (Decision(reason), None))
        self._last, self._stepped = self._record(step, metrics), True
        if self._control.is_leader:
            self._best_metrics.note(step, metrics, is_saved=True)
        self.beat()

    @short_traceback
    @one_at_a_time
    def wait(self) -> None:
        """Wait until the save in the background is durable. Every rank calls it.

        Raises:
            CommitError: it failed.
        """
        self._check_usable()
        self._wait()

    def _wait(self) -> None:
        self._watchdog.beat("save", self._timings.previous_step)
        with self._timings.stall:
            reports, failure = self._saver.wait()
        # A save that failed on one rank fails on all. A rank that was lost at the last moment may have been lost for
        # some only: they go on together all the same.
        mine = Contribution(maxima=(failure is not None, self._saver.reported, self._saver.channel.lost))
        any_failed, self._saver.reported, lost = self._control.agree("wait()", lambda: mine).maxima
        self._saver.channel.lost = bool(lost)
        if failure is None and any_failed:
            step = self._timings.saves.saved_step or 0
            failure = CommitError(step, -1, "another rank reports that its part of it failed")
        self.beat()
        self._account_for(reports, failure)

    def beat(self) -> None:
        """Show the watchdog a sign of life, in an evaluation or whatever else takes long. A rank may call it alone."""
        self._watchdog.beat("step" if self._stepped else "start", self._timings.previous_step)

    def own_work(self) -> contextlib.AbstractContextManager[None]:
        """Return a block around what this rank does in a step without waiting for the others.

            with checkpointer.own_work():
                loss = model(next(batches))

        Of a rank whose own work takes longer than that of the others, they all wait in the next collective, and no time
        of a whole step shows whom for. The block may be entered several times in a step. On a GPU the time of its
        kernels counts, and nothing is waited for. What a ResumableLoader in `state` takes is known without it.
        """
        return self._health.own_work() if self._health is not None else contextlib.nullcontext()

    def should_stop(self) -> bool:
        """Return whether `step` agreed to stop, alike on every rank; the state is durable then, unless `save_on_stop`
        is False."""
        self._told_stop |= self._stop is not None
        return self._stop is not None

    @property
    def exit_code(self) -> int:
        """The code to exit with: 0, the run is finished; 75, it saved and wants to be started again.

        Always 0 under a torchrun that restarts ranks, which would take 75 for a crash: the outcome on disk says which.
        """
        return EXIT_OK if self._stop is None else code_for_again(os.environ)

    @property
    def saving(self) -> bool:
        """Whether a save is being written in the background. Ranks may differ in it."""
        return self._saver.is_writing

    @property
    def run_id(self) -> str:
        """The name of the run, as in its manifests and its journal; the same in all its attempts."""
        return self._session.run_id

    @property
    def attempt(self) -> int:
        """Which attempt of the run this is, counted from 1, as in its manifests and its journal."""
        return self._session.number

    @property
    def restored_from(self) -> int | None:
        """The step of the checkpoint that `restore` loaded; None where there was none, or before it is called."""
        return self._restored_from

    @property
    def last_saved(self) -> int | None:
        """The step of the last save of this attempt that is known to be durable; None before there is one.

        What is still being saved in the background does not count, and a rank may learn a step later than another
        that a save is durable: after `wait` all ranks have the same.
        """
        return self._timings.saves.durable_step

    # ---- the block ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Checkpointer:
        self._check_usable()
        self._opened.in_block = True
        return self

    @short_traceback
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed or os.getpid() != self._pid:  # what ends a run is for the process that began it
            return
        code = error.code if isinstance(error, SystemExit) else None
        if error is None or isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and code in _REGULAR):
            try:
                self._end("sys.exit(75)" if code == EXIT_AGAIN else None)
            except BaseException as late:
                self._fail(late)
                raise
        else:
            self._fail(error)

    @short_traceback
    @one_at_a_time
    def close(self) -> None:
        """End the run's block: save the last step if it is not saved, wait until it is durable, write the outcome.

        The end of the `with` block calls it. Every rank calls it; in a forked child it does nothing. What the loop has
        changed after its last `step` is not saved.

        Raises:
            CommitError: the save of the last step, or one before, failed.
        """
        if not self._closed and os.getpid() == self._pid:
            self._end(None)

    def _end(self, again: str | None) -> None:
        """End in order. `again`: why the run is to be started again although nobody asked it to stop; None: it is
        finished."""
        stop = self._stop
        if stop is None:
            agreed = self._consensus.at(self._timings.previous_step)
            stop = agreed.stop if agreed is not None else None
            self._end_running_save()
        told = self._told_stop or (self._signals is not None and self._signals.told)
        ends = self._control.agree("close()", partial(Contribution, again, None, (told,)))
        again = next(filter(None, ends.unlike or [again]), None)
        is_told = any(ends.maxima)
        is_complete = self._total_steps is not None and self._last_step >= self._total_steps
        has_ended_by_itself = not is_told and (self._went_on or is_complete)
        reason = again if has_ended_by_itself else stop or again
        if self._stop is None or self._went_on or not self._stepped:
            self._save_the_end(reason)
        else:  # it is saved, if stops are
            self._stop = reason
        self._wait()
        with self._closing():
            self._write_the_end()
        self._control.close()
        self._saver.channel.close()

    def _write_the_end(self) -> None:
        """Write the outcome, and stop all that works behind the training; nobody leaves before all have."""
        self._watchdog.beat("save", self._timings.previous_step)
        state: Literal["finished", "stopped"] = "finished" if self._stop is None else "stopped"
        code = EXIT_OK if self._stop is None else EXIT_AGAIN
        step, reason = self._last_step, self._stop or "the run ended"

        def last_words() -> None:
            if self._reporter is not None:
                self._reporter.finish(wait=True)
            finish_health(self._health, self._control)

        self._session.end(state, step, reason, code, last_words, stall_seconds=self._timings.stall.seconds)
        self._held.close()
        self._saver.retention.end()
        self._working.close()
        # A launcher may kill the others when the first one exits.
        newest = self._control.run_on_leader(partial(newest_on_disk, self._store)) if self._memory else (0, 0)
        self._control.gather(None)
        if self._memory is not None:
            self._memory.clear_if_on_disk(newest)

    def _save_the_end(self, stop: str | None) -> None:
        """Save the last step if it is not saved, as `step` saw it, or not at all: its name would be a lie then."""
        self._stop, last = stop, self._last
        if last is None or last.step == self._timings.saves.saved_step:
            return
        if why := next(filter(None, self._control.gather(self._recorder.changed(last.state))), ""):
            if self._control.is_leader:
                saved = (
                    "nothing" if self._timings.saves.saved_step is None else f"step {self._timings.saves.saved_step}"
                )
                warn_only(
                    f"step {last.step}, the last one, is not saved at the end of the run: {why}. What is there is "
                    f"{saved}. To have the last step too, call save(step) after it, or leave the loop right after "
                    f"step()"
                )
            return
        with self._recorder.as_of(last.state) as state:
            self._save("close()", last.step, last.metrics, lambda: (Decision("the run ended"), None), state)

    def _record(self, step: int, metrics: Mapping[str, Any] | None) -> _Step:
        if self._consensus.recording_is_slow and not self._recorder.given_up:
            self._recorder.given_up = True
            if self._recorder.too_slow:
                warn(
                    f"it takes too long to note after each step what {self._recorder.too_slow!r} holds, so the end of "
                    f"the run does not save its last step by itself: call save(step) after it"
                )
        numbers = {name: _copied(each) for name, each in metrics.items()} if isinstance(metrics, Mapping) else metrics
        return _Step(step, numbers, self._recorder.record(self._timings.step_seconds))

    # ---- checking ----------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        """Refuse a Checkpointer that is closed, or of another process. Raises: ConfigError."""
        if os.getpid() != self._pid:
            raise ConfigError(
                f"this process ({os.getpid()}) is a fork of the one that made this Checkpointer ({self._pid}), and "
                f"cannot save or restore for it: do that in the process that made it"
            )
        if self._closed:
            raise ConfigError(
                f"this Checkpointer of {self.root} is closed, as its `with` block has ended: make a new one to go on"
            )

    def _refuse_step(self, step: int) -> NoReturn:
        last = self._timings.previous_step
        if self._stepped:
            known = f"step {last} has ended already"
        else:
            known = "steps are counted from 1" if last == 0 else f"step {last} was restored"
        raise ConfigError(
            f"step({step}): {known}, so continue with {last + 1}. A loop that counts from 0 runs over "
            f"range(restore(), ...) and calls step(i + 1)"
        )

    def _go_on_after_stop(self) -> None:
        """Warn once that the loop ignores a stop request."""
        if not self._went_on and not self._told_stop and self._control.is_leader:
            warn_only(
                f"the run was asked to stop ({self._stop}), but the loop goes on. Leave it after step(): "
                f"if checkpointer.should_stop(): break"
            )
        self._went_on = True

    def _agree_on_restore(
        self,
        arguments: tuple[str, str, str],
        accepted: Callable[[], AllowedMismatches],
        others: Callable[[], OtherWeights],
    ) -> tuple[AllowedMismatches, OtherWeights]:
        """Refuse a `restore` that is called with other arguments on another rank, and leave if any was asked to stop.

        Raises, on every rank alike: ConfigError, SystemExit.
        """
        self._consensus.drain()
        mine: list[Any] = []

        def look() -> Contribution:
            mine[:] = accepted(), others()
            return Contribution((arguments, *mine), maxima=(self._consensus.stop_flag(),))

        with failing_as_one():
            met = self._control.agree("restore()", look)
        calls, all_accepted, all_others = zip(*(met.unlike or [(arguments, *mine)]))
        for rank, each in enumerate(calls):
            if each != (first := calls[0]):
                raise ConfigError(
                    f"restore(step={first[0]}, path={first[1]}, allow_suspect={first[2]}) on rank 0, and "
                    f"restore(step={each[0]}, path={each[1]}, allow_suspect={each[2]}) on rank {rank}: every rank has "
                    f"to name the same checkpoint"
                )
        AllowedMismatches.refuse_unlike(all_accepted)
        if any(each != all_others[0] for each in all_others):
            raise ConfigError("restore(only=, rename=) differ between ranks: every rank has to give the same")
        self._leave_if(stop_text(met.maxima[0]))
        return all_accepted[0], all_others[0]

    # ---- deciding ----------------------------------------------------------------------------------------------

    def _act(self, step: int, metrics: Mapping[str, Any] | None, agreed: Agreed) -> str | None:
        if agreed.stop is not None:
            self._end_running_save()
        elif agreed.failed > self._saver.reported:
            self._raise_failure(step, agreed.failed)
        elif not (agreed.save or agreed.memory):
            return None
        decide = partial(self._consensus.decisions, step, agreed.stop)
        decision = None
        if agreed.stop is None or self._wants_to_save(decide):
            decision = self._save("step()", step, metrics, decide)
        if agreed.stop is not None or (decision is not None and decision.stop):
            why = agreed.stop or (decision.reason if decision is not None else "")
            self._session.note("stop_asked", step=step, reason=why)
            self._wait()
            self._stop, self._consensus.has_stopped = why, True
        return decision.reason if decision is not None else None

    def _wants_to_save(self, decide: Callable[[], _Decisions]) -> bool:
        """Ask the leader before the state is looked at: what cannot be saved must not keep a run from stopping."""
        with failing_as_one():
            return any(each is not None for each in self._control.run_on_leader(decide))

    def _raise_failure(self, step: int, number: int) -> NoReturn:
        """Wait until this rank knows too that save `number` failed, as some rank does, and raise on all of them."""
        self._wait()
        self._saver.reported = number
        self._timings.saves.failed()
        raise CommitError(step, -1, "another rank reports that its part of the save failed")

    def _end_running_save(self) -> None:
        """Wait for the running save; if it failed, say so and go on, because the last chance to save comes now."""
        try:
            self._wait()
        except CommitError as error:
            warn(f"{error} It is tried once more before the run ends.")

    def _leave_if(self, stop: str | None) -> None:
        if stop is not None:
            self._stop = stop
            self._session.note("stop_asked", step=self._timings.previous_step, reason=stop)
            raise SystemExit(code_for_again(os.environ))

    # ---- saving and restoring ----------------------------------------------------------------------------------

    def _save(
        self,
        verb: str,
        step: int,
        metrics: Mapping[str, Any] | None,
        decide: Callable[[], _Decisions],
        state: Mapping[str, Any] | None = None,
    ) -> Decision | None:
        """Save what the leader decides, stage by stage, and return its decision about the disk.

        Args:
            verb: What this rank was asked to do.
            decide: Called on the leader: what to save to disk and to memory, if anything.
            state: As the last step saw it, if that is not what it is now.
        """
        with self._timings.stall:
            return self._save_now(self._state if state is None else state, verb, step, metrics, decide)

    def _save_now(
        self,
        state: Mapping[str, Any],
        verb: str,
        step: int,
        metrics: Mapping[str, Any] | None,
        decide: Callable[[], _Decisions],
    ) -> Decision | None:
        watch = Stopwatch()
        self._watchdog.beat("stage", step)
        found = self._preflight(state, verb, lambda: (*decide(), metric_numbers(metrics)))
        watch.ends("agree")
        to_disk: Decision | None
        to_disk, to_memory, numbers = found.told
        if (decision := to_disk or to_memory) is None:
            return None
        lost = found.lost
        if to_disk is not None and to_disk.stop:
            self._end_running_save()
            watch.ends("wait")
            lost |= self._saver.channel.lost
        if found.failed > self._saver.reported:
            self._raise_failure(step, found.failed)
        if lost:
            self._wait()
            self._saver.channel = Channel(self._timeout_seconds)
        self._plan(found)
        watch.ends("plan")
        self._shot = found.snapshot
        info = self._session.save_info(
            step, decision.reason, found.snapshot, self._restored_from, numbers, self._metadata, self._asked
        )
        self._warn_of_nan(numbers)
        memory = self._memory.saves if to_memory is not None and self._memory is not None else None
        if to_disk is not None:
            self._timings.saves.begins(step)
        if memory is not None:
            self._timings.memory_saves.begins(step)
        try:
            report = self._saver.save(
                self._control, state, found.snapshot, info, watch, to_disk=to_disk is not None, memory=memory
            )
        except CommitError as error:
            self._account_for([], error)
        except ConfigError:
            self._timings.saves.failed()
            raise
        else:
            if self._memory is not None:
                self._memory.end_without(self._saver.stager)
            self._account_for([report] if report is not None else [], None)
        return to_disk

    def _warn_of_nan(self, metrics: Mapping[str, float]) -> None:
        """Warn once that a metric is NaN, at the line of the loop that gave it."""
        if self._nonfinite == "ignore" or self._has_warned_of_nan or not self._control.is_leader:
            return
        if names := [repr(name) for name, value in metrics.items() if math.isnan(value)]:
            self._has_warned_of_nan = True
            warn_only(
                f"the metric {', '.join(names)} is NaN: KeepBest passes over this checkpoint. A restore does not: it "
                f"looks at tensors alone. Leave a metric out until it has a value"
            )

    def _plan(self, found: Preflight) -> None:
        """Make a plan where that of the save before does not fit any more."""
        if not found.fits:
            if self._saver.has_saved:
                self._wait()
            if self._memory is not None:
                self._memory.saves.wait()
            self._grown_buffers.look(found.snapshot.tensors, warns=self._control.is_leader)
            self._saver.plan(self._control, found)
            if self._memory is not None:
                self._memory.plan(self._control, self._saver)

    def _account_for(self, reports: list[SaveReport], failure: CommitError | None) -> None:
        """Let the policies know how saves ended. Raises: the failure."""
        for report in reports:
            self._timings.saves.ended(report)
            self._session.committed()
        if failure is not None:
            self._timings.saves.failed()
            raise failure

    def _preflight(
        self, state: Mapping[str, Any], verb: str, of_leader: Callable[[], object] = lambda: None
    ) -> Preflight:
        """Look at what is to be saved. Raises on all ranks: ConfigError (it cannot be saved as it is)."""
        if not self._ready:
            raise ConfigError(
                f"{self.root} holds checkpoints and restore() was not called: a save would begin a second history over "
                f"them. Call restore() before the first step, or name another root"
            )
        self._recorder.refresh()
        return self._saver.preflight(self._control, state, verb, of_leader)

    def _rehearse(self) -> None:
        """Plan at the first step: what cannot be saved is known now, and the first save finds its plan and memory."""
        self._rehearsed = True
        found = self._preflight(self._state, "step()")
        with failing_as_one():
            self._control.agree("step()", lambda: refuse_one_way_modules(self._state, [*found.snapshot.paths]))
        self._plan(found)
        self._saver.compare(self._control, self._state, found.snapshot)  # and again when it is saved

    def _rehearse_early(self, verb: str) -> None:
        """The same before the first step, where the state holds all that it will: a loop may save before it steps."""
        with contextlib.suppress(CkptmanError):  # the first step says so, when the state may be another one
            self._plan(self._preflight(self._state, verb))

    # ---- closing -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Close all that `__init__` has opened, in the reverse order, when the block has written how the run ended."""
        self._closed = True
        try:
            yield
        except BaseException:  # Ctrl-C
            self._session.ended = "failed"
            raise
        finally:
            try:
                self._opened.close()
            finally:
                self._left_open.detach()

    def _fail(self, error: BaseException) -> None:
        """End with an error: do nothing that needs the other ranks, who may be gone."""
        if self._closed:
            return
        with self._closing():
            self._write_the_failure(error)

    def _write_the_failure(self, error: BaseException) -> None:
        self._session.blame(error)
        if isinstance(error, SuspectError):
            end_launcher_at_exit(os.environ)
        # A save that runs may be a second from durable, and is bounded by its own timeout.
        self._watchdog.beat("save", self._timings.previous_step)
        _, failed = self._saver.wait()
        if failed is not None:
            warn(str(failed))

        def last_words() -> None:
            if self._reporter is not None:
                self._reporter.finish(wait=False)
            if self._health is not None:
                self._health.close()

        self._session.fail(self._last_step, error, last_words, stall_seconds=self._timings.stall.seconds)
