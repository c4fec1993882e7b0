"""Other loaders of a program that make a resumed run draw other random numbers than one that nobody cut."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from ckptman.data.resumable_loader import ResumableLoader
from ckptman.errors import warn_only
from ckptman.state.generators import RNGState


def warn_of_persistent_workers(values: Iterable[object]) -> None:
    """Warn of a DataLoader that draws from torch's generator once an attempt, when its persistent workers start.

    Args:
        values: The objects of a state. Loaders inside a ResumableLoader do not draw, and without an RNGState there is
            nothing to compare.
    """
    if not any(isinstance(each, RNGState) for each in values):
        return
    kinds: list[type] = [DataLoader]
    for kind in kinds:
        kinds += kind.__subclasses__()
    known = {id(kind) for kind in (ResumableLoader, *kinds)}  # a metaclass may have no hash
    found = [each for each in gc.get_objects() if id(type(each)) in known]
    own = {id(inside) for each in found if isinstance(each, ResumableLoader) for inside in each.dataloaders}
    for each in found:
        if isinstance(each, DataLoader) and id(each) not in own and _draws_once(each):
            warn_only(
                f"a DataLoader of {type(each.dataset).__name__} with persistent_workers=True, which is not in the "
                f"state, draws from torch's generator when its workers start. An attempt that resumes draws once more "
                f"than a run that nobody cut, and so shuffles otherwise from then on. Give it a generator of its own: "
                f"DataLoader(..., generator=torch.Generator())"
            )
            return


def _draws_once(loader: DataLoader[Any]) -> bool:
    return bool(loader.num_workers and loader.persistent_workers and loader.generator is None)
