"""Reading once what several ranks need: each of them reads a share from storage and sends it to the others.

Ranks of a node that hold the same part of a tensor (replicas), or columns of the same rows, make a group. Laid end to
end, the rows that a group needs are one line of bytes; every member reads an equal length of it, in bands of whole
rows, and after each band the members exchange what the others need. So nobody reads columns by reading all of each row.

Between nodes nothing is exchanged: the messages are gloo's, over TCP and through the host, and a parallel file system
serves each node by a faster way than that as a rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from xxhash import xxh3_128_hexdigest

from ckptman._torch_compat import local_shape_and_offset, local_tensor
from ckptman.engine.comm.control_group import Channel, Contribution
from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.engine.loading.read_tensors import Fill, Uploads, fills_for_all, fills_for_box, read_fills
from ckptman.engine.state.file_layout import as_bytes, put
from ckptman.engine.state.local_shards import Box, is_plain, local_parts
from ckptman.storage.io.threads import Task, Worker

BAND_BYTES = 32 * 1024 * 1024
"""What the members of a group hold in flight together, twice: one band is read while the one before is exchanged."""
MEMBERS = 32
"""The most ranks in a group: of more that need the same, every so many make one of their own."""
SHARED_BYTES = 4096
"""Tensors of less than this are read by every rank: asking others for them would take longer."""


class SharedTensor(NamedTuple):
    """A tensor that a group reads together: `memory` is this rank's part of it, `boxes` are the parts of all.

    `offsets` and `sizes` are the box that holds them all; along dimension 0 it is no larger than each of them.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    boxes: tuple[Box, ...]
    memory: torch.Tensor

    @property
    def row_bytes(self) -> int:
        return math.prod(self.sizes[1:]) * self.memory.dtype.itemsize

    @property
    def rows(self) -> int:
        return self.sizes[0]


class Band(NamedTuple):
    """Rows of a tensor that one member reads."""

    shared: SharedTensor
    first: int
    rows: int

    @property
    def target(self) -> torch.Tensor:
        """Return where this rank's part of them belongs."""
        return self.shared.memory.narrow(0, self.first, self.rows)


def read_together(channel: Channel, saved: SavedState, targets: Mapping[str, torch.Tensor], *, verify: bool) -> int:
    """Fill the targets of all ranks, with each byte read from storage by one rank of a node only where that can be.

    Every rank calls it. Returns the bytes that this one read. Raises: RankFailed on every rank alike, RankLostError.
    """
    together = SharedReads(channel)
    met = channel.agree("load()", lambda: Contribution(together.find({"all": targets})))
    if met.unlike is not None:
        together.keep_known(met.unlike)
    return together.read(saved, "all", targets, verify=verify)


