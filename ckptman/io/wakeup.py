"""Waiting for another thread, in a way that Ctrl-C cannot break.

A KeyboardInterrupt within the waits of `threading.Condition`, `Event` or `concurrent.futures` can leave their lock
taken for good, and with it the thread that was waited for. What is here uses locks of C alone, whose state decides
nothing: a flag does, and who waits looks at it again after a moment, whatever happened to the lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar, cast

T = TypeVar("T")
_LOOK_SECONDS = 0.5
"""How often a thread that waits looks by itself: a wake-up is lost only where Ctrl-C came at that very moment."""


class Wakeup:
    """Lets threads wait until something is true, and others wake them when it may be."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def notify(self) -> None:
        """Wake who waits. Called after what they wait for has become true."""
        with contextlib.suppress(RuntimeError):  # not taken: somebody is awake already
            self._lock.release()

    def wait_for(self, predicate: Callable[[], bool], timeout_seconds: float | None = None) -> bool:
        """Wait until `predicate` is true, for at most so long. Return whether it is."""
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not predicate():
            left = _LOOK_SECONDS if until is None else min(_LOOK_SECONDS, until - time.monotonic())
            if left <= 0:
                return False
            self._lock.acquire(timeout=left)
        self.notify()  # for others who wait
        return True


class Flag:
    """A flag that threads can wait for, as `threading.Event`."""

    def __init__(self) -> None:
        self._set, self._wakeup = False, Wakeup()

    def set(self) -> None:
        """Set the flag, and wake who waits for it."""
        self._set = True
        self._wakeup.notify()

    def clear(self) -> None:
        """Take the flag back."""
        self._set = False

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._set

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the flag, for at most so long. Return whether it is set."""
        return self._wakeup.wait_for(self.is_set, timeout_seconds)


class Task(Generic[T]):
    """Work in another thread, and how it ended."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._done = Flag()
        self._value: T | None = None
        self.error: BaseException | None = None
        """What it raised; None: nothing, or it is not done."""

    def run(self) -> None:
        """Do it, in this thread."""
        try:
            assert self._work is not None
            self._value = self._work()
        except BaseException as error:  # noqa: BLE001 for who waits
            self.error = error
        finally:
            self._work = None  # what it refers to may be large
            self._done.set()

    def done(self) -> bool:
        """Return whether it has ended."""
        return self._done.is_set()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait for its end, for at most so long. Return whether it has ended."""
        return self._done.wait(timeout_seconds)

    def result(self) -> T:
        """Wait for its end and return what it returned. Raises: what it raised."""
        self.wait()
        if self.error is not None:
            try:
                raise self.error
            finally:
                self = None  # type: ignore[assignment]
        return cast(T, self._value)


class Worker:
    """A thread that does one task after the other. What was begun when the interpreter leaves is brought to its end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Task[object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._runner: dict[str, threading.Thread] = {}
        """The thread that takes the tasks. Ctrl-C may come between its start and the note of it: the first one that
        runs stays the only one."""
        self._closed = False
        self._begun = self._ended = 0

    @property
    def idle(self) -> bool:
        """Whether all that was submitted is done. Asked by the thread that submits."""
        return self._begun == self._ended

    def start(self) -> None:
        """Start the thread, if it is not there yet. Raises: RuntimeError where there can be no more threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self._name)
            thread.start()
            self._thread = thread

    def submit(self, work: Callable[..., T], *arguments: object) -> Task[T]:
        """Have `work(*arguments)` done after what was submitted before. Raises: RuntimeError (closed, no thread)."""
        if self._closed:
            raise RuntimeError("the thread was told to end")
        self.start()
        task = Task(cast("Callable[[], T]", partial(work, *arguments)))
        self._begun += 1  # first: after Ctrl-C it may be taken for busy, and never for idle when it is not
        self._queue.put(cast("Task[object]", task))
        return task

    def close(self) -> None:
        """Wait for what was submitted, and end the thread."""
        self._closed = True
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()
        if (runner := self._runner.get("it")) is not None:  # after Ctrl-C it may be another one
            runner.join()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        me = threading.current_thread()
        if self._runner.setdefault("it", me) is not me:
            return
        while True:
            try:
                task = self._queue.get(timeout=_LOOK_SECONDS)
            except Empty:
                if threading.main_thread().is_alive():
                    continue
                return  # nobody closed it, and the program is over
            if task is None:
                return
            task.run()
            del task
            self._ended += 1
