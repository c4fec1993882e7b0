"""Who writes what, and where it lies in each rank's data file: known when the state is first seen, and kept until its
shape changes.

Every rank finds its own part by itself. What it needs of the others is which of them have a tensor or a value that
belongs to no mesh; ranks that have the same names send no more than a digest of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np
import torch
from xxhash import xxh3_128_hexdigest

from ckptman.engine.comm.control_group import AllRanks, Channel, Contribution, failing_as_one
from ckptman.engine.state.file_layout import LARGE_BYTES, Layout, PlacedBytes, in_order
from ckptman.engine.state.local_shards import (
    Box,
    Shared,
    describes_shards,
    global_shape,
    is_plain,
    is_whole,
    local_parts,
    mesh_of,
)
from ckptman.engine.state.snapshot import Snapshot
from ckptman.errors import ConfigError
from ckptman.storage.format.chunk_table import Rows, pack

Path = tuple[str | int, ...]
Described = tuple[str, str, tuple[int, ...]]
"""Name, dtype and global shape of a tensor."""


@dataclass(frozen=True)
class LocalShard:
    """A box of a tensor that this rank holds: number `part` of its local parts. `cut`: replicas may share it."""

    name: str
    box: Box
    item_bytes: int
    part: int = 0
    cut: bool = True

    @property
    def bytes(self) -> int:
        return math.prod(self.box.sizes) * self.item_bytes


@dataclass(frozen=True)
class WritePiece:
    """A box that this rank writes: all of its local part number `part`; or, if it `is_cut`, what begins at row `row`
    of that."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    part: int = 0
    row: int = 0
    is_cut: bool = False


@dataclass(frozen=True)
class WritePlan:
    """What one rank writes, and what of it others hold as well.

    `tensors`: all tensors that ranks share, the same list on every rank; `own_tensors`: those that only this rank has.
    `objects`: flat names of the plain values, `units`: numbers of the snapshot's units, that this rank writes.
    `paths`: where the shared names are in the nested state; `own_paths`: where this rank's own are.
    """

    signature: int
    tensors: tuple[Described, ...] = ()
    own_tensors: tuple[Described, ...] = ()
    pieces: tuple[WritePiece, ...] = ()
    objects: tuple[str, ...] = ()
    units: tuple[int, ...] = ()
    own_units: tuple[int, ...] = ()
    paths: Mapping[str, Path] = field(default_factory=dict)
    own_paths: Mapping[str, Path] = field(default_factory=dict)
    shared: tuple[Shared, ...] = ()


@dataclass(frozen=True)
class NameTable:
    """The names that a rank has and others may have too. Equal tables have equal digests."""

    tensors: tuple[Described, ...]
    meshes: tuple[int | None, ...]
    """Of each of these tensors, what identifies its mesh."""
    loose: frozenset[str]
    """Names of tensors on a mesh, of the shards that a tensor describes, of plain values, of units."""
    paths: tuple[tuple[str, Path], ...]

    @classmethod
    def of(cls, snapshot: Snapshot) -> NameTable:
        """Return the table of this rank. Raises: ConfigError."""
        shared = {name: each for name, each in sorted(snapshot.tensors.items()) if not snapshot.is_own(name)}
        units = (_unit_name(snapshot, each) for each in range(len(snapshot.units)))
        shards = [
            _shard_name(name, box)
            for name, each in shared.items()
            if describes_shards(each)
            for box, _ in local_parts(each, name)
        ]
        on_meshes = (_on_mesh(name, mesh_of(each)) for name, each in shared.items())
        return cls(
            tuple(_described(name, each) for name, each in shared.items()),
            tuple(map(mesh_of, shared.values())),
            frozenset([*on_meshes, *snapshot.objects, *units, *shards]),
            tuple((name, snapshot.paths[name]) for name in sorted(snapshot.paths) if not snapshot.is_own(name)),
        )

    @cached_property
    def digest(self) -> str:
        return xxh3_128_hexdigest(repr((self.tensors, self.meshes, sorted(self.loose), self.paths)).encode())


