"""Whether boxes fill a tensor, each element once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_CORNERS = 2**24
"""Corners of boxes that are looked at, at most, to find two that overlap while the volumes add up."""
_ENDS = 2**30
"""Where there are more corners: ends of pairs of boxes that are looked at, at most. That takes seconds."""
Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes."""


def flaw_of(offsets: Ints, sizes: Ints, shape: tuple[int, ...], unproved: str | None = None) -> str | None:
    """Return what is wrong with chunks that are to fill a tensor, each element once; None where nothing is.

    `unproved`: what to say where they hold as many elements as the tensor, and are too many to see if two overlap.
    """
    whole = np.array(shape, np.int64)
    inside = (offsets >= 0) & (sizes >= 0) & (offsets <= whole) & (sizes <= whole - offsets)
    if not inside.all():
        row = int(np.argmin(inside.all(axis=1)))
        return f"one lies outside of it, offsets {offsets[row].tolist()}, sizes {sizes[row].tolist()}"
    held, elements = int(sizes.prod(axis=1).sum()), prod(shape)
    if held != elements:
        return f"they hold {held} elements of {elements}"
    if not elements:
        return None
    # A dimension that every chunk fills from end to end tells nothing.
    split = np.flatnonzero((sizes != whole).any(axis=0))
    offsets, sizes, whole = offsets[:, split], sizes[:, split], whole[split]
    if has_few_corners(offsets, whole):
        exact = _corners_cancel(np.vstack([offsets, 0 * whole]), np.vstack([sizes, whole]))
        return None if exact else "some of them overlap, and others leave a hole"
    return _overlap(offsets, sizes) if offsets.size * len(offsets) <= _ENDS else unproved


def has_few_corners(offsets: Ints, shape: Iterable[int]) -> bool:
    """Return whether so many boxes in so many dimensions can be looked at by their corners."""
    return 2 ** offsets.shape[1] * (len(offsets) + 1) <= _CORNERS and prod(int(size) + 1 for size in shape) < 2**63


def _overlap(offsets: Ints, sizes: Ints) -> str | None:
    """Two boxes that overlap, by looking at all pairs."""
    filled = np.flatnonzero(sizes.all(axis=1))
    begins, ends = offsets[filled], offsets[filled] + sizes[filled]
    for row in range(len(filled) - 1):
        meets = ((begins[row + 1 :] < ends[row]) & (ends[row + 1 :] > begins[row])).all(axis=1)
        if meets.any():
            return f"chunks {filled[row]} and {filled[row + 1 + int(np.argmax(meets))]} overlap"
    return None


def _corners_cancel(offsets: Ints, sizes: Ints) -> bool:
    """Whether all boxes but the last add up to the last.

    A box is known by its corners: +1 at each that takes an even number of upper ends, -1 at the others (its mixed
    difference). So boxes add up to a box exactly where their corners, with these signs, add up to its corners.
    """
    dims = offsets.shape[1]
    extent = [int(size) + 1 for size in sizes[-1]]
    strides = np.array([prod(extent[dim + 1 :]) for dim in range(dims)], np.int64)
    corners, signs = (offsets @ strides)[np.newaxis], np.ones((1, len(offsets)))
    signs[0, -1] = -1
    for dim in range(dims):
        corners = np.concatenate([corners, corners + sizes[:, dim] * strides[dim]])
        signs = np.concatenate([signs, -signs])
    _, places = np.unique(corners.reshape(-1), return_inverse=True)
    return not np.bincount(places, signs.reshape(-1)).any()


def first_flaw(boxes: Sequence[Box], shape: Sequence[int], dim: int = 0) -> tuple[tuple[int, ...], int] | None:
    """Return the first element of a tensor that is not in exactly one box, and in how many it is; None: there is none.

    Exact for any boxes inside the tensor; n log n for a grid. Sweeps along `dim` and looks, between each two places
    where a box begins or ends, at the boxes there in the dimensions after it.
    """
    if dim == len(shape):
        return None if len(boxes) == 1 else ((), len(boxes))
    if len(boxes) == 1 and all(boxes[0][1][after] == shape[after] for after in range(dim, len(shape))):
        return None
    waiting = sorted(boxes, key=lambda box: -box[0][dim])
    edges = {0, shape[dim]}.union(*((offsets[dim], offsets[dim] + sizes[dim]) for offsets, sizes in boxes))
    here: list[Box] = []
    for low in sorted(edges - {shape[dim]}):
        here = [box for box in here if box[0][dim] + box[1][dim] > low]
        while waiting and waiting[-1][0][dim] == low:
            box = waiting.pop()
            if box[1][dim]:
                here.append(box)
        flaw = first_flaw(here, shape, dim + 1)
        if flaw is not None:
            return (low, *flaw[0]), flaw[1]
    return None
