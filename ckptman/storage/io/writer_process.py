"""Data files written by a process of its own, so that training keeps its interpreter to itself.

Threads that write take the interpreter from the training a thousand times a second, to hand out the next piece; and
they have its priority. This process has an interpreter of its own and gives way to the training. It is given the memory
in which a save is staged and the file to write, both as open descriptors: which file that is, is for the training's
process to say, and where there is no such process, threads do the same work.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import ckptman
from ckptman.errors import CorruptError, warn_only
from ckptman.storage.io.checksums import BLOCK_BYTES, Digests, digests_bytes
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.file_reader import drop_from_cache, read_to_cache
from ckptman.storage.io.file_writer import FileWriter, FiniteScan, InPlace, Written, write_all
from ckptman.storage.io.threads import computing_threads, io_threads

LEAST_BYTES = 64 * 1024 * 1024
"""Less than this is written before a process has begun."""
_NICE = 5
_CLOSE_ON_EXEC = 1
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0
_CODE = "import sys; sys.path[:] = {path!r}; from ckptman.storage.io.writer_process import main; main({fd})"


def shared_memory(size_bytes: int, path: Path | None = None) -> tuple[memoryview, int]:
    """Return zeroed memory that other processes can be given, not touched yet, and its descriptor, which is open as
    long as the memory. `path`: a new file in memory that it is; None: it has no name. Raises: OSError.
    """
    fd = _memory_file() if path is None else os.open(path, _NEW_FILE, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)  # a page that is not to be had at first use would kill this process
        memory = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED)
    except BaseException:
        os.close(fd)
        raise
    weakref.finalize(memory, os.close, fd)
    return memoryview(memory), fd


def _memory_file() -> int:
    """Return a new file in memory. `os.memfd_create` is missing where Python was built on an old system, which the
    Python of conda and uv often was. Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fd = int(libc.memfd_create(b"ckptman", _CLOSE_ON_EXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


class Shared(NamedTuple):
    """The bytes of a file that is about to be written: those of shared memory, and those that follow."""

    fd: int
    shared_bytes: int
    tail: bytes

    @property
    def size_bytes(self) -> int:
        """A multiple of `ALIGN_BYTES`."""
        return self.shared_bytes + len(self.tail)

    def view(self, offset: int, scratch: memoryview) -> memoryview:
        """Return the bytes from `offset` on, as many as `scratch` has room for, in it."""
        known = min(max(self.shared_bytes - offset, 0), len(scratch))
        done = 0
        while done < known:
            done += os.preadv(self.fd, [scratch[done:known]], offset + done)
        begin = offset + known - self.shared_bytes
        scratch[known:] = self.tail[begin : begin + len(scratch) - known]
        return scratch


class WriterProcess:
    """Writes the data files of one rank, one after the other. It is started for the first of them."""

    def __init__(self) -> None:
        self.given_up = False
        """Whether one could not be started, or died: threads do its work then."""
        self._running: tuple[Connection, subprocess.Popen[bytes]] | None = None
        self._ended: Callable[[], object] = lambda: None

    def write(self, path: Path, source: Shared, scan: FiniteScan | None = None) -> Written | None:
        """Write a file that nobody has made yet and flush it to storage, shown to `scan` meanwhile.

        Returns None where it could not be done here: nothing is left of the file then. Raises: OSError.
        """
        if self.given_up or source.size_bytes < LEAST_BYTES:
            return None
        with FileWriter(path, source.size_bytes, flags=os.O_EXCL) as file:
            answer = self._answer(file, path, source, scan)
            if answer is None:
                DISK.remove_file(path)
                return None
        return Written.of(*answer)

    def digest(self, path: Path, source: Shared, scan: FiniteScan | None = None) -> Written | None:
        """Digest a file in memory that `source` is, shown to `scan` meanwhile; nothing is written.

        Returns None where it could not be done here. Raises: OSError.
        """
        if self.given_up or source.size_bytes < LEAST_BYTES:
            return None
        answer = self._answer(None, path, source, scan)
        return Written.of(*answer) if answer is not None else None

    def _answer(
        self, file: FileWriter | None, path: Path, source: Shared, scan: FiniteScan | None
    ) -> tuple[Digests, str | None] | None:
        """Have a file written, or only digested where there is none. None: there is no process, from now on."""
        try:
            answer = self._ask(file, path, source, scan)
        except BaseException as error:
            self.close()  # before anything else: it may still be writing, from memory that others are given next
            if not isinstance(error, (OSError, EOFError)):
                raise
            self.given_up = True
            warn_only(
                f"the process that writes checkpoints beside the training is gone ({error or 'it ended'}): threads "
                f"write them from now on, which takes more of the training's time"
            )
            return None
        if isinstance(answer, BaseException):
            raise answer
        digests, buffered_because, found = answer
        of_this_version = isinstance(digests, Digests)
        if not of_this_version or len(digests.blocks) != digests_bytes(source.size_bytes, BLOCK_BYTES):
            raise OSError(errno.EIO, "the process that writes is of another version of ckptman", str(path))
        if scan is not None:
            scan.found |= found
        return digests, buffered_because

    def keep_cached(self, path: Path, *, starts: bool) -> None:
        """Have a file read into the page cache from now on, until the next one is to be written. The one that was named
        before goes from there. `starts`: also where the process is not running yet."""
        if not self.given_up and (starts or self._running is not None):
            with contextlib.suppress(OSError):  # a process that is gone is found by the next save
                self._started()[0].send(path)

    def close(self) -> None:
        """End the process. What it does in vain is over in a few seconds."""
        self._running = None
        self._ended()

    def _ask(self, file: FileWriter | None, path: Path, source: Shared, scan: FiniteScan | None) -> Any:
        pipe, process = self._started()
        pipe.send((path, source, None if file is None else file.buffered_because, scan, file is not None))
        for fd in (source.fd, *(() if file is None else (file.fd,))):
            send_handle(pipe, fd, process.pid)
        os.set_blocking(pipe.fileno(), True)  # it is not, where the program has set a time limit for all sockets
        # A fork of this process may have the other end, too, so that its end alone tells nothing.
        while not pipe.poll(_LOOK_SECONDS):
            if process.poll() is not None:
                raise EOFError(f"the process that writes ended with {process.returncode}")
        return pipe.recv()

    def _started(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        if self._running is None:
            ours, theirs = Pipe()
            with theirs:
                path = [*map(str, sys.path), str(Path(ckptman.__file__).parents[1])]
                code = _CODE.format(path=path, fd=theirs.fileno())
                process = subprocess.Popen(
                    [sys.executable or "python3", "-c", code],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._running = ours, process
            self._ended = weakref.finalize(self, _end, ours, process, os.getpid())
        return self._running


def _end(pipe: Connection, process: subprocess.Popen[bytes], parent: int) -> None:
    if os.getpid() != parent or process.returncode is not None:  # a fork of it ends nothing
        return
    with contextlib.suppress(OSError):
        pipe.send(None)
    pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a dead mount is left to itself
            process.wait(_END_SECONDS)


def main(fd: int) -> None:
    """Write what the process on the other end of a pipe asks for, until there is nobody any more."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)  # what a job is told is for the training to answer
    os.nice(_NICE)
    with contextlib.suppress(OSError):  # where the kernel groups processes by session, that is what counts
        Path("/proc/self/autogroup").write_text(str(_NICE), encoding="ascii")
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    pipe, cached = Connection(fd), None
    with contextlib.suppress(EOFError, OSError):
        while (asked := pipe.recv()) is not None:
            if isinstance(asked, Path):
                _keep_cached(asked, cached, pipe)
                cached = asked
            else:
                pipe.send(_serve(pipe, *asked))


def _serve(
    pipe: Connection, path: Path, source: Shared, buffered_because: str | None, scan: FiniteScan | None, writes: bool
) -> tuple[Digests, str | None, set[str]] | Exception:
    memory, target = recv_handle(pipe), recv_handle(pipe) if writes else -1
    try:
        if not writes:
            digests = write_all(InPlace(), source._replace(fd=memory), computing_threads(io_threads()), scan)
            return digests, None, set() if scan is None else scan.found
        with FileWriter(path, 0, buffered_because=buffered_because, fd=target) as file:
            threads = io_threads() if file.is_direct else computing_threads(io_threads())
            digests = write_all(file, source._replace(fd=memory), threads, scan)
            return digests, file.buffered_because, set() if scan is None else scan.found
    except Exception as error:  # noqa: BLE001 raised again by who asked
        return error
    finally:
        os.close(memory)


def _keep_cached(path: Path, before: Path | None, pipe: Connection) -> None:
    """Read a file into the page cache in place of another one, behind all others who read from that disk, until
    something else is to be done."""
    import psutil

    if before is not None:
        with contextlib.suppress(OSError, CorruptError):  # it may have been pruned
            drop_from_cache(before)
    with contextlib.suppress(OSError, CorruptError, psutil.Error):  # then a load reads it from the disk
        me = psutil.Process()
        me.ionice(psutil.IOPRIO_CLASS_IDLE)
        try:
            read_to_cache(path, lambda: not pipe.poll())
        finally:
            me.ionice(psutil.IOPRIO_CLASS_NONE)


def _leave_with(parent: int) -> NoReturn:
    """End this process when its parent has ended: nobody waits for what it writes."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)
