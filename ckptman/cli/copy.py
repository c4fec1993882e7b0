"""`ckptman copy SRC DST` and `drain ROOT`: checkpoints to other places, every byte read back before they count."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import console
from ckptman.cli.console import copy_progress
from ckptman.cli.options import MOST_THREADS, AsJson, flag, option, parse_rate, path_argument
from ckptman.cli.select import Root, Step, choose, choose_objects, is_foreign
from ckptman.errors import (
    BusyError,
    CkptmanError,
    ConfigError,
    CorruptError,
    ExistsError,
    FormatVersionError,
    NotFoundError,
    RootError,
)
from ckptman.storage.format.paths import is_checkpoint

if TYPE_CHECKING:
    from ckptman.policies.tiers import Tier
    from ckptman.storage.catalog.backends.backend import Backend
    from ckptman.storage.catalog.catalog import Entry
    from ckptman.storage.transfer.copy import Copied, CopyOptions
    from ckptman.storage.transfer.drain import Drained, DrainPlan, DrainTask

Speed = Annotated[str | None, option("--limit", "SPEED", "Move no more than this, such as 500MB/s.")]
Threads = Annotated[int | None, option("--threads", "N", "Threads that move bytes.", least=1, most=MOST_THREADS)]
_WORST_FIRST = (CorruptError, FormatVersionError, RootError, BusyError, ExistsError)
_LOOKS = 3
_TIMED_BYTES = 64 * 1024 * 1024
"""The rate of less than this says how long a flush takes, and not how fast a copy is."""
STUCK_SECONDS = 600.0
"""How long a drain that follows a run may copy nothing once that is finished."""


def copy(
    source: Annotated[
        str, path_argument("SRC", "A checkpoint, or a root (then its newest checkpoint), or s3://bucket/prefix.")
    ],
    destination: Annotated[str, path_argument("DST", "The root to copy to, or s3://bucket/prefix.")],
    step: Step = None,
    every: Annotated[bool, flag("--all", "Of a root: all its checkpoints, oldest commit first.")] = False,
    limit: Speed = None,
    threads: Threads = None,
    overwrite: Annotated[
        bool, flag("--overwrite", "Replace another checkpoint of the same step, or a damaged copy.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy checkpoints to another root, and read every byte back before they count.

    Interrupted, it copies the files that are missing when it is run again. A copy keeps its name, step and sequence.
    One that is there already is not copied again.
    """
    from ckptman.storage.catalog.backends.backend import find_url, open_backend
    from ckptman.storage.catalog.reader_lease import GoneError
    from ckptman.storage.format.paths import parse_step
    from ckptman.storage.transfer.copy import CopyOptions
    from ckptman.storage.transfer.progress import Limit

    shared = None if limit is None else Limit(parse_rate("--limit", limit))
    options = CopyOptions(threads=threads, limit=shared, overwrite=overwrite)
    source_url, target_url = find_url(source), find_url(destination)
    if source_url is not None and target_url is not None:
        raise ConfigError("from one object store to another: copy to a folder in between, or use tools of the store")
    if target_url is not None and parse_step(target_url.rpartition("/")[2]):
        raise ConfigError(f"{target_url} is the name of a checkpoint: name what holds it; a copy keeps its name")
    path, place = Path(source), open_backend(destination)
    job = _Job(source, destination, options, as_json, every)
    if source_url is not None:
        store, entries = choose_objects(source_url, step, every)
        for entry in job.counting(entries, asked=step is not None):
            job.attempt(entry, place, store)
    elif step is None and not every and is_foreign(path):
        raise ConfigError(
            f"{path} is of plain DCP and has no digests, so nobody could say whether a copy of it is right: ckptman "
            f"adopt gives it digests where it is; or copy its files with cp -a"
        )
    else:
        asked = step is not None or is_checkpoint(path)
        for looks_left in reversed(range(_LOOKS)):
            try:
                for entry in job.counting(choose(path, step, every, passed_over=True), asked):
                    job.attempt(entry, place)
                break
            except GoneError:  # whoever pruned it has a newer one by now
                if asked or not looks_left:
                    raise
    job.end()


