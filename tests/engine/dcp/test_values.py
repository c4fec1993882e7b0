"""What plain DCP round-trips comes back bit for bit, whoever of DCP and ckptman writes and whoever reads."""

import math
import pickle
import tempfile
import warnings
from collections import OrderedDict
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, _version
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckptman

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")

State = dict[str, Any]
SAVE = {
    "dcp": lambda state, path: dcp.save(state, checkpoint_id=path),
    "StorageWriter": lambda state, path: dcp.save(state, storage_writer=ckptman.StorageWriter(path)),
    "ckptman.save": ckptman.save,
}
LOAD = {
    "dcp": lambda state, path: dcp.load(state, checkpoint_id=path),
    "StorageReader": lambda state, path: dcp.load(state, storage_reader=ckptman.StorageReader(path)),
    "ckptman.load": ckptman.load,
}
WRITERS, READERS = tuple(SAVE), tuple(LOAD)
WAYS = [(writer, reader) for writer in WRITERS for reader in READERS]
in_all_ways = pytest.mark.parametrize("way", WAYS, ids=" to ".join)
REFUSAL = (Exception, dcp.api.CheckpointException)
"""What DCP raises for an error of a rank is no Exception."""


def save(state, path, writer):
    """Save by DCP with its own storage or ours, or by ckptman alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*in a single process")
        SAVE[writer](state, path)


def load(state, path, reader):
    """Load by DCP with its own storage or ours, or by ckptman alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*in a single process")
        LOAD[reader](state, path)


# ---- values and how they are compared --------------------------------------------------------------------------------


def bits(tensor):
    """The elements of a tensor as bytes, in logical order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def blank(tensor):
    """A contiguous tensor of the same dtype and shape, with every bit set or, for bool, False."""
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype)
    fresh.reshape(-1).view(torch.uint8).fill_(0 if tensor.dtype == torch.bool else 255)
    return fresh


def emptied(value):
    """The same containers with other things in them."""
    if isinstance(value, dict):
        return type(value)((key, emptied(each)) for key, each in value.items())
    if isinstance(value, list) and any(isinstance(each, torch.Tensor | dict | list) for each in value):
        return [emptied(each) for each in value]
    return blank(value) if isinstance(value, torch.Tensor) else "not loaded"


def alike(one, other):
    """Equal in type and bits, and containers in the order of their entries."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(bits(one), bits(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(each, other[key]) for key, each in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return repr(one) == repr(other) or bool(one == other)


def differing(found, saved):
    """The names of what did not come back as it was saved."""
    return [name for name, value in saved.items() if not alike(found[name], value)]


def noise(dtype, *shape):
    """Random bits: signalling NaNs, subnormals and infinities too."""
    tensor = torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(math.prod(shape))
    flat = tensor.reshape(-1).view(torch.uint8)
    flat.copy_(torch.randint(0, 2 if dtype == torch.bool else 256, flat.shape, generator=generator, dtype=torch.uint8))
    return tensor


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
QUANTIZED = {"qint32", "qint8", "quint2x4", "quint4x2", "quint8"}
NOT_SAVED_BY_DCP = {"bits16", "bits1x8", "bits2x4", "bits4x2", "bits8"} | {
    f"{sign}int{count}" for sign in ("", "u") for count in range(1, 8)
}
"""dtypes whose tensors DCP refuses to save: torch has no storage type for them, or no size of their elements."""
SAVED = [dtype for dtype in DTYPES if name_of(dtype) not in NOT_SAVED_BY_DCP | QUANTIZED]


