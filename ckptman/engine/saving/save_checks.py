"""What is seen of a save in the bytes that it writes anyhow: is it finite, and does it hold anything new?

Finite: looked at behind the training. Looked at are the parameters of modules and the state of optimizers. Buffers are
not: a mask may hold -inf on purpose.

Stale: a save whose parameters all equal those of the save before, although steps have passed.
What is wrong then is outside of the checkpoint, such as a cached copy of the weights that is saved again and again
(NeMo RL#3312: found after three of them). Every byte of it is what was saved, so checking digests finds nothing.
It costs next to nothing: each rank has the digests of the blocks of its data file at hand. Those of blocks within a
parameter are taken, and the bytes at its ends are digested. From save to save one digest is kept.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_128

from ckptman.engine.saving.write_plan import RankFile
from ckptman.engine.state.file_layout import Image, PlacedBytes
from ckptman.engine.state.modules import module_of, named_in_full
from ckptman.engine.state.named_state import parameter_names
from ckptman.engine.state.snapshot import Snapshot
from ckptman.storage.io.checksums import BLOCK_BYTES, DIGEST_BYTES
from ckptman.storage.io.file_writer import FiniteScan, Range, can_be_infinite

OnNonfinite = Literal["keep", "refuse", "ignore"]
MOST_NAMES = 10
"""So many names of tensors that are not finite are kept: as a rule it is all of them."""


class FiniteCheck:
    """Knows where in the data file of this rank the tensors lie that should be finite."""

    def __init__(self, file: RankFile, snapshot: Snapshot, state: Mapping[str, Any]) -> None:
        optimizers = tuple(f"{name}.state." for name, each in state.items() if isinstance(each, torch.optim.Optimizer))
        names = {each for each in snapshot.tensors if each.startswith(optimizers)}
        for name, value in state.items():
            if (module := module_of(value)) is not None:
                names |= {f"{name}.{each}" for each in parameter_names(module)}
        self.file = file
        self._ranges = _find(file, names)

    def begin(self) -> FiniteScan:
        """Return what looks at one file that is being written."""
        return FiniteScan(self._ranges)


def _find(file: RankFile, names: Collection[str]) -> list[Range]:
    dtypes = {name: dtype for name, dtype, _ in (*file.plan.tensors, *file.plan.own_tensors)}
    found = []
    for piece, place in zip(file.pieces, file.places):
        dtype = dtypes[piece.name]
        size = math.prod(piece.sizes) * getattr(torch, dtype).itemsize
        if size and piece.name in names and can_be_infinite(dtype):
            found.append(Range(place.payload, place.payload + size, piece.name, dtype))
    return sorted(found)


_NAMED = 3
_ByteRange = tuple[int, int]
"""Begin and end, in bytes of the data file."""


class RankEvidence(NamedTuple):
    """What a rank, or all of them, saw of the parameters it wrote: `same`, all are those of the save before; how many
    there are, and the names of a few."""

    same: bool
    tensors: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Places:
    """Where the parameters lie in the data file of this rank.

    `blocks`: numbers of the blocks that lie within one of them; `ranges`: what of them is in other blocks; `pickled`:
    numbers among the file's pickled pieces. `tensors`: how many of them begin in this file.
    """

    file: RankFile
    blocks: NDArray[np.int64]
    ranges: tuple[_ByteRange, ...]
    pickled: tuple[int, ...]
    tensors: int
    names: tuple[str, ...]


class ParameterFingerprint(NamedTuple):
    """What the training thread knows when a save begins.

    `places` of the parameters, None where this rank writes none; `updates`: optimizer steps so far, None where nobody
    counts them; `resting`: every learning rate is 0, so that optimizer steps change nothing.
    """

    step: int
    places: _Places | None
    updates: int | None
    resting: bool


@dataclass(frozen=True)
class Stale:
    """A save that has the parameters of the one before. `first`: that one was not stale itself."""

    step: int
    previous_step: int
    updates: int | None
    count: int
    names: tuple[str, ...]
    first: bool

    @property
    def text(self) -> str:
        """The text of the warning."""
        more = self.count - len(self.names)
        named = ", ".join(self.names) + (f" and {more} more" if more > 0 else "")
        same = (
            f"the checkpoint of step {self.step} has the parameters of that of step {self.previous_step}, bit for bit "
            f"({named})"
        )
        if self.updates == 0:
            return f"{same}: no optimizer step was made since, so steps are counted while nothing is trained"
        made = "steps have passed" if self.updates is None else f"{self.updates} optimizer steps were made since"
        return (
            f"{same}, although {made}. Is a copy saved that training does not update, or does the optimizer update "
            f"other tensors than those of the model? `ckptman diff` shows what does change"
        )


class StaleSaves:
    """Finds saves that have the parameters of the one before. Every rank has one; the leader's judges."""

    def __init__(self) -> None:
        self._places: tuple[RankFile, _Places | None] | None = None
        self._last: tuple[RankFile, bytes] | None = None
        self._next: tuple[RankFile, bytes] | None = None
        self._last_watch: ParameterFingerprint | None = None
        self._warned = False

    def watch(
        self, step: int, file: RankFile, snapshot: Snapshot, state: Mapping[str, Any], updates: int
    ) -> ParameterFingerprint:
        """Note what is known when a save begins, in the training thread. `updates`: optimizer steps so far."""
        optimizers = [each for each in state.values() if isinstance(each, torch.optim.Optimizer)]
        if self._places is None or self._places[0] is not file:
            places = None
            with contextlib.suppress(Exception):  # not to know what should change is no reason not to save
                places = _find_parameters(file, _parameter_names(state, optimizers) & snapshot.tensors.keys())
            self._places = file, places
        rates = [group["lr"] for each in optimizers for group in each.param_groups if "lr" in group]
        resting = bool(rates) and all(map(_is_zero, rates))
        return ParameterFingerprint(step, self._places[1], updates if optimizers else None, resting)

    def compare(
        self, watch: ParameterFingerprint | None, image: Image, pickled: Sequence[PlacedBytes], blocks: bytes
    ) -> RankEvidence | None:
        """Compare what was just written with the save before. `blocks`: digests of the file; None: nothing to see."""
        self._next = None
        if watch is None or watch.places is None:
            return None
        places = watch.places
        try:
            self._next = places.file, _digest_of(places, image, pickled, blocks)
        except Exception:  # noqa: BLE001 the checkpoint is good, whatever is wrong with looking at it
            return None
        same = self._last is not None and self._last[0] is places.file and self._last[1] == self._next[1]
        return RankEvidence(same, places.tensors, places.names)

    def committed(self) -> None:
        """Compare later saves with this one."""
        self._last = self._next

    def judge(self, now: ParameterFingerprint | None, parts: Sequence[RankEvidence | None]) -> Stale | None:
        """Say whether a save is stale, after its commit, by what each rank saw. Leader only."""
        if now is None:
            return None
        seen = _seen_by_all(parts)
        last, self._last_watch = self._last_watch, now
        if last is None or seen is None or not seen.same or now.step <= last.step or last.resting or now.resting:
            self._warned = self._warned and seen is not None and seen.same
            return None
        updates = None if now.updates is None or last.updates is None else now.updates - last.updates
        first, self._warned = not self._warned, True
        return Stale(now.step, last.step, updates, seen.tensors, seen.names, first)


