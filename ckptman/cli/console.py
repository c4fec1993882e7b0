"""What people read: sizes, ages and aligned tables, with nothing in them that a terminal would obey."""

from __future__ import annotations

import getpass
import json
import math
import os
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from ckptman.errors import CkptmanError, RootError, plain, plain_lines
from ckptman.policies.calendar import is_known_time

if TYPE_CHECKING:
    from ckptman.format.manifest import Mesh

__all__ = [
    "age",
    "complain",
    "count",
    "exit_code",
    "mesh",
    "message",
    "metrics",
    "paint",
    "plain",
    "say",
    "say_json",
    "size",
    "stop_writing",
    "table",
    "user_at_host",
]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def say(*lines: str) -> None:
    """Print lines to standard output. Ends the program quietly when nobody reads it any more (`| head`)."""
    try:
        typer.echo("\n".join(lines))
    except BrokenPipeError:
        raise typer.Exit(stop_writing()) from None


def say_json(data: object) -> None:
    """Print strict JSON: numbers that JSON has no name for become "NaN", "Infinity" and "-Infinity"."""
    say(json.dumps(_strict(data), indent=1))


def complain(message: str) -> None:
    """Print an error message to standard error: the only one of a command that fails."""
    typer.echo(f"{paint('Error:', 'red', sys.stderr)} {plain_lines(message)}", err=True)


def message(error: Exception) -> str:
    """What to tell. The text of an OSError begins with its number, and says nothing of what to do; ours do."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    if isinstance(error, CkptmanError):
        return error.strerror
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}: check the mount, its permissions and its quota"


def exit_code(error: Exception) -> int:
    """The exit code of a command that ends with this error: of ours, its own; of the system's, that of a RootError."""
    return error.exit_code if isinstance(error, CkptmanError) else RootError.exit_code


def user_at_host() -> str:
    """Who runs the command, for what others read later: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container that knows no name for the uid
        user = str(os.getuid())
    return plain(f"{user}@{socket.gethostname()}")


def stop_writing() -> int:
    """Throw away all further output, and say the exit code: that of a program which SIGPIPE killed."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
    return 128 + signal.SIGPIPE


def paint(text: str, colour: str, stream: Any = None) -> str:
    """Coloured text where the output is a terminal and NO_COLOR (https://no-color.org) is not set."""
    stream = stream or sys.stdout
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return typer.style(text, fg=colour, bold=True)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: str = "") -> list[str]:
    """Lines of columns two spaces apart. Columns whose header is among the words of `right` end flush right."""
    cells = [list(headers), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    to_right = [header in right.split() for header in headers]
    widths[-1] = 0  # what follows the last column would be blanks
    lines = []
    for row in cells:
        padded = (
            cell.rjust(width) if flush else cell.ljust(width) for cell, width, flush in zip(row, widths, to_right)
        )
        lines.append("  ".join(padded).rstrip())
    return lines


def size(count: int) -> str:
    """Bytes for people: `512 B`, `1.2 GiB`."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def age(seconds: float) -> str:
    """A length of time for people: `42 s`, `5 min`, `3 h`, `12 d`. A clock that is behind gives `0 s`."""
    if seconds < 100:
        return f"{max(0, seconds):.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:.0f} d"


def age_of(time_seconds: float, now: float) -> str:
    """The age of what was made at a unix time; `unknown` where the clock that made it, or the one now, is broken."""
    return age(now - time_seconds) if is_known_time(time_seconds) and is_known_time(now) else "unknown"


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 file`, `2,000 files`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def metrics(values: Mapping[str, float]) -> str:
    """`loss=0.31 accuracy=0.5`, to four digits."""
    return " ".join(f"{plain(name)}={value:.4g}" for name, value in values.items())


def mesh(value: Mesh | None) -> str:
    """`replicate 2 x shard 4`, outermost axis first; `-` where nothing is known."""
    if value is None:
        return "-"
    return " x ".join(f"{plain(name)} {length}" for name, length in zip(value.names, value.shape))


def _strict(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return "NaN" if math.isnan(data) else "Infinity" if data > 0 else "-Infinity"
    if isinstance(data, Mapping):
        return {key: _strict(each) for key, each in data.items()}
    if isinstance(data, (list, tuple)):
        return [_strict(each) for each in data]
    return data
