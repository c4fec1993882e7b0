"""The drawings of a report, as SVG that takes its colours from the page: `var(--ink)`, `var(--training)`."""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptman.errors import ConfigError, plain
from ckptman.runtime.journal import number_in
from ckptman.tools.monitoring.ledger import FAILURES, KINDS, Kind, Ledger
from ckptman.tools.monitoring.report import RunReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _FAINT, _PAPER = "#010203", "#010204", "#010205"
_KIND_COLOURS = {kind: f"#0203{place:02x}" for place, kind in enumerate(KINDS, 16)}
_LINE_COLOURS = tuple(f"#0304{place:02x}" for place in range(16, 20))
"""Colours that nobody would choose: in the page they become variables of its style, for light and for dark."""
_VARIABLES = {
    _INK: "--ink",
    _FAINT: "--faint",
    _PAPER: "--paper",
    **{colour: f"--{kind}" for kind, colour in _KIND_COLOURS.items()},
    **{colour: f"--line{place}" for place, colour in enumerate(_LINE_COLOURS)},
}
_WIDTH, _ROW = 9.0, 0.22
_MOST_ROWS, _MOST_PIECES = 40, 2000
_LARGEST = 1e30
_GAP = (math.nan, math.nan)
_LEGEND: Any = {"loc": "lower right", "bbox_to_anchor": (1, 1), "frameon": False, "labelcolor": _INK, "ncols": 3}
"""Above the drawing, where it hides nothing."""


