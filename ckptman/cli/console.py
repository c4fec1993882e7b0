"""Output for people and programs: lines, JSON, errors, tables, progress bars, free of terminal escapes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from ckptman.errors import CkptmanError, RootError, plain, plain_lines
from ckptman.policies.retention_rules import bytes_text, is_known_time

if TYPE_CHECKING:
    from ckptman.storage.format.manifest import Mesh

LEAST_LAST_COLUMN = 24
"""Columns that the last column of a table is folded to at least."""
size = bytes_text
_COLOURS = {"red": 31, "green": 32, "yellow": 33}
_INK = os.urandom(4).hex()
"""Marks the colours of `paint`, so that text from a checkpoint brings none of its own."""
_PAINT = re.compile(rf"(\x1b{_INK}\[[0-9;]*m)")
_AGAIN_SECONDS = 0.01


def say(*lines: str) -> None:
    """Print lines to standard output, as `printed` returns them."""
    write("\n".join(map(printed, lines)))


def printed(line: str) -> str:
    """Return a line as a terminal gets it: painted, and each unsafe character of its text an escape."""
    return _safe(line).replace(_INK, "")


def _safe(text: object) -> str:
    """Return text with each unsafe character as an escape; what `paint` added stays."""
    return "".join(part if place % 2 else plain(part) for place, part in enumerate(_PAINT.split(str(text))))


def write(text: str) -> None:
    """Print text as it is. Ends the program quietly when nobody reads it any more (`| head`)."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        raise typer.Exit(stop_writing()) from None


def say_json(data: object) -> None:
    """Print strict JSON: dataclasses as objects, paths as strings, and numbers that JSON has no name for as "NaN",
    "Infinity" and "-Infinity"."""
    write(json.dumps(_strict(data), indent=1))


def complain(message: str) -> None:
    """Print an error message to standard error: the only one of a command that fails."""
    title = paint("Error:", "red", sys.stderr)
    typer.echo(f"{printed(title)} {plain_lines(message)}", err=True)


def remark(text: str) -> None:
    """Print a line to standard error: the reason why a command takes long."""
    typer.echo(plain(text), err=True)


def message(error: Exception) -> str:
    """Return the text to print for an error; for an OSError without its number, and with a remedy."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    if isinstance(error, CkptmanError):
        return error.strerror
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}: check the mount, its permissions and its quota"


def exit_code(error: Exception) -> int:
    """Return the exit code for an error: that of its class, or for an error of the system that of RootError."""
    return error.exit_code if isinstance(error, CkptmanError) else RootError.exit_code


def stop_writing() -> int:
    """Discard all further output, and return the exit code of a program that SIGPIPE killed."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
    return 128 + signal.SIGPIPE


