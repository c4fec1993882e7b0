"""Which element is saved how often: an exact look at the boxes of one tensor."""

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.storage.format.coverage import first_flaw
from tests.storage.format.test_chunk_table import bricks


@settings(max_examples=400)
@given(st.integers(0, 10**9))
def test_the_first_flaw_is_found_exactly(seed):
    """Boxes that fill a tensor, and then, perhaps, one is lost, moved or added."""
    rng = random.Random(seed)
    shape = tuple(rng.randint(0, 5) for _ in range(rng.randint(0, 3)))
    boxes = bricks(shape, rng, rng.randint(0, 4))
    for _ in range(rng.randint(0, 2)):
        how, begins = rng.choice(["lost", "added", "moved"]), [rng.randint(0, size) for size in shape]
        if boxes and how != "added":
            boxes.pop(rng.randrange(len(boxes)))
        if how != "lost":
            boxes.append((begins, [rng.randint(0, size - begin) for begin, size in zip(begins, shape)]))
    rng.shuffle(boxes)
    counts = np.zeros(shape, np.int64)
    for offsets, sizes in boxes:
        counts[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))] += 1
    wrong = [tuple(place) for place in np.argwhere(counts != 1).tolist()]
    assert first_flaw(boxes, shape) == ((wrong[0], counts[wrong[0]]) if wrong else None)


def test_scalars_and_empty_tensors():
    assert first_flaw([((), ())], ()) is None
    assert first_flaw([], ()) == ((), 0)
    assert first_flaw([((), ()), ((), ())], ()) == ((), 2)
    assert first_flaw([], (0, 3)) is None
    assert first_flaw([((0, 0), (0, 3)), ((0, 0), (0, 3))], (0, 3)) is None
    assert first_flaw([((0,), (0,)), ((0,), (4,)), ((4,), (0,))], (4,)) is None, "ranks with nothing to save"


@pytest.mark.parametrize(("rows", "columns"), [(16_384, 1), (1, 16_384), (128, 128)])
def test_many_chunks_take_no_quadratic_time(rows, columns):
    boxes = [((row * 2, column * 3), (2, 3)) for row in range(rows) for column in range(columns)]
    random.Random(0).shuffle(boxes)
    begun = time.process_time()
    assert first_flaw(boxes, (rows * 2, columns * 3)) is None
    assert first_flaw(boxes[:-1], (rows * 2, columns * 3)) is not None
    # A second or so on a slow machine; comparing all pairs takes minutes.
    assert time.process_time() - begun < 10
