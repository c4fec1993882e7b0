"""The tables that the campaign prints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.engine.bars import RAW, Bar
from benchmarks.engine.contestants import DCP
from benchmarks.engine.section import Section
from benchmarks.planning import Planned


def print_section(console: Console, section: Section) -> None:
    """Minimum, median and maximum of each row; where bytes were moved also the rate, and the speed against two rows."""
    table = Table(title=section.title, title_justify="left", title_style="bold")
    table.add_column("")
    for column in ("min", "median", "max"):
        table.add_column(f"{column}, {section.unit}", justify="right")
    raw = section.fastest(RAW)
    against = [name for name in (raw, DCP) if name in section.rows] if raw else []
    if section.moved_bytes:
        table.add_column("GB/s", justify="right")
    for name in against:
        table.add_column(f"speed / {name}\nmin, median, max", justify="right")
    for row, samples in section.rows.items():
        cells = [f"{value:.3f}" for value in spread(samples)]
        if section.moved_bytes:
            cells.append(f"{section.moved_bytes / statistics.median(samples) / 1e9:.2f}" if section.unit == "s" else "")
        cells += ["  ".join(f"{value:.2f}" for value in spread(section.ratios(name, row))) for name in against]
        table.add_row(row, *cells)
    console.print(table)
    for row, reason in section.missing.items():
        console.print(f"  not measured: {row}: {reason}", markup=False, style="yellow")
    for note in section.notes:
        console.print(f"  {note}", markup=False, style="dim")
    console.print()


def print_planning(console: Console, planned: Sequence[Planned] | None) -> None:
    if not planned:
        console.print("Planning, simulated: not measured\n")
        return
    table = Table(title="Planning, simulated", title_justify="left", title_style="bold")
    for column in planned[0]:
        table.add_column(column, justify="right")
    for each in planned:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else f"{value:,}" for value in each.values()))
    console.print(table)


def print_bars(console: Console, bars: Sequence[Bar], holds: str) -> None:
    table = Table(title="What must hold", title_justify="left", title_style="bold", caption=holds)
    table.add_column("")
    for column in ("min", "median", "max", "bar", ""):
        table.add_column(column, justify="right")
    for bar in bars:
        bound = "report" if bar.bound is None else f"{'≥' if bar.at_least else '≤'} {bar.bound:g} {bar.unit}"
        values = [f"{value:.3g}" for value in spread(bar.samples)] if bar.samples else ["", "", ""]
        verdict = {True: "[green]met", False: "[red]missed", None: "" if bar.samples else "[yellow]not measured"}
        table.add_row(bar.what, *values, bound, verdict[bar.is_met])
    console.print(table)


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """Minimum, median, maximum."""
    return min(samples), statistics.median(samples), max(samples)
