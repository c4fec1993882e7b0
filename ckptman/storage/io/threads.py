"""Threads: a few that share out the pieces of one job with scratch memory to work in, and one that works behind.

Waiting for another thread is safe from Ctrl-C here. A KeyboardInterrupt within the waits of `threading.Condition`,
`Event` or `concurrent.futures` can leave their lock taken for good, and with it the thread that was waited for. The
waits of this module use locks of C alone, whose state decides nothing: a flag does, and the waiting thread looks at it
again after a moment, whatever happened to the lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar, cast

from ckptman.errors import ConfigError

THREADS_ENV = "CKPTMAN_IO_THREADS"
IO_THREADS = 4
MOST_LOADING_THREADS = 16
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
ALIGN_BYTES = 4096
"""What direct I/O wants offsets, sizes and addresses to be a multiple of, on every disk that is in use."""
STRIDE_BYTES = 4 * 1024 * 1024
"""The most that one call moves, as a rule."""
COLD_STRIDE_BYTES = 4 * STRIDE_BYTES
"""The same where a disk is waited for: the kernel keeps a few requests of such a call under way by itself."""
_HUGE_BYTES = 2 * 1024 * 1024
_KEPT_BUFFERS = 8
_KEPT_BYTES = 2 * STRIDE_BYTES
_LOOK_SECONDS = 0.01

T = TypeVar("T")

# Appending to a deque and popping from it are atomic, so a fork in between leaves no lock behind.
_free: deque[memoryview] = deque()


def io_threads(otherwise: int = IO_THREADS) -> int:
    """Return how many threads move the bytes of a save or a load: `CKPTMAN_IO_THREADS`, or `otherwise`.

    Of a save no more on many cores, which the training has: they wait for storage more than they compute. In a `relay`
    there are a few more, who compute; where all is in the page cache, there are no more than cores.

    Raises: ConfigError where the variable is no whole number from 1 on.
    """
    text = os.environ.get(THREADS_ENV, "")
    if not text.strip():
        return otherwise
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError(f"{THREADS_ENV}={text!r} is not a number of threads: give one from 1 on, or unset it")
    return count


def cores() -> int:
    """Return how many cores this process may use: in a job, those it was given."""
    return len(os.sched_getaffinity(0))


def loading_threads() -> int:
    """Return how many threads move the bytes of a load, while nobody trains: one for each core of this rank, from 4 to
    16, or `CKPTMAN_IO_THREADS`. Raises: ConfigError."""
    return io_threads(min(max(IO_THREADS, cores() // ranks_on_these_cores()), MOST_LOADING_THREADS))


def ranks_on_these_cores(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks may use the same cores as this one: torchrun leaves all cores to each of its ranks, and so
    does Slurm where it binds nobody."""
    is_shared = "TORCHELASTIC_RUN_ID" in environment or cores() == os.cpu_count()
    counts = [environment.get(name, "").partition("(")[0] for name in _LOCAL_RANKS]  # such as 8(x2)
    return next((int(count) for count in counts if count.isdecimal() and int(count)), 1) if is_shared else 1


