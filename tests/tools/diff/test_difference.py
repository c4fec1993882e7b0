"""The numbers of a diff, against the same numbers computed the plain way, for every dtype there is."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.tools.diff import difference
from ckptman.tools.diff.difference import Difference, has_values, measure, measuring_threads
from tests.engine.dcp.test_values import DTYPES, QUANTIZED, name_of, noise

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")

BITS_ONLY = {"bits16", "bits1x8", "bits2x4", "bits4x2", "bits8", "float4_e2m1fn_x2"} | {
    f"{sign}int{count}" for sign in ("", "u") for count in range(1, 8)
}


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def compare(a, b):
    return measure(raw(a), raw(b), (a.dtype, b.dtype))


def plainly(a, b):
    """The same by NumPy on whole arrays, for floating point and complex numbers."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide).numpy().reshape(-1), b.to(wide).numpy().reshape(-1)
    finite = np.isfinite(x) & np.isfinite(y)
    apart = (raw(a).view(-1, a.itemsize) != raw(b).view(-1, b.itemsize)).any(dim=1).numpy()
    with np.errstate(all="ignore"):
        gap = np.abs(x - y)[finite]
    return {
        "changed": int(apart.sum()),
        "largest": gap.max(initial=0.0),
        "distance": np.linalg.norm(gap),
        "norm": np.linalg.norm(x[np.isfinite(x)]),
        "unmeasured": int((apart & ~finite).sum()),
        "nan": (int(np.isnan(x).sum()), int(np.isnan(y).sum())),
        "inf": (int(np.isinf(x).sum()), int(np.isinf(y).sum())),
    }


def agrees(found, expected):
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name


FLOATING = [each for each in DTYPES if each.is_floating_point or each.is_complex]


@pytest.mark.parametrize("dtype", [each for each in FLOATING if has_values(each)], ids=name_of)
def test_any_bits_of_any_floating_dtype(dtype):
    a, b = noise(dtype, 911), noise(dtype, 7, 911)[3]
    with np.errstate(all="ignore"):
        agrees(compare(a, b), plainly(a, b))


@pytest.mark.parametrize("dtype", [each for each in DTYPES if name_of(each) not in QUANTIZED], ids=name_of)
def test_one_element_of_every_dtype(dtype):
    a, b = noise(dtype, 50), noise(dtype, 50)
    assert compare(a, b).changed == 0
    raw(b)[7 * dtype.itemsize] ^= 1
    found = compare(a, b)
    assert (found.elements, found.changed) == (50, 1)
    assert found.measured == (name_of(dtype) not in BITS_ONLY)
    assert (found.relative is None) == (not found.measured)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float64, torch.bfloat16)], ids=str)
def test_in_threads(monkeypatch, dtypes):
    a, b = (noise(dtype, 1000 + n, 3)[:999].contiguous() for n, dtype in enumerate(dtypes))
    expected, before = measure(raw(a), raw(b), dtypes), torch.get_num_threads()
    monkeypatch.setattr(difference, "SLICE_ELEMENTS", 64)
    with measuring_threads() as pool:
        assert torch.get_num_threads() == 1
        agrees(measure(raw(a), raw(b), dtypes, pool), vars(expected))
    assert torch.get_num_threads() == before


def test_booleans_and_integers():
    found = compare(torch.tensor([True, False, True, True]), torch.tensor([True, True, True, False]))
    assert (found.changed, found.largest, found.relative) == (2, 1, pytest.approx(math.sqrt(2 / 3)))
    big = torch.tensor([2**62 + 1, -(2**63), 5])
    found = compare(big, torch.tensor([2**62, 2**63 - 1, 5]))
    assert (found.changed, found.largest) == (2, 2**64 - 1)
    assert type(found.largest) is int
    assert compare(big, torch.tensor([2**62, -(2**63), 5])).largest == 1
    unsigned = torch.tensor([2**63], dtype=torch.uint64)
    assert compare(unsigned, torch.tensor([0], dtype=torch.uint64)).largest == 2**63


def test_zeros():
    zero = torch.zeros(5)
    found = compare(zero, -zero)
    assert (found.changed, found.largest, found.relative) == (5, 0, 0)
    assert compare(zero, zero + 1).relative == math.inf
    assert compare(zero, zero).relative == 0


def test_what_is_not_finite_is_counted_and_not_measured():
    nan, inf = math.nan, math.inf
    a = torch.tensor([1.0, nan, inf, 2.0, nan, 3.0, inf])
    b = torch.tensor([1.5, nan, inf, nan, 4.0, 3.0, -inf])
    found = compare(a, b)
    assert (found.changed, found.unmeasured) == (4, 3)
    assert (found.largest, found.distance, found.norm) == (0.5, 0.5, pytest.approx(math.sqrt(14)))
    assert (found.nan, found.inf) == ((2, 2), (2, 2))


def test_numbers_whose_squares_are_none():
    huge, tiny = torch.full((4,), 1e200, dtype=torch.float64), torch.full((4,), 1e-200, dtype=torch.float64)
    assert compare(huge, huge * 1.5).relative == pytest.approx(0.5)
    assert compare(tiny, tiny * 1.5).relative == pytest.approx(0.5)
    assert compare(huge, huge * 1.5).unmeasured == 0
    assert compare(huge * 1e108, -huge * 1e108).largest == math.inf


def test_between_two_dtypes_values_count():
    a = torch.tensor([1.0, 1.0 + 2**-10, math.nan, -0.0])
    found = compare(a, a.bfloat16())
    assert (found.changed, found.largest) == (1, 2**-10)
    assert compare(torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, 4.0])).changed == 1
    assert compare(torch.tensor([1.0, 2.0]), torch.tensor([1 + 0j, 2 + 1j])).largest == 1
    assert not has_values(torch.int4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=40), st.integers(1, 40))
def test_in_whatever_slices(pairs, size):
    a, b = (torch.tensor(column, dtype=torch.float32) for column in zip(*pairs))
    whole, before = compare(a, b), difference.SLICE_ELEMENTS
    difference.SLICE_ELEMENTS = size
    try:
        sliced = compare(a, b)
    finally:
        difference.SLICE_ELEMENTS = before
    agrees(sliced, {name: getattr(whole, name) for name in Difference.__dataclass_fields__})