def plan_save(snapshot: Snapshot, channel: Channel) -> RankFile:
    """Agree with the other ranks who writes what, and lay out the file of this rank. Every rank calls it.

    Raises: ConfigError, on every rank alike.
    """
    table: list[NameTable] = []

    def look() -> Contribution:
        table.append(NameTable.of(snapshot))
        return Contribution(table[0].digest)

    with failing_as_one():
        met = channel.agree("save()", look)
    tables = tables_of_all(channel, table[0], met.unlike)
    with failing_as_one(), AllRanks[None](channel):
        file = make_rank_file(snapshot, plan_for(snapshot, tables, channel.rank))
    return file


def tables_of_all(channel: Channel, mine: NameTable, digests: Sequence[str] | None) -> list[NameTable]:
    """Return the names that each rank has, for `plan_for`. `digests`: those of the tables of all ranks; None: they are
    alike. Every rank calls it."""
    if digests is None:
        return [mine] * channel.world_size
    firsts = {each: rank for rank, each in reversed(list(enumerate(digests)))}
    sent = channel.gather(mine if firsts[mine.digest] == channel.rank else None)
    return [cast(NameTable, sent[firsts[each]]) for each in digests]


def plan_for(snapshot: Snapshot, tables: Sequence[NameTable], rank: int) -> WritePlan:
    """Return the plan of one rank, given the names that each rank has."""
    tensors = _all_tensors(tables)
    holders = _Holders(tables)
    meshes = _meshes(tables)
    held, shared = [], []
    for name, tensor in snapshot.tensors.items():
        is_own, mesh = snapshot.is_own(name), mesh_of(tensor)
        number, count = (0, 1) if is_own else (meshes[name].index(mesh), len(meshes[name]))
        for part, (box, memory) in enumerate(local_parts(tensor, name)):
            if is_own:
                ranks: tuple[int, ...] = (rank,)
            elif describes_shards(tensor):
                ranks = holders.of(_shard_name(name, box)) or (rank,)
            else:
                ranks = holders.among(box.holders, _on_mesh(name, mesh)) or (rank,)
            whole = name in snapshot.from_lowest and box.holders is None
            box = Box(box.offsets, box.sizes, ranks)
            if (len(ranks) > 1 or count > 1) and not box.is_empty:
                shared.append(Shared(name, box, part, ranks.index(rank), len(ranks), number, count))
            if number == 0:  # the ranks of one mesh write, for all that have it on others
                held.append(LocalShard(name, box, memory.dtype.itemsize, part, is_plain(memory) and not whole))
    units = [number for number, unit in enumerate(snapshot.units) if unit.state not in snapshot.own]
    return WritePlan(
        signature=snapshot.signature,
        tensors=tensors,
        own_tensors=tuple(_described(name, each) for name, each in snapshot.tensors.items() if snapshot.is_own(name)),
        pieces=tuple(divide(held, rank)),
        objects=tuple(name for name in snapshot.objects if snapshot.is_own(name) or holders.of(name)[0] == rank),
        units=tuple(each for each in units if holders.of(_unit_name(snapshot, each))[0] == rank),
        own_units=tuple(each for each, unit in enumerate(snapshot.units) if unit.state in snapshot.own),
        paths={name: path for table in {id(each): each for each in tables}.values() for name, path in table.paths},
        own_paths={name: path for name, path in snapshot.paths.items() if snapshot.is_own(name)},
        shared=tuple(shared),
    )


def divide(held: Iterable[LocalShard], rank: int) -> list[WritePiece]:
    """Return the pieces that fall to `rank`: all who hold the same boxes share them evenly, by bytes.

    Laid end to end, the boxes of one set of holders make a line of bytes, and each holder gets the same length of it.
    Where the end of a length lies inside a large box, the box is cut between two rows.
    """
    groups: dict[tuple[int, ...], list[LocalShard]] = {}
    pieces = []
    for each in held:
        holders = each.box.holders or (rank,)
        if each.box.is_empty or not each.cut or len(holders) == 1:
            # A tensor without elements is written once too, so that readers find it.
            if holders[0] == rank and (not each.box.is_empty or not any(each.box.offsets)):
                pieces.append(WritePiece(each.name, each.box.offsets, each.box.sizes, each.part))
        else:
            groups.setdefault(holders, []).append(each)
    for holders, group in groups.items():
        pieces += _length_of_line(sorted(group, key=lambda each: (each.name, each.box.offsets)), holders, rank)
    return pieces


