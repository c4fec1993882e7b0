"""`ckptman copy SRC DST`: checkpoints to another root, every byte read back there before they count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import text
from ckptman.cli.copy_progress import copy_progress
from ckptman.cli.list import AsJson, short_problem
from ckptman.cli.target import Step, choose, is_checkpoint, is_foreign
from ckptman.cli.verify import MOST_THREADS, parse_speed
from ckptman.errors import CkptmanError, ConfigError, CorruptError, ExistsError, NotFoundError

if TYPE_CHECKING:
    from ckptman.store.catalogue import Entry
    from ckptman.store.copy import Copied, Means
    from ckptman.store.meter import Meter

Source = Annotated[
    str, typer.Argument(metavar="SRC", show_default=False, help="A checkpoint, or a root (then its newest checkpoint).")
]
Destination = Annotated[
    str, typer.Argument(metavar="DST", show_default=False, help="The root to copy to. Made where it is missing.")
]
All = Annotated[bool, typer.Option("--all", help="Of a root: all its checkpoints, oldest commit first.")]
Speed = Annotated[
    str | None,
    typer.Option("--limit", metavar="SPEED", show_default=False, help="Move no more than this, such as 500MB/s."),
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", show_default=False, help="Threads that move bytes.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace another checkpoint of the same step, or a damaged copy.")
]
_PASSED = (CorruptError, ExistsError, NotFoundError)
"""What says something about one checkpoint: the others are copied all the same."""


def copy(
    source: Source,
    destination: Destination,
    step: Step = None,
    every: All = False,
    limit: Speed = None,
    threads: Threads = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Copy checkpoints to another root, and read every byte back before they count.

    Interrupted, it goes on from where it was when it is run again. A copy keeps its name, step and sequence. One that
    is there already is not copied again.
    """
    from ckptman.store.copy import copy_checkpoint, copy_foreign
    from ckptman.store.place import FolderPlace

    path, root = Path(source), Path(destination)
    means = _means(limit, threads, overwrite)
    job = _Job(source, destination, as_json)
    place = FolderPlace(root)
    if step is None and not every and is_foreign(path):
        with copy_progress(path.name) as meter:
            job.done(copy_foreign(path, place, means(meter)))
    else:
        _refuse_inside(path, root)
        for entry in _entries(job, path, step, every):
            try:
                with copy_progress(f"step {entry.step}") as meter:
                    job.done(copy_checkpoint(entry, place, means(meter)))
            except _PASSED as error:
                if not every:
                    raise
                job.failed(entry, error)
    job.end()


class _Job:
    """What is told of the checkpoints one after the other, and in the end."""

    def __init__(self, source: str, destination: str, as_json: bool) -> None:
        self.copied: list[Copied] = []
        self.failures: list[tuple[int, CkptmanError]] = []
        self.passed_over: list[tuple[Entry, str]] = []
        self._source, self._destination, self._as_json = source, destination, as_json

    def done(self, copied: Copied) -> None:
        self.copied.append(copied)
        self._say(copied_lines(copied))

    def failed(self, entry: Entry, error: CkptmanError) -> None:
        self.failures.append((entry.step, error))
        self._say([f"step {entry.step}: {text.paint('not copied', 'red')}: {error}"])

    def pass_over(self, entry: Entry) -> None:
        why = short_problem(entry, entry.problem or "")
        self.passed_over.append((entry, why))
        self._say([f"step {entry.step}: not copied, as it does not count: {text.plain(why)}"])

    def end(self) -> None:
        """Sum up. Raises: the worst of what went wrong."""
        if self._as_json:
            text.say_json(self.as_dict())
        self._say([self._summary()])
        for kind in _PASSED:
            found = [(step, error) for step, error in self.failures if isinstance(error, kind)]
            if found:
                of = text.count(len(self.failures), "checkpoint")
                raise kind(f"{of} not copied, the first of step {found[0][0]}: {found[0][1]}")

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self._source,
            "destination": self._destination,
            "checkpoints": [
                {**vars(each), "remarks": list(each.remarks), "read_back": not each.from_memory} for each in self.copied
            ],
            "passed_over": [
                {"step": entry.step, "path": str(entry.path), "why": why} for entry, why in self.passed_over
            ],
            "failed": [{"step": step, "why": str(error)} for step, error in self.failures],
        }

    def _say(self, lines: list[str]) -> None:
        if not self._as_json:
            text.say("\n".join(lines))

    def _summary(self) -> str:
        new = [each for each in self.copied if not each.already]
        where = text.plain(self._destination)
        there = text.count(len(self.copied) - len(new), "checkpoint")
        if not new:
            return f"Nothing to copy: {there} in {where} already."
        copied = f"{text.count(len(new), 'checkpoint')}, {text.size(sum(each.bytes for each in new))}, to {where}"
        return f"Copied {copied}{f'; {there} there already' if len(new) < len(self.copied) else ''}."


