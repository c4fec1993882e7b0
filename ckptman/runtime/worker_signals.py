"""Worker processes that live through a stop request.

torchrun, Slurm's steps and Ctrl-C in a terminal send a stop request to every process of a group, and so to the workers
of data loaders, pools and environments. They would die, and the step that is to be saved would fail. So the processes
that `multiprocessing` starts while a SignalHandler is in use ignore its signals as long as their parent is alive.

    start()      gives the signals to the new process, which begins with them blocked
    live_on()    runs first in it: ignores the signals, and unblocks them
    terminate()  sends RELEASE, which ends the worker as SIGTERM would; SIGKILL if it is stuck outside of Python

Processes that were started before, plain forks, and programs (`subprocess`) are left alone.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing import popen_fork, process, util
from pathlib import Path
from types import FrameType
from typing import Any, cast

RELEASE = signal.SIGURG
"""Ignored by a process that has no handler for it, and sent to groups by nobody."""
RETRY_SECONDS, RETRIES = 1.0, 4
"""How often RELEASE is sent again to a worker that did not react; then it is killed. A signal that comes just before
the worker blocks, in a `recv` say, does not interrupt it."""
_TORCH_MODULE, _TORCH_FUNCTION = "torch.utils.data._utils.signal_handling", "_set_worker_signal_handlers"

_listened: Callable[[], Iterable[int]] = tuple
_ignored: frozenset[int] = frozenset()
"""In a worker: the signals that it ignores."""
_parent = _starter = 0
"""In a worker: its parent, and the process that asked for it. They differ with a `forkserver`."""
_is_of_torch = False
"""In a worker: whether it is one of a data loader."""
_once_blocked: set[int] = set()
"""What a new process may find blocked: the server of `forkserver` hands on what was blocked when it was started."""
_local = threading.local()
_Signals = tuple[int, Iterable[int], Iterable[int]]
"""The arguments of `live_on`."""


@functools.cache
def protect_workers(listened: Callable[[], Iterable[int]]) -> None:
    """Have the processes that `multiprocessing` starts from now on ignore `listened()`, as it is when each starts."""
    global _listened
    _listened = listened
    base, popen, spawning = cast(Any, (process.BaseProcess, popen_fork.Popen, util))
    base.start = _start(base.start)
    popen.terminate = _terminate(popen.terminate)
    spawning.spawnv_passfds = _spawn(spawning.spawnv_passfds)


def block() -> set[int]:
    """Block in this thread what a worker that is started now is to ignore. Returns what was blocked before."""
    numbers = _to_ignore()
    if numbers:
        numbers |= {RELEASE}
    _once_blocked.update(numbers)
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, numbers))


def live_on_forked() -> None:
    """In the child of a fork: if it is a worker, live on as one. What was blocked for the fork is blocked still."""
    ignored, _local.ignored = getattr(_local, "ignored", None), None
    if ignored is not None:
        live_on(os.getppid(), ignored, ())


def live_on(starter: int, ignored: Iterable[int], blocked: Iterable[int]) -> None:
    """Ignore signals while the process that asked for this one is alive, then unblock them. In the main thread."""
    global _ignored, _parent, _starter
    _ignored, _parent, _starter = frozenset(ignored), os.getppid(), starter
    for number in _ignored:
        signal.signal(number, _ignore)
    if _ignored:
        signal.signal(RELEASE, _end_by_parent)
        _outlast_torch()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


def _to_ignore() -> frozenset[int]:
    return frozenset(_listened()) | _ignored


def is_ignored(handler: object) -> bool:
    """Return whether a signal with this handler is one that a worker ignores for its parent's sake."""
    return handler is _ignore


