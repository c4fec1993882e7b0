"""`ckptman status`, `report` and `ask`: how runs stand, where their hours went, and requests to them."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from ckptman.cli import console
from ckptman.cli.options import AsJson, flag, option, parse_seconds, path_argument
from ckptman.cli.select import Root
from ckptman.errors import CkptmanError, ConfigError, NotFoundError
from ckptman.storage.format.paths import Ask

if TYPE_CHECKING:
    from ckptman.storage.catalog.liveness import Owner
    from ckptman.tools.monitoring.report import RunReport
    from ckptman.tools.monitoring.status import Status

_COLOURS = {
    **dict.fromkeys(("running", "finished"), "green"),
    **dict.fromkeys(("failed", "killed"), "red"),
    **dict.fromkeys(("silent", "starting", "queued", "stopped"), "yellow"),
}
WATCH_SECONDS = 5.0
ATTEMPTS_SHOWN, MOST_REASON = 20, 100
POLL_SECONDS = 0.5
_MEANING = {
    "save": "save at its next step",
    "stop": "save at its next step and stop",
    "hold": "save at its next step, stop, and stay stopped",
}


def status(
    roots: Annotated[
        list[Path] | None,
        path_argument("[ROOT]...", "Folders that hold the checkpoints of a run (default: of the chains from here)."),
    ] = None,
    watch: Annotated[bool, flag("--watch", "Refresh continuously, until Ctrl-C.", short="-w")] = False,
    every: Annotated[
        str, option("--every", "TIME", "Refresh interval of --watch (default: 5s).")
    ] = f"{WATCH_SECONDS:g}s",
    no_slurm: Annotated[bool, flag("--no-slurm", "Do not ask Slurm what is in the queue.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show how runs stand: step, last and next save, job, chain, and when they end."""
    from ckptman.tools.monitoring.other_programs import roots_of_chains
    from ckptman.tools.monitoring.status import read_status

    if not roots:
        roots = roots_of_chains(Path.cwd())
        if not roots:
            raise NotFoundError(
                "no chain that was submitted from here has saved yet: name ROOT, or see ckptman chain list"
            )
    if watch and as_json:
        raise ConfigError("--watch is for people, and --json for programs: call it again and again")
    if watch:
        _watch(roots, parse_seconds("--every", every), not no_slurm)
        return
    found = read_status(roots, time.time(), slurm=not no_slurm)
    none = [each for each in found if each.attempt is None and each.saved_step is None]
    if as_json:
        console.say_json(found)
    elif len(found) > 1 or not none:
        console.say(*_lines(found, time.time()))
    if len(none) == len(found):
        why = none[0].trouble or f"no run was started in {none[0].root}: name the folder of its checkpoints"
        raise NotFoundError(why if len(found) == 1 else "none of these is the root of a run")


