"""Plain values, subclasses and what cannot be saved: as plain DCP does it, or refused by name."""

import math
import pickle
from collections import OrderedDict
from datetime import datetime, timedelta, timezone

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, _version
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckptman
from tests.dcp.test_values import (
    READERS,
    WAYS,
    WRITERS,
    Named,
    bits,
    blank,
    differing,
    in_all_ways,
    load,
    noise,
    save,
)


class Doubled(torch.Tensor):
    """Holds its elements in a tensor of another dtype: its own storage has no bytes."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        if func is torch.ops.aten.clone.default:
            return cls(args[0].inner.clone())
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].inner.copy_(args[1] / 2)
            return args[0]
        plain = [each.inner.float() * 2 if isinstance(each, cls) else each for each in args]
        return func(*plain, **(kwargs or {}))


@in_all_ways
def test_tensor_subclasses(tmp_path, way):
    values = noise(torch.int16, 4, 6)
    saved = {"named": values.as_subclass(Named), "view of named": values.as_subclass(Named)[1:3, ::2]}
    with torch.serialization.safe_globals([Named, Doubled]):
        save({**saved, "doubled": Doubled(values)}, tmp_path / "x", way[0])
        plain = {"named": values, "view of named": values[1:3, ::2], "doubled": values.float() * 2}
        fresh = {name: blank(tensor) for name, tensor in plain.items()}
        load(fresh, tmp_path / "x", way[1])
    assert differing(fresh, plain) == []


class Quantized(Doubled):
    """Can be detached and copied, and nothing else: no cutting, no cloning. So is the state of some optimizers."""

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, *_):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        if func is torch.ops.aten.copy_.default and isinstance(args[1], cls):
            args[0].inner.copy_(args[1].inner)
            return args[0]
        if func is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(f"{func} of a tensor that is quantized")


class Layer(torch.nn.Module):
    def __init__(self, values):
        super().__init__()
        self.register_buffer("x", Quantized(values))


@pytest.mark.parametrize("way", [*WAYS, ("Checkpointer", "restore")], ids=" to ".join)
def test_tensors_that_can_only_be_copied(tmp_path, way):
    values = noise(torch.int16, 4, 6)
    fresh = {"x": Quantized(torch.zeros_like(values))}
    with torch.serialization.safe_globals([Quantized]):
        if way == ("Checkpointer", "restore"):
            with ckptman.Checkpointer(tmp_path, {"layer": Layer(values)}) as checkpointer:
                checkpointer.save(1)
            layer = Layer(torch.zeros_like(values))
            with ckptman.Checkpointer(tmp_path, {"layer": layer}) as checkpointer:
                checkpointer.restore()
            fresh["x"] = layer.x
        else:
            save({"x": Quantized(values)}, tmp_path / "x", way[0])
            load(fresh, tmp_path / "x", way[1])
    assert torch.equal(fresh["x"].inner, values)


@pytest.mark.parametrize("sizes", [(4, 6), (1100, 1200)], ids=["small", "large"])
@in_all_ways
def test_into_a_tensor_that_holds_its_elements_elsewhere(tmp_path, way, sizes):
    """Its own memory is at address 0: what is put there is lost without a word. Only its copy_ knows better."""
    values = torch.arange(math.prod(sizes)).remainder(100).reshape(sizes).float() * 2
    save({"x": values}, tmp_path / "x", way[0])
    fresh = {"x": Doubled(torch.zeros(sizes, dtype=torch.int16))}
    load(fresh, tmp_path / "x", way[1])
    assert torch.equal(fresh["x"].inner * 2.0, values)


def plain_values():
    return {
        "none": None,
        "flag": True,
        "count": 2**80,
        "half": 0.5,
        "text": "ünï\n",
        "raw": b"\0\xff",
        "complex": 1 - 2j,
        "pair": (1, [2.5, (3,)]),
        "set": {1, 2},
        "frozen set": frozenset([1, frozenset("ab")]),
        "size": torch.Size([2, 3]),
        "list": [1, 2, 3],
        "empty text": "",
        "nested": {"deeper": {"lr": [0.1, 0.2], "name": "x"}, "tensor": torch.arange(3), "number": 3},
        "mixed": [torch.arange(2), 5, {"a": torch.ones(1), "b": None}],
        "ordered": OrderedDict(b=1, a=2),
        "lists": [[0.9, 0.95], [0.8, [0.7]]],
        "optimizer without state": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "a.name.with.dots": torch.ones(2),
        "a/name\nwith ünï": torch.ones(1),
        "ckptman": {"part": torch.ones(1)},
    }


def emptied(value):
    """The same containers with other things in them."""
    if isinstance(value, dict):
        return type(value)((key, emptied(each)) for key, each in value.items())
    if isinstance(value, list) and any(isinstance(each, torch.Tensor | dict | list) for each in value):
        return [emptied(each) for each in value]
    return blank(value) if isinstance(value, torch.Tensor) else "not loaded"


def alike(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(bits(one), bits(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(each, other[key]) for key, each in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@in_all_ways
def test_plain_values_and_nested_containers(tmp_path, way):
    values = plain_values()
    save(plain_values(), tmp_path / "x", way[0])
    fresh = emptied(values)
    load(fresh, tmp_path / "x", way[1])
    assert [name for name in values if not alike(values[name], fresh[name])] == []
    assert list(fresh) == list(values)


@pytest.mark.parametrize(
    "value",
    [torch.float32, torch.device("cpu"), (torch.ones(2), 1), {"a": (torch.ones(2),)}, numpy.arange(6).reshape(2, 3)],
    ids=["dtype", "device", "tuple of tensors", "nested tuple of tensors", "array"],
)
@in_all_ways
def test_values_that_dcp_pickles_whole(tmp_path, way, value):
    save({"x": value}, tmp_path / "x", way[0])
    fresh = {"x": {"a": None} if isinstance(value, dict) else None}
    load(fresh, tmp_path / "x", way[1])
    assert repr(fresh["x"]) == repr(value)


@pytest.mark.parametrize("writer", WRITERS)
def test_tensors_without_bytes_are_refused_by_name(tmp_path, writer):
    state = {"layer": {"weight": torch.empty(3, device="meta")}, "bias": torch.ones(3)}
    with pytest.raises((Exception, dcp.api.CheckpointException)) as caught:
        save(state, tmp_path / "x", writer)
    causes = list(getattr(caught.value, "failures", {0: (caught.value,)}).values())
    assert "meta" in str(caught.value)
    if writer != "dcp":
        assert isinstance(causes[0][0], ckptman.ConfigError)
        assert "layer.weight" in str(caught.value)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_can_be_loaded_on_the_meta_device(tmp_path, writer):
    save({"layer": {"weight": torch.ones(3, 5)}, "bias": torch.ones(3)}, tmp_path / "x", writer)
    state = {"layer": {"weight": torch.empty(3, 5, device="meta")}, "bias": torch.zeros(3)}
    with pytest.raises(ckptman.ConfigError, match=r"layer\.weight is on the meta device"):
        load(state, tmp_path / "x", "ckptman.load")
    assert not state["bias"].any()


@pytest.mark.parametrize("value", [10**5000, (1, -(10**5000))], ids=["alone", "in a tuple"])
@pytest.mark.parametrize("reader", ["dcp", "ckptman.load"])
def test_an_integer_that_python_does_not_write(tmp_path, reader, value):
    save({"x": value}, tmp_path / "x", "ckptman.save")
    state = {"x": None}
    load(state, tmp_path / "x", reader)
    assert state["x"] == value
    with pytest.raises(dcp.api.CheckpointException, match="255 bytes"):
        load(state, tmp_path / "x", "StorageReader")


@in_all_ways
def test_a_value_of_a_class_that_is_allowed(tmp_path, way):
    value = datetime(2026, 11, 22, tzinfo=timezone.utc)
    save({"when": value}, tmp_path / "x", way[0])
    state = {"when": None}
    if way[1] != "dcp":
        with pytest.raises((Exception, dcp.api.CheckpointException), match="add_safe_globals"):
            load(state, tmp_path / "x", way[1])
        assert state == {"when": None}
    with torch.serialization.safe_globals([datetime, timezone, timedelta]):
        load(state, tmp_path / "x", way[1])
    assert state == {"when": value}


def ordered(value):
    """A state as text, with its names in order."""
    if isinstance(value, dict):
        return {name: ordered(value[name]) for name in sorted(value)}
    return [ordered(each) for each in value] if isinstance(value, list) else repr(value)


@pytest.mark.parametrize("reader", READERS[:2])
@pytest.mark.parametrize("writer", WRITERS)
def test_where_in_the_state_a_name_is(tmp_path, writer, reader):
    """Who builds the state from the checkpoint is told how it was nested."""
    saved = {
        "model": {"a.b": torch.ones(2), "n": [1, {"w": torch.zeros(2)}]},
        "optim": {"state": {"w": {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]},
        "epoch": 3,
    }
    save(saved, tmp_path / "x", writer)
    storage = (FileSystemReader if reader == "dcp" else ckptman.StorageReader)(tmp_path / "x")
    found = {}
    _load_state_dict(found, storage_reader=storage, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert ordered(found) == ordered(saved)


@pytest.mark.parametrize("writer", WRITERS[:2])
def test_a_name_that_was_not_saved_is_told_and_one_that_is_not_wanted_is_left(tmp_path, writer):
    save({"a": torch.ones(3), "b": torch.ones(2), "c": 1, "n": {"d": 4}}, tmp_path / "x", writer)
    state = {"a": torch.zeros(3)}
    load(state, tmp_path / "x", "ckptman.load")
    assert torch.equal(state["a"], torch.ones(3))
    assert list(state) == ["a"]
    state = {"a": torch.zeros(3), "n": {"e": 0}, "z": torch.zeros(1)}
    with pytest.raises(ckptman.MismatchError) as caught:
        load(state, tmp_path / "x", "ckptman.load")
    assert caught.value.missing == ("n.e", "z")
    assert not state["a"].any()
    state = {"a": torch.zeros(4), "b": torch.zeros(2)}
    with pytest.raises(ckptman.MismatchError, match="a: ") as caught:
        load(state, tmp_path / "x", "ckptman.load")
    assert not state["a"].any()
    assert not state["b"].any()


@pytest.mark.parametrize("reader", READERS[:2])
@pytest.mark.parametrize("writer", WRITERS)
def test_where_in_the_state_a_name_is_beside_what_is_no_plain_value(tmp_path, writer, reader):
    """And where the way to it has the name of another tensor."""
    saved = {
        "settings": {"dtype": torch.float32, "n": {"x": 3}},
        "state": {"w": {"m": torch.ones(1), "dtype": torch.float32}},
        "a": {"b": {"c": 1, "d": torch.zeros(2)}, "l": [[1], 2]},
        "a.b": torch.ones(3),
    }
    save(saved, tmp_path / "x", writer)
    storage = (FileSystemReader if reader == "dcp" else ckptman.StorageReader)(tmp_path / "x")
    found = {}
    _load_state_dict(found, storage_reader=storage, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert ordered(found) == ordered(saved)


@pytest.mark.parametrize("writer", WRITERS)
def test_an_empty_mapping_in_a_list_stays_one(tmp_path, writer):
    """DCP saves nothing of it."""
    save({"groups": [{}, {"x": torch.ones(2)}, None]}, tmp_path / "x", writer)
    state = {"groups": [{}, {"x": torch.zeros(2)}, 0]}
    load(state, tmp_path / "x", "ckptman.load")
    assert repr(state["groups"]) == repr([{}, {"x": torch.ones(2)}, None])


@pytest.mark.parametrize("reader", READERS)
def test_two_tensors_of_one_name_are_not_both_loaded(tmp_path, reader):
    save({"a": {"b": torch.ones(3)}}, tmp_path / "x", "ckptman.save")
    state = {"a.b": torch.zeros(3), "a": {"b": torch.zeros(3)}}
    with pytest.raises((Exception, dcp.api.CheckpointException), match=r"flat\w* \w+ a\.b"):
        load(state, tmp_path / "x", reader)
    assert not state["a.b"].any()


@pytest.mark.parametrize("reader", READERS)
def test_what_torch_2_3_saved(tmp_path, monkeypatch, reader):
    """It flattened no dict in which there is no tensor."""
    saved = {
        "model": {"w": torch.ones(6)},
        "schedule": {"last_epoch": 4, "deeper": {"lrs": [0.1]}},
        "optimizer": {"state": {0: {"step": torch.ones(1)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }
    with monkeypatch.context() as patched:
        patched.setattr(_version, "_derived_version", "2_3")
        save(saved, tmp_path / "x", "dcp")
    state = emptied(saved)
    load(state, tmp_path / "x", reader)
    assert [name for name in saved if not alike(state[name], saved[name])] == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "paths",
    [
        {"w": ("w", 10**9)},
        {"w": (-1, "w")},
        {"w": ()},
        {"w": ("a", 0), "v": ("a", "b")},
        {"w": ("a",), "v": ("a", "b")},
        {"w": "text"},
        {"w": (None, 2.5)},
        {"w": 5},
        "text",
    ],
    ids=str,
)
def test_paths_in_metadata_that_lead_nowhere(tmp_path, paths):
    """Whatever somebody's metadata says of where the values are: it is refused by name, or it is read."""
    path = tmp_path / "x"
    dcp.save({"w": torch.ones(3), "v": torch.ones(2)}, checkpoint_id=path, no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = paths
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    state = {"w": torch.zeros(3)}
    try:
        ckptman.load(state, path)
    except (ckptman.CorruptError, ckptman.MismatchError) as error:
        assert str(path) in str(error)
        assert not state["w"].any()
    else:
        assert state["w"].all()
