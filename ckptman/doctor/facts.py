"""Plain facts that are found elsewhere and judged here: what torch says of itself, and whole numbers in a text."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class TorchFacts:
    """What torch says of itself. `device`: cuda, rocm or cpu. `backends`: those of torch.distributed that it has.

    `problem`: why torch, or its devices, cannot be used; the rest may be empty then. `unanswered`: it was given up,
    after how long, and nothing is known.
    """

    version: str = ""
    device: str = "cpu"
    device_names: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    problem: str | None = None
    unanswered: str | None = None


def first_number(text: str) -> int | None:
    """The whole number that a text begins with, as in `4(x2)`; None without one, or with more than nine digits."""
    found = re.match(r"[0-9]{1,9}(?![0-9])", text)
    return int(found[0]) if found else None
