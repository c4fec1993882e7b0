"""When a run failed, as recorded: from a file of failure times, or from the run's own journal, with what that measured.

A trace is a text file. Each line is the time of a failure since the beginning: seconds, or a time such as `3h20min`; or
a date such as `2026-05-01T10:00:00`, where the first line is `start DATE`. `end TIME` says until when was looked; left
out, it is the last failure. What comes after `#` is a comment.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from ckptman.errors import ConfigError, CorruptError, NotFoundError, plain
from ckptman.runtime.journal import number_in, read_journal
from ckptman.runtime.measurements import typical_save_seconds
from ckptman.storage.format.paths import journal_path
from ckptman.storage.io.safe_open import open_regular, read_regular

_REMEDY = "give a text file of failure times, a journal or a root"
_MOST_BYTES = 64 * 1024 * 1024
_ENDED_IN_ORDER = ("finished", "stopped")


@dataclass(frozen=True)
class Trace:
    """Failures in seconds from the beginning, ascending, of `seconds` that were looked at; and what was measured, None
    where it was not: until a save was durable, for how long it blocked training, what a restart took."""

    failures: tuple[float, ...]
    seconds: float
    save_seconds: float | None = None
    stall_seconds: float | None = None
    restart_seconds: float | None = None

    @property
    def mtbf_seconds(self) -> float:
        """The time that was looked at, over the failures in it; one more than none where there was none."""
        return self.seconds / max(1, len(self.failures))


def read_trace(path: Path, parse_seconds: Callable[[str], float]) -> Trace:
    """Read a trace file, a journal, or the journal of a root. `parse_seconds` knows times such as `3h20min`.

    Raises: NotFoundError, ConfigError naming the line that is none.
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
        raise NotFoundError(f"there is no trace {path}: give a file of failure times, a journal or a root") from None
    except CorruptError as error:
        raise ConfigError(str(error)) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text: a trace has the time of a failure on each line") from None
    return _parse(text.splitlines(), path, parse_seconds)


def trace_of(events: Sequence[Mapping[str, Any]], where: Path) -> Trace:
    """Return what a journal tells of failures. The time between two attempts is left out: nothing could fail there.

    An attempt that neither finished nor was stopped has failed, when the last of it was heard; of the last attempt
    nobody can tell, unless it says so.
    """
    failures: list[float] = []
    elapsed, last = 0.0, None
    alive = started = failed = False
    for event in events:
        time = number_in(event.get("time"))
        if time is None:
            continue
        if event.get("event") == "attempt_started":
            if alive or failed:
                failures.append(elapsed)
            alive = started = True
            failed = False
        elif last is not None:
            elapsed += max(0.0, time - last)  # a clock may have been set back
        if event.get("event") in _ENDED_IN_ORDER:
            alive = False
        elif event.get("event") == "failed":
            alive, failed = False, True
        last = time
    if failed:
        failures.append(elapsed)
    if not started or elapsed <= 0:
        raise ConfigError(f"the journal of {where} tells of no attempt yet: give --mtbf, or a run that has trained")
    saves = typical_save_seconds(events)
    stalls, starts = _numbers(events, "save_staged", "seconds"), _numbers(events, "first_step", "init_seconds")
    return Trace(
        tuple(failures),
        elapsed,
        save_seconds=saves,
        stall_seconds=median(stalls) if stalls else saves,
        restart_seconds=median(starts) if starts else None,
    )


def _parse(lines: Sequence[str], path: Path, parse_seconds: Callable[[str], float]) -> Trace:
    start: float | None = None
    end: float | None = None
    failures: list[float] = []

    def time_of(written: str) -> float:
        date = _date(written)
        if date is not None:
            if start is None:
                raise ConfigError("a date needs a first line such as: start 2026-05-01T10:00:00")
            return date - start
        if start is not None:
            raise ConfigError("the trace begins with a date, so every line has to be one")
        with suppress(ValueError):  # a zero, which `parse_seconds` refuses
            if float(written) == 0:
                return 0.0
        return parse_seconds(written)

    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split(maxsplit=1)
        if not words:
            continue
        try:
            if words[0] == "start" and len(words) == 2 and not failures and start is None and end is None:
                start = _date(words[1])
                if start is None:
                    raise ConfigError("start takes a date such as 2026-05-01T10:00:00")
            elif words[0] == "end" and len(words) == 2 and end is None:
                end = time_of(words[1])
            else:
                failures.append(time_of(" ".join(words)))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {plain(line.strip())}: {error}") from None
    failures.sort()
    seconds = end if end is not None else max(failures, default=0.0)
    if seconds <= 0 or (failures and failures[0] < 0):
        raise ConfigError(f"{path}: it tells of no time: give failures after its start, or a line such as end 30d")
    if failures and failures[-1] > seconds:
        raise ConfigError(f"{path}: a failure after its end: correct the line that begins with end")
    return Trace(tuple(failures), seconds)


def _date(written: str) -> float | None:
    """Unix seconds of a date, UTC unless it names its zone; None for what is none."""
    if "-" not in written.strip()[1:]:
        return None
    try:
        date = datetime.fromisoformat(written.strip().replace("Z", "+00:00"))
    except ValueError:
        return None
    return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()


def _numbers(events: Sequence[Mapping[str, Any]], name: str, field: str) -> list[float]:
    found = (number_in(event.get(field)) for event in events if event.get("event") == name)
    return [each for each in found if each is not None]