def shapes_and_views():
    """Tensors whose elements do not lie one after the other, or are none, or belong to others too."""
    base, wide = noise(torch.float32, 6, 8), noise(torch.complex64, 4, 3)
    shared = noise(torch.int16, 64)
    weight = nn.Parameter(noise(torch.bfloat16, 16, 4))
    return {
        "zero": torch.empty(0),
        "zero rows": torch.empty(0, 5, dtype=torch.int8),
        "zero inside": torch.empty(3, 0, 2, dtype=torch.bool),
        "no dimension": noise(torch.float64).reshape(()),
        "no dimension, one byte": noise(torch.uint8, 1)[0],
        "one": noise(torch.int64, 1, 1, 1),
        "transposed": base.T,
        "permuted": noise(torch.int32, 2, 3, 4, 5).permute(3, 1, 0, 2),
        "every other": base[::2, 1::3],
        "rows": base[2:5],
        "columns": base[:, 3:6],
        "last element": base[5:, 7:],
        "one of a column": base[2:3, 1],
        "one of a column, transposed": base[2:3, 1:2].T,
        "expanded": base[:, :1].expand(6, 9),
        "expanded scalar": torch.tensor(1.5).expand(2, 3, 4),
        "diagonal": base[:, :6].diagonal(),
        "overlapping windows": shared.unfold(0, 8, 3),
        "conjugate": wide.conj(),
        "conjugate transposed": wide.mH,
        "negative": wide.conj().imag,
        "real part": wide.real,
        "channels last": noise(torch.float16, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "channels last 3d": noise(torch.float16, 2, 3, 2, 2, 2).contiguous(memory_format=torch.channels_last_3d),
        "front of shared": shared[:40],
        "back of shared": shared[24:],
        "odd start": shared[3:].view(torch.uint8)[1:8],
        "whole of shared": shared,
        "other dtype of shared": shared.view(torch.int64),
        "parameter": weight,
        "tied": weight,
        "not a leaf": nn.Parameter(noise(torch.float32, 3)).clone(),
        "buffer": nn.Buffer(noise(torch.float32, 3)),
        "in shared memory": noise(torch.int32, 7).share_memory_(),
        "from numpy": torch.from_numpy(base.numpy().copy()[::-1].copy()),
        "packed int4": noise(torch.int32, 5, 3) & 0x0F0F0F0F,
    }


def sizes():
    """Tensors around the size of a block, one that cannot be copied at once, and many that are tiny."""
    found = {f"{size} bytes": noise(torch.uint8, size) for size in (2**17 - 1, 2**17, 2**19 + 3, 2**22 + 4097)}
    found |= {f"layer {number}": torch.tensor(number) for number in range(200)}
    return {**found, "matrix": noise(torch.bfloat16, 1111, 1013).T, "between": noise(torch.float64, 3)}


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


def pickled_whole():
    """Values that DCP pickles as they are."""
    return {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "tuple of tensors": (torch.ones(2), 1),
        "nested tuple of tensors": {"a": (torch.ones(2),)},
        "array": numpy.arange(6).reshape(2, 3),
    }


def state():
    dtypes = {name_of(dtype): noise(dtype, 5, 7) for dtype in SAVED}
    assert len(dtypes) >= 22
    return {**dtypes, **shapes_and_views(), **sizes(), **plain_values(), **pickled_whole()}


# ---- who writes and who reads ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with one state, saved by each writer."""
    folder = tmp_path_factory.mktemp("saved")
    for writer in WRITERS:
        save(state(), folder / writer, writer)
    return folder


@in_all_ways
def test_a_state_comes_back(saved, way):
    found = emptied(state())
    load(found, saved / way[0], way[1])
    assert differing(found, state()) == []
    assert list(found) == list(state())


@st.composite
def tensors(draw):
    """A tensor of any dtype, or a view of one."""
    tensor = noise(draw(st.sampled_from(SAVED)), *draw(st.lists(st.integers(0, 5), max_size=4)))
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    return tensor[draw(st.integers(0, 2)) :: draw(st.integers(1, 3))] if tensor.dim() else tensor


names = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1)
states = st.dictionaries(
    names,
    st.recursive(
        tensors() | st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda below: st.lists(below, max_size=4) | st.dictionaries(names, below, max_size=4),
        max_leaves=10,
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=[pytest.mark.campaign, pytest.mark.timeout(1800)])])
def test_any_state_that_plain_dcp_brings_back_comes_back_in_all_ways(tmp_path, count):
    @settings(max_examples=count)
    @given(states)
    def holds(saved):
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            for writer, reader in WAYS:
                found = emptied(saved)
                try:
                    if reader == READERS[0]:
                        save(saved, f"{folder}/{writer}", writer)
                    load(found, f"{folder}/{writer}", reader)
                    wrong = differing(found, saved)
                except REFUSAL as error:
                    wrong = error
                if (writer, reader) == WAYS[0]:  # plain DCP alone
                    assume(not wrong)
                assert not wrong, (writer, reader)

    holds()


