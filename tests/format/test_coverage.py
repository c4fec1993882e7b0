"""Which element is saved how often: an exact look at the boxes of one tensor."""

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.format.coverage import first_flaw


def brute_force(boxes, shape):
    for element in itertools.product(*map(range, shape)):
        times = sum(
            all(o <= e < o + s for o, s, e in zip(offsets, sizes, element, strict=True)) for offsets, sizes in boxes
        )
        if times != 1:
            return element, times
    return None


@st.composite
def tilings(draw):
    """A tensor cut by random guillotine cuts, and then, perhaps, spoilt: a box lost, moved, grown or doubled."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[dim]))
        for begin, size in ((0, cut), (cut, sizes[dim] - cut)):
            boxes.append(
                (
                    tuple(o + begin * (d == dim) for d, o in enumerate(offsets)),
                    tuple(size if d == dim else s for d, s in enumerate(sizes)),
                )
            )
    for _ in range(draw(st.integers(0, 2))):
        begins = tuple(draw(st.integers(0, size)) for size in shape)
        extra = (begins, tuple(draw(st.integers(0, size - begin)) for begin, size in zip(begins, shape, strict=True)))
        how = draw(st.sampled_from(["lost", "more", "moved"]))
        if boxes and how != "more":
            boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        if how != "lost":
            boxes.append(extra)
    return shape, draw(st.permutations(boxes))


@given(tilings())
@settings(max_examples=400, deadline=None)
def test_flaws_are_found_exactly(tiling):
    shape, boxes = tiling
    assert first_flaw(boxes, shape) == brute_force(boxes, shape)


def test_scalars_and_empty_tensors():
    assert first_flaw([((), ())], ()) is None
    assert first_flaw([], ()) == ((), 0)
    assert first_flaw([((), ()), ((), ())], ()) == ((), 2)
    assert first_flaw([], (0, 3)) is None
    assert first_flaw([((0, 0), (0, 3)), ((0, 0), (0, 3))], (0, 3)) is None
    assert first_flaw([((0,), (0,)), ((0,), (4,)), ((4,), (0,))], (4,)) is None, "ranks with nothing to save"


def grid(rows, columns):
    return [((row * 2, column * 3), (2, 3)) for row in range(rows) for column in range(columns)]


@pytest.mark.parametrize(("rows", "columns"), [(16_384, 1), (1, 16_384), (128, 128)])
def test_many_chunks_take_no_quadratic_time(rows, columns):
    boxes = grid(rows, columns)
    random.Random(0).shuffle(boxes)
    begun = time.process_time()
    assert first_flaw(boxes, (rows * 2, columns * 3)) is None
    assert first_flaw(boxes[:-1], (rows * 2, columns * 3)) is not None
    # A second or so on a slow machine; comparing all pairs takes minutes.
    assert time.process_time() - begun < 10
