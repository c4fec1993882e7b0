"""The metrics of a run by step: columns of numbers, appended every few seconds, for `Run.metrics`.

Each line of `.ckptman/metrics.jsonl` is one JSON object: `attempt`, `steps`, and `metrics`, a list of numbers by name,
with null if a step has none. An attempt that finds the file too large leaves out every second step of what is there.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptman.format.paths import metrics_path
from ckptman.io.durable_files import DISK
from ckptman.io.safe_open import read_end

MAX_BYTES = 32 * 1024 * 1024
MOST_STEPS = 200
"""Steps of one line. Of more, those in between are left out."""
MOST_METRICS = 16
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
        self._is_shortened = False

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
        names = list(dict.fromkeys(name for _, metrics in taken for name in metrics))[:MOST_METRICS]
        columns = {name: [metrics.get(name) for _, metrics in taken] for name in names}
        line = json.dumps({"attempt": self._attempt, "steps": [step for step, _ in taken], "metrics": columns})
        with contextlib.suppress(OSError):
            if not self._is_shortened:
                self._is_shortened = True
                _shorten(self._path)
            file = os.open(self._path, _OPEN, 0o666)
            try:
                os.write(file, f"\n{line}\n".encode())  # a line that a power cut tore ends here
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


def _shorten(path: Path) -> None:
    """Leave out every second step if the file is too large."""
    try:
        if path.stat().st_size <= MAX_BYTES:
            return
    except FileNotFoundError:
        return
    kept = []
    for line in _lines(path):
        columns = {name: column[1::2] for name, column in line["metrics"].items()}
        kept.append(json.dumps({**line, "steps": line["steps"][1::2], "metrics": columns}))
    DISK.replace_file(path, "".join(f"{line}\n" for line in kept).encode())