def timeline(ledger: Ledger) -> str:
    """Draw the attempts over time: one row for each, or one row for all where there are many, with their ends."""
    numbers = [each.number for each in ledger.attempts]
    rows = {number: place for place, number in enumerate(numbers)} if len(numbers) <= _MOST_ROWS else {}
    unit, title = _unit(ledger.total_seconds)
    height = max(1, len(rows) or 1)

    def draw(axes: Axes) -> None:
        for (row, kind), pieces in _pieces(ledger, rows).items():
            scaled = [((begin - ledger.begun) / unit, (end - begin) / unit) for begin, end in pieces]
            axes.broken_barh(scaled, (row - 0.4, 0.8), facecolors=_KIND_COLOURS[kind], linewidth=0)
        ends = [each for each in ledger.attempts if each.ending in FAILURES]
        axes.plot(
            [(each.ended - ledger.begun) / unit for each in ends],
            [rows.get(each.number, 0) for each in ends],
            linestyle="none",
            marker="x",
            color=_INK,
            markersize=5,
            label="failed or killed",
        )
        axes.set_ylim(height - 0.5, -0.5)
        axes.set_yticks(list(rows.values())[:: max(1, height // 20)])
        axes.set_yticklabels([str(number) for number in rows][:: max(1, height // 20)])
        axes.set_ylabel("attempt" if rows else "")
        axes.set_xlabel(f"{title} since the run began")
        axes.set_xlim(0, max(ledger.total_seconds / unit, 1e-9))

    return _svg(draw, 0.9 + _ROW * height, "attempts over time")


def _pieces(ledger: Ledger, rows: Mapping[int, int]) -> dict[tuple[int, Kind], list[tuple[float, float]]]:
    """Return what to draw in each row, by kind. What is too short to be seen is drawn as what was before it."""
    found: dict[tuple[int, Kind], list[tuple[float, float]]] = {}
    shortest = ledger.total_seconds / _MOST_PIECES
    row, last = 0, None
    for span in ledger.spans:
        before, row = row, rows.get(span.attempt, row) if span.attempt else row
        if last is not None and row == before and (span.seconds < shortest or last == (row, span.kind)):
            found[last][-1] = (found[last][-1][0], span.end)
        else:
            last = (row, span.kind)
            found.setdefault(last, []).append((span.begin, span.end))
    return found


def ledger_bar(seconds: Mapping[Kind, float]) -> str:
    """Draw where the time went, as one bar from 0 to 100 %."""
    total = sum(seconds.values()) or 1.0

    def draw(axes: Axes) -> None:
        left = 0.0
        for kind in KINDS:
            share = 100 * seconds[kind] / total
            axes.barh(0, share, left=left, color=_KIND_COLOURS[kind], height=0.8, linewidth=0)
            if share >= 6:
                axes.text(left + share / 2, 0, f"{share:.0f} %", ha="center", va="center", color=_PAPER, fontsize=9)
            left += share
        axes.set_xlim(0, 100)
        axes.set_yticks([])
        axes.set_xlabel("% of the time")

    return _svg(draw, 0.95, "where the time went")


def metric_curves(report: RunReport) -> str:
    """Draw a metric over the steps. What a later attempt computed again is drawn faintly."""
    curves, metric = report.curves(report.metric), report.metric
    counted, again = list[tuple[float, float]](), list[tuple[float, float]]()
    later = math.inf
    for _, steps, values in reversed(curves):
        points = [(float(step), value if abs(value) < _LARGEST else math.nan) for step, value in zip(steps, values)]
        lasting = [each for each in points if each[0] < later]
        counted = [*lasting, _GAP, *counted]
        again = [*lasting[-1:], *(each for each in points if each[0] >= later), _GAP, *again]
        later = min(later, points[0][0])

    def draw(axes: Axes) -> None:
        axes.plot(*_columns(again), color=_FAINT, linewidth=1.3, linestyle=":", marker=".", markersize=3)
        axes.plot(*_columns(counted), color=_LINE_COLOURS[0], linewidth=1.3, marker=".", markersize=3)
        if len(curves) <= _MOST_ROWS:
            for _, steps, _ in curves[1:]:
                axes.axvline(steps[0], color=_FAINT, linewidth=0.5)
        axes.set_xlabel("step")
        axes.set_ylabel(plain(metric))

    return _svg(draw, 2.6, f"{metric} over the steps") if curves else ""


def saves(report: RunReport) -> str:
    """Draw what saves took over time: until they were durable, and for how long training waited."""
    begun = report.ledger.begun
    unit, title = _unit(report.ledger.total_seconds)
    done = [save for each in report.history.attempts for save in each.saves if save.durable is not None]
    waits = [save for save in done if save.stall_seconds is not None]
    every = math.ceil(len(done) / 2000) or 1

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import LogLocator

        for name, points, colour in (
            ("until durable", [(save.begun, (save.durable or 0) - save.begun) for save in done], _LINE_COLOURS[0]),
            ("training waited", [(save.begun, save.stall_seconds or 0.0) for save in waits], _LINE_COLOURS[1]),
        ):
            times, values = _columns([((at - begun) / unit, max(value, 1e-4)) for at, value in points[::every]])
            axes.plot(times, values, linestyle="none", marker="o", markersize=3, color=colour, label=name)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_xlim(0, max(report.ledger.total_seconds / unit, 1e-9))
        axes.set_ylabel("seconds")
        axes.set_xlabel(f"{title} since the run began")
        axes.legend(**_LEGEND)

    return _svg(draw, 2.2, "what saves took") if done else ""


def health(report: RunReport, name: str, title: str, limits: Sequence[float] = ()) -> str:
    """Draw a figure of the devices over time, lowest, median and highest rank, and its thresholds; "" without any."""
    begun = report.ledger.begun
    unit, axis = _unit(report.ledger.total_seconds)
    points = [
        (time, found)
        for event in report.health()
        if (time := number_in(event.get("time"))) is not None
        and isinstance(figures := event.get("figures"), Mapping)
        and isinstance(found := figures.get(name), Mapping)
    ]

    def draw(axes: Axes) -> None:
        for place, which in enumerate(("min", "median", "max")):
            known = [((at - begun) / unit, float(found[which])) for at, found in points if _is_number(found.get(which))]
            axes.plot(*_columns(known), color=_LINE_COLOURS[place], linewidth=1.2, marker=".", label=which)
        for limit in limits:
            axes.axhline(limit, color=_FAINT, linewidth=0.8, linestyle="--")
        axes.set_xlim(0, max(report.ledger.total_seconds / unit, 1e-9))
        axes.set_ylabel(title)
        axes.set_xlabel(f"{axis} since the run began")
        axes.legend(**_LEGEND)

    return _svg(draw, 2.0, title) if points else ""


def _svg(draw: Callable[[Axes], None], height: float, label: str) -> str:
    """Draw, and return the element `<svg>`. Raises: ConfigError where matplotlib is not installed."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "the page of a report is drawn by matplotlib, which is not installed: pip install 'ckptman[report]', or "
            "ask for --json"
        ) from None
    style: Any = {
        "svg.hashsalt": label,  # the same drawing for the same run, and names that no other drawing has
        "text.parse_math": False,
        "svg.fonttype": "none",  # text stays text: readable at any size, and to be searched
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color"), _INK),
    }
    with rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that it cannot measure
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = re.sub(r'<g id="[^"]*">', "<g>", text[text.index("<svg") :])
    text = text.replace("<svg", f'<svg role="img" aria-label="{html.escape(plain(label))}"', 1)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text


def _unit(seconds: float) -> tuple[float, str]:
    """Return the unit of an axis of time, in seconds, and its name."""
    if seconds < 600:
        return 1.0, "seconds"
    if seconds < 4 * 3600:
        return 60.0, "minutes"
    return (3600.0, "hours") if seconds < 10 * 86400 else (86400.0, "days")


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
