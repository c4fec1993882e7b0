"""Counters in modules, optimizers, callbacks and trainers of the user that nobody saves: each attempt begins with new
ones."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from ckptman.engine.state.named_state import added_entries
from ckptman.engine.state.snapshot import Snapshot
from ckptman.errors import warn_only

_LIBRARIES = ("torch", "torchmetrics", "transformers", "accelerate", "lightning", "pytorch_lightning", "ckptman")
"""What their classes keep in attributes is derived from what is saved, or saved by an integration."""
_INSTALLED = {"site-packages", "dist-packages"}
_PLAIN = (int, float, str)
_CONTAINERS = (list, tuple, dict, set)


class UnsavedValues:
    """Warns of plain values that change while training, once for each object.

    Args:
        objects: gives those of the user's that nobody saves, with what lets them be saved. Called in the first step.
    """

    def __init__(self, objects: Callable[[], Mapping[Any, str]]) -> None:
        self._objects = objects
        self._before: list[tuple[Any, str, dict[str, object]]] | None = None

    def end_step(self, *, is_saved: bool, saved: SavedPlainValues | None = None) -> None:
        """Note the values at the end of the first step; at later ones that are saved, compare them.

        Args:
            saved: what the checkpoint holds, in which a value may be, as its owner or the loop saves it.
        """
        if self._before is None:
            noted = ((each, remedy, _values(each)) for each, remedy in self._objects().items())
            self._before = [(each, remedy, values) for each, remedy, values in noted if values]
            return
        for each, remedy, before in list(self._before) if is_saved else ():
            now = _values(each)
            changed = [name for name, value in before.items() if now.get(name, value) != value]
            if changed and saved is not None:
                believed = [name for name in changed if saved.have(name, vars(each)[name])]
                for name in believed:
                    del before[name]
                changed = [name for name in changed if name not in believed]
            if changed:
                self._before = [held for held in self._before if held[0] is not each]
                is_one = len(changed) == 1
                warn_only(
                    f"{', '.join(f'{type(each).__name__}.{name}' for name in changed)} "
                    f"{'changes' if is_one else 'change'} during training but {'is' if is_one else 'are'} not saved: a "
                    f"resumed run starts with {'its value' if is_one else 'their values'} from __init__(). To change "
                    f"that, {remedy}"
                )


class SavedPlainValues:
    """What a checkpoint holds besides parameters and buffers, to look values up in."""

    def __init__(self, state: Mapping[str, Any], shot: Snapshot) -> None:
        self._state, self._shot = state, shot

    def have(self, name: str, value: object) -> bool:
        """Return whether a value is in there: under its own name, or under any that a module adds."""
        if isinstance(value, _CONTAINERS):
            return name in self._names
        return any(
            each == value and (full.rpartition(".")[2] == name or (full in self._added and type(value) is not bool))
            for full, each in self._values.items()
        )

    @cached_property
    def _names(self) -> set[str]:
        return {part for name in self._shot.paths for part in name.split(".")[1:]}

    @cached_property
    def _modules(self) -> dict[str, torch.nn.Module]:
        return {key: each for key, each in self._state.items() if isinstance(each, torch.nn.Module)}

    @cached_property
    def _added(self) -> set[str]:
        names = self._shot.paths
        return {f"{key}.{each}" for key, module in self._modules.items() for each in added_entries(key, module, names)}

    @cached_property
    def _values(self) -> dict[str, object]:
        looked_at = {
            name: value.item() if type(value) is torch.Tensor and value.numel() == 1 else value
            for name, value in (self._shot.objects | self._shot.tensors).items()
            if name in self._added or self._shot.paths[name][0] not in self._modules
        }
        return {name: value for name, value in looked_at.items() if isinstance(value, _PLAIN)}


def modules_of_user(roots: Iterable[torch.nn.Module]) -> dict[Any, str]:
    """Return the modules whose classes are the user's own, and how they would save more than parameters and buffers."""
    remedy = "use register_buffer(), or get_extra_state() and set_extra_state()"
    found = {}
    for module in (each for root in roots for each in root.modules()):
        kind = type(module)
        saves_more = kind.get_extra_state is not torch.nn.Module.get_extra_state or hasattr(kind, "on_save_checkpoint")
        if not saves_more and _is_of_user(kind):
            found[module] = remedy
    return found


def optimizers_of_user(values: Iterable[object]) -> dict[Any, str]:
    """Return the optimizers whose classes are the user's own, and how they would save more."""
    remedy = "keep it in the param_groups of the optimizer, or in its state"
    own = [each for each in values if isinstance(each, torch.optim.Optimizer) and _is_of_user(type(each))]
    # Who gives more than torch does is believed.
    return {each: remedy for each in own if type(each).state_dict is torch.optim.Optimizer.state_dict}


def _values(owner: Any) -> dict[str, object]:
    """Return what of its attributes can be compared at little cost: numbers, texts, and how many are in a container."""
    set_by_library = _set_by_libraries(owner.__class__)
    is_module = isinstance(owner, torch.nn.Module)
    return {
        name: len(value) if isinstance(value, _CONTAINERS) else value
        for name, value in vars(owner).items()
        if isinstance(value, (*_PLAIN, *_CONTAINERS))
        and value == value  # not NaN
        and name not in set_by_library
        and not (is_module and name.startswith("_"))  # frameworks set such from outside
    }


@cache
def _set_by_libraries(kind: type[Any]) -> frozenset[str]:
    """Return the names of the attributes that a class has from libraries: what their methods set of `self`."""
    methods = (
        each
        for base in kind.__mro__
        if _is_library(base)
        for each in vars(base).values()
        if isinstance(each, FunctionType)
    )
    return frozenset(
        each.argval
        for method in methods
        for before, each in pairwise(dis.get_instructions(method))
        if each.opname == "STORE_ATTR" and before.argrepr.endswith("self")
    )


def _is_of_user(kind: type[Any]) -> bool:
    return not all(map(_is_library, kind.__mro__))


@cache
def _is_library(kind: type[Any]) -> bool:
    """Return whether a class is of an installed package, or of Python itself."""
    top = kind.__module__.partition(".")[0]
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return top in _LIBRARIES or top in sys.stdlib_module_names or not _INSTALLED.isdisjoint(Path(file).parts)
