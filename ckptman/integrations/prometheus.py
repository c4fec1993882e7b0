"""A text file for the textfile collector of Prometheus' node_exporter. Needs no library."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ckptman.errors import ConfigError
from ckptman.runtime.journal import number_in
from ckptman.runtime.tracker import TrackedRun, Tracker
from ckptman.storage.io.durable_files import DISK

WRITE_SECONDS = 15.0
"""Between two writes: Prometheus rarely looks more often."""

Kind = Literal["gauge", "counter"]
_SERIES: dict[str, tuple[Kind, str]] = {
    "ckptman_training": ("gauge", "Whether the attempt goes on (1) or has ended (0)."),
    "ckptman_attempt": ("gauge", "The attempt of the run, counted from 1."),
    "ckptman_restarts_total": ("counter", "How often the run was started again."),
    "ckptman_step": ("gauge", "The newest optimizer step that has ended."),
    "ckptman_metric": ("gauge", "A metric that the training loop gave, by name."),
    "ckptman_stall_seconds_total": ("counter", "How long saves have blocked the training in this attempt."),
    "ckptman_durable_step": ("gauge", "The step of the newest checkpoint that is durable."),
    "ckptman_durable_timestamp_seconds": ("gauge", "When that checkpoint became durable, in unix seconds."),
    "ckptman_save_seconds": ("gauge", "How long its save took, from the decision until it was durable."),
    "ckptman_save_bytes": ("gauge", "Its size on disk."),
}


class PrometheusTextfile(Tracker):
    """Write how a run stands to a file that node_exporter reads (`--collector.textfile.directory`).

    Args:
        path: The file, in that directory on the node of rank 0. Its name ends in `.prom`, and no other run has it.

    Raises:
        ConfigError: the name does not end in `.prom`, or, on rank 0 (by the variable RANK), there is no such directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        if self._path.suffix != ".prom":
            raise ConfigError(f"{self._path}: node_exporter reads files whose names end in .prom: give it such a name")
        if os.environ.get("RANK", "0") == "0" and not self._path.parent.is_dir():
            raise ConfigError(
                f"{self._path.parent} is not a folder: give a file in the one that node_exporter reads "
                f"(--collector.textfile.directory), or make it first"
            )
        self._labels: dict[str, str] = {}
        self._values: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._written = -math.inf

    def start(self, run: TrackedRun) -> None:
        self._labels = {"run_id": run.run_id, "root": str(run.root)}
        self._values |= {
            "ckptman_training": 1,
            "ckptman_attempt": run.attempt,
            "ckptman_restarts_total": run.attempt - 1,
            "ckptman_step": run.step,
            "ckptman_stall_seconds_total": 0,
        }
        self._write()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._values["ckptman_step"] = step
        self._metrics |= metrics
        self._write_if_due()

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        if name == "progress":
            self._values |= {"ckptman_step": fields["step"], "ckptman_stall_seconds_total": fields["stall_seconds"]}
        elif name == "save_durable":
            found = {
                "ckptman_durable_step": number_in(fields["step"]),
                "ckptman_durable_timestamp_seconds": number_in(fields["time"]),
                "ckptman_save_seconds": number_in(fields["seconds"]),
                "ckptman_save_bytes": number_in(fields["bytes"]),
            }
            self._values |= {series: number for series, number in found.items() if number is not None}
        self._write_if_due()

    def close(self) -> None:
        self._values["ckptman_training"] = 0
        self._write()

    def _write_if_due(self) -> None:
        if time.monotonic() - self._written >= WRITE_SECONDS:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        DISK.replace_file(self._path, self._text().encode())

    def _text(self) -> str:
        lines = []
        for series, (kind, text) in _SERIES.items():
            samples: list[tuple[dict[str, str], float]] = [
                ({"name": name}, each) for name, each in self._metrics.items()
            ]
            if series != "ckptman_metric":
                samples = [({}, self._values[series])] if series in self._values else []
            if samples:
                lines += [f"# HELP {series} {text}", f"# TYPE {series} {kind}"]
            lines += [f"{series}{_labels({**self._labels, **more})} {_number(number)}" for more, number in samples]
        return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    value = value.encode("utf-8", "replace").decode()  # a path may have bytes that are no text
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(number: float) -> str:
    if math.isfinite(number):
        return repr(float(number)) if number != int(number) else str(int(number))
    return "NaN" if math.isnan(number) else "+Inf" if number > 0 else "-Inf"
