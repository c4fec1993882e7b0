"""`ckptman verify PATH`: prove that every byte is what was saved, and that it loads on any number of processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli import text
from ckptman.cli.list import AsJson
from ckptman.cli.target import PathOrRoot, Step, choose, is_foreign
from ckptman.errors import CkptmanError, ConfigError, CorruptError, FormatVersionError, MismatchError

if TYPE_CHECKING:
    from ckptman.store.catalogue import Entry

All = Annotated[bool, typer.Option("--all", help="Of a root: all its checkpoints.")]
WorldSize = Annotated[
    str | None,
    typer.Option(
        "--world-size",
        metavar="N,N,...",
        show_default=False,
        help="Also load it with each of these numbers of processes, and compare with what was saved.",
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", show_default=False, help="Read that many files at a time.")
]


@dataclass
class Report:
    """What was found about one checkpoint. `digests`: it has any (plain DCP writes none).

    `problems`: bytes that are not what was saved. `loads`: for each world size, what kept it from loading bit for bit.
    """

    step: int | None
    path: Path
    digests: bool = True
    files: int = 0
    bytes: int = 0
    tensors: int = 0
    problems: list[str] = field(default_factory=list)
    newer_format: FormatVersionError | None = None
    loads: dict[int, list[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"step {self.step}" if self.step is not None else str(self.path)

    @property
    def loads_everywhere(self) -> bool:
        return not any(self.loads.values())

    def as_dict(self) -> dict[str, Any]:
        """The same, for JSON."""
        return {
            "step": self.step,
            "path": str(self.path),
            "good": not self.problems and self.newer_format is None and self.loads_everywhere,
            "digests": self.digests,
            "files": self.files,
            "bytes": self.bytes,
            "tensors": self.tensors,
            "problems": self.problems or ([str(self.newer_format)] if self.newer_format else []),
            "world_sizes": {str(size): problems for size, problems in self.loads.items()},
        }


def verify(
    path: PathOrRoot,
    step: Step = None,
    every: All = False,
    world_size: WorldSize = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Prove that every byte is what was saved.

    Exit code 0: proved. 4: damaged. 7: it does not load on one of the world sizes. 9: a newer ckptman wrote it.
    """
    world_sizes = parse_world_sizes(world_size)
    threads = _thread_count(threads)
    foreign = step is None and not every and is_foreign(path)
    reports = []
    for entry in [None] if foreign else choose(path, step, every):
        report = _check_bytes(entry, threads) if entry is not None else Report(None, path, digests=False)
        if not report.problems and report.newer_format is None:
            _check_loading(report, world_sizes)
        reports.append(report)
        if not as_json:
            text.say("\n".join(_lines(report)))
    if as_json:
        text.say_json({"checkpoints": [report.as_dict() for report in reports]})
    _raise_for(reports)


def parse_world_sizes(written: str | None) -> list[int]:
    """`1,2,4` as numbers, each once. Raises: ConfigError."""
    try:
        sizes = [int(part) for part in written.split(",")] if written is not None else []
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise ConfigError(
            f"--world-size: numbers of processes with commas between them, such as 1,2,4, not {written!r}"
        )
    return list(dict.fromkeys(sizes))


def _thread_count(threads: int | None) -> int:
    from ckptman.policy.checks import check_count

    if threads is None:
        return min(8, os.cpu_count() or 1)
    check_count("verify", "--threads", threads)
    return threads


def _check_bytes(entry: Entry, threads: int) -> Report:
    from ckptman.store.index import read_index
    from ckptman.store.verify import check_coverage, verify_files

    report = Report(entry.step, entry.path, newer_format=entry.newer_format)
    if entry.newer_format is not None:
        return report
    if entry.manifest is None or entry.problem is not None:
        report.problems.append(entry.problem or "it has no manifest")
        return report
    with _progress(f"step {entry.step}", entry.manifest.total_bytes) as done:
        files = verify_files(entry, threads=threads, done=done)
    report.files, report.bytes, report.problems = files.files, files.bytes, list(files.problems)
    if not report.problems:
        try:
            report.tensors = len(read_index(entry.path, entry.manifest).tensors)
            report.problems += check_coverage(entry.path, entry.manifest)
        except CorruptError as error:
            report.problems.append(str(error))
    return report


def _check_loading(report: Report, world_sizes: list[int]) -> None:
    if not world_sizes:
        return
    from ckptman.cli.loading import load_on

    try:
        for world_size, problems in load_on(report.path, world_sizes):
            report.loads[world_size] = problems
    except CorruptError as error:
        report.problems.append(str(error))


def _lines(report: Report) -> list[str]:
    good = text.paint("good", "green")
    lines = []
    if report.newer_format is not None:
        lines.append(f"{report.name}: not checked, {text.plain(report.newer_format)}")
    elif report.problems:
        lines.append(f"{report.name}: {text.paint('damaged', 'red')}, {text.plain(report.path)}")
        lines += [f"  {text.plain(problem)}" for problem in report.problems]
    elif report.digests:
        what = f"{text.count(report.files, 'file')}, {text.size(report.bytes)}: every byte matches its digest"
        lines.append(f"{report.name}: {good}, {what}; {text.count(report.tensors, 'tensor')}, all complete")
    else:
        lines.append(f"{text.plain(report.name)}: written by plain DCP without digests: changed bytes cannot be found")
    for world_size, problems in report.loads.items():
        on = text.count(world_size, "process", "processes")
        if problems:
            lines.append(f"  on {on}: {text.paint('does not load', 'red')}")
            lines += [f"    {text.plain(problem)}" for problem in problems]
        else:
            lines.append(f"  on {on}: loads, bit for bit what was saved")
    return lines


def _raise_for(reports: list[Report]) -> None:
    """End with the worst that was found. Raises: CorruptError, FormatVersionError, typer.Exit with 7."""
    damaged = [report for report in reports if report.problems]
    if damaged:
        names = ", ".join(report.name for report in damaged)
        raise CorruptError(
            f"{len(damaged)} of {text.count(len(reports), 'checkpoint')} damaged or incomplete: {names}. A restore "
            f"passes over them; bring them back from a copy, or remove their folders"
        )
    if newer := next((report.newer_format for report in reports if report.newer_format), None):
        raise newer
    stuck = [report for report in reports if not report.loads_everywhere]
    if stuck:
        raise _DoesNotLoad(stuck)


class _DoesNotLoad(CkptmanError):
    exit_code = MismatchError.exit_code

    def __init__(self, stuck: list[Report]) -> None:
        report = stuck[0]
        sizes = ", ".join(str(size) for size, problems in report.loads.items() if problems)
        super().__init__(f"{report.name} does not load on {sizes} processes as it was saved: see the lines above")


@contextmanager
def _progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on a terminal, with what to call with the bytes done; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    title = TextColumn("{task.description}", markup=False)
    with Progress(title, *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done: bar.advance(task, done)