class SharedReads:
    """Which tensors the ranks of a node read together: all that each member of a group knows to be shared."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._neighbours = channel, channel.neighbours
        self._groups: dict[tuple[str, tuple[int, ...]], list[SharedTensor]] = {}

    def find(self, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, str]:
        """Find what this rank could read with others, by the part of the load that it belongs to, and return what they
        have to know alike: digests of tensors by digests of their group, which are the same on nodes that are laid out
        alike."""
        for part, targets in parts.items():
            for name, tensor in sorted(targets.items()):
                if (found := _shared(name, tensor, self._neighbours, self._channel.rank)) is not None:
                    self._groups.setdefault((part, found[0]), []).append(found[1])
        return {self._key(*group): _digest(each[:4] for each in shared) for group, shared in self._groups.items()}

    def keep_known(self, found: Sequence[Mapping[str, str]]) -> None:
        """Forget groups of which another member has not `found` the same: ranks of another pipeline stage have other
        tensors."""
        for part, ranks in list(self._groups):
            if len({found[rank].get(self._key(part, ranks)) for rank in ranks}) > 1:
                del self._groups[part, ranks]

    def read(self, saved: SavedState, part: str, targets: Mapping[str, torch.Tensor], *, verify: bool) -> int:
        """Fill the targets of a part of the load. Every rank calls it.

        Returns the bytes that this rank read. Raises: RankFailed on every rank alike, RankLostError.
        """
        groups = {ranks: shared for (of, ranks), shared in self._groups.items() if of == part}
        shared = {each.name for group in groups.values() for each in group}
        error: Exception | None = None
        read_bytes = 0
        try:
            own = {name: tensor for name, tensor in targets.items() if name not in shared}
            read_bytes = read_fills(saved, fills_for_all(saved, own), verify=verify)
        except Exception as failed:  # noqa: BLE001 the others wait for this rank's bands
            error = failed
        # Groups in the same order on every rank: whoever waits for one waits for the smallest that is not done.
        for ranks in sorted(groups):
            work = _Exchange(saved, groups[ranks], ranks, self._channel, verify)
            read_bytes += work.run(error)
            error = error or work.error

        def tell() -> None:
            if error is not None:
                raise error

        self._channel.agree("load()", tell)
        return read_bytes

    def _key(self, part: str, ranks: tuple[int, ...]) -> str:
        return _digest([part, *map(self._neighbours.index, ranks)])


def _digest(what: Iterable[object]) -> str:
    return xxh3_128_hexdigest(repr(list(what)).encode())


def _shared(
    name: str, tensor: torch.Tensor, neighbours: tuple[int, ...], rank: int
) -> tuple[tuple[int, ...], SharedTensor] | None:
    """Return the `neighbours` of a rank, itself included, that read a tensor together, and what; None: it reads it
    alone."""
    if len(neighbours) == 1 or not tensor.dim():
        return None
    parts = local_parts(tensor, name)
    if len(parts) != 1:
        return None
    box, memory = parts[0]
    if not is_plain(memory) or memory.is_conj() or memory.is_neg():
        return None
    if isinstance(tensor, DTensor):
        if not is_plain(local_tensor(tensor)):  # several shards, of which this rank has one
            return None
        mine = tensor.device_mesh.get_coordinate()
        assert mine is not None
        ranks, boxes = _group_in_mesh(tuple(tensor.shape), tensor.device_mesh, tensor.placements, tuple(mine))
    elif box.holders is None:
        ranks, boxes = neighbours, (box,) * len(neighbours)
    else:
        return None
    near = [member for member, each in enumerate(ranks) if each in neighbours]
    start = near.index(ranks.index(rank)) // MEMBERS * MEMBERS
    near = near[start : start + MEMBERS]
    ranks, boxes = tuple(ranks[member] for member in near), tuple(boxes[member] for member in near)
    low = tuple(min(each.offsets[dim] for each in boxes) for dim in range(tensor.dim()))
    high = tuple(max(each.offsets[dim] + each.sizes[dim] for each in boxes) for dim in range(tensor.dim()))
    shared = SharedTensor(name, low, tuple(end - start for start, end in zip(low, high)), boxes, memory)
    total = shared.rows * shared.row_bytes
    if len(ranks) == 1 or total < SHARED_BYTES or shared.row_bytes > BAND_BYTES // len(ranks):
        return None
    return ranks, shared


@lru_cache(maxsize=8192)
def _group_in_mesh(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...], mine: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    """Return the ranks that hold parts of the same rows of a DTensor as the rank at `mine`, and their parts."""
    together = [isinstance(each, Replicate) or (isinstance(each, Shard) and each.dim > 0) for each in placements]
    axes = [range(size) if shared else [at] for size, shared, at in zip(mesh.shape, together, mine)]
    found = {}
    for coordinate in product(*axes):
        sizes, offsets = local_shape_and_offset(shape, mesh.shape, list(coordinate), placements)
        found[int(mesh.mesh[coordinate])] = Box(tuple(offsets), tuple(sizes))
    ranks = tuple(sorted(found))
    return ranks, tuple(found[rank] for rank in ranks)


class _Exchange:
    """What a group of ranks reads together, round by round."""

    def __init__(
        self, saved: SavedState, tensors: Sequence[SharedTensor], ranks: tuple[int, ...], channel: Channel, verify: bool
    ) -> None:
        self._saved, self._channel, self._verify = saved, channel, verify
        self._me = ranks.index(channel.rank)
        self._others = [(member, rank) for member, rank in enumerate(ranks) if member != self._me]
        self._bands = [list(_bands(tensors, member, len(ranks))) for member in range(len(ranks))]
        self._uploads = Uploads()
        self.error: Exception | None = None

    def run(self, failed: Exception | None) -> int:
        """Take part in all rounds, or until one in which a member says that it `failed`. Returns the bytes read."""
        self.error = failed
        rounds = max(len(bands) for bands in self._bands)
        read_bytes = 0
        with Worker("ckptman-read") as reader:
            ahead = self._begin_read(reader, 0)
            for number in range(rounds):
                pieces, count = ahead.result()
                read_bytes += count
                if number + 1 < rounds:
                    ahead = self._begin_read(reader, number + 1)
                if self._exchange(number, pieces):
                    ahead.result()
                    break
        try:
            self._uploads.finish()
        except Exception as error:  # noqa: BLE001 told with everything else
            self.error = self.error or error
        return read_bytes

    def _begin_read(self, reader: Worker, number: int) -> Task[tuple[list[torch.Tensor], int]]:
        try:
            return reader.submit(self._read, number)
        except RuntimeError:  # no more threads for this user: slower, not wrong
            task = Task(partial(self._read, number))
            task.run()
            return task

    def _read(self, number: int) -> tuple[list[torch.Tensor], int]:
        """Read this rank's bands of one round, whole rows. An error is kept in `error`: the others wait for them."""
        if self.error is not None:
            return [], 0
        try:
            fills: list[Fill] = []
            pieces = []
            for band in self._band(self._me, number):
                shared, memory = band.shared, band.target
                if tuple(memory.shape[1:]) != shared.sizes[1:] or memory.device.type != "cpu":
                    memory = torch.empty((band.rows, *shared.sizes[1:]), dtype=memory.dtype, device="cpu")
                offsets = (shared.offsets[0] + band.first, *shared.offsets[1:])
                fills += fills_for_box(self._saved, shared.name, offsets, memory)
                pieces.append(memory)
            return pieces, read_fills(self._saved, fills, verify=self._verify)
        except Exception as error:  # noqa: BLE001
            self.error = error
            return [], 0

    def _exchange(self, number: int, pieces: list[torch.Tensor]) -> bool:
        """Send each member what it needs of this rank's bands, and take what it has. Returns whether any failed."""
        sent = self._pack(number, pieces)
        sizes = {
            rank: 1 + sum(_bytes_for(band, self._me) for band in self._band(member, number))
            for member, rank in self._others
        }
        received = self._channel.exchange(sent, sizes)
        # What was said, and not `error`, which the reading of the next round may set any moment: all end alike.
        if any(int(each[0]) for each in (*sent.values(), *received.values())):
            return True
        try:
            self._take(number, pieces, received)
        except Exception as error:  # noqa: BLE001 told with the next message
            self.error = error
        return False

    def _pack(self, number: int, pieces: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the messages to the others: a flag, 1 if something went wrong here, and the bytes they need."""
        mine = self._band(self._me, number)
        sizes = {rank: 1 + sum(_bytes_for(band, member) for band in mine) for member, rank in self._others}
        messages = {rank: torch.ones(size, dtype=torch.uint8, device="cpu") for rank, size in sizes.items()}
        if self.error is not None:
            return messages
        try:
            for member, rank in self._others:
                at = 1
                for band, piece in zip(mine, pieces):
                    part = torch.empty(_part(band, piece, member).shape, dtype=piece.dtype, device="cpu")
                    put(part, _part(band, piece, member))
                    size = _bytes_for(band, member)
                    messages[rank][at : at + size] = as_bytes(part)
                    at += size
            for message in messages.values():
                message[0] = 0
        except Exception as error:  # noqa: BLE001
            self.error = error
        return messages

    def _take(self, number: int, pieces: list[torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        for band, piece in zip(self._band(self._me, number), pieces):
            part, target = _part(band, piece, self._me), band.target
            if part.data_ptr() != target.data_ptr():
                self._uploads.to(target.device)(target, part)
        for member, rank in self._others:
            at = 1
            for band in self._band(member, number):
                target, size = band.target, _bytes_for(band, self._me)
                if size:
                    # A view of bytes as another dtype has to begin at a multiple of its size: cloned, it does.
                    data = received[rank][at : at + size].clone()
                    self._uploads.to(target.device)(target, data.view(target.dtype).view(target.shape))
                at += size

    def _band(self, member: int, number: int) -> list[Band]:
        bands = self._bands[member]
        return bands[number] if number < len(bands) else []


def _bands(tensors: Sequence[SharedTensor], member: int, members: int) -> Iterator[list[Band]]:
    """Yield what one member reads, round by round: an equal length of all rows, cut between rows."""
    total = sum(each.rows * each.row_bytes for each in tensors)
    low, high = total * member // members, total * (member + 1) // members
    band_bytes = BAND_BYTES // members
    band: list[Band] = []
    room, start = band_bytes, 0
    for shared in tensors:
        size = shared.row_bytes
        first, last = (min(max(-(-(edge - start) // size), 0), shared.rows) for edge in (low, high))
        start += shared.rows * size
        while first < last:
            rows = min(last - first, max(room // size, 0 if band else 1))
            if not rows:
                yield band
                band, room = [], band_bytes
                continue
            band.append(Band(shared, first, rows))
            first, room = first + rows, room - rows * size
    if band:
        yield band


def _part(band: Band, piece: torch.Tensor, member: int) -> torch.Tensor:
    """Return what a member needs of the rows of a band."""
    box = band.shared.boxes[member]
    for dim in range(1, piece.dim()):
        piece = piece.narrow(dim, box.offsets[dim] - band.shared.offsets[dim], box.sizes[dim])
    return piece


def _bytes_for(band: Band, member: int) -> int:
    return band.rows * math.prod(band.shared.boxes[member].sizes[1:]) * band.shared.memory.dtype.itemsize
