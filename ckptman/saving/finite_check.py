"""Whether what training computes is finite: looked at behind the training, on the bytes that a save writes.

Looked at are the parameters of modules and the state of optimizers. Buffers are not: a mask may hold -inf on purpose. A
number is NaN or infinite where all bits of its exponent are set, or beyond that, so the largest of them, taken as
integers, tells: at the speed of memory, for each dtype alike, and without a copy.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ckptman.saving.write_plan import RankFile
from ckptman.state.named_state import Snapshot, parameter_names
from ckptman.state.trainable import module_of

OnNonfinite = Literal["keep", "refuse", "ignore"]
MOST_NAMES = 10
"""So many names of tensors that are not finite are kept: as a rule it is all of them."""
_INFINITE = {
    "float64": (8, 0x7FF0_0000_0000_0000),
    "float32": (4, 0x7F80_0000),
    "bfloat16": (2, 0x7F80),
    "float16": (2, 0x7C00),
    "float8_e5m2": (1, 0x7C),
    "float8_e4m3fn": (1, 0x7F),  # which has no infinity: this is NaN
}
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16", "bcomplex32": "bfloat16"}
_INFINITE |= {dtype: _INFINITE[part] for dtype, part in _PARTS.items()}
"""By dtype: bytes of a number, and the least of those that are not finite, as an integer without its sign."""


class _Range(NamedTuple):
    """Where a tensor's numbers lie in the data file: bytes [start, end)."""

    start: int
    end: int
    name: str
    dtype: str


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
        self._starts = [each.start for each in self._ranges]

    def begin(self) -> FiniteScan:
        """Return what looks at one file that is being written."""
        return FiniteScan(self._ranges, self._starts)


class FiniteScan:
    """Looks at the pieces of one data file, in any order and from several threads at a time."""

    def __init__(self, ranges: list[_Range], starts: list[int]) -> None:
        self._ranges, self._starts = ranges, starts
        self._found: set[str] = set()

    def __call__(self, offset: int, data: memoryview) -> None:
        """Look at the bytes from `offset` on."""
        end = offset + len(data)
        for each in self._ranges[max(bisect_right(self._starts, offset) - 1, 0) : bisect_right(self._starts, end)]:
            low, high = max(each.start, offset), min(each.end, end)
            if (
                low < high
                and each.name not in self._found
                and not is_finite(data[low - offset : high - offset], each.dtype)
            ):
                self._found.add(each.name)

    @property
    def names(self) -> tuple[str, ...]:
        """The first of the tensors that hold NaN or infinity, by name."""
        return tuple(sorted(self._found)[:MOST_NAMES])


def is_finite(data: memoryview, dtype: str) -> bool:
    """Return whether no number in the bytes of a tensor is NaN or infinite. `dtype`: one that has such numbers."""
    size, infinite = _INFINITE[dtype]
    numbers = np.frombuffer(data, f"<i{size}")
    # With the sign bit the same ones are the largest unsigned integers.
    return bool(numbers.max() < infinite and numbers.view(f"<u{size}").max() < infinite + (1 << 8 * size - 1))


def _find(file: RankFile, names: Collection[str]) -> list[_Range]:
    dtypes = {name: dtype for name, dtype, _ in (*file.plan.tensors, *file.plan.own_tensors)}
    found = []
    for piece, place in zip(file.pieces, file.places):
        dtype = dtypes[piece.name]
        size = math.prod(piece.sizes) * getattr(torch, dtype).itemsize
        if size and piece.name in names and dtype in _INFINITE:
            found.append(_Range(place.payload, place.payload + size, piece.name, dtype))
    return sorted(found)
