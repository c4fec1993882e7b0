"""The metrics of a run by step: columns of numbers, appended every few seconds, for `Run.metrics`.

Each line of `.ckptman/metrics.jsonl` is one JSON object: `attempt`, `steps`, and `metrics`, a list of numbers by name,
with null if a step has none. If the file gets too large, steps that are close to others are left out, about a half.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptman.storage.format.paths import metrics_path
from ckptman.storage.io.durable_files import DISK
from ckptman.storage.io.safe_open import read_end

MAX_BYTES = 16 * 1024 * 1024
MOST_STEPS = 200
"""Steps of one line. Of more, those in between are left out."""
MOST_METRICS = 64
"""Of an attempt, those that were given first."""
_OPEN = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class MetricsLog:
    """Appends the metrics of an attempt. It never raises: what cannot be written is left out.

    Args:
        root: The root of the run.
        attempt: The number of the attempt.
    """

    def __init__(self, root: Path, attempt: int) -> None:
        self._path, self._attempt = metrics_path(root), attempt
        self._steps: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=100 * MOST_STEPS)
        self._names: dict[str, None] = {}
        self._written: int | None = None
        """Bytes in the file; None: not known yet."""

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step that has ended."""
        if metrics:
            self._steps.append((step, metrics))

    def flush(self) -> None:
        """Append what was taken since the last time."""
        if not self._steps:
            return
        taken, count = list(self._steps), len(self._steps)
        self._steps.clear()
        if count > MOST_STEPS:
            taken = [taken[round(number * (count - 1) / (MOST_STEPS - 1))] for number in range(MOST_STEPS)]
        for name in (name for _, metrics in taken for name in metrics):
            if len(self._names) < MOST_METRICS:
                self._names[name] = None
        columns = {name: [metrics.get(name) for _, metrics in taken] for name in self._names}
        columns = {name: column for name, column in columns.items() if column.count(None) < len(column)}
        line = json.dumps({"attempt": self._attempt, "steps": [step for step, _ in taken], "metrics": columns})
        with contextlib.suppress(OSError):
            self._append(f"\n{line}\n".encode())  # a line that a power cut tore ends here

    def _append(self, data: bytes) -> None:
        if self._written is None or self._written > MAX_BYTES:
            self._written = _shorten(self._path)
        file = os.open(self._path, _OPEN, 0o666)
        try:
            os.write(file, data)
            self._written += len(data)
        finally:
            os.close(file)


def read_metric(root: Path, name: str) -> tuple[list[int], list[float]] | None:
    """Return the steps and values of a metric; None if it was never given. Steps that were done again count once.

    Raises: OSError.
    """
    steps: list[int] = []
    values: list[float | None] = []
    for line in _lines(metrics_path(root)):
        first = line["steps"][0]
        while steps and steps[-1] >= first:  # an attempt resumed from an earlier step: these were lost
            steps.pop()
            values.pop()
        steps += line["steps"]
        values += line["metrics"].get(name) or [None] * len(line["steps"])
    found = [(step, value) for step, value in zip(steps, values) if value is not None]
    return ([step for step, _ in found], [value for _, value in found]) if found else None


def metric_names(root: Path) -> list[str]:
    """Return the names of all metrics. Raises: OSError."""
    return sorted({name for line in _lines(metrics_path(root)) for name in line["metrics"]})


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in _texts(path):
        try:
            line = json.loads(text)
            lengths = {len(line["steps"]), *map(len, line["metrics"].values())}
            is_whole = lengths == {len(line["steps"])} and all(type(each) is int for each in line["steps"])
            numbers = (each for column in line["metrics"].values() for each in column)
            if line["steps"] and is_whole and all(each is None or isinstance(each, int | float) for each in numbers):
                yield line
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue


def _texts(path: Path) -> list[bytes]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return []
    try:
        data, _ = read_end(file, 2 * MAX_BYTES)
    finally:
        os.close(file)
    return [line for line in data.split(b"\n") if line]


def _shorten(path: Path) -> int:
    """Leave out steps that are close to others, about a half, if the file is too large. Returns its size."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return 0
    if size <= MAX_BYTES:
        return size
    lines = list(_lines(path))
    steps = [step for line in lines for step in line["steps"]] or [0]
    least, last = 2 * (max(steps) - min(steps)) / len(steps), None
    kept = []
    for line in lines:
        chosen = []
        for place, step in enumerate(line["steps"]):
            if last is None or step < last or step >= last + least:  # the steps go back where a run was resumed
                chosen.append(place)
                last = step
        if chosen:
            columns = {name: [column[each] for each in chosen] for name, column in line["metrics"].items()}
            kept.append({**line, "steps": [line["steps"][each] for each in chosen], "metrics": columns})
    data = "".join(f"{json.dumps(line)}\n" for line in kept).encode()
    DISK.replace_file(path, data)
    return len(data)
