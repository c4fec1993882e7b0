"""The run journal: one JSON object per line, appended, never changed. Every report is built from it.

An attempt that finds it larger than `ROTATE_BYTES` gives it another name and begins a new one; what had that name goes.
Readers read both, and of each no more than the last `MOST_BYTES`.

It also tells what earlier attempts measured: what a save takes, and when an attempt was under way.
"""

from __future__ import annotations

import errno
import json
import math
import numbers
import os
import stat
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptman.errors import NotFoundError, masked
from ckptman.policies.crash_loop import crashes_of, suspects
from ckptman.storage.format.paths import journal_path, run_folder
from ckptman.storage.io.durable_files import DISK, give_to_owner_of, open_new
from ckptman.storage.io.safe_open import read_end

ROTATE_BYTES = 24 * 1024 * 1024
"""Some 100,000 events: about a month of training, which tells of its progress every 30 s."""
MOST_BYTES = 32 * 1024 * 1024
_MOST_LINE_BYTES = 1024 * 1024
_LARGEST = 1e12
"""Seconds: more than that was never measured."""

_OPEN = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


class Journal:
    """Appends the events of a run to a file.

    Each event is one `write` of one whole line to a file opened for appending: a kill leaves all of a line or none, a
    power cut or a full disk at worst a torn last line, and the next event starts on a line of its own.
    A journal that cannot be written warns once and never ends a run. Thread-safe. Written by the leader of a run;
    nothing is opened before the first event. `tell` and what is added to `listeners` hear each event, and its fields as
    they were written; they must not raise.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: Callable[[], float] = time.time,
        tell: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._fd: int | None = None  # first: `__del__` reads it, also of a Journal whose path is refused
        self.path = Path(path)
        self._clock = clock
        self.listeners = [tell] if tell is not None else []
        self._lock = threading.Lock()
        self._torn = False
        self._warned = False
        self._bound: dict[str, object] = {}

    def bind(self, **fields: object) -> None:
        """Add fields to each later line, such as `attempt=2`."""
        with self._lock:
            self._bound |= fields

    def record(self, event: str, /, *, sync: bool = False, **fields: object) -> None:
        """Append one event, with its time in unix seconds; with `sync`, flushed to storage before this returns.

        Values that JSON does not know are written as their text, numbers that are not finite as "nan", "inf" and "-inf"
        (`float()` reads them back). What looks like a secret in a text is masked: whoever may read the root reads this.
        """
        with self._lock:
            line: dict[str, object] = {"time": self._clock(), "event": event}
            for name, value in {**self._bound, **fields}.items():
                line.setdefault(name, _plain(value))
            try:
                self._append(json.dumps(line).encode("ascii") + b"\n", sync)
            except OSError as error:
                self._warn(error)
        for tell in self.listeners:
            tell(event, line)

    def rotate(self) -> None:
        """Begin a new file if the one there is too large, and keep that beside it. Called before the first event, by
        the one who holds the root."""
        try:
            found = os.lstat(self.path)
            if stat.S_ISREG(found.st_mode) and found.st_size > ROTATE_BYTES:
                DISK.rename(self.path, previous_path(self.path))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        """Close the file. A later event opens it again."""
        with self._lock:
            fd, self._fd = self._fd, None
            try:
                if fd is not None:
                    os.close(fd)
            except OSError as error:  # where a server is told only now what was written
                self._warn(error)

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def _append(self, line: bytes, sync: bool) -> None:
        fd = self._open()
        data = b"\n" + line if self._torn else line
        written = os.write(fd, data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were written")
        if sync:
            DISK.sync_file(fd)

    def _open(self) -> int:
        if self._fd is None:
            DISK.make_folder_if_missing(self.path.parent)
            # Not through a link, and not to a pipe: nobody may have us write to what is none of ours, or wait.
            fd = open_new(self.path, _OPEN | os.O_RDWR | os.O_APPEND)
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                os.close(fd)
                raise OSError(errno.EINVAL, "it is not a file", str(self.path))
            if not found.st_size:
                give_to_owner_of(self.path.parent, fd)
            self._torn = found.st_size > 0 and os.pread(fd, 1, found.st_size - 1) != b"\n"
            self._fd = fd
        return self._fd

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the journal {self.path} cannot be written ({error}): the run goes on, and reports will have a gap. "
                f"Make room, or check permissions",
                RuntimeWarning,
                stacklevel=3,
            )


def previous_path(path: str | os.PathLike[str]) -> Path:
    """Return where the file before a journal is kept: `journal.1.jsonl` beside `journal.jsonl`."""
    return Path(path).with_suffix(f".1{Path(path).suffix}")


def note(root: Path, event: str, **fields: object) -> None:
    """Record one event in the journal of a root, durably, from outside of its run."""
    journal = Journal(journal_path(root))
    journal.record(event, sync=True, **fields)
    journal.close()


def read_journal(path: str | os.PathLike[str], most_bytes: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """Read the events of a journal and of the file before it, oldest first, and how many torn lines were left out.

    Of a file larger than `most_bytes` (None: `MOST_BYTES`) the last events that fit. Raises: NotFoundError.
    """
    files, folder = [], Path(path).parent
    if folder.name == run_folder(Path()).name and folder.is_symlink():  # what it links to belongs to somebody else
        raise NotFoundError(f"there is no journal {os.fspath(path)}: {folder} is a link: remove it")
    for each in (previous_path(path), Path(path)):
        try:
            files.append(_events(each, MOST_BYTES if most_bytes is None else most_bytes))
        except FileNotFoundError as error:
            if isinstance(error, NotFoundError) and each == Path(path):
                raise
    if not files:
        raise NotFoundError(f"there is no journal {os.fspath(path)}: no run has been started there")
    return [event for events, _ in files for event in events], sum(torn for _, torn in files)


def events_of(root: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of the run of a root, oldest first; [] if no run was started in it. Raises: OSError."""
    try:
        return read_journal(journal_path(Path(root)))[0]
    except (NotFoundError, NotADirectoryError):
        return []


