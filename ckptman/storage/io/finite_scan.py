"""Whether the numbers in a file are finite: looked at piece by piece, while the file is being written.

A number is NaN or infinite where all bits of its exponent are set, or beyond that, so the largest of them, taken as
integers, tells: at the speed of memory, for each dtype alike, and without a copy.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

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


class Range(NamedTuple):
    """Where a tensor's numbers lie in the file: bytes [start, end)."""

    start: int
    end: int
    name: str
    dtype: str


class FiniteScan:
    """Looks at the pieces of one file, in any order and from several threads at a time.

    `ranges`: what is to be looked at, in order. `found`: names of the tensors that hold NaN or infinity.
    """

    def __init__(self, ranges: list[Range]) -> None:
        self._ranges, self._starts = ranges, [each.start for each in ranges]
        self.found: set[str] = set()

    def __call__(self, offset: int, data: memoryview) -> None:
        """Look at the bytes from `offset` on."""
        end = offset + len(data)
        for each in self._ranges[max(bisect_right(self._starts, offset) - 1, 0) : bisect_right(self._starts, end)]:
            low, high = max(each.start, offset), min(each.end, end)
            if (
                low < high
                and each.name not in self.found
                and not is_finite(data[low - offset : high - offset], each.dtype)
            ):
                self.found.add(each.name)


def can_be_infinite(dtype: str) -> bool:
    """Return whether numbers of this dtype can be NaN or infinite."""
    return dtype in _INFINITE


def is_finite(data: memoryview, dtype: str) -> bool:
    """Return whether no number in the bytes of a tensor is NaN or infinite. `dtype`: one that has such numbers."""
    size, infinite = _INFINITE[dtype]
    numbers = np.frombuffer(data, f"<i{size}")
    # With the sign bit the same ones are the largest unsigned integers.
    return bool(numbers.max() < infinite and numbers.view(f"<u{size}").max() < infinite + (1 << 8 * size - 1))
