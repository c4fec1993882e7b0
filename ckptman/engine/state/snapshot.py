"""Snapshots: the tensors and plain values that one rank has to save, by flat names, without a copy of a tensor.

A snapshot is a part for each entry of the state. A part depends on its own entry, and the part of an optimizer on the
modules that name its parameters; so a save can keep the parts of what did not change (see `kept_parts`).
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

import torch
from xxhash import xxh3_128_hexdigest

from ckptman.engine.state.file_layout import LARGE_BYTES
from ckptman.engine.state.local_shards import is_dense, layout_of, memory_order, refuse_lazy
from ckptman.engine.state.modules import module_of, named_in_full
from ckptman.engine.state.named_state import (
    differs_on_ranks,
    is_named,
    is_stateful,
    nested,
    nested_entry,
    parameter_names,
)
from ckptman.errors import ConfigError
from ckptman.storage.format.value_codec import SEQUENCES, array_ref, encode, is_leaf, tensor_ref

_JSON = json.JSONEncoder(separators=(",", ":"))
_CONSTANTS = {None: "null", True: "true", False: "false"}
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


class Encoded(NamedTuple):
    """A unit: one entry of the state, as the text that `ckptman.storage.format.index.Unit` is read from.

    `names`: the flat names in it; `head`: the text up to its value; `text`: all of it.
    """

    state: str
    key: Any
    names: tuple[str, ...]
    head: str
    text: str

    def of_value(self, text: str) -> Encoded:
        """Return the same unit with a value of this text."""
        return Encoded(self.state, self.key, self.names, self.head, f"{self.head}{text}}}")


@dataclass(eq=False)
class Part:
    """What one entry of the state adds to a snapshot.

    Attributes:
        key: The key of the entry.
        tensors: Flat name to live tensor.
        objects: Flat name to plain value, for other readers.
        units: The same plain values encoded, for ckptman itself.
        paths: Flat name to its path as DCP writes it.
        alike: The names whose values are the same on all ranks, so that any rank may save them.
        is_own: Whether each rank saves the entry for itself.
        tied: Flat names of parameters that are one.
    """

    key: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    units: list[Encoded] = field(default_factory=list)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    alike: set[str] = field(default_factory=set)
    is_own: bool = False
    tied: list[list[str]] = field(default_factory=list)

    @cached_property
    def signature(self) -> int:
        """Changes when a plan of it would be another one. Means nothing in other processes."""
        tensors = [
            (name, each.dtype, each.shape, each.layout, each.device, layout_of(each))
            for name, each in self.tensors.items()
        ]
        units = [(unit.state, str(unit.key)) for unit in self.units]
        return hash((tuple(tensors), tuple(self.paths.items()), tuple(units)))


class Snapshot:
    """What one rank has to save, as its parts and, put together when first asked for, as what they add up to."""

    def __init__(self, parts: Sequence[Part] = ()) -> None:
        self.parts = parts

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Flat name to live tensor."""
        return _merged([each.tensors for each in self.parts])

    @cached_property
    def objects(self) -> dict[str, Any]:
        """Flat name to plain value."""
        return _merged([each.objects for each in self.parts])

    @cached_property
    def units(self) -> list[Encoded]:
        """The plain values, encoded."""
        return [unit for each in self.parts for unit in each.units]

    @cached_property
    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """Flat name to its path."""
        return _merged([each.paths for each in self.parts])

    @cached_property
    def from_lowest(self) -> set[str]:
        """Flat names whose value must all come from one rank, the lowest that has them, as ranks may differ in them."""
        return {name for each in self.parts for name in each.paths.keys() - each.alike}

    @cached_property
    def own(self) -> set[str]:
        """Keys of the state that each rank saves for itself."""
        return {each.key for each in self.parts if each.is_own}

    @property
    def tied(self) -> list[list[str]]:
        """Flat names of parameters that are one."""
        return [names for each in self.parts for names in each.tied]

    @property
    def signature(self) -> int:
        """Changes when a plan would be another one. Means nothing in other processes."""
        return hash(tuple((each.key, each.signature) for each in self.parts))

    def is_own(self, name: str) -> bool:
        """Return whether a flat name belongs to something that each rank saves for itself."""
        return bool(self.own) and self.paths[name][0] in self.own

    def refuse_equal_names(self, walked: Sequence[Part]) -> None:
        """Refuse that two entries give the same flat name, one of which is among those. Raises: ConfigError."""
        known: set[str] = set()
        for part in walked:
            known.update(part.paths)
        if len(known) < sum(len(part.paths) for part in walked):
            counts = Counter(name for part in walked for name in part.paths)
            raise _equal_names(next(name for name, count in counts.items() if count > 1))
        for part in self.parts:
            if part not in walked and not known.isdisjoint(part.paths):
                raise _equal_names(next(name for name in part.paths if name in known))


def snapshot(state: Mapping[str, Any], rank: int, *, strict: bool = True) -> Snapshot:
    """Take stock of an application's state without copying a tensor.

    Raises: ConfigError naming the path of a value that a checkpoint cannot hold, or of two values of one flat name.
    """
    result = Snapshot([part_of(name, state, rank, strict=strict) for name in state])
    result.refuse_equal_names(result.parts)
    return result