def test_the_dtypes_that_dcp_cannot_save_are_kept_or_refused_but_never_mangled(tmp_path):
    for name in sorted(NOT_SAVED_BY_DCP):
        saved = {"x": noise(getattr(torch, name), 9)}
        for writer in WRITERS:
            path = tmp_path / writer / name
            try:
                save(saved, path, writer)
                load(found := emptied(saved), path, "dcp" if writer == "dcp" else "StorageReader")
            except REFUSAL:
                assert writer == "dcp" or not path.exists()
                continue
            assert writer != "dcp", name
            assert differing(found, saved) == []


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:.*[Qq]uantiz")
@in_all_ways
def test_quantized_tensors_into_ones_of_the_same_scales(tmp_path, way):
    values = torch.linspace(-3, 3, 12).reshape(3, 4)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), torch.tensor([1, 2, 3])

    def quantized(values):
        dtypes = (torch.qint8, torch.quint8, torch.qint32)
        found = {name_of(dtype): torch.quantize_per_tensor(values, 0.125, 3, dtype) for dtype in dtypes}
        return {**found, "channels": torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)}

    saved, fresh = quantized(values), quantized(values * 0)
    save(dict(saved), tmp_path / "x", way[0])
    load(fresh, tmp_path / "x", way[1])
    for name, tensor in saved.items():
        assert torch.equal(fresh[name].int_repr(), tensor.int_repr()), name
        assert torch.equal(fresh[name].dequantize(), tensor.dequantize()), name


@in_all_ways
def test_a_large_transposed_tensor_of_a_dtype_that_torch_cannot_transpose(tmp_path, way):
    """Its copy_ knows no fp4 where it would transpose block by block, which it does to large ones."""
    saved = noise(torch.uint8, 120, 110).view(torch.float4_e2m1fn_x2).T
    save({"x": saved}, tmp_path / "x", way[0])
    fresh = {"x": torch.zeros(120, 110, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).T}
    load(fresh, tmp_path / "x", way[1])
    assert torch.equal(fresh["x"].view(torch.uint8), saved.view(torch.uint8))


@in_all_ways
def test_wide_elements_that_begin_anywhere_in_a_file(tmp_path, way):
    """Plain DCP puts containers one behind the other; complex128 is copied by instructions that need it at 16 bytes."""
    saved = {}
    for odd in range(1, 9):
        saved |= {f"{odd} before": noise(torch.uint8, odd), f"{odd} wide": noise(torch.complex128, 33, 25)}
    save(dict(saved), tmp_path / "x", way[0])
    fresh = emptied(saved)
    fresh |= {f"{odd} wide": torch.zeros(33, 100, dtype=torch.complex128)[:, :25] for odd in range(1, 9)}
    load(fresh, tmp_path / "x", way[1])
    assert differing(fresh, saved) == []


@in_all_ways
def test_in_inference_mode(tmp_path, way):
    """It is a mode of a thread, and large tensors are filled by several."""
    with torch.inference_mode():
        saved = {"columns": noise(torch.float32, 2000, 1200), "cast": torch.ones(1200, 2000)}
        save(dict(saved), tmp_path / "x", way[0])
        dtype = torch.float32 if way[1] == "ckptman.load" else torch.bfloat16
        fresh = {"columns": torch.zeros(1200, 2000).T, "cast": torch.zeros(1200, 2000, dtype=dtype)}
        load(fresh, tmp_path / "x", way[1])
        assert torch.equal(bits(fresh["columns"]), bits(saved["columns"]))
        assert (fresh["cast"] == 1).all()


