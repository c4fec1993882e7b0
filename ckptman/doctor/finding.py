"""What a check found, in a form that people and programs can read: the rows of `ckptman doctor`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "slow", "warning", "FAILED", "unknown"]


@dataclass(frozen=True)
class Finding:
    """One check: its name, how it ended, what was seen (`value`), and what that means or what to do (`advice`).

    Of one that FAILED, `advice` is the consequence. `figures` are the numbers behind it, with units in their names.
    """

    name: str
    verdict: Verdict
    value: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The same, for JSON."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "value": self.value,
            "advice": self.advice,
            "figures": self.figures,
        }


def size_text(count: float) -> str:
    """Bytes as storage is sold and checkpoints are talked about, in powers of 1000: `70 GB`, `1.5 TB`, `512 B`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if round(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.4g} PB"


def why(error: OSError) -> str:
    """The reason of an error of the system, without the name of a folder that is gone when it is read."""
    return error.strerror or str(error)