def paint(text: str, colour: str | None, stream: Any = None) -> str:
    """Colour text if the output is a terminal and NO_COLOR (https://no-color.org) is not set."""
    stream = stream or sys.stdout
    if colour is None or not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b{_INK}[1;{_COLOURS[colour]}m{text}\x1b{_INK}[0m"


def terminal_width() -> int | None:
    """Return the columns of the terminal that standard output goes to; None where it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def page_width() -> int:
    """Return the columns of a table with long reasons: those of the terminal, or 100."""
    return terminal_width() or 100


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: str = "",
    *,
    drop: Sequence[str] = (),
    indent: int = 0,
    width: int | None = None,
) -> list[str]:
    """Return the lines of a table; without headers, no column has one. A cell that is None is shown as `-`. Columns
    whose header is among the words of `right` are right-aligned.

    Where it is wider than the terminal, or than `width`, columns of `drop` are left out, the first one first; the last
    column is folded; and if that is not enough, the widest column gets a line of its own above each row. What goes
    elsewhere than to a terminal stays whole.
    """
    cells = [list(headers)] * bool(headers) + [["-" if cell is None else _safe(cell) for cell in row] for row in rows]
    room = terminal_width() if width is None else width
    if not cells:
        return []
    widths = [max(map(_length, column)) for column in zip(*cells)]
    shown, above, dropped = list(range(len(widths))), list[int](), list[str]()

    def is_too_wide() -> bool:
        fixed = sum(widths[each] + 2 for each in shown[:-1])
        return room is not None and indent + fixed + min(widths[shown[-1]], LEAST_LAST_COLUMN) > room

    for name in drop:
        if is_too_wide() and name in headers:
            shown.remove(headers.index(name))
            dropped.append(name)
    while len(shown) > 1 and is_too_wide():
        above.append(max(shown[:-1], key=widths.__getitem__))
        shown.remove(above[-1])
    inner = indent + 2 * bool(above)
    left = sum(widths[each] + 2 for each in shown[:-1])
    lines = []
    for row in cells:
        lines += [" " * indent + row[each] for each in above if row[each]]
        start = " " * inner
        for each in shown[:-1]:
            blanks = " " * (widths[each] - _length(row[each]))
            flush = bool(headers) and headers[each] in right.split()
            start += (blanks + row[each] if flush else row[each] + blanks) + "  "
        folded = fold(row[shown[-1]], None if room is None else max(LEAST_LAST_COLUMN, room - inner - left))
        lines += [(start + folded[0]).rstrip(), *(" " * (inner + left) + each for each in folded[1:])]
    if dropped and room is not None:
        told = f"(no room for {', '.join(dropped)}: in a wider terminal, or with --json)"
        lines += [" " * indent + each for each in fold(told, room - indent)]
    return lines


def _length(cell: str) -> int:
    return len(_PAINT.sub("", cell))


def fold(cell: str, width: int | None) -> list[str]:
    """Return the lines of a text that may take so many columns; None: any number."""
    if width is None or _length(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_on_hyphens=False, break_long_words=False) or [""]


def cut(text: str, width: int) -> str:
    """Return text that takes no more than so many columns."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def age(seconds: float) -> str:
    """Format a duration: `42 s`, `5 min`, `3 h`, `12 d`. A negative one, of a clock that is behind, is `0 s`."""
    if seconds < 100:
        return f"{max(0, seconds):.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:.0f} d"


def age_of(time_seconds: float, now: float) -> str:
    """Format the age at `now` of a unix time; `unknown` if either clock is wrong."""
    return age(now - time_seconds) if is_known_time(time_seconds) and is_known_time(now) else "unknown"


def count(number: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun: `1 file`, `2,000 files`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def metrics(values: Mapping[str, float]) -> str:
    """Format metrics to four digits: `loss=0.31 accuracy=0.5`."""
    return " ".join(f"{name}={value:.4g}" for name, value in values.items())


def mesh(value: Mesh | None) -> str:
    """Format a mesh, outermost axis first: `replicate 2 x shard 4`; `-` if unknown."""
    if value is None:
        return "-"
    return " x ".join(f"{name} {length}" for name, length in zip(value.names, value.shape))


def _strict(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return "NaN" if math.isnan(data) else "Infinity" if data > 0 else "-Infinity"
    if isinstance(data, Mapping):
        return {key: _strict(each) for key, each in data.items()}
    if isinstance(data, (list, tuple)):
        return [_strict(each) for each in data]
    if isinstance(data, PurePath):
        return str(data)
    if is_dataclass(data):
        return {each.name: _strict(getattr(data, each.name)) for each in fields(data)}
    return data


if TYPE_CHECKING:
    from rich.progress import Progress

    from ckptman.storage.transfer.progress import Meter


@contextmanager
def progress(what: str, total_bytes: int | None) -> Iterator[Callable[[float], None] | None]:
    """Yield a function to call with the bytes done since the last call, or None if standard error is not a terminal.

    Without `total_bytes` it is to be called with the fraction done so far, from 0 to 1.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import DownloadColumn, TaskProgressColumn, TimeRemainingColumn, TransferSpeedColumn

    counts = (
        (TaskProgressColumn(),) if total_bytes is None else (DownloadColumn(binary_units=True), TransferSpeedColumn())
    )
    with _bar(*counts, TimeRemainingColumn()) as bar:
        task = bar.add_task(plain(what), total=1.0 if total_bytes is None else total_bytes)
        if total_bytes is None:
            yield lambda part: bar.update(task, completed=part)
        else:
            yield lambda done: bar.advance(task, done)


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yield a function to call with what is being done: a line that each call replaces, shown on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    try:
        yield lambda text: print(f"\r\x1b[K{plain(text)} ...", end="", file=sys.stderr, flush=True)
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the command with everything cleaned up."""

    def leave(number: int, frame: FrameType | None) -> None:
        if _is_in_finalizer(frame):  # where Python drops what is raised
            threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number)).start()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)

    with ExitStack() as undo:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) in (signal.SIG_DFL, signal.default_int_handler):  # nohup has SIGHUP ignored
                undo.callback(signal.signal, each, signal.signal(each, leave))
        yield


def _is_in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@contextmanager
def copy_progress(name: str) -> Iterator[Meter]:
    """Yield the meter of a copy, and show its phase, speed and remaining time."""
    from ckptman.storage.transfer.progress import Meter

    if not sys.stderr.isatty():
        yield Meter()
        return
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with _bar(DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(plain(name), total=None)
        shown = [""]

        def show(meter: Meter) -> None:
            if shown[0] != meter.phase:  # else the speed would be that of the phase before
                shown[0] = meter.phase
                bar.reset(task, total=meter.total_bytes, description=f"{plain(name)}: {meter.phase}")
            bar.update(task, completed=meter.done_bytes)

        yield Meter(show)


def _bar(*columns: Any) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    # Lines that are said meanwhile go above the bar; where standard output is no terminal, they stay there.
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )
