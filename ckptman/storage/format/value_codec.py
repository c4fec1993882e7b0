"""Plain Python values as JSON and back, exactly: types, integer keys, NaN and bytes included. No byte can run code.

Scalars, lists and dicts with text keys are themselves; everything else is `{"~": kind, "v": ...}`. A tensor is a
reference to the flat name under which its bytes are saved. What has no exact form is refused with its path.

Enum members and dataclasses are stored with the name of their class. They are decoded as instances of the class if the
program has imported it and it still fits, otherwise as an `OpaqueValue`. Decoding imports nothing and runs no method of
a dataclass.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

from ckptman.errors import ConfigError, CorruptError

MAX_DEPTH = 64
"""Containers in containers. JSON in between goes three levels deeper for each, and its parsers have limits."""
_MAX_JSON_DEPTH = 3 * MAX_DEPTH + 4
_KIND = "~"
_JSON_INT = 2**63
"""Integers beyond 64 bits go as hexadecimal text: other readers of JSON have no more, Python's refuses 4,300 digits."""
_NUMBERS = "biufc"
"""Kinds of numpy dtype: bool, signed and unsigned integer, float, complex."""
_NOTHING = object()
SEQUENCES = (list, tuple, deque)
"""Containers that may hold tensors, besides dicts."""
_PLAIN_FORMS = ("dataclasses.asdict(...)", ".value of the member")


@dataclass(frozen=True)
class TensorRef:
    """Stands for the tensor that is saved under this flat name.

    `order`: its dimensions as they lie in memory, from the widest stride on, where it was transposed; else ().
    `is_array`: it was an array of NumPy, whose bytes are saved as those of a tensor.
    """

    name: str
    order: tuple[int, ...] = field(default=(), compare=False)
    is_array: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class OpaqueValue:
    """An enum member or a dataclass instance whose class is not imported here, or no longer fits.

    `kind`: name of the class; `value`: the value of the enum member, or the fields of the dataclass; `why`: what is
    wrong with the class; `text`: `str` of an enum member, which is a part of flat names if it is a key.
    """

    kind: str
    value: Any
    why: str = field(compare=False)
    text: str = ""

    def __hash__(self) -> int:
        return hash(self.kind)

    def __repr__(self) -> str:
        return f"{self.kind.rpartition(':')[2]}({self.value!r})"

    def __str__(self) -> str:
        return self.text or repr(self)


def plain_value(value: Any) -> Any:
    """Return a decoded value with each `OpaqueValue` in it replaced by the plain value or the dict of fields."""
    if isinstance(value, OpaqueValue):
        return plain_value(value.value)
    if isinstance(value, dict):
        return type(value)({_plain_key(key): plain_value(each) for key, each in value.items()})
    if isinstance(value, (set, frozenset)):
        return type(value)(map(_plain_key, value))
    return rebuilt(value, map(plain_value, value)) if isinstance(value, SEQUENCES) else value


def _plain_key(key: Any) -> Any:
    plain = plain_value(key)
    try:
        hash(plain)
    except TypeError:
        return str(key)
    return plain


def opaque_in(value: Any, path: str) -> Iterator[tuple[str, OpaqueValue]]:
    """Yield each `OpaqueValue` in a decoded value, with its path."""
    if isinstance(value, OpaqueValue):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from opaque_in(key, f"{path} (key)")
            yield from opaque_in(each, f"{path}.{key}")
    elif isinstance(value, (*SEQUENCES, set, frozenset)):
        for number, each in enumerate(value):
            yield from opaque_in(each, f"{path}.{number}")


Keys = tuple[str | int, ...]
"""From the top of a state down to a value, as torch's DCP has it: keys as texts, and numbers of list entries."""
Hook = Callable[[Any, str], Any]
"""Encodes what this module does not know (tensors): given value and path, returns a TensorRef, dict or None."""


def encode(value: Any, path: str, hook: Hook | None = None, depth: int = 0) -> Any:
    """Return a JSON-able form of `value`, which is in `depth` containers.

    Raises: ConfigError, naming the path of what cannot be represented.
    """
    kind = type(value)
    if kind is int and not -_JSON_INT <= value < _JSON_INT:
        return _tagged("int", hex(value))
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else _tagged("float", repr(value))
    if depth == MAX_DEPTH:
        raise ConfigError(f"{path} is nested deeper than {MAX_DEPTH} levels (does it hold itself?): save it flatter")
    if kind is list:
        return [encode(each, f"{path}.{i}", hook, depth + 1) for i, each in enumerate(value)]
    if kind is dict:
        if _KIND not in value and all(type(key) is str for key in value):
            return {key: encode(each, f"{path}.{key}", hook, depth + 1) for key, each in value.items()}
        return _tagged("dict", _pairs(value, path, hook, depth + 1))
    if kind in (OrderedDict, Counter):
        return _tagged(kind.__name__, _pairs(value, path, hook, depth + 1))
    if kind is tuple or kind is deque:
        members = [encode(each, f"{path}.{i}", hook, depth + 1) for i, each in enumerate(value)]
        return _tagged("tuple", members) if kind is tuple else _tagged("deque", [members, value.maxlen])
    if kind in (set, frozenset):
        members = [encode(each, f"{path}.{i}", None, depth + 1) for i, each in enumerate(value)]
        # In a fixed order, so that equal sets are equal bytes.
        return _tagged(kind.__name__, sorted(members, key=json.dumps))
    if kind in (bytes, bytearray):
        return _tagged(kind.__name__, base64.b64encode(value).decode())
    if kind is complex:
        return _tagged("complex", [repr(value.real), repr(value.imag)])
    if f"{kind.__module__}.{kind.__name__}" == "torch.dtype":
        return _tagged("dtype", str(value).removeprefix("torch."))
    if kind is type(Path()):
        return _tagged("path", str(value))
    if isinstance(value, Enum):
        return _tagged("enum", [_class_name(kind, path), encode(value.value, path, None, depth + 1), str(value)])
    if path.endswith(" (key)") and is_dataclass(value):
        raise ConfigError(f"{path} is a dataclass, which a checkpoint cannot hold as a key: use a tuple of its fields")
    if _is_plain_dataclass(value):
        if unset := [each.name for each in fields(value) if not hasattr(value, each.name)]:
            raise ConfigError(f"{path} is a {kind.__qualname__} whose field {unset[0]} is not set: set it, to None say")
        held = {each.name: getattr(value, each.name) for each in fields(value)}
        return _tagged("dataclass", [_class_name(kind, path), _pairs(held, path, None, depth + 1)])
    encoded = hook(value, path) if hook is not None else None
    if encoded is None:
        encoded = _encode_numpy(value)
    if encoded is not None:
        return encoded
    if hook is None and kind.__module__.partition(".")[0] == "torch" and kind.__name__ in ("Tensor", "Parameter"):
        raise ConfigError(
            f"{path} is a tensor in a set or a dataclass, which a checkpoint cannot hold: put it into a list or a dict"
        )
    what = f"{path} is a {kind.__module__}.{kind.__qualname__}"
    raise ConfigError(f"{what}, which a checkpoint cannot hold: save {_way_out(value, path)}")


def _way_out(value: Any, path: str) -> str:
    """Return what to save in place of a value that has no exact form."""
    kind: Any = type(value)
    if isinstance(value, type) or (callable(value) and type(value).__module__ in ("builtins", "functools")):
        return "what it is made from, or leave it out: a function is part of the program, not of its state"
    if type(value).__module__ in ("argparse", "types") and hasattr(value, "__dict__"):
        return f"vars({path.rpartition('.')[2]})"
    if getattr(value, "__dict__", None) and kind.__new__ is object.__new__:  # no string or array of its own
        return f"vars({path.rpartition('.')[2]}), or give its class state_dict() and load_state_dict()"
    return "plain values, containers and tensors (its text, for example)"


def _is_plain_dataclass(value: Any) -> bool:
    """Return whether a value is its fields and nothing else."""
    if not is_dataclass(value) or isinstance(value, type) or type(value).__new__ is not object.__new__:
        return False
    return {each.name for each in fields(value)}.issuperset(getattr(value, "__dict__", ()))


