"""What changed between the plain values of two checkpoints: learning rates, counters, positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ckptman.engine.loading.box_reader import why_refused
from ckptman.engine.loading.checkpoint_reader import SavedState
from ckptman.engine.state.file_layout import as_bytes
from ckptman.engine.state.local_shards import is_dense
from ckptman.errors import CorruptError
from ckptman.storage.format.value_codec import TensorRef, leaves_in

Kind = Literal["same", "changed", "added", "removed"]


class _Missing:
    def __repr__(self) -> str:
        return "-"


MISSING = _Missing()


class Unreadable:
    """A pickled value of a class that is not loaded. Nothing of it was run. Equal to no other."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __repr__(self) -> str:
        return f"<{self.why}>"


@dataclass(frozen=True)
class ValueDiff:
    """A plain value in A (`before`) and B (`after`); `MISSING` where it does not exist."""

    name: str
    kind: Kind
    before: Any
    after: Any


@dataclass(frozen=True)
class _Pickled:
    """A value that exists only as a pickle."""

    saved: SavedState
    name: str

    def bytes(self) -> bytes:
        return self.saved.pickle_of(self.name)

    def value(self) -> Any:
        data = self.bytes()
        try:
            return self.saved.unpickled(self.name, data)
        except CorruptError as error:
            return Unreadable(why_refused(error))


def diff_values(a: SavedState, b: SavedState, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[ValueDiff]:
    """Yield the plain values of two checkpoints whose flat names are `wanted`, by name. Raises: CorruptError."""
    ours, theirs = _values(a), _values(b)
    for name in sorted(ours.keys() | theirs.keys()):
        if wanted(name):
            yield _compared(name, ours.get(name, MISSING), theirs.get(name, MISSING))


def _compared(name: str, before: Any, after: Any) -> ValueDiff:
    if isinstance(before, _Pickled) and isinstance(after, _Pickled) and before.bytes() == after.bytes():
        return ValueDiff(name, "same", before, after)
    before, after = (each.value() if isinstance(each, _Pickled) else each for each in (before, after))
    kind: Kind = "added" if before is MISSING else "removed" if after is MISSING else "changed"
    try:
        if kind == "changed" and alike(before, after):
            kind = "same"
    except RecursionError as error:
        raise CorruptError(f"{name} is nested too deeply to be compared") from error
    return ValueDiff(name, kind, before, after)


def alike(a: Any, b: Any) -> bool:
    """Whether two plain values are equal and of equal types: NaN is like NaN, 1 is not like True."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape) or not (is_dense(a) and is_dense(b)) or a.is_quantized:
            return repr(a) == repr(b)
        return torch.equal(as_bytes(a.contiguous()), as_bytes(b.contiguous()))
    return bool(a == b)


def _values(saved: SavedState) -> dict[str, Any]:
    """Return the plain values by flat name: from the index, or from their pickles where there is nothing else."""
    found: dict[str, Any] = {}
    if saved.manifest is not None:
        for name, value in saved.values.items():
            for path, leaf in leaves_in(value, path=(name,)):
                if not isinstance(leaf, TensorRef):  # tensors are compared as tensors
                    found[".".join(map(str, path))] = leaf
    return found | {name: _Pickled(saved, name) for name in saved.index.objects if name not in found}
