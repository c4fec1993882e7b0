"""A chain on this machine: its attempts one after another, as processes, until the run is finished."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckptman.errors import (
    EXIT_AGAIN,
    EXIT_OK,
    CkptmanError,
    CorruptError,
    ExistsError,
    NotFoundError,
    SchedulerError,
)
from ckptman.jobs.causes import Cause
from ckptman.jobs.evidence import NO_ROOT, logs_of, logs_of_this_process
from ckptman.jobs.newest_checkpoints import named_by
from ckptman.jobs.processes import ATTEMPT_ID_ENV, ENDING, ProcessTree, SignalQueue, handles, ignores
from ckptman.jobs.verdict import by_done, judge
from ckptman.runtime.outcome import this_node
from ckptman.storage.io.durable_files import DISK

if TYPE_CHECKING:  # pydantic
    from ckptman.jobs.chain_notes import Say
    from ckptman.jobs.chain_record import AttemptRecord, Wish
    from ckptman.jobs.history import History

LOOK_SECONDS = 5.0
GRACE_SECONDS = 30.0
"""What torchrun gives its workers to save."""
_TOLERATED = (CkptmanError, OSError)
"""Errors of the records, which keep no attempt from running."""


def run_chain(command: Sequence[str], chain_dir: Path, say: Say, wish: Wish | None = None) -> int:
    """Run `command` again and again until it is finished. Exit code 0: finished; 75: asked to stop, run it again.

    How an attempt ended is read from the outcome it wrote to `chain_dir`, and only without one from its exit code.
    `say` gets one line per attempt. `wish`: the limits of the chain; what is for Slurm alone is ignored.

    Raises: SchedulerError (a limit of crashes or stalls was reached, the last of `max_attempts` crashed, the
    checkpoints are gone, or the command cannot be started), ExistsError (`chain_dir` belongs to an earlier chain).
    Called by `ckptman submit --scheduler local`, in the main thread.
    """
    from ckptman.jobs.chain_notes import notes_of, patient, unrecorded

    tell = patient(say)
    chain_dir = chain_dir.resolve()  # an attempt may change its working directory
    DISK.make_folders(chain_dir)
    # An outcome of an earlier chain would be read as that of an attempt that died before it wrote one.
    if any(chain_dir.glob("outcome-*.json")):
        raise ExistsError(f"{chain_dir} holds the outcomes of an earlier chain: name a new folder, or remove this one")
    history = _new_history(command, chain_dir, wish)
    chain, spec = history.chain, history.spec
    with unrecorded(chain, "the chain", tell, _TOLERATED):
        chain.start_local(spec)
    code, reason = None, ""
    with notes_of(chain, spec.notify, tell):
        try:
            code, reason = _run_attempts(command, history, tell)
        except BaseException as error:
            reason = str(error) or type(error).__name__
            raise
        finally:
            with unrecorded(chain, "how the chain ended", tell, _TOLERATED):
                chain.turn("finished" if code == EXIT_OK else "stopped", reason, time.time())
    if code is None:
        raise SchedulerError(f"the chain ends: {reason}. Remove the cause and submit again")
    return code


def _new_history(command: Sequence[str], chain_dir: Path, wish: Wish | None) -> History:
    """Return the history of a new chain, which nothing is written of yet. Raises: ExistsError."""
    import psutil

    from ckptman.jobs.chain_record import Chain, Spec, State, Wish, is_running
    from ckptman.jobs.history import History

    chain, now = Chain(chain_dir), time.time()
    with suppress(NotFoundError, CorruptError):
        earlier = chain.spec
        if earlier.scheduler == "slurm" or (chain.state.state == "active" and is_running(earlier)):
            raise ExistsError(f"{chain_dir} is the folder of another chain: name a new one")
    wanted = (wish or Wish()).model_copy(update={"arguments": tuple(command[1:])})
    spec = Spec(
        **wanted.model_dump(),
        scheduler="local",
        host=socket.gethostname(),
        pid=os.getpid(),
        pid_started=psutil.Process().create_time(),
        script=command[0],
        interpreter=(),
        places=tuple(named_by("", command, os.environ)),
        workdir=str(Path.cwd()),
        created_seconds=now,
    )
    return History(chain, spec, State(state="active", time_seconds=now), [], {})


def _run_attempts(command: Sequence[str], history: History, tell: Say) -> tuple[int | None, str]:
    """Return the exit code of the chain, None if it failed, and why it ends. Raises: SchedulerError."""
    from ckptman.jobs.chain_notes import unrecorded
    from ckptman.jobs.history import end_record, note_end, outcome_of

    chain, spec = history.chain, history.spec
    with SignalQueue() as signals:
        scheduler = LocalScheduler(tell, signals)
        while (stop := scheduler.stop_asked()) is None:
            attempt = _next_attempt(history)
            history.attempts.append(attempt)
            with unrecorded(chain, "that an attempt began", tell, _TOLERATED):
                chain.begin(attempt)
            returncode = scheduler.run_attempt(command, {**os.environ, **chain.environ(attempt.number, spec.notify)})
            outcome = outcome_of(history, attempt, returncode, tell)
            verdict = judge(returncode, outcome, logs_of(attempt), scheduler.asked)
            verdict = by_done(verdict, outcome, spec.done, spec.workdir, os.environ)
            end = end_record(history, attempt, None, outcome, verdict, time.time(), returncode)
            history.add(end)
            following = history.following(time.time())
            if following.again or end.ending in ("finished", "stopped"):
                tell(following.reason)
            with unrecorded(chain, "how an attempt ended", tell, _TOLERATED):
                note_end(history, end)  # nothing of it is printed after this
            if end.ending == "finished":
                return EXIT_OK, end.reason
            if held := _held(history):
                tell(f"the chain ends, because it was {held}: submit again to continue from the newest checkpoint")
                return EXIT_AGAIN, held
            if gone := history.lost():
                return None, gone
            if end.ending == "stopped" and end.number == spec.max_attempts:
                return EXIT_AGAIN, f"no more than {end.number} attempts were allowed"
            if not following.again and scheduler.stop_asked() is None:
                if not history.root:
                    tell(NO_ROOT)
                return None, following.reason
            if end.reaction != "count" and following.delay_seconds > 0:
                tell(f"the next attempt starts in {following.delay_seconds:.0f} s")
                scheduler.pause(following.delay_seconds)
    tell(f"the chain ends, because {stop.name} asked for it: submit again to go on from the newest checkpoint")
    return EXIT_AGAIN, f"{stop.name} asked for it"


def _next_attempt(history: History) -> AttemptRecord:
    from ckptman.jobs.chain_record import AttemptRecord

    return AttemptRecord(
        number=len(history.attempts) + 1,
        job=0,
        job_id=os.environ.get("SLURM_JOB_ID", ""),
        restart=0,
        nodes=this_node(os.environ),
        host=socket.gethostname(),
        **logs_of_this_process(),
        begun_seconds=time.time(),
    )


def _held(history: History) -> str:
    """Return why no further attempt is to start; "": nobody has asked for that."""
    with suppress(*_TOLERATED):
        state = history.chain.state
        return state.reason if state.state == "paused" else ""
    return ""


class LocalScheduler:
    """Runs the attempts of a chain here, each in a session of its own.

    Signals to this process go to the command of the running attempt, not to its children: a launcher passes them on
    itself, and data loaders must not get them.
    SIGTERM, SIGINT and SIGHUP are passed on as they are, and the chain ends after this attempt. A second one of them
    kills every process of the attempt at once (SIGKILL).
    SIGUSR1 and SIGUSR2 are passed on if the command handles or ignores them. If not, they would kill it, and torchrun
    would leave its workers behind: it gets SIGTERM instead, which every launcher passes on. The chain goes on.

    Processes that an attempt leaves behind get SIGTERM, `GRACE_SECONDS` to save, and SIGKILL: two attempts never write
    to one root.
    """

    def __init__(self, say: Say, signals: SignalQueue) -> None:
        self._say, self._signals = say, signals
        self._stop: signal.Signals | None = None
        self._kill = False
        self.asked: Cause | None = None
        """Why the attempt that ran last was asked to stop: the last signal that was passed on to it."""

    def stop_asked(self) -> signal.Signals | None:
        """Return the signal that asked the chain to end, or None. Between attempts there is nobody to pass it on to."""
        self._take(0.0)
        return self._stop

    def pause(self, seconds: float) -> None:
        """Wait until the next attempt, or until somebody asks the chain to end."""
        until = time.monotonic() + seconds
        while self.stop_asked() is None and (left := until - time.monotonic()) > 0:
            self._take(min(left, LOOK_SECONDS))

    def run_attempt(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        """Run `command` to its end; its exit code, or -n if signal n killed it. Its output goes where ours goes.

        When this returns, no process of the attempt is alive. Raises: SchedulerError (it cannot be started).
        """
        self.asked = None
        outer_id, attempt_id = env.get(ATTEMPT_ID_ENV), uuid.uuid4().hex
        child = _start(command, {**env, ATTEMPT_ID_ENV: f"{outer_id}:{attempt_id}" if outer_id else attempt_id})
        tree = ProcessTree(child.pid, attempt_id)
        try:
            # Seen, but not reaped: until the tree has ended, nobody else may get this pid.
            while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                for number in self._take(LOOK_SECONDS):
                    self._pass_on(number, child.pid)
                tree.look()
                if self._kill:
                    tree.kill()
        finally:
            tree.end(GRACE_SECONDS, hurry=self._hurry)
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
            self.asked = _passed_on(number)
            os.kill(pid, number)
        else:
            passed = number if handles(pid, number) else signal.SIGTERM
            self._say(f"{number.name}: passed on as {passed.name}; the chain goes on with the next attempt")
            self.asked = None if ignores(pid, passed) else _passed_on(passed)
            os.kill(pid, passed)

    def _hurry(self) -> bool:
        self._take(0.05)
        return self._kill


def _passed_on(number: signal.Signals) -> Cause:
    return Cause("asked", f"{number.name} was passed on", (f"signal: {number.name}",), "again")


def _start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(list(command), env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True)
    except FileNotFoundError:
        why = "no such program, or no such interpreter in its first line: activate its environment, or give its path"
    except PermissionError:
        why = "it may not be executed: chmod +x, or put its interpreter in front"
    except OSError as error:
        why = f"{error.strerror}: does it lack a first line such as #!/bin/bash?"
    raise SchedulerError(f"cannot start {command[0]!r}: {why}")
