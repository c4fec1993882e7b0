"""The roots that Checkpointers of this process hold: given back also if one is lost without `close()`. And the calls of
a Checkpointer, which come one at a time: two at once would exchange their messages with other ranks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Concatenate, ParamSpec, Protocol, TypeVar

from ckptman.errors import ConfigError, warn_only
from ckptman.runtime.log import tell


class OpenRoot:
    """A root that a Checkpointer of this process holds.

    Args:
        root: Its absolute path.
        end: The method that ends the Checkpointer because of an error.

    Attributes:
        in_block: Whether the Checkpointer is inside its `with` block.
        held: What gives the root back.
    """

    here: ClassVar[dict[Path, OpenRoot]] = {}

    def __init__(self, root: Path, end: Callable[[BaseException], None]) -> None:
        self.pid, self._root, self._end = os.getpid(), root, weakref.WeakMethod(end)
        self.in_block = False
        self.held = contextlib.ExitStack()
        self._thread: threading.Thread | None = None
        self.here[root] = self

    @classmethod
    def take_over(cls, root: Path) -> None:
        """End an earlier Checkpointer of this process that still holds the root, as when the cell of a notebook runs
        again. One inside its `with` block is in use and keeps the root."""
        opened = cls.here.get(root)
        if opened is None or opened.pid != os.getpid():
            return
        end = opened._end()
        if end is None:
            if opened._thread is not None:
                opened._thread.join()
        elif not opened.in_block:
            warn_only(
                f"{root}: an earlier Checkpointer of this process was not closed. It ends now, and this one takes "
                f"over. Use each in a `with` block, or call close()"
            )
            # Not an Exception: a crash would make what it was restored from a suspect.
            end(SystemExit("a later Checkpointer of the same process took over"))

    def close(self) -> None:
        """Give back the root, and all that comes with it."""
        try:
            self.held.close()
        finally:
            if self.here.get(self._root) is self:
                del self.here[self._root]

    def close_in_thread(self) -> None:
        """Give it back in a thread of its own: whichever thread collects garbage may be one that is ended."""

        def work() -> None:
            with contextlib.suppress(Exception):
                self.close()

        if threading.main_thread().is_alive():  # else the process ends, which gives back all
            self._thread = threading.Thread(target=work, name="ckptman-give-back", daemon=True)
            self._thread.start()


def tell_left_open(where: str, opened: OpenRoot, listening: contextlib.ExitStack) -> None:
    """Warn of a Checkpointer that was not closed, at exit or as soon as nobody has it any more."""
    if os.getpid() != opened.pid:
        return
    listening.close()
    opened.close_in_thread()
    if getattr(sys, "last_value", None) is None:  # else the process ends by an error, and that has been printed
        tell(
            f"the run in {where} ends without close(): it leaves no outcome for a chain to go by, and its last step "
            f"may not be saved. Use the Checkpointer in a `with` block, or call close()",
            logging.WARNING,
        )


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
