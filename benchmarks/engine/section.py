"""What a part of the campaign is told, and what it hands back."""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Plan:
    """What to run: how large a state, how often, where to write, and on which device what is meant for a GPU."""

    state_bytes: int
    repeat: int
    root: Path
    quick: bool
    device: str = "cuda"

    def folder(self, name: str) -> Path:
        """A new, empty folder."""
        path = self.root / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path


@dataclass
class Section:
    """Samples by row. Rows of one section were taken in turn, so that sample i of each saw the same machine."""

    key: str
    title: str
    unit: str
    moved_bytes: int | None = None
    rows: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, row: str, *samples: float) -> None:
        self.rows.setdefault(row, []).extend(samples)

    def sort(self, names: Iterable[str]) -> None:
        """Rows in this order, for those that take turns in a new one each round."""
        self.rows = {name: self.rows[name] for name in names if name in self.rows}

    def median(self, row: str) -> float:
        return statistics.median(self.rows[row])

    def fastest(self, prefix: str) -> str | None:
        """Of the rows that begin so, the one with the smallest median."""
        names = [name for name in self.rows if name.startswith(prefix)]
        return min(names, key=self.median) if names else None

    def ratios(self, over: str | None, under: str | None) -> list[float]:
        """Sample by sample; empty where one of the rows is not there."""
        if over not in self.rows or under not in self.rows:
            return []
        return [a / b for a, b in zip(self.rows[over], self.rows[under])]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def last_line(text: str) -> str:
    """What an error comes down to."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:160] if lines else ""