def _class_name(kind: type, path: str) -> str:
    """Return the name under which a restore finds a class. Raises: ConfigError: it finds none."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _find_class(name) is not kind:
        raise ConfigError(
            f"{path} is of the class {kind.__qualname__}, which a restore cannot find by this name: define the class "
            f"at the top level of a module, or save the plain value ({_PLAIN_FORMS[issubclass(kind, Enum)]})"
        )
    return name


def tensor_ref(name: str, order: Sequence[int] = ()) -> Any:
    """Return the encoded form of a tensor saved under `name`, whose dimensions are in this order in memory."""
    return _tagged("tensor", [name, *order] if order else name)


def array_ref(name: str) -> Any:
    """Return the encoded form of an array of NumPy that is saved as a tensor under `name`."""
    return _tagged("array", name)


def decode(data: Any) -> Any:
    """Return the value that was encoded; tensors come back as `TensorRef`. Raises: CorruptError."""
    if _is_too_deep(data):
        raise CorruptError("an encoded value is nested too deeply to be one that ckptman wrote")
    return _decode(data)


def leaves_in(value: Any, leaves: tuple[type, ...] = (TensorRef,), path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield what is below a decoded state, each with its path, as DCP flattens it: keys of dicts are texts, and lists
    are gone into where a dict or one of `leaves` is below. An empty dict is a leaf."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from leaves_in(each, leaves, (*path, str(key)))
    elif isinstance(value, SEQUENCES) and not is_leaf(value, leaves):
        for number, each in enumerate(value):
            yield from leaves_in(each, leaves, (*path, number))
    else:
        yield path, value


def paths_in(value: Any, leaves: tuple[type, ...] = (TensorRef,)) -> Iterator[tuple[str, Keys]]:
    """Yield the flat names of a decoded state, each with its path. DCP has no name for an empty dict."""
    for path, leaf in leaves_in(value, leaves):
        if not isinstance(leaf, dict):
            yield ".".join(map(str, path)), path


def without(value: Any, is_excluded: Callable[[Keys], bool]) -> Any:
    """Return a decoded state without the leaves whose paths are excluded, and without what holds nothing else.

    In a list that keeps other entries, None takes their place, so that what follows keeps its name.
    """
    kept = _without(value, (), is_excluded)
    return {} if kept is _NOTHING else kept


def is_leaf(value: Sequence[Any], leaves: tuple[type, ...] = (TensorRef,)) -> bool:
    """Return whether a sequence is kept as one value: a list with no dict or tensor in it, as DCP has it; a tuple or a
    deque with no tensor."""
    if isinstance(value, list):
        return not any(
            isinstance(each, (dict, *leaves)) or (isinstance(each, SEQUENCES) and not is_leaf(each, leaves))
            for each in value
        )
    return not any(_is_in(each, leaves) for each in value)


def rebuilt(like: Any, members: Iterable[Any]) -> Any:
    """Return a sequence of the kind of `like`."""
    return deque(members, like.maxlen) if isinstance(like, deque) else type(like)(members)


def _is_in(value: Any, leaves: tuple[type, ...]) -> bool:
    """Return whether one of `leaves` is in a value."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, SEQUENCES) else ()
    return isinstance(value, leaves) or any(_is_in(each, leaves) for each in inside)


def _without(value: Any, path: Keys, is_excluded: Callable[[Keys], bool]) -> Any:
    if isinstance(value, dict) and value:
        each = {key: _without(below, (*path, str(key)), is_excluded) for key, below in value.items()}
        return {key: below for key, below in each.items() if below is not _NOTHING} or _NOTHING
    if isinstance(value, SEQUENCES) and not is_leaf(value):
        entries = [_without(below, (*path, number), is_excluded) for number, below in enumerate(value)]
        left = rebuilt(value, [None if below is _NOTHING else below for below in entries])
        return left if any(below is not _NOTHING for below in entries) else _NOTHING
    return _NOTHING if is_excluded(path) else value


def _pairs(value: Any, path: str, hook: Hook | None, depth: int) -> list[Any]:
    return [
        [encode(key, f"{path} (key)", None, depth), encode(each, f"{path}.{key}", hook, depth)]
        for key, each in value.items()
    ]


def _encode_numpy(value: Any) -> dict[str, Any] | None:
    """Arrays and scalars of numbers; None for all else, and for subclasses, which would come back as something else."""
    if type(value).__module__ != "numpy":
        return None
    import numpy

    if not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)) or value.dtype.kind not in _NUMBERS:
        return None
    data = base64.b64encode(value.tobytes()).decode()
    return _tagged("numpy", [value.dtype.str, list(value.shape), data, type(value) is numpy.ndarray])


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {_KIND: kind, "v": value}


