"""`python -m ckptman.jobs.attempt CHAIN NUMBER FOLDER`: one attempt of a chain, as the batch script of a job.

It runs on the first node of the job, outside any container. First it submits the next job, which waits until this one
is over, however it ends: so a dead node or a `kill -9` leaves a successor that already ages in the queue. Then it runs
the user's script, hands on signals, and at the end decides whether the chain goes on.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

from ckptman.errors import EXIT_OK, CkptmanError, CorruptError, FormatVersionError, SchedulerError
from ckptman.jobs.causes import Cause, asked_by
from ckptman.jobs.chain_notes import Say, notes_of, patient, unrecorded
from ckptman.jobs.chain_record import AttemptRecord, Chain, ChainState, JobRecord, Spec
from ckptman.jobs.evidence import NO_ROOT, logs_of, logs_of_this_process
from ckptman.jobs.history import History, end_record, note_end, outcome_of, settle
from ckptman.jobs.processes import ENDING, WARNING, SignalQueue, forward_stop, handles, leave_it
from ckptman.jobs.slurm.commands import Slurm, ask_queue
from ckptman.jobs.slurm.submission import avoid_nodes, slurm_of, submit_next
from ckptman.jobs.verdict import by_done, by_state, judge
from ckptman.policies.resubmit import Ending
from ckptman.runtime.outcome import Outcome, is_dead
from ckptman.storage.io.durable_files import DISK

TORCHRUN_ENV = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""How long torchrun lets its workers save after a SIGTERM; 30 seconds unless this says otherwise."""
TORCHRUN_SECONDS = 600
LOOK_SECONDS = 1.0
NEAR_SECONDS = 60.0
"""Slurm may send the signal of `--signal` so much earlier than it was asked to."""
RETRY_SECONDS = BEAT_SECONDS = 60.0
ROOT_LOOKS, ROOT_SECONDS = 3, 20.0
LATE_LOOKS, LATE_SECONDS = 20, 0.5
"""An outcome can be so much later than the end of the script."""


