"""Containers that are known before a byte is copied, and files composed of them piece by piece."""

import io
import itertools
import random
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckptman.engine.state import file_layout as image
from ckptman.engine.state.file_layout import Image, Layout, copy_range, frame_of, in_order, payload_of, pickled
from ckptman.engine.state.local_shards import is_plain
from tests.engine.dcp.test_values import SAVED, Named, bits, name_of, noise, shapes_and_views

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")

SHAPES = [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4, 5, 6), (1, 1, 1), (100_003,)]


def container_of(tensor):
    frame = frame_of(tensor.dtype, tuple(tensor.shape))
    payload = bytes(bits(tensor).numpy())
    assert len(payload) == frame.payload_bytes
    return frame.head + payload + frame.tail


@pytest.mark.parametrize("dtype", SAVED, ids=name_of)
def test_a_frame_around_a_payload_is_a_file_of_torch_save(dtype):
    for shape in SHAPES:
        tensor = noise(dtype, *shape)
        data = container_of(tensor)
        assert len(data) == frame_of(dtype, shape).size_bytes
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        assert (loaded.dtype, loaded.shape, loaded.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(bits(loaded), bits(tensor))
        assert payload_of(io.BytesIO(data), dtype, shape) == (len(frame_of(dtype, shape).head) if shape else None) or (
            tensor.numel() < 2
        )


def saved(value, **options):
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_payload_of_what_torch_saved_is_found(shape):
    for dtype in SAVED:
        tensor = noise(dtype, *shape)
        data = saved(tensor)
        at = payload_of(io.BytesIO(data), dtype, shape)
        assert data[at : at + tensor.nbytes] == bytes(bits(tensor).numpy()), dtype


def test_the_payload_is_found_with_other_alignments():
    from torch.utils.serialization import config

    tensor = noise(torch.float32, 33)
    with config.patch({"save.storage_alignment": 4096}):
        data = saved(tensor)
    at = payload_of(io.BytesIO(data), torch.float32, (33,))
    assert at % 4096 == 0
    assert data[at : at + tensor.nbytes] == bytes(bits(tensor).numpy())


BASE = noise(torch.float32, 6, 8)
OTHERS = {
    "transposed": BASE.T,
    "columns": BASE[:, 2:5],
    "rows inside of more": BASE[2:4],
    "rows at the front of more": BASE[:2],
    "expanded": BASE[:1].expand(6, 8),
    "channels last": noise(torch.float32, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "conjugate": noise(torch.complex64, 3, 4).conj(),
    "negative": noise(torch.complex64, 3, 4).conj().imag,
    "parameter": nn.Parameter(BASE.clone()),
    "requires grad": BASE.clone().requires_grad_(),
    "subclass": BASE.clone().as_subclass(Named),
    "a dict": {"x": BASE.clone()},
    "a list": [BASE.clone()],
    "a number": 5,
    "two of one storage": (BASE, BASE.T),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_only_torch_load_can_read_is_left_to_it(kind):
    value = OTHERS[kind]
    shape, dtype = tuple(getattr(value, "shape", (6, 8))), getattr(value, "dtype", torch.float32)
    assert payload_of(io.BytesIO(saved(value)), dtype, shape) is None


def test_what_is_no_such_container_is_left_to_torch_load(tmp_path):
    tensor = noise(torch.float32, 4, 8)
    data = saved(tensor)
    assert payload_of(io.BytesIO(data), torch.float32, (4, 8)) is not None
    wrong = [(torch.float32, (8, 4)), (torch.float32, (32,)), (torch.int32, (4, 8)), (torch.float64, (4, 4))]
    for dtype, shape in wrong:
        assert payload_of(io.BytesIO(data), dtype, shape) is None, (dtype, shape)
    damaged = [b"", b"PK", data[:-1], data[:50], data[30:], bytes(len(data))]
    damaged += [saved(tensor, _use_new_zipfile_serialization=False)]
    for each in damaged:
        assert payload_of(io.BytesIO(each), torch.float32, (4, 8)) is None
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    assert payload_of(packed, torch.float32, (4, 8)) is None


def test_a_big_endian_payload_is_left_to_torch_load():
    data, swapped = saved(noise(torch.float32, 8)), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(swapped, "w") as target:
        for info in source.infolist():
            text = b"big" if info.filename.endswith("byteorder") else source.read(info)
            target.writestr(info.filename, text)
    assert payload_of(swapped, torch.float32, (8,)) is None


def test_a_shape_that_looks_like_a_zip_record(tmp_path):
    shape = (0x08074B50,)
    frame = frame_of(torch.uint8, shape)
    with (tmp_path / "x").open("wb+") as file:
        file.write(frame.head)
        file.truncate(len(frame.head) + frame.payload_bytes)
        file.seek(0, io.SEEK_END)
        file.write(frame.tail)
        assert payload_of(file, torch.uint8, shape) == len(frame.head)
        assert payload_of(file, torch.uint8, (0x08074B51,)) is None


def test_a_frame_does_not_depend_on_the_default_device():
    expected = frame_of(torch.float32, (17, 19))
    frame_of.cache_clear()
    try:
        with torch.device("meta"):
            assert frame_of(torch.float32, (17, 19)) == expected
    finally:
        frame_of.cache_clear()


def test_which_tensors_are_plain():
    assert all(map(is_plain, (BASE, BASE.T, nn.Parameter(BASE), nn.Buffer(BASE), BASE.to(torch.float8_e4m3fn))))
    assert not is_plain(BASE.as_subclass(Named))
    assert not is_plain(BASE.to_sparse())


@pytest.mark.parametrize("one", [0, 1, True, False, None, 1.0, 0.0, -0.0, "1", (1,), (True,), (1.0,), (0.0,), (-0.0,)])
def test_values_that_are_equal_and_not_the_same_have_pickles_of_their_own(one):
    for value in (0, 1, True, False, 1.0, 0.0, -0.0, (1,), (True,), (1.0,), (0.0,), (-0.0,), one):
        found = torch.load(io.BytesIO(pickled(value)), weights_only=True)
        assert repr(found) == repr(value)


@pytest.mark.parametrize("value", ["x" * 100_000, (1.5,) * 100_000, ("x" * 100_000, 1)], ids=["text", "tuple", "both"])
def test_what_is_long_is_not_kept_when_it_is_pickled(value):
    """A text that grows from save to save, such as a log, would be kept as often as it is saved."""
    kept = image._pickled_plain.cache_info().currsize
    assert torch.load(io.BytesIO(pickled(value)), weights_only=True) == value
    assert image._pickled_plain.cache_info().currsize == kept


def whole_of(parts, memory, size):
    """The file that the parts make, put together byte by byte."""
    whole = bytearray(size)
    whole[: len(memory)] = memory
    for place, part in parts:
        data = bytes(bits(part).numpy()) if isinstance(part, torch.Tensor) else bytes(part)
        whole[place : place + len(data)] = data
    return bytes(whole)


def some_parts(dice, begin):
    """Bytes and tensors, with gaps between some of them."""
    kinds = [torch.float32, torch.bfloat16, torch.complex64, torch.uint8, torch.bool, torch.float64]
    parts = []
    at = begin
    for _ in range(dice.randrange(1, 12)):
        at = -(-at // 64) * 64 + 64 * dice.choice([0, 0, 1, 5])
        kind = dice.randrange(4)
        rows, columns = dice.randrange(1, 40), dice.randrange(1, 40)
        if kind == 0:
            parts.append((at, dice.randbytes(dice.randrange(1, 3000))))
        elif kind == 1:
            parts.append((at, memoryview(bytearray(dice.randbytes(dice.randrange(1, 300))))))
        else:
            tensor = noise(dice.choice(kinds), rows, columns)
            tensor = [tensor, tensor.T, tensor[::2], tensor[:, 1::3], tensor.conj(), tensor.T.conj()][dice.randrange(6)]
            if not tensor.numel():
                continue
            parts.append((at, tensor))
        part = parts[-1][1]
        at += part.nbytes if isinstance(part, torch.Tensor) else len(part)
    return parts


def differing_views(image, whole, dice, count):
    """Offsets and sizes at which an image shows something else than the whole has there."""
    wrong = []
    for _ in range(count if whole else 0):
        offset = 16 * dice.randrange(len(whole) // 16)
        size = min(16 * dice.choice([1, 3, 64, 257, 4096]), len(whole) - offset)
        scratch = memoryview(bytearray(b"\xee" * size))
        if bytes(image.view(offset, scratch)) != whole[offset : offset + size]:
            wrong.append((offset, size))
    return wrong


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_any_view_is_that_of_the_whole(seed):
    """Of staged memory, and of what comes after it."""
    dice = random.Random(seed)
    memory = bytearray(dice.randbytes(4096 * dice.choice([0, 0, 1, 2, 3])))
    parts = some_parts(dice, len(memory)) if dice.randrange(4) else []
    image = Image(dice.sample(parts, len(parts)), memoryview(memory))
    assert image.size_bytes % 4096 == 0
    whole = whole_of(parts, memory, image.size_bytes)
    assert bytes(image.view(0, memoryview(bytearray(len(whole))))) == whole
    assert differing_views(image, whole, dice, 40) == []
    if memory:
        view = image.view(0, memoryview(bytearray(64)))
        memory[5] ^= 0xFF
        assert view[5] == memory[5], "it is handed out without a copy"


def test_threads_may_look_at_the_same_image():
    from concurrent.futures import ThreadPoolExecutor

    parts = some_parts(random.Random(5), 0)
    image = Image(parts)
    whole = whole_of(parts, b"", image.size_bytes)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda seed: differing_views(image, whole, random.Random(seed), 50), range(8))
    assert all(each == [] for each in found)


def test_an_empty_part_hides_nothing():
    data = bytes(range(1, 129))
    image = Image([(0, b"x" * 64), (64, data), (64, torch.empty(0))])
    for offset in (0, 64, 80, 176):
        view = bytes(image.view(offset, memoryview(bytearray(16))))
        assert view == (b"x" * 64 + data)[offset : offset + 16], offset


def test_a_layout_leaves_no_two_things_at_one_place():
    dice = random.Random(1)
    sizes = [(dice.choice(SAVED), dice.choice([*SHAPES, (1031, 257), (2**20,)])) for _ in range(200)]
    layout = Layout()
    large = [dtype.itemsize * torch.Size(shape).numel() >= 2**20 for dtype, shape in sizes]
    order = in_order(sizes)
    assert sorted(order) == list(range(200))
    assert [large[number] for number in order] == sorted(large, reverse=True)
    spans = []
    for number in order:
        dtype, shape = sizes[number]
        placed = layout.add_tensor(dtype, shape)
        assert placed.payload % (4096 if large[number] else 64) == 0
        assert placed.offset + placed.bytes <= layout.end
        spans.append((placed.offset, placed.offset + placed.bytes))
    spans += [(at.offset, at.offset + at.bytes) for at in (layout.add_bytes(dice.randbytes(77)) for _ in range(9))]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert layout.end <= layout.page_end() < layout.end + 4096


def views():
    conjugate = torch.tensor(1 + 2j).conj()
    return {
        **{name: each.detach() for name, each in shapes_and_views().items() if each.numel()},
        "conjugate vector": noise(torch.complex64, 7, 9)[0].conj(),
        "five dimensions": noise(torch.int16, 3, 4, 2, 5, 3).permute(4, 2, 0, 3, 1),
        "bool": noise(torch.bool, 9, 9).T,
        "fp8": noise(torch.float8_e5m2, 6, 7).T,
        "conjugate scalar": conjugate,
        "negative scalar": conjugate.imag,
    }


@pytest.mark.parametrize("kind", views())
def test_a_range_of_a_tensor_in_row_major_order(kind):
    tensor, dice = views()[kind], random.Random(kind)
    whole, item = bits(tensor), tensor.dtype.itemsize
    for _ in range(60):
        start = dice.randrange(tensor.numel())
        count = dice.randrange(tensor.numel() - start + 1)
        around = torch.full(((count + 2) * item,), 0xEE, dtype=torch.uint8)
        if tensor.dtype.is_complex or item == 8:
            around = torch.full((count + 2, item), 0xEE, dtype=torch.uint8).view(-1)
        out = around[item : item * (count + 1)].view(tensor.dtype)
        copy_range(tensor, start, out)
        assert torch.equal(around[item : item * (count + 1)], whole[start * item : (start + count) * item])
        assert (around[:item] == 0xEE).all()
        assert (around[item * (count + 1) :] == 0xEE).all(), "it wrote beside its place"
