"""One rank's data file: what it holds and where, known as soon as the plan is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ckptman.errors import ConfigError
from ckptman.format.chunk_table import Rows
from ckptman.saving.write_plan import Piece, WritePlan
from ckptman.state.file_layout import Layout, Placed, in_order
from ckptman.state.local_shards import local_parts
from ckptman.state.named_state import Snapshot
from ckptman.state.tensor_container import is_plain


@dataclass(frozen=True)
class RankFile:
    """A plan, and the places of its tensors in this rank's file. `pieces` and `places` go together.

    `end` is on a page: what a save adds comes after it. `pickled` are pieces whose containers differ from save to save:
    tensors of classes of their own.
    """

    plan: WritePlan
    pieces: tuple[Piece, ...]
    places: tuple[Placed, ...]
    pickled: tuple[Piece, ...]
    literals: tuple[tuple[int, bytes], ...]
    end: int

    def memory(self, snapshot: Snapshot) -> list[torch.Tensor]:
        """The live memory of `pieces`."""
        return memory_of(self.pieces, snapshot.tensors)

    def special(self, snapshot: Snapshot) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and memory of each piece that is pickled."""
        return zip((piece.name for piece in self.pickled), memory_of(self.pickled, snapshot.tensors))

    def rows(self, pickled: Sequence[Placed]) -> Rows:
        """The rows of the chunk table for everything in the file, given where the pickled ones are this time."""
        described = [*self.plan.tensors, *self.plan.own_tensors]
        number = {name: i for i, (name, _, _) in enumerate(described)}
        return make_rows(
            (number[piece.name], piece.offsets, piece.sizes, place)
            for piece, place in zip((*self.pieces, *self.pickled), (*self.places, *pickled))
        )


def make_rows(entries: Iterable[tuple[int, Sequence[int], Sequence[int], Placed]]) -> Rows:
    """Rows of the chunk table: tensor number, box, and where it is."""
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
    """Raises: ConfigError where a tensor has no values that could be saved."""
    if tensor.is_meta:
        raise ConfigError(f"{name} is on the meta device: it has a shape and no values. Materialise it first")


def lay_out(
    tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[list[int], tuple[Placed, ...], tuple[tuple[int, bytes], ...], int]:
    """Places for tensors of these dtypes and shapes: their order in the file, the places in that order, the bytes
    around them, and where the last page of them ends."""
    layout = Layout()
    order = in_order(tensors)
    places = tuple(layout.add_tensor(*tensors[number]) for number in order)
    return order, places, tuple(layout.literals), layout.page_end()


def memory_of(pieces: Sequence[Piece], tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The memory that this rank writes for each piece, not copied."""
    known: dict[str, list[torch.Tensor]] = {}
    found = []
    for piece in pieces:
        if piece.name not in known:
            known[piece.name] = [each for _, each in local_parts(tensors[piece.name], piece.name)]
        part = known[piece.name][piece.part]
        whole = not is_plain(part) or tuple(part.shape) == piece.sizes
        found.append(part if whole else part.narrow(0, piece.row, piece.sizes[0]))
    return found
