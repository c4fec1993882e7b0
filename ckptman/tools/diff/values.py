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


class _Shown:
    """A placeholder for a value, equal to no other."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


MISSING = _Shown("-")
_PICKLED = _Shown("a value that is only stored as a pickle")


@dataclass(frozen=True)
class ValueDiff:
    """A plain value in A (`before`) and B (`after`); `MISSING` if it does not exist there."""

    name: str
    kind: Kind
    before: Any
    after: Any


def diff_values(a: SavedState, b: SavedState, wanted: Callable[[str], bool]) -> Iterator[ValueDiff]:
    """Yield the plain values of two checkpoints whose flat names are `wanted`, by name. Raises: CorruptError."""
    ours, theirs = _values(a), _values(b)
    for name in sorted(filter(wanted, ours.keys() | theirs.keys())):
        before, after = ours.get(name, MISSING), theirs.get(name, MISSING)
        if before is after is _PICKLED and a.pickle_of(name) == b.pickle_of(name):
            yield ValueDiff(name, "same", before, after)
            continue
        before, after = _loaded(a, name, before), _loaded(b, name, after)
        kind: Kind = "added" if before is MISSING else "removed" if after is MISSING else "changed"
        try:
            if kind == "changed" and alike(before, after):
                kind = "same"
        except RecursionError as error:
            raise CorruptError(f"{name} is nested too deeply to be compared") from error
        yield ValueDiff(name, kind, before, after)


def _loaded(saved: SavedState, name: str, value: Any) -> Any:
    """Return a value, from its pickle if needed. Nothing is run of a pickle that holds unknown classes."""
    if value is not _PICKLED:
        return value
    data = saved.pickle_of(name)
    try:
        return saved.unpickled(name, data)
    except CorruptError as error:
        return _Shown(f"<{why_refused(error)}>")


def alike(a: Any, b: Any) -> bool:
    """Whether two plain values are equal and of equal types: NaN equals NaN, 1 does not equal True."""
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
    """Return the plain values by flat name: from the index, or as `_PICKLED` if they are not in it."""
    found: dict[str, Any] = {}
    if saved.manifest is not None:
        for name, value in saved.values.items():
            for path, leaf in leaves_in(value, path=(name,)):
                if not isinstance(leaf, TensorRef):  # tensors are compared as tensors
                    found[".".join(map(str, path))] = leaf
    return found | {name: _PICKLED for name in saved.index.objects if name not in found}