def part_of(name: str, state: Mapping[str, Any], rank: int, *, strict: bool = True) -> Part:
    """Take stock of one entry. Raises: ConfigError, as `snapshot`."""
    value = state[name]
    held = nested_entry(name, state, rank)
    if rank and getattr(value, "from_rank0", False):
        return Part(name)
    # Of optimizers DCP would have other names, so they need not be as it has them.
    result = _part(name, held, strict=strict or isinstance(value, torch.optim.Optimizer))
    if (module := module_of(value)) is not None:
        result.alike = {f"{name}.{each}" for each in parameter_names(module)}
        result.tied = [[f"{name}.{each}" for each in names] for names in _tied_in(module)]
    elif isinstance(value, torch.optim.Optimizer):
        result.alike = {*result.tensors}
    if not strict:  # as DCP: whoever has a tensor writes it; small ones still come from one rank
        sizes = {name: math.prod(each.shape) * each.dtype.itemsize for name, each in result.tensors.items()}
        result.alike |= {name for name, size in sizes.items() if size >= LARGE_BYTES}
    result.is_own = bool(getattr(value, "per_rank", False))
    return result


def snapshot_of(values: Mapping[str, Any], *, strict: bool = True) -> Snapshot:
    """As `snapshot`, of a nested state dict. If not `strict`, a value that our encoding cannot hold is left to its
    pickle."""
    result = Snapshot([_part(name, value, strict=strict) for name, value in values.items()])
    result.refuse_equal_names(result.parts)
    return result


def _part(name: str, value: Any, *, strict: bool) -> Part:
    result = Part(name)
    _check_key(name, "the state")
    # An empty mapping is a value too: an object without state is told apart from one that was not saved.
    entries = [(key, each, False) for key, each in value.items()] if isinstance(value, Mapping) else []
    state = f'{{"state":{text_of(name)},"key":'
    for key, each, whole in entries or [(None, dict(value) if isinstance(value, Mapping) else value, True)]:
        path: tuple[str | int, ...] = (name,) if whole else (name, str(key))
        names: list[str] = []
        _collect(each, path, ".".join(map(str, path)), result, names, strict)
        if not strict and _is_pickled(each):
            continue
        # Walked twice: once as DCP names things, once as our own exact encoding.
        try:
            encoded = encode(each, ".".join(map(str, path)), _ref if strict else _exact_ref)
        except ConfigError:
            if strict:
                raise
            continue
        code = key if type(key) is str else encode(key, f"{name} (key)")
        head = f'{state}{text_of(code)},"whole":{text_of(whole)},"value":'
        result.units.append(Encoded(name, code, tuple(names), head, f"{head}{text_of(encoded)}}}"))
    return result


def text_of(encoded: Any) -> str:
    """Return the JSON text of an encoded value."""
    kind = type(encoded)
    if kind is str:
        return encode_basestring_ascii(encoded)
    if kind is float or kind is int:
        return repr(encoded)
    return _CONSTANTS[encoded] if encoded is None or kind is bool else _JSON.encode(encoded)


def _merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(parts) == 1:
        return parts[0]
    result: dict[str, Any] = {}
    for each in parts:
        result.update(each)
    return result


def _equal_names(name: str) -> ConfigError:
    return ConfigError(f"two values of the state have the flat name {name}: rename one of them")


def check_plain_values(state: Mapping[str, Any]) -> None:
    """Refuse plain values that a checkpoint cannot hold. Raises: ConfigError, which names the first one."""
    plain = {name: value for name, value in state.items() if not is_stateful(value) and not is_named(value)}
    snapshot_of(nested(plain, 0))


def _tied_in(module: torch.nn.Module) -> list[list[str]]:
    """Return the names of each parameter that a module has in several places."""
    places: dict[int, list[Collection[str]]] = {}
    for names, each in named_in_full(module):
        places.setdefault(id(each), []).append(names)
    return [sorted(name for names in found for name in names) for found in places.values() if len(found) > 1]


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


class Digested:
    """What of the plain values of an entry every rank should have alike. The values of an optimizer: if ranks have them
    for the same parameters, which are a part of the key."""

    def __init__(self, part: Part, target: object) -> None:
        self._places: dict[tuple[str, str], list[int]] = {}
        """The numbers of the units, by the key of their digest."""
        kinds: dict[str, list[int]] = {}
        if isinstance(target, torch.optim.Optimizer):
            for number, unit in enumerate(part.units):
                kinds.setdefault(unit.key.partition(".")[0] if type(unit.key) is str else "", []).append(number)
        elif part.units and not is_named(target) and not differs_on_ranks(target):
            kinds[""] = [*range(len(part.units))]
        for kind, numbers in kinds.items():
            self._places[part.key, kind and _digest([part.units[each].head for each in numbers])] = numbers

    def digests(self, part: Part) -> dict[tuple[str, str], str]:
        """Return a digest of each, of a part that has the same units with values of now."""
        units = part.units
        return {key: _digest([units[each].text for each in numbers]) for key, numbers in self._places.items()}


def _digest(texts: Sequence[str]) -> str:
    return xxh3_128_hexdigest("\n".join(texts).encode())


def _collect(value: Any, path: tuple[str | int, ...], name: str, result: Part, names: list[str], strict: bool) -> None:
    """Flatten as DCP does: dicts always, lists only where a tensor or a dict is below. If `strict`, tuples where a
    tensor is, which DCP pickles."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            _collect(each, (*path, str(key)), f"{name}.{key}", result, names, strict)
        return
    if isinstance(value, SEQUENCES if strict else list) and not is_leaf(value, _LEAVES):
        for i, each in enumerate(value):
            _collect(each, (*path, i), f"{name}.{i}", result, names, strict)
        return
    if name in result.paths:
        raise _equal_names(name)
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