class _OfItsClass:
    """Pickles a `Process` as its class does."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def __reduce__(self) -> Any:
        make, *rest = self._process.__reduce_ex__(2)
        # What pickle knows by its name, it would refuse for an object of another class.
        return _new if make is copyreg.__dict__["__newobj__"] else make, *rest


def _new(kind: type, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)


def _reduce(process: Any, signals: _Signals, protocol: int) -> tuple[Any, ...]:
    """Pickle a `Process` so that `live_on` runs when it has been unpickled, whatever its class pickles."""
    vars(process).pop("__reduce_ex__")
    return _live_on_unpickled, (_OfItsClass(process), signals)


def _live_on_unpickled(process: Any, signals: _Signals) -> Any:
    live_on(*signals)
    return process


def _start(start: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(start)
    def start_worker(self: Any) -> None:
        _local.ignored = _to_ignore()
        _once_blocked.update(_local.ignored | {RELEASE} if _local.ignored else ())
        # An attribute of the object: pickle asks it before its class.
        self.__reduce_ex__ = functools.partial(_reduce, self, (os.getpid(), _local.ignored, frozenset(_once_blocked)))
        try:
            start(self)
            self._popen.ignores = bool(_local.ignored)
        finally:
            vars(self).pop("__reduce_ex__", None)
            _local.ignored = None

    return start_worker


def _spawn(spawn: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(spawn)
    def spawn_blocked(*arguments: Any) -> int:
        before = block()
        try:
            return spawn(*arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return spawn_blocked


def _terminate(terminate: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(terminate)
    def end_worker(self: Any) -> None:
        # One signal: a second thread of the worker may take two at once, and its main thread would sleep on.
        if not getattr(self, "ignores", False):
            terminate(self)
        elif self.returncode is None:
            self._send_signal(RELEASE)
            _start_timer(_insist, self, RETRIES)

    return end_worker


def _start_timer(function: Callable[..., None], *arguments: Any) -> None:
    timer = threading.Timer(RETRY_SECONDS, function, arguments)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # the interpreter ends, and will wait for the worker
        time.sleep(RETRY_SECONDS)
        function(*arguments)


def _insist(worker: Any, retries: int) -> None:
    """End a worker that was told to end and has not reacted, as one that is stuck outside of Python."""
    with contextlib.suppress(OSError):
        if RELEASE in signals_in("SigIgn", worker.pid) or _is_zombie(worker.pid):
            return  # it has run its handler, and may need its time
    if worker.returncode is None:
        worker._send_signal(RELEASE if retries else signal.SIGKILL)
        if retries:
            _start_timer(_insist, worker, retries - 1)


def _is_zombie(pid: int) -> bool:
    return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


def signals_in(mask: str, pid: int | str = "self") -> set[int]:
    """Return the signals of a process that are set in a mask of `/proc`, such as "SigCgt".

    Raises:
        OSError: there is no such process, or no `/proc`.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == mask:
            return {number for number in range(1, signal.NSIG) if int(value, 16) >> (number - 1) & 1}
    return set()


def _ignore(number: int, frame: FrameType | None) -> None:
    if os.getppid() != _parent or not _is_alive(_starter):
        _die(number)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _end_by_parent(number: int, frame: FrameType | None) -> None:
    signal.signal(RELEASE, signal.SIG_IGN)  # seen by _insist
    if signal.getsignal(signal.SIGTERM) is not _ignore:  # the worker has a handler of its own
        signal.raise_signal(signal.SIGTERM)
    elif _is_of_torch:
        os._exit(0)  # as torch has its workers do: the parent takes every other code for an accident
    else:
        _die(signal.SIGTERM)


def _die(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _outlast_torch() -> None:
    """Ignore SIGTERM also in a loader's worker: torch sets a handler of its own there, by which it dies."""
    module = sys.modules.get(_TORCH_MODULE)
    set_handlers = getattr(module, _TORCH_FUNCTION, None)
    if set_handlers is None:
        return

    def set_handlers_and_ignore() -> None:
        global _is_of_torch
        set_handlers()
        _is_of_torch = True
        if signal.SIGTERM in _ignored:
            signal.signal(signal.SIGTERM, _ignore)

    setattr(module, _TORCH_FUNCTION, set_handlers_and_ignore)