def _length_of_line(line: list[LocalShard], holders: tuple[int, ...], rank: int) -> list[WritePiece]:
    number, total = holders.index(rank), sum(each.bytes for each in line)
    low, high = total * number // len(holders), total * (number + 1) // len(holders)
    pieces, start = [], 0
    for each in line:
        end = start + each.bytes
        if each.bytes < LARGE_BYTES or not each.box.sizes:
            if low <= (start + end) // 2 < high:
                pieces.append(WritePiece(each.name, each.box.offsets, each.box.sizes, each.part))
        else:
            rows = each.box.sizes[0]
            first, last = (min(max(round((edge - start) * rows / each.bytes), 0), rows) for edge in (low, high))
            if first < last:
                offsets = (each.box.offsets[0] + first, *each.box.offsets[1:])
                sizes = (last - first, *each.box.sizes[1:])
                pieces.append(WritePiece(each.name, offsets, sizes, each.part, first, is_cut=sizes != each.box.sizes))
        start = end
    return pieces


class _Holders:
    """Which ranks have a name. Ranks with the same table are looked at once."""

    def __init__(self, tables: Sequence[NameTable]) -> None:
        self._ranks: dict[int, list[int]] = {}
        self._tables = {id(table): table for table in tables}
        for rank, table in enumerate(tables):
            self._ranks.setdefault(id(table), []).append(rank)
        self._everyone = tuple(range(len(tables)))
        self._known: dict[frozenset[int], tuple[int, ...]] = {frozenset(self._tables): self._everyone}

    def among(self, ranks: tuple[int, ...] | None, name: str) -> tuple[int, ...]:
        """Return those of `ranks` that have a name; None: of all ranks."""
        having = self.of(name)
        return having if ranks is None or ranks == having else tuple(rank for rank in ranks if rank in having)

    def of(self, name: str) -> tuple[int, ...]:
        if len(self._tables) == 1 and name in next(iter(self._tables.values())).loose:
            return self._everyone
        which = frozenset(each for each, table in self._tables.items() if name in table.loose)
        if which not in self._known:
            self._known[which] = tuple(sorted(rank for each in which for rank in self._ranks[each]))
        return self._known[which]


def _all_tensors(tables: Sequence[NameTable]) -> tuple[Described, ...]:
    known: dict[str, Described] = {}
    for table in {id(each): each for each in tables}.values():
        for described in table.tensors:
            if known.setdefault(described[0], described) != described:
                name, dtype, shape = described
                raise ConfigError(
                    f"{name} is {known[name][1]} {list(known[name][2])} on one rank and {dtype} {list(shape)} on "
                    f"another: what ranks do not share needs names of its own, or ckptman.PerRank(...)"
                )
    return tuple(known[name] for name in sorted(known))


def _meshes(tables: Sequence[NameTable]) -> dict[str, list[int | None]]:
    """Return of each tensor the meshes that ranks have it on, such as those of the replicas of a model that is sharded
    over `mesh["tp"]`: the first is that of the lowest rank."""
    found: dict[str, list[int | None]] = {}
    for table in {id(each): each for each in tables}.values():
        for (name, _, _), mesh in zip(table.tensors, table.meshes):
            known = found.setdefault(name, [])
            if mesh not in known:
                known.append(mesh)
    return found


def _on_mesh(name: str, mesh: int | None) -> str:
    return f"tensor {mesh} {name}"


def _described(name: str, tensor: torch.Tensor) -> Described:
    return name, str(tensor.dtype).removeprefix("torch."), global_shape(tensor)


def _shard_name(name: str, box: Box) -> str:
    return f"shard {name} {box.offsets} {box.sizes}"


def _unit_name(snapshot: Snapshot, number: int) -> str:
    return "unit " + snapshot.units[number].head


