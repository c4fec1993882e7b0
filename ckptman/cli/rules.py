"""Retention rules as options say them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_, or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.cli.quantities import parse_seconds
from ckptman.cli.sizes import parse_size
from ckptman.errors import ConfigError

if TYPE_CHECKING:
    from ckptman.policies.retention import Verdict
    from ckptman.policies.rules import KeepBest, KeepSteps, RetentionPolicy


def _count(option: str, help: str) -> Any:
    return typer.Option(option, metavar="N", show_default=False, help=help)


KeepLastOption = Annotated[int | None, _count("--keep-last", "Keep the N committed last.")]
KeepEveryOption = Annotated[int | None, _count("--keep-every", "Keep one at each multiple of N.")]
KeepBestOption = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-best",
        metavar="METRIC[:COUNT[:min|max]]",
        show_default=False,
        help="Keep the COUNT best by a metric (1, the lowest, unless said). May be given several times.",
    ),
]
KeepWithinOption = Annotated[
    str | None,
    typer.Option("--keep-within", metavar="TIME", show_default=False, help="Keep what is younger, such as 36h or 7d."),
]
KeepHourlyOption = Annotated[int | None, _count("--keep-hourly", "Keep the newest of each of the last N hours.")]
KeepDailyOption = Annotated[int | None, _count("--keep-daily", "The same for days (UTC).")]
KeepWeeklyOption = Annotated[int | None, _count("--keep-weekly", "The same for weeks.")]
KeepMonthlyOption = Annotated[int | None, _count("--keep-monthly", "The same for months.")]
KeepStepsOption = Annotated[
    str | None,
    typer.Option("--keep-steps", metavar="N,N,...", show_default=False, help="Keep these steps."),
]
MaxBytesOption = Annotated[
    str | None,
    typer.Option("--max-bytes", metavar="SIZE", show_default=False, help="Keep no more than this, such as 2TB."),
]
MaxPercentOption = Annotated[
    float | None,
    typer.Option(
        "--max-percent",
        metavar="P",
        show_default=False,
        help="Keep no more than P percent of the file system, or of the quota.",
    ),
]


@dataclass(frozen=True)
class Rules:
    """The options of `ckptman prune` and `ckptman plan` that say what to keep, as they were written."""

    last: int | None = None
    every: int | None = None
    best: Sequence[str] = ()
    within: str | None = None
    by_period: Mapping[str, int | None] = field(default_factory=dict)
    steps: str | None = None
    max_bytes: str | None = None
    max_percent: float | None = None

    def policy(self) -> RetentionPolicy | None:
        """What they come to; None where nothing is said. Raises: ConfigError."""
        from ckptman.policies.calendar import KeepDaily, KeepHourly, KeepMonthly, KeepWeekly, KeepWithin
        from ckptman.policies.limit import AtMost
        from ckptman.policies.rules import KeepEvery, KeepLast

        periods: dict[str, Callable[[int], RetentionPolicy]]
        periods = {"hourly": KeepHourly, "daily": KeepDaily, "weekly": KeepWeekly, "monthly": KeepMonthly}
        rules: list[RetentionPolicy] = []
        if self.last is not None:
            rules.append(KeepLast(self.last))
        if self.every is not None:
            rules.append(KeepEvery(self.every))
        rules += [parse_keep_best(each) for each in self.best]
        if self.within is not None:
            rules.append(KeepWithin(parse_seconds("--keep-within", self.within, needs_unit=True)))
        rules += [periods[name](count) for name, count in self.by_period.items() if count is not None]
        if self.steps is not None:
            rules.append(parse_steps(self.steps))
        limits = []
        if self.max_bytes is not None:
            limits.append(AtMost(bytes=parse_size("--max-bytes", self.max_bytes, needs_unit=True)))
        if self.max_percent is not None:
            limits.append(AtMost(percent=self.max_percent))
        if not rules:
            return reduce(and_, limits) if limits else None
        return reduce(and_, limits, reduce(or_, rules))


def parse_keep_best(written: str) -> KeepBest:
    """`loss`, `loss:2`, `accuracy:2:max`; a metric may have colons in its name. Raises: ConfigError."""
    from ckptman.policies.rules import KeepBest

    parts = written.split(":")
    mode = parts.pop() if len(parts) > 1 and parts[-1] in ("min", "max") else "min"
    count = 1
    if len(parts) > 1:
        try:
            count = int(parts[-1])
            parts.pop()
        except ValueError:
            pass  # part of the metric's name; a slip shows when no checkpoint has that metric
    return KeepBest(":".join(parts), count, "max" if mode == "max" else "min")


def parse_steps(written: str) -> KeepSteps:
    """`1000,5000`. Raises: ConfigError."""
    from ckptman.policies.rules import KeepSteps

    try:
        return KeepSteps(*(int(part) for part in written.split(",")))
    except ValueError:
        raise ConfigError(f"--keep-steps: steps with commas between them, such as 1000,5000, not {written!r}") from None


def check_meant(root: Path, policy: RetentionPolicy | None, verdicts: Sequence[Verdict], *, stored: bool) -> None:
    """A slip must not delete what it was to keep. `stored`: the rules are those of the run. Raises: ConfigError."""
    from ckptman.policies.sanity_checks import slip

    if cause := slip(policy, [each.record for each in verdicts], time.time(), goes_on=stored):
        remedy = "say what to keep, with options such as --keep-last 3" if stored else "check the options"
        whose = "by the rules that the run stored, " if stored else ""
        raise ConfigError(f"{root}: {whose}{cause}. Nothing is deleted: {remedy}")
