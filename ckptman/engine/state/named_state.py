"""The state of an application: how modules, optimizers, Stateful objects and plain values become names and back.

A flat name is the path joined by dots, exactly as torch's DCP flattens a nested state dict, so that
`torch.distributed.checkpoint.load` finds everything under the names it expects.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from xxhash import xxh3_128_hexdigest

from ckptman._torch_compat import full_names
from ckptman.engine.state.exact_load import loading_exactly
from ckptman.engine.state.file_layout import LARGE_BYTES
from ckptman.engine.state.local_shards import is_dense, memory_order, refuse_lazy
from ckptman.engine.state.modules import Trainable, is_prepared_loader, load_module, module_of, module_state
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
from ckptman.storage.format.value_codec import SEQUENCES, TensorRef, array_ref, encode, is_leaf, rebuilt, tensor_ref

_SHOWN = 80
"""Characters of a value in a message."""
_BELOW_A_BYTE = frozenset(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
_LARGE_ARRAY_BYTES = 4096
"""From so many bytes on an array of NumPy is saved as a tensor. A smaller one is a part of the index, as text."""


class _IsLargeArray(type):
    def __instancecheck__(cls, value: object) -> bool:
        if type(value).__module__ != "numpy" or type(value).__name__ != "ndarray":
            return False
        return value.nbytes >= _LARGE_ARRAY_BYTES and _tensor_of(value) is not None  # type: ignore[attr-defined]


class LargeArray(metaclass=_IsLargeArray):
    """What an array of NumPy that is saved as a tensor is an instance of."""


_LEAVES = (torch.Tensor, LargeArray)


def rank_key(rank: int) -> str:
    """The entry under which the state of one rank is saved, for objects that differ on each rank."""
    return f"rank-{rank:05d}"


class Encoded(NamedTuple):
    """One entry of the state, as `ckptman.storage.format.index.Unit` describes it; `names`: the flat names in it."""

    state: str
    key: Any
    whole: bool
    value: Any
    names: tuple[str, ...]

    def as_unit(self) -> dict[str, Any]:
        """What the index says of it."""
        return {"state": self.state, "key": self.key, "whole": self.whole, "value": self.value}


@dataclass
class Snapshot:
    """What one rank has to save.

    `tensors`: flat name to live tensor; `objects`: flat name to plain value, for other readers; `units`: the same plain
    values encoded, for ckptman itself; `paths`: flat name to its path as DCP writes it; `from_lowest`: flat
    names whose value must all come from one rank, the lowest that has them, because ranks may differ in them; `own`:
    keys of the state that each rank saves for itself; `tied`: flat names of parameters that are one.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    units: list[Encoded] = field(default_factory=list)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    from_lowest: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    tied: list[list[str]] = field(default_factory=list)

    def is_own(self, name: str) -> bool:
        """Whether a flat name is of something that each rank saves for itself."""
        return self.paths[name][0] in self.own


def snapshot(state: Mapping[str, Any], rank: int, *, strict: bool = True) -> Snapshot:
    """Take stock of an application's state without copying a tensor.

    Raises: ConfigError naming the path of a value that a checkpoint cannot hold, or of two values of one flat name.
    """
    values = nested(state, rank)
    if rank:
        values = {name: value for name, value in values.items() if not getattr(state[name], "from_rank0", False)}
    # Of optimizers DCP would have other names, so they need not be as it has them.
    optimizers = {name for name, value in state.items() if isinstance(value, torch.optim.Optimizer)}
    result = snapshot_of(values, strict={*values} if strict else optimizers)
    alike = set()
    for name, value in state.items():
        if (module := module_of(value)) is not None:
            alike |= {f"{name}.{each}" for each in parameter_names(module)}
            result.tied += [[f"{name}.{each}" for each in names] for names in _tied_in(module)]
        elif isinstance(value, torch.optim.Optimizer):
            alike |= {each for each in result.tensors if each.startswith(f"{name}.")}
    if not strict:  # as DCP: whoever has a tensor writes it; small ones still come from one rank
        sizes = {name: math.prod(each.shape) * each.dtype.itemsize for name, each in result.tensors.items()}
        alike |= {name for name, size in sizes.items() if size >= LARGE_BYTES}
    result.from_lowest = set(result.paths) - alike
    result.own = {name for name, value in state.items() if getattr(value, "per_rank", False)}
    return result


