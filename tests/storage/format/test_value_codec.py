"""Plain values as JSON and back: exactly what was put in, or a refusal that names where; and no byte runs code."""

import datetime
import json
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path, PurePath

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from ckptman.errors import ConfigError, CorruptError
from ckptman.storage.format.index import Index, Unit
from ckptman.storage.format.value_codec import (
    MAX_DEPTH,
    OpaqueValue,
    TensorRef,
    decode,
    encode,
    opaque_in,
    paths_in,
    plain_value,
    tensor_ref,
)


def there_and_back(value):
    """Through everything that a value goes through: encoding, the text of an index file, and decoding."""
    unit = Unit(state="app", whole=True, value=encode(value, "app"))
    return decode(Index.model_validate(json.loads(Index(units=[unit]).to_json())).units[0].value)


def same(one, two):
    """Equal in type and bits: 1 is not True, -0.0 is not 0.0, and NaN is NaN."""
    if type(one) is not type(two):
        return False
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(two)) or struct.pack("d", one) == struct.pack("d", two)
    if isinstance(one, complex):
        return same(one.real, two.real) and same(one.imag, two.imag)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return same(list(one), list(two)) and same(list(one.values()), list(two.values()))
    if isinstance(one, set | frozenset):
        return len(one) == len(two) and all(any(same(each, other) for other in two) for each in one)
    if isinstance(one, numpy.ndarray | numpy.generic):
        return bool(one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes())
    return bool(one == two)


number_types = numpy_st.integer_dtypes() | numpy_st.floating_dtypes() | numpy_st.complex_number_dtypes()
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.text(st.characters()),  # surrogates too
    st.sampled_from(["~", "v", "", "nan", "\ud800", "\0", -0.0, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1]),
    st.binary(),
)
hashable = st.recursive(scalars, lambda below: st.tuples(below, below) | st.frozensets(below, max_size=4), max_leaves=6)
values = st.recursive(
    scalars | st.binary().map(bytearray) | numpy_st.arrays(number_types, numpy_st.array_shapes(min_dims=0, min_side=0)),
    lambda below: st.one_of(
        st.lists(below, max_size=4),
        st.tuples(below, below),
        st.dictionaries(st.text(), below, max_size=4),
        st.dictionaries(hashable, below, max_size=4),
        st.dictionaries(hashable, below, max_size=4).map(OrderedDict),
        st.dictionaries(hashable, st.integers(), max_size=4).map(Counter),
        st.sets(hashable, max_size=4),
        st.frozensets(hashable, max_size=4),
    ),
    max_leaves=20,
)


class Colour(IntEnum):
    RED = 1


@dataclass
class Config:
    name: str
    options: dict = field(default_factory=dict)
    more: object = None


@dataclass(frozen=True)
class Key:
    number: int


@dataclass
class Failure(Exception):
    text: str


@given(values)
@settings(max_examples=200, deadline=None)
def test_any_value_comes_back_exactly(value):
    back = there_and_back(value)
    assert same(value, back), f"{value!r} came back as {back!r}"
    json.dumps(encode(value, "app"), allow_nan=False)  # any reader of JSON can read it


@pytest.mark.parametrize(
    "value",
    [
        {True: "bool"},
        {1: "int", "1": "text", 1.5: "float", None: "none", (1, (2, b"3")): "tuple", math.inf: "inf"},
        {"~": "float", "v": "nan"},
        {"~": 1},
        OrderedDict([("b", 1), ("a", 2)]),
        Counter({"lost": -3, "none": 0, "half": 0.5}),
        10**5000,
        -(10**5000),
        numpy.float32(0.1),
        numpy.float64(-0.0),
        numpy.bool_(True),
        numpy.int64(-(2**63)),
        numpy.array(5),
        numpy.arange(6, dtype=">i2").reshape(2, 3).T,
        numpy.zeros((0, 3)),
        numpy.array([math.nan, -math.inf]),
        {"rng": (3, tuple(range(625)), None)},  # random.getstate()
        {"runs": [Path("/a/b"), Path("c")], Path("x"): 1},
        [Colour.RED, {"a": (Colour.RED,)}],
        Config("adamw", {"lr": 0.1}, [Colour.RED, Config("sgd")]),
    ],
    ids=lambda value: "" if type(value) is int else repr(value)[:30],
)
def test_values_that_others_get_wrong(value):
    assert same(value, there_and_back(value))


