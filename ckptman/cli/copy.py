"""`ckptman copy SRC DST`: checkpoints to another root, every byte read back there before they count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import console
from ckptman.cli.options import AsJson, check_threads, option, parse_rate, path_argument
from ckptman.cli.progress import copy_progress
from ckptman.cli.select import Step, choose, choose_objects, is_foreign
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
    from ckptman.storage.catalog.backends.backend import Backend
    from ckptman.storage.catalog.catalog import Entry
    from ckptman.storage.transfer.copy import Copied, CopyOptions

Source = Annotated[
    str, path_argument("SRC", "A checkpoint, or a root (then its newest checkpoint), or s3://bucket/prefix.")
]
Destination = Annotated[str, path_argument("DST", "The root to copy to, or s3://bucket/prefix.")]
All = Annotated[bool, typer.Option("--all", help="Of a root: all its checkpoints, oldest commit first.")]
Speed = Annotated[str | None, option("--limit", "SPEED", "Move no more than this, such as 500MB/s.")]
Threads = Annotated[int | None, option("--threads", "N", "Threads that move bytes.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace another checkpoint of the same step, or a damaged copy.")
]
_WORST_FIRST = (CorruptError, FormatVersionError, RootError, BusyError, ExistsError)
_LOOKS = 3
_TIMED_BYTES = 64 * 1024 * 1024
"""The rate of less than this says how long a flush takes, and not how fast a copy is."""


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
    from ckptman.storage.catalog.backends.backend import find_url, open_backend
    from ckptman.storage.catalog.reader_lease import GoneError
    from ckptman.storage.format.paths import parse_step
    from ckptman.storage.transfer.copy import CopyOptions, copy_foreign
    from ckptman.storage.transfer.progress import Limit

    check_threads("copy", threads)
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
        with copy_progress(path.name) as meter:
            job.done(copy_foreign(path, place, replace(options, meter=meter)))
    else:
        if target_url is None:
            _refuse_inside(path, Path(destination))
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


def _refuse_inside(path: Path, root: Path) -> None:
    """A root inside of the root that is copied would be one of its folders. Raises: ConfigError."""
    source, target = path.resolve(), root.resolve()
    if source == target or source in target.parents:
        raise ConfigError(f"{root} is {path} itself, or inside of it: name a root outside of what is copied")


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
        from ckptman.storage.catalog.backends.drafts import BusyCopyingError
        from ckptman.storage.catalog.backends.source import SourceError
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
        self._say([f"step {entry.step}: {console.paint('not copied', 'red')}: {console.message(error)}"])

    def _reject(self, entry: Entry, why: str) -> None:
        self.passed_over.append((entry, why))
        self._say([f"step {entry.step}: not copied: {console.plain(why)}"])

    def _say(self, lines: list[str]) -> None:
        if not self._as_json:
            console.say(*lines)

    def _summary(self) -> str:
        new = [each for each in self.copied if not each.already]
        where = console.plain(self._destination)
        there = console.count(len(self.copied) - len(new), "checkpoint")
        if not self.copied:
            return "Nothing was copied."
        if not new:
            return f"Nothing to copy: {there} in {where} already."
        copied = f"{console.count(len(new), 'checkpoint')}, {console.size(sum(each.bytes for each in new))}, to {where}"
        return f"Copied {copied}{f'; {there} there already' if len(new) < len(self.copied) else ''}."


def copied_lines(copied: Copied) -> list[str]:
    """What became of one checkpoint, in words."""
    name = f"step {copied.step}" if copied.step is not None else console.plain(copied.source)
    what = f"{console.size(copied.bytes)} in {console.count(copied.files, 'file')}"
    if copied.already:
        lines = [f"{name}: there already, {what}, every byte verified"]
    else:
        lines = [f"{name}: copied, {what}{_pace(copied.written_bytes, copied.copy_seconds)}; every byte read back"]
        lines[0] += _pace(copied.bytes, copied.verify_seconds)
    if copied.step is None:
        lines.append("  it has no digests of its own: the copy is held against what was read, not what was saved")
    if not copied.already and copied.written_bytes < copied.bytes:
        kept = console.size(copied.bytes - copied.written_bytes)
        lines.append(f"  {kept} of it were there already")
    if copied.from_memory:
        lines.append(f"  not proved: that it is on storage, for {console.plain(copied.from_memory)}")
    return lines + [f"  {console.plain(remark)}" for remark in copied.remarks]


def _pace(count: int, seconds: float) -> str:
    if count < _TIMED_BYTES:
        return ""
    return f" in {seconds:.1f} s ({console.size(int(count / max(seconds, 1e-9)))}/s)"
