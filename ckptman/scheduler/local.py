"""Runs attempts as processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType

from ckptman.errors import ConfigError, SchedulerError
from ckptman.scheduler.chain import Say, patient
from ckptman.scheduler.process_tree import ATTEMPT_ID_ENV, ProcessTree, handles
from ckptman.scheduler.signal_queue import SignalQueue

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Passed on to the attempt; the chain ends with it."""
WARNING = (signal.SIGUSR1, signal.SIGUSR2)
"""Passed on to the attempt; the chain goes on with the next one."""
LOOK_SECONDS = 5.0


class LocalScheduler:
    """Runs the attempts of a chain here, each in a session of its own. A context manager, in the main thread.

    Signals to this process go to the command of the running attempt, not to its children: a launcher passes them on
    itself, and data loaders must not get them.
    SIGTERM, SIGINT and SIGHUP are passed on as they are, and the chain ends after this attempt. A second one of them
    kills every process of the attempt at once (SIGKILL).
    SIGUSR1 and SIGUSR2 are passed on if the command handles or ignores them. If not, they would kill it, and torchrun
    would leave its workers behind: it gets SIGTERM instead, which every launcher passes on. The chain goes on.

    Processes that an attempt leaves behind get SIGTERM, `grace_seconds` to save (torchrun gives its workers 30), and
    SIGKILL: two attempts never write to one root.
    """

    def __init__(self, say: Say, grace_seconds: float = 30.0) -> None:
        self._say = patient(say)
        self._grace_seconds = grace_seconds
        self._signals = SignalQueue((*ENDING, *WARNING))
        self._stop: signal.Signals | None = None
        self._kill = False

    def __enter__(self) -> LocalScheduler:
        self._stop, self._kill = None, False
        self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._signals.__exit__(kind, error, traceback)

    def stop_asked(self) -> signal.Signals | None:
        """Return the signal that asked the chain to end, or None. Between attempts there is nobody to pass it on to."""
        self._take(0.0)
        return self._stop

    def run_attempt(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        """Run `command` to its end; its exit code, or -n if signal n killed it. Its output goes where ours goes.

        Raises: SchedulerError (it cannot be started), ConfigError (no command).
        """
        outer_id, attempt_id = env.get(ATTEMPT_ID_ENV), uuid.uuid4().hex
        child = _start(command, {**env, ATTEMPT_ID_ENV: f"{outer_id}:{attempt_id}" if outer_id else attempt_id})
        tree = ProcessTree(child.pid, attempt_id)
        try:
            while not _has_ended(child.pid):
                for number in self._take(LOOK_SECONDS):
                    self._pass_on(number, child.pid)
                tree.look()
                if self._kill:
                    tree.kill()
        finally:
            tree.end(self._grace_seconds, hurry=self._hurry)
            returncode = child.wait()
        return returncode

    def _take(self, timeout_seconds: float) -> list[signal.Signals]:
        taken = self._signals.wait(timeout_seconds)
        for number in taken:
            if number in ENDING:
                self._kill = self._stop is not None
                self._stop = self._stop or number
        return taken

    def _pass_on(self, number: signal.Signals, pid: int) -> None:
        if self._kill:
            self._say(f"{number.name} once more: every process of the attempt is killed")
        elif number in ENDING:
            self._say(f"{number.name}: passed on, and the chain ends after this attempt; once more kills it at once")
            os.kill(pid, number)
        else:
            passed = number if handles(pid, number) else signal.SIGTERM
            self._say(f"{number.name}: passed on as {passed.name}; the chain goes on with the next attempt")
            os.kill(pid, passed)

    def _hurry(self) -> bool:
        self._take(0.05)
        return self._kill


def _has_ended(pid: int) -> bool:
    # Seen, but not reaped: until the tree has ended, nobody else may get this pid.
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    if not command:
        raise ConfigError("there is no command to run: put it after --, such as -- torchrun train.py")
    try:
        return subprocess.Popen(list(command), env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True)
    except FileNotFoundError:
        why = "no such program, or no such interpreter in its first line: activate its environment, or give its path"
    except PermissionError:
        why = "it may not be executed: chmod +x, or put its interpreter in front"
    except OSError as error:
        why = f"{error.strerror}: does it lack a first line such as #!/bin/bash?"
    raise SchedulerError(f"cannot start {command[0]!r}: {why}")