@pytest.mark.parametrize("way", [way for way in WAYS if way[1] != "ckptman.load"], ids=" to ".join)
def test_another_dtype_is_converted_as_dcp_does(tmp_path, way):
    values = torch.tensor([[1.0, -2.5, 3.1415926], [float("nan"), float("inf"), 65536.0]]).nan_to_num(1, posinf=9)
    pairs = [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.int64),
        (torch.bool, torch.int8),
        (torch.float16, torch.float8_e4m3fn),
    ]
    save({f"{old} {new}": values.to(old) for old, new in pairs}, tmp_path / "x", way[0])
    fresh = {f"{old} {new}": torch.empty(2, 3, dtype=new) for old, new in pairs}
    load(fresh, tmp_path / "x", way[1])
    assert differing(fresh, {f"{old} {new}": values.to(old).to(new) for old, new in pairs}) == []


# ---- where it is loaded to -------------------------------------------------------------------------------------------


class Named(torch.Tensor):
    """A subclass that changes nothing."""


class OwnParameter(nn.Parameter):
    """The same, of parameters."""


def destinations(whole):
    """Tensors of one shape that lie in memory in other ways: each with the memory around it."""
    rows, columns = whole.shape
    around = torch.full((rows + 2, 2 * columns + 3), 7, dtype=whole.dtype)
    other = torch.full((columns, rows), 7, dtype=whole.dtype)
    parameter = nn.Parameter(torch.full_like(whole, 7))
    odd = torch.full((8 * whole.numel() + 8,), 7, dtype=torch.uint8)
    return {
        "strided": (around[1:-1, 1 : 2 * columns : 2], around),
        "columns": ((beside := around.clone())[1:-1, 2 : 2 + columns], beside),
        "transposed": (other.T, other),
        "conjugate": ((hidden := other.clone().T).conj(), hidden),
        "parameter": (parameter, parameter),
        "tied": (parameter, parameter),
        "odd address": (odd[8:].view(torch.complex64).view(whole.shape), odd),
        "subclass": ((plain := torch.full_like(whole, 7)).as_subclass(Named), plain),
    }


@in_all_ways
def test_what_is_loaded_into_may_lie_in_any_way(tmp_path, way):
    saved = noise(torch.complex64, 5, 6).nan_to_num(1)
    targets = destinations(saved)
    save(dict.fromkeys(targets, saved), tmp_path / "x", way[0])
    before = {name: bits(memory).clone() for name, (_, memory) in targets.items()}
    load({name: target for name, (target, _) in targets.items()}, tmp_path / "x", way[1])
    for name, (target, memory) in targets.items():
        assert torch.equal(torch.Tensor(target) if name == "subclass" else target, saved), name
        changed = (bits(memory) != before[name]).sum()
        assert changed <= saved.nbytes, f"{name}: bytes beside the target were written"
        if name == "parameter":
            assert target.requires_grad
            assert target.is_leaf


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


allowing_subclasses = torch.serialization.safe_globals([Named, Doubled, Quantized])


@in_all_ways
def test_tensors_of_subclasses(tmp_path, way):
    """Memory of a target that holds its elements elsewhere is at address 0: only its copy_ puts them there."""
    values, large = noise(torch.int16, 4, 6), 2.0 * torch.arange(1100 * 1200).remainder(99).reshape(1100, 1200)
    named, own = values.as_subclass(Named), OwnParameter(torch.ones(2))
    saved = {"named": named, "view of named": named[1:3, ::2], "own": own, "doubled": Doubled(values)}
    into = {"small": large[:4, :6], "large": large, "only copied": Quantized(values)}
    plain = {"named": values, "view of named": values[1:3, ::2], "own": torch.ones(2), "doubled": values.float() * 2}
    fresh = emptied(plain)
    fresh |= {name: Doubled(torch.zeros(each.shape, dtype=torch.int16)) for name, each in into.items()}
    fresh["only copied"] = Quantized(torch.zeros_like(values))
    with allowing_subclasses:
        save({**saved, **into}, tmp_path / "x", way[0])
        load(fresh, tmp_path / "x", way[1])
    assert differing(fresh, plain) == []
    assert torch.equal(fresh["small"].inner * 2.0, into["small"])
    assert torch.equal(fresh["large"].inner * 2.0, large)
    assert torch.equal(fresh["only copied"].inner, values)


