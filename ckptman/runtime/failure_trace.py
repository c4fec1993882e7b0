"""When a run failed, as recorded: from a file of failure times, or from the run's own journal, with what that measured.

A trace is a text file. Each line is the time of a failure since the beginning: seconds, or a time such as `3h20min`; or
a date such as `2026-05-01T10:00:00`, if the first line is `start DATE`. `end TIME` says how long failures were
recorded; without it, until the last failure. What comes after `#` is a comment.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from ckptman.errors import ConfigError, CorruptError, NotFoundError, plain
from ckptman.runtime.journal import number_in, read_journal, typical_save_seconds
from ckptman.storage.format.paths import journal_path
from ckptman.storage.io.safe_open import open_regular, read_regular

_REMEDY = "give a text file of failure times, a journal or a root"
_MOST_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Trace:
    """Failures in seconds from the beginning, ascending, within the `seconds` that were recorded.

    Measured, or None: the time until a save was durable, how long it blocked training, how long a restart took.
    """

    failures: tuple[float, ...]
    seconds: float
    save_seconds: float | None = None
    stall_seconds: float | None = None
    restart_seconds: float | None = None

    @property
    def mtbf_seconds(self) -> float:
        """The recorded time over the number of failures, at least one."""
        return self.seconds / max(1, len(self.failures))


def read_trace(path: Path, parse_seconds: Callable[[str], float]) -> Trace:
    """Read a trace file, a journal, or the journal of a root. `parse_seconds` parses times such as `3h20min`.

    Raises: NotFoundError; ConfigError, naming the line.
    """
    if path.is_dir():
        return trace_of(read_journal(journal_path(path))[0], path)
    try:
        # By its first bytes, as a journal may be larger than a trace.
        fd = open_regular(path, follow=True, remedy=_REMEDY)
        try:
            begin = os.read(fd, 4096).removeprefix(codecs.BOM_UTF8).lstrip()
        finally:
            os.close(fd)
        if begin.startswith(b"{"):
            return trace_of(read_journal(path)[0], path)
        text = read_regular(path, _MOST_BYTES, follow=True, remedy=_REMEDY).decode("utf-8-sig")
    except FileNotFoundError:
        raise NotFoundError(f"there is no trace {path}: {_REMEDY}") from None
    except CorruptError as error:
        raise ConfigError(str(error)) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text: a trace has the time of a failure on each line") from None
    return _parse(text.splitlines(), path, parse_seconds)


def trace_of(events: Sequence[Mapping[str, Any]], where: Path) -> Trace:
    """Return the failures in a journal, without the time between two attempts, when nothing could fail.

    An attempt that neither finished nor was stopped failed at its last event; the last attempt, which may still be
    running, only if it says so.
    """
    failures: list[float] = []
    elapsed, last, state = 0.0, None, ""
    for event in events:
        time, name = number_in(event.get("time")), event.get("event")
        if time is None:
            continue
        if name == "attempt_started":
            failures += [elapsed] if state in ("running", "failed") else []
            state = "running"
        elif last is not None:
            elapsed += max(0.0, time - last)  # a clock may have been set back
        if name in ("finished", "stopped", "failed"):
            state = name
        last = time
    failures += [elapsed] if state == "failed" else []
    stalls, starts = _numbers(events, "save_staged", "seconds"), _numbers(events, "first_step", "init_seconds")
    if elapsed <= 0 or not any(event.get("event") == "attempt_started" for event in events):
        raise ConfigError(f"the journal of {where} contains no attempts yet: give --mtbf, or a run that has trained")
    saves = typical_save_seconds(events)
    return Trace(
        tuple(failures), elapsed, saves, median(stalls) if stalls else saves, median(starts) if starts else None
    )


def _numbers(events: Sequence[Mapping[str, Any]], name: str, field: str) -> list[float]:
    found = (number_in(event.get(field)) for event in events if event.get("event") == name)
    return [each for each in found if each is not None]


def _parse(lines: Sequence[str], path: Path, parse_seconds: Callable[[str], float]) -> Trace:
    start = end = None
    failures: list[float] = []

    def time_of(written: str) -> float:
        date = _date(written)
        if start is None and date is not None:
            raise ConfigError("a date needs a first line such as: start 2026-05-01T10:00:00")
        if start is not None and date is None:
            raise ConfigError("the trace begins with a date, so every line has to be one")
        if start is not None and date is not None:
            return date - start
        return 0.0 if written.strip(" 0.") == "" and "0" in written else parse_seconds(written)

    for number, line in enumerate(lines, start=1):
        written = line.partition("#")[0].strip()
        word, _, rest = written.partition(" ")
        try:
            if word == "start" and not failures and start is None and end is None:
                start = _date(rest)
                if start is None:
                    raise ConfigError("start takes a date such as 2026-05-01T10:00:00")
            elif word == "end" and end is None:
                end = time_of(rest)
            elif written:
                failures.append(time_of(written))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {plain(line.strip())}: {error}") from None
    failures.sort()
    seconds = max(failures, default=0.0) if end is None else end
    if seconds <= 0 or (failures and failures[0] < 0):
        raise ConfigError(f"{path}: it contains no time: give failures after its start, or a line such as end 30d")
    if failures and failures[-1] > seconds:
        raise ConfigError(f"{path}: a failure after its end: correct the line that begins with end")
    return Trace(tuple(failures), seconds)


def _date(written: str) -> float | None:
    """Return the unix seconds of a date, in UTC unless it names its zone; None if it is not a date."""
    try:
        date = datetime.fromisoformat(written.strip().replace("Z", "+00:00")) if "-" in written else None
    except ValueError:
        return None
    return None if date is None else (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()
