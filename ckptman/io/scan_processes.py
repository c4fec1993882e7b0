"""Processes that digest blocks where they lie in the page cache: nothing is copied, and each has an interpreter of its
own, so that several cores make digests at the same time. Torch-free.

Whoever looks at a page that is gone, because the file was cut short or the disk no longer gives it, is killed by
SIGBUS. So it is never this process that looks. A process only says which pieces it has done; what is left undone for
whatever reason is read again in the usual way, which says best what is wrong.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from itertools import starmap

from ckptman.io.checksums import DIGEST_BYTES
from ckptman.io.file_scan import Hand, Pieces, Source, Window
from ckptman.io.workers import STRIDE_BYTES

LEAST_BYTES = 256 * 1024 * 1024
"""Less than this is read before a process has begun."""
GROUP_PIECES = 8192
"""Pieces that are shared out at a time: their numbers wait in a pipe, which as a rule holds that many."""
GROUP_FILES = 128
"""Files at a time: each is open."""
END_SECONDS = 1.0
"""How long a process that was killed may take to be gone, before it is left to itself."""
MOST_PIECES = 16
"""Pieces of one task: for each task there is something to do here, too."""
_TASK = struct.Struct("=ii")
"""First piece of a task, and the piece after its last."""
_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ending: set[int] = set()
"""Processes that are about to end, or have ended and were not yet seen to."""


def groups_of(pieces: Pieces) -> Iterator[range]:
    """The numbers of the pieces, in groups that are shared out one after the other."""
    begin = files = 0
    for first, stop in pieces.by_file():
        if files == GROUP_FILES:
            yield range(begin, first)
            begin, files = first, 0
        files += 1
        while stop - begin > GROUP_PIECES:
            yield range(begin, begin + GROUP_PIECES)
            begin, files = begin + GROUP_PIECES, 1
    if begin < pieces.count:
        yield range(begin, pieces.count)


def digest_apart(pieces: Pieces, group: range, processes: int, end: Callable[[Source, int], None]) -> Sequence[int]:
    """Have the pieces of a group digested by forked processes. `end` is told how much of which file is done.

    The numbers of those that are not: because a process died, or met an error, or because none is worth it.
    """
    aligned = pieces.piece_bytes % mmap.ALLOCATIONGRANULARITY == 0 and pieces.piece_bytes <= STRIDE_BYTES
    chosen = list(pieces.runs(group))
    if sum(high - low for _, low, high in chosen) < LEAST_BYTES or not aligned or not hasattr(os, "fork"):
        return group
    for source, _, _ in chosen:
        source.open_once()
    slot = -(-pieces.piece_bytes // pieces.block_bytes) * DIGEST_BYTES
    shared = mmap.mmap(-1, len(group) * slot)
    left = set(group)
    with closing(_done_apart(pieces, group, shared, slot, processes)) as tasks:
        for task in tasks:
            at = (task.start - group.start) * slot
            for source, low, high in pieces.runs(task):
                source.keep(low, shared[at : at + -(-(high - low) // pieces.block_bytes) * DIGEST_BYTES])
                at += -(-(high - low) // pieces.piece_bytes) * slot
                end(source, high - low)
            left.difference_update(task)
    return sorted(left)


def _tasks(group: range, processes: int) -> Iterator[bytes]:
    """Large ones first, and small ones at the end, so that all processes are done at about the same time."""
    begin = group.start
    while begin < group.stop:
        stop = begin + max(1, min(MOST_PIECES, (group.stop - begin) // (4 * processes)))
        yield _TASK.pack(begin, stop)
        begin = stop


def _done_apart(
    pieces: Pieces, group: range, shared: mmap.mmap, slot: int, processes: int
) -> Generator[range, None, None]:
    """Fork processes, and yield the pieces whose digests they have put into their slots, until all have ended."""
    _reap()
    (todo, fill), (told, done) = os.pipe(), os.pipe()
    opened, pids = {todo, fill, told, done}, []
    try:
        os.set_blocking(fill, False)  # what a small pipe does not hold is left undone
        os.write(fill, b"".join(_tasks(group, processes)))
        os.close(fill)
        opened.remove(fill)
        for _ in range(processes):
            pid = _fork(lambda: _serve(pieces, group, shared, slot, todo, done, told))
            if pid is None:
                break
            pids.append(pid)
        os.close(done)
        opened.remove(done)
        left = len(group)
        while left and (tasks := os.read(told, 4096)):
            for task in starmap(range, _TASK.iter_unpack(tasks)):
                left -= len(task)
                yield task
        # They have nothing left to do but to give back their memory, which takes as long as some of the work.
        _ending.update(pids)
        pids = []
    finally:
        for fd in opened:
            os.close(fd)
        _end(pids)


def _serve(pieces: Pieces, group: range, shared: mmap.mmap, slot: int, todo: int, done: int, told: int) -> None:
    """What a process does until there is nothing left to do. `todo`, `done`: pipes of tasks, to read and to write.

    It ends at the first error: whoever reads that piece again will say what is wrong.
    """
    os.close(told)  # so that a task cannot be told any more when nobody listens
    hand = Hand(memoryview(mmap.mmap(-1, STRIDE_BYTES)), pieces.block_bytes)
    window = Window(pieces.block_bytes)
    while task := os.read(todo, _TASK.size):
        for number in range(*_TASK.unpack(task)):
            source, low, high = pieces.at(number)
            digests = source.digest_where_it_lies(low, high, hand, window)
            at = (number - group.start) * slot
            shared[at : at + len(digests)] = digests
        os.write(done, task)


def _fork(serve: Callable[[], None]) -> int | None:
    """Call `serve` in a process of its own. Its id; None where there can be no more processes."""
    # No signal handler of ours may run in the child: it would go on as if it were us.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child needs no lock of theirs
            pid = os.fork()
        if pid == 0:
            try:
                for signum in (*_OURS, signal.SIGBUS):
                    signal.signal(signum, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                serve()
            finally:
                os._exit(0)  # nothing of what was forked is cleaned up: it belongs to the parent
        return pid
    except OSError:
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end(pids: Sequence[int]) -> None:
    """Kill processes and see them gone. One that waits for a file system that hangs is left to itself."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _ending.update(pids)
    deadline = time.monotonic() + END_SECONDS
    while _ending.intersection(pids) and time.monotonic() < deadline:
        _reap()
        time.sleep(0.0005)


def _reap() -> None:
    """Take note of processes that have ended: what becomes of them then is the system's to know."""
    for pid in list(_ending):
        try:
            gone = os.waitpid(pid, os.WNOHANG)[0]
        except ChildProcessError:
            gone = pid
        if gone:
            _ending.discard(pid)
