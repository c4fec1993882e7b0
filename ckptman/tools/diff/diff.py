"""`diff`: what changed between two checkpoints, in bounded memory.

A tensor is read in boxes of whole rows from both, whatever layouts they were saved in; the next box is read while one
is compared. A tensor that has the same place and digests in both is not read.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ckptman._tracebacks import short_traceback
from ckptman.engine.loading.box_reader import PIECE_BYTES, Batch, BoundedState, BoxReader, Refused, boxes, prefetched
from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.errors import ConfigError, CorruptError
from ckptman.run import checkpoint_at
from ckptman.storage.catalog.reader_lease import reading
from ckptman.storage.format.chunk_table import item_bytes
from ckptman.tools.diff.difference import Difference, has_values, measure, measuring_threads
from ckptman.tools.diff.digest_compare import digests_agree, same_containers
from ckptman.tools.diff.values import ValueDiff, diff_values

KINDS = ("removed", "added", "reshaped", "retyped", "changed")
"""Kinds of differences, in the order in which they are shown."""
Kind = Literal["same", "changed", "added", "removed", "reshaped", "retyped"]
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None] | None]]


class Form(NamedTuple):
    """Global shape and dtype (torch's name) of a tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TensorDiff:
    """A tensor in A (`before`) and B (`after`); None if it does not exist there.

    `difference`: None if the elements were not compared, because the digests agree or the shapes or kinds of dtype
    differ. `note`: why a changed tensor has no numbers.
    """

    name: str
    kind: Kind
    before: Form | None
    after: Form | None
    difference: Difference | None = None
    note: str = ""


@dataclass
class Group:
    """Names that begin with the same part: how many tensors and plain values of each kind."""

    tensors: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)


@dataclass
class Diff:
    """What differs between two checkpoints A and B.

    Attributes:
        tensors: Each tensor that differs, with its `kind`: "removed" (only in A), "added", "reshaped", "retyped" or
            "changed"; sorted by kind, then by the size of the change.
        values: Each plain value that differs, `before` (in A) and `after`.
        groups: How many of each kind were compared, by the first part of their names.
        unread: Tensors that are equal by their digests, and were not read.
    """

    tensors: list[TensorDiff] = field(default_factory=list)
    values: list[ValueDiff] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    unread: int = 0

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.tensors and not self.values

    def group(self, name: str) -> Group:
        """Return the group of a flat name."""
        return self.groups.setdefault(name.partition(".")[0], Group())


@short_traceback
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    only: str | Sequence[str] = "*",
    read: bool = False,
) -> Diff:
    """Return what changed from checkpoint `a` to checkpoint `b`. If one is a root, its newest checkpoint is compared.

    Args:
        a: A checkpoint, the path of one, or a root.
        b: The checkpoint it is compared with.
        only: A pattern of flat names for `fnmatch`, such as "model.*.bias", or several.
        read: Read every tensor, even if the digests say that it did not change.

    Returns:
        The differences; `same` if there are none.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConfigError: The patterns match nothing.
        CorruptError: One of them is damaged.
        FormatVersionError: A newer ckptman wrote one of them.
    """
    return compare(checkpoint_at(a), checkpoint_at(b), [only] if isinstance(only, str) else list(only), read)


