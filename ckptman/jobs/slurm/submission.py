"""Putting jobs of a chain into the queue: the first, the next, and all at once."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckptman.errors import ConfigError, ExistsError, NotFoundError, SchedulerError
from ckptman.forecast.save_costs import SHORTEST_LIMIT_SECONDS, warning_seconds
from ckptman.jobs.chain_record import CHAINS, Chain, JobRecord, Spec, Wish, find_chains, new_chain_dir
from ckptman.jobs.history import History
from ckptman.jobs.newest_checkpoints import named_by
from ckptman.jobs.slurm.batch_script import (
    BatchScript,
    array_tasks,
    batch_file,
    in_force,
    limit_seconds,
    parse,
    read_options,
    remarks,
    warned,
)
from ckptman.jobs.slurm.commands import QueueFullError, Slurm, UnreachableError, submission_environment
from ckptman.jobs.verdict import is_finished
from ckptman.storage.io.durable_files import DISK

MOST_PLACES = 20
"""Of checkpoints, taken from the arguments of a script."""
_SUBMITTED_SECONDS = 300.0
"""A chain that has no job by then was not submitted: who did so was killed."""
LOCK_TRIES, LOCK_SECONDS = 100, 0.05
"""For so long another submission is waited for, which makes the folder of its chain."""
_EXITS_EARLY = re.compile(r"--exit-(?:duration-in-mins|interval|signal-handler)\b")
"""Megatron's."""


class Submission(Wish):
    """What a user wants submitted. `another`: even if a chain of the same script goes on already."""

    script: Path
    another: bool = False


@dataclass(frozen=True)
class PreparedChain:
    """A chain that is not on disk yet, and what it will say."""

    chain: Chain
    spec: Spec
    script: BatchScript
    remarks: tuple[str, ...]
    """What the user should know."""
    another: bool
    """Whether it may go on beside a chain of the same script."""


def prepare(submission: Submission, folder: Path | None, environ: Mapping[str, str], now: float) -> list[PreparedChain]:
    """Check a submission, without a trace on disk or in the queue. One chain, or one for each task of an array.

    Raises: NotFoundError, ConfigError, ExistsError (a chain of the same script goes on).
    """
    try:
        text = submission.script.read_bytes().decode()  # with its line ends as they are
    except (FileNotFoundError, IsADirectoryError):
        raise NotFoundError(
            f"there is no batch script {submission.script}: name the file that you would give to sbatch, or run a "
            f"command on this machine with --scheduler local"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"{submission.script} is not a batch script, but binary: name the file you would give to sbatch"
        ) from None
    script = parse(text, str(submission.script))
    variables = {name: value for name, value in environ.items() if name.startswith("SBATCH_")}
    options = in_force(script.options, variables, read_options(list(submission.options)))
    tasks: list[int | None] = [*array_tasks(options["--array"])] if "--array" in options else [None]
    added = []
    if "--job-name" not in options:
        added.append(f"--job-name={submission.script.name}")
    if "--open-mode" not in options:
        added.append("--open-mode=append")
    if submission.mode == "requeue" and "--requeue" not in options:
        added.append("--requeue")
    workdir = Path.cwd()
    added += _places_of_output(options, workdir)
    signal = warned(options)
    places = tuple(named_by(text, submission.arguments, environ))[:MOST_PLACES]
    wish = submission.model_copy(update={"options": (*added, *submission.options)})
    spec = Spec(
        **wish.model_dump(include=set(Wish.model_fields)),
        script=str(submission.script.resolve()),
        interpreter=script.interpreter,
        sbatch_variables=variables,
        limit_seconds=limit_seconds(options.get("--time", "")),
        has_signal="--signal" in options,
        warned_seconds=signal.seconds if signal else None,
        excluded=options.get("--exclude", ""),
        places=places,
        workdir=str(workdir),
        begins_in=str(workdir / (options.get("--chdir") or "")),
        created_seconds=now,
    )
    base = (folder or new_chain_dir(now)).resolve()
    others = [] if submission.another else _chains_from(workdir)
    width = len(str(max((task for task in tasks if task is not None), default=0)))
    made = []
    for task in tasks:
        own, where = spec, base
        if task is not None:
            # An array of one: the number of the task is in its environment as ever.
            own = spec.model_copy(update={"array_task": task, "options": (*spec.options, f"--array={task}")})
            where = base.with_name(f"{base.name}-task{task:0{width}}")
        _refuse_twins(own, others)
        told = (*remarks(options), *_remarks_of(own, text))
        made.append(PreparedChain(Chain(where), own, script, told, submission.another))
    return made


