"""The processes of an attempt, wherever they went; signals, and how each process is asked to stop in its own way."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckptman.errors import ConfigError

if TYPE_CHECKING:
    import psutil

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Passed on to the attempt. A chain on this machine ends with it; Slurm sends them where it ends the job."""
WARNING = (signal.SIGUSR1, signal.SIGUSR2)
"""Passed on to the attempt; the chain goes on with the next one."""
ATTEMPT_ID_ENV = "CKPTMAN_ATTEMPT_ID"
"""Marks the processes of an attempt. Ids of chains inside chains are joined by a colon."""
KILL_SECONDS = 10.0
_LAUNCHERS_OF_STEPS = {"srun"}
"""Given SIGTERM, it kills its tasks at once. They get theirs from Slurm."""


class SignalQueue(ExitStack):
    """Between enter and exit, signals to this process that end an attempt or warn it are queued, and read by `wait`.

    Python's wake-up pipe carries them, so nothing happens inside a handler and none is lost between two looks.
    The end of a child process (SIGCHLD) ends a wait too. What was ignored before (`nohup`) stays ignored.
    """

    def __enter__(self) -> SignalQueue:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("a chain passes signals on, which only the main thread can receive: run it there")
        with ExitStack() as undo:
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


class ProcessTree:
    """The processes of an attempt.

    A process belongs if it carries the attempt's id in its environment, if it is in the session of the first process,
    if its parent belongs, or if it did at an earlier `look`. No one of these is enough: torchrun puts each worker in a
    session of its own, an orphan has lost its parent, and a process that sets its title overwrites its environment.
    `leader` must not have been reaped while this is used: its pid, and so its session's, could be given to a stranger.
    """

    def __init__(self, leader: int, attempt_id: str) -> None:
        self._leader, self._id = leader, attempt_id.encode()
        self._known: set[psutil.Process] = set()

    def look(self) -> set[psutil.Process]:
        """Return the members that are alive now; a zombie is not."""
        import psutil

        parents: dict[psutil.Process, int] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    parents[process] = process.ppid()
        members = {process for process in parents if process in self._known or self._is_marked(process.pid)}
        grew = True
        while grew:
            pids = {member.pid for member in members}
            children = {process for process, parent in parents.items() if parent in pids}
            grew = not children <= members
            members |= children
        self._known = members
        return set(members)

    def end(self, grace_seconds: float, hurry: Callable[[], bool]) -> None:
        """Leave no member alive. They get SIGTERM and time to save, until `hurry` (it waits a moment) is true.

        SIGTERM goes to the members whose parent is no member. The others hear of it from theirs, if it is meant for
        them: a launcher passes it on to its workers, a training process not to its data loaders.
        """
        members = self.look()
        pids = {member.pid for member in members}
        _send([member for member in members if _parent(member) not in pids], signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while any(_lives(member) for member in members) and time.monotonic() < deadline and not hurry():
            pass
        self.kill()

    def kill(self) -> None:
        """SIGKILL every member, and look again until none is left: one may have forked while we looked.

        A process that hangs in the kernel (a dead NFS) dies when it comes back from there; it is not waited for longer.
        """
        deadline = time.monotonic() + KILL_SECONDS
        while (members := self.look()) and time.monotonic() < deadline:
            _send(members, signal.SIGKILL)
            time.sleep(0.01)

    def _is_marked(self, pid: int) -> bool:
        mark = ATTEMPT_ID_ENV.encode() + b"="
        try:
            if os.getsid(pid) == self._leader:
                return True
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return any(each.startswith(mark) and self._id in each for each in variables)


def handles(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal, or ignores it; False if that cannot be known."""
    return _is_in_mask(pid, number, "SigCgt:", "SigIgn:")


def ignores(pid: int, number: signal.Signals) -> bool:
    """Return whether a process ignores a signal; False if that cannot be known."""
    return _is_in_mask(pid, number, "SigIgn:")


def _is_in_mask(pid: int, number: signal.Signals, *masks: str) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    found = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(masks)]
    return any(mask >> (number - 1) & 1 for mask in found)


def forward_stop(script: int, number: signal.Signals, steps: Callable[[], None] | None) -> str:
    """Hand a signal on to the processes below and including `script`, a process id. What was done, for people.

    A script that catches the signal gets it, and does the rest. Otherwise whoever on this node understands SIGTERM gets
    that, the topmost of each branch: torchrun passes it on to its workers, training does not to its data loaders, and
    bash, which would die of it, is left alone. `steps` has Slurm tell the tasks of `srun`; None where it has done so.
    """
    import psutil

    if handles(script, number):
        os.kill(script, number)
        return "handed on to the script, which catches it"
    told = []
    has_steps = False
    if steps is not None:
        steps()
        told.append("SIGTERM to the tasks of srun")
    try:
        left = [psutil.Process(script)]
    except psutil.Error:
        return "the script has ended"
    while left:
        process = left.pop()
        try:
            if process.name() in _LAUNCHERS_OF_STEPS:
                has_steps = True
                continue
            if handles(process.pid, signal.SIGTERM):
                process.send_signal(signal.SIGTERM)
                told.append(f"SIGTERM to {process.name()}")
            else:
                left += process.children()
        except psutil.Error:
            continue
    if told:
        return ", ".join(told)
    if has_steps:
        return "Slurm has sent it to the tasks of srun"
    return "no process of this job handles SIGTERM: Slurm kills it in KillWait seconds, 30 as a rule"


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    import psutil

    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)  # psutil looks at the start time first: never somebody else with the same pid


def _parent(process: psutil.Process) -> int | None:
    """Return who is the parent now: one may have died since `look`."""
    import psutil

    try:
        return process.ppid()
    except psutil.Error:
        return None


def _lives(process: psutil.Process) -> bool:
    import psutil

    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
