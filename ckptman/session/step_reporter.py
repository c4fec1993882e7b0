"""Tells the journal, and the trackers, of the steps that end. Only the leader has one.

The loop notes what ended and goes on. Metrics that are on a device are on their way to the host from the next look on:
the loop begins that and asks for its end, at the end of steps, because another thread must not ask a device while a
graph is being captured. All else is the work of a thread.

The threads that work behind the training may be left behind: one for each tracker, and one for the journal.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ckptman.engine.state.accelerators import record
from ckptman.errors import warn_only
from ckptman.policies.retention_plan import KeepBest, RetentionPolicy
from ckptman.policies.retention_rules import rules_of
from ckptman.runtime.journal import Journal
from ckptman.runtime.log import tell
from ckptman.runtime.metrics_log import MetricsLog
from ckptman.runtime.tracker import TrackedRun, Tracker
from ckptman.session.run_session import RunSession
from ckptman.session.timings import TimeLost
from ckptman.storage.io.threads import Flag, Wakeup

PROGRESS_SECONDS = 30.0
"""Between two `progress` in the journal."""
LOOK_SECONDS = 1.0
"""Between two looks at what has ended."""
MOST_METRICS = 16
"""Of so many at most a `progress` tells, by names of at most `_MOST_NAME` characters: it is to stay a short line."""
_MOST_NAME = 64
_MANY_NUMBERS = 1000
"""When so many metrics wait they are handed on: to do that for more at once would be felt."""
_WRITE_SECONDS = 5.0
"""How long the end of the run waits for the last `progress`."""


class _Ended(NamedTuple):
    """A step that ended, number `position` of this attempt: when, and how long saves had blocked training by then."""

    position: int
    step: int
    seconds: float
    stall_seconds: float
    metrics: dict[str, Any]


class _Arriving(NamedTuple):
    """Steps whose metrics are on their way to the host; all are there when the events are reached."""

    steps: list[_Ended]
    events: list[Any]


class StepReporter:
    """Notes the steps of an attempt, and tells of them. Nothing of it raises, or holds up the training."""

    def __init__(
        self,
        session: RunSession,
        world_size: int,
        trackers: Sequence[Tracker],
        stall: TimeLost,
        outlook: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        assert session.journal is not None
        self._session, self._world_size, self._stall, self._outlook = session, world_size, stall, outlook
        self._trackers = TrackerThreads(trackers, session.journal)
        self._log = MetricsLog(session.root, session.number)
        self._thread = TrackerQueue("ckptman-progress")
        self._waiting: deque[_Ended] = deque(maxlen=MOST_WAITING)
        self._arriving: _Arriving | None = None
        self._count, self._numbers, self._due_seconds = 0, 0, 0.0
        self._is_started = False
        self._newest = self._told = _Ended(0, 0, time.monotonic(), 0.0, {})
        """The last steps that the thread, and the journal, know of."""

    def starts(self, step: int) -> None:
        """Begin to train after `step`."""
        run = TrackedRun(self._session.run_id, self._session.root, self._session.number, step, self._world_size)
        self._trackers.start(run)
        self._is_started = True
        if not self._count:
            self._told = self._told._replace(seconds=time.monotonic())

    def step_ended(self, step: int, metrics: object, *, is_saved: bool = False) -> None:
        """Note that a step has ended, with what a save would take for its metrics, which does not change any more.

        `is_saved`: a run may go on from it, so what trackers are to know of it is told now.
        """
        now = time.monotonic()
        if not self._count:
            self._begin()
        self._count += 1
        numbers = metrics if isinstance(metrics, dict) else {}
        self._waiting.append(_Ended(self._count, step, now, self._stall.seconds, numbers))
        self._numbers += len(numbers)
        if self._arriving is not None or is_saved or now >= self._due_seconds or self._numbers > _MANY_NUMBERS:
            self._look(now)
            if is_saved:
                self._thread.put(self._log.flush)

    def finish(self, *, wait: bool) -> None:
        """Tell of all that ended, and let the journal have it. `wait`: also for devices to have done what they were
        given, which one that has failed may never."""
        if not self._count:
            return
        for _ in range(2):  # what was on its way, and what has ended since
            self._look(time.monotonic(), last=True, wait=wait)
        self._thread.put(self._write)
        self._thread.end()
        self._thread.wait(_WRITE_SECONDS)

    def close(self) -> None:
        """Close the trackers, for at most `CLOSE_SECONDS`."""
        self._trackers.close()

    # ---- in the loop -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._is_started:  # a program that restores nothing
            self.starts(0)
        with contextlib.suppress(RuntimeError):  # no more threads: nothing is told
            self._thread.start()
            weakref.finalize(self, self._thread.end)

    def _look(self, now: float, *, last: bool = False, wait: bool = False) -> None:
        """Hand on what is on the host, or begin to bring it there. `last`: what is not there now is left out."""
        if self._arriving is None:
            steps, self._numbers = [self._waiting.popleft() for _ in range(len(self._waiting))], 0
            self._arriving = _begin_arriving(steps)
            self._due_seconds = now + min(LOOK_SECONDS, PROGRESS_SECONDS)
        is_there = _is_there(self._arriving.events, wait=wait)
        if is_there or last:
            steps = self._arriving.steps if is_there else [each._replace(metrics={}) for each in self._arriving.steps]
            self._thread.put(self._tell, steps, numbers=sum(1 + len(each.metrics) for each in steps))
            self._arriving = None

    # ---- in the thread -----------------------------------------------------------------------------------------

    def _tell(self, steps: list[_Ended]) -> None:
        for each in steps:
            numbers = _numbers(each.metrics)
            if numbers:
                self._trackers.log(each.step, numbers)
                self._log.add(each.step, numbers)
            self._newest = each._replace(metrics=numbers)
        if not self._told.position or self._newest.seconds - self._told.seconds >= PROGRESS_SECONDS:
            self._write()

    def _write(self) -> None:
        """Write a `progress` of all that ended since the last."""
        told, newest = self._told, self._newest
        if newest.position == told.position:
            return
        self._told = newest
        self._log.flush()
        short = {name: number for name, number in newest.metrics.items() if len(name) <= _MOST_NAME}
        with contextlib.suppress(Exception):  # a journal that cannot be written warns, and warnings may be errors
            self._session.note(
                "progress",
                step=newest.step,
                steps=newest.position - told.position,
                seconds=round(newest.seconds - told.seconds, 3),
                stall_seconds=round(newest.stall_seconds, 3),
                metrics=dict(list(short.items())[:MOST_METRICS]),
                **self._outlook(),
            )


def _begin_arriving(steps: list[_Ended]) -> _Arriving:
    """Begin to copy to the host what is on devices, without waiting for any. Called where steps are made, as copies
    come after what was asked of a device there."""
    steps = [each._replace(metrics=dict(each.metrics)) for each in steps]
    on_devices: dict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], str, torch.Tensor]]] = {}
    for each in steps:
        for name, metric in each.metrics.items():
            if isinstance(metric, torch.Tensor) and (type(metric) is not torch.Tensor or metric.device.type != "cpu"):
                one = each.metrics[name] = _one_number(metric)
                if one is not None and one.device.type != "cpu":
                    on_devices.setdefault((one.device, one.dtype), []).append((each.metrics, name, one))
    events = []
    for (device, _), found in on_devices.items():
        try:
            module = torch.get_device_module(device)
            can_wait = hasattr(module, "Stream")  # as MPS cannot
            together = torch.stack([one for _, _, one in found]).to("cpu", non_blocking=can_wait)
            if can_wait:
                events.append(record(module.current_stream(device)))
            on_host: Sequence[Any] = together.unbind()
        except Exception:  # noqa: BLE001 the training hears of a device that fails by what it does next
            on_host = [None] * len(found)
        for (metrics, name, _), number in zip(found, on_host):
            metrics[name] = number
    return _Arriving(steps, events)


def _one_number(metric: Any) -> torch.Tensor | None:
    """Return what a rank has of a metric by itself; None: that is no number."""
    try:
        if (placements := getattr(metric, "placements", None)) is not None:  # of a DTensor, which asks the other ranks
            metric = metric.to_local() if all(each.is_replicate() for each in placements) else ()
        return metric.detach().reshape(())  # type: ignore[no-any-return]
    except Exception:  # noqa: BLE001 more than one number; or a class of others
        return None


def _is_there(events: list[Any], *, wait: bool) -> bool:
    try:
        for event in events if wait else []:
            event.synchronize()
        return all(event.query() for event in events)
    except Exception:  # noqa: BLE001 as above
        return False


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers. Of others a save warns."""
    found = {}
    for name, metric in metrics.items():
        with contextlib.suppress(Exception):  # a user's own class may raise anything
            found[str(name)] = float(metric.detach() if isinstance(metric, torch.Tensor) else metric)
    return found