def test_without_its_class_a_value_is_opaque_and_has_a_plain_form(monkeypatch):
    data = encode([{Colour.RED: (Colour.RED,)}, Config("adamw")], "app")
    monkeypatch.delitem(sys.modules, __name__)
    found = decode(data)
    assert same(found, decode(data))
    assert [path for path, _ in opaque_in(found, "app")] == ["app.0 (key)", "app.0.1.0", "app.1"]
    assert [path for path, _ in paths_in({"app": found})] == ["app.0.1", "app.1"]
    assert plain_value(found) == [{1: (1,)}, {"name": "adamw", "options": {}, "more": None}]


@pytest.mark.parametrize(
    ("value", "old", "new", "why"),
    [
        (Config("adamw"), '"name"', '"title"', "other fields than when it was saved: name, title"),
        (Colour.RED, " 1,", " 9,", "the enum has no value 9 any more"),
        (Colour.RED, "Colour", "Gone", "the program has not imported this enum"),
        (Config("adamw"), "Config", "Gone", "the program has not imported this dataclass"),
    ],
)
def test_a_class_that_has_changed_spoils_its_own_value_alone(value, old, new, why):
    text = json.dumps({"a": encode(value, "app"), "b": 1})
    assert old in text
    found = decode(json.loads(text.replace(old, new)))
    assert found["b"] == 1
    assert isinstance(found["a"], OpaqueValue)
    assert found["a"].why.endswith(why)


@dataclass
class Outer:
    inner: Config
    colour: Colour = Colour.RED


def test_what_holds_an_opaque_value_is_one(monkeypatch):
    text = json.dumps(encode([Outer(Config("x"))], "app"))
    (found,) = decode(json.loads(text.replace('"name"', '"title"')))
    assert isinstance(found, OpaqueValue)
    assert found.why == "in it the dataclass has other fields than when it was saved: name, title"
    assert plain_value(found) == {"inner": {"title": "x", "options": {}, "more": None}, "colour": 1}


def test_a_dataclass_as_a_key_is_refused():
    with pytest.raises(ConfigError, match=r"is a dataclass, .* as a key"):
        encode({Key(1): 1}, "app")
    data = encode({Key(1)}, "app")
    data["v"][0]["v"][0] = "gone:Key"
    assert plain_value(decode(data)) == {"Key({'number': 1})"}


def test_a_class_that_no_restore_finds_is_refused():
    class Inner(IntEnum):
        ONE = 1

    with pytest.raises(ConfigError, match=r"app.mode is of the class .*Inner, .*: define .*top level .*\.value"):
        encode({"mode": Inner.ONE}, "app")


def test_dataclasses_that_are_not_their_fields_alone_are_refused():
    config = Config("adamw")
    del config.name
    with pytest.raises(ConfigError, match="app is a Config whose field name is not set: set it"):
        encode(config, "app")
    with pytest.raises(ConfigError, match=r"app is a .*Failure, which a checkpoint cannot hold"):
        encode(Failure("x"), "app")


def test_arrays_come_back_writable():
    there_and_back(numpy.zeros(3))[0] = 1


def test_equal_sets_are_equal_bytes():
    members = [*map(str, range(50)), (1, "a"), frozenset("xyz")]
    one, two = encode(set(members), "s"), encode({*members[::-1]}, "s")
    assert json.dumps(one) == json.dumps(two)


def test_what_json_can_say_is_said_in_json():
    value = {"epoch": 3, "lr": 0.001, "names": ["a", None, True], "nested": {"x": "\u03b1"}}
    assert encode(value, "app") == value


class Text(str):
    pass


class Picklable:
    def __reduce__(self):
        raise AssertionError("never asked for")


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), "app is a builtins.object"),
        ({"a": [0, {"b": Picklable()}]}, r"app\.a\.1\.b is a .*Picklable"),
        (Text("x"), "app is a .*Text"),
        (Point(1, 2), "app is a .*Point"),
        (defaultdict(list), r"app is a collections\.defaultdict"),
        ({"a": (1, {PurePath("x")})}, r"app\.a\.1\.0 is a pathlib\."),
        ({PurePath("x"): 1}, r"app \(key\) is a pathlib\."),
        (datetime.date(2026, 1, 1), r"app is a datetime\.date"),
        (range(3), r"app is a builtins\.range"),
        (numpy.array(["text"]), r"app is a numpy\.ndarray"),
        (numpy.array([object()], dtype=object), r"app is a numpy\.ndarray"),
        (numpy.datetime64("2026-01-01"), r"app is a numpy\.datetime64"),
        (numpy.zeros(2, dtype="i4,f4"), r"app is a numpy\.ndarray"),
        (numpy.array([[1]]).view(numpy.recarray), r"app is a numpy\..*recarray"),
        (numpy.zeros((2, 2)).view(numpy.matrix), r"app is a numpy\..*matrix"),
        (numpy.dtype("f4"), r"app is a numpy\..*"),
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0][:30],
)
def test_what_has_no_exact_form_is_refused_by_name(value, where):
    with pytest.raises(ConfigError, match=f"{where}.*, which a checkpoint cannot hold: save plain values"):
        encode(value, "app")


