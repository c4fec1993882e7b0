"""The state of an application: how modules, optimizers, Stateful objects and plain values become names and back.

A flat name is the path joined by dots, exactly as torch's DCP flattens a nested state dict, so that
`torch.distributed.checkpoint.load` finds everything under the names it expects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ckptman._torch_compat import full_names
from ckptman.engine.state.exact_load import loading_exactly
from ckptman.engine.state.modules import Trainable, is_prepared_loader, load_module, module_state, named_in_full
from ckptman.engine.state.optimizers import (
    ORDER,
    get_state,
    get_state_to_fill,
    names_in_order,
    refuse_sharded,
    set_state,
)
from ckptman.engine.state.program_faults import of_the_program
from ckptman.errors import ConfigError
from ckptman.storage.format.manifest import Mesh
from ckptman.storage.format.value_codec import SEQUENCES, TensorRef, rebuilt


def rank_key(rank: int) -> str:
    """The entry under which the state of one rank is saved, for objects that differ on each rank."""
    return f"rank-{rank:05d}"


def nested(
    state: Mapping[str, Any],
    rank: int,
    saved: Mapping[str, Any] | None = None,
    form: Callable[[str], tuple[torch.Size, torch.dtype]] | None = None,
) -> dict[str, Any]:
    """Return the state dicts of all objects: flat dicts for modules and optimizers, their own for all others.

    `saved`: the values of a checkpoint; optimizers get the state that it has of them, to be filled. `form`: shape and
    dtype of its tensors.
    """
    return {name: nested_entry(name, state, rank, saved, form) for name in state}


def nested_entry(
    name: str,
    state: Mapping[str, Any],
    rank: int,
    saved: Mapping[str, Any] | None = None,
    form: Callable[[str], tuple[torch.Size, torch.dtype]] | None = None,
) -> Any:
    """As `nested`, for one object."""
    value = state[name]
    asked = of_the_program(name, value, "state_dict", rank)
    if isinstance(value, torch.nn.Module):
        with asked:
            return module_state(value)
    if isinstance(value, torch.optim.Optimizer):
        entries = saved.get(name) if saved is not None else None
        forms = {each.name: form(each.name) for each in refs_in(entries)} if form is not None else {}
        with asked:
            if entries is None or form is None:
                return get_state(name, value, state)
            return get_state_to_fill(name, value, state, entries, forms.__getitem__)
    if getattr(value, "per_rank", False):
        with asked:
            held = value.state_dict()
        refuse_sharded("the state", name, value, held)
        inside = getattr(value, "value", None)
        if isinstance(inside, torch.optim.Optimizer):
            held = {**held, ORDER: names_in_order(inside, state)}
        return {rank_key(rank): held}
    if is_stateful(value) and not is_prepared_loader(value):
        with asked:
            return value.state_dict()
    if isinstance(value, DataLoader | Iterator):
        raise ConfigError(
            f"{name} is a {type(value).__name__}, which does not say where it is, so that a resumed run would see "
            f"other data: put ckptman.ResumableLoader(DataLoader(...)) into the state, and iterate that"
        )
    return value


def is_named(value: object) -> bool:
    """Whether an object's state is tensors under fixed names, which a checkpoint must match: a module or optimizer."""
    return isinstance(value, torch.nn.Module | torch.optim.Optimizer | Trainable)


def differs_on_ranks(value: object) -> bool:
    """Whether an object says that it need not be the same on every rank."""
    return bool(getattr(value, "per_rank", False) or getattr(value, "from_rank0", False))


def is_stateful(value: object) -> bool:
    """Whether an object saves and loads itself."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_settled(state: Mapping[str, Any]) -> bool:
    """Whether a state already has all the tensors it will have: optimizers make theirs at their first step, and other
    objects are not asked before there was one."""
    optimizers = [each for each in state.values() if isinstance(each, torch.optim.Optimizer)]
    others = [each for each in state.values() if is_stateful(each) and not is_named(each)]
    return not others and all(each.state for each in optimizers)


def parameter_names(module: torch.nn.Module) -> set[str]:
    """The names of a module's parameters as its state dict has them; what else is in there are buffers."""
    return {name for names, _ in named_in_full(module) for name in names}


