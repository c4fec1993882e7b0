"""Goodput over the interval between saves: as lines of text, and as SVG written by hand: no library is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ckptman.cli import console as text
from ckptman.forecast.figures import time_text

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 400, 64, 40, 24, 52
LINE, MARK, INK, FAINT, GRID = "#2563eb", "#b45309", "#1f2937", "#6b7280", "#e5e7eb"
_BAR = 44
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Point:
    """An interval in seconds and the goodput it yields, from 0 to 1. `name`: of a policy that takes it."""

    interval_seconds: float
    goodput: float
    name: str = ""


def text_chart(curve: Sequence[Point], marked: Sequence[Point]) -> list[str]:
    """A bar for each interval, those of the policies with their names. Bars begin where the scale says."""
    points = sorted([*curve, *marked], key=lambda each: each.interval_seconds)
    low, high = _scale([each.goodput for each in points])
    lengths = [time_text(each.interval_seconds) for each in points]
    width = max(map(len, ["interval", *lengths]))
    lines = [f"{'interval':>{width}}  goodput, from {100 * low:.4g} % to {100 * high:.4g} %"]
    for each, length in zip(points, lengths):
        bar = _bar((each.goodput - low) / (high - low))
        name = f"  {text.plain(each.name)}" if each.name else ""
        bar = text.paint(bar, "green") if name else bar
        lines.append(f"{length:>{width}}  {bar} {100 * each.goodput:.2f} %{name}")
    return lines


def _bar(share: float) -> str:
    eighths = max(0, min(round(share * _BAR * 8), _BAR * 8))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _scale(values: Sequence[float]) -> tuple[float, float]:
    """Round bounds around shares, so that small differences can be seen."""
    low, high = min(values), max(values)
    for step in (0.001, 0.005, 0.01, 0.05, 0.1):
        if high - low <= 10 * step:
            break
    floor = math.floor(low / step) * step
    return floor, max(math.ceil(high / step) * step, floor + step)


def svg_chart(curve: Sequence[Point], marked: Sequence[Point], title: str) -> str:
    """The same as a curve over a logarithmic axis, with a dot for each policy."""
    points = [*curve, *marked]
    low, high = _scale([each.goodput for each in points])
    first = math.log(min(each.interval_seconds for each in points))
    last = max(math.log(max(each.interval_seconds for each in points)), first + 1e-9)

    def x(seconds: float) -> float:
        return LEFT + (math.log(seconds) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - (share - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-weight="600" fill="{INK}">{escape(title)}</text>',
    ]
    for number in range(6):
        share = low + (high - low) * number / 5
        parts.append(f'<path d="M{LEFT} {y(share):.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(_label(LEFT - 6, y(share) + 4, f"{100 * share:.4g} %", "end"))
    for seconds in _ticks(math.exp(first), math.exp(last)):
        parts.append(_label(x(seconds), HEIGHT - BOTTOM + 18, time_text(seconds), "middle"))
    parts.append(_label(WIDTH / 2, HEIGHT - 12, "seconds from one save to the next", "middle"))
    line = " ".join(f"{x(each.interval_seconds):.1f},{y(each.goodput):.1f}" for each in curve)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{LINE}" stroke-width="2"/>')
    for number, each in enumerate(sorted(marked, key=lambda each: each.interval_seconds)):
        across, down = x(each.interval_seconds), y(each.goodput)
        # Dots lie close together: names go below each other.
        at = down + 18 + 16 * (number % 4)
        parts.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="{MARK}"/>')
        anchor = "end" if across > WIDTH * 0.75 else "start"
        parts.append(
            _label(across + (-8 if anchor == "end" else 8), min(at, HEIGHT - BOTTOM - 4), each.name, anchor, INK)
        )
    return "\n".join([*parts, "</svg>", ""])


def _label(x: float, y: float, words: str, anchor: str, colour: str = FAINT) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def _ticks(first: float, last: float) -> list[float]:
    round_ones = (1, 3, 10, 30, 60, 180, 600, 1800, 3600, 3 * 3600, 12 * 3600, 2 * 86400, 7 * 86400, 30 * 86400)
    return [each for each in round_ones if first <= each <= last]
