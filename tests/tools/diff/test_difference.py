"""The numbers of a diff, against the same numbers computed by NumPy, for every dtype there is."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
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


def compare(a, b, pool=None):
    return measure(raw(a), raw(b), (a.dtype, b.dtype), pool)


def by_numpy(a, b):
    """The same of whole arrays, for floating point and complex numbers."""
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
        agrees(compare(a, b), by_numpy(a, b))


@pytest.mark.parametrize("dtype", [each for each in DTYPES if name_of(each) not in QUANTIZED], ids=name_of)
def test_one_element_of_every_dtype(dtype):
    a, b = noise(dtype, 50), noise(dtype, 50)
    assert compare(a, b).changed == 0
    raw(b)[7 * dtype.itemsize] ^= 1
    found = compare(a, b)
    assert (found.elements, found.changed) == (50, 1)
    assert found.measured == (found.relative is not None) == (name_of(dtype) not in BITS_ONLY)


FLOATS = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0]))


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=40), st.integers(1, 40), st.booleans())
def test_slices_and_threads_change_nothing(pairs, size, narrow):
    a, b = (torch.tensor(column, dtype=torch.float32) for column in zip(*pairs))
    b = b.bfloat16() if narrow else b
    expected = compare(a, b) if narrow else by_numpy(a, b)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, measuring_threads() as pool:
        assert torch.get_num_threads() == 1
        patch.setattr(difference, "SLICE_ELEMENTS", size)
        sliced = compare(a, b), compare(a, b, pool)
    assert torch.get_num_threads() == threads
    for found in sliced:
        agrees(found, vars(expected) if isinstance(expected, Difference) else expected)


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


def test_numbers_whose_squares_are_out_of_range():
    huge, tiny = torch.full((4,), 1e200, dtype=torch.float64), torch.full((4,), 1e-200, dtype=torch.float64)
    assert compare(huge, huge * 1.5).relative == pytest.approx(0.5)
    assert compare(tiny, tiny * 1.5).relative == pytest.approx(0.5)
    assert compare(huge, huge * 1.5).unmeasured == 0
    found = compare(huge * 1e108, -huge * 1e108)
    assert found.largest == found.distance == math.inf


def test_values_are_compared_between_two_dtypes():
    a = torch.tensor([1.0, 1.0 + 2**-10, math.nan, -0.0])
    found = compare(a, a.bfloat16())
    assert (found.changed, found.largest) == (1, 2**-10)
    assert compare(torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, 4.0])).changed == 1
    assert compare(torch.tensor([1.0, 2.0]), torch.tensor([1 + 0j, 2 + 1j])).largest == 1
