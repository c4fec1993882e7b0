"""The order of samples: each exactly once, in one global order, whatever the number of ranks and interruptions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptman.data.shuffle import largest_share, permute, sample_ids, share


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 16, 17, 255, 256, 257, 1000, 4097])
def test_an_epoch_is_a_permutation(samples):
    for seed in (0, 1, 2**31 - 1):
        for epoch in (0, 1, 7):
            ids = sample_ids(epoch * samples, samples, samples, seed)
            assert sorted(ids.tolist()) == list(range(samples))


def test_epochs_and_seeds_differ_and_look_shuffled():
    samples = 2000
    orders = [
        sample_ids(0, samples, samples, 1),
        sample_ids(samples, samples, samples, 1),
        sample_ids(0, samples, samples, 2),
    ]
    line = np.arange(samples)
    for order in orders:
        # 1/sqrt(n) = 0.022 is the deviation of the correlation of random permutations
        assert abs(np.corrcoef(line, order.astype(float))[0, 1]) < 0.1
        assert (np.diff(order.astype(int)) == 1).mean() < 0.01
    assert abs(np.corrcoef(orders[0].astype(float), orders[1].astype(float))[0, 1]) < 0.1
    assert abs(np.corrcoef(orders[0].astype(float), orders[2].astype(float))[0, 1]) < 0.1


def test_the_order_is_frozen():
    """A run that was started by an older release goes on in the same order."""
    assert sample_ids(8, 8, 10, 1).tolist() == [7, 6, 5, 0, 2, 3, 8, 7]
    assert permute(np.array([0, 1, 10**12 - 1], np.uint64), 10**12, 3, 4).tolist() == [
        417452127149,
        166880886828,
        838521367954,
    ]


def test_a_huge_data_set_needs_no_memory():
    ids = sample_ids(10**15, 64, 10**13, 5)
    assert len(set(ids.tolist())) == 64
    assert int(ids.max()) < 10**13


@given(st.integers(0, 50), st.integers(1, 17))
def test_shares_are_neighbours_and_even_within_one(count, world_size):
    parts = [share(count, rank, world_size) for rank in range(world_size)]
    assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == count
    sizes = [end - start for start, end in parts]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == largest_share(count, world_size)


@settings(max_examples=200)
@given(
    samples=st.integers(1, 40),
    global_batch=st.integers(1, 12),
    seed=st.integers(0, 2**31 - 1),
    attempts=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=6),
)
def test_any_chain_of_world_sizes_sees_the_uninterrupted_order(samples, global_batch, seed, attempts):
    seen = []
    position = 0
    for world_size, steps in attempts:
        for _ in range(steps):
            for rank in range(world_size):
                start, end = share(global_batch, rank, world_size)
                seen += sample_ids(position + start, end - start, samples, seed).tolist()
            position += global_batch
    assert seen == sample_ids(0, position, samples, seed).tolist()
