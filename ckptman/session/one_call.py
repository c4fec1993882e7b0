"""Calls of a Checkpointer come one at a time: two at once would exchange their messages with other ranks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ckptman.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


class RunningCall:
    """The call that is running on an object, if any."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.name, self.thread = "", 0


class _Called(Protocol):
    _running: RunningCall

    def _check_usable(self) -> None: ...


S = TypeVar("S", bound=_Called)


def one_at_a_time(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a method: while a decorated method of an object runs, all of them are refused with a ConfigError."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        running = self._running
        if not running.lock.acquire(blocking=False):
            self._check_usable()  # in a forked child, nothing runs that could be waited for
            raise _refusal(name, running)
        try:
            running.name, running.thread = name, threading.get_ident()
            return method(self, *args, **kwargs)
        finally:
            running.lock.release()

    return call


def _refusal(name: str, running: RunningCall) -> ConfigError:
    if running.thread == threading.get_ident():
        where = "from within it, by a signal handler, a policy, a hook or a state_dict()"
        remedy = "note there that a save is wanted, and call it between two steps"
    else:
        where = f"in thread {threading.current_thread().name!r}"
        remedy = "call it in the thread that trains; a save in the background needs no thread of yours"
    return ConfigError(f"{name}() is called while {running.name}() of the same Checkpointer runs, {where}: {remedy}")