def _is_too_deep(data: Any) -> bool:
    level = [data]
    for _ in range(_MAX_JSON_DEPTH):
        level = [
            each
            for held in level
            for each in (held.values() if isinstance(held, dict) else held if isinstance(held, list) else ())
            if isinstance(each, (dict, list))
        ]
        if not level:
            return False
    return True


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(each) for each in data]
    if not isinstance(data, dict):
        return data
    if _KIND not in data:
        return {key: _decode(each) for key, each in data.items()}
    kind = data[_KIND]
    try:
        if data.keys() != {_KIND, "v"}:
            raise ValueError(f"it has the keys {sorted(data)}")
        return _DECODERS[kind](data["v"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CorruptError(f"an encoded value of kind {str(kind)[:40]!r} cannot be read: {error!r}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of text")
    return value


def _members(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{type(value).__name__} instead of a list")
    return value


def _unpairs(pairs: Any) -> dict[Any, Any]:
    return {_decode(key): _decode(each) for key, each in map(_members, _members(pairs))}


def _decode_bytes(text: Any) -> bytes:
    return base64.b64decode(_text(text), validate=True)


def _decode_complex(parts: Any) -> complex:
    real, imag = _members(parts)
    return complex(float(_text(real)), float(_text(imag)))


def _decode_numpy(parts: Any) -> Any:
    import numpy

    name, shape, data, is_array = _members(parts)
    dtype = numpy.dtype(_text(name))
    if dtype.kind not in _NUMBERS or any(type(size) is not int or size < 0 for size in _members(shape)):
        raise ValueError(f"no array of numbers: {name!r} {shape}")
    array = numpy.frombuffer(_decode_bytes(data), dtype=dtype).reshape(shape).copy()
    return array if is_array else array[()]


def _find_class(name: Any) -> Any:
    """Return what a name is in the modules that are imported; None: nothing. No lazy attribute is asked for."""
    module, _, path = _text(name).partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


def _decode_tensor(written: Any) -> TensorRef:
    name, *order = written if isinstance(written, list) else [written]
    if sorted(order) != list(range(len(order))) or (isinstance(written, list) and not order):
        raise ValueError(f"no order of dimensions: {order}")
    return TensorRef(_text(name), tuple(order))


def _decode_dtype(name: Any) -> Any:
    torch = sys.modules.get("torch")
    found = None if torch is None else vars(torch).get(_text(name))
    if torch is None or not isinstance(found, torch.dtype):
        return OpaqueValue("torch:dtype", name, "the program has not imported torch, or one without this dtype")
    return found


def _decode_deque(parts: Any) -> Any:
    members, maxlen = _members(parts)
    return deque(map(_decode, _members(members)), maxlen)


def _decode_enum(parts: Any) -> Any:
    name, encoded, text = _members(parts)
    kind, value = _find_class(name), _decode(encoded)
    if kind is None or not issubclass(kind, Enum):
        return OpaqueValue(name, value, "the program has not imported this enum", _text(text))
    try:
        return kind(value)
    except (TypeError, ValueError):
        return OpaqueValue(name, value, f"the enum has no value {value!r} any more", _text(text))


def _decode_dataclass(parts: Any) -> Any:
    name, pairs = _members(parts)
    kind, values = _find_class(name), _unpairs(pairs)
    if kind is None or not is_dataclass(kind) or kind.__new__ is not object.__new__:
        return OpaqueValue(name, values, "the program has not imported this dataclass")
    if inner := [each for _, each in opaque_in(values, "")]:
        return OpaqueValue(name, values, f"in it {inner[0].why}")
    if differ := sorted(map(str, values.keys() ^ {each.name for each in fields(kind)})):
        return OpaqueValue(name, values, f"the dataclass has other fields than when it was saved: {', '.join(differ)}")
    made: Any = object.__new__(cast(type, kind))
    for each, value in values.items():
        object.__setattr__(made, each, value)
    return made


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda v: int(_text(v), 16),
    "float": lambda v: float(_text(v)),
    "complex": _decode_complex,
    "dict": _unpairs,
    "OrderedDict": lambda v: OrderedDict(_unpairs(v)),
    "Counter": lambda v: Counter(_unpairs(v)),
    "tuple": lambda v: tuple(_decode(each) for each in _members(v)),
    "deque": _decode_deque,
    "dtype": _decode_dtype,
    "set": lambda v: {_decode(each) for each in _members(v)},
    "frozenset": lambda v: frozenset(_decode(each) for each in _members(v)),
    "bytes": _decode_bytes,
    "bytearray": lambda v: bytearray(_decode_bytes(v)),
    "tensor": _decode_tensor,
    "array": lambda v: TensorRef(_text(v), is_array=True),
    "numpy": _decode_numpy,
    "path": lambda v: Path(_text(v)),
    "enum": _decode_enum,
    "dataclass": _decode_dataclass,
}
