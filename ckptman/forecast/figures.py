"""A number of a plan, with the formula it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ckptman.policies.intervals import seconds_text
from ckptman.policies.retention_rules import size_text

Unit = Literal["bytes", "bytes_per_second", "seconds", "count", "share"]


@dataclass(frozen=True)
class Figure:
    """One number. `formula`: how it came about, with the numbers that went in; `source`: whose formula or number."""

    name: str
    value: float
    unit: Unit
    formula: str
    source: str = ""

    @property
    def key(self) -> str:
        """Its name with its unit, as in JSON."""
        return self.name if self.unit in ("count", "share") else f"{self.name}_{self.unit}"

    @property
    def text(self) -> str:
        """Its value as people read it: `70 GB`, `2 GB/s`, `35 s`, `1,024`, `97.5 %`."""
        value = self.value
        if self.unit == "bytes":
            return size_text(value)
        if self.unit == "bytes_per_second":
            return f"{size_text(value)}/s"
        if self.unit == "seconds":
            return time_text(value)
        return f"{100 * value:.4g} %" if self.unit == "share" else f"{value:,.6g}" if value < 1e6 else f"{value:,.0f}"

    def as_dict(self) -> dict[str, Any]:
        """Return the same, for JSON."""
        return {"value": self.value, "formula": self.formula, "source": self.source}


def time_text(seconds: float) -> str:
    """`0.03 s`, `95 s`, `15 min`, `3.1 h`, `12 d`."""
    for least, length, unit in ((2, 86400, "d"), (2, 3600, "h"), (3, 60, "min")):
        count = seconds / length
        if count >= least:
            return f"{count:,.3g} {unit}" if count < 1e3 else f"{count:,.0f} {unit}"
    return seconds_text(seconds)
