"""By how much the elements of two tensors differ: counted and measured piece by piece, in bounded memory.

Elements are the same where their bits are; between two dtypes, where their values are. Sizes of changes are measured in
float64 (complex128), between 64-bit integers exactly. What is not finite cannot be measured: it is counted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

SLICE_ELEMENTS = 64 * 1024
"""What is looked at together: small enough to stay in the cache of a core."""
_LARGE, _SMALL = 1e300, 1e-280
"""Sums of squares beyond these have lost digits, or all of them."""


@dataclass(frozen=True)
class Difference:
    """How the elements of B differ from those of A.

    `measured`: False if the dtype has no arithmetic; then only `changed` counts. `largest`: the largest absolute
    difference; `distance`: ||a - b||; `norm`: ||a||; each over what is finite in both (in A). `unmeasured`: changed
    elements that are not finite. `nan`, `inf`: how many there are in A and in B.
    """

    elements: int = 0
    changed: int = 0
    measured: bool = True
    largest: float = 0
    distance: float = 0.0
    norm: float = 0.0
    unmeasured: int = 0
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)

    @property
    def relative(self) -> float | None:
        """||a - b|| / ||a||; infinite where A is zero and B is not; None where nothing can be measured."""
        if not self.measured:
            return None
        if self.norm:
            return self.distance / self.norm
        return math.inf if self.distance else 0.0

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.elements + other.elements,
            self.changed + other.changed,
            self.measured and other.measured,
            max(self.largest, other.largest),
            math.hypot(self.distance, other.distance),
            math.hypot(self.norm, other.norm),
            self.unmeasured + other.unmeasured,
            (self.nan[0] + other.nan[0], self.nan[1] + other.nan[1]),
            (self.inf[0] + other.inf[0], self.inf[1] + other.inf[1]),
        )


def measure(
    before: torch.Tensor,
    after: torch.Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
    pool: ThreadPoolExecutor | None = None,
) -> Difference:
    """Compare elements given as flat bytes [elements x item size], with their dtypes. `pool` shares the work on large
    tensors.

    Raises: TypeError if the dtypes differ and one of them has no arithmetic (see `comparable`).
    """
    if not before.numel():
        return Difference()
    columns = (torch.split(data, SLICE_ELEMENTS * dtype.itemsize) for data, dtype in zip((before, after), dtypes))
    is_large = before.numel() > 4 * SLICE_ELEMENTS * dtypes[0].itemsize
    run = pool.map if pool is not None and is_large else map
    return sum(run(partial(_measure, dtypes=dtypes), *columns), Difference())


@contextmanager
def measuring_threads() -> Iterator[ThreadPoolExecutor]:
    """Start a few threads for `measure`, and stop torch's own, which cost more than they bring here."""
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="ckptman-measure") as pool:
            yield pool
    finally:
        torch.set_num_threads(torch_threads)


@cache
def has_values(dtype: torch.dtype) -> bool:
    """Whether a dtype has arithmetic. Some can only be stored."""
    try:
        _values(torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu"), dtype)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def _measure(before: torch.Tensor, after: torch.Tensor, dtypes: tuple[torch.dtype, torch.dtype]) -> Difference:
    elements = before.numel() // dtypes[0].itemsize
    apart = _apart(before, after, dtypes[0]) if dtypes[0] == dtypes[1] else None
    changed = 0 if apart is None else int(np.count_nonzero(apart))
    if not has_values(dtypes[0]):
        return Difference(elements, changed, measured=False)
    a = _values(before, dtypes[0])
    norm, nan, inf = _norm(a), 0, 0
    if not math.isfinite(norm):
        norm, nan, inf = _norm(a[torch.isfinite(a)]), int(torch.isnan(a).sum()), int(torch.isinf(a).sum())
    if apart is not None and not changed:
        return Difference(elements, norm=norm, nan=(nan, nan), inf=(inf, inf))
    b = _values(after, dtypes[1])
    if apart is None:
        apart = ((a != b) & ~(torch.isnan(a) & torch.isnan(b))).numpy()
        changed = int(np.count_nonzero(apart))
    largest: float | None = None
    if dtypes[0] == dtypes[1] and dtypes[0] in _EXACT:
        gap, largest = _exact_gap(before, after, dtypes[0])
    else:
        gap = (a - b).abs()
    distance, unmeasured, nan_after, inf_after = _norm(gap), 0, 0, 0
    if not math.isfinite(distance):
        finite = torch.isfinite(a) & torch.isfinite(b)
        unmeasured = int(np.count_nonzero(apart & ~finite.numpy()))
        nan_after, inf_after = int(torch.isnan(b).sum()), int(torch.isinf(b).sum())
        gap = gap[finite]
        distance = _norm(gap)
    if largest is None:
        largest = float(gap.max()) if gap.numel() else 0.0
    return Difference(elements, changed, True, largest, distance, norm, unmeasured, (nan, nan_after), (inf, inf_after))


_HALVES = {"torch.complex32": torch.float16, "torch.bcomplex32": torch.bfloat16}
"""Complex dtypes in which torch does not compute, by that of their parts. `bcomplex32`: from torch 2.14 on."""


def _values(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return flat bytes as 64-bit numbers. Raises: NotImplementedError, RuntimeError, TypeError if there are none."""
    if half := _HALVES.get(str(dtype)):
        return torch.view_as_complex(data.view(half).to(torch.float64).view(-1, 2))
    if dtype.is_complex:
        return data.view(dtype).to(torch.complex128)
    if not dtype.is_floating_point and dtype.itemsize > 1:
        return torch.from_numpy(data.numpy().view(str(dtype).removeprefix("torch.")).astype(np.float64))
    return data.view(dtype).to(torch.float64)


def _apart(before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype) -> NDArray[np.bool_]:
    """Return which elements have different bits."""
    size = min(dtype.itemsize, 8)
    ours, theirs = (each.numpy().view(f"u{size}") for each in (before, after))
    apart: NDArray[np.bool_] = ours != theirs
    return np.asarray(apart.reshape(-1, dtype.itemsize // size).any(axis=1)) if dtype.itemsize > size else apart


_EXACT: dict[torch.dtype, Any] = {torch.int64: np.int64, torch.uint64: np.uint64}


def _exact_gap(before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Return the absolute differences of 64-bit integers, and the exact largest one."""
    a, b = (each.numpy().view(_EXACT[dtype]) for each in (before, after))
    gap = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
    return torch.from_numpy(gap.astype(np.float64)), int(gap.max())


def _norm(numbers: torch.Tensor) -> float:
    """Return the norm, even if squares are out of range; infinite or NaN if a number is."""
    parts = torch.view_as_real(numbers).reshape(-1) if numbers.is_complex() else numbers
    square = float(torch.dot(parts, parts))
    if _SMALL <= square <= _LARGE:
        return math.sqrt(square)
    largest = float(parts.abs().max()) if parts.numel() else 0.0
    if not largest or not math.isfinite(largest):
        return largest
    scaled = parts / largest
    return largest * math.sqrt(float(torch.dot(scaled, scaled)))
