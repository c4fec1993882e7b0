"""Signals that ask a run to stop. The handler only sets a flag; the work is done at the next safe point of the loop."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from ckptman.errors import ConfigError
from ckptman.runtime import worker_signals
from ckptman.runtime.log import is_shown

if TYPE_CHECKING:
    from collections.abc import Callable

    Previous = Callable[[int, FrameType | None], Any] | int | None

REPEAT_SECONDS = 3.0
"""At a time limit a worker gets SIGTERM from Slurm, and again from torchrun, which got one too: that is one request."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STAY_IGNORED = (signal.SIGHUP, signal.SIGINT)
"""If ignored on entry. `nohup` and `&` ask for that; an ignored SIGTERM or SIGUSR2 is inherited from a `trap ''` in a
batch script, which was meant for the shell, and would cost the run everything since its last save."""
_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)


class SignalHandler:
    """Note the signals that ask this process to stop, inside a `with` block.

        with SignalHandler() as signals:
            for batch in batches:
                train_step(batch)
                if signals.requested:
                    break

    The first signal sets `received`. A second identical one, at least `repeat_seconds` later, does what it would have
    done without this block: it kills, raises KeyboardInterrupt, or calls the handler that was there before. One that
    comes sooner is the same request, because a launcher and what started it both pass a signal on.

    An enclosing SignalHandler sees every signal too. An ignored SIGHUP or SIGINT (`nohup`, `&`) stays ignored. A signal
    that a C library caught before Python started is left to it.

    Processes that `multiprocessing` starts inside the block, such as workers of data loaders, ignore these signals for
    as long as this process is there, however they are started; `terminate()` ends them. Other children get the handlers
    that were there before the block.

    Args:
        signals: which signals to note.
        repeat_seconds: a second identical signal that comes sooner than this is the same request.

    Attributes:
        signals: those it listens to.
        entered: whether it notes them now.
        received: the first signal that came, or None; readable after the block too.
        told: whether `requested` was True when it was asked for.

    Raises:
        ConfigError: a signal that cannot be caught; not in the main thread; entered twice.
    """

    def __init__(
        self, signals: Sequence[signal.Signals] = STOP_SIGNALS, *, repeat_seconds: float = REPEAT_SECONDS
    ) -> None:
        try:
            self.signals = tuple(signal.Signals(each) for each in signals)
        except ValueError as error:
            raise ConfigError(f"{error}: name signals as signal.SIGTERM, signal.SIGUSR2, ...") from None
        for each in self.signals:
            if each in _UNCATCHABLE:
                raise ConfigError(f"{each.name} cannot be caught by any process: leave it out of the signals")
        self.received: signal.Signals | None = None
        self.told = False
        self._repeat_seconds = repeat_seconds
        self._seen: dict[signal.Signals, float] = {}
        self._previous: dict[signal.Signals, Previous] = {}
        self._notice: tuple[int, str] | None = None
        self._is_over = self._is_passing_on = False

    @property
    def entered(self) -> bool:
        """Whether it notes signals now: inside its block, in the process that entered it."""
        return self in _entered

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for. Called once per step, on every rank."""
        self.told |= self.received is not None
        return self.received is not None

    def __enter__(self) -> SignalHandler:
        if self.entered:
            raise ConfigError("this SignalHandler is in use already: make a new one for an inner block")
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "signal handlers can only be set in the main thread: enter SignalHandler there, "
                "and hand it to the thread that trains (its flag can be read from any thread)"
            )
        _watch_children()
        found = {number: _in_use(signal.getsignal(number), number) for number in self.signals}
        self.received, self.told, self._is_over = None, False, False
        self._seen.clear()
        self._previous = {
            number: previous
            for number, previous in found.items()
            if previous is not None and not (previous is signal.SIG_IGN and number in _STAY_IGNORED)
        }
        _entered.append(self)
        try:
            for number in self._previous:
                signal.signal(number, self._on_signal)
        except BaseException:  # a signal that came may raise, as the handler for Ctrl-C does
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.entered:  # not in a forked child, where it is undone already
            _entered.remove(self)
            self._undo()

    @contextlib.contextmanager
    def announcing(self, text: str) -> Iterator[None]:
        """Write the first signal to standard error as soon as it comes, with `text` about what happens then."""
        if sys.__stderr__ is not None:
            with contextlib.suppress(OSError, ValueError):  # it is closed
                self._notice = sys.__stderr__.fileno(), text
        try:
            yield
        finally:
            self._notice = None

    def _undo(self) -> None:
        """Take this handler out of the chain of handlers, wherever it stands in it."""
        for number, previous in self._previous.items():
            above = next((each for each in _entered if each._previous.get(number) == self._on_signal), None)
            if above is not None:  # blocks need not end in the order in which they began
                above._previous[number] = previous
            elif signal.getsignal(number) != self._on_signal:
                self._is_over = True  # the handler that was set since may call this one
            else:
                try:
                    signal.signal(number, previous)
                except ValueError:  # not in the main thread
                    self._is_over = True

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        # Runs between any two bytecodes, perhaps inside a lock or a write: no logging, nothing that can block.
        number = signal.Signals(signum)
        now = time.monotonic()
        previous = self._previous[number]
        if self._is_over:
            self._pass_on(number, frame, previous)
            return
        again = number in self._seen and now - self._seen[number] >= self._repeat_seconds
        self._seen.setdefault(number, now)
        if self.received is None:
            self.received = number
            self._write_notice(number, previous)
        if callable(previous) and isinstance(getattr(previous, "__self__", None), SignalHandler):
            previous(signum, frame)  # the enclosing block counts for itself
        elif again:
            self._pass_on(number, frame, previous)

    def _pass_on(self, number: signal.Signals, frame: FrameType | None, previous: Previous) -> None:
        """Do what this signal would have done without this block."""
        if self._is_passing_on:  # the handler before this one calls it, as one that was set in an earlier block may
            return
        self._is_passing_on = True
        try:
            self._pass_on_once(number, frame, previous)
        finally:
            self._is_passing_on = False

    def _pass_on_once(self, number: signal.Signals, frame: FrameType | None, previous: Previous) -> None:
        is_installed = signal.getsignal(number) == self._on_signal
        if is_installed:
            signal.signal(number, previous)
        if callable(previous):
            previous(number, frame)
        elif is_installed or not self._is_over:
            signal.signal(number, previous)
            signal.raise_signal(number)

    def _write_notice(self, number: signal.Signals, previous: Previous) -> None:
        """Say that a signal came: it may be long until the loop is where it can log that. Past all buffers and locks,
        and only where there is room for it: a pipe that nobody reads would block."""
        if self._notice is None or not is_shown():
            return
        file, text = self._notice
        if previous in (signal.SIG_DFL, signal.default_int_handler):
            later = f", {self._repeat_seconds:g} s later or more," if self._repeat_seconds else ""
            text += f"; a second one{later} ends the process at once"
        with contextlib.suppress(OSError, ValueError):
            if select.select((), (file,), (), 0)[1]:
                os.write(file, f"{os.linesep * os.isatty(file)}ckptman: {number.name} received: {text}\n".encode())


def free_signals() -> tuple[list[signal.Signals], list[str]]:
    """Return the stop signals that nobody else in this process handles, and who handles the others.

    None are free outside the main thread, which alone can set handlers. SIGINT is not free in a notebook or an
    interactive shell, where it interrupts a cell.
    """
    if threading.current_thread() is not threading.main_thread():
        return [], ["signals are noted in the main thread alone, and this is another one"]
    is_typed = hasattr(sys, "ps1") or "ipykernel" in sys.modules
    caught: set[int] = set()
    with contextlib.suppress(OSError):
        caught = worker_signals.signals_in("SigCgt")
    free, taken = [], []
    for number in STOP_SIGNALS:
        handler = signal.getsignal(number)
        is_ours = isinstance(getattr(handler, "__self__", None), SignalHandler) or worker_signals.is_ignored(handler)
        if number == signal.SIGINT and is_typed:
            continue
        if handler in (signal.SIG_DFL, signal.SIG_IGN) and number in caught:
            taken.append(f"{number.name} is handled by a C library, such as faulthandler")
        elif is_ours or handler in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
            free.append(number)
        else:
            taken.append(f"{number.name} is handled by {_name_of(handler)}")
    return free, taken


def _in_use(handler: Previous, number: signal.Signals) -> Previous:
    """Return the handler, or the one before it if it is that of a SignalHandler whose block has ended."""
    while isinstance(owner := getattr(handler, "__self__", None), SignalHandler) and owner._is_over:
        handler = owner._previous[number]
    return handler


def _name_of(handler: object) -> str:
    function = getattr(handler, "__func__", handler)
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    return f"{module}.{name}" if module and name else "a library" if handler is None else repr(handler)


_entered: list[SignalHandler] = []
_forking = threading.local()


@functools.cache
def _watch_children() -> None:
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_undo_in_child)
    worker_signals.protect_workers(_listened)


def _listened() -> set[int]:
    """Return the signals that this process notes now."""
    return {number for each in _entered for number in each._previous}


def _hold() -> None:
    # Python forgets signals that reach a child before it has set itself up: they wait until the handlers are undone.
    _forking.mask = worker_signals.block()


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _undo_in_child() -> None:
    while _entered:
        _entered.pop()._undo()
    worker_signals.live_on_forked()
    _release()