def _remarks_of(spec: Spec, text: str) -> Iterator[str]:
    """Return what a user should know of how ckptman tells the progress of this program, and its end."""
    if spec.places and not spec.progress:
        yield f"checkpoints are looked for in {', '.join(spec.places)}; --progress names other places"
    if spec.first_arguments and not spec.places and not spec.progress:
        yield "--first is passed until there is a checkpoint: if ckptman does not save it, name it with --progress"
    if spec.done and is_finished(spec.done, spec.begins_in, os.environ)[0]:
        yield f"--done {spec.done} says that the run is finished already: the first attempt will be the last"
    if not spec.done and (found := _EXITS_EARLY.search(text)) is not None:
        yield f"exit code 0 means finished, and {found[0]} may exit with 0 earlier: say with --done what finished means"


def submit_chain(prepared: PreparedChain, slurm: Slurm, now: float) -> list[JobRecord]:
    """Make the folder of a chain, and put its first job into the queue, or as many as are wanted up front.

    Where the queue takes not all of them, they are fewer: the last of them has the next one follow.
    Raises: SchedulerError, ExistsError (a chain of the same script was submitted meanwhile).
    """
    chain, spec, script = prepared.chain, prepared.spec, prepared.script
    source = Path(spec.script)
    options = (*spec.options, *_warning(spec, None))
    folders = chain.folder, Path(spec.begins_in)
    batch = batch_file(script, source.name, sys.executable, *folders, options, spec.sbatch_variables)
    with _alone_in(Path(spec.workdir) / CHAINS):
        if not prepared.another:
            _refuse_twins(spec, _chains_from(Path(spec.workdir)))
        Chain.create(chain.folder, spec, source.read_bytes(), batch)
    try:
        jobs = [_submit(chain, slurm, 1, (), now)]
        for number in range(2, spec.upfront + 1):
            jobs.append(submit_next(chain, slurm, number - 1, jobs[-1].job_id, now))
    except BaseException as error:
        if isinstance(error, QueueFullError) and chain.jobs():
            chain.events.record("queue full", sync=True, wanted=spec.upfront, why=str(error))
            return chain.jobs()
        chain.turn("stopped", f"it could not be submitted: {error}", now)
        raise
    return jobs


def first_command(prepared: PreparedChain) -> str:
    """Return the command that puts the first job of a chain into the queue, as a shell would read it."""
    chain, spec = prepared.chain, prepared.spec
    return shlex.join(["sbatch", "--parsable", *spec.options, *_warning(spec, None), str(chain.batch_file), "1"])


def submit_next(chain: Chain, slurm: Slurm, number: int, job_id: str, now: float) -> JobRecord:
    """Have the job after job `number`, whose id is `job_id`, in the queue: the one that is there, or a new one.

    It starts when that job is over, however it ended. Raises: SchedulerError.
    """
    noted = chain.job(number + 1)
    if noted is not None:
        found = slurm.jobs([noted.job_id]).get(noted.job_id)
        if found is not None and not found.over:
            chain.put_unwritten()
            return noted
    return _submit(chain, slurm, number + 1, (f"--dependency=afterany:{job_id}",), now)


def submit_again(chain: Chain, slurm: Slurm, now: float) -> JobRecord:
    """Submit a new job for a chain of which none is left. Raises: SchedulerError."""
    jobs = chain.jobs()
    return _submit(chain, slurm, jobs[-1].number + 1 if jobs else 1, (), now)


def slurm_of(spec: Spec, say: Callable[[str], None] | None = None) -> Slurm:
    """Slurm as the jobs of a chain are submitted to it: from the same folder, with the user's own settings."""
    return Slurm(submission_environment(os.environ, spec.sbatch_variables), spec.workdir, say=say)


def avoid_nodes(chain: Chain, slurm: Slurm, jobs: Sequence[JobRecord], now: float) -> str:
    """Have jobs that wait leave out the nodes that were found bad, and no others. What was done, for people.

    "" if there is nothing to be done. Raises: SchedulerError.
    """
    history = History.read(chain)
    if not jobs or not any(end.bad_nodes for end in history.ends.values()):
        return ""
    nodes, why_not = _avoidable(history, slurm, jobs[0].number, now)
    for job in jobs:
        try:
            slurm.update(job.job_id, ExcNodeList=_excluded(chain.spec, nodes))
        except UnreachableError:
            raise
        except SchedulerError as error:  # that job is over, or begins just now
            chain.events.record("not told", job=job.job_id, why=str(error))
    return why_not or (f"left out: {_told(nodes)}" if nodes else "")


