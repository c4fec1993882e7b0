"""`ckptman submit SCRIPT`: a chain of Slurm jobs. `ckptman submit --scheduler local -- COMMAND`: the same here."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli.console import remark, say
from ckptman.cli.options import flag, option, parse_seconds
from ckptman.errors import ConfigError, SchedulerError, plain

if TYPE_CHECKING:
    from ckptman.jobs.slurm.submission import PreparedChain
    from ckptman.policies.resubmit import Reaction


def submit(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGUMENTS]",
            show_default=False,
            help="A batch script as for sbatch, and its arguments. With --scheduler local: -- COMMAND.",
        ),
    ],
    scheduler: Annotated[
        str, typer.Option("--scheduler", metavar="NAME", help="slurm: as jobs. local: here, one attempt after another.")
    ] = "slurm",
    max_attempts: Annotated[int | None, option("--max-attempts", "N", "End after N attempts.", least=1)] = None,
    max_walltime: Annotated[
        str | None, option("--max-walltime", "TIME", "End when the attempts took 36h or 10d.")
    ] = None,
    until: Annotated[str | None, option("--until", "DATE", "Begin no attempt after it: 2026-12-24T18:00.")] = None,
    crash_limit: Annotated[
        int,
        typer.Option("--crash-limit", metavar="N", min=1, help="End after N crashes in a row with no new checkpoint."),
    ] = 3,
    stall_limit: Annotated[
        int,
        typer.Option(
            "--stall-limit", metavar="N", min=1, help="End after N attempts of any kind with no new checkpoint."
        ),
    ] = 10,
    requeue: Annotated[
        bool, flag("--requeue", "Requeue the same job, where sbatch is forbidden on compute nodes.")
    ] = False,
    upfront: Annotated[int | None, option("--upfront", "N", "Put N jobs into the queue at once.", least=1)] = None,
    first: Annotated[
        list[str] | None, option("--first", "ARGUMENT", "For the script until a checkpoint is there.")
    ] = None,
    progress: Annotated[
        list[str] | None,
        option(
            "--progress", "PATH", "Checkpoints of a program that does not save with ckptman: a DIR, a FILE or a 'GLOB'."
        ),
    ] = None,
    done: Annotated[
        str | None,
        option(
            "--done",
            "WHAT",
            "A FILE, 'GLOB' or 'COMMAND ...' that tells that the run is finished (default: exit code 0).",
        ),
    ] = None,
    on: Annotated[
        list[str] | None,
        option(
            "--on", "CAUSE=REACTION", "Of a crash: again, elsewhere, wait, count or hold, as in oom=again. Or @FILE."
        ),
    ] = None,
    notify: Annotated[
        str | None,
        option(
            "--notify", "'COMMAND ...'", "A command that gets a note on each crash, bad node and stop, and on the end."
        ),
    ] = None,
    sbatch: Annotated[
        list[str] | None, option("--sbatch", "OPTION", "An option for sbatch, such as --nodes=4.")
    ] = None,
    exit_zero: Annotated[
        bool,
        flag("--exit-zero", "Exit with 0 after an attempt that saved and stopped: no mail of a failure."),
    ] = False,
    chain_dir: Annotated[
        Path | None,
        option("--chain-dir", "DIR", "The folder of the chain (default: a new folder under ./ckptman-chains)."),
    ] = None,
    another: Annotated[bool, flag("--another", "Even if a chain of the same script goes on already.")] = False,
    dry_run: Annotated[bool, flag("--dry-run", "Say what would be submitted, and leave no trace.")] = False,
) -> None:
    """Run a batch script again and again until its training is finished.

    Each job puts the next into the queue when it begins, and a finished run takes it out again.
    """
    from ckptman.jobs.chain_notes import check_notify

    for_both: dict[str, Any] = {
        "crash_limit": crash_limit,
        "stall_limit": stall_limit,
        "max_attempts": max_attempts,
        "progress": tuple(progress or ()),
        "done": done or "",
        "on": _reactions(on or ()),
        "notify": check_notify(notify),
    }
    now = time.time()
    if scheduler == "local":
        unknown = {
            "--max-walltime": max_walltime,
            "--until": until,
            "--requeue": requeue,
            "--upfront": upfront,
            "--first": first,
            "--sbatch": sbatch,
            "--exit-zero": exit_zero,
            "--dry-run": dry_run,
        }
        if given := [name for name, value in unknown.items() if value]:
            raise ConfigError(f"{', '.join(given)}: for Slurm alone; leave it out with --scheduler local")
        from ckptman.jobs.chain_record import Wish, new_chain_dir
        from ckptman.jobs.local import run_chain

        folder = chain_dir or new_chain_dir(now)
        raise typer.Exit(run_chain(command, folder, _tell, Wish(**for_both)))
    if scheduler != "slurm":
        raise ConfigError(f"there is no scheduler {scheduler!r}; known: slurm, local")
    if requeue and upfront:
        raise ConfigError("--requeue runs one job again and again, --upfront submits many: choose one of them")
    from ckptman.jobs.slurm.submission import Submission, first_command, prepare, slurm_of, submit_chain

    submission = Submission(
        script=Path(command[0]),
        arguments=tuple(command[1:]),
        first_arguments=tuple(first or ()),
        options=tuple(sbatch or ()),
        exit_zero=exit_zero,
        mode="requeue" if requeue else "upfront" if upfront else "successor",
        upfront=upfront or 1,
        max_walltime_seconds=None if max_walltime is None else parse_seconds("--max-walltime", max_walltime),
        until_seconds=_date(until, now),
        another=another,
        **for_both,
    )
    made = prepare(submission, chain_dir, os.environ, now)
    for note in made[0].remarks:
        say(f"note: {note}")
    at_once = f", {upfront} at once" if upfront else ""
    for number, each in enumerate(made):
        if dry_run:
            say(f"would submit{at_once}: {first_command(each)}")
            continue
        try:
            jobs = submit_chain(each, slurm_of(each.spec, remark), now)
        except (SchedulerError, OSError) as error:
            raise _with_what_is_left(error, made[number:]) from error
        say(f"submitted job {jobs[0].job_id}" + (f" to {jobs[-1].job_id}" if len(jobs) > 1 else ""))
        if upfront and len(jobs) < upfront:
            say(f"note: the queue takes no more than {len(jobs)} for now: the others follow one after another")
        say(f"chain: {each.chain.folder}")
        if each is made[-1]:
            say(f"see it with: ckptman chain show {each.chain.folder.name}")


def _with_what_is_left(error: SchedulerError | OSError, left: Sequence[PreparedChain]) -> SchedulerError | OSError:
    """Of an array some tasks may be in the queue already, and go on: the error says which are not."""
    tasks = ",".join(str(each.spec.array_task) for each in left if each.spec.array_task is not None)
    return SchedulerError(f"{error}. Not submitted: --array={tasks}") if tasks else error


def _reactions(given: Sequence[str]) -> dict[str, Reaction]:
    """Read `--on`: each a reaction, or `@` and a file that holds one in each line. Raises: ConfigError."""
    from ckptman.jobs.causes import parse_reactions

    lines: list[str] = []
    for each in given:
        if each.startswith("@"):
            try:
                text = Path(each[1:]).read_text()
            except (OSError, UnicodeDecodeError) as error:
                cause = getattr(error, "strerror", None) or error
                why = f"--on {each}: the file cannot be read ({cause}): give one CAUSE=REACTION a line"
                raise ConfigError(why) from None
            lines += [line.partition("#")[0].strip() for line in text.splitlines()]
        else:
            lines.append(each)
    return parse_reactions([line for line in lines if line])


def _date(text: str | None, now: float) -> float | None:
    """Return unix seconds of a date, local time unless it names its zone. Raises: ConfigError."""
    if text is None:
        return None
    try:
        seconds = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(f"--until {text!r} is not a date: give it as 2026-12-24 or 2026-12-24T18:00") from None
    if seconds <= now:
        raise ConfigError(f"--until {text} is past: no attempt would begin")
    return seconds


def _tell(line: str) -> None:
    # Not the `say` of other verbs: a terminal that is gone must not end the chain.
    print(f"ckptman: {plain(line)}", flush=True)
