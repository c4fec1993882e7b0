"""The state of an application: how modules, optimizers, Stateful objects and plain values become names and back.

A flat name is the path joined by dots, exactly as torch's DCP flattens a nested state dict, so that
`torch.distributed.checkpoint.load` finds everything under the names it expects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from ckptman.errors import ConfigError
from ckptman.store.index import Unit
from ckptman.store.manifest import Mesh
from ckptman.store.plain import TensorRef, encode, tensor_ref

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def rank_key(rank: int) -> str:
    """The entry under which the state of one rank is saved, for objects that differ on each rank."""
    return f"rank-{rank:05d}"


@dataclass
class Snapshot:
    """What one rank has to save.

    `tensors`: flat name to live tensor; `objects`: flat name to plain value, for other readers; `units`: the same plain
    values encoded, with the flat names below each; `paths`: flat name to its path as DCP writes it.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    units: list[tuple[Unit, frozenset[str]]] = field(default_factory=list)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)

    @property
    def flat(self) -> dict[str, Any]:
        """All names, tensors and plain values, as DCP's planner wants them."""
        return {**self.tensors, **self.objects}


def snapshot(state: Mapping[str, Any], rank: int) -> Snapshot:
    """Take stock of an application's state without copying a tensor.

    Raises: ConfigError naming the path of a value that a checkpoint cannot hold, or of two values of one flat name.
    """
    return snapshot_of(nested(state, rank))


def snapshot_of(values: Mapping[str, Any]) -> Snapshot:
    """As `snapshot`, of a nested state dict."""
    result = Snapshot()
    for name, value in values.items():
        _check_key(name, "the state")
        entries = [(key, each, False) for key, each in value.items()] if isinstance(value, Mapping) else None
        for key, each, whole in entries if entries is not None else [(None, value, True)]:
            path: tuple[str | int, ...] = (name,) if whole else (name, str(key))
            names: set[str] = set()
            _collect(each, path, result, names)
            # Walked twice: once as DCP names things, once as our own exact encoding.
            unit = Unit(
                state=name,
                key=encode(key, f"{name} (key)"),
                whole=whole,
                value=encode(each, ".".join(map(str, path)), _ref),
            )
            result.units.append((unit, frozenset(names)))
    return result


def nested(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The state dicts of all objects: flat ones for modules and optimizers, what they give for all others."""
    result: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, torch.nn.Module):
            result[name] = get_model_state_dict(value)
        elif isinstance(value, torch.optim.Optimizer):
            result[name] = get_optimizer_state_dict(model_of(value, state), value, options=_FLAT)
        elif getattr(value, "per_rank", False):
            result[name] = {rank_key(rank): value.state_dict()}
        elif is_stateful(value):
            result[name] = value.state_dict()
        else:
            result[name] = value
    return result


def is_named(value: object) -> bool:
    """Whether an object's state is tensors under fixed names, which a checkpoint must match: a module or optimizer."""
    return isinstance(value, torch.nn.Module | torch.optim.Optimizer)


def is_stateful(value: object) -> bool:
    """Whether an object saves and loads itself."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def model_of(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> torch.nn.Module:
    """The module in `state` whose parameters an optimizer updates. Raises: ConfigError if there is none."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for value in state.values():
        if isinstance(value, torch.nn.Module) and wanted <= {id(each) for each in value.parameters()}:
            return value
    raise ConfigError(
        "the state holds an optimizer but not the module whose parameters it updates: add the module beside it "
        "(one module that holds all of them), because an optimizer is saved by its parameters' names"
    )


def put_back(state: MutableMapping[str, Any], name: str, values: Any, rank: int, from_other_rank: bool) -> None:
    """Give one object of the application the values that were restored for it."""
    target = state[name]
    if isinstance(target, torch.nn.Module):
        set_model_state_dict(target, values)
    elif isinstance(target, torch.optim.Optimizer):
        set_optimizer_state_dict(model_of(target, state), target, values, options=_FLAT)
    elif from_other_rank:
        target.load_from_other_rank(values, rank)
    elif is_stateful(target):
        target.load_state_dict(values)
    elif isinstance(target, MutableMapping):
        target.clear()
        target.update(values)
    else:
        state[name] = values


def mesh_of(tensors: Mapping[str, torch.Tensor]) -> Mesh | None:
    """The device mesh of the first sharded tensor, outermost axis first; None if nothing is sharded."""
    for tensor in tensors.values():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
            return Mesh(names=tuple(names), shape=tuple(mesh.shape))
    return None


def replace_refs(value: Any, load: Callable[[TensorRef], Any]) -> Any:
    """A decoded value with each reference replaced by its tensor."""
    if isinstance(value, TensorRef):
        return load(value)
    if type(value) is list:
        return [replace_refs(each, load) for each in value]
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = replace_refs(each, load)
    return value


def refs_in(value: Any) -> Iterator[TensorRef]:
    """The references in a decoded value."""
    if isinstance(value, TensorRef):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from refs_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from refs_in(each)


def _collect(value: Any, path: tuple[str | int, ...], result: Snapshot, names: set[str]) -> None:
    """Flatten as DCP does: dicts always, lists only where a tensor or a dict is below."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            _collect(each, (*path, str(key)), result, names)
        return
    if isinstance(value, list) and not _is_leaf(value):
        for i, each in enumerate(value):
            _collect(each, (*path, i), result, names)
        return
    name = ".".join(map(str, path))
    if name in result.paths:
        raise ConfigError(f"two values of the state have the flat name {name}: rename one of them")
    result.paths[name] = path
    names.add(name)
    (result.tensors if isinstance(value, torch.Tensor) else result.objects)[name] = value


def _is_leaf(value: list[Any]) -> bool:
    return not any(
        isinstance(each, (Mapping, torch.Tensor)) or (isinstance(each, list) and not _is_leaf(each)) for each in value
    )


def _ref(value: Any, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor_ref(path)
    if isinstance(value, torch.Size):
        return encode(tuple(value), path)
    return None


def _check_key(name: object, where: str) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"the keys of {where} are non-empty texts, not {name!r}")