class BestMetrics:
    """Warns once of each metric that was given at a step that was not saved, and not at the next one that is."""

    def __init__(self, policy: RetentionPolicy | None) -> None:
        self._given: dict[str, int] = {rule.metric: 0 for rule in rules_of(policy) if isinstance(rule, KeepBest)}
        """The step at which each was given last, 0 for none; those that were saved once are no more among them."""

    def note(self, step: int, metrics: Mapping[str, Any] | None, *, is_saved: bool) -> None:
        """Note what a step was given. The leader calls it."""
        for name, given in list(self._given.items()):
            if metrics and name in metrics:
                self._given[name] = step
                if is_saved:
                    del self._given[name]
            elif is_saved and given:
                del self._given[name]
                warn_only(
                    f"KeepBest({name!r}) goes by what is given at a save: {name} was given at step {given}, which was "
                    f"not saved, and not at step {step}, which is. Call save(step, metrics) where it is measured"
                )


CLOSE_SECONDS = 10.0
"""How long the end of a run waits for all its trackers."""
MOST_WAITING = 10_000
"""How many steps wait for a tracker at most; the oldest are left out first."""
MOST_NUMBERS = 1_000_000
"""How many numbers these steps have at most, all together: about 100 MB."""

_FOR_THE_RUN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class _Call(NamedTuple):
    function: Callable[..., object]
    arguments: tuple[object, ...]
    numbers: int


