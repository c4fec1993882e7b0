"""Trackers whose programs cannot take back what they were given: each step of a run is handed on once."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import time
from typing import Any, BinaryIO, NamedTuple

from ckptman.errors import ConfigError
from ckptman.runtime.tracker import TrackedRun, Tracker
from ckptman.session.step_reporter import CLOSE_SECONDS, TrackerQueue
from ckptman.storage.format.paths import DOT
from ckptman.storage.io.durable_files import DISK

_AT_ONCE = 1000
"""How many steps are handed on in one call at most."""


class Step(NamedTuple):
    """The metrics of a step; `time` in unix seconds."""

    step: int
    time: float
    metrics: dict[str, float]


def require(module: str, extra: str) -> None:
    """Refuse to go on without a library. Raises: ConfigError."""
    found = find_spec(module)
    if found is None or found.origin is None:  # a folder of that name, as W&B makes one, passes for a package
        raise ConfigError(f"this tracker needs {module}, which is not installed: pip install 'ckptman[{extra}]'")


class AppendOnlyTracker(Tracker):
    """Hands on each step once, in order, although a run that is killed does steps again.

    A step is handed on as soon as a checkpoint is durable that comes at or after it, since the run does not go back
    behind that by itself; until then it waits in a file of the run, which the next attempt finds. `live`: at once, and
    steps that are done again are not handed on again.
    A run that was rolled back does go back. What is derived from this says in `_open` what to do then.

    The thread that calls the tracker writes to the file alone. What asks the library is done in a second thread, so
    that no step is lost while the library is loaded, or waits for a server.
    """

    _name: str

    def __init__(self, live: bool) -> None:
        self._live = live
        self._waiting: list[Step] = []
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._read_bytes = self._written_bytes = 0
        """How much of the file the second thread has read, and how much there is."""
        self._handed_on = -1
        self._until: float = -1
        self._is_asked = False
        self._error: BaseException | None = None
        self._end = "failed"

    def _open(self, run: TrackedRun, went_back: bool) -> bool:
        """Begin. `went_back`: steps after `run.step` were handed on. Returns whether to hand on all steps before, as
        what was handed on is gone."""
        raise NotImplementedError

    def _hand_on(self, steps: Sequence[Step]) -> None:
        raise NotImplementedError

    def _saved(self, step: int) -> None:
        """Take that a checkpoint of `step` is durable, after the steps that it has."""

    def _close(self, end: str) -> None:
        """End. `end`: "finished", "stopped" or "failed"."""
        raise NotImplementedError

    # ---- in the thread that calls the tracker ------------------------------------------------------------------

    def start(self, run: TrackedRun) -> None:
        if self._file is not None:
            self._leave("stopped")
        self._path = run.root / DOT / f"{self._name}-steps.jsonl"
        self._until, self._waiting, self._read_bytes, self._is_asked, self._error = run.step, [], 0, False, None
        self._handed_on = _take_up(self._path, run.step)
        self._file = open(self._path, "ab")
        self._note(None)  # a kill may have left a part of a line
        self._thread = TrackerQueue(f"ckptman-{self._name}-library")
        self._thread.start()
        self._ask(self._begin, run)
        self._ask(self._hand_on_ready)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._note(Step(step, time(), dict(metrics)))
        if (self._live or step <= self._until) and not self._is_asked:
            self._is_asked = True
            self._ask(self._hand_on_ready)
        self._raise()

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        if name == "save_durable":
            self._until = fields["step"]
            self._ask(self._hand_on_ready)
            self._ask(self._saved, fields["step"])
        elif name in ("finished", "stopped", "failed"):
            self._end = name
            if name == "finished":
                self._until = math.inf
                self._ask(self._hand_on_ready)
        self._raise()

    def close(self) -> None:
        if self._file is not None:
            self._leave(self._end)
            self._raise()

    def _leave(self, end: str) -> None:
        self._ask(self._close, end)
        self._thread.end()
        if not self._thread.wait(CLOSE_SECONDS):
            self._thread.leave()
        with self._lock:
            assert self._file is not None
            self._file.close()
            self._file = None

    def _ask(self, function: Callable[..., object], *arguments: object) -> None:
        self._thread.put(self._call, function, arguments)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _note(self, line: object) -> None:
        """Append to the file, in either thread."""
        with self._lock:
            if self._file is not None:  # else this thread was left behind
                self._file.write(b"\n" if line is None else f"{json.dumps(line)}\n".encode("ascii"))
                self._file.flush()
                self._written_bytes = self._file.tell()

    # ---- in the second thread ----------------------------------------------------------------------------------

    def _call(self, function: Callable[..., object], arguments: Sequence[object]) -> None:
        if self._error is None or function == self._close:
            try:
                function(*arguments)
            except BaseException as error:  # noqa: BLE001 raised again where the tracker is called
                self._error = error

    def _begin(self, run: TrackedRun) -> None:
        went_back = self._handed_on > run.step
        if self._open(run, went_back):
            self._handed_on = -1
        if went_back:
            self._note(self._handed_on)

    def _hand_on_ready(self) -> None:
        """Hand on what may be of the steps in the file, and keep in memory what it has after them."""
        self._is_asked = False
        until = math.inf if self._live else self._until
        with open(self._path, "rb") as file:
            file.seek(self._read_bytes)
            while file.tell() < self._written_bytes:
                step = _parsed(file.readline())
                if isinstance(step, Step) and step.step > self._handed_on:
                    while self._waiting and self._waiting[-1].step >= step.step:  # the loop itself went back
                        self._waiting.pop()
                    self._waiting.append(step)
                    if len(self._waiting) >= _AT_ONCE:
                        self._hand_on_until(until)
            self._read_bytes = file.tell()
        self._hand_on_until(until)

    def _hand_on_until(self, until: float) -> None:
        ready = [each for each in self._waiting if each.step <= until]
        if ready:
            self._hand_on(ready)
            self._handed_on = ready[-1].step
            self._note(self._handed_on)
            self._waiting = self._waiting[len(ready) :]


def _take_up(path: Path, step: int) -> int:
    """Drop from a file what an attempt before did after `step`. Returns up to which step it handed on."""
    handed_on, is_behind = -1, False
    for each in _read(path):
        if not isinstance(each, Step):
            handed_on = each
        elif each.step > step:
            is_behind = True
    if is_behind:
        new = path.with_name(f"{path.name}.new")
        with open(new, "w", encoding="ascii") as file:
            for each in _read(path):
                if not isinstance(each, Step) or each.step <= step:
                    file.write(f"{json.dumps(each)}\n")
        DISK.rename(new, path)
    return handed_on


def _read(path: Path) -> Iterator[Step | int]:
    """Read the steps of a file, and up to which they were handed on."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        yield from (found for line in file if (found := _parsed(line)) is not None)


def _parsed(line: bytes) -> Step | int | None:
    """Return what a line says. None: it is torn, as a kill leaves one."""
    try:
        found = json.loads(line)
        return found if isinstance(found, int) else Step(int(found[0]), float(found[1]), dict(found[2]))
    except (ValueError, TypeError, LookupError):
        return None
