"""Choose the checkpoints that a restore tries, best first: for runs, commands and chains alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, Protocol, TypeVar


class Candidate(Protocol):
    """A checkpoint of a root. `nonfinite_reason`: see `Record.nonfinite_reason`."""

    @property
    def step(self) -> int: ...

    @property
    def complete(self) -> bool: ...

    @property
    def nonfinite_reason(self) -> str: ...


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


@dataclass(frozen=True)
class Choice(Generic[AnyCandidate]):
    """Checkpoints by what a restore does with them, the newest first in each list."""

    tried: list[AnyCandidate]
    """The first is restored; if it is damaged, the next."""
    last_resort: list[AnyCandidate]
    """Those with NaN or infinity: restored if all of `tried` are damaged."""
    nonfinite: list[AnyCandidate]
    """Newer than all finite ones, and passed over for them."""
    suspects: list[AnyCandidate]
    """Newer than all of `tried`, and passed over because attempts crashed after loading them."""
    only_nonfinite: bool
    """No checkpoint is finite, so `tried` holds NaN or infinity."""

    @property
    def all(self) -> list[AnyCandidate]:
        """All that are restored at all, best first."""
        return [*self.tried, *self.last_resort]

    @property
    def best(self) -> AnyCandidate | None:
        """The checkpoint that a restore takes; if all are suspects, the newest of them, which it refuses."""
        return next(iter([*self.tried, *self.suspects]), None)

    @property
    def only_suspects(self) -> bool:
        return not self.tried and bool(self.suspects)


def choose(
    newest_first: Iterable[AnyCandidate], suspects: Mapping[int, str], *, prefer_finite: bool = True
) -> Choice[AnyCandidate]:
    """Choose among the checkpoints of a root.

    Args:
        newest_first: By commit. Incomplete ones are left out.
        suspects: Steps that are not loaded again by themselves (`crash_loop.suspects`).
        prefer_finite: Go back behind checkpoints with NaN or infinity, as long as there is a finite one.
    """
    complete = [each for each in newest_first if each.complete]
    nonfinite = [each for each in complete if prefer_finite and each.nonfinite_reason]
    only_nonfinite = len(nonfinite) == len(complete) > 0
    finite = (
        complete if only_nonfinite else [each for each in complete if not (prefer_finite and each.nonfinite_reason)]
    )
    tried = [each for each in finite if each.step not in suspects]
    # A suspect is finite: going back to NaN or infinity instead of asking would be worse.
    has_last_resort = not only_nonfinite and len(tried) == len(finite)
    return Choice(
        tried,
        [each for each in nonfinite if each.step not in suspects] if has_last_resort else [],
        [] if only_nonfinite else list(takewhile(lambda each: prefer_finite and each.nonfinite_reason, complete)),
        list(takewhile(lambda each: each.step in suspects, finite)),
        only_nonfinite,
    )
