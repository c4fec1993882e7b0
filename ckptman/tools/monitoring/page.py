"""The page of a report: one file, with all that it needs in it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptman.errors import plain
from ckptman.policies.intervals import duration_text
from ckptman.policies.retention_rules import bytes_text
from ckptman.tools.monitoring import charts
from ckptman.tools.monitoring.ledger import AttemptLedger, add
from ckptman.tools.monitoring.report import RunReport, endings_text, shares

_MOST_ATTEMPTS, _MOST_CHECKPOINTS, _MOST_BREACHES = 500, 100, 100
_HEALTH = (
    ("utilisation", "GPU utilisation", (0.7, 0.9)),
    ("power_watts", "GPU power in W", (350.0,)),
    ("pcie_in_bytes_per_second", "PCIe into the GPU in bytes/s", (20e9,)),
    ("pcie_out_bytes_per_second", "PCIe out of the GPU in bytes/s", (20e9,)),
    ("temperature_celsius", "GPU temperature in °C", ()),
)


def make_page(reports: Sequence[RunReport], now: float) -> str:
    """Return the page as HTML. Raises: ConfigError where what draws it is not installed."""
    from jinja2 import Environment
    from markupsafe import Markup

    template = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals["duration"] = duration_text
    total = add([report.ledger for report in reports])
    title = plain(str(reports[0].root)) if len(reports) == 1 else f"{len(reports)} runs"
    return environment.from_string(template).render(
        title=title,
        made=f"ckptman report of {_date(now)}",
        reports=[
            {name: Markup(text) if name in _DRAWN else text for name, text in _run(each).items()} for each in reports
        ],
        total_bar=Markup(charts.ledger_bar(total)) if len(reports) > 1 else "",
        total_rows=shares(total),
    )


_DRAWN = ("bar", "timeline", "curves", "saves")


def _run(report: RunReport) -> dict[str, Any]:
    from markupsafe import Markup

    ledger = report.ledger
    checkpoints = report.entries[-_MOST_CHECKPOINTS:]
    return {
        "root": plain(str(report.root)),
        "numbers": _numbers(report),
        "notes": [plain(each) for each in ledger.notes],
        "bar": charts.ledger_bar(ledger.seconds),
        "rows": shares(ledger.seconds),
        "gpu": ledger.rank_seconds if any(each.world_size > 1 for each in ledger.attempts) else None,
        "timeline": charts.timeline(ledger),
        "metric": plain(report.metric).capitalize(),
        "curves": charts.metric_curves(report),
        "saves": charts.saves(report),
        "health": [
            (title, Markup(drawing))
            for name, title, limits in _HEALTH
            if (drawing := charts.health(report, name, title, limits))
        ],
        "breaches": [
            (_date(event["time"]), plain(str(event.get("text") or event.get("what") or "")))
            for event in report.breaches()[-_MOST_BREACHES:]
        ],
        "attempts": [_attempt(each) for each in ledger.attempts[-_MOST_ATTEMPTS:]],
        "left_out": max(0, len(ledger.attempts) - _MOST_ATTEMPTS),
        "checkpoints": [
            {
                "step": f"{each.step:,}",
                "saved": _date(each.time_seconds),
                "size": bytes_text(each.require_manifest().total_bytes),
                "metrics": plain(" ".join(f"{k}={v:.4g}" for k, v in each.require_manifest().metrics.items())),
            }
            for each in reversed(checkpoints)
        ],
    }


def _numbers(report: RunReport) -> list[tuple[str, str]]:
    """The few numbers at the top, each with its name."""
    ledger, status = report.ledger, report.status
    of = f" of {status.total_steps:,}" if status.total_steps else ""
    found = [
        ("state", status.state),
        ("steps", f"{status.step or 0:,}{of}"),
        ("goodput, of the time held", f"{ledger.goodput:.1%}" if ledger.goodput is not None else "-"),
        ("in all", duration_text(ledger.total_seconds)),
        (f"attempts: {endings_text(ledger)}", f"{len(ledger.attempts)}"),
    ]
    if ledger.mtbf_seconds is not None:
        found.append(("between failures (MTBF)", duration_text(ledger.mtbf_seconds)))
    if ledger.interval_seconds is not None:
        found.append(("from save to save", duration_text(ledger.interval_seconds)))
    if ledger.advised_seconds is not None:
        found.append(("would lose least", duration_text(ledger.advised_seconds)))
    return found


def _attempt(attempt: AttemptLedger) -> Mapping[str, str]:
    waited = attempt.waited_seconds
    steps = f"{attempt.start_step:,} to {attempt.step:,}" if attempt.step else "-"
    return {
        "number": str(attempt.number or "-"),
        "job": plain(attempt.job_id) or "-",
        "begun": _date(attempt.begun),
        "took": duration_text(attempt.ended - attempt.begun),
        "waited": duration_text(waited) if waited else "-",
        "steps": steps,
        "counted": duration_text(attempt.seconds["training"]),
        "end": plain(f"{attempt.ending}: {attempt.reason}" if attempt.reason else attempt.ending),
    }


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "-"
