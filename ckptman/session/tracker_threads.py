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

from ckptman.runtime.journal import Journal
from ckptman.runtime.log import tell
from ckptman.runtime.tracker import TrackedRun, Tracker
from ckptman.storage.io.threads import Flag, Wakeup

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