def _seen_by_all(parts: Iterable[RankEvidence | None]) -> RankEvidence | None:
    """Return what the ranks saw together; None: none of them wrote a parameter."""
    seen = [each for each in parts if each is not None]
    if not seen:
        return None
    names = dict.fromkeys(name for each in seen for name in each.names)
    return RankEvidence(all(each.same for each in seen), sum(each.tensors for each in seen), tuple(names)[:_NAMED])


def _parameter_names(state: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> set[str]:
    """Return flat names of the parameters that the optimizers update; without one, of those that ask for gradients."""
    known = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    return {
        f"{key}.{each}"
        for key, value in state.items()
        if (module := module_of(value)) is not None
        for names, parameter in named_in_full(module)
        if parameter.requires_grad and (not optimizers or id(parameter) in known)
        for each in names
    }


def _find_parameters(file: RankFile, names: Collection[str]) -> _Places | None:
    """Find the tensors of these names in the data file of this rank; None: there are none."""
    described = (*file.plan.tensors, *file.plan.own_tensors)
    item_bytes = {name: getattr(torch, dtype).itemsize for name, dtype, _ in described}
    blocks: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    ranges: list[_ByteRange] = []
    largest: dict[str, int] = {}
    for piece, place in zip(file.pieces, file.places):
        size = math.prod(piece.sizes) * item_bytes[piece.name]
        if not size or piece.name not in names:
            continue
        largest[piece.name] = max(size, largest.get(piece.name, 0))
        low, high = place.payload, place.payload + size
        first, end = -(-low // BLOCK_BYTES), high // BLOCK_BYTES  # the blocks that lie in it as a whole
        if first < end:
            blocks.append(np.arange(first, end))
            ranges += [(low, first * BLOCK_BYTES), (end * BLOCK_BYTES, high)]
        else:
            ranges.append((low, high))
    pickled = tuple(number for number, piece in enumerate(file.pickled) if piece.name in names)
    largest |= {file.pickled[number].name: 0 for number in pickled}
    if not largest:
        return None
    begun = [piece for piece in (*file.pieces, *file.pickled) if piece.name in largest and not any(piece.offsets)]
    biggest = sorted(largest, key=lambda name: -largest[name])[:_NAMED]
    ends = tuple((low, high) for low, high in ranges if low < high)
    return _Places(file, np.concatenate(blocks), ends, pickled, len(begun), tuple(biggest))


def _digest_of(watched: _Places, image: Image, pickled: Sequence[PlacedBytes], blocks: bytes) -> bytes:
    """Return a digest of all that is watched, from the digests of the blocks of the file and from its image."""
    hasher = xxh3_128(np.frombuffer(blocks, f"V{DIGEST_BYTES}")[watched.blocks].tobytes())
    places = [pickled[number] for number in watched.pickled]
    ranges = [*watched.ranges, *((place.offset, place.offset + place.bytes) for place in places)]
    scratch = memoryview(bytearray(max((high - low for low, high in ranges), default=0)))
    for low, high in ranges:
        hasher.update(image.view(low, scratch[: high - low]))
    return hasher.digest()


def _is_zero(rate: Any) -> bool:
    if isinstance(rate, torch.Tensor):
        return rate.device.type == "cpu" and not rate.any()  # from a device it would have to be waited for
    return isinstance(rate, (int, float)) and rate == 0
