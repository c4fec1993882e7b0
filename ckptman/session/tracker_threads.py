"""The threads that work behind the training, and may be left behind: one for each tracker, and one for the journal."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ckptman.io.threads import Flag, Wakeup
from ckptman.runtime.journal import Journal
from ckptman.runtime.log import tell
from ckptman.runtime.tracker import TrackedRun, Tracker

CLOSE_SECONDS = 10.0
"""How long the end of a run waits for all its trackers."""
MOST_WAITING = 10_000
"""So many steps wait for a tracker; then the oldest are left out."""

_FOR_THE_RUN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class _Call(NamedTuple):
    function: Callable[..., object]
    arguments: tuple[object, ...]
    may_be_dropped: bool


class Behind:
    """A thread that makes one call after the other. The interpreter does not wait for it when it leaves."""

    def __init__(self, name: str) -> None:
        self._calls: deque[_Call] = deque()
        self._lock, self._wakeup, self._ended = threading.Lock(), Wakeup(), Flag()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.dropped = 0
        """How many calls were left out because too many were waiting."""

    def start(self) -> None:
        """Start the thread. Raises: RuntimeError where there can be no more threads."""
        self._thread.start()

    def put(
        self, function: Callable[..., object], *arguments: object, first: bool = False, may_be_dropped: bool = False
    ) -> None:
        """Have a call made, which must not raise, after those before or ahead of them. Never waits: where too many are
        waiting, the oldest that may be dropped is."""
        call = _Call(function, arguments, may_be_dropped)
        with self._lock:
            if may_be_dropped and len(self._calls) >= MOST_WAITING:
                place = next((number for number, each in enumerate(self._calls) if each.may_be_dropped), None)
                if place is not None:
                    del self._calls[place]
                    self.dropped += 1
            if first:
                self._calls.appendleft(call)
            else:
                self._calls.append(call)
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
        self.end()

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
                    call.function(*call.arguments)
                    del call  # its arguments may be large
                if self._closed and not self._calls:
                    return
        finally:
            self._ended.set()


class _Outlet:
    """One tracker, its thread, and whether it is still called."""

    def __init__(self, tracker: Tracker, journal: Journal) -> None:
        self.tracker, self.name = tracker, type(tracker).__name__
        self.thread = Behind(f"ckptman-{self.name}")
        self.failed = self.closing = self._told_dropped = False
        self._journal = journal

    def put(self, method: str, *arguments: object, first: bool = False) -> None:
        if self.failed and method != "close":
            return
        self.thread.put(self._call, method, *arguments, first=first, may_be_dropped=method == "log")
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
                with contextlib.suppress(Exception):  # an error may have no text
                    self.tell(f"{type(error).__name__} in {method}(): {error}. Training goes on without it")

    def tell(self, why: str) -> None:
        if self.closing:  # the journal is closed, and the root another run's perhaps
            tell(f"{self.name}: {why}", logging.WARNING)
        else:
            self._journal.record("tracker_failed", tracker=self.name, cause=why)


class TrackerThreads:
    """The trackers of a run, each with a thread. Without any, all of this does nothing."""

    def __init__(self, trackers: Sequence[Tracker], journal: Journal) -> None:
        self._outlets = [_Outlet(each, journal) for each in trackers]
        self._started = False
        if trackers:
            journal.listeners.append(self._event)

    def __bool__(self) -> bool:
        return bool(self._outlets)

    def start(self, run: TrackedRun) -> None:
        """Tell of an attempt that begins to train: before all that there was to tell until then."""
        for outlet in self._outlets:
            outlet.put("start", run, first=not self._started)
            if not self._started:
                try:
                    outlet.thread.start()
                except RuntimeError as error:
                    outlet.failed = True
                    outlet.tell(f"{error}. Training goes on without it")
        self._started = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand on the metrics of a step."""
        for outlet in self._outlets:
            outlet.put("log", step, dict(metrics))

    def close(self) -> None:
        """Close all, and leave those behind that do not end in time."""
        if not self._started:
            return
        until = time.monotonic() + CLOSE_SECONDS
        for outlet in self._outlets:
            outlet.closing = True
            outlet.put("close")
            outlet.thread.end()
        for outlet in self._outlets:
            if not outlet.thread.wait(max(0.0, until - time.monotonic())):
                outlet.tell(f"it did not end within {CLOSE_SECONDS:g} s, and is left: what it got last may be missing")

    def _event(self, name: str, fields: Mapping[str, Any]) -> None:
        for outlet in self._outlets:
            outlet.put("event", name, dict(fields))
