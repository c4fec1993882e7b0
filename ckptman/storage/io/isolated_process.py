"""Work in a forked process of its own, which can be abandoned, killed, or die, and this one goes on.

A file system that hangs holds whoever asks it, and not even SIGKILL frees a process that waits for one; a page of a
file that is gone kills whoever looks at it. This is the one place where ckptman forks.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast
from weakref import WeakSet

from ckptman.errors import CkptmanError

T = TypeVar("T")
END_SECONDS = 1.0
"""How long a process that was killed may take to be gone, before it is left to itself."""
ANSWER_SECONDS = 30.0
_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_pipes: WeakSet[Connection] = WeakSet()
"""Our ends of the pipes to all of them: a process that is forked has no use for them, and lets go."""


class NoAnswer(Exception):
    """The work was not done in time, and its process was abandoned. Attribute: `seconds`, the limit."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"does not answer within {seconds:g} s")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.seconds,)


class Died(Exception):
    """The process ended before its work was done."""


def run_isolated(work: Callable[[], T], limit_seconds: float, outlive: bool = False) -> T:
    """Call `work` in a forked process and return what it returns, or raise what it raises.

    When this returns, the process and whatever it started have been killed. `outlive`: they are left alone where the
    limit is over or this process is interrupted, and even if it is killed.
    Raises: NoAnswer, Died.
    """
    child = IsolatedProcess(lambda pipe: pipe.send(_outcome(work)), outlive=outlive)
    try:
        good, value = child.receive(limit_seconds)
    except BaseException as error:
        child.pipe.close() if outlive and not isinstance(error, Died) else child.end()
        raise
    child.end()
    if not good:
        raise value
    return cast(T, value)


class IsolatedProcess:
    """A forked process that runs `serve(pipe)` and ends; killed at the end of a `with` block, and with this process.

    Leader of its own group and session: no Ctrl-C reaches it. It keeps no descriptor of ours, so that nobody waits for
    the end of our output because it is stuck; but where it `keeps_files`. `duplex`: it is sent something, too.
    Nothing that was forked is cleaned up in it. Raises: OSError where there can be no more processes.
    """

    def __init__(
        self,
        serve: Callable[[Connection], None],
        *,
        duplex: bool = False,
        outlive: bool = False,
        keeps_files: bool = False,
    ) -> None:
        self.pipe, theirs = Pipe(duplex)
        _pipes.add(self.pipe)
        self._code: int | None = None
        parent = os.getpid()
        # No signal handler of ours may run in the child: it would go on as if it were us.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child needs no lock of theirs
                self.pid = os.fork()
            if self.pid == 0:
                _live(serve, theirs, None if outlive else parent, keeps_files, mask)
        except OSError:
            self.pipe.close()
            raise
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def __enter__(self) -> IsolatedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def receive(self, limit_seconds: float = ANSWER_SECONDS) -> Any:
        """Return what it sends next; an error that it sends is raised. Raises: NoAnswer, Died."""
        try:
            if not self.pipe.poll(limit_seconds):
                raise NoAnswer(limit_seconds)
            said = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise Died(f"the check {self.ending()}") from None
        if isinstance(said, Exception):
            raise said
        return said

    def ending(self) -> str:
        """Return how it ended by itself: waits for that a moment."""
        self._wait(END_SECONDS)
        if self._code is None or self._code >= 0:
            return f"ended with exit code {self._code}" if self._code else "ended with no result"
        name = signal.Signals(-self._code).name
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    def end(self) -> None:
        """Kill it and all that it started. One that cannot die yet is left behind: nothing here waits for it."""
        if self._code is None:
            for kill in (os.kill, os.killpg):
                with suppress(ProcessLookupError, PermissionError):
                    kill(self.pid, signal.SIGKILL)
            self._wait(END_SECONDS)
        self.pipe.close()

    def _wait(self, limit_seconds: float) -> None:
        deadline = time.monotonic() + limit_seconds
        while self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored here: the system has taken it away
                self._code = 0
                return
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                return
            else:
                time.sleep(0.002)


def _live(
    serve: Callable[[Connection], None],
    pipe: Connection,
    parent: int | None,
    keeps_files: bool,
    mask: set[int | signal.Signals],
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number in (*_OURS, signal.SIGBUS):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if parent is not None:
            _die_with(parent)
        for other in list(_pipes):
            other.close()
        if not keeps_files:
            _let_go(pipe.fileno())
        os.environ["LC_ALL"] = "C"  # what commands print is read by programs here
        serve(pipe)
        code = 0
    finally:
        os._exit(code)  # nothing of what was forked is cleaned up: it belongs to the parent


def _die_with(parent: int) -> None:
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _let_go(kept: int) -> None:
    """Put /dev/null in place of every descriptor but `kept`: the numbers stay taken, so that no file object that was
    inherited can close one of the child's own."""
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        inherited = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    except OSError:
        inherited = [0, 1, 2]
    for fd in inherited:
        if fd not in (kept, nothing):
            with suppress(OSError):
                os.fstat(fd)  # the one that listed the folder is closed by now
                os.dup2(nothing, fd)


def _outcome(work: Callable[[], T]) -> tuple[bool, object]:
    try:
        return True, work()
    except BaseException as error:  # noqa: BLE001 (raised again by whoever asked)
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 (not every error can travel)
            return False, CkptmanError(f"{type(error).__name__}: {error}")
        return False, error
