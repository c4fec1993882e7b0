"""Loads that leave an optimizer with exactly what it was given.

torch casts state to the dtype of its parameter, and rebuilds every other iterable from its members: a string becomes
`<generator object ...>`, an array of NumPy fails, a deque loses its limit. Hooks on each optimizer that an object holds
keep these values out of such a load, and put them back right after it, whoever called the load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckptman.engine.state.local_shards import local_parts
from ckptman.engine.state.tensor_digest import Digester
from ckptman.errors import ConfigError, warn_only
from ckptman.storage.format.value_codec import SEQUENCES, encode, rebuilt


def optimizers_in(value: object) -> list[torch.optim.Optimizer]:
    """The optimizers that an object is, or holds: in attributes, in lists, tuples and dicts there, and in the objects
    with a state dict that it holds, but for modules."""
    found, known, todo = [], {id(value)}, [value]
    while todo:
        holder = todo.pop()
        if isinstance(holder, torch.optim.Optimizer):
            found.append(holder)
        for attribute in getattr(holder, "__dict__", {}).values():
            is_full = isinstance(attribute, (dict, list, tuple))
            held = attribute.values() if isinstance(attribute, dict) else attribute if is_full else [attribute]
            for each in held:
                if _loads_itself(each) and id(each) not in known:
                    known.add(id(each))
                    todo.append(each)
    return found


@contextmanager
def loading_exactly(target: object) -> Iterator[None]:
    """Have each optimizer in an object keep the values and dtypes that it is given inside, and its state and groups in
    the dicts that they are in: others may hold them, such as an optimizer around it."""
    with ExitStack() as hooks:
        for optimizer in optimizers_in(target):
            load = _Load()
            with suppress(AttributeError):  # without torch's __init__, it has no hooks, and no load of torch
                hooks.callback(optimizer.register_load_state_dict_pre_hook(load.begin).remove)
                hooks.callback(optimizer.register_load_state_dict_post_hook(load.end).remove)
        yield


def load_exactly(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    """Load a state dict into an optimizer, and warn of settings and further entries that it has not taken: some are
    meant to be other, such as a time or a version. Raises: ConfigError, its state is another one afterwards.
    """
    with loading_exactly(optimizer):
        optimizer.load_state_dict(dict(given))
    loaded = optimizer.state_dict()
    if isinstance(given.get("state"), dict) and isinstance(loaded.get("state"), dict):
        _as_given(given["state"], loaded["state"])  # for those that load it without torch, in the way that torch does
    loaded = optimizer.state_dict()
    for key in sorted(given, key=lambda key: key != "state"):
        if difference := _difference({key: given[key]}, loaded, ""):
            told = (
                f"{type(optimizer).__name__} did not take what was saved of it: {difference} after load_state_dict(). "
                f"Correct its load_state_dict() or __setstate__(). To change a setting, set it after the restore"
            )
            if key == "state":
                raise ConfigError(told)
            if not (dist.is_initialized() and dist.get_rank()):
                warn_only(told)


class _Load:
    """One load of an optimizer, by torch."""

    def __init__(self) -> None:
        self._given: dict[Any, Any] = {}
        self._numbers: list[Any] = []
        self._groups: list[dict[str, Any]] = []
        self._state: dict[Any, Any] = {}

    def begin(self, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        """Note what is given, and return it without what torch would spoil."""
        self._given, self._groups, self._state = given["state"], optimizer.param_groups, optimizer.state
        self._numbers = [number for group in given["param_groups"] for number in group["params"]]
        known = {*self._numbers}
        state = {number: _without_iterables(each) if number in known else each for number, each in self._given.items()}
        return {**given, "state": state}

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Put it back."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for number, parameter in zip(self._numbers, parameters):
            if number in self._given and parameter in optimizer.state:
                optimizer.state[parameter] = _as_given(self._given[number], optimizer.state[parameter])
        for group, loaded in zip(self._groups, optimizer.param_groups):
            before, after = dict(group), dict(loaded)
            group.clear()
            group.update({name: _in_place(before.get(name), value) for name, value in after.items()})
        optimizer.param_groups = self._groups
        if optimizer.state is not self._state:
            loaded_state = dict(optimizer.state)
            self._state.clear()
            self._state.update(loaded_state)
            optimizer.state = self._state  # type: ignore[assignment]
        self._given, self._groups, self._state = {}, [], {}


def _loads_itself(value: object) -> bool:
    """Return whether an object may hold an optimizer whose state it loads."""
    return callable(getattr(type(value), "load_state_dict", None)) and not isinstance(value, torch.nn.Module)


def _in_place(old: Any, new: Any) -> Any:
    """Return a setting: a tensor in that of before, as a captured graph reads it where it is."""
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)) or old.shape != new.shape:
        return new
    with torch.no_grad():
        return old.copy_(new)


def _is_rebuilt(value: Any) -> bool:
    """Return whether torch makes another value from the members of this one, and not the same."""
    return isinstance(value, Iterable) and not isinstance(value, (torch.Tensor, dict, *SEQUENCES))


def _without_iterables(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_iterables(each) for key, each in value.items()}
    if isinstance(value, SEQUENCES):
        return rebuilt(value, map(_without_iterables, value))
    return None if _is_rebuilt(value) else value


def _as_given(given: Any, loaded: Any) -> Any:
    """Return what was loaded, with what torch made of it as it was given. The dtype of a step is the optimizer's."""
    if isinstance(given, dict) and isinstance(loaded, dict):
        for key in given.keys() & loaded.keys():
            if key != "step" or not isinstance(given[key], torch.Tensor):
                loaded[key] = _as_given(given[key], loaded[key])
        return loaded if type(loaded) is not dict or type(given) is dict else type(given)(loaded)
    if isinstance(given, SEQUENCES) and type(loaded) is type(given) and len(loaded) == len(given):
        return rebuilt(given, map(_as_given, given, loaded))
    if isinstance(given, torch.Tensor) and isinstance(loaded, type(given)) and loaded.shape == given.shape:
        return given.to(loaded.device) if loaded.dtype != given.dtype else loaded
    return given if _is_rebuilt(given) else loaded