def added_entries(key: str, module: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """Return those of the flat names, without the module's key, that are in its state dict by code of its own: names of
    neither parameters nor buffers."""
    buffers = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    known = parameter_names(module) | {each for name in buffers for each in full_names(module, name)}
    entries = (name.removeprefix(f"{key}.") for name in names if name.startswith(f"{key}."))
    return [each for each in entries if each not in known]


def put_back(
    state: MutableMapping[str, Any],
    name: str,
    values: Any,
    rank: int,
    from_other_rank: bool,
    filled: set[int] | None = None,
) -> None:
    """Give one object of the application the values that were restored for it. `filled`: ids of the dicts and lists
    that this restore has filled already; None: one that is in the state twice stays one."""
    target = state[name]
    call = "load_from_other_rank" if from_other_rank and not is_named(target) else "load_state_dict"
    with of_the_program(name, target, call, rank):
        _put_back(state, name, values, rank, from_other_rank, filled)


def _put_back(
    state: MutableMapping[str, Any], name: str, values: Any, rank: int, from_other_rank: bool, filled: set[int] | None
) -> None:
    target = state[name]
    if isinstance(target, torch.nn.Module):
        load_module(target, values)
    elif isinstance(target, torch.optim.Optimizer):
        set_state(name, target, state, values)
    elif from_other_rank:
        if not hasattr(target, "load_from_other_rank"):
            raise ConfigError(
                f"{name!r} is saved for each rank, and rank {rank} did not exist then: give it a method "
                f"load_from_other_rank(state, rank), or restore on as many ranks as saved"
            )
        with loading_exactly(target):
            target.load_from_other_rank(values, rank)
    elif is_stateful(target):
        with loading_exactly(target):
            target.load_state_dict(values)
    else:
        value = _refilled(target, values, filled)
        if value is not target:
            state[name] = value


def _refilled(old: Any, new: Any, filled: set[int] | None) -> Any:
    """Return what was restored, in the dicts, lists and dataclasses that are there: whoever has them sees it too. One
    that is met a second time, as in `[{}] * 3`, was several when it was saved, and stays behind."""
    if filled is not None and (isinstance(old, (MutableMapping, list)) or is_dataclass(old)):
        if id(old) in filled:
            return new
        filled.add(id(old))
    if isinstance(old, MutableMapping) and isinstance(new, Mapping):
        found = {key: _refilled(old.get(key), each, filled) for key, each in new.items()}
        if list(old) == list(found):  # a mapping of fixed keys can be filled, too
            for key, each in found.items():
                if old[key] is not each:
                    old[key] = each
        else:
            old.clear()
            old.update(found)
        return old
    if is_dataclass(old) and type(new) is type(old) and not getattr(new, "__dataclass_params__").frozen:  # noqa: B009
        for each in fields(old):
            setattr(old, each.name, _refilled(getattr(old, each.name, None), getattr(new, each.name), filled))
        return old
    if isinstance(old, deque) and type(new) is deque and old.maxlen == new.maxlen:
        members = [_refilled(old[at] if at < len(old) else None, each, filled) for at, each in enumerate(new)]
        old.clear()
        old.extend(members)
        return old
    if isinstance(old, list) and type(new) is list:
        old[:] = [_refilled(old[at] if at < len(old) else None, each, filled) for at, each in enumerate(new)]
        return old
    return new


def mesh_of(tensors: Mapping[str, torch.Tensor]) -> Mesh | None:
    """The device mesh of the first sharded tensor, outermost axis first; None if nothing is sharded."""
    for tensor in tensors.values():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
            return Mesh(names=tuple(names), shape=tuple(mesh.shape))
    return None


def replace_refs(value: Any, load: Callable[[TensorRef], Any], *, as_arrays: bool = True) -> Any:
    """A decoded value with each reference replaced by its tensor, or by the array of NumPy that it was."""
    if isinstance(value, TensorRef):
        return load(value).numpy() if value.is_array and as_arrays else load(value)
    if type(value) in SEQUENCES:
        return rebuilt(value, [replace_refs(each, load, as_arrays=as_arrays) for each in value])
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = replace_refs(each, load, as_arrays=as_arrays)
    return value


def refs_in(value: Any) -> Iterator[TensorRef]:
    """The references in a decoded value."""
    if isinstance(value, TensorRef):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from refs_in(each)
    elif isinstance(value, SEQUENCES):
        for each in value:
            yield from refs_in(each)