def _watch(roots: Sequence[Path], every_seconds: float, slurm: bool) -> None:
    from ckptman.tools.monitoring.status import read_status

    def lines() -> list[str]:
        now = time.time()
        clock = time.strftime("%H:%M:%S", time.localtime(now))
        told = _lines(read_status(roots, now, slurm=slurm), now)
        return [*told, "", f"{clock}, every {console.age(every_seconds)}; Ctrl-C ends"]

    if console.terminal_width() is None:  # one after the other
        while True:
            console.say(*lines(), "")
            sys.stdout.flush()
            time.sleep(every_seconds)

    from rich.live import Live
    from rich.text import Text

    def shown() -> Text:
        return Text.from_ansi("\n".join(map(console.printed, lines())))

    with Live(shown(), auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            time.sleep(every_seconds)
            live.update(shown(), refresh=True)


def _lines(found: Sequence[Status], now: float) -> list[str]:
    """One run in full, several in a table."""
    if len(found) == 1:
        return _full(found[0], now)
    headers = ("run", "state", "step", "done", "per step", "heard", "saved", "job ends", "end", "metrics")
    rows = [_row(each, now) for each in found]
    lines = console.table(headers, rows, "step done heard saved", drop=("per step", "saved", "job ends", "done"))
    return [*lines, *(f"{each.root}: {each.trouble}" for each in found if each.trouble)]


def _row(run: Status, now: float) -> tuple[str, ...]:
    return (
        run.root,
        _painted(run.state),
        "-" if run.step is None else str(run.step),
        _done(run) or "-",
        _pace(run) or "-",
        _ago(run.heard, now),
        _ago(run.saved, now),
        _until(run.deadline, now) or "-",
        _until(run.end, now) or "-",
        _metrics(run) or "-",
    )


def _full(run: Status, now: float) -> list[str]:
    head = f"{run.root}: {_painted(run.state)}" + (f", {run.reason}" if run.reason else "")
    lines = [head]

    def add(title: str, *parts: str) -> None:
        if told := ", ".join(filter(None, parts)):
            lines.append(f"  {title:<10}{told}")

    if run.attempt is not None:
        job = f"job {run.job_id}" if run.job_id else ""
        ranks = console.count(run.ranks or 0, "rank")
        if run.host:
            ranks += f"{', the first' * ((run.ranks or 0) > 1)} on {run.host}"
        add("attempt", str(run.attempt), job, ranks)
        of = f" of {run.total_steps:,} ({_done(run)})" if run.total_steps else ""
        heard = f"heard {_ago(run.heard, now)}"
        add("step", f"{run.step or 0:,}{of}", _metrics(run), _pace(run), heard)
    if run.saved_step is not None:
        kept = f"{console.count(run.checkpoints, 'checkpoint')}, {console.size(run.bytes)} in all"
        add("saved", f"step {run.saved_step:,}", _ago(run.saved, now), f"on {', '.join(run.places)}", kept)
    elif run.attempt is not None:
        add("saved", "nothing yet")
    if run.memory_step is not None:
        add("memory", f"step {run.memory_step:,}")
    if run.next_save is not None:
        add("next save", *_next_save(run, now))
    if run.deadline is not None:
        add("job ends", _until(run.deadline, now))
    if run.chain:
        add("chain", f"{Path(run.chain).name}, {run.chain_state}", *run.queue)
    for each in run.health:
        add("health", each)
    if run.end is not None:
        add("end", f"{_until(run.end, now)}, if nothing stops it")
    if run.trouble:
        add("trouble", run.trouble)
    return lines


def _next_save(run: Status, now: float) -> list[str]:
    """When the next save is due, as the run foresaw it when it was last heard."""
    told = run.next_save or {}
    step, seconds, reason = told.get("step"), told.get("seconds"), told.get("reason")
    parts = [f"step {step:,}"] if isinstance(step, int) else []
    if isinstance(seconds, int | float) and run.heard is not None:
        parts.append(_until(run.heard + seconds, now))
    return [*parts, str(reason)] if reason else parts


def _metrics(run: Status) -> str:
    told = console.metrics(run.metrics)
    return f"{told} at step {run.metrics_step:,}" if told and run.metrics_step != run.step else told


def _done(run: Status) -> str:
    return f"{run.step / run.total_steps:.1%}" if run.total_steps and run.step is not None else ""


def _pace(run: Status) -> str:
    from ckptman.policies.intervals import seconds_text

    return f"{seconds_text(run.step_seconds)} per step" if run.step_seconds is not None else ""


def _ago(when: float | None, now: float) -> str:
    return f"{console.age(now - when)} ago" if when is not None else "-"


def _until(when: float | None, now: float) -> str:
    if when is None:
        return ""
    return f"in {console.age(when - now)}" if when > now else f"{console.age(now - when)} ago"


def _painted(state: str) -> str:
    return console.paint(state, _COLOURS.get(state))


def report(
    roots: Annotated[list[Path], path_argument("ROOT...", "Folders that hold the checkpoints of a run.")],
    html: Annotated[
        Path | None, option("--html", "FILE", "Write a page with all of it: one file, for any browser, offline.")
    ] = None,
    no_slurm: Annotated[bool, flag("--no-slurm", "Do not ask Slurm's accounting when jobs waited and ended.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show where the hours of runs went: training that counted, lost, saving, restoring, starting, queueing."""
    from ckptman.tools.monitoring.report import as_data, read_reports

    if html is not None and (not html.name or html.is_dir()):
        raise ConfigError(f"--html: the name of a file, such as report.html, not {str(html)!r}")
    now = time.time()
    found = read_reports(roots, now, slurm=not no_slurm)
    if html is not None:
        from ckptman.storage.io.durable_files import DISK
        from ckptman.tools.monitoring.page import make_page

        page = make_page(found, now)
        DISK.make_folders(html.absolute().parent)
        DISK.replace_file(html, page.encode())
    if as_json:
        console.say_json([as_data(each) for each in found])
    else:
        console.say(*_report_lines(found), *([f"written to {html}"] if html is not None else []))


def _report_lines(found: Sequence[RunReport]) -> list[str]:
    from ckptman.tools.monitoring.ledger import add
    from ckptman.tools.monitoring.report import shares

    lines: list[str] = []
    for each in found:
        lines += [*_run_lines(each), ""]
    if len(found) > 1:
        rows = shares(add([each.ledger for each in found]))
        lines += [f"all {len(found)} runs", *_time_table(rows), ""]
    return lines[:-1]


def _run_lines(found: RunReport) -> list[str]:
    from ckptman.policies.intervals import duration_text
    from ckptman.tools.monitoring.report import endings_text, shares

    ledger, status = found.ledger, found.status
    lines = [
        f"{found.root}: {status.state}, step {status.step or 0:,} after "
        f"{duration_text(ledger.total_seconds)} and {console.count(len(ledger.attempts), 'attempt')}: "
        f"{endings_text(ledger)}",
        *_time_table(shares(ledger.seconds)),
    ]
    if ledger.goodput is not None:
        line = f"goodput {ledger.goodput:.1%} of the {duration_text(ledger.held_seconds)} in which it held nodes"
        is_in_slurm = any(each.job_id for each in ledger.attempts)
        unknown = (span.seconds for span in ledger.spans if span.kind == "unknown" and not span.world_size)
        away = sum(unknown) if is_in_slurm else 0.0
        lines.append(line + (f", if it held none in {duration_text(away)} that are not known" if away >= 1 else ""))
    if ledger.mtbf_seconds is not None:
        line = f"a failure every {duration_text(ledger.mtbf_seconds)}"
        if ledger.interval_seconds is not None and ledger.advised_seconds is not None:
            line += (
                f", a save every {duration_text(ledger.interval_seconds)}; "
                f"{duration_text(ledger.advised_seconds)} would lose least"
            )
        lines.append(line)
    rows = [
        (
            str(each.number or "-"),
            each.job_id or "-",
            f"{each.start_step:,} to {each.step:,}",
            duration_text(each.ended - each.begun),
            duration_text(each.seconds["training"]),
            duration_text(each.seconds["repeated"]),
            # A reason may be the text of any error; --json has all of it.
            console.cut(f"{each.ending}: {each.reason}" if each.reason else each.ending, MOST_REASON),
        )
        for each in ledger.attempts[-ATTEMPTS_SHOWN:]
    ]
    headers = ("attempt", "job", "steps", "took", "counted", "lost", "end")
    width = console.page_width()
    lines += ["", *console.table(headers, rows, "attempt took counted lost", drop=("job", "took"), width=width)]
    if len(ledger.attempts) > ATTEMPTS_SHOWN:
        lines.append(f"the last {ATTEMPTS_SHOWN} of {len(ledger.attempts)} attempts; --html and --json have all")
    return [*lines, *(f"note: {note}" for note in ledger.notes)]


def _time_table(rows: Sequence[tuple[str, str, float, float]]) -> list[str]:
    from ckptman.policies.intervals import duration_text

    cells = [(f"  {name}", duration_text(seconds), f"{share:.1%}") for _, name, seconds, share in rows]
    return console.table(("  where the time went", "time", "share"), cells, "time share")


def ask(
    root: Root,
    what: Annotated[str, typer.Argument(metavar="save|stop|hold", show_default=False, help="The request.")],
    wait: Annotated[bool, flag("--wait", "Wait until it is done, and print the step.")] = False,
    timeout: Annotated[str, option("--timeout", "TIME", "With --wait: the longest wait (default: 10min).")] = "10min",
) -> None:
    """Ask the run that trains in ROOT to save, or to save and stop.

    save: save at the next step, and continue. stop: do what the run does at a stop signal, which is to save and exit
    with code 75 unless it has save_on_stop=False; a chain starts the next attempt. hold: as stop, but the chain starts
    no attempt until ckptman chain resume.

    The request is a file in ROOT, so this works from any machine and container that can write there.
    """
    from ckptman.runtime.requests import leave
    from ckptman.storage.catalog.writer_lock import read_owner
    from ckptman.tools.monitoring.status import read_status

    if what not in get_args(Ask):
        raise ConfigError(f"the request is save, stop or hold, not {what!r}")
    seconds = parse_seconds("--timeout", timeout)
    owner = read_owner(root)
    (run,) = read_status([root], time.time())
    if run.trouble:
        raise NotFoundError(run.trouble)
    if run.state not in ("running", "silent") or owner is None or read_owner(root) != owner:  # it may just have ended
        raise NotFoundError(f"no run is training in {root}: see ckptman status {root}")
    if what == "hold":
        _hold(run)
    request = leave(root, cast(Ask, what), owner)
    console.say(f"Asked attempt {run.attempt} on {owner.host} to {_MEANING[what]}.")
    if wait:
        _report(_answer(root, request, owner, seconds))


def _hold(run: Status) -> None:
    """Have the chain of a run start no further attempt, and say how it continues."""
    if not run.chain:
        console.say("The run is in no chain: hold is the same as stop.")
        return
    from ckptman.jobs.chain_record import Chain
    from ckptman.jobs.slurm.control import hold

    chain = Chain(Path(run.chain))
    hold(chain, time.time())
    then = f"ckptman chain resume {run.chain}" if chain.spec.scheduler == "slurm" else "submit its command again"
    console.say(f"The chain is paused. To continue it: {then}")


def _answer(root: Path, request: str, owner: Owner, timeout_seconds: float) -> Mapping[str, Any]:
    from ckptman.policies.intervals import duration_text
    from ckptman.runtime.requests import answer
    from ckptman.storage.catalog.writer_lock import owner_lives

    until = time.monotonic() + timeout_seconds
    while True:
        if (found := answer(root, request)) is not None:
            return found
        if not owner_lives(root, owner):
            if (found := answer(root, request)) is not None:  # it comes before the end
                return found
            raise CkptmanError("the attempt ended before it carried out the request: ckptman status shows how")
        if time.monotonic() > until:
            raise CkptmanError(
                f"no answer within {duration_text(timeout_seconds)}: if the run is alive, it carries the request out "
                f"when a step ends"
            )
        time.sleep(POLL_SECONDS)


def _report(answer: Mapping[str, Any]) -> None:
    done, step = answer.get("done"), answer.get("step")
    if done == "failed":
        raise CkptmanError(f"failed at step {step}: the journal and the log of the run have the reason")
    lines = {"saved": f"Saved step {step}.", "stopped": f"Stopped after step {step}."}
    console.say(lines.get(str(done), f"The run finished at step {step} before that."))
