"""Signals as messages that the main loop reads."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Sequence

from ckptman.errors import ConfigError


class SignalQueue(contextlib.ExitStack):
    """Between enter and exit, `signals` sent to this process are queued, and read by `wait`.

    Python's wake-up pipe carries them, so nothing happens inside a handler and none is lost between two looks.
    The end of a child process (SIGCHLD) ends a wait too. What was ignored before (`nohup`) stays ignored.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        super().__init__()
        self._signals = tuple(signals)
        self._pipe = -1

    def __enter__(self) -> SignalQueue:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("a chain passes signals on, which only the main thread can receive: run it there")
        with contextlib.ExitStack() as undo:
            self._pipe, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            undo.callback(os.close, self._pipe)
            undo.callback(os.close, write_end)
            undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write_end, warn_on_full_buffer=False))
            for number in (*self._signals, signal.SIGCHLD):
                previous = signal.getsignal(number)
                if number == signal.SIGCHLD or previous not in (signal.SIG_IGN, None):
                    undo.callback(signal.signal, number, previous or signal.SIG_DFL)
                    signal.signal(number, _leave_it_to_the_pipe)
            self.push(undo.pop_all())
        return self

    def wait(self, timeout_seconds: float | None) -> list[signal.Signals]:
        """Return the signals that came, in order; empty when a child ended or the time is over."""
        if not select.select([self._pipe], [], [], timeout_seconds)[0]:
            return []
        return [signal.Signals(number) for number in os.read(self._pipe, 65536) if number in self._signals]


def _leave_it_to_the_pipe(signum: int, frame: object) -> None:
    pass
