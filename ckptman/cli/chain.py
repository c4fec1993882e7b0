"""`ckptman chain list | show | why | logs | cancel | pause | resume`: chains of Slurm jobs, and of this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import console
from ckptman.cli.help import Group, Verb
from ckptman.cli.options import AsJson, option, path_argument
from ckptman.errors import CkptmanError, ConfigError

if TYPE_CHECKING:
    from ckptman.jobs.chain_record import AttemptRecord, Chain, EndRecord
    from ckptman.jobs.slurm.commands import Job, Slurm
    from ckptman.jobs.slurm.control import ChainStatus

LINES_SHOWN = 20
MOST_COMMAND = 40
"""Characters of a script and its arguments in a list."""
_COLOURS = {"finished": "green", "stopped": "red", "cancelled": "red", "paused": "yellow"}

chain_app = typer.Typer(
    help="Chains of attempts, as Slurm jobs or on this machine: see them, follow them, hold them, end them.",
    cls=Group,
    rich_markup_mode=None,
    no_args_is_help=True,
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
    from ckptman.jobs.chain_record import find_chains, is_gone

    chains = [(each, each.spec, each.state, each.attempts(), each.jobs()) for each in find_chains(folder.resolve())]
    if as_json:
        console.say_json(
            [
                {
                    "chain": str(chain.folder),
                    "scheduler": spec.scheduler,
                    "script": spec.script,
                    "attempts": len(attempts),
                    "step": max((end.step for end in chain.ends().values()), default=0),
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
            console.plain(" ".join((Path(spec.script).name, *spec.arguments)))[:MOST_COMMAND],
            str(len(attempts)),
            _step(chain.ends()),
            console.age(now - spec.created_seconds),
            "local" if spec.scheduler == "local" else jobs[-1].job_id if jobs else "-",
            _painted("gone" if is_gone(spec, state) else state.state),
        )
        for chain, spec, state, attempts, jobs in chains
    ]
    console.say(
        *console.table(
            ("chain", "script", "attempts", "step", "age", "last job", "state"),
            rows,
            "attempts step age",
            drop=("last job", "age"),
        )
    )


@chain_app.command("show", cls=Verb)
def show_chain(
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Show the attempts of a chain, how each ended, and what is in the queue."""
    chain = _find(name)
    _show(chain, _seen(chain), as_json)