def _difference(given: Any, loaded: Any, path: str) -> str:
    """Return what is other in what an optimizer gives than in what it was given, in words; "": nothing is."""
    if isinstance(given, Mapping):
        there = loaded if isinstance(loaded, Mapping) else {}
        pairs = ((key, each, there.get(key)) for key, each in given.items() if not isinstance(each, dict) or each)
        told = (_difference(each, other, f"{path}.{key}" if path else str(key)) for key, each, other in pairs)
        return next(filter(None, told), "")
    if isinstance(given, SEQUENCES) and isinstance(loaded, SEQUENCES) and len(given) == len(loaded):
        told = (_difference(one, other, f"{path}.{at}") for at, (one, other) in enumerate(zip(given, loaded)))
        return next(filter(None, told), "")
    if isinstance(given, torch.Tensor):
        is_like = isinstance(loaded, torch.Tensor) and isinstance(loaded, DTensor) is isinstance(given, DTensor)
        if not is_like or loaded.shape != given.shape:
            return f"{path} is {_told(loaded)}, not {_told(given)},"
        return "" if are_equal(given, loaded, is_step=path.endswith(".step")) else f"{path} has other values"
    return "" if _is_same_value(given, loaded) else f"{path} is {_told(loaded)}, not {_told(given)},"


def _told(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)[:80]
    return f"{'DTensor ' if isinstance(value, DTensor) else ''}{list(value.shape)} {value.dtype}"


def _is_same_value(given: Any, loaded: Any) -> bool:
    """Return whether a plain value is as it was given, or is the same number in another form."""
    try:
        if encode(given, "") == encode(loaded, ""):
            return True
    except ConfigError:
        pass  # only what was saved has such a form
    if not isinstance(given, int | float | complex):
        return False
    is_number = isinstance(loaded, int | float | complex) or (isinstance(loaded, torch.Tensor) and loaded.numel() == 1)
    return is_number and bool(given == loaded)


def are_equal(one: torch.Tensor, other: torch.Tensor, *, is_step: bool = False) -> bool:
    """Return whether two tensors hold the same, bit for bit. A step may be of another dtype."""
    if one is other:
        return True
    if is_step and not one.dim():
        return float(one) == float(other)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    digester = Digester()
    pairs = zip(local_parts(one), local_parts(other))
    totals = [[digester.digest_or_none(part, box.offsets) for box, part in pair] for pair in pairs]
    return all(a is None or b is None or int(a) == int(b) for a, b in totals)