class TrackerQueue:
    """A thread that makes one call after the other. The interpreter does not wait for it when it leaves."""

    def __init__(self, name: str) -> None:
        self._calls: deque[_Call] = deque()
        self._lock, self._wakeup, self._ended = threading.Lock(), Wakeup(), Flag()
        self._closed = False
        self._numbers = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.dropped = 0
        """How many calls were left out because too many were waiting."""

    def start(self) -> None:
        """Start the thread. Raises: RuntimeError where there can be no more threads."""
        self._thread.start()

    def put(self, function: Callable[..., object], *arguments: object, first: bool = False, numbers: int = 0) -> None:
        """Have a call made, which must not raise, after those before or ahead of them. Never waits.

        `numbers`: how many numbers it has, if it may be dropped: the oldest is where too many wait. None is taken once
        the thread was told to end.
        """
        with self._lock:
            while numbers and (len(self._calls) >= MOST_WAITING or self._numbers + numbers > MOST_NUMBERS):
                place = next((place for place, each in enumerate(self._calls) if each.numbers), None)
                if place is None:
                    break
                self._numbers -= self._calls[place].numbers
                del self._calls[place]
                self.dropped += 1
            if not self._closed:
                self._numbers += numbers
                (self._calls.appendleft if first else self._calls.append)(_Call(function, arguments, numbers))
        self._wakeup.notify()

    def end(self) -> None:
        """End the thread after the calls so far."""
        self._closed = True
        self._wakeup.notify()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for its end, for at most so long. Return whether it has ended."""
        return not self._thread.ident or self._ended.wait(timeout_seconds)

    def leave(self) -> None:
        """Make none of the calls that wait: the thread ends after the one that it is in."""
        with self._lock:
            self._calls.clear()
            self._closed = True
        self._wakeup.notify()

    def _work(self) -> None:
        # A program that is started from here has them blocked, too: what asks all processes of a job to stop must not
        # end it before the run has ended.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_RUN)
        try:
            while self._wakeup.wait_for(lambda: bool(self._calls) or self._closed):
                while self._calls:
                    with self._lock:
                        if not self._calls:  # left meanwhile
                            break
                        call = self._calls.popleft()
                        self._numbers -= call.numbers
                    call.function(*call.arguments)
                    del call  # its arguments may be large
                if self._closed and not self._calls:
                    return
        finally:
            self._ended.set()


class _TrackerThread:
    """One tracker, its thread, and whether it is still called."""

    def __init__(self, tracker: Tracker, journal: Journal) -> None:
        self.tracker, self.name = tracker, type(tracker).__name__
        self.thread = TrackerQueue(f"ckptman-{self.name}")
        self.failed = self.closing = self._told_dropped = False
        self._journal = journal

    def put(self, method: str, *arguments: object, first: bool = False, numbers: int = 0) -> None:
        if self.failed and method != "close":
            return
        self.thread.put(self._call, method, *arguments, first=first, numbers=numbers)
        if self.thread.dropped and not self._told_dropped:
            self._told_dropped = True
            self.tell("it is too slow: of the steps that wait for it the oldest are left out")

    def _call(self, method: str, *arguments: object) -> None:
        if self.failed and method != "close":
            return
        try:
            getattr(self.tracker, method)(*arguments)
        except BaseException as error:  # noqa: BLE001 what others have written, in a thread of its own
            if not self.failed:
                self.failed = True
                why = f"{type(error).__name__} in {method}()"
                with contextlib.suppress(Exception):  # an error may have no text
                    why = f"{why}: {error}"
                with contextlib.suppress(Exception):  # warnings may be errors
                    self.tell(f"{why}. Training goes on without it")

    def tell(self, why: str) -> None:
        if self.closing:  # the journal is closed, and the root another run's perhaps
            tell(f"{self.name}: {why}", logging.WARNING)
        else:
            self._journal.record("tracker_failed", tracker=self.name, cause=why)


class TrackerThreads:
    """The trackers of a run, each with a thread. Without any, all of this does nothing."""

    def __init__(self, trackers: Sequence[Tracker], journal: Journal) -> None:
        self._threads = [_TrackerThread(each, journal) for each in trackers]
        self._started = False
        if trackers:
            journal.listeners.append(self._event)

    def __bool__(self) -> bool:
        return bool(self._threads)

    def start(self, run: TrackedRun) -> None:
        """Tell of an attempt that begins to train: before all that there was to tell until then."""
        for each in self._threads:
            each.put("start", run, first=not self._started)
            if not self._started:
                try:
                    each.thread.start()
                except RuntimeError as error:
                    each.failed = True
                    each.tell(f"{error}. Training goes on without it")
        self._started = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand on the metrics of a step."""
        for each in self._threads:
            each.put("log", step, dict(metrics), numbers=len(metrics))

    def close(self) -> None:
        """Close all, and leave those behind that do not end in time."""
        if not self._started:
            return
        until = time.monotonic() + CLOSE_SECONDS
        for each in self._threads:
            each.closing = True
            each.put("close")
            each.thread.end()
        for each in self._threads:
            if not each.thread.wait(max(0.0, until - time.monotonic())):
                each.thread.leave()
                each.tell(f"it did not end within {CLOSE_SECONDS:g} s, and is left: what it got last may be missing")

    def _event(self, name: str, fields: Mapping[str, Any]) -> None:
        for each in self._threads:
            each.put("event", name, dict(fields))