@chain_app.command("why", cls=Verb)
def explain_chain(
    name: Name = None,
    attempt: Annotated[
        int | None, option("--attempt", "N", "Explain attempt N (default: the last that ended).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain why an attempt ended, with the evidence, the reaction of the chain and the next command."""
    from ckptman.cli import chain_why

    chain = _find(name)
    chain_why.explain(chain, _seen(chain), attempt, as_json)


@chain_app.command("logs", cls=Verb)
def show_logs(
    name: Name = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Go on, also with the attempts that follow, until the chain has ended."),
    ] = False,
    attempt: Annotated[int | None, option("--attempt", "N", "Of this attempt (default: the last).")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", help="Begin with the last N lines.")] = 100,
) -> None:
    """Print the log of the last attempt, or follow the chain from one attempt to the next."""
    from ckptman.cli import chain_logs
    from ckptman.policies.parameters import check_count

    check_count("chain logs", "--lines", lines)
    chain_logs.show_logs(_find(name), attempt, lines, follow)


@chain_app.command("cancel", cls=Verb)
def cancel_chain(name: Name = None) -> None:
    """End a chain. The attempt that runs gets SIGTERM, and the time that the cluster gives, to save."""
    from ckptman.jobs.slurm.control import cancel

    _act(name, cancel)


@chain_app.command("pause", cls=Verb)
def pause_chain(name: Name = None) -> None:
    """Start no further attempt. The one that runs goes on to its end."""
    from ckptman.jobs.slurm.control import pause

    _act(name, pause)


@chain_app.command("resume", cls=Verb)
def resume_chain(
    name: Name = None,
    start_over: Annotated[
        bool, typer.Option("--start-over", help="Begin at step 0 if the checkpoints are gone.")
    ] = False,
) -> None:
    """Continue a chain that was paused, or that crashes or a limit have stopped."""
    from ckptman.jobs.slurm.control import resume

    _act(name, partial(resume, start_over=start_over))


def _find(name: str | None) -> Chain:
    from ckptman.jobs.slurm.control import named

    return named(name, Path.cwd())


def _seen(chain: Chain) -> ChainStatus:
    from ckptman.jobs.slurm.control import ChainStatus, glance

    if chain.spec.scheduler == "local":
        return ChainStatus.read(chain)
    return glance(chain, os.environ)


def _act(name: str | None, what: Callable[[Chain, Slurm, float], ChainStatus]) -> None:
    from ckptman.jobs.slurm.submission import slurm_of

    chain = _find(name)
    if (spec := chain.spec).scheduler == "local":
        raise ConfigError(
            f"{chain.folder} is not a chain of Slurm jobs: what runs it is process {spec.pid} on {spec.host}. "
            f"kill {spec.pid} there ends it when the attempt has saved; submitted again, it goes on"
        )
    _show(chain, what(chain, slurm_of(spec, console.remark), time.time()), False)


def _show(chain: Chain, seen: ChainStatus, as_json: bool) -> None:
    if as_json:
        console.say_json(
            {
                "chain": str(chain.folder),
                "scheduler": chain.spec.scheduler,
                "script": chain.spec.script,
                **seen.state.model_dump(exclude={"forgiven"}),
                "attempts": [_facts(each, seen.ends.get(each.number)) for each in seen.attempts],
                "queue": [{"number": record.number, "job_id": job.id, "state": job.state} for record, job in seen.live],
            }
        )
        return
    from ckptman.jobs.chain_record import is_gone

    now = time.time()
    console.say(f"{console.plain(chain.folder.name)}: {_painted(seen.state.state)}, {headline(chain, seen)}")
    if seen.attempts:
        headers = ("attempt", "job", "nodes", "began", "took", "step", "ending")
        running = {job.id for _, job in seen.running}
        is_slurm = chain.spec.scheduler == "slurm" and seen.is_known
        rows = [
            _row(each, seen.ends.get(each.number), now, is_over=is_slurm and each.job_id not in running)
            for each in seen.attempts
        ]
        right, drop = "attempt began took step", ("nodes", "took", "job")
        console.say(*console.table(headers, rows, right, drop=drop, width=console.page_width()))
    for _, job in seen.live:
        console.say(f"job {job.id}: {job.state.lower()}{console.plain(why_it_waits(seen, job))}")
    if (spec := chain.spec).scheduler == "local":
        if is_gone(spec, seen.state):
            console.say(f"process {spec.pid}, which ran it, is gone: submit the command again to go on")
        elif seen.state.state == "active":
            console.say(f"process {spec.pid} on {console.plain(spec.host)} runs it")
    elif not seen.is_known:
        console.say("Slurm does not answer: what is in the queue is unknown")
    if seen.state.state == "stopped" and seen.attempts and seen.attempts[-1].log:
        _show_log(seen.attempts[-1])


def headline(chain: Chain, seen: ChainStatus) -> str:
    """Return why a chain is in its state, or what an active one is doing."""
    if seen.state.state != "active" or chain.spec.scheduler == "local":
        return console.plain(seen.state.reason) or "running"
    if not seen.is_known or seen.running:
        return "running"
    if seen.waiting:
        return "waiting in the queue"
    return "but none of its jobs is in the queue: ckptman chain resume continues it"


def why_it_waits(seen: ChainStatus, job: Job) -> str:
    """Return why a job waits, and the command that helps; "" if there is nothing to say."""
    if not job.waits or job.reason in ("", "None"):
        return ""
    if job.reason == "JobHeldAdmin":
        return f", JobHeldAdmin: held by an administrator or by Slurm; scontrol release {job.id} lets it run"
    if job.reason == "JobHeldUser":
        return ", JobHeldUser: held; ckptman chain resume lets it run"
    if job.reason == "BeginTime":
        return f", BeginTime: {_pause(seen)}; scontrol update JobId={job.id} StartTime=now ends it"
    return f", {job.reason}"


def _pause(seen: ChainStatus) -> str:
    """Return how long the pause of a chain lasts after a crash, in words."""
    now = time.time()
    if seen.ends and (delay := seen.following(now).delay_seconds):
        left = max(0.0, seen.ends[max(seen.ends)].ended_seconds + delay - now)
        return f"a pause of {console.age(delay)} after a crash with no new checkpoint, {console.age(left)} of it left"
    return "Slurm starts it later, as after a requeue"


def _step(ends: Mapping[int, EndRecord]) -> str:
    """Return the highest step that an attempt reported, or that is in the name of its newest checkpoint."""
    return f"{step:,}" if (step := max((end.step for end in ends.values()), default=0)) else "-"


def _row(attempt: AttemptRecord, end: EndRecord | None, now: float, *, is_over: bool) -> tuple[str, ...]:
    took = (end.ended_seconds if end else now) - attempt.begun_seconds
    ending = f"{end.ending}: {end.reason}" if end else "running"
    if end is None and is_over:
        ending = "killed: the next attempt records the cause"
    return (
        str(attempt.number),
        attempt.job_id or "-",
        console.plain(attempt.nodes) or "-",
        f"{console.age(now - attempt.begun_seconds)} ago",
        console.age(took),
        str(end.step) if end and end.step else "-",  # one that was killed did not say
        console.plain(ending),
    )


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
