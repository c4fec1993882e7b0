"""A check of `ckptman doctor`, the directory that it examines, and the finding that it returns."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from ckptman.policies import retention_rules
from ckptman.storage.io.mount import Mount

if TYPE_CHECKING:
    from ckptman.tools.doctor.second_client import Second

Verdict = Literal["ok", "slow", "warning", "FAILED", "unknown"]
Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Finding:
    """The row of a check. `advice` is what the value means or what to do; of a check that FAILED, the consequence.

    `figures` are the numbers behind it, with units in their names.
    """

    name: str
    verdict: Verdict
    value: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def found(verdict: Verdict, value: str, advice: str = "", /, **figures: object) -> Finding:
    """Return a finding that gets its name from its check."""
    return Finding("", verdict, value, advice, figures)


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """`run` returns None where there is nothing to check. `consequence`: of an error that `run` raises."""

    name: str
    run: Callable[[Subject], Finding | None]
    consequence: str = ""


@dataclass
class Place:
    """The directory that is examined, and what its checks go by."""

    path: str
    """Absolute, without links."""
    own: Path
    """The directory of the checks, inside it: nobody else uses it."""
    mount: Mount | None
    second: Second
    size_bytes: int
    """Of a test of bandwidth, at most."""
    against_bytes: int | None = None
    repeat_seconds: float = 1.0
    """How long a check repeats itself."""
    part_seconds: float = 10.0
    """The limit of a part of a check."""
    found: dict[str, Finding] = field(default_factory=dict)
    """The findings so far, by name."""
    over: str = ""
    """Why nothing more can be tried."""


def size_text(size_bytes: float) -> str:
    """Return bytes to three digits: nothing here is measured more exactly."""
    return retention_rules.size_text(size_bytes, digits=3)


def why(error: OSError) -> str:
    """Return the reason of an error of the system, without the path: it is gone when the message is read."""
    return error.strerror or str(error)


def first_number(text: str) -> int | None:
    """Return the integer of at most nine digits that a text begins with, as in `4(x2)`; None without one."""
    number = re.match(r"[0-9]{1,9}(?![0-9])", text)
    return int(number[0]) if number else None
