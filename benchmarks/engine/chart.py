"""The chart of the docs: bars with their spread, as SVG written by hand, so that drawing needs no library."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

from benchmarks.engine.bars import RAW
from benchmarks.engine.contestants import CKPTMAN, DEVICE_ALONE
from benchmarks.engine.section import Section

WIDTH, LABEL, BAR, PITCH = 760, 250, 400, 22
OWN, OTHER, LIMIT = "#2563eb", "#a8b3c4", "#475569"
LIMITS = (RAW, DEVICE_ALONE)
INK, FAINT = "#1f2937", "#6b7280"


def draw(sections: Mapping[str, Section], path: Path) -> bool:
    """Write the chart; False where nothing that it shows was measured."""
    parts: list[str] = []
    y = 16.0
    for key, heading in (
        ("load_cached", "Load, page cache: GB/s (more is better); ckptman checks its digests"),
        ("load_cold", "Load, cold disk: GB/s (more is better)"),
        ("save_durable", "Save until durable: GB/s (more is better)"),
        ("wide_load", "Load from memory, by threads: GB/s (more is better)"),
        ("wide_load_gpu", "Load from memory onto the GPU, by threads: GB/s (more is better)"),
        ("wide_save", "Save to /dev/shm until durable, by threads: GB/s (more is better)"),
        ("wide_restart", "Restore in a new process right after a save: GB/s (more is better)"),
    ):
        if (section := sections.get(key)) is not None and section.rows:
            by_threads = key in ("wide_load", "wide_load_gpu", "wide_save")
            rows = section.rows if by_threads else _chosen(section)
            rates = {row: _rates(section, samples) for row, samples in rows.items()}
            if not by_threads:
                rates = dict(sorted(rates.items(), key=lambda row: -statistics.median(row[1])))
            y = _panel(parts, y, heading, rates)
    if (section := sections.get("stall_ratio")) is not None and section.rows:
        rows = {row: samples for row, samples in section.rows.items() if row.endswith(("first", "later"))}
        heading = "Stall of an async save: multiples of a warm memcpy (less is better)"
        y = _panel(parts, y, heading, dict(sorted(rows.items(), key=lambda row: statistics.median(row[1]))))
    if not parts:
        return False
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y:.0f}" viewBox="0 0 {WIDTH} {y:.0f}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img">\n<title>ckptman against others</title>\n'
        f'<rect width="{WIDTH}" height="{y:.0f}" fill="#ffffff"/>\n'
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + "\n".join(parts) + "\n</svg>\n", encoding="utf-8")
    return True


def _chosen(section: Section) -> dict[str, list[float]]:
    """All rows, but of each kind of raw ones the fastest alone."""
    shown = [section.fastest(kind) for kind in LIMITS]
    return {row: samples for row, samples in section.rows.items() if row in shown or not row.startswith(LIMITS)}


def _rates(section: Section, seconds: list[float]) -> list[float]:
    return [(section.moved_bytes or 0) / each / 1e9 for each in seconds]


def _panel(parts: list[str], y: float, heading: str, rows: Mapping[str, list[float]]) -> float:
    """One group of bars from `y` down; where the next one begins."""
    parts.append(f'<text x="12" y="{y + 10:.0f}" font-weight="600" fill="{INK}">{escape(heading)}</text>')
    longest = max(max(samples) for samples in rows.values())
    scale: Callable[[float], float] = lambda value: LABEL + BAR * value / longest  # noqa: E731
    y += 22
    for row, samples in rows.items():
        middle, low, high = statistics.median(samples), min(samples), max(samples)
        colour = OWN if row.startswith(CKPTMAN) else LIMIT if row.startswith(LIMITS) else OTHER
        centre = y + PITCH / 2
        parts += [
            f'<text x="{LABEL - 8}" y="{centre + 4:.1f}" text-anchor="end" fill="{INK}">{escape(row)}</text>',
            f'<rect x="{LABEL}" y="{y + 4:.1f}" width="{scale(middle) - LABEL:.1f}" height="{PITCH - 8}" rx="2" '
            f'fill="{colour}"/>',
            _whisker(scale(low), scale(high), centre),
            f'<text x="{scale(high) + 6:.1f}" y="{centre + 4:.1f}" fill="{FAINT}">{middle:.2f}</text>',
        ]
        y += PITCH
    return y + 18


def _whisker(low: float, high: float, centre: float) -> str:
    """From minimum to maximum, with ends, and light around it: it has to be seen on bars of any colour."""
    path = f'<path d="M{low:.1f} {centre - 4:.1f}v8m0 -4H{high:.1f}m0 -4v8" fill="none"'
    return f'{path} stroke="#ffffff" stroke-width="3"/>{path} stroke="{INK}"/>'
