"""A run that is cut anywhere, and goes on, computes what the run computed that nobody cut."""

import contextlib
import copy
import random
import traceback
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import ckptman
from ckptman.engine.state.snapshot import snapshot
from ckptman.errors import ConfigError

SAMPLES = 23
EPOCHS = 2


class Noisy(Dataset[torch.Tensor]):
    """Its samples depend on all generators, as those that are augmented do."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index), random.random(), float(np.random.rand()), float(torch.rand(()))])


class Counting(IterableDataset[int]):
    def __iter__(self):
        return iter(range(SAMPLES))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def drawn():
    return RandomSampler(Noisy(), replacement=True, num_samples=30, generator=seeded(7))


def shuffled(**more):
    return DataLoader(Noisy(), 4, shuffle=True, **more)


def stateful(data, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch deprecates, and torchdata calls
        return StatefulDataLoader(data, 4, shuffle=True, **more)


def prepared(loader, **config):
    accelerate = pytest.importorskip("accelerate")
    settings = accelerate.DataLoaderConfiguration(**config)
    return accelerate.Accelerator(cpu=True, dataloader_config=settings).prepare(loader)


PLAIN = {
    "shuffled": shuffled,
    "with a generator": lambda **more: shuffled(generator=seeded(5), **more),
    # Its sampler is not at its end when the last batch is there, and draws once more then.
    "one by one": lambda **more: DataLoader(Noisy(), 1, shuffle=True, generator=seeded(5), **more),
    "replaced": lambda **more: DataLoader(Noisy(), 4, sampler=drawn(), **more),
    "weighted": lambda **more: DataLoader(Noisy(), 4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES), **more),
    "single": lambda **more: DataLoader(Noisy(), batch_size=None, shuffle=True, **more),
    "dropping": lambda **more: shuffled(drop_last=True, **more),
    "prepared": lambda **more: prepared(shuffled(**more)),
    "seedable": lambda **more: prepared(shuffled(**more), use_seedable_sampler=True, data_seed=3),
}
"""Loaders that give wrapped what they give as they are."""


def elastic(**more):
    return DataLoader(Noisy(), 4, sampler=ckptman.ElasticSampler(SAMPLES, seed=3), **more)


KINDS = {
    **PLAIN,
    "elastic": elastic,
    "elastic, dropping": lambda **more: elastic(drop_last=True, **more),
    "stateful": lambda **more: stateful(Noisy(), **more),
}


def start(kind, **more):
    return ckptman.ResumableLoader(kind(**more))


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train(loader, seen, state=None):
    """A loop with dropout, which notes what it computes. Returns what it had seen and its state, by step."""
    rng, states = ckptman.RNGState(), []
    if state is not None:
        loader.load_state_dict(state[0])
        rng.load_state_dict(state[1])
    for _ in range(loader.epoch, EPOCHS):
        for batch in loader:
            loss = torch.nn.functional.dropout(batch, 0.5).sum() + torch.rand(())
            seen.append(f"{loss.item().hex()} {batch.reshape(-1, 4)[:, 0].tolist()}")
            states.append((len(seen), (loader.state_dict(), rng.state_dict())))
        torch.rand(3)  # an evaluation
        seen.append("epoch")
    return states


def check_cuts(make, run=train, cuts=lambda steps: range(1, steps + 1)):
    """Compare runs that are cut after some of their steps, and gone on with by other processes, with a whole one."""
    seed_all(0)
    whole = []
    states = run(make(), whole)
    for cut in cuts(len(states)):
        seed_all(99)
        before, state = states[cut - 1]
        seen = whole[:before]
        run(make(), seen, state)
        assert seen == whole, f"cut after step {cut}"


@pytest.mark.parametrize("kind", KINDS)
def test_cut_after_any_step(kind):
    check_cuts(lambda: start(KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("persistent", [False, True])
def test_cut_with_workers(kind, persistent):
    def cuts(steps):
        return 1, steps // EPOCHS, steps // EPOCHS + 1

    check_cuts(lambda: start(KINDS[kind], num_workers=2, persistent_workers=persistent), cuts=cuts)


class Tagged(Dataset[int]):
    """Its tag is set in each worker, as readers and connections are opened there."""

    tag = 0

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.tag + index


def tag_in_worker(worker):
    dataset = get_worker_info().dataset
    assert isinstance(dataset, Tagged)
    assert dataset[1] == 1
    dataset.tag = 100


def test_a_worker_is_shown_its_dataset():
    plain = DataLoader(Tagged(), batch_size=4, num_workers=1, worker_init_fn=tag_in_worker)
    batches = [batch.tolist() for batch in ckptman.ResumableLoader(plain)]
    assert batches == [batch.tolist() for batch in plain]
    assert batches[0] == [100, 101, 102, 103]


def test_what_was_consumed_is_not_read_again():
    read = []

    class Reads(Noisy):
        def __getitem__(self, index):
            read.append(index)
            return index

    _, second = goes_on(lambda: DataLoader(Reads(), 4))
    read.clear()
    assert next(iter(second)).tolist() == read == [8, 9, 10, 11]


@pytest.mark.parametrize("kind", PLAIN)
def test_a_wrapped_loader_gives_what_the_plain_one_gives(kind):
    seed_all(1)
    plain = PLAIN[kind]()
    expected = [batch.tolist() for _ in range(2) for batch in plain]
    seed_all(1)
    loader = start(PLAIN[kind])
    assert [batch.tolist() for _ in range(2) for batch in loader] == expected


class Positioned(Noisy):
    """A dataset with a state of its own."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return torch.cat([super().__getitem__(index), torch.tensor([float(self.reads)])])[1:]

    def state_dict(self):
        return {"reads": self.reads}

    def load_state_dict(self, state):
        self.reads = state["reads"]


