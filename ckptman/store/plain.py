"""Plain Python values as JSON and back, exactly: types, integer keys, NaN and bytes included. No byte can run code.

Scalars, lists and dicts with text keys are themselves; everything else is `{"~": kind, "v": ...}`. A tensor is a
reference to the flat name under which its bytes are saved. What has no exact form is refused with its path.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptman.errors import ConfigError, CorruptError

_KIND = "~"


@dataclass(frozen=True)
class TensorRef:
    """Stands for the tensor that is saved under this flat name."""

    name: str


Hook = Callable[[Any, str], Any]
"""Encodes what this module does not know (tensors): given value and path, returns a TensorRef, dict or None."""


def encode(value: Any, path: str, hook: Hook | None = None) -> Any:
    """A JSON-able form of `value`. Raises: ConfigError, naming the path of what cannot be represented."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else _tagged("float", repr(value))
    if kind is list:
        return [encode(each, f"{path}.{i}", hook) for i, each in enumerate(value)]
    if kind is dict:
        if _KIND not in value and all(type(key) is str for key in value):
            return {key: encode(each, f"{path}.{key}", hook) for key, each in value.items()}
        return _tagged("dict", _pairs(value, path, hook))
    if kind in (OrderedDict, Counter):
        return _tagged(kind.__name__, _pairs(value, path, hook))
    if kind in (tuple, set, frozenset):
        # Members of a set in a fixed order, so that equal sets are equal bytes.
        members = value if kind is tuple else sorted(value, key=repr)
        return _tagged(kind.__name__, [encode(each, f"{path}.{i}") for i, each in enumerate(members)])
    if kind in (bytes, bytearray):
        return _tagged(kind.__name__, base64.b64encode(value).decode())
    if kind is complex:
        return _tagged("complex", repr(value))
    if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
        return _encode_numpy(value, path)
    encoded = hook(value, path) if hook else None
    if encoded is not None:
        return encoded
    raise ConfigError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: "
        f"save plain values, containers and tensors (a state_dict of it, or its text)"
    )


def tensor_ref(name: str) -> Any:
    """The encoded form of a tensor saved under `name`."""
    return _tagged("tensor", name)


def decode(data: Any) -> Any:
    """The value that was encoded; tensors come back as `TensorRef`. Raises: CorruptError."""
    if isinstance(data, list):
        return [decode(each) for each in data]
    if not isinstance(data, dict):
        return data
    if _KIND not in data:
        return {key: decode(each) for key, each in data.items()}
    try:
        return _DECODERS[data[_KIND]](data["v"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"an encoded value of kind {data.get(_KIND)!r} cannot be read: {error}") from error


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {_KIND: kind, "v": value}


def _pairs(value: Any, path: str, hook: Hook | None) -> list[Any]:
    return [[encode(key, f"{path} (key)"), encode(each, f"{path}.{key}", hook)] for key, each in value.items()]


def _unpairs(pairs: Any) -> list[tuple[Any, Any]]:
    return [(decode(key), decode(each)) for key, each in pairs]


def _encode_numpy(value: Any, path: str) -> dict[str, Any]:
    if value.dtype.kind not in "biufc":
        raise ConfigError(f"{path} is a numpy array of {value.dtype}, which a checkpoint cannot hold: save numbers")
    data = base64.b64encode(value.tobytes()).decode()
    return _tagged("numpy", [value.dtype.str, list(value.shape), data, type(value).__name__ == "ndarray"])


def _decode_numpy(parts: Any) -> Any:
    import numpy

    dtype, shape, data, is_array = parts
    array = numpy.frombuffer(base64.b64decode(data), dtype=numpy.dtype(dtype)).reshape(shape).copy()
    return array if is_array else array[()]


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": complex,
    "dict": lambda v: dict(_unpairs(v)),
    "OrderedDict": lambda v: OrderedDict(_unpairs(v)),
    "Counter": lambda v: Counter(dict(_unpairs(v))),
    "tuple": lambda v: tuple(decode(each) for each in v),
    "set": lambda v: {decode(each) for each in v},
    "frozenset": lambda v: frozenset(decode(each) for each in v),
    "bytes": base64.b64decode,
    "bytearray": lambda v: bytearray(base64.b64decode(v)),
    "tensor": TensorRef,
    "numpy": _decode_numpy,
}