def computing_threads(threads: int) -> int:
    """Return how many of so many threads may compute at the same time: one for every two cores."""
    return min(threads, max(1, cores() // 2))


_PREFERRED_SECONDS = 0.0002
_preferring: list[float] = []
"""The switch interval of before, once for each block of `preferred` that is under way."""
_preferring_lock = threading.Lock()


@contextlib.contextmanager
def preferred() -> Iterator[None]:
    """Have threads that compute in Python give way to others within 0.2 ms instead of 5.

    A load takes the interpreter for a few microseconds a thousand times. If a thread of the program computes meanwhile,
    such as one that fetches data, it would wait 5 ms each time: a hundred times as long as it takes alone.
    """
    with _preferring_lock:
        _preferring.append(_preferring[0] if _preferring else sys.getswitchinterval())
        sys.setswitchinterval(min(_PREFERRED_SECONDS, _preferring[0]))
    try:
        yield
    finally:
        with _preferring_lock:
            if _preferring:  # not in a fork that was made inside
                before = _preferring.pop()
                if not _preferring:
                    sys.setswitchinterval(before)


def _as_before_in_fork() -> None:
    global _preferring_lock
    _preferring_lock = threading.Lock()
    if _preferring:
        sys.setswitchinterval(_preferring[0])
        _preferring.clear()


os.register_at_fork(after_in_child=_as_before_in_fork)


def stride_of(block_bytes: int, most_bytes: int = STRIDE_BYTES) -> int:
    """Return how much one piece of work is: whole blocks, as many as `most_bytes` hold but at least one."""
    return max(block_bytes, most_bytes // block_bytes * block_bytes)


class Scratch:
    """Memory to work in, on pages. Fresh memory is several times slower than memory that was touched before, so that
    buffers stay."""

    def borrow(self, size_bytes: int) -> memoryview:
        """Return at least so much. Raises: OSError, MemoryError."""
        if not size_bytes:
            return memoryview(b"")
        with contextlib.suppress(IndexError):
            buffer = _free.pop()
            if len(buffer) >= size_bytes:
                return buffer
            self.give_back(buffer)
        return aligned_memory(-(-size_bytes // STRIDE_BYTES) * STRIDE_BYTES)

    def give_back(self, buffer: memoryview) -> None:
        """Keep it for who comes next, or give it up."""
        if len(_free) < _KEPT_BUFFERS and 0 < len(buffer) <= _KEPT_BYTES:
            _free.append(buffer)

    def borrow_if_any(self, size_bytes: int) -> memoryview | None:
        """Return at least so much; None: there is none."""
        try:
            return self.borrow(size_bytes)
        except (OSError, MemoryError):
            return None


SCRATCH = Scratch()


def share_out(
    count: int,
    work: Callable[[int, memoryview], None],
    *,
    threads: int,
    scratch_bytes: int,
    scratch: Scratch = SCRATCH,
    on_error: Callable[[], None] = lambda: None,
) -> None:
    """Call `work(number, scratch)` once for each number below `count`, from the calling thread and `threads - 1` more.

    Numbers are handed out in order. `scratch` is page-aligned memory of the thread, of at least `scratch_bytes`.
    The first error stops the others after the piece they are at, and is raised as it is. No thread outlives the call.
    Where there is no memory for that many, fewer do it. `on_error`: called at the first error, to wake those that wait
    for something else than storage.
    """
    job = _Job(count, on_error)

    def run(buffer: memoryview) -> None:
        try:
            while (number := job.take()) is not None:
                work(number, buffer)
        finally:
            scratch.give_back(buffer)

    def help() -> None:
        if (buffer := scratch.borrow_if_any(scratch_bytes)) is not None:
            run(buffer)

    def lead() -> None:
        job.start(help, min(threads, count) - 1)
        run(mine)

    mine = scratch.borrow(scratch_bytes)
    job.lead(lead)


def relay(
    count: int,
    first: Callable[[int, memoryview], T],
    then: Callable[[int, memoryview, T], None],
    *,
    first_threads: int,
    then_threads: int,
    scratch_bytes: int,
    scratch: Scratch = SCRATCH,
    on_error: Callable[[], None] = lambda: None,
) -> None:
    """As `share_out`, for work of two halves: `then(number, scratch, first(number, scratch))` for each number.

    One half waits for storage and the other computes, each in threads of its own: so storage has something to do all
    the time, and no more is computed at once than there are cores for. As many pieces are in memory as there are
    threads, fewer where there is no memory for that many. `then_threads` of 0: the first threads do both halves of
    each.
    """

    def both(number: int, buffer: memoryview) -> None:
        then(number, buffer, first(number, buffer))

    if not then_threads:
        share_out(count, both, threads=first_threads, scratch_bytes=scratch_bytes, scratch=scratch, on_error=on_error)
        return
    first_threads, then_threads = min(first_threads, count), min(then_threads, count)
    free: SimpleQueue[memoryview | None] = SimpleQueue()
    halfway: SimpleQueue[tuple[int, memoryview, T] | None] = SimpleQueue()
    done = itertools.count(1)

    def leave() -> None:
        for _ in range(first_threads):
            free.put(None)
        for _ in range(then_threads):
            halfway.put(None)

    def run_first() -> None:
        while (buffer := free.get()) is not None and (number := job.take()) is not None:
            halfway.put((number, buffer, first(number, buffer)))

    def run_then() -> None:
        while (piece := halfway.get()) is not None and not job.is_over:
            then(*piece)
            free.put(piece[1])
            if next(done) == count:
                leave()

    def stop() -> None:
        leave()
        on_error()

    def run_both() -> None:
        while (number := job.take()) is not None:
            both(number, buffers[0])

    def lead() -> None:
        if job.start(run_first, first_threads):
            job.start(run_then, then_threads - 1)
            run_then()
        else:
            run_both()

    job = _Job(count, stop)
    buffers = [scratch.borrow(scratch_bytes)]
    try:
        while len(buffers) < first_threads + then_threads:
            if (buffer := scratch.borrow_if_any(scratch_bytes)) is None:
                break
            buffers.append(buffer)
        for buffer in buffers:
            free.put(buffer)
        job.lead(lead)
    finally:
        for buffer in buffers:
            scratch.give_back(buffer)


class _Job:
    """Numbers that threads take until there are no more, or one of them has failed."""

    def __init__(self, count: int, on_stop: Callable[[], None] = lambda: None) -> None:
        self.is_over = False
        """One has failed: what is left of it is not to be done."""
        self._error: BaseException | None = None
        self._numbers = iter(range(count))
        self._on_stop = on_stop
        self._threads: list[threading.Thread] = []
        self._at_work: set[int] = set()
        self._lock = threading.Lock()

    def take(self) -> int | None:
        with self._lock:
            return None if self.is_over else next(self._numbers, None)

    def start(self, run: Callable[[], None], threads: int) -> int:
        """Call `run` in so many threads. Returns in how many it could be. To be called within `lead`."""
        for started in range(threads):
            thread = threading.Thread(target=self._help, args=(run,), name="ckptman-io", daemon=True)
            self._threads.append(thread)  # first: Ctrl-C may come while it starts
            try:
                thread.start()
            except RuntimeError:  # no more threads for this user, or the interpreter is leaving: slower, not wrong
                self._threads.pop()
                return started
        return threads

    def lead(self, run: Callable[[], None]) -> None:
        """Call `run` here, wait for the threads that it started, and raise the first error.

        A thread that Ctrl-C kept from being known as started finds that all is over.
        """
        try:
            self._run(run)
            self._wait()
        except BaseException as error:  # noqa: BLE001 Ctrl-C between two lines of these
            self._stop(error)
            self._wait()
        first, self._error = self._error, None
        if first is not None:
            try:
                raise first
            finally:
                del first  # its traceback holds this frame

    def _wait(self) -> None:
        for thread in self._threads:
            while thread.is_alive():
                self._run(thread.join)
        while self._at_work:  # before Python 3.13, a join that Ctrl-C ends takes the thread for ended
            self._run(partial(time.sleep, _LOOK_SECONDS))

    def _help(self, run: Callable[[], None]) -> None:
        me = threading.get_ident()
        self._at_work.add(me)
        try:
            self._run(run)
        finally:
            self._at_work.discard(me)

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001  (raised again by `lead`)
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            self.is_over, self._error = True, self._error or error
        self._on_stop()


def aligned_memory(size_bytes: int, *, shared: bool = False) -> memoryview:
    """Zeroed memory on pages, on huge ones where the kernel has them. `shared`: with forks of this process, so that
    none of its pages is ever another one, as a device that copies into it by itself needs.

    Direct I/O hands the disk each physically connected piece of memory by itself: 4 MiB are two pieces on huge pages,
    and up to a thousand on small ones, which was three times slower.
    """
    huge = size_bytes >= _HUGE_BYTES
    room = size_bytes + (_HUGE_BYTES if huge else 0)
    memory = mmap.mmap(-1, room, flags=(mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | mmap.MAP_ANONYMOUS)
    start = 0
    if huge:
        with contextlib.suppress(OSError):  # not on every kernel
            memory.madvise(mmap.MADV_HUGEPAGE)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_BYTES
    return memoryview(memory)[start : start + size_bytes]


_WAKE_SECONDS = 0.5
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
            left = _WAKE_SECONDS if until is None else min(_LOOK_SECONDS, until - time.monotonic())
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
                task = self._queue.get(timeout=_WAKE_SECONDS)
            except Empty:
                if threading.main_thread().is_alive():
                    continue
                return  # nobody closed it, and the program is over
            if task is None:
                return
            task.run()
            del task
            self._ended += 1
