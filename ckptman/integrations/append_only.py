"""Trackers whose programs cannot take back what they were given: each step of a run is handed on once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import time
from typing import Any, NamedTuple, TextIO

from ckptman.errors import ConfigError
from ckptman.format.paths import DOT
from ckptman.io.durable_files import DISK
from ckptman.runtime.tracker import TrackedRun, Tracker

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
    """

    _name: str

    def __init__(self, live: bool) -> None:
        self._live = live
        self._waiting: list[Step] = []
        self._file: TextIO | None = None
        self._handed_on = self._durable = -1
        self._end = "failed"

    def _open(self, run: TrackedRun, went_back: bool) -> bool:
        """Begin. `went_back`: steps after `run.step` were handed on. Returns whether to hand on all steps before, as
        what was handed on is gone."""
        raise NotImplementedError

    def _hand_on(self, steps: Sequence[Step]) -> None:
        raise NotImplementedError

    def _close(self, end: str) -> None:
        """End. `end`: "finished", "stopped" or "failed"."""
        raise NotImplementedError

    def start(self, run: TrackedRun) -> None:
        if self._file is not None:
            self._file.close()
            self._close("stopped")
        path = run.root / DOT / f"{self._name}-steps.jsonl"
        self._handed_on, self._durable, self._waiting = -1, run.step, []
        self._take_up(path, run.step)
        self._file = open(path, "a", encoding="ascii")
        self._file.write("\n")  # a kill may have left a part of a line
        if self._open(run, self._handed_on > run.step):
            self._handed_on = -1
            self._hand_on_all(step for step in _read(path) if isinstance(step, Step))
        else:
            self._hand_on_until(run.step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step <= self._handed_on:
            return
        while self._waiting and self._waiting[-1].step >= step:  # the loop itself went back
            self._waiting.pop()
        self._waiting.append(Step(step, time(), dict(metrics)))
        self._note(list(self._waiting[-1]))
        if self._live or step <= self._durable:
            self._hand_on_until(step)

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        if name == "save_durable":
            self._durable = fields["step"]
            self._hand_on_until(self._durable)
        elif name in ("finished", "stopped", "failed"):
            self._end = name
            if name == "finished":
                self._hand_on_until(math.inf)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._close(self._end)

    def _take_up(self, path: Path, step: int) -> None:
        """Read what an attempt before left, and drop what was after `step` from the file."""
        is_behind = False
        for each in _read(path):
            if not isinstance(each, Step):
                self._handed_on = each
            elif each.step > step:
                is_behind = True
        self._waiting = [each for each in _read(path) if isinstance(each, Step) and self._handed_on < each.step <= step]
        if is_behind:
            new = path.with_name(f"{path.name}.new")
            with open(new, "w", encoding="ascii") as file:
                for each in _read(path):
                    if not isinstance(each, Step):
                        file.write(f"{min(each, step)}\n")
                    elif each.step <= step:
                        file.write(f"{json.dumps(each)}\n")
            DISK.rename(new, path)

    def _hand_on_until(self, step: float) -> None:
        ready = [each for each in self._waiting if each.step <= step]
        self._waiting = self._waiting[len(ready) :]
        self._hand_on_all(iter(ready))

    def _hand_on_all(self, steps: Iterator[Step]) -> None:
        part: list[Step] = []
        for step in steps:
            if step.step > (part[-1].step if part else self._handed_on):
                part.append(step)
            if len(part) == _AT_ONCE:
                self._hand_on_part(part)
                part = []
        self._hand_on_part(part)

    def _hand_on_part(self, part: list[Step]) -> None:
        if part:
            self._hand_on(part)
            self._handed_on = part[-1].step
            self._note(self._handed_on)

    def _note(self, line: object) -> None:
        assert self._file is not None
        self._file.write(f"{json.dumps(line)}\n")
        self._file.flush()


def _read(path: Path) -> Iterator[Step | int]:
    """Read the steps of a file, and up to which they were handed on. A torn line, as a kill leaves one, is left out."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            for line in file:
                try:
                    found = json.loads(line)
                    yield found if isinstance(found, int) else Step(int(found[0]), float(found[1]), dict(found[2]))
                except (ValueError, TypeError, LookupError):
                    continue
    except FileNotFoundError:
        return
