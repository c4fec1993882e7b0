"""Each sample once an epoch, on any number of ranks."""

import pytest
from torch.utils.data import BatchSampler, DataLoader

import ckptman
from ckptman.errors import ConfigError


def loaders(size, world_size, batch_size, state=None):
    found = []
    for rank in range(world_size):
        sampler = ckptman.ElasticSampler(size, seed=11, rank=rank, world_size=world_size)
        loader = DataLoader(range(size), batch_size, sampler=sampler, collate_fn=list)
        found.append(ckptman.ResumableLoader(loader))
        if state is not None:
            found[-1].load_state_dict(state)
    return found


@pytest.mark.parametrize("size", [24, 25, 31, 97])
@pytest.mark.parametrize("worlds", [(2, 1, 2), (1, 3, 2), (4, 2, 1), (3, 3, 3)])
def test_each_sample_once_while_the_ranks_change(size, worlds):
    """Each number of ranks makes three steps; the last goes on to the end of the second epoch."""
    seen = []
    state = None
    for turn, world_size in enumerate(worlds):
        ranks = loaders(size, world_size, 2, state)
        steps = 0
        while ranks[0].epoch < 2:
            for batches in zip(*ranks, strict=True):
                seen += [each for batch in batches for each in batch]
                steps += 1
                if steps == 3 and turn < len(worlds) - 1:
                    break
            else:
                continue
            break
        states = [each.state_dict() for each in ranks]
        assert all(each == states[0] for each in states), "ranks differ"
        state = states[0]
    left = 2 * size - len(seen)
    assert 0 <= left < worlds[-1], "left for the epoch after"
    assert sorted(seen[:size]) == list(range(size)) or left
    counts = [seen.count(each) for each in range(size)]
    assert sum(2 - count for count in counts) == left
    assert max(counts) == 2


def test_the_order_is_that_of_one_rank():
    alone = list(ckptman.ElasticSampler(50, seed=4, rank=0, world_size=1))
    assert sorted(alone) == list(range(50)) != alone
    shared = [list(ckptman.ElasticSampler(50, seed=4, rank=rank, world_size=5)) for rank in range(5)]
    assert [each for row in zip(*shared, strict=True) for each in row] == alone


def test_another_epoch_has_another_order():
    sampler = ckptman.ElasticSampler(50, seed=4, rank=0, world_size=1)
    first = list(sampler)
    sampler.set_epoch(1)
    assert sorted(sampler) == sorted(first)
    assert list(sampler) != first


def test_unshuffled():
    assert list(ckptman.ElasticSampler(7, shuffle=False, rank=1, world_size=2)) == [1, 3, 5]


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="2 samples cannot be shared out over 3 ranks"):
        ckptman.ElasticSampler(2, rank=0, world_size=3)
    with pytest.raises(ConfigError, match="rank 2 is not below"):
        ckptman.ElasticSampler(9, rank=2, world_size=2)

    class Own(BatchSampler):
        pass

    with pytest.raises(ConfigError, match="ElasticSampler within a Own"):
        ckptman.ResumableLoader(DataLoader(range(9), batch_sampler=Own(ckptman.ElasticSampler(9), 2, False)))


def test_an_epoch_that_is_set_again_goes_on_where_it_is():
    loader = loaders(20, 1, 4)[0]
    iterator = iter(loader)
    next(iterator), next(iterator)
    again = loaders(20, 1, 4)[0]
    again.load_state_dict(loader.state_dict())
    again.sampler.set_epoch(0)
    assert len(again) == 5
    assert [*again] == [*iterator]


def test_its_length_is_that_of_the_epoch():
    """Of 20 samples on three ranks, two are left over, and come first in the next epoch."""
    loader = loaders(20, 3, 2)[0]
    for _ in range(3):
        batches = len(loader)
        assert len([*loader]) == batches