def test_a_stateful_loader_keeps_its_own_state():
    check_cuts(lambda: ckptman.ResumableLoader(stateful(Positioned())))


def goes_on(make):
    """A loader of which two batches were consumed, its iterator, and another one that goes on from there."""
    first, second = (ckptman.ResumableLoader(make()) for _ in range(2))
    iterator = iter(first)
    next(iterator), next(iterator)
    second.load_state_dict(first.state_dict())
    return iterator, second


def test_an_iterable_dataset_is_read_again():
    iterator, second = goes_on(lambda: DataLoader(Counting(), 4))
    assert [each.tolist() for each in second] == [each.tolist() for each in iterator]
    assert second.epoch == 1


def test_a_pass_that_is_left_early_is_over_when_the_next_begins():
    loader = ckptman.ResumableLoader(DataLoader(range(SAMPLES), 4))
    for _ in loader:
        break
    assert (loader.epoch, loader.batch) == (0, 1)
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    assert (loader.epoch, loader.batch) == (1, 1)


def test_iterated_twice_at_once():
    loader = ckptman.ResumableLoader(DataLoader(range(SAMPLES), 4))
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(ConfigError, match="iterated anew"):
        next(first)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: DataLoader(Noisy(), 5, shuffle=True),
            "within an epoch of a loader with batches 6, and this one has 5",
        ),
        (lambda: DataLoader(Noisy(), 4), "samplers RandomSampler, BatchSampler, and this one has SequentialSampler"),
        (elastic, "another kind of loader"),
    ],
)
def test_data_of_another_length(make, told):
    loader = start(shuffled)
    next(iter(loader))
    with pytest.raises(ConfigError, match=told):
        start(make).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("value", [DataLoader(Noisy(), 4), iter([1, 2])], ids=["loader", "iterator"])
def test_a_plain_loader_in_the_state(value):
    with pytest.raises(ConfigError) as error:
        snapshot({"data": value}, 0)
    assert "ckptman.ResumableLoader" in str(error.value)
    assert len(str(error.value).splitlines()) <= 3


def test_a_position_behind_the_last_batch_fits_any_data():
    loader = start(shuffled)
    for _ in zip(range(6), loader):
        pass
    assert (loader.batch, loader.epoch) == (6, 0)
    for batch_size, batches in ((5, 5), (2, 12), (4, 6)):
        other = ckptman.ResumableLoader(DataLoader(Noisy(), batch_size, shuffle=True))
        other.load_state_dict(loader.state_dict())
        assert other.batch == len(other)
        again = ckptman.ResumableLoader(DataLoader(Noisy(), batch_size, shuffle=True))
        again.load_state_dict(other.state_dict())  # saved anew before it was iterated
        for each in (other, again):
            assert list(each) == []
            assert each.epoch == 1
            assert len(list(each)) == batches


def zipped(loaders, seen, state=None):
    """Two loaders at once, by one of which nothing is drawn before the other has drawn; and noise of a loop."""
    parts, states = [*loaders, ckptman.RNGState()], []
    for each, saved in zip(parts, state or ()):
        each.load_state_dict(saved)
    first, second = loaders
    for _ in range(first.epoch, EPOCHS):
        # The shorter one goes first: then both are over where it is.
        for batch, other in zip(first, second):
            noise = torch.rand((), generator=first.generator).item()
            seen.append((batch.tolist(), other.tolist(), noise, torch.rand(()).item()))
            states.append((len(seen), [each.state_dict() for each in parts]))
    return states


