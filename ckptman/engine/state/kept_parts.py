"""The parts of a snapshot that a save takes over from the save before, so that it looks at bytes alone.

Names, paths, layout and encoded values of a module or an optimizer follow from things that are quick to compare: the
dicts in which torch holds its tensors, the identity of each tensor, and the place and form of its memory. If all of
them are as before, so is the part. Anything else is walked again at each save: objects with a `state_dict()` of their
own, modules and optimizers with hooks, tensors of other classes.

Nothing here keeps a tensor or a module alive: a program may have dropped it to free its memory.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from ckptman._torch_compat import has_state_dict_hooks, insides_of, is_hook_of_fsdp, local_tensor, spec_of
from ckptman.engine.state.exact_load import optimizers_in
from ckptman.engine.state.local_shards import describes_shards, is_plain
from ckptman.engine.state.modules import module_of
from ckptman.engine.state.optimizers import GROUPS, NO_SETTINGS, PLAIN_STATE, STATE, parameters_of
from ckptman.engine.state.snapshot import Digested, Part, Snapshot, part_of, text_of
from ckptman.storage.format.value_codec import encode

Digests = dict[tuple[str, str], str]
_SCALARS = (int, float, str, bool, type(None))


class _Kept(Protocol):
    """A part, and what tells whether it fits still."""

    def again(self, value: Any) -> Part | None:
        """Return the part of the object that it was of, with its tensors of now; None: it has to be walked."""


class PartKeeper:
    """Takes the snapshots of one state, save after save."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._modules: list[str] = []
        self._digested: dict[str, Digested] = {}
        self.walked: list[str] = []
        """The entries of the last snapshot whose parts were not kept."""

    def snapshot(self, state: Mapping[str, Any], rank: int) -> Snapshot:
        """As `ckptman.engine.state.snapshot.snapshot`. Raises: ConfigError."""
        before, self._kept, self.walked = self._kept, {}, []  # after an error, nothing is kept
        modules = [name for name, value in state.items() if module_of(value) is not None]
        are_named_alike, self._modules = modules == self._modules, modules
        kept: dict[str, _Kept] = {}
        parts: dict[str, Part] = {}
        for name in [*modules, *(name for name in state if name not in modules)]:  # modules name what optimizers have
            old, part = before.get(name), None
            if old is not None and (name in modules or are_named_alike):
                part = _again(old, state[name])
            if part is None:
                part = part_of(name, state, rank)
                old = _keep(part, state)
                are_named_alike &= name not in modules
                self._digested[name] = Digested(part, state[name])
                self.walked.append(name)
            if old is not None:
                kept[name] = old
            parts[name] = part
        result = Snapshot([parts[name] for name in state])
        result.refuse_equal_names([parts[name] for name in self.walked])
        self._kept = kept
        return result

    def digests(self, shot: Snapshot) -> Digests:
        """Return digests of the plain values of the last snapshot that every rank should have alike."""
        return {key: each for part in shot.parts for key, each in self._digested[part.key].digests(part).items()}


def _keep(part: Part, state: Mapping[str, Any]) -> _Kept | None:
    """Return what can tell whether a part fits still; None: nothing can."""
    value = state[part.key]
    try:
        if isinstance(value, torch.nn.Module):
            return _KeptModule(part, value)
        if isinstance(value, torch.optim.Optimizer):
            return _KeptOptimizer(part, value, state)
    except (_UnkeepableError, *_NOT_OF_TORCH):
        pass
    return None


def _again(kept: _Kept, value: object) -> Part | None:
    try:
        return kept.again(value)
    except _NOT_OF_TORCH:
        return None


_NOT_OF_TORCH = (AttributeError, KeyError, TypeError, RuntimeError)
"""What is raised by objects that are not built as torch builds its own, and by tensors without memory."""


class _UnkeepableError(Exception):
    """What a part follows from is not known."""


