"""Reading once what several ranks need: each of them reads a share from storage and sends it to the others.

Ranks that hold the same part of a tensor (replicas), or columns of the same rows, make a family. Laid end to end, the
rows that a family needs are a line of bytes; every member reads an equal length of it, in bands of whole rows, and
after each band the members exchange what the others need. So nobody reads columns by reading all of every row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from xxhash import xxh3_128_hexdigest

from ckptman.sharded.boxes import local_parts
from ckptman.sharded.image import as_bytes
from ckptman.sharded.ranks import Channel
from ckptman.sharded.reading import Fill, fills_for, fills_for_box, put, read_fills
from ckptman.sharded.saved import SavedState

BAND_BYTES = 32 * 1024 * 1024
"""What the members of a family hold in flight together, twice: one band is read while the one before is exchanged."""
MEMBERS = 32
"""The most ranks in a family: of more that need the same, every so many make one of their own."""
SHARED_BYTES = 4096
"""Tensors of less than this are read by every rank: asking others for them would take longer."""


class Member(NamedTuple):
    """The box of one member of a family, in elements of the global tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Common:
    """A tensor that a family reads together: `memory` is this rank's part of it, `boxes` are the parts of all.

    `offsets` and `sizes` are the box that holds them all; along dimension 0 it is no larger than each of them.
    """

    name: str
    memory: torch.Tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    boxes: tuple[Member, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.sizes[1:]) * self.memory.dtype.itemsize

    @property
    def rows(self) -> int:
        return self.sizes[0]


class Band(NamedTuple):
    """Rows of a tensor that one member reads."""

    common: Common
    first: int
    rows: int


def read_together(channel: Channel, saved: SavedState, targets: Mapping[str, torch.Tensor], *, verify: bool) -> int:
    """Fill the targets of all ranks, with each byte read from storage by one rank only where that can be.

    Every rank calls it. Returns the bytes that this one read. Raises: CorruptError, only on the rank that met it and
    after its part in every exchange, so that the caller can tell the others.
    """
    families, alone = _families(channel, targets)
    error: Exception | None = None
    read_bytes = 0
    try:
        fills = [each for name in alone for each in fills_for(saved, name, targets[name])]
        read_bytes = read_fills(saved, fills, verify=verify).read_bytes
    except Exception as failed:  # noqa: BLE001 the others wait for this rank's bands
        error = failed
    # Families in the same order on every rank: whoever waits for one waits for the smallest that is not done.
    for ranks in sorted(families):
        group = channel.family(ranks)
        work = _Exchange(saved, families[ranks], ranks.index(channel.rank), group, verify)
        read_bytes += work.run(failed=error)
        error = error or work.error
    if error is not None:
        raise error
    return read_bytes


def _families(
    channel: Channel, targets: Mapping[str, torch.Tensor]
) -> tuple[dict[tuple[int, ...], list[Common]], list[str]]:
    """The tensors that this rank reads together with others, by family, and the names it reads alone."""
    families: dict[tuple[int, ...], list[Common]] = {}
    alone = []
    everyone = tuple(range(channel.world_size))
    for name, tensor in sorted(targets.items()):
        found = _common(name, tensor, everyone, channel.rank)
        if found is None:
            alone.append(name)
        else:
            families.setdefault(found[0], []).append(found[1])
    # Together only if all members know it: ranks of another pipeline stage have other tensors.
    digests = channel.gather({ranks: _digest(members) for ranks, members in families.items()})
    for ranks in list(families):
        if any(digests[rank].get(ranks) != digests[channel.rank][ranks] for rank in ranks):
            alone += [each.name for each in families.pop(ranks)]
    return families, alone


def _digest(members: Sequence[Common]) -> str:
    return xxh3_128_hexdigest(repr([(each.name, each.offsets, each.sizes) for each in members]).encode())


def _common(
    name: str, tensor: torch.Tensor, everyone: tuple[int, ...], rank: int
) -> tuple[tuple[int, ...], Common] | None:
    parts = local_parts(tensor, name)
    if len(everyone) == 1 or len(parts) != 1 or not tensor.dim():
        return None
    box, memory = parts[0]
    if isinstance(tensor, DTensor):
        ranks, boxes = _relatives(tensor)
    elif box.holders is None:
        ranks, boxes = everyone, (Member(box.offsets, box.sizes),) * len(everyone)
    else:
        return None
    start = ranks.index(rank) // MEMBERS * MEMBERS
    ranks, boxes = ranks[start : start + MEMBERS], boxes[start : start + MEMBERS]
    low = tuple(min(each.offsets[dim] for each in boxes) for dim in range(tensor.dim()))
    high = tuple(max(each.offsets[dim] + each.sizes[dim] for each in boxes) for dim in range(tensor.dim()))
    common = Common(name, memory, low, tuple(end - start for start, end in zip(low, high)), boxes)
    total = common.rows * common.row_bytes
    if len(ranks) == 1 or total < SHARED_BYTES or common.row_bytes > BAND_BYTES // len(ranks):
        return None
    return ranks, common


