"""Which nodes the next attempt of a chain had better not run on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AVOIDED_SECONDS = 86_400.0
"""A node is left out for so long after it was found bad: by then somebody has repaired it, or Slurm knows."""


@dataclass(frozen=True)
class Found:
    """Bad nodes of one attempt, each with what was wrong, found at a unix time."""

    nodes: Mapping[str, str]
    time_seconds: float


def nodes_to_avoid(found: Sequence[Found], now: float) -> dict[str, str]:
    """The nodes that were found bad in the last day, with what was last known of each, by their names."""
    recent = [each for each in found if now - each.time_seconds < AVOIDED_SECONDS]
    nodes: dict[str, str] = {}
    for each in sorted(recent, key=lambda each: each.time_seconds):
        nodes |= each.nodes
    return dict(sorted(nodes.items()))
