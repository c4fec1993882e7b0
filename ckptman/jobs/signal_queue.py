"""Signals as messages that the main loop reads."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading

from ckptman.errors import ConfigError

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Passed on to the attempt. A chain on this machine ends with it; Slurm sends them where it ends the job."""
WARNING = (signal.SIGUSR1, signal.SIGUSR2)
"""Passed on to the attempt; the chain goes on with the next one."""


class SignalQueue(contextlib.ExitStack):
    """Between enter and exit, signals to this process that end an attempt or warn it are queued, and read by `wait`.

    Python's wake-up pipe carries them, so nothing happens inside a handler and none is lost between two looks.
    The end of a child process (SIGCHLD) ends a wait too. What was ignored before (`nohup`) stays ignored.
    """

    def __enter__(self) -> SignalQueue:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("a chain passes signals on, which only the main thread can receive: run it there")
        with contextlib.ExitStack() as undo:
            self._pipe, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            undo.callback(os.close, self._pipe)
            undo.callback(os.close, write_end)
            undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write_end, warn_on_full_buffer=False))
            for number in (*ENDING, *WARNING, signal.SIGCHLD):
                previous = signal.getsignal(number)
                if number == signal.SIGCHLD or previous not in (signal.SIG_IGN, None):
                    undo.callback(signal.signal, number, previous or signal.SIG_DFL)
                    signal.signal(number, leave_it)
            self.push(undo.pop_all())
        return self

    def wait(self, timeout_seconds: float | None) -> list[signal.Signals]:
        """Return the signals that came, in order; empty when a child ended or the time is over."""
        if not select.select([self._pipe], [], [], timeout_seconds)[0]:
            return []
        came = os.read(self._pipe, 65536)
        return [signal.Signals(number) for number in came if number in (*ENDING, *WARNING)]


def leave_it(number: int, frame: object) -> None:
    """A handler that does nothing: the pipe carries the signal, or nobody reads it yet."""
