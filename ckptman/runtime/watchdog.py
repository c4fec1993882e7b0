"""The watchdog: a thread that notices when this process makes no progress, so that its allocation does not idle.

And how such a process is ended: whatever it hangs on must not hang this too, so every part of it has its time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ckptman.errors import EXIT_STALLED, plain_lines
from ckptman.policies.hang_timeout import Doing, HangTimeout, LongPause, Progress
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.threads import Flag

OnLate = Callable[[LongPause], None]
"""What tells of a silence that may end by itself. It is called in the thread of the watchdog."""
OnStall = Callable[[LongPause, Callable[[float], None]], None]
"""What ends the process. It is called in the thread of the watchdog with what is stuck, and with a function that says
how many seconds that may take: after that the backstop ends the process."""
_BACKSTOP_LIMITS = 2.0
_SPARE_SECONDS = 1.0
_STANDARD_ERROR = 2
PART_SECONDS = 10.0
"""How long a part of the end may take. A file system that is slower than that is stuck, too."""
_STACKS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Watchdog:
    """Ends a process that has shown no sign of life for too long.

    `beat` is a sign of life: a few assignments, no system call. Time is what this thread has been awake for, counted in
    small pieces. So a process that is suspended as a whole, as `scontrol suspend` does, is not stuck when it goes on.

    A thread of Python runs only while nothing else holds the interpreter. For what holds it and does not come back (a
    page of a mapped file on a dead mount, an extension), faulthandler's timer is the backstop, re-armed at each look:
    where the thread cannot run for twice the limit, it writes the stacks to standard error and ends the process with
    code 1. There is one such timer in a process.

    With `patience` None it never looks, and no thread is started. A forked child has no watchdog. Nobody has to close
    one that is thrown away.
    """

    def __init__(self, patience: HangTimeout | None, on_stall: OnStall, on_late: OnLate = lambda _: None) -> None:
        self.patience = patience
        self.awake_seconds = 0.0
        """For how long this watchdog has been awake."""
        self.progress = Progress(patience or HangTimeout())
        self._on_stall, self._on_late = on_stall, on_late
        self._closed = Flag()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch. The first sign of life is now."""
        if self.patience is None or self._thread is not None:
            return
        _watch_forks()
        work = (weakref.ref(self), self._closed, self.patience.look_seconds)
        self._thread = threading.Thread(target=_watch, args=work, name="ckptman-watchdog", daemon=True)
        self._thread.start()

    @property
    def watching(self) -> bool:
        """Whether a thread of this process is watching."""
        return self._thread is not None and self._thread.is_alive()

    def beat(self, doing: Doing, step: int) -> None:
        """This process is alive, and goes on with `doing`, after `step`. Called by the training thread."""
        self.progress.beat(self.awake_seconds, doing, step)

    @contextlib.contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Around a save: it is watched too, in whatever thread it runs."""
        save = self.progress.begin(self.awake_seconds, step)
        try:
            yield
        finally:
            self.progress.end(self.awake_seconds, save)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            thread.join()
        _backstop.disarm()

    def look(self, elapsed_seconds: float) -> bool:
        """Look once, that long after the look before; True: the stall that was found has been dealt with."""
        assert self.patience is not None
        # More than this between two looks means that the process did not run: then nothing in it could.
        self.awake_seconds += min(elapsed_seconds, 2 * self.patience.look_seconds + _SPARE_SECONDS)
        stall = self.progress.overdue(self.awake_seconds)
        if stall is None:
            _backstop.arm(_BACKSTOP_LIMITS * self.progress.limit_seconds)
            if (late := self.progress.late(self.awake_seconds)) is not None:
                self._on_late(late)
            return False
        self._on_stall(stall, _backstop.arm)
        return True


def _watch(watched: weakref.ref[Watchdog], closed: Flag, look_seconds: float) -> None:
    try:
        before = time.monotonic()
        while not closed.wait(look_seconds):
            watchdog, now = watched(), time.monotonic()
            if watchdog is None or watchdog.look(now - before):
                return
            before = now
            del watchdog
    finally:
        _backstop.disarm()


class _Backstop:
    """faulthandler's timer. Never armed while the process forks: the child could not end, its exit waits for a thread
    that it does not have."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._seconds: float | None = None

    def arm(self, seconds: float) -> None:
        """End the process in that many seconds, unless it is armed again before."""
        with self._lock:
            self._seconds = seconds
            # Standard error may be closed; the file descriptor, because sys.stderr may be something else.
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                os.fstat(_STANDARD_ERROR)
                faulthandler.dump_traceback_later(seconds, exit=True, file=_STANDARD_ERROR)

    def disarm(self) -> None:
        with self._lock:
            if self._seconds is not None:
                self._seconds = None
                faulthandler.cancel_dump_traceback_later()

    def before_fork(self) -> None:
        self._lock.acquire()
        if self._seconds is not None:
            faulthandler.cancel_dump_traceback_later()

    def after_fork(self, child: bool) -> None:
        if child:
            self._seconds = None
        elif self._seconds is not None:
            self.arm(self._seconds)
        self._lock.release()


_backstop = _Backstop()


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(
        before=_backstop.before_fork,
        after_in_parent=functools.partial(_backstop.after_fork, False),
        after_in_child=functools.partial(_backstop.after_fork, True),
    )


# ---- the end of a process that is stuck --------------------------------------------------------------------------


def within(seconds: float, work: Callable[[], object]) -> bool:
    """Do `work` in a thread that is left behind after that many seconds. Whether it was done, with no error."""
    done = threading.Event()

    def run() -> None:
        with contextlib.suppress(Exception):
            work()
            done.set()

    try:
        thread = threading.Thread(target=run, daemon=True, name="ckptman-last-words")
        thread.start()
    except RuntimeError:  # no more threads are to be had
        return False
    thread.join(seconds)
    return done.is_set()


def write_stacks(path: Path, text: str) -> None:
    """Append `text` and the stack of every thread to a file. Raises: OSError."""
    DISK.make_folder_if_missing(path.parent)
    fd = os.open(path, _STACKS, 0o666)
    try:
        os.write(fd, f"{plain_lines(text)}\n\n".encode())
        faulthandler.dump_traceback(fd, all_threads=True)
    finally:
        os.close(fd)


def say(text: str) -> None:
    """A line on standard error, past whatever sys.stderr is: its lock may be held by a thread that hangs."""
    os.write(_STANDARD_ERROR, f"ckptman: {plain_lines(text)}\n".encode())


def end_process(text: str, stacks: Path, parts: Sequence[tuple[float, Callable[[], object]]] = ()) -> None:
    """Write the stacks, say why, do the `parts` (each with the seconds that it may take), and leave with code 13.

    Stacks that cannot be written to their file go to standard error. Called by the thread of the watchdog.
    """
    if within(PART_SECONDS, lambda: write_stacks(stacks, text)):
        text = f"{text}; stacks are in {stacks}"
    else:
        within(PART_SECONDS, lambda: faulthandler.dump_traceback(_STANDARD_ERROR, all_threads=True))
    within(PART_SECONDS, lambda: say(text))
    for seconds, part in parts:
        within(seconds, part)
    within(PART_SECONDS, sys.stdout.flush)
    os._exit(EXIT_STALLED)
