"""Slurm through its own commands: arguments in, text out. Nothing is ever passed through a shell."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptman.errors import SchedulerError

CALL_SECONDS = 30.0
"""How long one call may take; a busy controller needs some of it."""
PATIENCE_SECONDS = 120.0
"""How long a controller that cannot be reached is asked again."""
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 1.0, 30.0
_FIELDS = "%A|%T|%r|%e|%o"
"""%A and not %i: a job that is one task of an array has an id of its own too."""
_NODE = re.compile(r"^NodeName=(?P<name>\S+) .*?\bState=(?P<state>\S+)(?:.*? Reason=(?P<reason>.*\S))?", re.MULTILINE)
_BAD_STATES = {"down", "fail", "failing", "error", "not_responding"}
_PASSING = (
    *("socket timed out", "unable to contact slurm", "connection refused", "connection timed out", "in standby"),
    *("zero bytes were transmitted", "transport endpoint", "communication connection", "message receive failure"),
    *("message send failure", "resource temporarily unavailable", "temporarily unable", "try again", "timed out"),
)
"""What a controller says, or is said of it, that comes right by itself."""
_FULL = ("submit limit", "maxsubmit", "job limit", "maxjobcount", "too many jobs", "job count limit")
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "SUSPENDED", "STOPPED", "CONFIGURING", "SIGNALING")
_OVER = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"),
    *("DEADLINE", "REVOKED"),
)
_LEFT_OUT = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "CKPTMAN_ATTEMPT", "CKPTMAN_OUTCOME")


class QueueFullError(SchedulerError):
    """The controller takes no more jobs of this user for now."""


class UnreachableError(SchedulerError):
    """No controller answered, for as long as it was asked."""


@dataclass(frozen=True)
class Job:
    """A job as `squeue` knows it. `ends`: when it did, or will at the latest. `command`: what was submitted, the
    path of the batch file and its arguments."""

    id: str
    state: str
    reason: str
    ends: str
    command: str

    @property
    def waits(self) -> bool:
        """Whether it is in the queue and does not run."""
        return self.state in _WAITING

    @property
    def runs(self) -> bool:
        """Whether its processes are there."""
        return self.state in _RUNNING

    @property
    def over(self) -> bool:
        """Whether it will not run any more."""
        return self.state in _OVER

    @property
    def told(self) -> str:
        """Its state, and the reason where there is one."""
        return self.state if self.reason in ("", "None") else f"{self.state}, {self.reason}"


@dataclass(frozen=True)
class Answer:
    """What a command came to. `code` is None where it took too long."""

    code: int | None
    out: str
    err: str

    @property
    def said(self) -> str:
        """Its own words, or as much as there is."""
        said = self.err.strip() or self.out.strip() or f"exit code {self.code}"
        return "; ".join(filter(None, map(str.strip, said.splitlines())))

    @property
    def passes(self) -> bool:
        """Whether the same call may well succeed later."""
        return self.code is None or any(each in self.said.lower() for each in _PASSING)

    @property
    def full(self) -> bool:
        """Whether the user has as many jobs in the queue as are allowed."""
        return any(each in self.said.lower().replace("_", "") for each in _FULL)


def call(command: Sequence[str], environ: Mapping[str, str], folder: str | None) -> Answer:
    """Run a command of Slurm, in a folder. Raises: SchedulerError where it is not installed."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CALL_SECONDS,
            stdin=subprocess.DEVNULL,
            env=dict(environ),
            cwd=folder,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"{command[0]} did not answer within {CALL_SECONDS:.0f} s: timed out")
    except FileNotFoundError as error:
        if error.filename != command[0]:
            raise SchedulerError(f"{folder} is gone, from where the chain was submitted: make it again") from None
        raise SchedulerError(
            f"{command[0]} is not on PATH: there is no Slurm here, or its module is not loaded. On a machine without "
            f"Slurm: ckptman submit --scheduler local -- COMMAND"
        ) from None
    except OSError as error:
        raise SchedulerError(f"{command[0]} cannot be started: {error.strerror}") from error
    return Answer(done.returncode, done.stdout, done.stderr)


