"""Other loaders of a program that make a resumed run draw other random numbers than one that nobody cut."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

from ckptman.engine.state.generators import RNGState
from ckptman.errors import warn_only

_MOST_FRAMES, _MOST_ATTRIBUTES = 20, 1000


def warn_of_persistent_workers(values: Iterable[Any]) -> None:
    """Warn of a DataLoader that draws from torch's generator once an attempt, when its persistent workers start.

    Those that the loop has in sight are looked at: variables of the functions that led here and of their modules, and
    attributes of objects in them.

    Args:
        values: The objects of a state. Loaders inside one with a position do not draw, and without an RNGState there is
            nothing to compare.
    """
    values = list(values)
    if not any(isinstance(each, RNGState) for each in values):
        return
    having = (each for each in values if hasattr(type(each), "dataloaders"))
    own = {id(getattr(inside, "dataset", inside)) for each in having for inside in each.dataloaders}
    for each in _in_sight(sys._getframe(1)):
        # A framework makes its own of the loader that it is given: what they have in common is the dataset.
        if id(each.dataset) not in own and each.num_workers and each.persistent_workers and each.generator is None:
            warn_only(
                f"a DataLoader of {type(each.dataset).__name__} with persistent_workers=True, which is not in the "
                f"state, draws from torch's generator when its workers start. An attempt that resumes draws once more "
                f"than a run that nobody cut, and so shuffles otherwise from then on. Give it a generator of its own: "
                f"DataLoader(..., generator=torch.Generator())"
            )
            return


def draw_apart(loader: Any) -> Any:
    """Give a loader with persistent workers a generator of its own, if it has none, and return it.

    From that of the process it draws when its workers start, which they do once in each attempt.
    """
    inside = getattr(loader, "base_dataloader", loader)  # of a loader that Accelerate has prepared
    if isinstance(inside, DataLoader) and inside.persistent_workers and inside.generator is None:
        inside.generator = torch.Generator()
    return loader


def _in_sight(frame: FrameType | None) -> Iterator[DataLoader[Any]]:
    seen = set[int]()
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        for variables in (frame.f_locals, frame.f_globals):
            if id(variables) in seen or frame.f_globals.get("__name__", "").partition(".")[0] in ("ckptman", "torch"):
                continue
            seen.add(id(variables))
            for value in list(variables.values()):
                for each in (value, *_attributes(value)):
                    if issubclass(type(each), DataLoader):  # isinstance() would ask the object, which may be a lazy one
                        yield each
        frame = frame.f_back


def _attributes(value: object) -> Iterable[object]:
    if issubclass(type(value), type | ModuleType):
        return ()
    try:
        inside = object.__getattribute__(value, "__dict__")
    except Exception:  # noqa: BLE001 whatever class it is of
        return ()
    return tuple(inside.values()) if type(inside) is dict and len(inside) < _MOST_ATTRIBUTES else ()
