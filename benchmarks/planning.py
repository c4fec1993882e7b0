"""Planning of a save and of a reshard, simulated in one process: no ranks, no tensors, only their plans.

`measure` is what the campaign calls; None says that there is nothing to measure yet.
"""

from __future__ import annotations

from typing import TypedDict

WORLDS = (256, 1024, 4096)
QUICK_WORLDS = (64, 256)


class Planned(TypedDict):
    """One simulated world: seconds of the leader and of one rank, and the bytes of the exchange in all."""

    world: int
    tensors: int
    save_seconds: float
    reshard_seconds: float
    reshard_to: int
    exchange_bytes: int


def measure(quick: bool) -> list[Planned] | None:
    """Plan a save of 1,000 tensors on each of `WORLDS` ranks and a reshard to 3/4 as many."""
    return None
