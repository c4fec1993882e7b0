"""The page of a report: one file, with all that it needs in it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ckptman.errors import plain
from ckptman.policies.intervals import duration_text
from ckptman.policies.retention_rules import bytes_text
from ckptman.runtime.journal import number_in
from ckptman.tools.monitoring.ledger import FAILURES, Ledger, add
from ckptman.tools.monitoring.report import RunReport, endings_text, shares

_MOST_ATTEMPTS, _MOST_CHECKPOINTS, _MOST_BREACHES = 500, 100, 100
_MOST_ROWS, _MOST_PIECES = 40, 2000
_HEALTH = (
    ("utilisation", "GPU utilisation"),
    ("power_watts", "GPU power in W"),
    ("pcie_in_bytes_per_second", "PCIe into the GPU in bytes/s"),
    ("pcie_out_bytes_per_second", "PCIe out of the GPU in bytes/s"),
    ("temperature_celsius", "GPU temperature in °C"),
)


def make_page(reports: Sequence[RunReport], now: float) -> str:
    """Return the page as HTML."""
    from jinja2 import Environment

    template = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"duration": duration_text, "date": _date, "bytes": bytes_text}
    environment.filters |= {"plain": lambda value: plain(str(value))}
    return environment.from_string(template).render(
        title=str(reports[0].root) if len(reports) == 1 else f"{len(reports)} runs",
        now=now,
        runs=[_run(each) for each in reports],
        total=shares(add([report.ledger for report in reports])),
    )


def _run(report: RunReport) -> dict[str, Any]:
    """Return what the template shows of a run."""
    ledger, status = report.ledger, report.status
    done = [save for each in report.history.attempts for save in each.saves if save.durable is not None]
    waits = [save.stall_seconds for save in done if save.stall_seconds is not None]
    kept = report.entries[-_MOST_CHECKPOINTS:]
    of = f" of {status.total_steps:,}" if status.total_steps else ""
    numbers = [
        ("state", status.state),
        ("steps", f"{status.step or 0:,}{of}"),
        ("goodput, of the time held", f"{ledger.goodput:.1%}" if ledger.goodput is not None else "-"),
        ("in all", duration_text(ledger.total_seconds)),
        (f"attempts: {endings_text(ledger)}", f"{len(ledger.attempts)}"),
        ("between failures (MTBF)", ledger.mtbf_seconds),
        ("from save to save", ledger.interval_seconds),
        ("would lose least", ledger.advised_seconds),
    ]
    return {
        "root": report.root,
        "numbers": [
            (name, each if isinstance(each, str) else duration_text(each)) for name, each in numbers if each is not None
        ],
        "notes": ledger.notes,
        "rows": shares(ledger.seconds),
        "gpu": ledger.rank_seconds if any(each.world_size > 1 for each in ledger.attempts) else None,
        "begun": ledger.begun,
        "ended": ledger.ended,
        "timeline": _timeline(ledger),
        "saves": [
            (name, median(values), max(values))
            for name, values in (
                ("until durable", [(save.durable or 0.0) - save.begun for save in done]),
                ("training waited", waits),
            )
            if values
        ],
        "made": len(done),
        "health": _health(report.health()),
        "breaches": report.breaches()[-_MOST_BREACHES:],
        "attempts": ledger.attempts[-_MOST_ATTEMPTS:],
        "left_out": max(0, len(ledger.attempts) - _MOST_ATTEMPTS),
        "checkpoints": [(each, each.require_manifest()) for each in reversed(kept)],
    }


def _health(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return each figure of the devices: the lowest rank, the median, and the highest rank, over the run."""
    rows = []
    for name, title in _HEALTH:
        figures = [each["figures"] for each in events if isinstance(each.get("figures"), Mapping)]
        found = [each[name] for each in figures if isinstance(each.get(name), Mapping)]
        cells = []
        for which, worst in (("min", min), ("median", median), ("max", max)):
            known = [value for each in found if (value := number_in(each.get(which))) is not None]
            cells.append(f"{worst(known):,.4g}" if known else "-")
        if found:
            rows.append((title, cells))
    return rows


@dataclass
class _Row:
    """An attempt in the timeline, or all of them: its pieces by kind, and its failures. Percent of the whole time."""

    name: str
    pieces: list[tuple[str, float, float]] = field(default_factory=list)
    failures: list[float] = field(default_factory=list)


def _timeline(ledger: Ledger) -> list[_Row]:
    """Return a row for each attempt, or one for all if there are many. A wait is in the row of the attempt before."""
    numbers = [each.number for each in ledger.attempts if each.number]
    all_rows = [_Row(str(number)) for number in numbers] if 0 < len(numbers) <= _MOST_ROWS else [_Row("")]
    rows = dict(zip(numbers, all_rows)) if len(all_rows) == len(numbers) else {}
    total = ledger.total_seconds or 1.0
    row = all_rows[0]
    for span in ledger.spans:
        before, row = row, rows.get(span.attempt, row)
        begin, width = 100 * (span.begin - ledger.begun) / total, 100 * span.seconds / total
        kind, first, wide = row.pieces[-1] if row.pieces and row is before else ("", 0.0, 0.0)
        if kind and (span.seconds < total / _MOST_PIECES or kind == span.kind):  # too short to be seen, or the same
            row.pieces[-1] = (kind, first, wide + width)
        else:
            row.pieces.append((span.kind, begin, width))
    row = all_rows[0]
    for each in ledger.attempts:
        row = rows.get(each.number, row)
        if each.ending in FAILURES:
            row.failures.append(100 * (each.ended - ledger.begun) / total)
    return all_rows


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "-"