def test_a_module_whose_tensors_can_only_be_copied(tmp_path):
    def layer(values):
        made = nn.Module()
        made.register_buffer("x", Quantized(values))
        return made

    values = noise(torch.int16, 4, 6)
    fresh = layer(torch.zeros_like(values))
    with allowing_subclasses:
        with ckptman.Checkpointer(tmp_path, {"layer": layer(values)}) as checkpointer:
            checkpointer.save(1)
        with ckptman.Checkpointer(tmp_path, {"layer": fresh}) as checkpointer:
            checkpointer.restore()
    assert torch.equal(fresh.x.inner, values)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_view_of_much_does_not_save_it_all(tmp_path, writer):
    large = torch.zeros(2**20)
    views = {"few": large[5:8], "column": large.view(1024, 1024)[:4, 0]}
    views |= {"named": large.as_subclass(Named)[3:9], "own": OwnParameter(large[:2])}
    save(views, tmp_path / "x", writer)
    assert sum(each.stat().st_size for each in (tmp_path / "x").iterdir()) < 256 * 1024


class Changing:
    """Tensors of an application that differ at each save."""

    def __init__(self):
        self.tensors = {name: each for name, each in shapes_and_views().items() if not name.startswith("expanded")}

    def change(self):
        self.tensors["whole of shared"].add_(1)
        self.tensors["rows"].view(torch.int32).add_(1)


@pytest.mark.parametrize("options", [{"async_save": False}, {}, {"overlap": True}], ids=["sync", "async", "overlap"])
def test_what_a_checkpointer_stages_is_what_everybody_reads(tmp_path, options):
    """Three saves, so that each staging buffer is filled again with other values."""
    app, copies = Changing(), []
    with ckptman.Checkpointer(tmp_path, {"x": app.tensors}, deadline=None, **options) as checkpointer:
        for step in (1, 2, 3):
            app.change()
            checkpointer.save(step)
            if "overlap" in options:
                checkpointer.wait()
            copies.append({name: tensor.detach().clone() for name, tensor in app.tensors.items()})
    for step, saved in enumerate(copies, start=1):
        for reader in READERS:
            fresh = {"x": emptied(saved)}
            load(fresh, tmp_path / f"step-{step:010d}", reader)
            assert differing(fresh["x"], saved) == [], (step, reader)
    with ckptman.Checkpointer(tmp_path, fresh, deadline=None) as checkpointer:
        assert checkpointer.restore(step=2) == 2
        assert differing(fresh["x"], copies[1]) == []


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", WRITERS)
def test_the_meta_device_is_refused_by_name(tmp_path, writer):
    state = {"layer": {"weight": torch.empty(3, 5, device="meta")}, "bias": torch.zeros(3)}
    with pytest.raises(REFUSAL, match="meta") as caught:
        save(state, tmp_path / "x", writer)
    if writer != "dcp":
        causes = list(getattr(caught.value, "failures", {0: (caught.value,)}).values())
        assert isinstance(causes[0][0], ckptman.ConfigError)
        assert "layer.weight" in str(caught.value)
        assert list(tmp_path.iterdir()) == []
    save({"layer": {"weight": torch.ones(3, 5)}, "bias": torch.ones(3)}, tmp_path / "y", writer)
    with pytest.raises(ckptman.ConfigError, match=r"layer\.weight is on the meta device"):
        load(state, tmp_path / "y", "ckptman.load")
    assert not state["bias"].any()