def ask_queue(ids: Collection[str], environ: Mapping[str, str]) -> dict[str, Job] | None:
    """Return the jobs of some ids that Slurm knows; None where it cannot be asked now. It is asked once."""
    if not ids:
        return {}
    command = ("squeue", "-h", "-t", "all", "-j", ",".join(sorted(ids)), "-o", _FIELDS)
    try:
        answer = call(command, {**environ, "SLURM_TIME_FORMAT": "standard"}, None)
    except SchedulerError:
        return None
    if answer.code != 0 and "invalid job id" not in answer.said.lower():
        return None
    return {job.id: job for job in _parse(answer.out)}


def ended_jobs(ids: Collection[str], environ: Mapping[str, str]) -> dict[str, bool]:
    """Return of jobs, by id, whether they are over; nothing where Slurm cannot be asked now. It is asked once."""
    jobs = ask_queue(ids, environ)
    return {} if jobs is None else {id: id not in jobs or jobs[id].over for id in ids}


def submission_environment(environ: Mapping[str, str], sbatch: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to submit a job with from inside another one: no trace of that one, but where Slurm is.

    Otherwise the limits of this job, and the number of its restarts, would be taken for those of the next.
    `sbatch`: the SBATCH_* variables that the user had at the first submission.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(_LEFT_OUT) or name == "SLURM_CONF"}
    return {**kept, **sbatch}


