"""Whether what training computes is finite: looked at behind the training, on the bytes that a save writes.

Looked at are the parameters of modules and the state of optimizers. Buffers are not: a mask may hold -inf on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch

from ckptman.engine.saving.write_plan import RankFile
from ckptman.engine.state.named_state import Snapshot, parameter_names
from ckptman.engine.state.trainable import module_of
from ckptman.storage.io.finite_scan import FiniteScan, Range, can_be_infinite

OnNonfinite = Literal["keep", "refuse", "ignore"]
MOST_NAMES = 10
"""So many names of tensors that are not finite are kept: as a rule it is all of them."""


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

    def begin(self) -> FiniteScan:
        """Return what looks at one file that is being written."""
        return FiniteScan(self._ranges)


def _find(file: RankFile, names: Collection[str]) -> list[Range]:
    dtypes = {name: dtype for name, dtype, _ in (*file.plan.tensors, *file.plan.own_tensors)}
    found = []
    for piece, place in zip(file.pieces, file.places):
        dtype = dtypes[piece.name]
        size = math.prod(piece.sizes) * getattr(torch, dtype).itemsize
        if size and piece.name in names and can_be_infinite(dtype):
            found.append(Range(place.payload, place.payload + size, piece.name, dtype))
    return sorted(found)