def compare(
    a: Path, b: Path, patterns: Sequence[str], read: bool, progress: Progress = lambda what, total: nullcontext()
) -> Diff:
    """Compare everything whose name matches one of the patterns. `progress`: is given the bytes of each tensor.

    Raises: ConfigError, CorruptError, FormatVersionError.
    """

    def wanted(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    found = Diff()
    with reading(a, what="diff"), reading(b, what="diff"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of experimental dtypes wherever they are touched
        before, after = BoundedState.read(a), BoundedState.read(b)
        for each in (before, after) if read else ():
            each.refuse_transformed()
        sizes = {
            name: math.prod(each.shape) * (item_bytes(each.dtype) or 1)
            for name, each in before.index.tensors.items()
            if wanted(name)
        }
        names = sorted(filter(wanted, before.index.tensors.keys() | after.index.tensors.keys()))
        with progress("comparing", sum(sizes.values())) as done:
            for tensor in _diff_tensors(before, after, names, read):
                if done is not None:
                    done(sizes.get(tensor.name, 0))
                found.group(tensor.name).tensors[tensor.kind] += 1
                if tensor.kind != "same":
                    found.tensors.append(tensor)
                elif tensor.difference is None:
                    found.unread += 1
        for value in diff_values(before, after, wanted):
            found.group(value.name).values[value.kind] += 1
            if value.kind != "same":
                found.values.append(value)
    if not found.groups and list(patterns) != ["*"]:
        raise ConfigError(f"only={', '.join(patterns)} matches nothing in {a} or {b}: `ckptman show` lists the names")
    found.tensors.sort(key=_rank)
    return found


def _rank(tensor: TensorDiff) -> tuple[int, float, str]:
    """Sort by kind, then the largest change first. A change that cannot be measured counts as large."""
    found = tensor.difference
    relative = found.relative if found is not None and found.nan[0] == found.nan[1] else None
    return KINDS.index(tensor.kind), -math.inf if relative is None else -relative, tensor.name


class _Step(NamedTuple):
    """What the reading thread hands over: a piece of a tensor from both checkpoints or, without pieces, its end."""

    tensor: TensorDiff
    pieces: tuple[torch.Tensor, torch.Tensor] | None = None
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.uint8, torch.uint8)


def _diff_tensors(a: SavedState, b: SavedState, names: Sequence[str], read_all: bool) -> Iterator[TensorDiff]:
    """Yield tensors of two checkpoints, unchanged ones included. Holds `PIECE_BYTES` of each checkpoint, twice."""
    total = Difference()
    with measuring_threads() as pool:
        for steps in prefetched(_batches(a, b, names, read_all)):
            for tensor, pieces, dtypes in steps:
                if pieces is not None:
                    total += measure(*pieces, dtypes, pool)
                    continue
                if tensor.difference is not None:
                    kind: Kind = "changed" if tensor.kind == "same" and total.changed else tensor.kind
                    tensor = replace(tensor, kind=kind, difference=total)
                yield tensor
                total = Difference()


def _batches(a: SavedState, b: SavedState, names: Sequence[str], read_all: bool) -> Iterator[list[_Step]]:
    readers = BoxReader(a), BoxReader(b)
    # Two pairs: one is compared while the other is filled. Memory that is not used is not taken.
    one, two, three, four = (torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu") for _ in range(4))
    memory = [(one, two), (three, four)]
    batch, steps = Batch(readers, memory[0]), list[_Step]()
    for name in names:
        tensor = _described(a, b, name)
        if (
            tensor.before is None
            or tensor.kind not in ("same", "retyped")
            or (tensor.kind == "same" and not read_all and digests_agree(a, b, name))
        ):
            steps.append(_Step(tensor))
            continue
        dtypes = readers[0].dtype(name), readers[1].dtype(name)
        if dtypes[0] != dtypes[1] and not (has_values(dtypes[0]) and has_values(dtypes[1])):
            steps.append(_Step(tensor))
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
            steps.append(_Step(_by_bytes(a, b, tensor, refused)))
        else:
            steps.append(_Step(replace(tensor, difference=Difference())))
    batch.read()
    yield steps


def _described(a: SavedState, b: SavedState, name: str) -> TensorDiff:
    """Compare the shape and dtype of a tensor in both indexes."""
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
    """Compare a tensor of an unknown class by its bytes. Raises: CorruptError if that is not possible either."""
    same = same_containers(a, b, tensor.name) if tensor.kind == "same" else False
    if same is None:
        raise CorruptError(f"{refused}. The two were not cut alike, so their bytes cannot be compared either")
    if same:
        return tensor
    return replace(tensor, kind="changed" if tensor.kind == "same" else tensor.kind, note=str(refused))