def _submit(chain: Chain, slurm: Slurm, number: int, options: Sequence[str], now: float) -> JobRecord:
    history = History.read(chain)
    spec = history.spec
    # Of two options of the same name the last one counts, and both before what the script says.
    given = (*spec.options, *_warning(spec, history.save_seconds), *options)
    nodes, _ = _avoidable(history, slurm, number, now)
    without = [f"--exclude={_excluded(spec, nodes)}"] if nodes else []
    job_id = slurm.submit(chain.batch_file, number, (*given, *without))
    record = JobRecord(number=number, job_id=job_id, time_seconds=now)
    with suppress(OSError):  # it is in the queue all the same, and claims its number when it begins
        chain.put_job(record)
    chain.events.record("submit", sync=True, job=number, job_id=job_id, options=[*options, *without])
    return record


def _avoidable(history: History, slurm: Slurm, number: int, now: float) -> tuple[dict[str, str], str]:
    """Return the nodes to be left out; none where the job would then wait for ever, and why. Raises:
    UnreachableError."""
    chain, nodes, spec = history.chain, history.avoided(now), history.spec
    if not nodes:
        return {}, ""
    if "/" in spec.excluded:
        return {}, f"--exclude={spec.excluded} is a file, which cannot be added to: {_told(nodes)}"
    refusal = slurm.why_never(chain.batch_file, number, (*spec.options, f"--exclude={_excluded(spec, nodes)}"))
    if not refusal:
        chain.events.record("avoided", nodes=nodes)
        return nodes, ""
    chain.events.record("not avoided", nodes=nodes, why=refusal)
    return {}, f"found bad, but without them it could not run now: {_told(nodes)}"


def _told(nodes: Mapping[str, str]) -> str:
    return ", ".join(f"{node} ({why})" for node, why in nodes.items())


def _excluded(spec: Spec, nodes: Mapping[str, str]) -> str:
    return ",".join([spec.excluded] * bool(spec.excluded) + list(nodes))


def _warning(spec: Spec, save_seconds: float | None) -> tuple[str, ...]:
    """Return the warning before the time limit, as long before as the saves of this run need; none beside the user's
    own."""
    if spec.has_signal or (spec.limit_seconds or 0) < SHORTEST_LIMIT_SECONDS:
        return ()
    longest = int((spec.limit_seconds or 0) // 4)
    return (f"--signal=B:USR2@{min(warning_seconds(save_seconds), longest)}",)


def _places_of_output(options: Mapping[str, str], workdir: Path) -> list[str]:
    """Options that say where output goes, where Slurm would misread it. Raises: NotFoundError (no such folder).

    A job whose output cannot be opened fails before its first line, and leaves no word of why.
    """
    found = []
    base = Path(workdir, options.get("--chdir") or "")
    for name in ("--output", "--error"):
        given = options.get(name) or ("slurm-%j.out" if name == "--output" else None)
        if given is None:
            continue
        folder = (base / given).parent
        if "%" not in str(Path(given).parent) and not folder.is_dir():
            raise NotFoundError(
                f"{name} {given}: there is no folder {folder}, so no job could start: mkdir -p {folder}"
            )
        if "%" in str(base) and not Path(given).is_absolute():  # it would be taken for a pattern
            found.append(f"{name}={str(base).replace('%', '%%')}/{given}")
    return found


def _chains_from(workdir: Path) -> list[tuple[Chain, Spec]]:
    return [(each, each.spec) for each in find_chains(workdir) if each.spec.scheduler == "slurm"]


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let nobody else begin a chain in a folder meanwhile, as far as it can be written to and has locks."""
    with ExitStack() as stack:
        with suppress(OSError):
            DISK.make_folders(folder)
            lock = stack.enter_context((folder / ".lock").open("ab"))
            for _ in range(LOCK_TRIES):
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(LOCK_SECONDS)
        yield


def _refuse_twins(spec: Spec, others: Sequence[tuple[Chain, Spec]]) -> None:
    for other, theirs in others:
        same = (theirs.script, theirs.arguments, theirs.array_task) == (spec.script, spec.arguments, spec.array_task)
        is_submitted = bool(other.jobs()) or spec.created_seconds - theirs.created_seconds < _SUBMITTED_SECONDS
        if same and is_submitted and other.state.state in ("active", "paused"):
            raise ExistsError(
                f"a chain of this script goes on already: {other.folder} ({other.state.state}). See it with ckptman "
                f"chain show, end it with ckptman chain cancel, or submit with --another where the two write to "
                f"different roots"
            )
