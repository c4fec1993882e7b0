"""Lengths of time, rates and counts as people write them: `20min`, `2GB/s`, `9e9`, `7B`."""

from __future__ import annotations

import math
import re

from ckptman.cli.sizes import parse_size
from ckptman.errors import ConfigError

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*(min|[smhdw]?)", re.IGNORECASE | re.ASCII)
_COUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+]?[0-9]+)?)\s*([kmbt]?)\s*", re.IGNORECASE | re.ASCII)
_LARGEST = 1e12
"""Seconds, and parameters times 1,000: what is more was a slip."""


def parse_seconds(option: str, written: str, *, needs_unit: bool = False) -> float:
    """Seconds of `90`, `90s`, `20min`, `1h30min`, `4d`, `2w`.

    `needs_unit`: a bare number is refused, and `m`, where days or months may be meant and seconds or minutes delete.
    Raises: ConfigError where it is no time, or none above 0.
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
    """Bytes per second of `2GB/s`. Raises: ConfigError."""
    size, slash, unit = written.partition("/")
    if slash and unit.strip().lower() != "s":
        raise ConfigError(f"{option}: a rate such as 2GB/s, not {written!r}")
    try:
        return float(parse_size(option, size, needs_unit=True))
    except ConfigError:
        raise ConfigError(
            f"{option}: a rate above 0 with its unit, such as 2GB/s or 500MB/s, not {written!r}"
        ) from None


def parse_count(option: str, written: str) -> int:
    """`9e9`, `7B` (billions), `350M`, `8192`. Raises: ConfigError where it is no number, or none of at least 1."""
    match = _COUNT.fullmatch(written)
    number = float(match[1]) * 1000.0 ** " kmbt".index(match[2].lower() or " ") if match else math.nan
    if not 1 <= number <= _LARGEST * 1000:
        raise ConfigError(f"{option}: a number of at least 1 such as 9e9, 7B or 350M, not {written!r}")
    return round(number)