def _relatives(tensor: DTensor) -> tuple[tuple[int, ...], tuple[Member, ...]]:
    """The ranks that hold parts of the same rows of a DTensor, and their parts."""
    return _relatives_of(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


@lru_cache(maxsize=65536)
def _relatives_of(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[Member, ...]]:
    mine = mesh.get_coordinate()
    assert mine is not None
    together = [isinstance(each, Replicate) or (isinstance(each, Shard) and each.dim > 0) for each in placements]
    axes = [range(size) if shared else [at] for size, shared, at in zip(mesh.shape, together, mine)]
    found = {}
    for coordinate in product(*axes):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh.shape, list(coordinate), placements)
        found[int(mesh.mesh[coordinate])] = Member(tuple(offsets), tuple(sizes))
    ranks = tuple(sorted(found))
    return ranks, tuple(found[rank] for rank in ranks)


class _Exchange:
    """A family at work: `me` is this rank's number in it."""

    def __init__(
        self, saved: SavedState, line: Sequence[Common], me: int, group: dist.ProcessGroup | None, verify: bool
    ) -> None:
        self._saved, self._me, self._group, self._verify = saved, me, group, verify
        self._members = len(line[0].boxes)
        self._bands = [list(_bands(line, each, self._members)) for each in range(self._members)]
        self.error: Exception | None = None

    def run(self, failed: Exception | None) -> int:
        """Take part in all rounds; once something `failed`, without reading. Returns the bytes read from storage."""
        self.error = failed
        rounds = max(len(bands) for bands in self._bands)
        read_bytes = 0
        with ThreadPoolExecutor(1, thread_name_prefix="ckptman-read") as reader:
            ahead = reader.submit(self._read, 0)
            for number in range(rounds):
                pieces, count = ahead.result()
                read_bytes += count
                if number + 1 < rounds:
                    ahead = reader.submit(self._read, number + 1)
                self._exchange(number, pieces)
        return read_bytes

    def _read(self, number: int) -> tuple[list[torch.Tensor], int]:
        """This rank's bands of one round, whole rows."""
        bands = self._band(self._me, number)
        pieces = []
        for common, first, rows in bands:
            memory = common.memory.narrow(0, first, rows)
            if tuple(memory.shape[1:]) != common.sizes[1:] or memory.device.type != "cpu":
                memory = torch.empty((rows, *common.sizes[1:]), dtype=common.memory.dtype)
            pieces.append(memory)
        if self.error is None:
            try:
                fills: list[Fill] = []
                for (common, first, _), memory in zip(bands, pieces):
                    offsets = (common.offsets[0] + first, *common.offsets[1:])
                    fills += fills_for_box(self._saved, common.name, offsets, memory)
                return pieces, read_fills(self._saved, fills, verify=self._verify).read_bytes
            except Exception as error:  # noqa: BLE001 the others wait for these bands, whatever is in them
                self.error = error
        return pieces, 0

    def _exchange(self, number: int, pieces: list[torch.Tensor]) -> None:
        sent: list[torch.Tensor] = []
        send_sizes, receive_sizes = [], []
        for member in range(self._members):
            mine = []
            for band, piece in zip(self._band(self._me, number), pieces):
                part = _part(band, piece, member)
                if member != self._me:
                    mine.append(as_bytes(part.contiguous()))
                elif part.data_ptr() != band.common.memory.narrow(0, band.first, band.rows).data_ptr():
                    put(band.common.memory.narrow(0, band.first, band.rows), part)
            sent += mine
            send_sizes.append(sum(each.numel() for each in mine))
            theirs = self._band(member, number) if member != self._me else []
            receive_sizes.append(sum(_bytes_for(band, self._me) for band in theirs))
        received = torch.empty(sum(receive_sizes), dtype=torch.uint8)
        outgoing = torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8)
        dist.all_to_all_single(received, outgoing, receive_sizes, send_sizes, group=self._group)
        at = 0
        for member in range(self._members):
            for band in self._band(member, number) if member != self._me else []:
                size = _bytes_for(band, self._me)
                target = band.common.memory.narrow(0, band.first, band.rows)
                if size:
                    # A view of bytes as another dtype has to begin at a multiple of its size.
                    put(target, received[at : at + size].clone().view(target.dtype).view(target.shape))
                at += size

    def _band(self, member: int, number: int) -> list[Band]:
        bands = self._bands[member]
        return bands[number] if number < len(bands) else []


def _bands(line: Sequence[Common], member: int, members: int) -> Iterator[list[Band]]:
    """What one member reads, round by round: an equal length of the line, cut between rows."""
    total = sum(each.rows * each.row_bytes for each in line)
    low, high = total * member // members, total * (member + 1) // members
    band_bytes = BAND_BYTES // members
    band: list[Band] = []
    room, start = band_bytes, 0
    for common in line:
        size = common.row_bytes
        first, last = (min(max(-(-(edge - start) // size), 0), common.rows) for edge in (low, high))
        start += common.rows * size
        while first < last:
            rows = min(last - first, max(room // size, 0 if band else 1))
            if not rows:
                yield band
                band, room = [], band_bytes
                continue
            band.append(Band(common, first, rows))
            first, room = first + rows, room - rows * size
    if band:
        yield band


def _part(band: Band, piece: torch.Tensor, member: int) -> torch.Tensor:
    """What a member needs of the rows of a band."""
    box = band.common.boxes[member]
    for dim in range(1, piece.dim()):
        piece = piece.narrow(dim, box.offsets[dim] - band.common.offsets[dim], box.sizes[dim])
    return piece


def _bytes_for(band: Band, member: int) -> int:
    return band.rows * math.prod(band.common.boxes[member].sizes[1:]) * band.common.memory.dtype.itemsize