class Supervisor:
    """What the batch script of one attempt does. `environ` is that of the job."""

    def __init__(
        self,
        chain: Chain,
        job_number: int,
        environ: Mapping[str, str],
        slurm: Slurm,
        workdir: str,
        *,
        say: Say,
        replaces: str = "",
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._chain, self._job_number, self._environ, self._slurm = chain, job_number, environ, slurm
        self._workdir, self._say, self._clock, self._sleep = workdir, patient(say), clock, sleep
        self._spec: Spec = chain.spec
        self._job_id, self._replaces = environ["SLURM_JOB_ID"], replaces
        self._retry_at: float | None = None
        self._submitted: JobRecord | None = None
        self._asked: signal.Signals | None = None
        self._ending = False
        self._ended: Ending | None = None

    def run(self) -> int:
        """Begin, run the script to its end, and decide. The exit code of the script; 0 if there is nothing to do, or if
        the attempt was stopped and the user asked for 0 then."""
        with SignalQueue() as signals:
            try:
                attempt = self._begin()
            except (CorruptError, FormatVersionError) as error:  # so would the next job find them, and the next
                self._stop(f"its records cannot be read: {error}")
                return error.exit_code
            if attempt is None:
                return EXIT_OK
            returncode = self._run_script(signals, attempt)
            self._end(attempt, returncode)
            with suppress(OSError):
                self._chain.beat(attempt.number)  # so long the job held its nodes
        if self._spec.exit_zero and self._ended in ("stopped", "finished"):
            return EXIT_OK
        return returncode if returncode >= 0 else 128 - returncode

    def _begin(self) -> AttemptRecord | None:
        chain, now = self._chain, self._clock()
        own = owner = JobRecord(number=self._job_number, job_id=self._job_id, time_seconds=now)
        with self._unrecorded("that this job belongs to the chain"):
            owner = chain.claim(own)
            if owner.job_id in self._replaces.split(","):
                owner = own
                chain.put_job(own)
        if owner.job_id != self._job_id:
            self._say(f"job {owner.job_id} is job {self._job_number} of this chain: this one is left over, and leaves")
            return None
        if (state := chain.state).state != "active":
            self._say(f"the chain is {state.state}: {state.reason}. Nothing is run")
            return None
        number = len(chain.attempts()) + 1
        # Before anything else, such as a look at the disk of the run, which may hang.
        self._ensure_successor(number)
        history = History.read(chain)
        other = None
        with self._unrecorded("how earlier attempts ended"):
            other = settle(history, self._slurm, self._job_id, now, self._say)
        if other is not None:
            self._leave(f"attempt {other.number} of this chain still runs, as job {other.job_id}")
            return None
        decision = history.following(now)
        if history.ends and history.ends[max(history.ends)].ending == "finished":  # killed before it could say so
            self._turn("finished", decision.reason)
            self._cancel_successor()
            return None
        if why_not := self._look_for_the_root(history) if decision.again else decision.reason:
            self._stop(why_not)
            return None
        attempt = AttemptRecord(
            number=number,
            job=self._job_number,
            job_id=self._job_id,
            restart=int(self._environ.get("SLURM_RESTART_COUNT") or 0),
            nodes=self._environ.get("SLURM_JOB_NODELIST", ""),
            host=socket.gethostname(),
            **logs_of_this_process(),
            workdir=self._workdir,
            begun_seconds=now,
        )
        begun = attempt
        with self._unrecorded("that this attempt began"):
            begun = chain.begin(attempt)
        if begun != attempt:
            self._leave(f"attempt {number} of this chain has begun already")
            return None
        with suppress(OSError):  # of an attempt that could not be recorded
            DISK.remove_file(chain.outcome_path(number))
        chain.events.record("begin", sync=True, attempt=number, job_id=self._job_id, nodes=attempt.nodes)
        self._say(f"attempt {number}, job {self._job_id} on {attempt.nodes}")
        return attempt

    def _unrecorded(self, what: str) -> AbstractContextManager[None]:
        return unrecorded(self._chain, what, self._say)

    def _leave(self, why: str) -> None:
        """Leave the chain to the attempt that runs, which has its own successor follow."""
        self._say(f"{why}: this job leaves")
        if self._submitted is not None:
            with self._refusal("{}. The job that was to follow finds that there is nothing to do, and leaves"):
                self._slurm.cancel([self._submitted.job_id])

    def _look_for_the_root(self, history: History) -> str | None:
        """Return why there must be no attempt; looked at again where a mount may only be late."""
        for _ in range(ROOT_LOOKS - 1):
            if (why := history.lost()) is None:
                return None
            self._say(f"{why}. It is looked at again in {ROOT_SECONDS:.0f} s")
            self._sleep(ROOT_SECONDS)
        return history.lost()

    def _ensure_successor(self, attempt: int) -> None:
        """Have the next job in the queue. Where the queue is full or nobody answers, try again later."""
        self._retry_at = None
        spec = self._spec
        follows = spec.mode == "successor" or (spec.mode == "upfront" and self._job_number < spec.upfront)
        if not follows or (spec.max_attempts is not None and attempt >= spec.max_attempts):
            return
        try:
            noted = self._chain.job(self._job_number + 1)
            successor = submit_next(self._chain, self._slurm, self._job_number, self._job_id, self._clock())
            if successor != noted:
                self._submitted = successor
        except (SchedulerError, OSError) as error:
            self._say(f"there is no successor yet: {error}. While the script runs, this is tried every minute")
            self._chain.events.record("no successor", attempt=attempt, why=str(error))
            self._retry_at = self._clock() + RETRY_SECONDS

    def _run_script(self, signals: SignalQueue, attempt: AttemptRecord) -> int:
        spec = self._spec
        # Once there is a checkpoint, or an attempt has ended well, nobody is told any more where to start.
        given_up = self._chain.state.given_up
        ends = [end for number, end in self._chain.ends().items() if number > given_up]
        has_begun = any(
            end.committed or end.sequence or end.newest or end.ending in ("stopped", "finished") for end in ends
        )
        environ = {
            TORCHRUN_ENV: str(TORCHRUN_SECONDS),
            **self._environ,
            **self._chain.environ(attempt.number, spec.notify),
            "PWD": self._workdir,
        }
        arguments = spec.arguments if has_begun else (*spec.arguments, *spec.first_arguments)
        command = [*spec.interpreter, str(self._chain.script), *arguments]
        try:
            child = subprocess.Popen(command, env=environ, cwd=self._workdir, stdin=subprocess.DEVNULL)
        except OSError as error:
            self._say(f"the script cannot be started ({' '.join(spec.interpreter)} in {self._workdir}): {error}")
            return 127
        beat = time.monotonic()
        while child.poll() is None:
            if time.monotonic() - beat >= BEAT_SECONDS:
                beat = time.monotonic()
                with suppress(OSError):
                    self._chain.beat(attempt.number)
            for number in signals.wait(LOOK_SECONDS):
                self._hand_on(number, child.pid)
            if self._retry_at is not None and self._clock() >= self._retry_at:
                self._ensure_successor(attempt.number)
        return child.returncode

    def _hand_on(self, number: signal.Signals, pid: int) -> None:
        self._chain.events.record("signal", signal=number.name)
        self._asked = number
        if number in ENDING:
            self._ending = True
            if self._spec.mode == "requeue" and self._chain.state.state == "active":
                self._requeue()  # now: in a moment this process may be killed
        tell_tasks = partial(self._slurm.signal_steps, self._job_id, signal.SIGTERM.name)
        is_caught = handles(pid, number)
        with self._refusal(f"{number.name} could not be handed on to the tasks: {{}}"):
            self._say(f"{number.name}: {forward_stop(pid, number, None if number in ENDING else tell_tasks)}")
            # As a rule, Slurm sends it to the tasks as well; not if it is meant for the batch script alone.
            if number in ENDING and not is_caught and self._slurm.is_left_alone(self._job_id):
                tell_tasks()
                self._say(f"{number.name}: it was sent to the batch script alone, and is sent to the tasks, too")

    def _outcome(self, history: History, attempt: AttemptRecord, returncode: int) -> Outcome | None:
        """Return the outcome of an attempt; a signal may end its script while its ranks still save, and report then."""
        outcome = outcome_of(history, attempt, returncode, self._say)
        for _ in range(LATE_LOOKS):
            if outcome is None or outcome.state != "running" or is_dead(outcome):
                break
            self._sleep(LATE_SECONDS)
            outcome = outcome_of(history, attempt, returncode, self._say)
        return outcome

    def _end(self, attempt: AttemptRecord, returncode: int) -> None:
        chain, now, spec = self._chain, self._clock(), self._spec
        history = History.read(chain)
        outcome = self._outcome(history, attempt, returncode)
        logs = logs_of(attempt)
        verdict = judge(returncode, outcome, logs, self._who_asked(attempt, logs), self._nodes_that_failed)
        verdict = by_done(verdict, outcome, spec.done, self._workdir, self._environ)
        end = end_record(history, attempt, self._slurm, outcome, verdict, now, returncode)
        with self._unrecorded("how this attempt ended"):
            note_end(history, end)
        end = history.ends[attempt.number]
        self._ended = ending = end.ending
        is_recorded = end.number in chain.ends()
        if note := history.warned_too_late():
            self._say(note)
        decision = history.following(now)
        state = chain.state
        if decision.again or ending == "finished" or state.state != "active":
            self._say(decision.reason)
        if state.state != "active":
            self._say(f"the chain is {state.state}: {state.reason}. No further attempt starts")
            return
        if ending == "finished":
            self._turn("finished", decision.reason)
            self._cancel_successor()
        elif not is_recorded and ending == "crashed" and self._unrecorded_jobs() >= self._spec.crash_limit:
            self._stop(
                f"{self._unrecorded_jobs()} jobs in a row ended without a record, the last by a crash: {end.reason}"
            )
        elif not decision.again:
            if not history.root:
                self._say(NO_ROOT)
            self._stop(decision.reason)
        elif self._is_cancelled(attempt):
            self._stop("its jobs were cancelled (scancel)")
        elif self._spec.mode == "requeue":
            if not self._ending:
                self._requeue()
            self._avoid_bad_nodes(self._job_number)
        else:
            self._ensure_successor(attempt.number)  # somebody may have cancelled it
            following_job = chain.job(self._job_number + 1)
            if self._retry_at is None and following_job is not None:
                self._say(f"the chain goes on: job {following_job.job_id} is in the queue")
            elif self._retry_at is not None:
                following_job = None
                self._say(
                    "as no successor can be submitted, this job is requeued: ckptman submit --requeue always does so"
                )
                self._requeue()
            if decision.delay_seconds > 0 and following_job is not None:
                with self._refusal("the next attempt starts without a delay: {}"):
                    self._slurm.update(following_job.job_id, StartTime=f"now+{decision.delay_seconds:.0f}")
            self._avoid_bad_nodes(self._job_number + 1)

    def _unrecorded_jobs(self) -> int:
        """Return how many jobs in a row, this one included, have left no record of an end."""
        job_of = {each.number: each.job for each in self._chain.attempts()}
        recorded = [job_of[number] for number in self._chain.ends() if number in job_of]
        return self._job_number - max(recorded, default=0)

    def _who_asked(self, attempt: AttemptRecord, logs: Sequence[Sequence[str]]) -> Cause | None:
        """Return who asked this attempt to stop; None if nobody did."""
        if (asked := asked_by(logs, self._job_id)) is not None:
            return asked
        spec, left = self._spec, math.inf
        if spec.limit_seconds is not None:
            left = attempt.begun_seconds + spec.limit_seconds - self._clock()
        known = ask_queue([self._job_id], self._environ)
        own = known.get(self._job_id) if known else None
        if own is not None and (cause := by_state(own)) is not None:
            return cause
        if self._asked:
            near = ", near the time limit" if left < NEAR_SECONDS else ""
            name = "time-limit" if near else "asked"
            return Cause(name, f"{self._asked.name} from Slurm{near}", (f"signal: {self._asked.name}",), "again")
        if left < (spec.warned_seconds or 0) + NEAR_SECONDS and spec.warned_seconds is not None:
            line = f"--signal warned it {spec.warned_seconds} s before the time limit"
            return Cause("time-limit", line, (line,), "again")
        return Cause("time-limit", "the time limit", ("the clock",), "again") if left <= 0 else None

    def _is_cancelled(self, attempt: AttemptRecord) -> bool:
        """Return whether somebody has cancelled the next job, and then this one: the whole chain is meant."""
        following_job = self._chain.job(self._job_number + 1)
        limit = self._spec.limit_seconds
        near_limit = limit is not None and attempt.begun_seconds + limit - self._clock() < NEAR_SECONDS
        if following_job is None or self._asked not in ENDING or near_limit:
            return False
        with self._refusal("{}. The state of the next job is unknown"):
            known = self._slurm.jobs([following_job.job_id, self._job_id])
            own, after = (known.get(each) for each in (self._job_id, following_job.job_id))
            is_ended = own is not None and own.state in ("CANCELLED", "COMPLETING")
            return is_ended and after is not None and after.state == "CANCELLED"
        return False

    def _nodes_that_failed(self) -> dict[str, str]:
        """Return the nodes of this job that are down, and what Slurm knows of them."""
        try:
            return self._slurm.bad_nodes(self._environ.get("SLURM_JOB_NODELIST", ""))
        except SchedulerError as error:
            self._chain.events.record("nodes not known", why=str(error))
            return {}

    def _stop(self, reason: str) -> None:
        self._say(f"the chain ends: {reason}. ckptman chain why explains it; ckptman chain resume continues the chain")
        self._turn("stopped", reason)
        self._cancel_successor()

    def _turn(self, state: ChainState, reason: str) -> None:
        with self._unrecorded(f"that the chain is {state}"), suppress(CkptmanError):
            self._chain.turn(state, reason, self._clock())

    def _cancel_successor(self) -> None:
        with self._refusal("{}. What is left in the queue finds that the chain has ended, and leaves"):
            left = {self._submitted.job_id} if self._submitted is not None else set()
            with suppress(CorruptError):
                left |= {each.job_id for each in self._chain.jobs() if each.number > self._job_number}
            self._slurm.cancel(sorted(left))

    def _avoid_bad_nodes(self, first_job: int) -> None:
        following_jobs = [each for each in self._chain.jobs() if each.number >= first_job]
        with self._refusal("bad nodes could not be left out: {}"):
            if told := avoid_nodes(self._chain, self._slurm, following_jobs, self._clock()):
                self._say(told)

    def _requeue(self) -> None:
        try:
            self._slurm.requeue(self._job_id)
        except SchedulerError as error:
            if "pending" not in str(error).lower():
                self._say(f"{error}. Once this job has ended, ckptman chain resume continues the chain")
                return
        self._say("the chain goes on with this job, which is requeued")

    @contextmanager
    def _refusal(self, message: str) -> Iterator[None]:
        """Say what Slurm refused, in place of the braces, and what follows from that; the attempt goes on."""
        try:
            yield
        except SchedulerError as error:
            self._say(message.format(error))


def main(arguments: Sequence[str]) -> int:
    """Run one attempt. Arguments: the folder of the chain, the number of this job in it, where its script is to run,
    and the id of the job that this one replaces, if any."""
    for number in (*ENDING, *WARNING):  # the batch file has them ignored, so that none ends it before this line
        signal.signal(number, leave_it)
    chain = Chain(Path(arguments[0]).resolve())

    def say(text: str) -> None:
        print(f"ckptman: {text}", flush=True)

    try:
        replaces = arguments[3] if len(arguments) > 3 else ""
        slurm, workdir = slurm_of(chain.spec), arguments[2]
        with notes_of(chain, chain.spec.notify, say):
            return Supervisor(chain, int(arguments[1]), os.environ, slurm, workdir, say=say, replaces=replaces).run()
    except CkptmanError as error:
        say(f"Error: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
