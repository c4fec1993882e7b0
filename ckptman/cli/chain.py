"""`ckptman chain list | show | why | logs | cancel | pause | resume`: chains of Slurm jobs, and of this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import console
from ckptman.cli.help import Group, Verb
from ckptman.cli.options import AsJson, flag, option, path_argument
from ckptman.errors import EXIT_AGAIN, CkptmanError, ConfigError, NotFoundError

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
_ENDINGS = {"crashed": "crashed", "interrupted": "was interrupted", "stopped": "stopped", "finished": "finished"}
_REACTIONS = {
    "again": "no added delay before the next attempt",
    "elsewhere": "the next attempt does not use the node; no added delay",
    "wait": "the next attempt starts after a pause: 5 min at first, then longer",
    "count": "it counts towards the limit of {limit} crashes in a row without a new checkpoint",
    "hold": "the chain stops: {why}",
}


@chain_app.command("list", cls=Verb)
def list_chains(
    folder: Annotated[Path, path_argument("[DIR]", "Where they were submitted (default: here).")] = Path(),
    as_json: AsJson = False,
) -> None:
    """List the chains that were submitted from a directory."""
    from ckptman.jobs.chain_record import find_chains, is_gone

    found, rows, now = list[dict[str, Any]](), list[tuple[object, ...]](), time.time()
    for chain in find_chains(folder.resolve()):
        spec, state, attempts, jobs = chain.spec, chain.state, chain.attempts(), [job.job_id for job in chain.jobs()]
        step = max((end.step for end in chain.ends().values()), default=0)
        facts = {"chain": chain.folder, "scheduler": spec.scheduler, "script": spec.script, "attempts": len(attempts)}
        found.append({**facts, "step": step, "jobs": jobs, **state.model_dump(exclude={"forgiven"})})
        command = " ".join((Path(spec.script).name, *spec.arguments))[:MOST_COMMAND]
        job = "local" if spec.scheduler == "local" else jobs[-1] if jobs else None
        told = _painted("gone" if is_gone(spec, state) else state.state)
        age = console.age(now - spec.created_seconds)
        rows.append((chain.folder.name, command, len(attempts), f"{step:,}" if step else None, age, job, told))
    if as_json:
        console.say_json(found)
        return
    if not rows:
        console.say(f"no chain was submitted from {folder.resolve()}")
        return
    headers = ("chain", "script", "attempts", "step", "age", "last job", "state")
    console.say(*console.table(headers, rows, "attempts step age", drop=("last job", "age")))


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
    chain = _find(name)
    explain(chain, _seen(chain), attempt, as_json)


@chain_app.command("logs", cls=Verb)
def show_logs(
    name: Name = None,
    follow: Annotated[
        bool,
        flag("--follow", "Go on, also with the attempts that follow, until the chain has ended.", short="-f"),
    ] = False,
    attempt: Annotated[int | None, option("--attempt", "N", "Of this attempt (default: the last).")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", min=1, help="Begin with the last N lines.")] = 100,
) -> None:
    """Print the log of the last attempt, or follow the chain from one attempt to the next."""
    from ckptman.cli import chain_logs

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
    start_over: Annotated[bool, flag("--start-over", "Begin at step 0 if the checkpoints are gone.")] = False,
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
                "chain": chain.folder,
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
    console.say(f"{chain.folder.name}: {_painted(seen.state.state)}, {headline(chain, seen)}")
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
        console.say(f"job {job.id}: {job.state.lower()}{why_it_waits(seen, job)}")
    if (spec := chain.spec).scheduler == "local":
        if is_gone(spec, seen.state):
            console.say(f"process {spec.pid}, which ran it, is gone: submit the command again to go on")
        elif seen.state.state == "active":
            console.say(f"process {spec.pid} on {spec.host} runs it")
    elif not seen.is_known:
        console.say("Slurm does not answer: what is in the queue is unknown")
    if seen.state.state == "stopped" and seen.attempts and seen.attempts[-1].log:
        _show_log(seen.attempts[-1])


def headline(chain: Chain, seen: ChainStatus) -> str:
    """Return why a chain is in its state, or what an active one is doing."""
    if seen.state.state != "active" or chain.spec.scheduler == "local":
        return seen.state.reason or "running"
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


def _row(attempt: AttemptRecord, end: EndRecord | None, now: float, *, is_over: bool) -> tuple[str, ...]:
    took = (end.ended_seconds if end else now) - attempt.begun_seconds
    ending = f"{end.ending}: {end.reason}" if end else "running"
    if end is None and is_over:
        ending = "killed: the next attempt records the cause"
    return (
        str(attempt.number),
        attempt.job_id or "-",
        attempt.nodes or "-",
        f"{console.age(now - attempt.begun_seconds)} ago",
        console.age(took),
        str(end.step) if end and end.step else "-",  # one that was killed did not say
        ending,
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
    title = f"log of attempt {attempt.number}: {attempt.log}"
    console.say("", title, *(f"  {line}" for line in lines))


def _painted(state: str) -> str:
    return console.paint(state, _COLOURS.get(state))


def explain(chain: Chain, seen: ChainStatus, number: int | None, as_json: bool) -> None:
    """Print why an attempt of a chain ended. Raises: NotFoundError (it has not ended)."""
    end = _end_of(chain, seen, number)
    what_next = _what_next(chain, seen, end)
    if as_json:
        facts = end.model_dump(include={"number", "ending", "reason", "cause", "evidence", "reaction", "step"})
        console.say_json({"chain": chain.folder, "state": seen.state.state, **facts, "next": what_next})
        return
    attempt = next((each for each in seen.attempts if each.number == end.number), None)
    console.say(f"{chain.folder.name}: {seen.state.state}", _head(attempt, end))
    why = end.reason
    if not end.cause and end.returncode == EXIT_AGAIN and end.ending == "stopped":
        why = "the program exited with 75, which means: saved, run me again"
    rows = [("cause", f"{why} [{end.cause}]" if end.cause else why)]
    evidence = [each for each in end.evidence if each not in end.reason]
    rows += [("" if place else "evidence", each) for place, each in enumerate(evidence)]
    if attempt is not None and attempt.log and end.ending == "crashed":
        rows.append(("log", attempt.error_log or attempt.log))
    if end.ending == "crashed" and end.cause and not _limit(seen, end):
        rows.append(("reaction", _reaction(chain, seen, end)))
    if end.bad_nodes:
        rows.append(
            ("nodes", "not used for a day: " + ", ".join(f"{node} ({why})" for node, why in end.bad_nodes.items()))
        )
    if limit := _limit(seen, end):
        rows.append(("chain", limit))
    rows.append(("next", what_next))
    if seen.state.state == "active" and (remedy := _remedy(chain, end)):
        rows.append(("you can", remedy))
    console.say(*(f"  {title:<10}{text}" for title, text in rows))


def _head(attempt: AttemptRecord | None, end: EndRecord) -> str:
    """Say which attempt ended, where, after how long, and what it left."""
    where = took = ""
    if attempt is not None:
        where = f" (job {attempt.job_id} on {attempt.nodes})" if attempt.job_id else ""
        took = f" after {console.age(max(0.0, (end.seen_seconds or end.ended_seconds) - attempt.begun_seconds))}"
    left = {True: "it left a new checkpoint", False: "it left no new checkpoint", None: ""}[end.committed]
    step = f"step {end.step:,}" if end.step else ""
    return f"attempt {end.number}{where} {_ENDINGS[end.ending]}{took}" + "".join(
        f"; {each}" for each in (step, left) if each
    )


def _reaction(chain: Chain, seen: ChainStatus, end: EndRecord) -> str:
    limit = chain.spec.crash_limit
    if end.reaction == "count" and end.number == max(seen.ends):
        if crashes := seen.following(time.time()).crashes:
            return f"crash {crashes} of {limit} in a row without a new checkpoint; the chain stops at {limit}"
        if end.committed:
            return "no added delay before the next attempt, because there is a new checkpoint"
    why = "the next attempt would most likely fail in the same way"
    before = seen.ends.get(end.number - 1)
    if before is not None and before.cause == end.cause:
        why = "the same error twice in a row, without a new checkpoint"
    return _REACTIONS[end.reaction].format(limit=limit, why=why)


def _limit(seen: ChainStatus, end: EndRecord) -> str:
    """Return why a chain has ended or is held, apart from the reason of its last attempt; "" if that is all."""
    if seen.state.state in ("active", "finished") or end.number != max(seen.ends):
        return ""
    limit = seen.state.reason.partition(f"attempt {end.number} {end.ending}:")[0].rstrip("; ")
    return f"{seen.state.state}: {limit}" if limit else ""


def _remedy(chain: Chain, end: EndRecord) -> str:
    """Return what a user can do about the cause of an end; "" if there is nothing."""
    from ckptman.jobs.causes import Cause

    if not end.cause or end.ending == "finished":
        return ""
    remedy, name = Cause(end.cause, end.reason).remedy, chain.folder.name
    commands = {
        "space": f"ckptman prune {end.root}" if end.root else "",
        "nccl": f"ckptman status {end.root}" if end.root else "",
        "cancelled": f"ckptman chain cancel {name}",
    }
    if remedy.startswith("nothing"):
        return ""
    command = commands.get(end.cause, f"ckptman chain logs {name} --attempt {end.number}" if "log" in remedy else "")
    return f"{remedy}: {command}" if command else remedy


def _end_of(chain: Chain, seen: ChainStatus, number: int | None) -> EndRecord:
    if number is not None and number in seen.ends:
        return seen.ends[number]
    if number is not None and any(each.number == number for each in seen.attempts):
        raise NotFoundError(f"attempt {number} of {chain.folder.name} has not ended: ckptman chain show")
    if number is not None:
        raise NotFoundError(f"{chain.folder.name} has no attempt {number}: ckptman chain show lists them")
    if not seen.ends:
        raise NotFoundError(f"no attempt of {chain.folder.name} has ended: ckptman chain show")
    return seen.ends[max(seen.ends)]


def _what_next(chain: Chain, seen: ChainStatus, end: EndRecord) -> str:
    """Return what the chain does, or what the user has to do, with the command."""
    from ckptman.jobs.chain_record import is_gone

    state, resume = seen.state.state, f"ckptman chain resume {chain.folder.name}"
    if chain.spec.scheduler == "local":
        resume = "submit the command again"
    if state == "finished":
        return "nothing: the run is finished"
    if state == "cancelled":
        return "submit the script again to continue from the newest checkpoint"
    if state == "paused":
        return resume
    if state == "stopped":
        return f"{_remedy(chain, end) or 'remove the cause'}; then {resume}"
    if is_gone(chain.spec, seen.state):
        return f"the process that ran the chain is gone: {resume}"
    if seen.running:
        return f"nothing to do: job {seen.running[-1][1].id} runs"
    if seen.waiting:
        job = seen.waiting[0][1]
        return f"nothing to do: job {job.id} waits in the queue{why_it_waits(seen, job)}"
    if chain.spec.scheduler == "local":
        return "nothing to do: the chain continues"
    return resume if seen.is_known else "ask again: Slurm does not answer now"
