"""`ckptman drain ROOT`: copy to the tiers of a run what they have still to get. For cron, or a job on CPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptman.cli import console
from ckptman.cli.copy import Speed, Threads, copied_lines
from ckptman.cli.options import AsJson, check_threads, option, parse_rate
from ckptman.cli.progress import copy_progress
from ckptman.cli.select import Root
from ckptman.errors import ConfigError, CorruptError, RootError

if TYPE_CHECKING:
    from ckptman.policies.tiers import Tier
    from ckptman.storage.transfer.copy import CopyOptions
    from ckptman.storage.transfer.drain import Drained, DrainPlan, DrainTask

To = Annotated[str | None, option("--to", "PLACE", "A folder or s3://..., instead of the tiers.")]
Every = Annotated[int, typer.Option("--every", metavar="N", help="With --to: each N-th commit.")]
Follow = Annotated[bool, typer.Option("--follow", help="Go on until the run is finished.")]
Poll = Annotated[float, typer.Option("--poll", metavar="SECONDS", help="With --follow: look this often.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be copied, and why.")]
STUCK_SECONDS = 600.0
"""How long a drain that follows a run may copy nothing once that is finished."""


def drain(
    root: Root,
    to: To = None,
    every: Every = 1,
    follow: Follow = False,
    poll: Poll = 30.0,
    limit: Speed = None,
    threads: Threads = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Copy to the tiers of a run what they have still to get.

    The tiers are those that the run was started with; each copy is proved before it counts, and each tier is pruned by
    its own rules. Nothing is deleted in ROOT: its own retention does that, once the copies are there.
    """
    from ckptman.storage.transfer.copy import CopyOptions
    from ckptman.storage.transfer.drain import carry_out, plan_drain, prepare
    from ckptman.storage.transfer.progress import Limit

    if not 0 < poll < 1e6:
        raise ConfigError(f"--poll: seconds above 0, not {poll:g}")
    check_threads("drain", threads)
    rate = None if limit is None else parse_rate("--limit", limit)
    tiers = _tiers(root, to, every, make=not dry_run)
    done: list[Drained] = []

    @contextmanager
    def options_for(task: DrainTask) -> Iterator[CopyOptions]:
        rates = [each for each in (rate, task.tier.bytes_per_second) if each is not None]
        with copy_progress(f"step {task.entry.step}") as meter:
            yield CopyOptions(threads=threads, limit=Limit(min(rates)) if rates else None, meter=meter)

    if dry_run:
        plan = plan_drain(root, tiers, new=to is not None)
        _tell_plan(root, plan, as_json)
        _raise_worst([], plan)
        return
    progress = time.monotonic()
    while True:
        finished = _is_finished(root)  # asked first: then all that it has committed is seen below
        plan = prepare(root, plan_drain(root, tiers))
        for each in carry_out(root, plan, options_for):
            done.append(each)
            if not as_json:
                console.say(*_lines(each))
            if each.copied is not None and not each.copied.already:
                progress = time.monotonic()
        if not finished:
            progress = time.monotonic()
        is_stuck = time.monotonic() - progress >= STUCK_SECONDS
        if not follow or (finished and (is_stuck or not (plan.tasks or plan.troubles))):
            break
        done = [each for each in done if each.copied is not None]
        time.sleep(poll)
    if as_json:
        tasks = [
            {
                "step": each.task.entry.step,
                "tier": str(each.task.tier),
                "reason": each.task.reason,
                "copied": each.copied,
                "busy": each.busy,
                "error": None if each.error is None else console.message(each.error),
            }
            for each in done
        ]
        console.say_json({"root": root, "tasks": tasks, "troubles": _troubles(plan)})
    else:
        console.say(_summary(done, tiers))
    _raise_worst(done, plan)


def _tiers(root: Path, to: str | None, every: int, make: bool) -> tuple[Tier, ...]:
    from ckptman.policies.tiers import Tier
    from ckptman.storage.catalog.tiers import absolute, check_tiers, make_tiers, read_tiers

    if to is None:
        found = read_tiers(root)
        if not found:
            raise ConfigError(
                f"{root} has no tiers: start the run with tiers=[ckptman.Tier(...)], or say where to: --to PLACE"
            )
        return found
    tier = absolute(Tier(to, every))
    check_tiers(root, [tier])
    if make:
        make_tiers(root, [tier])
    return (tier,)


def _is_finished(root: Path) -> bool:
    from ckptman.runtime.outcome import read_outcome
    from ckptman.storage.format.paths import outcome_path

    try:
        found = read_outcome(outcome_path(root))
    except (CorruptError, OSError):  # being written, or away for a moment
        return False
    return found is not None and found.state == "finished"


def _tell_plan(root: Path, plan: DrainPlan, as_json: bool) -> None:
    if as_json:
        tasks = [
            {"step": task.entry.step, "path": task.entry.path, "tier": str(task.tier), "reason": task.reason}
            for task in plan.tasks
        ]
        console.say_json({"root": root, "dry_run": True, "tasks": tasks, "troubles": _troubles(plan)})
        return
    rows = []
    for task in plan.tasks:
        size = console.size(task.entry.require_manifest().total_bytes)
        rows.append(("copy", f"step {task.entry.step}", size, console.plain(task.tier), console.plain(task.reason)))
    if rows:
        console.say(*console.table(("action", "what", "size", "to", "why"), rows, right="size"), "")
    console.say(f"Would copy {console.count(len(rows), 'checkpoint')}. Nothing was copied (--dry-run).")


def _lines(drained: Drained) -> list[str]:
    tier = console.plain(drained.task.tier)
    if drained.copied is not None:
        first, *more = copied_lines(drained.copied)
        return [f"{tier}: {first} ({console.plain(drained.task.reason)})", *more]
    why = "another process is at work there"
    if not drained.busy:
        error = "" if drained.error is None else console.message(drained.error)
        why = f"{console.paint('trouble', 'red')}: {error}"
    return [f"{tier}: step {drained.task.entry.step}: {why}"]


def _summary(done: list[Drained], tiers: tuple[Tier, ...]) -> str:
    copied = [each.copied for each in done if each.copied is not None]
    where = console.count(len(tiers), "tier")
    if not copied:
        return f"Nothing copied to {where}."
    size = console.size(sum(each.bytes for each in copied))
    return f"Copied {console.count(len(copied), 'checkpoint')}, {size}, to {where}."


def _troubles(plan: DrainPlan) -> list[dict[str, str]]:
    return [{"tier": str(each.tier), "why": each.trouble} for each in plan.troubles]


def _raise_worst(done: list[Drained], plan: DrainPlan) -> None:
    """Raise the first of what went wrong, if anything did."""
    from ckptman.storage.catalog.reader_lease import GoneError

    for each in done:
        # What was deleted since it was listed, the next drain knows.
        if each.error is not None and not each.busy and not isinstance(each.error, GoneError):
            raise each.error
    for error in plan.root_errors:
        raise error
    if plan.troubles:
        first = plan.troubles[0]
        raise RootError(0, f"{first.tier} cannot be looked at, or written to: {first.trouble}")
