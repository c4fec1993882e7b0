"""What changed between two checkpoints, tensor by tensor, in bounded memory.

A tensor is read in boxes of whole rows from both, whatever layouts they were saved in; the next box is read while one
is compared. Where both lie alike and the digests say that nothing changed, nothing is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from ckptman.engine.loading.box_reader import PIECE_BYTES, Batch, BoxReader, Refused, boxes, prefetched
from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.errors import CorruptError
from ckptman.tools.diff.difference import Difference, comparable, measure, measuring_threads
from ckptman.tools.diff.digest_compare import digests_agree, same_containers

Kind = Literal["same", "changed", "added", "removed", "reshaped", "retyped"]


class Form(NamedTuple):
    """Global shape and dtype (torch's name) of a tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TensorDiff:
    """A tensor in A (`before`) and B (`after`); None where it does not exist.

    `difference`: None if the elements were not compared, because the digests agree or the shapes or kinds of dtype
    differ. `note`: why a changed tensor has no numbers.
    """

    name: str
    kind: Kind
    before: Form | None
    after: Form | None
    difference: Difference | None = None
    note: str = ""


class _Step(NamedTuple):
    """What the reading thread hands over: a piece of a tensor from both checkpoints, or its end.

    `settled`: the tensor needs no comparison.
    """

    tensor: TensorDiff
    pieces: tuple[torch.Tensor, torch.Tensor] | None = None
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.uint8, torch.uint8)
    settled: bool = False


def diff_tensors(
    a: SavedState, b: SavedState, wanted: Callable[[str], bool] = lambda name: True, *, read_all: bool = False
) -> Iterator[TensorDiff]:
    """Yield the tensors of two checkpoints whose names are `wanted`, by name, unchanged ones included.

    `read_all`: do not trust the digests, read every tensor that both have. Holds `PIECE_BYTES` of each checkpoint,
    twice.

    Raises: CorruptError naming the file.
    """
    total = Difference()
    with measuring_threads() as pool:
        for batch in prefetched(_batches(a, b, wanted, read_all)):
            for step in batch:
                if step.pieces is not None:
                    total += measure(*step.pieces, step.dtypes, pool)
                    continue
                tensor = step.tensor
                if not step.settled:
                    kind: Kind = "changed" if tensor.kind == "same" and total.changed else tensor.kind
                    tensor = replace(tensor, kind=kind, difference=total)
                yield tensor
                total = Difference()


def _batches(a: SavedState, b: SavedState, wanted: Callable[[str], bool], read_all: bool) -> Iterator[list[_Step]]:
    readers = BoxReader(a), BoxReader(b)
    # Two pairs: one is compared while the other is filled. Memory that is not used is not taken.
    one, two, three, four = (torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(4))
    memory = [(one, two), (three, four)]
    batch, steps = Batch(readers, memory[0]), list[_Step]()
    for name in sorted(a.index.tensors.keys() | b.index.tensors.keys()):
        if not wanted(name):
            continue
        tensor = _described(a, b, name)
        dtypes = _to_compare(tensor, readers, read_all)
        if dtypes is None or tensor.before is None:
            steps.append(_Step(tensor, settled=True))
            continue
        item = max(dtype.itemsize for dtype in dtypes)
        try:
            for offsets, sizes in boxes(tensor.before.shape, PIECE_BYTES // item):
                if not batch.has_room(math.prod(sizes) * item):
                    batch.read()
                    yield steps
                    memory.reverse()
                    batch, steps = Batch(readers, memory[0]), []
                mine, other = batch.add(name, dtypes, offsets, sizes)
                steps.append(_Step(tensor, (mine, other), dtypes))
        except Refused as refused:
            steps.append(_Step(_by_bytes(a, b, tensor, refused), settled=True))
        else:
            steps.append(_Step(tensor))
    batch.read()
    yield steps


def _to_compare(
    tensor: TensorDiff, readers: tuple[BoxReader, BoxReader], read_all: bool
) -> tuple[torch.dtype, torch.dtype] | None:
    """Return the dtypes in which a tensor is compared; None if there is nothing to compare. Raises: CorruptError."""
    if tensor.kind not in ("same", "retyped"):
        return None
    dtypes = readers[0].dtype(tensor.name), readers[1].dtype(tensor.name)
    if tensor.kind == "same" and not read_all and digests_agree(readers[0].saved, readers[1].saved, tensor.name):
        return None
    return dtypes if comparable(*dtypes) else None


def _described(a: SavedState, b: SavedState, name: str) -> TensorDiff:
    """Compare what the two indexes say of a tensor."""
    before, after = (
        Form(saved.index.tensors[name].shape, saved.index.tensors[name].dtype) if name in saved.index.tensors else None
        for saved in (a, b)
    )
    kind: Kind = "same"
    if before is None or after is None:
        kind = "added" if before is None else "removed"
    elif before.shape != after.shape:
        kind = "reshaped"
    elif before.dtype != after.dtype:
        kind = "retyped"
    return TensorDiff(name, kind, before, after)


def _by_bytes(a: SavedState, b: SavedState, tensor: TensorDiff, refused: Refused) -> TensorDiff:
    """Compare a tensor of an unknown class by its bytes. Raises: CorruptError if they cannot tell either."""
    same = same_containers(a, b, tensor.name) if tensor.kind == "same" else False
    if same is None:
        raise CorruptError(f"{refused}. The two were not cut alike, so their bytes cannot be compared either")
    if same:
        return tensor
    return replace(tensor, kind="changed" if tensor.kind == "same" else tensor.kind, note=str(refused))