def snapshot_of(values: Mapping[str, Any], *, strict: Collection[str] | None = None) -> Snapshot:
    """As `snapshot`, of a nested state dict. Of what is not `strict`, what our encoding cannot hold is left to its
    pickle; None: all is strict."""
    result = Snapshot()
    for name, value in values.items():
        is_strict = strict is None or name in strict
        _check_key(name, "the state")
        # An empty mapping is a value too: an object without state is told apart from one that was not saved.
        entries = [(key, each, False) for key, each in value.items()] if isinstance(value, Mapping) else []
        for key, each, whole in entries or [(None, dict(value) if isinstance(value, Mapping) else value, True)]:
            path: tuple[str | int, ...] = (name,) if whole else (name, str(key))
            names: list[str] = []
            _collect(each, path, result, names, is_strict)
            if not is_strict and _is_pickled(each):
                continue
            # Walked twice: once as DCP names things, once as our own exact encoding.
            try:
                encoded = encode(each, ".".join(map(str, path)), _ref if is_strict else _exact_ref)
            except ConfigError:
                if is_strict:
                    raise
                continue
            code = key if type(key) is str else encode(key, f"{name} (key)")
            result.units.append(Encoded(name, code, whole, encoded, tuple(names)))
    return result


def nested(
    state: Mapping[str, Any],
    rank: int,
    saved: Mapping[str, Any] | None = None,
    form: Callable[[str], tuple[torch.Size, torch.dtype]] | None = None,
) -> dict[str, Any]:
    """The state dicts of all objects: flat ones for modules and optimizers, what they give for all others.

    `saved`: the values of a checkpoint; optimizers get the state that it has of them, to be filled. `form`: shape and
    dtype of its tensors.
    """
    result: dict[str, Any] = {}
    for name, value in state.items():
        asked = of_the_program(name, value, "state_dict", rank)
        if isinstance(value, torch.nn.Module):
            with asked:
                result[name] = module_state(value)
        elif isinstance(value, torch.optim.Optimizer):
            entries = saved.get(name) if saved is not None else None
            forms = {each.name: form(each.name) for each in refs_in(entries)} if form is not None else {}
            with asked:
                if entries is None or form is None:
                    result[name] = get_state(name, value, state)
                else:
                    result[name] = get_state_to_fill(name, value, state, entries, forms.__getitem__)
        elif getattr(value, "per_rank", False):
            with asked:
                held = value.state_dict()
            refuse_sharded("the state", name, value, held)
            inside = getattr(value, "value", None)
            if isinstance(inside, torch.optim.Optimizer):
                held = {**held, ORDER: names_in_order(inside, state)}
            result[name] = {rank_key(rank): held}
        elif is_stateful(value) and not is_prepared_loader(value):
            with asked:
                result[name] = value.state_dict()
        elif isinstance(value, DataLoader | Iterator):
            raise ConfigError(
                f"{name} is a {type(value).__name__}, which does not say where it is, so that a resumed run would see "
                f"other data: put ckptman.ResumableLoader(DataLoader(...)) into the state, and iterate that"
            )
        else:
            result[name] = value
    return result


def is_named(value: object) -> bool:
    """Whether an object's state is tensors under fixed names, which a checkpoint must match: a module or optimizer."""
    return isinstance(value, torch.nn.Module | torch.optim.Optimizer | Trainable)


def differs_on_ranks(value: object) -> bool:
    """Whether an object says that it need not be the same on every rank."""
    return bool(getattr(value, "per_rank", False) or getattr(value, "from_rank0", False))


def is_stateful(value: object) -> bool:
    """Whether an object saves and loads itself."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def check_plain_values(state: Mapping[str, Any]) -> None:
    """Refuse plain values that a checkpoint cannot hold. Raises: ConfigError, which names the first one."""
    plain = {name: value for name, value in state.items() if not is_stateful(value) and not is_named(value)}
    snapshot_of(nested(plain, 0))


def is_settled(state: Mapping[str, Any]) -> bool:
    """Whether a state already has all the tensors it will have: optimizers make theirs at their first step, and other
    objects are not asked before there was one."""
    optimizers = [each for each in state.values() if isinstance(each, torch.optim.Optimizer)]
    others = [each for each in state.values() if is_stateful(each) and not is_named(each)]
    return not others and all(each.state for each in optimizers)


def parameter_names(module: torch.nn.Module) -> set[str]:
    """The names of a module's parameters as its state dict has them; what else is in there are buffers."""
    return {each for name, _ in module.named_parameters(remove_duplicate=False) for each in full_names(module, name)}


def _tied_in(module: torch.nn.Module) -> list[list[str]]:
    """Return the names of each parameter that a module has in several places."""
    places: dict[int, list[str]] = {}
    for name, each in module.named_parameters(remove_duplicate=False):
        places.setdefault(id(each), []).append(name)
    tied = (names for names in places.values() if len(names) > 1)
    return [sorted(each for name in names for each in full_names(module, name)) for names in tied]


