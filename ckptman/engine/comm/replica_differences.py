"""How far apart two ranks are in what they should have alike: replicas that have drifted, or other content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ckptman.engine.comm.control_group import AllRanks, Channel, failing_as_one
from ckptman.engine.state.file_layout import put, view_of
from ckptman.engine.state.local_shards import is_plain, local_parts
from ckptman.engine.state.named_state import Snapshot
from ckptman.engine.state.tensor_digest import Digester, pieces

_DRIFT = 0.01
"""Replicas that are further apart, in relation to their norm, have drifted no more: they are other content."""
_DRIFT_OF_A_NUMBER = 1e-5
"""A single number that is further apart was counted or averaged by each rank for itself."""
_FEW = 0.001
"""Where no more of the elements differ, it is drift however far they are apart: such as a bit that flipped."""
_MANY_ELEMENTS = 1000
_PIECES = 2
"""Of so many pieces that differ, the elements are compared."""


class Region(NamedTuple):
    """A box of a tensor."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """A box of a tensor that two ranks hold both, as `parts` of theirs, and in which they differ.

    `kind`: "" for what has to be the same. `distance`: the norm of the difference, in relation to that of the content.
    `differing`, of the elements that were `compared`.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int
    second: int
    parts: tuple[int, int]
    kind: str = ""
    is_drift: bool = False
    distance: float = 0.0
    differing: int = 0
    compared: int = 0

    @property
    def has_elements(self) -> bool:
        return 0 not in self.sizes


class _Measured(NamedTuple):
    """How many elements differ, are not 0, and were compared; and how far apart they are."""

    differing: int
    nonzero: int
    compared: int
    distance: float


def look_closer(control: Channel, snapshot: Snapshot, differences: Sequence[Difference]) -> list[Difference]:
    """Measure differences: the second of two ranks is sent some pieces of the first. Every rank calls it."""
    rank = control.rank
    with failing_as_one(), AllRanks[dict[int, list[int]]](control) as ranks:
        digester = Digester()
        ranks.mine = {
            number: digester.piece_digests(region, each.offsets)
            for number, each in enumerate(differences)
            if rank in (each.first, each.second) and _can_be_measured(region := region_of(snapshot, each, rank))
        }
    chosen = [
        _differing(ranks.all[each.first].get(number), ranks.all[each.second].get(number))
        for number, each in enumerate(differences)
    ]
    with failing_as_one(), AllRanks[None](control):
        mine = {
            number: _in_host_memory(region_of(snapshot, each, rank), each.offsets, chosen[number])
            for number, each in enumerate(differences)
            if chosen[number] and rank in (each.first, each.second)
        }
    measured: dict[int, _Measured] = {}
    for number, held in mine.items():
        each, received = differences[number], []
        for piece in held:
            if rank == each.first:
                control.exchange({each.second: _bytes_of(piece)}, {})
            else:
                received.append(control.exchange({}, {each.first: piece.nbytes})[each.first])
        if received:
            theirs = [sent.view(piece.dtype).reshape(piece.shape) for sent, piece in zip(received, held)]
            measured[number] = _measure(theirs, held)
    known: dict[int, _Measured] = {}
    for of_rank in control.gather(measured):
        known |= of_rank
    return [_judged(each, known.get(number)) for number, each in enumerate(differences)]


def region_of(snapshot: Snapshot, difference: Difference, rank: int) -> torch.Tensor:
    """Return what one of the two ranks has there."""
    part = difference.parts[0 if rank == difference.first else 1]
    box, region = local_parts(snapshot.tensors[difference.name], difference.name)[part]
    if is_plain(region):
        for axis, (low, size) in enumerate(zip(difference.offsets, difference.sizes)):
            region = region.narrow(axis, low - box.offsets[axis], size)
    return region


def _can_be_measured(region: torch.Tensor) -> bool:
    return is_plain(region) and (region.is_floating_point() or region.is_complex())


def _differing(one: list[int] | None, other: list[int] | None) -> list[int]:
    """Return the numbers of the first pieces that differ; nothing where there are none to compare."""
    if one is None or other is None:
        return []
    return [number for number, pair in enumerate(zip(one, other)) if pair[0] != pair[1]][:_PIECES]


def _in_host_memory(region: torch.Tensor, offsets: Sequence[int], numbers: Sequence[int]) -> list[torch.Tensor]:
    found = []
    for number, (piece, _) in enumerate(pieces(region, offsets)):
        if number in numbers:
            found.append(torch.empty(piece.shape, dtype=piece.dtype, device="cpu"))
            put(found[-1], piece.detach())
    return found


def _bytes_of(piece: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(view_of(piece), dtype=torch.uint8)


def _measure(theirs: Sequence[torch.Tensor], mine: Sequence[torch.Tensor]) -> _Measured:
    differing = nonzero = compared = 0
    apart = size = 0.0
    for one, other in zip(theirs, mine):
        bits = [each.reshape(-1, 1).view(torch.uint8) for each in (one, other)]
        is_other = (bits[0] != bits[1]).any(1)
        first, second = (torch.view_as_real(each) if each.is_complex() else each for each in (one, other))
        first, second = first.to(torch.float64), second.to(torch.float64)
        differing, compared = differing + int(is_other.sum()), compared + one.numel()
        nonzero += int(((bits[0] != 0) | (bits[1] != 0)).any(1).sum())
        distances = torch.where(first == second, 0.0, first - second).nan_to_num(float("inf"), float("inf"))
        distances = torch.where(first.isnan() & second.isnan(), 0.0, distances)
        apart += float(distances.square().sum())
        size += max(float(each.nan_to_num(0.0, 0.0, 0.0).square().sum()) for each in (first, second))
    return _Measured(differing, nonzero, compared, (apart / size) ** 0.5 if size else float(apart > 0))


def _judged(difference: Difference, found: _Measured | None) -> Difference:
    if found is None:  # no floating-point numbers, or no plain tensor
        return difference
    is_few = found.nonzero >= _MANY_ELEMENTS and found.differing <= _FEW * found.nonzero
    most = _DRIFT if found.compared > 1 else _DRIFT_OF_A_NUMBER
    return replace(
        difference,
        is_drift=is_few or found.distance <= most,
        distance=found.distance,
        differing=found.differing,
        compared=found.compared,
    )