@pytest.mark.parametrize("kind", ["shuffled", "with a generator"])
def test_two_loaders_at_once(kind):
    check_cuts(lambda: [start(KINDS[kind]), ckptman.ResumableLoader(DataLoader(Noisy(), 3, shuffle=True))], zipped)


def test_workers_draw_other_numbers_in_each_epoch():
    sampler = DistributedSampler(Noisy(), 1, 0)  # draws nothing of the process
    loader = ckptman.ResumableLoader(DataLoader(Noisy(), 4, sampler=sampler, num_workers=1, persistent_workers=True))
    epochs = [{row[1].item() for batch in loader for row in batch} for _ in range(3)]
    assert len(set.union(*epochs)) == 3 * SAMPLES


class Blocks(Sampler[int]):
    """Shuffles block by block, each when it comes to it."""

    def __init__(self, generator):
        self.generator = generator

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        for start in range(0, SAMPLES, 6):
            for each in torch.randperm(min(6, SAMPLES - start), generator=self.generator):
                yield start + int(each)


@pytest.mark.parametrize("own", [True, False])
def test_a_sampler_that_draws_between_what_the_training_draws_is_told(own):
    def blocks():
        sampler = Blocks(torch.Generator() if own else None)
        return ckptman.ResumableLoader(DataLoader(Noisy(), 4, sampler=sampler))

    loader, again = blocks(), blocks()
    first = iter(loader)
    for _ in range(3):
        next(first), torch.rand(())
    again.load_state_dict(loader.state_dict())
    told = pytest.warns(RuntimeWarning, match="draws from the generators of the process while it is iterated")
    with contextlib.nullcontext() if own else told:
        rest = list(again)
    assert len(rest) == 3
    if own:
        assert [each[:, 0].tolist() for each in rest] == [each[:, 0].tolist() for each in first]


class Broken(Noisy):
    def __getitem__(self, index):
        if index == 5:
            raise OSError("sample 5 cannot be read")
        return super().__getitem__(index)


@pytest.mark.parametrize("by_accelerate", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_behind_a_sample_that_cannot_be_read_comes_the_next_batch(workers, by_accelerate):
    def broken():
        plain = DataLoader(Broken(), 4, num_workers=workers)
        return ckptman.ResumableLoader(prepared(plain) if by_accelerate else plain)

    loader, again = broken(), broken()
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(OSError, match="sample 5 cannot be read") as failed:
        next(iterator)
    traceback.clear_frames(
        failed.tb
    )  # a cycle of them holds the iterator: torch waits 5 s for workers at its collection
    del failed
    again.load_state_dict(loader.state_dict())
    for each in (iterator, iter(again)):
        assert next(each)[:, 0].tolist() == [8, 9, 10, 11]


def test_an_epoch_may_be_ended_early_and_a_loader_copied():
    loader = start(shuffled)
    next(iter(loader))
    assert copy.deepcopy(loader).state_dict() == loader.state_dict()
    loader.end_epoch()
    assert (loader.epoch, loader.batch, loader.state_dict()["begun"]) == (1, 0, False)


def test_what_has_no_position():
    with pytest.raises(ConfigError, match="out of order have no position"):
        ckptman.ResumableLoader(DataLoader(Noisy(), 4, num_workers=1, in_order=False))
    with pytest.raises(ConfigError, match="only once: give the DataLoader itself"):
        ckptman.ResumableLoader(iter(DataLoader(range(4))))
    for state in (None, 3, {}, {"epoch": 1}, {"epoch": 1, "batch": 0, "begun": False}):
        with pytest.raises(ConfigError, match="another kind of loader under this name, or none"):
            start(shuffled).load_state_dict(state)


def test_a_state_with_a_loader_and_without_generators_is_warned_of(tmp_path):
    loader = ckptman.ResumableLoader(DataLoader(Noisy(), 4))
    with pytest.warns(RuntimeWarning, match=r"Add ckptman.RNGState\(\)"):
        ckptman.Checkpointer(tmp_path, {"data": loader}, deadline=None).close()
    ckptman.Checkpointer(tmp_path, {"data": loader, "rng": ckptman.RNGState()}, deadline=None).close()
