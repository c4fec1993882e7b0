"""`ckptman status ROOT...`: how runs stand."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptman.cli import console
from ckptman.cli.options import AsJson, option, parse_seconds, path_argument
from ckptman.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from ckptman.tools.monitoring.status import Status

_COLOURS = {
    **dict.fromkeys(("running", "finished"), "green"),
    **dict.fromkeys(("failed", "killed"), "red"),
    **dict.fromkeys(("silent", "starting", "queued", "stopped"), "yellow"),
}
WATCH_SECONDS = 5.0


def status(
    roots: Annotated[
        list[Path] | None,
        path_argument("[ROOT]...", "Folders that hold the checkpoints of a run (default: of the chains from here)."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh continuously, until Ctrl-C.")] = False,
    every: Annotated[
        str, option("--every", "TIME", "Refresh interval of --watch (default: 5s).")
    ] = f"{WATCH_SECONDS:g}s",
    no_slurm: Annotated[bool, typer.Option("--no-slurm", help="Do not ask Slurm what is in the queue.")] = False,
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
        console.say_json([asdict(each) for each in found])
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
        return Text.from_ansi("\n".join(lines()))

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
    return [*lines, *(f"{console.plain(each.root)}: {console.plain(each.trouble)}" for each in found if each.trouble)]


def _row(run: Status, now: float) -> tuple[str, ...]:
    return (
        console.plain(run.root),
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
    name = console.plain(run.root)
    head = f"{name}: {_painted(run.state)}" + (f", {console.plain(run.reason)}" if run.reason else "")
    lines = [head]

    def add(title: str, *parts: str) -> None:
        if told := ", ".join(filter(None, parts)):
            lines.append(f"  {title:<10}{told}")

    if run.attempt is not None:
        job = f"job {console.plain(run.job_id)}" if run.job_id else ""
        ranks = console.count(run.ranks or 0, "rank")
        if run.host:
            ranks += f"{', the first' * ((run.ranks or 0) > 1)} on {console.plain(run.host)}"
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
        add("chain", f"{console.plain(Path(run.chain).name)}, {run.chain_state}", *map(console.plain, run.queue))
    for each in run.health:
        add("health", console.plain(each))
    if run.end is not None:
        add("end", f"{_until(run.end, now)}, if nothing stops it")
    if run.trouble:
        add("trouble", console.plain(run.trouble))
    return lines


def _next_save(run: Status, now: float) -> list[str]:
    """When the next save is due, as the run foresaw it when it was last heard."""
    told = run.next_save or {}
    step, seconds, reason = told.get("step"), told.get("seconds"), told.get("reason")
    parts = [f"step {step:,}"] if isinstance(step, int) else []
    if isinstance(seconds, int | float) and run.heard is not None:
        parts.append(_until(run.heard + seconds, now))
    return [*parts, console.plain(str(reason))] if reason else parts


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
    colour = _COLOURS.get(state)
    return console.paint(state, colour) if colour else state
