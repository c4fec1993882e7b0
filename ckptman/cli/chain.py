"""`ckptman chain list | show | cancel | pause | resume`: chains of Slurm jobs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import console
from ckptman.cli.help import Group, Verb
from ckptman.cli.options import AsJson, path_argument
from ckptman.errors import CkptmanError

if TYPE_CHECKING:
    from ckptman.scheduler.chain_record import AttemptRecord, Chain, EndRecord
    from ckptman.scheduler.slurm.commands import Slurm
    from ckptman.scheduler.slurm.control import ChainStatus

LINES_SHOWN = 20
_COLOURS = {"finished": "green", "stopped": "red", "cancelled": "red", "paused": "yellow"}

chain_app = typer.Typer(
    help="Chains of Slurm jobs: see them, hold them, end them.", cls=Group, rich_markup_mode=None, no_args_is_help=True
)
Name = Annotated[
    str | None,
    path_argument(
        "[CHAIN]", "Its folder, its name, or the id of one of its jobs (default: the newest one submitted from here)."
    ),
]


@chain_app.command("list", cls=Verb)
def list_chains(
    folder: Annotated[Path, path_argument("[DIR]", "Where they were submitted (default: here).")] = Path(),
    as_json: AsJson = False,
) -> None:
    """List the chains that were submitted from a directory."""
    from ckptman.scheduler.chain_record import find_chains

    chains = [(each, each.spec, each.state, each.attempts(), each.jobs()) for each in find_chains(folder.resolve())]
    if as_json:
        console.say_json(
            [
                {
                    "chain": str(chain.folder),
                    "script": spec.script,
                    "attempts": len(attempts),
                    "jobs": [job.job_id for job in jobs],
                    **state.model_dump(exclude={"forgiven"}),
                }
                for chain, spec, state, attempts, jobs in chains
            ]
        )
        return
    if not chains:
        console.say(f"no chain was submitted from {console.plain(folder.resolve())}")
        return
    now = time.time()
    rows = [
        (
            chain.folder.name,
            console.plain(Path(spec.script).name),
            str(len(attempts)),
            console.age(now - spec.created_seconds),
            jobs[-1].job_id if jobs else "-",
            _painted(state.state),
        )
        for chain, spec, state, attempts, jobs in chains
    ]
    console.say(
        *console.table(
            ("chain", "script", "attempts", "age", "last job", "state"), rows, "attempts age", drop=("last job", "age")
        )
    )


@chain_app.command("show", cls=Verb)
def show_chain(
    name: Name = None,
    times: Annotated[
        bool, typer.Option("--times", help="Also where the time went between the attempts, in seconds.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the attempts of a chain, how each ended, and what is in the queue."""
    from ckptman.scheduler.slurm.control import look

    chain, slurm = _find(name)
    _show(chain, look(chain, slurm), as_json)
    if times and not as_json:
        _show_times(chain)


@chain_app.command("cancel", cls=Verb)
def cancel_chain(name: Name = None) -> None:
    """End a chain. The attempt that runs gets SIGTERM, and the time that the cluster gives, to save."""
    from ckptman.scheduler.slurm.control import cancel

    _act(name, cancel)


@chain_app.command("pause", cls=Verb)
def pause_chain(name: Name = None) -> None:
    """Start no further attempt. The one that runs goes on to its end."""
    from ckptman.scheduler.slurm.control import pause

    _act(name, pause)


@chain_app.command("resume", cls=Verb)
def resume_chain(name: Name = None) -> None:
    """Let a chain go on that was paused, or that crashes or a limit have stopped."""
    from ckptman.scheduler.slurm.control import resume

    _act(name, resume)


def _find(name: str | None) -> tuple[Chain, Slurm]:
    from ckptman.scheduler.slurm.control import named
    from ckptman.scheduler.slurm.submission import slurm_of

    chain = named(name, Path.cwd())
    return chain, slurm_of(chain.spec)


def _act(name: str | None, what: Callable[[Chain, Slurm, float], ChainStatus]) -> None:
    chain, slurm = _find(name)
    _show(chain, what(chain, slurm, time.time()), False)


def _show(chain: Chain, seen: ChainStatus, as_json: bool) -> None:
    if as_json:
        from ckptman.scheduler.history import restart_gaps

        console.say_json(
            {
                "chain": str(chain.folder),
                "script": chain.spec.script,
                **seen.state.model_dump(exclude={"forgiven"}),
                "attempts": [_facts(each, seen.ends.get(each.number)) for each in seen.attempts],
                "pauses": [asdict(each) for each in restart_gaps(chain)],
                "queue": [{"number": record.number, "job_id": job.id, "state": job.state} for record, job in seen.live],
            }
        )
        return
    now = time.time()
    reason = console.plain(seen.state.reason) or "going on"
    console.say(f"{console.plain(chain.folder.name)}: {_painted(seen.state.state)}, {reason}")
    if seen.attempts:
        headers = ("attempt", "job", "nodes", "began", "took", "step", "ending")
        rows = [_row(each, seen.ends.get(each.number), now) for each in seen.attempts]
        console.say(*console.table(headers, rows, "attempt began took step", drop=("nodes", "took", "job")))
    for _, job in seen.live:
        why = f", {job.reason}" if job.waits and job.reason not in ("", "None") else ""
        console.say(f"job {job.id}: {job.state.lower()}{console.plain(why)}")
    if seen.state.state == "active" and not seen.live:
        console.say("nothing of it is in the queue: ckptman chain resume goes on with it")
    if seen.state.state == "stopped" and seen.attempts:
        _show_log(seen.attempts[-1])


def _row(attempt: AttemptRecord, end: EndRecord | None, now: float) -> tuple[str, ...]:
    took = (end.ended_seconds if end else now) - attempt.begun_seconds
    ending = f"{end.ending}: {end.reason}" if end else "not over, or killed a moment ago"
    return (
        str(attempt.number),
        attempt.job_id,
        console.plain(attempt.nodes) or "-",
        f"{console.age(now - attempt.begun_seconds)} ago",
        console.age(took),
        str(end.step) if end else "-",
        console.plain(ending),
    )


def _show_times(chain: Chain) -> None:
    from ckptman.scheduler.history import restart_gaps

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:,.1f}"

    found = restart_gaps(chain)
    if not found:
        console.say("", "seconds from the end of an attempt to the first step of the next: there is no second one yet")
        return
    console.say("", "seconds from the end of the attempt before to the end of the first step")
    headers = ("attempt", "queue", "start-up", "restore", "first-step", "total")
    rows = [
        (str(each.attempt), *map(seconds, (each.queue, each.start_up, each.restore, each.first_step, each.total)))
        for each in found
    ]
    console.say(*console.table(headers, rows, " ".join(headers)))


def _facts(attempt: AttemptRecord, end: EndRecord | None) -> dict[str, Any]:
    facts = attempt.model_dump(exclude={"sequence_before"})
    return {**facts, "end": end.model_dump(exclude={"number"}) if end else None}


def _show_log(attempt: AttemptRecord) -> None:
    """The last lines of the log of an attempt: as a rule, a traceback."""
    try:
        with open(attempt.log, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 16384))
            lines = log.read().decode(errors="replace").splitlines()[-LINES_SHOWN:]
    except (OSError, CkptmanError) as error:
        lines = [f"it cannot be read here: {error}"]
    title = f"log of attempt {attempt.number}: {console.plain(attempt.log)}"
    console.say("", title, *(f"  {console.plain(line)}" for line in lines))


def _painted(state: str) -> str:
    colour = _COLOURS.get(state)
    return console.paint(state, colour) if colour else state