class _Tensors:
    """What tells whether tensors and their memory are as before.

    They are not kept alive. They are known by their ids: torch swaps no tensor that has a weak reference. An id that is
    given again does no harm, as tensors are found by their place, and all lists of them are compared at once: of two
    lists that are as before, what was one tensor in both is one.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._ids = list(map(id, tensors))
        self._forms = _forms(tensors)
        local = [local_tensor(each) if type(each) is DTensor else each for each in tensors]
        if not all(is_plain(each) and (each.data_ptr() or not each.numel()) for each in local):
            raise _UnkeepableError
        if any(map(describes_shards, tensors)):
            raise _UnkeepableError

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these are the very tensors, in this order, with the memory that they had."""
        return list(map(id, tensors)) == self._ids and _forms(tensors) == self._forms


def _are_same(values: Sequence[object], refs: Sequence[weakref.ref[Any]]) -> bool:
    return len(values) == len(refs) and all(map(is_, values, [ref() for ref in refs]))


def _forms(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return what changes if the memory of a tensor becomes another, or is read in another way."""
    local = [local_tensor(each) if type(each) is DTensor else each for each in tensors]
    return [
        [each.data_ptr() for each in local],
        list(map(torch.Tensor.size, local)),
        list(map(torch.Tensor.stride, local)),
        [each.dtype for each in local],
        [spec_of(each) for each in tensors if type(each) is DTensor],
        ["global_shape" in each.__dict__ for each in local],  # see `describes_shards`
    ]


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the same of one tensor, to find it by."""
    return tensor.device, *(each[0] if each else None for each in _forms([tensor]))


class _KeptModule:
    """Of a module whose state dict is its parameters and persistent buffers, as torch itself collects them."""

    def __init__(self, part: Part, module: torch.nn.Module) -> None:
        modules = list(module.modules())
        if any(_has_own_state_dict(each) for each in modules):
            raise _UnkeepableError
        self._root, self._modules = weakref.ref(module), list(map(weakref.ref, modules))
        self._layout, tensors, children = _inside(modules)
        self._tensors, self._children = _Tensors(tensors), list(map(weakref.ref, children))
        place = {_form(each): number for number, each in enumerate(tensors)}
        self._places = [place[_form(each)] for each in part.tensors.values()]
        self._part = _without_tensors(part)
        self._names = list(part.tensors)

    def again(self, value: object) -> Part | None:
        modules = [ref() for ref in self._modules]
        if value is not self._root() or not all(each is not None for each in modules):
            return None
        layout, tensors, children = _inside(modules)
        if layout != self._layout or not _are_same(children, self._children) or not self._tensors.are(tensors):
            return None
        return _with_tensors(self._part, dict(zip(self._names, map(tensors.__getitem__, self._places))))


def _has_own_state_dict(module: torch.nn.Module) -> bool:
    kind, torchs = type(module), torch.nn.Module
    own = ("state_dict", "_save_to_state_dict", "get_extra_state")
    *_, after, before = insides_of(module)
    return (
        any(getattr(kind, name) is not getattr(torchs, name) or name in vars(module) for name in own)
        or bool(after)
        or not all(map(is_hook_of_fsdp, before.values()))  # what it does is seen by the tensors that it puts there
    )


def _inside(modules: Iterable[Any]) -> tuple[list[Any], list[torch.Tensor], list[torch.nn.Module]]:
    """Return what tells how modules are built, their tensors, and their children."""
    layout: list[Any] = []
    tensors: list[torch.Tensor] = []
    children: list[torch.nn.Module] = []
    for module in modules:
        parameters, buffers, inner, transient, after, before = insides_of(module)
        layout += (type(module), len(parameters), len(buffers), tuple(transient), tuple(after), tuple(before))
        layout += ("state_dict" in vars(module), "_save_to_state_dict" in vars(module))
        for held in (parameters, buffers):
            for name, each in held.items():
                layout += (name, each is None)
                if each is not None:
                    tensors.append(each)
        for name, child in inner.items():
            layout += (name, child is None)
            if child is not None:
                children.append(child)
    return layout, tensors, children


class _KeptOptimizer:
    """Of an optimizer whose state dict is its state and its groups, as torch itself collects them."""

    def __init__(self, part: Part, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict or len(optimizers_in(optimizer)) > 1:
            raise _UnkeepableError
        self._root = weakref.ref(optimizer)
        self._layout, parameters, values = _inside_optimizer(optimizer)
        self._parameters = list(map(id, parameters))
        self._held = [number for number, each in enumerate(values) if isinstance(each, torch.Tensor)]
        self._tensors = _Tensors([values[number] for number in self._held])
        self._plain = {number: each for number, each in enumerate(values) if not isinstance(each, torch.Tensor)}
        if not all(map(_is_immutable, self._plain.values())):
            raise _UnkeepableError
        uses = _uses(part.key, optimizer, state)
        unit = {f"{part.key}.{each.key}": number for number, each in enumerate(part.units)}
        self._uses = {number: [(unit[name], name) for name in uses[number]] for number in self._plain}
        place = {name: number for number in self._held for name in uses[number]}
        self._names, self._places = list(part.tensors), [place[name] for name in part.tensors]
        if len(unit) - sum(map(len, uses)) != (f"{part.key}.{PLAIN_STATE}" in unit):
            raise _UnkeepableError
        self._part = _without_tensors(part)

    def again(self, value: Any) -> Part | None:
        layout, parameters, values = _inside_optimizer(value)
        if value is not self._root() or layout != self._layout or list(map(id, parameters)) != self._parameters:
            return None
        if not self._tensors.are([values[number] for number in self._held]):
            return None
        changed = [number for number, each in self._plain.items() if not _is_equal(each, values[number])]
        if not all(_is_immutable(values[number]) for number in changed):
            return None
        if changed:
            self._take({number: values[number] for number in changed})
        return _with_tensors(self._part, dict(zip(self._names, map(values.__getitem__, self._places))))

    def _take(self, changed: Mapping[int, Any]) -> None:
        """Note other plain values. The part of before is left as it is: a save may be using it."""
        units, objects = [*self._part.units], {**self._part.objects}
        for number, value in changed.items():
            text = text_of(encode(value, self._part.key))
            for at, name in self._uses[number]:
                units[at] = units[at].of_value(text)
                objects[name] = value
        self._plain |= changed
        self._part = copy.copy(self._part)
        self._part.units, self._part.objects = units, objects


def _inside_optimizer(optimizer: Any) -> tuple[list[Any], list[torch.Tensor], list[Any]]:
    """Return what tells how an optimizer is built, its parameters, and its settings and the state of them."""
    layout: list[Any] = [has_state_dict_hooks(optimizer), "state_dict" in vars(optimizer)]
    parameters: list[torch.Tensor] = []
    values: list[Any] = []
    for group in optimizer.param_groups:
        layout += (len(group["params"]), tuple(group))
        parameters += group["params"]
        values += [each for name, each in group.items() if name not in NO_SETTINGS]
    for parameter, held in optimizer.state.items():
        layout.append(tuple(held))
        parameters.append(parameter)
        values += held.values()
    return layout, parameters, values


def _uses(key: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> list[list[str]]:
    """Return the flat names of each of the values that `_inside_optimizer` gives."""
    names = {id(each): name for name, each in reversed(parameters_of(key, optimizer, state).items())}
    uses: list[list[str]] = []
    for group in optimizer.param_groups:
        owners = [names[id(each)] for each in group["params"]]
        uses += [[f"{key}.{GROUPS}{owner}.{name}" for owner in owners] for name in group if name not in NO_SETTINGS]
    for parameter, held in optimizer.state.items():
        uses += [[f"{key}.{STATE}{names[id(parameter)]}.{name}"] for name in held]
    return uses


def _is_immutable(value: object) -> bool:
    return type(value) in _SCALARS or (type(value) is tuple and all(type(each) in _SCALARS for each in value))


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and repr(one) == repr(other))  # 0.0 == -0.0, and nan != nan


def _without_tensors(part: Part) -> Part:
    signature = part.signature
    result = _with_tensors(part, {})
    assert result.signature == signature, "computed before, with the tensors"
    return result


def _with_tensors(part: Part, tensors: dict[str, torch.Tensor]) -> Part:
    result = copy.copy(part)
    result.tensors = tensors
    return result