class Slurm:
    """Asks the controller; again with back-off where it cannot be reached, and never submits twice.

    `environ` is what the commands get (see `submission_environment`), `folder` where they run: jobs begin there. `say`
    gets a line when the controller cannot be reached.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        folder: str | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] | None = None,
    ) -> None:
        # Settings of the user would change what squeue prints.
        self._environ = {**environ, "SLURM_TIME_FORMAT": "standard"}
        self._folder, self._sleep, self._say = folder, sleep, say

    def submit(self, batch_file: Path, number: int, options: Sequence[str]) -> str:
        """Submit a batch file with a number as its argument. The id of the job.

        A submission whose answer was lost may have been taken all the same: so before it is tried again the queue is
        searched for it. Raises: QueueFullError, UnreachableError, SchedulerError (refused; with the words of sbatch).
        """
        command = ("sbatch", "--parsable", *options, str(batch_file), str(number))
        answered = self._ask(*command, done=lambda: self._submitted(f"{batch_file} {number}")).strip()
        job_id = answered.splitlines()[-1].partition(";")[0] if answered else ""
        if not job_id.isdigit():
            raise SchedulerError(f"{shlex.join(command)} gave no job id, but {answered!r}: look with squeue")
        return job_id

    def why_never(self, batch_file: Path, number: int, options: Sequence[str]) -> str:
        """Return why such a job could not run on the nodes that there are now, in the words of sbatch; "" if it could.

        Nothing is submitted. Raises: UnreachableError.
        """
        try:
            self._ask("sbatch", "--test-only", *options, str(batch_file), str(number))
        except UnreachableError:
            raise
        except SchedulerError as error:
            return str(error)
        return ""

    def _submitted(self, command: str) -> str:
        """Return the id of the job of this user that runs a command and is not over; "" where there is none."""
        jobs = _parse(self._ask("squeue", "-h", "-t", "all", "-u", str(os.getuid()), "-o", _FIELDS))
        return next((job.id for job in jobs if job.command == command and not job.over), "")

    def jobs(self, ids: Sequence[str]) -> dict[str, Job]:
        """Return the state of jobs, by id. One that Slurm does not know, or no longer, is left out."""
        if not ids:
            return {}
        told = self._ask("squeue", "-h", "-t", "all", "-j", ",".join(ids), "-o", _FIELDS, fine="invalid job id")
        return {job.id: job for job in _parse(told)}

    def bad_nodes(self, nodes: str) -> dict[str, str]:
        """Return those of some nodes (`n[1-4]`, as Slurm writes them) that are down or do not answer, and what is
        known."""
        if not nodes:
            return {}
        found = {}
        for match in _NODE.finditer(self._ask("scontrol", "show", "node", nodes, "--oneliner")):
            states = match["state"].lower().replace("*", "+not_responding").split("+")
            if any(each in _BAD_STATES for each in states):
                found[match["name"]] = " ".join(filter(None, (match["state"], match["reason"])))
        return found

    def names_of(self, nodes: str) -> list[str]:
        """Return the names that `n[1-4]` stands for."""
        return self._ask("scontrol", "show", "hostnames", nodes).split() if nodes else []

    def cancel(self, ids: Sequence[str]) -> None:
        """End jobs: who runs gets SIGTERM and KillWait. One that is gone already is no error."""
        if ids:
            self._ask("scancel", *ids, fine="invalid job id")

    def signal_steps(self, job_id: str, name: str) -> None:
        """Send a signal to the tasks of a job, and not to its batch script."""
        self._ask("scancel", f"--signal={name}", job_id, fine="invalid job id")

    def is_left_alone(self, job_id: str) -> bool:
        """Return whether a job runs, and Slurm is not about to end it: then a signal to its batch script did not go to
        its tasks. Asked once; False if nobody answers. Raises: SchedulerError (no Slurm)."""
        answer = call(("scontrol", "show", "job", "--oneliner", job_id), self._environ, self._folder)
        state = re.search(r"\bJobState=(\S+)", answer.out)
        preempted = re.search(r"\bPreemptTime=(\S+)", answer.out)
        return bool(state and state[1] == "RUNNING" and (preempted is None or preempted[1] in ("None", "(null)")))

    def hold(self, job_id: str) -> None:
        self._ask("scontrol", "uhold", job_id)  # the kind that the owner may end, whoever asks for it

    def release(self, job_id: str) -> None:
        self._ask("scontrol", "release", job_id)

    def requeue(self, job_id: str) -> None:
        """Have a job run again under its own id."""
        self._ask("scontrol", "requeue", job_id)

    def update(self, job_id: str, **values: str) -> None:
        """Change a job that waits, such as StartTime="now+60"."""
        self._ask("scontrol", "update", f"JobId={job_id}", *(f"{name}={value}" for name, value in values.items()))

    def _ask(self, *command: str, fine: str | None = None, done: Callable[[], str] = str) -> str:
        """Return what a command prints. Raises: QueueFullError, UnreachableError, SchedulerError.

        `fine`: words that make a refusal no error. `done`: called before each further try; what it returns, if that is
        not empty, is the answer, because the try before was heard although its own answer was lost.
        """
        waited, delay = 0.0, FIRST_DELAY_SECONDS
        while True:
            answer = call(command, self._environ, self._folder)
            if answer.code == 0 or (fine is not None and fine in answer.said.lower()):
                return answer.out
            if "--parsable" in command and answer.full:
                raise QueueFullError(
                    f"sbatch takes no more jobs of yours for now: {answer.said}. Try again when one has ended"
                )
            if not answer.passes:
                raise SchedulerError(f"{command[0]} refused: {answer.said}. The command was: {shlex.join(command)}")
            if waited >= PATIENCE_SECONDS:
                raise UnreachableError(
                    f"no controller of Slurm answered {command[0]} for {waited:.0f} s: {answer.said}. Try again later"
                )
            if self._say is not None and not waited:
                self._say(f"Slurm does not answer ({answer.said}): trying again for {PATIENCE_SECONDS:.0f} s")
            self._sleep(delay)
            waited, delay = waited + delay, min(2 * delay, LONGEST_DELAY_SECONDS)
            if already := done():
                return already


def _parse(text: str) -> list[Job]:
    rows = (line.split("|", 4) for line in text.splitlines())
    return [Job(*map(str.strip, row)) for row in rows if len(row) == 5]
