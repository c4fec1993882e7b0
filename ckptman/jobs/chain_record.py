"""A chain on disk: what was submitted, which jobs, which attempts, and whether it goes on. One of this machine has no
jobs and no script of its own.

    chain.json          what was submitted, and the limits; never changed
    script, batch.sh    the user's script as it was then, and what is submitted in its place
    state.json          active, paused, or how it ended and why
    job-0002.json       the second job of the chain, and its id
    attempt-0003.json   the third attempt: written at its start. A requeued job has several
    ended-0003.json     how it ended: written by the attempt, or by the next one if it was killed
    outcome-3.json      what the run itself says of its end
    outcome-3.json.node-n1   that node n1 is bad, and why: by the run, or by a health check of the user's
    events.jsonl        what was done, and why

Whoever makes a numbered file first has made it: two that do the same at once never both go on. It is seen as a whole.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from ckptman.errors import CorruptError, ExistsError, FormatVersionError, NotFoundError, masked
from ckptman.jobs.newest_checkpoints import Newest
from ckptman.policies.resubmit import Ending, Reaction
from ckptman.runtime.journal import Journal
from ckptman.runtime.notify import NOTIFY_ENV
from ckptman.runtime.outcome import ATTEMPT_ENV, CHAIN_ENV, OUTCOME_ENV
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.safe_open import read_regular

CHAINS = "ckptman-chains"
"""The folder that holds chains, in the directory where they were submitted."""
FORMAT = 1
SPEC = "chain.json"
_MOST_BYTES = 16 * 1024 * 1024
"""No record of a chain is larger."""

ChainState = Literal["active", "paused", "finished", "stopped", "cancelled"]
Mode = Literal["successor", "requeue", "upfront"]
M = TypeVar("M", bound=BaseModel)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Wish(_Record):
    """What a user may ask of a chain. `options`: those of sbatch, on its command line. `upfront`: so many jobs at once.

    `first_arguments`: of the script, until a checkpoint is saved. `progress`: where the checkpoints of a program are
    that does not save with ckptman. `done`: a file, a glob pattern or a command that tells that it is finished.
    `on`: reactions to causes of a crash, by name, in place of the usual ones. `exit_zero`: a job whose attempt stopped
    exits with 0, so that Slurm does not call it failed.
    `notify`: a command that is run with a note when the chain or an attempt ends.
    """

    arguments: tuple[str, ...] = ()
    first_arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    mode: Mode = "successor"
    upfront: int = 1
    crash_limit: int = 3
    stall_limit: int = 10
    progress: tuple[str, ...] = ()
    done: str = ""
    on: Mapping[str, Reaction] = {}
    exit_zero: bool = False
    notify: str = ""
    max_attempts: int | None = None
    max_walltime_seconds: float | None = None
    until_seconds: float | None = None


class Spec(Wish):
    """What was submitted.

    `scheduler`: `slurm`, or `local`, where `host`, `pid` and `pid_started` (unix seconds) say which process runs it.
    `limit_seconds`, `warned_seconds`, `excluded`: what the user's own --time, --signal and --exclude say, as far as it
    is understood; `has_signal`: whether there is a --signal. `places`: where the arguments of the script
    say that its checkpoints go. `workdir`, `begins_in`: where it was submitted, and where its jobs run (--chdir).
    """

    format: int = FORMAT
    scheduler: Literal["slurm", "local"] = "slurm"
    host: str = ""
    pid: int = 0
    pid_started: float = 0.0
    script: str
    interpreter: tuple[str, ...]
    sbatch_variables: Mapping[str, str] = {}
    limit_seconds: float | None = None
    has_signal: bool = False
    warned_seconds: int | None = None
    excluded: str = ""
    places: tuple[str, ...] = ()
    array_task: int | None = None
    workdir: str
    begins_in: str = ""
    created_seconds: float


class State(_Record):
    """Whether a chain goes on, and why not.

    `forgiven`: so many attempts no longer count, however they ended. `given_up`: of so many the checkpoints are gone,
    and somebody had the run go on all the same.
    """

    state: ChainState
    reason: str = ""
    time_seconds: float
    forgiven: int = 0
    given_up: int = 0


class JobRecord(_Record):
    """A job that was submitted for a chain."""

    number: int
    job_id: str
    time_seconds: float


class AttemptRecord(_Record):
    """An attempt that has begun. `restart`: how often its job was requeued before. `log`, `error_log`: the files of its
    output and, if that is another one, of its errors; "" if they are not files. `log_begin`, `error_begin`: their sizes
    before it."""

    number: int
    job: int
    job_id: str
    restart: int
    nodes: str
    host: str
    log: str
    log_begin: int = 0
    error_log: str = ""
    error_begin: int = 0
    workdir: str = ""
    begun_seconds: float


class EndRecord(_Record):
    """How an attempt ended. `step`: the last step it completed. `sequence`: the newest commit sequence under `root`
    after it; 0 if there is none. `committed`: it left a new checkpoint; None if that is unknown.

    `ended_seconds`: when the next attempt began, if nobody knows when this one ended; then `seen_seconds` is when it
    was last known to run. `newest`: the newest checkpoints that the program saved in its own way, by naming scheme.
    `bad_nodes`: nodes to avoid from now on, and why. `save_seconds`: the time of a save. `cause`, `evidence`,
    `reaction`: see `causes.Cause`; "" if nobody looked.
    """

    number: int
    ending: Ending
    reason: str
    returncode: int | None
    root: str
    step: int
    sequence: int
    committed: bool | None = True
    ended_seconds: float
    seen_seconds: float | None = None
    newest: Mapping[str, Newest] = {}
    bad_nodes: Mapping[str, str] = {}
    save_seconds: float | None = None
    cause: str = ""
    evidence: tuple[str, ...] = ()
    reaction: Reaction = "count"


class Chain:
    """The folder of a chain. Nothing is cached, as others write to it as well; only jobs that could not be written down
    are remembered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script, self.batch_file = folder / "script", folder / "batch.sh"
        self.events = Journal(folder / "events.jsonl")
        self._unwritten: dict[int, JobRecord] = {}

    @classmethod
    def create(cls, folder: Path, spec: Spec, script: bytes, batch_file: str) -> Chain:
        """Make the folder of a new chain of Slurm jobs. Raises: ExistsError, OSError."""
        DISK.make_folders(folder.parent)
        try:
            DISK.make_folder(folder)
        except FileExistsError:
            raise ExistsError(f"{folder} is there already: name a new folder for the chain") from None
        chain = cls(folder)
        DISK.write_file(chain.script, script)
        chain.script.chmod(0o755)
        DISK.write_file(chain.batch_file, batch_file.encode())
        chain._start(spec)
        return chain

    def start_local(self, spec: Spec) -> None:
        """Write down a chain of this machine, without secrets and in place of an earlier one. Raises: OSError."""
        for each in self.folder.iterdir():
            if re.fullmatch(r"(?:attempt|ended)-\d{4,}\.json", each.name):
                DISK.remove_file(each)
        words = {name: tuple(map(masked, getattr(spec, name))) for name in ("arguments", "places", "progress")}
        self._start(spec.model_copy(update={**words, "done": masked(spec.done), "notify": masked(spec.notify)}))

    def _start(self, spec: Spec) -> None:
        self._replace("state.json", State(state="active", time_seconds=spec.created_seconds))
        self._replace(SPEC, spec)  # last: a folder without it is not a chain

    @property
    def spec(self) -> Spec:
        """Raises: NotFoundError (not a chain), CorruptError, FormatVersionError."""
        found = self._read(SPEC, Spec)
        if found is None:
            raise NotFoundError(f"{self.folder} is not a chain of ckptman: ckptman chain list shows those there are")
        if found.format > FORMAT:
            raise FormatVersionError(str(self.folder / SPEC), found.format, FORMAT)
        return found

    @property
    def state(self) -> State:
        found = self._read("state.json", State)
        if found is None:
            raise CorruptError(f"{self.folder / 'state.json'} is gone: submit the script again; the run goes on")
        return found

    def turn(self, state: ChainState, reason: str, now: float, **changed: int) -> None:
        """Change the state, and note it. `changed`: other fields of `State`, which else stay as they are."""
        new = {"state": state, "reason": reason, "time_seconds": now, **changed}
        try:
            self._replace("state.json", self.state.model_copy(update=new))
        finally:  # the listeners get the event on a full disk, too
            self.events.record(state, sync=True, reason=reason)

    def jobs(self) -> list[JobRecord]:
        """All jobs, in the order of their numbers."""
        found = {job.number: job for job in self._all("job", JobRecord)}
        return [job for _, job in sorted({**found, **self._unwritten}.items())]

    def job(self, number: int) -> JobRecord | None:
        return self._unwritten.get(number) or self._read(_name("job", number), JobRecord)

    def claim(self, job: JobRecord) -> JobRecord:
        """Take the number of a job, unless another job has it. The one that has it."""
        return self._make(_name("job", job.number), job)

    def put_job(self, job: JobRecord) -> None:
        """Note a job, in place of one of the same number that is gone. Raises: OSError (it is remembered here)."""
        self._unwritten[job.number] = job
        self._replace(_name("job", job.number), job)
        del self._unwritten[job.number]

    def put_unwritten(self) -> None:
        """Note the jobs that could not be noted before, where there is room by now."""
        for job in list(self._unwritten.values()):
            with suppress(OSError):
                self.put_job(job)

    def attempts(self) -> list[AttemptRecord]:
        """All attempts that have begun, in order."""
        return self._all("attempt", AttemptRecord)

    def begin(self, attempt: AttemptRecord) -> AttemptRecord:
        """Note that an attempt begins; the one that has this number."""
        return self._make(_name("attempt", attempt.number), attempt)

    def beat(self, number: int) -> None:
        """Note that an attempt runs. Raises: OSError."""
        os.utime(self.folder / _name("attempt", number))

    def last_sign(self, attempt: AttemptRecord, now: float) -> float:
        """Return when an attempt was last known to run, in unix seconds."""
        try:
            last = (self.folder / _name("attempt", attempt.number)).stat().st_mtime
        except OSError:
            last = attempt.begun_seconds
        return max(attempt.begun_seconds, min(last, now))

    def ends(self) -> dict[int, EndRecord]:
        """Return how attempts ended, by their numbers, and in the order of these."""
        return {each.number: each for each in self._all("ended", EndRecord)}

    def end(self, record: EndRecord) -> EndRecord:
        """Note how an attempt ended; what was noted first counts."""
        return self._make(_name("ended", record.number), record)

    def outcome_path(self, number: int) -> Path:
        """Return where an attempt is asked to write its outcome."""
        return self.folder / f"outcome-{number}.json"

    def environ(self, number: int, notify: str) -> dict[str, str]:
        """Return what an attempt is told in its environment."""
        return {
            ATTEMPT_ENV: str(number),
            OUTCOME_ENV: str(self.outcome_path(number)),
            CHAIN_ENV: str(self.folder),
            NOTIFY_ENV: notify,
        }

    def _all(self, kind: str, model: type[M]) -> list[M]:
        pattern = re.compile(rf"{kind}-\d{{4,}}\.json")
        names = [each.name for each in self.folder.iterdir() if pattern.fullmatch(each.name)]
        names.sort(key=lambda name: (len(name), name))
        return [found for name in names if (found := self._read(name, model)) is not None]

    def _make(self, name: str, record: M) -> M:
        try:
            DISK.create_whole_file(self.folder / name, _data(record))
        except FileExistsError:
            return self._read(name, type(record)) or record
        DISK.sync_folder(self.folder)
        return record

    def _replace(self, name: str, record: BaseModel) -> None:
        DISK.replace_file(self.folder / name, _data(record))

    def _read(self, name: str, model: type[M]) -> M | None:
        path = self.folder / name
        try:
            return model.model_validate_json(
                read_regular(path, _MOST_BYTES, follow=True, remedy="bring it back from a copy")
            )
        except FileNotFoundError:
            return None
        except ValueError as error:  # pydantic's is one
            raise CorruptError(f"{path} is not what ckptman wrote: {str(error).splitlines()[0]}") from None


def find_chains(base: Path) -> Sequence[Chain]:
    """Return the chains that were submitted from a directory, oldest first. Raises: OSError."""
    folder = base / CHAINS
    if not folder.is_dir():
        return []
    return [Chain(each) for each in sorted(folder.iterdir()) if (each / SPEC).is_file()]


def new_chain_dir(now: float) -> Path:
    """Return a name for the folder of a new chain, with the time and our process id: `20261121-150300-4711`."""
    return Path.cwd() / CHAINS / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{os.getpid()}"


def is_running(spec: Spec) -> bool | None:
    """Return whether the process is alive that runs a chain of a machine; None where that is another machine."""
    import psutil

    if spec.host != socket.gethostname():
        return None
    with suppress(psutil.Error):
        return abs(psutil.Process(spec.pid).create_time() - spec.pid_started) < 1.0
    return False


def is_gone(spec: Spec, state: State) -> bool:
    """Return whether a chain of this machine has lost the process that ran it, which could not say so any more."""
    return spec.scheduler == "local" and state.state == "active" and is_running(spec) is False


def _name(kind: str, number: int) -> str:
    return f"{kind}-{number:04d}.json"


def _data(record: BaseModel) -> bytes:
    return record.model_dump_json(indent=1).encode() + b"\n"
