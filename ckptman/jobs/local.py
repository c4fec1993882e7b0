"""A chain on this machine: its attempts one after another, as processes, until the run is finished."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptman.errors import EXIT_AGAIN, EXIT_OK, CkptmanError, CorruptError, ExistsError, RootError, SchedulerError
from ckptman.jobs.attempt_log import logs_of
from ckptman.jobs.causes import Cause, with_reaction
from ckptman.jobs.chain import Say, gone_text, judge, newest_sequence, passed_over_text, patient
from ckptman.jobs.finished import by_done
from ckptman.jobs.lost_outcome import NO_ROOT, find_outcome
from ckptman.jobs.process_tree import ATTEMPT_ID_ENV, ProcessTree, handles, ignores
from ckptman.jobs.progress import Newest, find_left, later_of, named_by
from ckptman.jobs.signal_queue import ENDING, SignalQueue
from ckptman.jobs.verdict import crashed
from ckptman.policies.resubmit import Attempt, Reaction, counts_as_saved, decide
from ckptman.runtime.notify import NOTIFY_ENV
from ckptman.runtime.outcome import ATTEMPT_ENV, CHAIN_ENV, OUTCOME_ENV, read_outcome
from ckptman.storage.io.durable_files import DISK

if TYPE_CHECKING:
    from ckptman.jobs.local_record import LocalRecord

LOOK_SECONDS = 5.0
GRACE_SECONDS = 30.0
"""What torchrun gives its workers to save."""


@dataclass(frozen=True)
class _Limits:
    """The options of a chain: see `run_chain`."""

    crash_limit: int
    max_attempts: int | None
    stall_limit: int | None
    progress: tuple[str, ...]
    done: str
    on: Mapping[str, Reaction]
    notify: str


def run_chain(
    command: Sequence[str],
    chain_dir: Path,
    say: Say,
    *,
    crash_limit: int = 3,
    max_attempts: int | None = None,
    stall_limit: int | None = None,
    progress: Sequence[str] = (),
    done: str = "",
    on: Mapping[str, Reaction] | None = None,
    notify: str = "",
) -> int:
    """Run `command` again and again until it is finished. Exit code 0: finished; 75: asked to stop, run it again.

    How an attempt ended is read from the outcome it wrote to `chain_dir`, and only without one from its exit code.
    `say` gets one line per attempt. `progress`: where the checkpoints of a program are that does not save with ckptman.
    `done`: a file, a glob pattern or a command that tells that it is finished. `on`: reactions to causes of a crash, by
    name, in place of the usual ones. `notify`: a command that is run with a note at each end.

    Raises: SchedulerError (`crash_limit` attempts in a row crashed with no new checkpoint, or `stall_limit` ended so in
    whatever way, the last of `max_attempts` crashed, the checkpoints are gone, or the command cannot be started),
    ExistsError (`chain_dir` belongs to an earlier chain).
    Called by `ckptman submit --scheduler local`, in the main thread.
    """
    tell, since_seconds = patient(say), time.time()
    chain_dir = chain_dir.resolve()  # an attempt may change its working directory
    DISK.make_folders(chain_dir)
    # An outcome of an earlier chain would be read as that of an attempt that died before it wrote one.
    if any(chain_dir.glob("outcome-*.json")):
        raise ExistsError(f"{chain_dir} holds the outcomes of an earlier chain: name a new folder, or remove this one")
    from ckptman.jobs.chain_notes import notes_of
    from ckptman.jobs.local_record import LocalRecord

    record = LocalRecord(chain_dir, command, tell, since_seconds, crash_limit, max_attempts)
    with notes_of(record.chain, notify, tell):
        try:
            limits = _Limits(crash_limit, max_attempts, stall_limit, tuple(progress), done, on or {}, notify)
            code, reason = _run_attempts(command, chain_dir, tell, record, limits)
        except BaseException as error:
            record.turn("stopped", str(error) or type(error).__name__)
            raise
        record.turn("finished" if code == EXIT_OK else "stopped", reason)
    if code is None:
        raise SchedulerError(f"the chain ends: {reason}. Remove the cause and submit again")
    return code


def _run_attempts(
    command: Sequence[str],
    chain_dir: Path,
    tell: Say,
    record: LocalRecord,
    limits: _Limits,
) -> tuple[int | None, str]:
    """Return the exit code of the chain, None if it failed, and why it ends. Raises: SchedulerError."""
    since_seconds = time.time()
    attempts: list[Attempt] = []
    workdir = Path.cwd()
    places = named_by("", command, os.environ)
    newest: dict[str, Newest] = {}
    root, sequence = "", 0
    crashed_before: Cause | None = None
    with SignalQueue() as signals:
        scheduler = LocalScheduler(tell, signals)
        while (stop := scheduler.stop_asked()) is None:
            number = len(attempts) + 1
            outcome_file = chain_dir / f"outcome-{number}.json"
            marks = {
                ATTEMPT_ENV: str(number),
                OUTCOME_ENV: str(outcome_file),
                CHAIN_ENV: str(chain_dir),
                NOTIFY_ENV: limits.notify,
            }
            record.begin(number)
            begun_seconds = time.time()
            returncode = scheduler.run_attempt(command, {**os.environ, **marks})
            try:
                outcome = read_outcome(outcome_file)
            except CorruptError as error:
                outcome = None
                tell(f"{error}; going by the exit code")
            if outcome is None:
                outcome = find_outcome(workdir, [root], begun_seconds, returncode)
            asked = scheduler.passed_on
            ending, reason = judge(returncode, outcome, f"{asked.name} was passed on" if asked else "")
            cause = None
            if ending == "crashed":
                verdict = crashed(outcome, reason, logs_of(record.attempt), {})
                ending, reason, cause = verdict.ending, verdict.reason, verdict.cause
            if outcome is None or outcome.state == "running":
                ending, reason = by_done(limits.done, str(workdir), os.environ, ending, reason)
            root_before, root = root, outcome.root if outcome else root
            before = sequence
            try:
                sequence = newest_sequence(root, since_seconds) if root else before
            except RootError as error:
                tell(f"{error}; counted as no progress")
            with suppress(CkptmanError, OSError):
                if root and ending != "finished" and (why := passed_over_text(root)):
                    reason = f"{reason}; {why}"
            is_known = bool(root) or any(each.has_saved for each in attempts)
            at = () if root else places
            left = find_left(limits.progress, at, workdir, newest, begun_seconds, since_seconds, is_known=is_known)
            newest = later_of(newest, left.newest)
            has_saved = True if root and sequence != before else left.has_saved
            if ending != "finished" and left.note:
                reason = f"{reason}; {left.note}"
            seconds = time.time() - begun_seconds
            if cause is not None and ending == "crashed":
                is_saved, any_saved = counts_as_saved(has_saved, seconds), any(each.has_saved for each in attempts)
                cause = with_reaction(cause, limits.on, crashed_before, is_saved, any_saved)
            crashed_before, reaction = cause, cause.reaction if cause else "count"
            attempts.append(Attempt(number, ending, reason, has_saved, seconds, reaction))
            following = decide(attempts, limits.crash_limit, limits.max_attempts, limits.stall_limit)
            if following.again or ending in ("finished", "stopped"):
                tell(following.reason)
            record.end(attempts[-1], returncode, outcome, sequence, left, cause)  # nothing of it is printed after this
            if ending == "finished":
                return EXIT_OK, reason
            if held := record.held():
                tell(f"the chain ends, because it was {held}: submit again to continue from the newest checkpoint")
                return EXIT_AGAIN, held
            if before and root == root_before and not sequence and not newest_sequence(root):
                return None, gone_text(root)
            if ending == "stopped" and number == limits.max_attempts:
                return EXIT_AGAIN, f"no more than {number} attempts were allowed"
            if not following.again and scheduler.stop_asked() is None:
                if not root:
                    tell(NO_ROOT)
                return None, following.reason
            if reaction != "count" and following.delay_seconds > 0:
                tell(f"the next attempt starts in {following.delay_seconds:.0f} s")
                scheduler.pause(following.delay_seconds)
    tell(f"the chain ends, because {stop.name} asked for it: submit again to go on from the newest checkpoint")
    return EXIT_AGAIN, f"{stop.name} asked for it"


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
        self.passed_on: signal.Signals | None = None
        """The last signal that was passed on to the attempt that ran last."""

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
        self.passed_on = None
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
            self.passed_on = number
            os.kill(pid, number)
        else:
            passed = number if handles(pid, number) else signal.SIGTERM
            self.passed_on = None if ignores(pid, passed) else passed
            self._say(f"{number.name}: passed on as {passed.name}; the chain goes on with the next attempt")
            os.kill(pid, passed)

    def _hurry(self) -> bool:
        self._take(0.05)
        return self._kill


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
