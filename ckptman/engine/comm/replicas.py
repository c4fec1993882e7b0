"""Whether what several ranks have under one name is the same on all of them: it is saved once, for all.

Each rank digests the boxes that others hold as well, and multiplies each digest by a number such that those of one box
add up to 0 over all ranks if they are equal. So one number a rank is exchanged where all agree. Where they do not, the
ranks look closer, until it is known which elements differ, and by how much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from xxhash import xxh3_64_intdigest

from ckptman.engine.comm.control_group import AllRanks, Channel, Contribution, failing_as_one
from ckptman.engine.state.file_layout import put, view_of
from ckptman.engine.state.local_shards import Shared, is_plain, local_parts
from ckptman.engine.state.modules import FrozenPart, Trainable, module_of
from ckptman.engine.state.snapshot import Snapshot
from ckptman.engine.state.tensor_digest import Digester, pieces
from ckptman.errors import ConfigError
from ckptman.storage.format.manifest import Replicas

_BUCKETS = 4096
"""Names are spread over so many sums: those that are not 0 tell which names to look at."""
_BUCKETS_AT_ONCE = 64
_LOOKED_AT = 64
"""Of so many differences the size is measured."""
_WORD = 2**64
_OF_BATCH_NORM = ("running_mean", "running_var")
_AFTER_RESTORE = "after a restore all ranks have those of the lowest rank"


@dataclass(frozen=True)
class Compared:
    """What a comparison found.

    `replicas`: as a manifest says it; None where the content of a tensor could not be compared. `drift`: what ranks
    should have alike and do not, by a little, for a journal. `warnings`: texts.
    """

    replicas: Replicas | None = "equal"
    drift: Mapping[str, Any] | None = None
    warnings: Sequence[str] = field(default_factory=tuple)


class _Row(NamedTuple):
    """The digest of a box, as it is sent to the others where some differ."""

    name: str
    mesh: int
    kind: str
    """ "": no buffer; else what becomes of those that differ."""
    part: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_first: bool
    """Whether the rank is the first of those that hold the box on its mesh."""
    digest: int


def compare_replicas(
    control: Channel, snapshot: Snapshot, shared: Sequence[Shared], state: Mapping[str, Any]
) -> Compared:
    """Compare what ranks hold under one name, bit for bit. Every rank calls it, over `control`.

    Args:
        shared: the boxes that other ranks hold as well, as `plan_save` finds them.

    Raises on every rank alike: ConfigError, where content has nothing to do with that of another rank.
    """
    if control.world_size == 1:
        return Compared()
    with failing_as_one(), AllRanks[tuple[int, bool]](control) as sums:
        found = _digests(snapshot, shared)
        digests = [0 if each is None else each for each in found]
        buckets = _bucket_sums(shared, digests)
        sums.mine = sum(buckets) % _WORD, None not in found
    replicas: Replicas | None = "equal" if all(is_whole for _, is_whole in sums.all) else None
    if sum(total for total, _ in sums.all) % _WORD == 0:
        return Compared(replicas)
    differences = _differences(control, snapshot, shared, state, digests, buckets)
    strict = [each for each in differences if not each.kind]
    warnings, drift = [], None
    if strict:
        measured = look_closer(control, snapshot, strict[:_LOOKED_AT])
        for unrelated in (each for each in measured if not each.is_drift):
            raise ConfigError(
                f"{_text(unrelated, strict)}, and one is saved for all: make it a DTensor over all ranks that hold "
                f"parts of it, give it a name of its own on each rank, or put it into ckptman.PerRank(...) to save it "
                f"for each rank, or into ckptman.FromRank0(...)"
            )
        worst = max(measured, key=lambda each: each.distance)
        drift = {"names": [each.name for each in strict[:_LOOKED_AT]], "ranks": [worst.first, worst.second]}
        drift |= {"count": len(strict), "distance": worst.distance}
        warnings.append(
            f"{_text(worst, strict)}, in {worst.differing:,} of {worst.compared:,} elements, by {worst.distance:.2g} "
            f"of its norm: ranks should have it alike, and the checkpoint has parts of both. An all-reduce that is "
            f"missing lets replicas drift apart, and so does a faulty device"
        )
    for kind in dict.fromkeys(each.kind for each in differences if each.kind):
        alike = [each for each in differences if each.kind == kind]
        warnings.append(f"{_text(alike[0], alike)}: {kind}")
    return Compared(replicas if drift is None else "differ", drift, warnings)


def _digests(snapshot: Snapshot, shared: Sequence[Shared]) -> list[int | None]:
    """Return the digest of each box; None for a tensor of a class that tells nothing of what it is made of."""
    digester = Digester()
    found: list[int | None] = [None] * len(shared)
    totals: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    parts: dict[str, list[torch.Tensor]] = {}
    for number, each in enumerate(shared):
        if each.name not in parts:
            parts = {each.name: [part for _, part in local_parts(snapshot.tensors[each.name], each.name)]}
        total = digester.digest_or_none(parts[each.name][each.part], each.box.offsets)
        if total is not None:
            totals.setdefault(total.device, []).append((number, total))
    for on_device in totals.values():  # one copy for all that is on it
        values = torch.stack([total for _, total in on_device]).tolist()
        for (number, _), value in zip(on_device, values):
            found[number] = value % _WORD
    return found


def _bucket_sums(shared: Sequence[Shared], digests: Sequence[int]) -> list[int]:
    """Return sums that are 0 over all ranks where those that hold a box agree, and the meshes that have a tensor."""
    sums = [0] * _BUCKETS
    for each, digest in zip(shared, digests):
        box = f"{each.name} {each.mesh} {each.box.offsets} {each.box.sizes}"
        factor = _factor(box, each.holder, each.holders)
        if each.holder == 0:
            factor += _factor(each.name, each.mesh, each.meshes)
        sums[_bucket(each.name)] += factor * digest
    return [total % _WORD for total in sums]


def _factor(key: str, number: int, count: int) -> int:
    """Return the factor of number `number` of `count`. They add up to 0, and no sum of some of them is likely to."""
    after = xxh3_64_intdigest(key.encode(), number + 1) if number + 1 < count else 0
    return after - (xxh3_64_intdigest(key.encode(), number) if number else 0)


def _bucket(name: str) -> int:
    return xxh3_64_intdigest(name.encode()) % _BUCKETS


def _differences(
    control: Channel,
    snapshot: Snapshot,
    shared: Sequence[Shared],
    state: Mapping[str, Any],
    digests: Sequence[int],
    buckets: Sequence[int],
) -> list[Difference]:
    """Return what differs, by name and box, with two ranks that differ in it; of many names the first that are met."""
    totals = np.sum(control.gather(np.array(buckets, dtype=np.uint64)), axis=0, dtype=np.uint64)
    looked_at = set(np.flatnonzero(totals)[:_BUCKETS_AT_ONCE].tolist())
    with failing_as_one(), AllRanks[list[_Row]](control) as ranks:
        kinds = _Kinds(snapshot, state)
        ranks.mine = [
            _Row(each.name, each.mesh, kinds.of(each.name), each.part, *_box(each), each.holder == 0, digest)
            for each, digest in zip(shared, digests)
            if _bucket(each.name) in looked_at
        ]
    found: dict[str, Difference] = {}
    first_of: dict[Region, tuple[int, _Row]] = {}
    for rank, rows in enumerate(ranks.all):
        for row in rows:
            first, other = first_of.setdefault(Region(row.name, row.offsets, row.sizes), (rank, row))
            if other.digest != row.digest and row.name not in found:
                found[row.name] = _difference(first, other, rank, row)
    for name, pairs in _laid_out_otherwise(ranks.all, found).items():
        with failing_as_one(), AllRanks[list[int]](control) as of_pairs:
            of_pairs.mine = [_digest_of(snapshot, pair, control.rank) for pair in pairs]
        for number, pair in enumerate(pairs):
            if of_pairs.all[pair.first][number] != of_pairs.all[pair.second][number]:
                found[name] = pair
                break
    return [found[name] for name in sorted(found)]


def _laid_out_otherwise(of_ranks: Sequence[list[_Row]], found: Mapping[str, Difference]) -> dict[str, list[Difference]]:
    """Return, of tensors that differ between meshes that cut them in other ways, the boxes that two ranks have both."""
    totals: dict[str, dict[int, int]] = {}
    holders: dict[str, dict[int, list[tuple[int, _Row]]]] = {}
    for rank, rows in enumerate(of_ranks):
        for row in rows:
            if row.is_first and row.name not in found:
                of_name = totals.setdefault(row.name, {})
                of_name[row.mesh] = (of_name.get(row.mesh, 0) + row.digest) % _WORD
                holders.setdefault(row.name, {}).setdefault(row.mesh, []).append((rank, row))
    pairs: dict[str, list[Difference]] = {}
    for name in sorted(name for name, of_name in totals.items() if len(set(of_name.values())) > 1):
        (_, firsts), *others = sorted(holders[name].items())
        pairs[name] = [
            met
            for _, seconds in others
            for rank, row in firsts
            for other, its in seconds
            if (met := _difference(rank, row, other, its)).has_elements
        ]
    return pairs


def _difference(first: int, one: _Row, second: int, other: _Row) -> Difference:
    """Return that two ranks may differ in what they hold both of two boxes."""
    low = tuple(map(max, one.offsets, other.offsets))
    ends = ((at + size for at, size in zip(row.offsets, row.sizes)) for row in (one, other))
    sizes = tuple(max(0, min(pair) - at) for at, *pair in zip(low, *ends))
    return Difference(one.name, low, sizes, first, second, (one.part, other.part), one.kind)


def _digest_of(snapshot: Snapshot, pair: Difference, rank: int) -> int:
    if rank not in (pair.first, pair.second):
        return 0
    total = Digester().digest_or_none(region_of(snapshot, pair, rank), pair.offsets)
    return 0 if total is None else int(total.item()) % _WORD


def _box(each: Shared) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return each.box.offsets, each.box.sizes


class _Kinds:
    """What tensors are, by their names: buffers may differ."""

    def __init__(self, snapshot: Snapshot, state: Mapping[str, Any]) -> None:
        self._snapshot, self._state = snapshot, state

    def of(self, name: str) -> str:
        """Return "" for what has to be the same on all ranks; of a buffer, what becomes of it."""
        module = module_of(self._state[str(self._snapshot.paths[name][0])])
        is_buffer = name in self._snapshot.from_lowest and module is not None
        if not is_buffer and not name.endswith(_OF_BATCH_NORM):  # also in a state dict that was handed over
            return ""
        if module is not None and any(isinstance(each, DTensor) for each in module.parameters()):
            return (
                f"{_AFTER_RESTORE}. FSDP2 does not keep buffers alike, so each rank trains with those of its own: a "
                f"run that goes on after a restore differs from one that was not stopped. Use torch.nn.SyncBatchNorm "
                f"in place of BatchNorm, or broadcast the buffers from rank 0 after each step"
            )
        return (
            f"{_AFTER_RESTORE}. That changes nothing in a module under DistributedDataParallel, which takes those of "
            f"rank 0 itself. In any other, such as an average of the weights, broadcast its buffers from rank 0 before "
            f"you use it"
        )


def _text(one: Difference, found: Sequence[Difference]) -> str:
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{one.name}{more} differs between ranks {one.first} and {one.second}"


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


def agree_on_frozen(channel: Channel, state: Mapping[str, Any]) -> None:
    """Let each Trainable of a state know what identifies its frozen parameters, if they were changed on some rank.

    Every rank calls it, before it asks the objects for what is to be saved or loaded.

    Raises on every rank alike: ConfigError, where a frozen parameter differs between ranks that have it as a whole.
    """
    trainables = {name: each for name, each in state.items() if isinstance(each, Trainable)}
    if not trainables:
        return
    optimizers = [each for each in state.values() if isinstance(each, torch.optim.Optimizer)]
    for trainable in trainables.values():
        trainable.note_trained(optimizers)

    def changed() -> Contribution:
        return Contribution(maxima=(any(each.frozen_changed() for each in trainables.values()),))

    with failing_as_one():
        if not any(channel.agree("what is frozen", changed).maxima):
            return
    with failing_as_one(), AllRanks[dict[str, dict[FrozenPart, int]]](channel) as digests:
        digests.mine = {name: each.digest_frozen() for name, each in trainables.items()}
    for name, each in trainables.items():
        each.agree(of_rank.get(name, {}) for of_rank in digests.all)