@dataclass(frozen=True)
class RankFile:
    """A plan, and the places of its tensors in this rank's file. `pieces` and `places` go together.

    `end` is on a page: what a save adds comes after it. `pickled` are pieces whose containers differ from save to save:
    tensors of classes of their own.
    """

    plan: WritePlan
    pieces: tuple[WritePiece, ...]
    places: tuple[PlacedBytes, ...]
    pickled: tuple[WritePiece, ...]
    literals: tuple[tuple[int, bytes], ...]
    end: int

    def memory(self, snapshot: Snapshot) -> list[torch.Tensor]:
        """Return the memory of `pieces` as it is now: not that which a parameter is given later."""
        return memory_of(self.pieces, snapshot.tensors)

    def special(self, snapshot: Snapshot) -> Iterator[tuple[str, torch.Tensor]]:
        """Return name and memory of each piece that is pickled."""
        return zip((piece.name for piece in self.pickled), memory_of(self.pickled, snapshot.tensors))

    def packed_rows(self, pickled: Sequence[PlacedBytes]) -> bytes:
        """Return the rows of the chunk table for everything in the file, packed, given where the pickled pieces are
        this time."""
        return self._packed_rows if not pickled else self._pack(pickled)

    @cached_property
    def _packed_rows(self) -> bytes:
        return self._pack(())

    def _pack(self, pickled: Sequence[PlacedBytes]) -> bytes:
        described = [*self.plan.tensors, *self.plan.own_tensors]
        number = {name: i for i, (name, _, _) in enumerate(described)}
        rows = make_rows(
            (number[piece.name], piece.offsets, piece.sizes, place)
            for piece, place in zip((*self.pieces, *self.pickled), (*self.places, *pickled))
        )
        return pack(rows)


def make_rows(entries: Iterable[tuple[int, Sequence[int], Sequence[int], PlacedBytes]]) -> Rows:
    """Return rows of the chunk table: tensor number, box, and where it is."""
    rows: dict[int, list[list[int]]] = {}
    for number, offsets, sizes, place in entries:
        row = [number, place.offset, place.bytes, place.payload, *offsets, *sizes]
        rows.setdefault(len(offsets), []).append(row)
    return {dims: np.array(each, dtype=np.int64) for dims, each in rows.items()}


def make_rank_file(snapshot: Snapshot, plan: WritePlan) -> RankFile:
    """Lay out what a plan gives this rank to write. Raises: ConfigError (a tensor without memory)."""
    memory = memory_of(plan.pieces, snapshot.tensors)
    for piece, each in zip(plan.pieces, memory):
        refuse_meta(each, piece.name)
    plain = [number for number, each in enumerate(memory) if is_plain(each)]
    order, places, literals, end = lay_out([(memory[number].dtype, plan.pieces[number].sizes) for number in plain])
    return RankFile(
        plan,
        tuple(plan.pieces[plain[number]] for number in order),
        places,
        tuple(piece for piece, each in zip(plan.pieces, memory) if not is_plain(each)),
        literals,
        end,
    )


def refuse_meta(tensor: torch.Tensor, name: str) -> None:
    """Refuse a tensor that has no values that could be saved. Raises: ConfigError."""
    if tensor.is_meta:
        raise ConfigError(f"{name} is on the meta device: it has a shape and no values. Materialise it first")


def lay_out(
    tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[list[int], tuple[PlacedBytes, ...], tuple[tuple[int, bytes], ...], int]:
    """Return places for tensors of these dtypes and shapes: their order in the file, the places in that order, the
    bytes around them, and where the last page of them ends."""
    layout = Layout()
    order = in_order(tensors)
    places = tuple(layout.add_tensor(*tensors[number]) for number in order)
    return order, places, tuple(layout.literals), layout.page_end()


def memory_of(pieces: Sequence[WritePiece], tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the memory that this rank writes for each piece, not copied."""
    found = []
    for piece in pieces:
        tensor = tensors[piece.name]
        part = tensor.detach() if is_whole(tensor) else local_parts(tensor, piece.name)[piece.part][1]
        found.append(part.narrow(0, piece.row, piece.sizes[0]) if piece.is_cut else part)
    return found