@pytest.mark.parametrize("value", [10**5000, (1, -(10**5000))], ids=["alone", "in a tuple"])
def test_an_integer_that_python_does_not_write(tmp_path, value):
    save({"x": value}, tmp_path / "x", "ckptman.save")
    for reader in ("dcp", "ckptman.load"):
        load(state := {"x": None}, tmp_path / "x", reader)
        assert state["x"] == value
    with pytest.raises(REFUSAL, match="255 bytes"):
        load(state, tmp_path / "x", "StorageReader")


@in_all_ways
def test_a_value_of_a_class_that_is_allowed(tmp_path, way):
    value = datetime(2026, 11, 22, tzinfo=timezone.utc)
    save({"when": value}, tmp_path / "x", way[0])
    state = {"when": None}
    if way[1] != "dcp":
        with pytest.raises(REFUSAL, match="add_safe_globals"):
            load(state, tmp_path / "x", way[1])
        assert state == {"when": None}
    with torch.serialization.safe_globals([datetime, timezone, timedelta]):
        load(state, tmp_path / "x", way[1])
    assert state == {"when": value}


@pytest.mark.parametrize("reader", READERS)
def test_two_tensors_of_one_name_are_not_both_loaded(tmp_path, reader):
    save({"a": {"b": torch.ones(3)}}, tmp_path / "x", "ckptman.save")
    state = {"a.b": torch.zeros(3), "a": {"b": torch.zeros(3)}}
    with pytest.raises(REFUSAL, match=r"flat\w* \w+ a\.b"):
        load(state, tmp_path / "x", reader)
    assert not state["a.b"].any()


# ---- names -----------------------------------------------------------------------------------------------------------


def ordered(value):
    """A state as text, with its names in order."""
    if isinstance(value, dict):
        return {name: ordered(value[name]) for name in sorted(value)}
    return [ordered(each) for each in value] if isinstance(value, list) else repr(value)


@pytest.mark.parametrize("reader", READERS[:2])
@pytest.mark.parametrize("writer", WRITERS)
def test_where_in_the_state_a_name_is(tmp_path, writer, reader):
    """Who builds the state from the checkpoint is told how it was nested, also beside what is no plain value, and where
    the way to a tensor has the name of another one."""
    saved = {
        "model": {"a.b": torch.ones(2), "n": [1, {"w": torch.zeros(2)}]},
        "optim": {"state": {"w": {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]},
        "epoch": 3,
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


@pytest.mark.parametrize("writer", WRITERS[:2])
def test_a_name_that_was_not_saved_is_told_and_one_that_is_not_wanted_is_left(tmp_path, writer):
    save({"a": torch.ones(3), "b": torch.ones(2), "c": 1, "n": {"d": 4}}, tmp_path / "x", writer)
    load(state := {"a": torch.zeros(3)}, tmp_path / "x", "ckptman.load")
    assert ordered(state) == ordered({"a": torch.ones(3)})
    state = {"a": torch.zeros(3), "n": {"e": 0}, "z": torch.zeros(1)}
    with pytest.raises(ckptman.MismatchError) as caught:
        load(state, tmp_path / "x", "ckptman.load")
    assert caught.value.missing == ("n.e", "z")
    assert not state["a"].any()
    state = {"a": torch.zeros(4), "b": torch.zeros(2)}
    with pytest.raises(ckptman.MismatchError, match="a: "):
        load(state, tmp_path / "x", "ckptman.load")
    assert not state["a"].any()
    assert not state["b"].any()


@pytest.mark.parametrize("writer", WRITERS)
def test_an_empty_mapping_in_a_list_stays_one(tmp_path, writer):
    """DCP saves nothing of it."""
    save({"groups": [{}, {"x": torch.ones(2)}, None]}, tmp_path / "x", writer)
    state = {"groups": [{}, {"x": torch.zeros(2)}, 0]}
    load(state, tmp_path / "x", "ckptman.load")
    assert repr(state["groups"]) == repr([{}, {"x": torch.ones(2)}, None])


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
    load(found := emptied(saved), tmp_path / "x", reader)
    assert differing(found, saved) == []


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
    save({"w": torch.ones(3), "v": torch.ones(2)}, path, "dcp")
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
