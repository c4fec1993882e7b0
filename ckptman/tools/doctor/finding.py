"""What a check found, in a form that people and programs can read: the rows of `ckptman doctor`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptman.policies import retention_rules

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


def size_text(size_bytes: float) -> str:
    """Return bytes to three digits: nothing here is measured to more."""
    return retention_rules.size_text(size_bytes, digits=3)


def why(error: OSError) -> str:
    """Return the reason of an error of the system, without the name of a folder that is gone when it is read."""
    return error.strerror or str(error)


def first_number(text: str) -> int | None:
    """Return the whole number that a text begins with, as in `4(x2)`; None without one, or with more than nine
    digits."""
    found = re.match(r"[0-9]{1,9}(?![0-9])", text)
    return int(found[0]) if found else None