def suspects_of(root: str | os.PathLike[str]) -> dict[int, str]:
    """Return the steps that a restore passes over, and why, as of now: see `crash_loop.suspects`. Raises: OSError."""
    return suspects(crashes_of(events_of(root)))


def _events(path: Path, most_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """Those of one file. Raises: FileNotFoundError; NotFoundError where something else lies there."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _OPEN)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise NotFoundError(f"{os.fspath(path)} is not a journal, but a pipe or a device: remove it")
            data, is_whole = read_end(file.fileno(), most_bytes)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotFoundError(f"{os.fspath(path)} is not a journal, but a link: remove it") from error
        if not isinstance(error.filename, str):  # a folder is opened, and cannot be read
            error.filename = os.fspath(path)
        raise
    lines = data.split(b"\n")
    events, torn = [], 0
    for line in lines if is_whole else lines[1:]:  # the first one is a part of a line
        if not line:
            continue
        try:
            event = json.loads(line) if len(line) <= _MOST_LINE_BYTES else None
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and "event" in event and "time" in event:
            events.append(event)
        else:
            torn += 1
    return events, torn


def number_in(value: object) -> float | None:
    """Return what a journal has as a number; None where it is none that a run has written, as anybody may edit it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= _LARGEST else None


def _plain(value: object) -> object:
    """The same value in types that JSON knows."""
    if isinstance(value, str):
        return masked(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    try:
        return masked(str(value))
    except Exception:  # noqa: BLE001 somebody else's __str__ must not end a run
        return f"<{type(value).__name__}>"


LAST_SAVES = 5
"""How many saves are looked at: one slow save must not count for ever."""


def save_seconds(root: str | os.PathLike[str]) -> float | None:
    """Return what a save takes by the journal of a root (`typical_save_seconds`); None too where it cannot be read."""
    try:
        events, _ = read_journal(journal_path(Path(root)))
    except OSError:
        return None
    return typical_save_seconds(events)


def typical_save_seconds(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Return seconds from decision to durable of the longest but one of the last 5 saves; None: none was measured.

    Of fewer than three the longest. One save that met a file system in trouble is not what the next one takes.
    """
    took = [number_in(event.get("seconds")) for event in events if event.get("event") == "save_durable"]
    last = sorted([seconds for seconds in took if seconds is not None][-LAST_SAVES:], reverse=True)
    return (last[1] if len(last) > 2 else last[0]) if last else None


def steps_per_second(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Return how fast the newest attempt that tells it trained, without the time it waited for saves; None: none does.

    By `progress`, whose first one in an attempt has its slow first step; else by `pace_changed`; else by the moments of
    its first step and its saves.
    """
    attempts: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        attempts.setdefault(str(event.get("attempt")), []).append(event)
    for own in reversed(attempts.values()):
        for found in (_by_progress(own), _by_pace(own), _by_saves(own)):
            if found:
                return found
    return None


def _by_progress(events: Sequence[Mapping[str, Any]]) -> float | None:
    steps = seconds = 0.0
    stalled: float | None = None
    for event in (each for each in events if each.get("event") == "progress"):
        done, took = number_in(event.get("steps")), number_in(event.get("seconds"))
        stalls = number_in(event.get("stall_seconds")) or 0.0
        if stalled is not None and done is not None and took is not None:
            steps, seconds = steps + done, seconds + took - max(0.0, stalls - stalled)
        stalled = stalls
    return steps / seconds if seconds > 0 else None


def _by_pace(events: Sequence[Mapping[str, Any]]) -> float | None:
    paces = [number_in(each.get("step_seconds")) for each in events if each.get("event") == "pace_changed"]
    return 1 / paces[-1] if paces and paces[-1] else None


def _by_saves(events: Sequence[Mapping[str, Any]]) -> float | None:
    points = [
        (step, at)
        for each in events
        if each.get("event") in ("first_step", "save_begun")
        and (step := number_in(each.get("step"))) is not None
        and (at := _time(each)) is not None
    ]
    if len(points) < 2:
        return None
    (first, began), (last, ended) = points[0], points[-1]
    stalls = sum(
        number_in(each.get("stall_seconds")) or 0.0
        for each in events
        if each.get("event") == "save_durable" and first <= (number_in(each.get("step")) or 0.0) < last
    )
    seconds = ended - began - stalls
    return (last - first) / seconds if seconds > 0 and last > first else None


def _time(event: Mapping[str, Any]) -> float | None:
    return number_in(event.get("time"))
