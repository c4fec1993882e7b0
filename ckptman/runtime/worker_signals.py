"""Worker processes that live through a stop request.

torchrun, Slurm's steps and Ctrl-C in a terminal send a stop request to every process of a group: workers of data
loaders, pools and environments get it too. They would die, and the training would fail in the step that is to be saved.
So the processes that `multiprocessing` starts while a SignalHandler is in use ignore its signals for as long as their
parent is there. `terminate()` ends them as ever.

    start()      hands the signals to the new process, which begins with them blocked
    live_on()    runs first in it: ignore the signals, and unblock them
    terminate()  sends RELEASE in place of SIGTERM, which a worker ignores

Left alone are processes that were there before, plain forks, and programs (`subprocess`).
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from multiprocessing import popen_fork, process, util
from types import FrameType
from typing import Any, cast

RELEASE = signal.SIGURG
"""Ignored by a process that has no handler for it, and sent to groups by nobody."""
_TORCH_MODULE, _TORCH_FUNCTION = "torch.utils.data._utils.signal_handling", "_set_worker_signal_handlers"

_listened: Callable[[], Iterable[int]] = tuple
_ignored: frozenset[int] = frozenset()
"""In a worker: the signals that it ignores."""
_parent = 0
_once_blocked: set[int] = set()
"""What a new process may find blocked: the server of `forkserver` hands on what was blocked when it was started."""
_local = threading.local()


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
        live_on(ignored, ())


def live_on(ignored: Iterable[int], blocked: Iterable[int]) -> None:
    """Ignore signals while the parent is there, then unblock them. In the main thread."""
    global _ignored, _parent
    _ignored, _parent = frozenset(ignored), os.getppid()
    for number in _ignored:
        signal.signal(number, _ignore)
    if _ignored:
        signal.signal(RELEASE, _end_by_parent)
        _outlast_torch()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


def _to_ignore() -> frozenset[int]:
    return frozenset(_listened()) | _ignored


class _LiveOn:
    """What a spawned process unpickles with its `Process`, after it has imported the main module."""

    def __init__(self, *arguments: Iterable[int]) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return live_on, self._arguments


def _start(start: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(start)
    def start_worker(self: Any) -> None:
        _local.ignored = _to_ignore()
        _once_blocked.update(_local.ignored)
        self._ckptman = _LiveOn(_local.ignored, frozenset(_once_blocked))
        try:
            start(self)
            self._popen.ignores = bool(_local.ignored)
        finally:
            del self._ckptman
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
        if getattr(self, "ignores", False):
            self._send_signal(RELEASE)
        else:
            terminate(self)

    return end_worker


def _ignore(number: int, frame: FrameType | None) -> None:
    if os.getppid() != _parent:
        _die(number)


def _end_by_parent(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGTERM) is _ignore:
        _die(signal.SIGTERM)
    else:  # the worker has a handler of its own
        signal.raise_signal(signal.SIGTERM)


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
        set_handlers()
        if signal.SIGTERM in _ignored:
            signal.signal(signal.SIGTERM, _ignore)

    setattr(module, _TORCH_FUNCTION, set_handlers_and_ignore)