def added_entries(key: str, module: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """Return those of the flat names, without the module's key, that are in its state dict by code of its own: names of
    neither parameters nor buffers."""
    buffers = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    known = parameter_names(module) | {each for name in buffers for each in full_names(module, name)}
    entries = (name.removeprefix(f"{key}.") for name in names if name.startswith(f"{key}."))
    return [each for each in entries if each not in known]


def unlike_on_ranks(digests: Sequence[dict[tuple[str, str], str]]) -> tuple[str, int, int] | None:
    """The first object whose plain values differ between ranks, and two ranks, given `value_digests` of all ranks."""
    seen: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, each in enumerate(digests):
        for part, digest in each.items():
            first, known = seen.setdefault(part, (rank, digest))
            if known != digest:
                return part[0], first, rank
    return None


def value_texts(shot: Snapshot, name: str) -> dict[str, str]:
    """The plain values of one object as texts, by their flat names."""
    return {each: repr(value) for each, value in shot.objects.items() if shot.paths[each][0] == name}


def told_difference(name: str, first: int, second: int, texts: Sequence[dict[str, str]]) -> str:
    """What to say of an object that ranks do not have alike, given `value_texts` of those two ranks."""
    here, there = texts[first], texts[second]
    differing = [each for each in [*here, *there] if here.get(each) != there.get(each)]
    where = differing[0] if differing else name
    told = [f"{_short(each.get(where, 'not there'))} on rank {rank}" for each, rank in ((here, first), (there, second))]
    return (
        f"{where} is {told[0]} and {told[1]}, and only one would be saved: put ckptman.FromRank0(...) around {name!r} "
        f"in the state to save that of rank 0, or ckptman.PerRank(...) to save it for each rank"
    )


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def value_digests(shot: Snapshot, state: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """A digest of the plain values of each object that every rank should have alike. Those of an optimizer: where ranks
    have it for the same parameters, which are a part of the key."""
    parts: dict[tuple[str, str], list[Encoded]] = {}
    for unit in shot.units:
        target = state[unit.state]
        if isinstance(target, torch.optim.Optimizer):
            parts.setdefault((unit.state, str(unit.key).partition(".")[0]), []).append(unit)
        elif not (is_named(target) or differs_on_ranks(target)):
            parts.setdefault((unit.state, ""), []).append(unit)
    return {
        (name, kind and _digest([each.key for each in units])): _digest([each[:4] for each in units])
        for (name, kind), units in parts.items()
    }


def _digest(values: Sequence[Any]) -> str:
    return xxh3_128_hexdigest(json.dumps(values).encode())


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


def _collect(value: Any, path: tuple[str | int, ...], result: Snapshot, names: list[str], strict: bool) -> None:
    """Flatten as DCP does: dicts always, lists only where a tensor or a dict is below. If `strict`, tuples where a
    tensor is, which DCP pickles."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            _collect(each, (*path, str(key)), result, names, strict)
        return
    if isinstance(value, SEQUENCES if strict else list) and not is_leaf(value, _LEAVES):
        for i, each in enumerate(value):
            _collect(each, (*path, i), result, names, strict)
        return
    name = ".".join(map(str, path))
    if name in result.paths:
        raise ConfigError(f"two values of the state have the flat name {name}: rename one of them")
    if isinstance(value, torch.Tensor) and not is_dense(value):
        raise ConfigError(
            f"{name} is a nested or sparse tensor ({value.layout}), which has no shards: save it as a dense one "
            f"(to_dense(), to_padded_tensor()), or the tensors that it is made of"
        )
    if isinstance(value, torch.Tensor):
        refuse_lazy(name, value)
        if str(value.dtype) in _BELOW_A_BYTE:
            raise ConfigError(
                f"{name} is of {value.dtype}, of whose elements torch knows nothing: put it into the state as bytes, "
                f"view(torch.uint8)"
            )
    elif strict and isinstance(value, LargeArray):
        value = _tensor_of(value)
    result.paths[name] = path
    names.append(name)
    (result.tensors if isinstance(value, torch.Tensor) else result.objects)[name] = value


def _is_pickled(value: Any) -> bool:
    """Return whether a tensor is within a tuple or a deque, of which DCP makes one value."""
    if isinstance(value, (tuple, deque)):
        return not is_leaf(value, _LEAVES)
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(map(_is_pickled, inside))


def _ref(value: Any, path: str) -> Any:
    if isinstance(value, LargeArray):
        return array_ref(path)
    return encode(tuple(value), path) if isinstance(value, torch.Size) else _exact_ref(value, path)


def _tensor_of(array: Any) -> torch.Tensor | None:
    """Return a tensor in the memory of an array of NumPy, or in a copy of it; None: torch has no such dtype."""
    try:
        is_fit = array.flags.writeable and not any(stride < 0 for stride in array.strides)
        return torch.from_numpy(array if is_fit else array.copy())
    except (TypeError, ValueError):
        return None


def _exact_ref(value: Any, path: str) -> Any:
    return tensor_ref(path, memory_order(value)) if isinstance(value, torch.Tensor) else None


def _check_key(name: object, where: str) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"the keys of {where} are non-empty texts, not {name!r}")