def copied_lines(copied: Copied) -> list[str]:
    """What became of one checkpoint, in words."""
    name = f"step {copied.step}" if copied.step is not None else text.plain(copied.source)
    what = f"{text.size(copied.bytes)} in {text.count(copied.files, 'file')}"
    if copied.already:
        lines = [f"{name}: there already, {what}, every byte verified"]
    else:
        lines = [f"{name}: copied, {what}{_pace(copied.written_bytes, copied.copy_seconds)}; every byte read back"]
        lines[0] += _pace(copied.bytes, copied.verify_seconds)
    if copied.step is None:
        lines.append("  it has no digests of its own: the copy is held against what was read, not what was saved")
    if not copied.already and copied.written_bytes < copied.bytes:
        kept = text.size(copied.bytes - copied.written_bytes)
        lines.append(f"  {kept} of it were there from an attempt before")
    if copied.from_memory:
        lines.append(f"  not proved: that it is on storage, for {text.plain(copied.from_memory)}")
    return lines + [f"  {text.plain(remark)}" for remark in copied.remarks]


def _pace(count: int, seconds: float) -> str:
    if seconds < 0.1:  # a rate of next to nothing is none
        return ""
    return f" in {seconds:.1f} s ({text.size(int(count / seconds))}/s)"


def _entries(job: _Job, path: Path, step: int | None, every: bool) -> list[Entry]:
    """Those to copy. What does not count is told and passed over, unless it was asked for by name."""
    entries = choose(path, step, every, passed_over=True)
    if step is not None or is_checkpoint(path):
        return entries
    chosen = []
    for entry in entries:
        if entry.newer_format is not None and not every:
            raise entry.newer_format
        if entry.complete:
            chosen.append(entry)
        else:
            job.pass_over(entry)
    if not chosen:
        raise NotFoundError(f"{path} holds no complete checkpoint: ckptman list {path} says what is there")
    return chosen


def _refuse_inside(path: Path, root: Path) -> None:
    """A root inside of the root that is copied would be one of its folders. Raises: ConfigError."""
    source, target = path.resolve(), root.resolve()
    if source == target or source in target.parents:
        raise ConfigError(f"{root} is {path} itself, or inside of it: name a root outside of what is copied")


def _means(limit: str | None, threads: int | None, overwrite: bool) -> Callable[[Meter], Means]:
    from ckptman.policy.checks import check_count
    from ckptman.store.copy import Means
    from ckptman.store.meter import Limit

    if threads is not None:
        check_count("copy", "--threads", threads)
        if threads > MOST_THREADS:
            raise ConfigError(f"--threads: at most {MOST_THREADS:,}, not {threads:,}")
    speed = parse_speed(limit, "--limit")
    shared = Limit(speed) if speed is not None else None

    def make(meter: Meter) -> Means:
        return Means(threads=threads, limit=shared, meter=meter, overwrite=overwrite)

    return make