def test_a_value_that_holds_itself_is_refused():
    circle = {"a": []}
    circle["a"].append(circle)
    with pytest.raises(ConfigError, match=rf"app\.a\.0\.a.* is nested deeper than {MAX_DEPTH} levels"):
        encode(circle, "app")


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {1: v}])
def test_what_is_nested_as_deep_as_allowed_comes_back(wrap):
    value = 5
    for _ in range(MAX_DEPTH):
        value = wrap(value)
    assert same(value, there_and_back(value))
    with pytest.raises(ConfigError, match="nested deeper"):
        encode(wrap(value), "app")


def test_tensors_are_told_by_a_hook():
    def hook(value, path):
        return tensor_ref(path) if isinstance(value, bytes | memoryview) else None

    value = {"model": [memoryview(b"")], "plain": 1}
    assert decode(encode(value, "app", hook)) == {"model": [TensorRef("app.model.0")], "plain": 1}
    with pytest.raises(ConfigError, match=r"app\.0 is a builtins\.object"):
        encode([object()], "app", hook)


def kind(name, value, **more):
    return {"~": name, "v": value, **more}


RUBBISH = {
    "unknown": [1],
    "eval": ["__import__('os').system('touch hacked')"],
    "__class__": ["x"],
    "float": [[], 5, "x"],
    "int": ["xyz", 5],
    "complex": ["1+2j", ["1"], ["1", 2]],
    "dict": [{}, "ab", ["ab"], [[1]], [[1, 2, 3]], [[[1], 2]]],
    "OrderedDict": [[[{}, 2]]],
    "Counter": [5],
    "tuple": ["abc", {"a": 1}, [kind("float", "x")]],
    "set": [[[1]], 5],
    "frozenset": [[{}]],
    "bytes": [5, "not base64!", "\u03b1", "AA\n=="],
    "bytearray": [None],
    "tensor": [5, ["a"]],
    "path": [5, ["a"]],
    "enum": [5, ["a"], [5, 1], [f"{__name__}:Colour", "blue"], [f"{__name__}:Colour", [1]]],
    "dataclass": [5, ["a"], [None, []], ["a:b", 5]],
    "numpy": [
        *(5, [], ["<f4", [1], "", True], ["<f4", [-1], "AAAAAA==", True], ["<f4", ["1"], "AAAAAA==", True]),
        *(["<f4", [10**18], "AAAAAA==", True], ["<f4", [10**30], "AAAAAA==", True]),
        *([dtype, [1], "AAAAAAAAAAA=", True] for dtype in ("|O", "f4,f4", "V8", None)),
        ["no such type", [1], "AAAA", True],
    ],
}
NO_KIND = [kind(None, 1), kind([], 1), kind({}, 1), {"~": "float"}, kind("float", "nan", more=1)]
NO_KIND += [[{"deep": [kind("float", "x")]}]]


@pytest.mark.parametrize(
    "data",
    [*(kind(name, value) for name, values in RUBBISH.items() for value in values), *NO_KIND],
    ids=lambda data: json.dumps(data)[:50],
)
def test_rubbish_is_corrupt_and_runs_nothing(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorruptError, match=r"an encoded value of kind .* cannot be read"):
        decode(data)
    assert list(tmp_path.iterdir()) == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["AAAA", "<f4"]),
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(st.sampled_from(["~", "v", "a"]), below, max_size=3)
        | st.builds(
            kind,
            st.sampled_from(
                ["int", "float", "complex", "dict", "Counter", "tuple", "set", "bytes", "numpy", "path", "enum"]
            ),
            below,
        )
    ),
    max_leaves=15,
)


@given(json_values)
@settings(max_examples=500, deadline=None)
def test_any_json_is_a_value_or_corrupt(data):
    try:
        value = decode(data)
    except CorruptError:
        return
    assert type(value).__module__ in (
        "builtins",
        "collections",
        "numpy",
        "pathlib",
        "ckptman.storage.format.value_codec",
    )


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"a": v}, lambda v: kind("tuple", [v])])
def test_what_is_nested_too_deeply_is_corrupt(wrap):
    data = 5
    for _ in range(10_000):
        data = wrap(data)
    with pytest.raises(CorruptError, match="nested too deeply"):
        decode(data)
    while data != 5:  # taken apart from outside: to throw it away whole would take as deep a stack
        data = next(iter(data.values())) if "a" in data else data["v"][0] if "v" in data else data[0]