class _Job:
    """What is told of the checkpoints one after the other, and in the end."""

    def __init__(self, source: str, destination: str, options: CopyOptions, as_json: bool, every: bool) -> None:
        self.copied: list[Copied] = []
        self.failures: dict[int, CkptmanError] = {}
        self.passed_over: list[tuple[Entry, str]] = []
        self._source, self._destination, self._options = source, destination, options
        self._as_json, self._every = as_json, every

    def counting(self, entries: Sequence[Entry], asked: bool) -> list[Entry]:
        """Those to copy. What does not count is told and passed over, unless it was `asked` for by name."""
        if asked:
            return list(entries)
        chosen = []
        for entry in entries:
            if entry.newer_format is not None and not self._every:
                raise entry.newer_format
            if entry.complete:
                chosen.append(entry)
            elif entry.was_committed:
                try:
                    entry.require_manifest()
                except CkptmanError as error:
                    self._fail(entry, error)
            else:
                why = (entry.problem or "").replace(f"{entry.where}/", "").partition("; ")[0]
                self._reject(entry, f"it does not count: {why}")
        if not chosen and not self.failures:
            raise NotFoundError(f"{self._source} holds no complete checkpoint: ckptman list says what is there")
        return chosen

    def attempt(self, entry: Entry, place: Backend, source: Backend | None = None) -> None:
        """Copy one. Raises: what went wrong; of several, only what keeps the others from being copied, too."""
        from ckptman.storage.catalog.backends.copy_draft import BusyCopyingError
        from ckptman.storage.catalog.backends.copy_source import SourceError
        from ckptman.storage.catalog.reader_lease import GoneError
        from ckptman.storage.transfer.copy import copy_checkpoint

        try:
            with copy_progress(f"step {entry.step}") as meter:
                self.done(copy_checkpoint(entry, place, replace(self._options, meter=meter), source=source))
        except GoneError:
            if not self._every:
                raise
            self._reject(entry, "it was deleted meanwhile")  # the run prunes while it is copied
        except (CorruptError, ExistsError, BusyCopyingError, SourceError) as error:
            if not self._every:  # what says something about one checkpoint keeps no other one
                raise
            self._fail(entry, error)
        except CkptmanError as error:
            if self._every and self._as_json:  # what was copied before is told all the same
                self.failures[entry.step] = error
                console.say_json(self.as_dict())
            raise

    def done(self, copied: Copied) -> None:
        self.copied.append(copied)
        self._say(copied_lines(copied))

    def end(self) -> None:
        """Sum up. Raises: the worst of what went wrong."""
        if self._as_json:
            console.say_json(self.as_dict())
        self._say([self._summary()])
        for kind in _WORST_FIRST:
            for step, error in self.failures.items():
                if isinstance(error, kind):
                    what = f"{console.count(len(self.failures), 'checkpoint')} not copied, the first of step {step}"
                    worst = CkptmanError(f"{what}: {console.message(error)}")
                    worst.exit_code = error.exit_code
                    raise worst

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self._source,
            "destination": self._destination,
            "checkpoints": [{**vars(each), "read_back": not each.from_memory} for each in self.copied],
            "passed_over": [{"step": entry.step, "path": entry.where, "why": why} for entry, why in self.passed_over],
            "failed": [{"step": step, "why": console.message(error)} for step, error in self.failures.items()],
        }

    def _fail(self, entry: Entry, error: CkptmanError) -> None:
        self.failures[entry.step] = error
        self._say(f"step {entry.step}: {console.paint('not copied', 'red')}: {console.message(error)}".split("\n"))

    def _reject(self, entry: Entry, why: str) -> None:
        self.passed_over.append((entry, why))
        self._say([f"step {entry.step}: not copied: {why}"])

    def _say(self, lines: list[str]) -> None:
        if not self._as_json:
            console.say(*lines)

    def _summary(self) -> str:
        new = [each for each in self.copied if not each.already]
        where = self._destination
        there = console.count(len(self.copied) - len(new), "checkpoint")
        if not self.copied:
            return "Nothing was copied."
        if not new:
            return f"Nothing to copy: {there} in {where} already."
        copied = f"{console.count(len(new), 'checkpoint')}, {console.size(sum(each.bytes for each in new))}, to {where}"
        return f"Copied {copied}{f'; {there} there already' if len(new) < len(self.copied) else ''}."


def copied_lines(copied: Copied) -> list[str]:
    """What became of one checkpoint, in words."""
    name = f"step {copied.step}"
    what = f"{console.size(copied.bytes)} in {console.count(copied.files, 'file')}"
    if copied.already:
        lines = [f"{name}: there already, {what}, every byte verified"]
    else:
        lines = [f"{name}: copied, {what}{_pace(copied.written_bytes, copied.copy_seconds)}; every byte read back"]
        lines[0] += _pace(copied.bytes, copied.verify_seconds)
    if not copied.already and copied.written_bytes < copied.bytes:
        kept = console.size(copied.bytes - copied.written_bytes)
        lines.append(f"  {kept} of it were there already")
    if copied.from_memory:
        lines.append(f"  not proved: that it is on storage, for {copied.from_memory}")
    return lines + [f"  {remark}" for remark in copied.remarks]


def _pace(count: int, seconds: float) -> str:
    if count < _TIMED_BYTES:
        return ""
    return f" in {seconds:.1f} s ({console.size(int(count / max(seconds, 1e-9)))}/s)"


def drain(
    root: Root,
    to: Annotated[str | None, option("--to", "PLACE", "A folder or s3://..., instead of the tiers.")] = None,
    every: Annotated[int, typer.Option("--every", metavar="N", help="With --to: each N-th commit.")] = 1,
    follow: Annotated[bool, flag("--follow", "Go on until the run is finished.")] = False,
    poll: Annotated[float, typer.Option("--poll", metavar="SECONDS", help="With --follow: look this often.")] = 30.0,
    limit: Speed = None,
    threads: Threads = None,
    dry_run: Annotated[bool, flag("--dry-run", "Only say what would be copied, and why.")] = False,
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
        rows.append(("copy", f"step {task.entry.step}", size, task.tier, task.reason))
    if rows:
        console.say(*console.table(("action", "what", "size", "to", "why"), rows, right="size"), "")
    console.say(f"Would copy {console.count(len(rows), 'checkpoint')}. Nothing was copied (--dry-run).")


def _lines(drained: Drained) -> list[str]:
    tier = drained.task.tier
    if drained.copied is not None:
        first, *more = copied_lines(drained.copied)
        return [f"{tier}: {first} ({drained.task.reason})", *more]
    why = "another process is at work there"
    if not drained.busy:
        error = "" if drained.error is None else console.message(drained.error)
        why = f"{console.paint('trouble', 'red')}: {error}"
    return f"{tier}: step {drained.task.entry.step}: {why}".split("\n")


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
