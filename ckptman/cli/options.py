"""Options that several verbs share, and their values: sizes, durations, rates, counts, retention rules."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import reduce, wraps
from inspect import Parameter, signature
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptman.errors import ConfigError

if TYPE_CHECKING:
    from ckptman.policies.retention_rules import KeepBest, RetentionPolicy


def option(
    name: str, metavar: str, help: str, panel: str | None = None, *, least: int | None = None, most: int | None = None
) -> Any:
    """Return an option that takes a value; its default is not shown. `panel`: of `--help`, which begins with it.

    `least`, `most`: the range of an integer.
    """
    return typer.Option(
        name, metavar=metavar, show_default=False, help=help, rich_help_panel=panel, min=least, max=most
    )


def flag(name: str, help: str, short: str | None = None, panel: str | None = None) -> Any:
    """Return an option without a value."""
    return typer.Option(*filter(None, (name, short)), help=help, rich_help_panel=panel)


def path_argument(metavar: str, help: str) -> Any:
    """Return a positional argument. A path is not checked here: the error of the command says more."""
    return typer.Argument(metavar=metavar, show_default=False, readable=False, help=help)


OTHERS = "Options"
"""The panel of what is in no other one."""
AsJson = Annotated[bool, flag("--json", "Print JSON, for programs.", panel=OTHERS)]
MOST_THREADS = 1024

_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?:([kmgtpe])(i)?)?(b)?\s*", re.IGNORECASE | re.ASCII)
_MOST_BYTES = 2**63 - 1
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*(min|[smhdw]?)", re.IGNORECASE | re.ASCII)
_COUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+]?[0-9]+)?)\s*([kmbt]?)\s*", re.IGNORECASE | re.ASCII)
_LARGEST = 1e12
"""Seconds, and parameters times 1,000: what is more was a slip."""


def is_size(written: str) -> bool:
    """Return whether the text has the form of a size."""
    return _SIZE.fullmatch(written) is not None


def parse_size(option: str, written: str, *, needs_unit: bool = False) -> int:
    """Parse a size in bytes. `kB`, `MB`, `GB` are powers of 1000; `KiB`, `MiB`, `GiB`, and `K`, `M`, `G`, of 1024.

    `needs_unit`: refuse a bare number, where 70 most probably means 70 GB.
    Raises: ConfigError if it is not a size above 0.
    """
    match = _SIZE.fullmatch(written)
    if match is None:
        raise ConfigError(f"{option}: a size such as 70GB, 1.5TiB or 4096 (bytes), not {written!r}")
    number, letter, binary, byte = match.groups()
    if needs_unit and not letter and not byte:
        raise ConfigError(f"{option}: {number} has no unit: say {number}GB, if that is what is meant")
    base = 1024 if binary or not byte else 1000
    size = int(Decimal(number) * base ** (" kmgtpe".index(letter.lower()) if letter else 0))
    if not 0 < size <= _MOST_BYTES:
        raise ConfigError(f"{option}: a size above 0 that a file system can hold, not {written!r}")
    return size


def parse_seconds(option: str, written: str, *, needs_unit: bool = False) -> float:
    """Parse a duration in seconds: `90`, `90s`, `20min`, `1h30min`, `4d`, `2w`.

    `needs_unit`: refuse a bare number and `m`: where days or months are meant, seconds or minutes delete too much.
    Raises: ConfigError if it is not a duration above 0.
    """
    seconds, at, units = 0.0, 0, set[str]()
    while at < len(written) and (part := _PART.match(written, at)) is not None:
        if not part[2] and (at or part.end() < len(written)):
            break  # a bare number means seconds only where it stands alone
        unit = part[2].lower()
        seconds += float(part[1]) * _UNITS[unit or "s"]
        units.add(unit)
        at = part.end()
    if at < len(written.rstrip()) or not 0 < seconds <= _LARGEST:
        raise ConfigError(f"{option}: a time above 0 such as 90s, 20min, 1h30min or 4d, not {written!r}")
    if needs_unit and not units.isdisjoint(("", "m")):
        unclear = "has no unit" if "" in units else "may be minutes or months"
        raise ConfigError(f"{option}: {written.strip()} {unclear}: say it in min, h, d or w, such as 7d")
    return seconds


def parse_rate(option: str, written: str) -> float:
    """Parse a rate in bytes per second: `2GB/s`, or `2GB`. The unit is required. Raises: ConfigError."""
    size, slash, unit = written.partition("/")
    try:
        if not slash or unit.strip().lower() == "s":
            return float(parse_size(option, size, needs_unit=True))
    except ConfigError:
        pass
    raise ConfigError(f"{option}: a rate above 0 with its unit, such as 5GB/s or 800MiB/s, not {written!r}")


def parse_share(option: str, share: float) -> float:
    """Return a share. Raises: ConfigError unless it is from 0 to 1."""
    if not 0 <= share <= 1:
        raise ConfigError(f"{option}: a share from 0 to 1, such as 0.9, not {share!r}")
    return share


def parse_count(option: str, written: str) -> int:
    """Parse a count of at least 1: `9e9`, `7B` (billions), `350M`, `8192`. Raises: ConfigError."""
    match = _COUNT.fullmatch(written)
    number = float(match[1]) * 1000.0 ** " kmbt".index(match[2].lower() or " ") if match else math.nan
    if not 1 <= number <= _LARGEST * 1000:
        raise ConfigError(f"{option}: a number of at least 1 such as 9e9, 7B or 350M, not {written!r}")
    return round(number)


def parse_numbers(
    option: str, written: str | None, what: str, example: str, *, least: int = 0, most: float = math.inf
) -> list[int]:
    """Parse whole numbers with commas between them; None: none. Raises: ConfigError, unless all are in the range."""
    if written is None:
        return []
    try:
        numbers = [int(each) for each in written.split(",")]
    except ValueError:
        numbers = [least - 1]
    if not all(least <= each <= most for each in numbers):
        raise ConfigError(f"{option}: {what} with commas between them, such as {example}, not {written!r}")
    return numbers


MemoryOption = Annotated[
    bool,
    flag("--memory", "Save to the memory of the nodes, too. So do the options below.", panel="Checkpoints in memory"),
]
RestartInPlaceOption = Annotated[
    str | None, option("--restart-in-place", "TIME", "From a fault to the first new step inside the same allocation.")
]
SurvivedOption = Annotated[
    float | None, option("--survived", "SHARE", "Of the failures that checkpoints in memory survive (0.9).")
]

RETENTION: dict[str, Any] = {
    "keep_last": Annotated[int | None, option("--keep-last", "N", "Keep the N committed last.", "What stays")],
    "keep_every": Annotated[int | None, option("--keep-every", "N", "Keep one at each multiple of N.")],
    "keep_best": Annotated[
        list[str] | None,
        option(
            "--keep-best",
            "METRIC[:COUNT[:min|max]]",
            "Keep the COUNT best by a metric (1, the lowest, unless said). May be given several times.",
        ),
    ],
    "keep_within": Annotated[str | None, option("--keep-within", "TIME", "Keep what is younger, such as 36h or 7d.")],
    "keep_hourly": Annotated[int | None, option("--keep-hourly", "N", "Keep the newest of each of the last N hours.")],
    "keep_daily": Annotated[int | None, option("--keep-daily", "N", "The same for days (UTC).")],
    "keep_weekly": Annotated[int | None, option("--keep-weekly", "N", "The same for weeks.")],
    "keep_monthly": Annotated[int | None, option("--keep-monthly", "N", "The same for months.")],
    "keep_steps": Annotated[str | None, option("--keep-steps", "N,N,...", "Keep these steps.")],
    "max_bytes": Annotated[str | None, option("--max-bytes", "SIZE", "Keep no more than this, such as 2TB.")],
}
"""The options that a verb `with_retention` has, by the names of their parameters."""


def with_retention(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options of `RETENTION` instead of its parameter `keep`, which gets the policy that they mean."""

    @wraps(verb)
    def called(**given: Any) -> None:
        verb(keep=parse_retention({name: given.pop(name) for name in RETENTION}), **given)

    options = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=RETENTION[name]) for name in RETENTION
    ]
    own = signature(verb, eval_str=True)
    parameters = [new for each in own.parameters.values() for new in (options if each.name == "keep" else [each])]
    called.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def parse_retention(given: Mapping[str, Any]) -> RetentionPolicy | None:
    """Return the policy that the options of `RETENTION` mean, or None. Raises: ConfigError."""
    from ckptman.policies.retention_by_time import KeepDaily, KeepHourly, KeepMonthly, KeepWeekly, KeepWithin
    from ckptman.policies.retention_rules import AtMost, KeepEvery, KeepLast, KeepSteps

    def counted(**kinds: Callable[[int], RetentionPolicy]) -> list[RetentionPolicy]:
        return [rule(given[name]) for name, rule in kinds.items() if given[name] is not None]

    rules = counted(keep_last=KeepLast, keep_every=KeepEvery)
    rules += [parse_keep_best(each) for each in given["keep_best"] or ()]
    if given["keep_within"] is not None:
        rules.append(KeepWithin(parse_seconds("--keep-within", given["keep_within"], needs_unit=True)))
    rules += counted(keep_hourly=KeepHourly, keep_daily=KeepDaily, keep_weekly=KeepWeekly, keep_monthly=KeepMonthly)
    if steps := parse_numbers("--keep-steps", given["keep_steps"], "steps", "1000,5000"):
        rules.append(KeepSteps(*steps))
    kept = reduce(or_, rules) if rules else None
    if given["max_bytes"] is None:
        return kept
    limit = AtMost(bytes=parse_size("--max-bytes", given["max_bytes"], needs_unit=True))
    return limit if kept is None else kept & limit


def parse_keep_best(written: str) -> KeepBest:
    """Parse `loss`, `loss:2` or `accuracy:2:max`; the name of a metric may contain colons. Raises: ConfigError."""
    from ckptman.policies.retention_rules import KeepBest

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
