"""What plain DCP round-trips comes back bit for bit, whoever of DCP and ckptman writes and whoever reads."""

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptman

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")

State = dict[str, Any]
Way = tuple[str, str]


def save(state, path, writer):
    """Save by DCP with its own storage or ours, or by ckptman alone."""
    if writer == "ckptman.save":
        return ckptman.save(state, path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*in a single process")
        if writer == "dcp":
            dcp.save(state, checkpoint_id=path)
        else:
            dcp.save(state, storage_writer=ckptman.StorageWriter(path))


def load(state, path, reader):
    """Load by DCP with its own storage or ours, or by ckptman alone."""
    if reader == "ckptman.load":
        return ckptman.load(state, path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*in a single process")
        if reader == "dcp":
            dcp.load(state, checkpoint_id=path)
        else:
            dcp.load(state, storage_reader=ckptman.StorageReader(path))


WRITERS = ("dcp", "StorageWriter", "ckptman.save")
READERS = ("dcp", "StorageReader", "ckptman.load")
WAYS = [(writer, reader) for writer in WRITERS for reader in READERS]
MAIN_WAYS = [
    ("dcp", "dcp"),
    ("dcp", "StorageReader"),
    ("dcp", "ckptman.load"),
    ("StorageWriter", "dcp"),
    ("StorageWriter", "StorageReader"),
    ("ckptman.save", "ckptman.load"),
]
"""What is left of them where a test is slow."""
in_all_ways = pytest.mark.parametrize("way", WAYS, ids=" to ".join)


def bits(tensor):
    """The elements of a tensor as bytes, in logical order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def blank(tensor):
    """A contiguous tensor of the same dtype and shape, with every bit set or, for bool, False."""
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype)
    fresh.reshape(-1).view(torch.uint8).fill_(0 if tensor.dtype == torch.bool else 255)
    return fresh


def differing(found, saved):
    """The names of tensors that did not come back as they were saved."""
    return [
        name
        for name, tensor in saved.items()
        if (found[name].dtype, found[name].shape) != (tensor.dtype, tensor.shape)
        or not torch.equal(bits(found[name]), bits(tensor))
    ]


def come_back(path, tensors, way):
    """Save tensors, load them into blank ones, compare."""
    writer, reader = way
    save(dict(tensors), path, writer)
    fresh = {name: blank(tensor) for name, tensor in tensors.items()}
    load(fresh, path, reader)
    assert differing(fresh, tensors) == []


def noise(dtype, *shape):
    """Random bits: signalling NaNs, subnormals and infinities too."""
    tensor = torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(math.prod(shape))
    flat = tensor.reshape(-1).view(torch.uint8)
    flat.copy_(torch.randint(0, 2 if dtype == torch.bool else 256, flat.shape, generator=generator, dtype=torch.uint8))
    return tensor


DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
QUANTIZED = {"qint32", "qint8", "quint2x4", "quint4x2", "quint8"}
NOT_SAVED_BY_DCP = {"bits16", "bits1x8", "bits2x4", "bits4x2", "bits8"} | {
    f"{sign}int{count}" for sign in ("", "u") for count in range(1, 8)
}
"""dtypes whose tensors DCP refuses to save: torch has no storage type for them, or no size of their elements."""


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


@in_all_ways
def test_every_dtype_with_any_bits(tmp_path, way):
    known = [dtype for dtype in DTYPES if name_of(dtype) not in NOT_SAVED_BY_DCP | QUANTIZED]
    assert len(known) >= 22
    come_back(tmp_path / "x", {name_of(dtype): noise(dtype, 5, 7) for dtype in known}, way)


def test_the_dtypes_that_dcp_cannot_save_are_these(tmp_path):
    refused = set()
    for dtype in DTYPES:
        name = name_of(dtype)
        if name in QUANTIZED:
            continue
        try:
            come_back(tmp_path / name, {"x": noise(dtype, 4)}, ("dcp", "dcp"))
        except (Exception, dcp.api.CheckpointException):
            refused.add(name)
    assert refused == NOT_SAVED_BY_DCP


@pytest.mark.parametrize("writer", WRITERS[1:])
def test_dtypes_that_dcp_cannot_save_are_kept_or_refused_but_never_mangled(tmp_path, writer):
    for name in sorted(NOT_SAVED_BY_DCP):
        saved = noise(getattr(torch, name), 9)
        found = {"x": blank(saved)}
        try:
            save({"x": saved}, tmp_path / name, writer)
        except (Exception, dcp.api.CheckpointException):
            assert not (tmp_path / name).exists()
            continue
        load(found, tmp_path / name, "StorageReader")
        assert differing(found, {"x": saved}) == []


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:.*[Qq]uantiz")
@in_all_ways
def test_quantized_tensors_into_ones_of_the_same_scales(tmp_path, way):
    values = torch.linspace(-3, 3, 12).reshape(3, 4)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), torch.tensor([1, 2, 3])
    saved = {
        name_of(dtype): torch.quantize_per_tensor(values, 0.125, 3, dtype)
        for dtype in (torch.qint8, torch.quint8, torch.qint32)
    } | {"channels": torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)}
    fresh = {
        name: torch.quantize_per_channel(values * 0, scales, zeros, 0, torch.qint8)
        if name == "channels"
        else torch.quantize_per_tensor(values * 0, 0.125, 3, tensor.dtype)
        for name, tensor in saved.items()
    }
    save(dict(saved), tmp_path / "x", way[0])
    load(fresh, tmp_path / "x", way[1])
    for name, tensor in saved.items():
        assert torch.equal(fresh[name].int_repr(), tensor.int_repr()), name
        assert torch.equal(fresh[name].dequantize(), tensor.dequantize()), name


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


@in_all_ways
def test_shapes_and_views(tmp_path, way):
    come_back(tmp_path / "x", shapes_and_views(), way)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_view_of_much_does_not_save_it_all(tmp_path, writer, reader):
    large = torch.zeros(2**20)
    named = large.as_subclass(Named)[3:9]
    saved = {"few": large[5:8], "column": large.view(1024, 1024)[:4, 0], "named": named, "own": OwnParameter(large[:2])}
    with torch.serialization.safe_globals([Named]):
        save(dict(saved), tmp_path / "x", writer)
        fresh = {name: torch.ones(tensor.shape) for name, tensor in saved.items()}
        load(fresh, tmp_path / "x", reader)
    assert differing(fresh, saved) == []
    assert sum(each.stat().st_size for each in (tmp_path / "x").iterdir()) < 256 * 1024


@in_all_ways
def test_large_tensors_and_odd_sizes(tmp_path, way):
    sizes = {"blocks": 128 * 1024 * 4 + 3, "exact": 128 * 1024, "one less": 128 * 1024 - 1, "stride": 4 * 2**20 + 4097}
    tensors = {name: noise(torch.uint8, size) for name, size in sizes.items()}
    tensors["matrix"] = noise(torch.bfloat16, 1111, 1013).T
    tensors["between"] = noise(torch.float64, 3)
    come_back(tmp_path / "x", tensors, way)


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
    for odd in range(1, 9):
        saved = {"before": noise(torch.uint8, odd), "x": noise(torch.complex128, 33, 25)}
        save(dict(saved), tmp_path / str(odd), way[0])
        fresh = {
            "before": torch.zeros(odd, dtype=torch.uint8),
            "x": torch.zeros(33, 100, dtype=torch.complex128)[:, :25],
        }
        load(fresh, tmp_path / str(odd), way[1])
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


@pytest.mark.slow
@pytest.mark.parametrize("way", MAIN_WAYS[1:], ids=" to ".join)
def test_many_tiny_tensors(tmp_path, way):
    come_back(tmp_path / "x", {f"layer {i}": noise(torch.float32, 1)[0] * 0 + i for i in range(2000)}, way)


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
        "odd address": (odd[8:].view(torch.complex64).view(whole.shape), odd),
        "subclass": ((plain := torch.full_like(whole, 7)).as_subclass(Named), plain),
    }


class Named(torch.Tensor):
    """A subclass that changes nothing."""


class OwnParameter(nn.Parameter):
    """The same, of parameters."""


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


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", WRITERS[:2])
def test_tied_and_shared_targets(tmp_path, writer, reader):
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))
    model[1].weight = model[0].weight
    save({"model": model.state_dict()}, tmp_path / "x", writer)
    fresh = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))
    fresh[1].weight = fresh[0].weight
    load({"model": fresh.state_dict()}, tmp_path / "x", reader)
    assert fresh[0].weight is fresh[1].weight
    assert differing(fresh.state_dict(), model.state_dict()) == []


@pytest.mark.parametrize("way", [way for way in WAYS if way[1] != "ckptman.load"], ids=" to ".join)
def test_another_dtype_is_converted_as_dcp_does(tmp_path, way):
    values = torch.tensor([[1.0, -2.5, 3.1415926], [float("nan"), float("inf"), 65536.0]])
    pairs = [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.int64),
        (torch.bool, torch.int8),
        (torch.float16, torch.float8_e4m3fn),
    ]
    saved = {f"{old} {new}": values.nan_to_num(1, posinf=9).to(old) for old, new in pairs}
    save(dict(saved), tmp_path / "x", way[0])
    fresh = {f"{old} {new}": torch.empty(2, 3, dtype=new) for old, new in pairs}
    load(fresh, tmp_path / "x", way[1])
    assert differing(fresh, {f"{old} {new}": saved[f"{old} {new}"].to(new) for old, new in pairs}) == []


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
            fresh = {"x": {name: blank(tensor) for name, tensor in saved.items()}}
            load(fresh, tmp_path / f"step-{step:010d}", reader)
            assert differing(fresh["x"], saved) == [], (step, reader)
    with ckptman.Checkpointer(tmp_path, fresh, deadline=None) as checkpointer:
        assert checkpointer.restore(step=2) == 2
        assert differing(fresh["x"], copies[1]) == []


def test_what_shares_memory_with_itself_is_refused_and_the_checkpoint_not_blamed(tmp_path):
    layer = nn.Module()
    layer.register_buffer("mask", torch.ones(2, 3))
    with ckptman.Checkpointer(tmp_path, {"layer": layer}) as checkpointer:
        checkpointer.save(1)
    layer.mask = torch.ones(1, 3).expand(2, 3)
    for root in (tmp_path, tmp_path / "new"):
        with (
            pytest.raises(ckptman.ConfigError, match=r"layer\.mask is expanded: .*clone\(\)"),
            ckptman.Checkpointer(root, {"layer": layer}) as checkpointer,
        ):
            checkpointer.restore()
            checkpointer.save(1)
    layer.mask = layer.mask.clone().zero_()
    with ckptman.Checkpointer(tmp_path, {"layer": layer}) as checkpointer:
        assert checkpointer.restore() == 1
    assert torch.equal(layer.mask, torch.ones(2, 3))
