"""A number of a plan, with the formula it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptman.policies.intervals import seconds_text
from ckptman.policies.retention_rules import size_text


@dataclass(frozen=True)
class Figure:
    """One number. `formula` shows how it was computed, with its inputs, and in brackets who says so."""

    name: str
    value: float
    unit: Literal["bytes", "bytes_per_second", "seconds", "count", "share"]
    formula: str

    @property
    def key(self) -> str:
        """The name with its unit, as in JSON."""
        return self.name if self.unit in ("count", "share") else f"{self.name}_{self.unit}"

    @property
    def text(self) -> str:
        """The value for people: `70 GB`, `2 GB/s`, `35 s`, `1,024`, `97.5 %`."""
        if self.unit == "bytes":
            return size_text(self.value)
        if self.unit == "bytes_per_second":
            return f"{size_text(self.value)}/s"
        if self.unit == "seconds":
            return time_text(self.value)
        return f"{100 * self.value:.4g} %" if self.unit == "share" else f"{self.value:,.0f}"


def time_text(seconds: float) -> str:
    """Return a duration to three digits: `0.03 s`, `95 s`, `15 min`, `3.1 h`, `12 d`."""
    for least, length, unit in ((2, 86400, "d"), (2, 3600, "h"), (3, 60, "min")):
        count = seconds / length
        if count >= least:
            return f"{count:,.3g} {unit}" if count < 1e3 else f"{count:,.0f} {unit}"
    return seconds_text(seconds)
