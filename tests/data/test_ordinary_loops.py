"""Loops over data as people write them: cut after any step, they compute what the whole run does, or a warning names
what does not."""

import contextlib
import sys
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import ckptman
from ckptman import ElasticSampler, ResumableLoader, RNGState
from ckptman.data.batch_digest import digest_of
from tests.helpers.ranks import run_ranks

EPOCHS = 3


class Noisy(Dataset[torch.Tensor]):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index + torch.rand(2)


class Prefetcher:
    """Has a batch ready before it is asked for, as those of timm and NVIDIA do."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        ready = None
        for batch in self.loader:
            if ready is not None:
                yield ready
            ready = batch * 2
        yield ready


class Drawing(Prefetcher):
    """Draws for each batch."""

    def __iter__(self):
        for batch in self.loader:
            yield batch + torch.rand(1)


def plain(**more):
    return DataLoader(Noisy(), 2, shuffle=True, **more)


def elastic(**more):
    return DataLoader(Noisy(), 2, sampler=ElasticSampler(8, rank=0, world_size=1), **more)


LOADERS = {
    "plain": plain,
    "elastic": elastic,
}


def nothing(loader):
    """What a loop does at the head of an epoch."""


def look(loader):
    assert len(next(iter(loader))) == 2


def look_twice(loader):
    look(loader)
    look(loader)


def train(root, make, head, cut=None, tail=nothing):
    """Train until the step `cut`, from the newest checkpoint. Returns what each step computed, and the warnings."""
    loader = ResumableLoader(make())
    torch.manual_seed(1)
    computed, state = {}, {"data": loader, "rng": RNGState()}
    with (
        warnings.catch_warnings(record=True) as caught,
        contextlib.suppress(SystemExit),
        ckptman.Checkpointer(root, state, save_policy=1, async_save=False, deadline=None, watchdog=None) as run,
    ):
        warnings.simplefilter("always")
        step = run.restore()
        for epoch in range(loader.epoch, EPOCHS):
            head(loader)
            for batch in loader:
                step += 1
                computed[step] = f"{epoch} {(batch.sum() + torch.rand(())).item().hex()}"
                run.step(step)
                if step == cut:
                    sys.exit("killed")
            tail(loader)
    return computed, [str(each.message) for each in caught if each.category is RuntimeWarning]


@pytest.fixture
def check_cuts(tmp_path):
    def check(make, head=nothing, cuts=range(1, 12), warned=(), tail=nothing):
        whole, told = train(tmp_path / "whole", make, head, tail=tail)
        assert sorted(whole) == list(range(1, 13))
        assert not told
        for cut in cuts:
            root = tmp_path / str(cut)
            first, _ = train(root, make, head, cut, tail)
            then, told = train(root, make, head, tail=tail)
            if warned:
                assert any(each in message for each in warned for message in told), told
            else:
                assert first | then == whole
                assert bool(told) == (cut % 4 == 0), told

    return check


@pytest.mark.parametrize("head", [nothing, look, look_twice])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_look_at_a_batch_is_no_epoch(check_cuts, kind, head):
    check_cuts(LOADERS[kind], head, cuts=[cut for cut in range(1, 12) if cut % 4 or head is nothing])


def test_behind_the_last_batch_there_is_nothing_to_look_at(tmp_path):
    train(tmp_path, plain, look, cut=4)
    with pytest.raises(StopIteration):
        train(tmp_path, plain, look)


def limited(root, cut=None):
    """Each pass ends by a `break` before its fourth batch is trained."""
    loader, seen = ResumableLoader(DataLoader(torch.arange(8))), []
    state = {"data": loader, "rng": RNGState()}
    with (
        contextlib.suppress(SystemExit),
        ckptman.Checkpointer(root, state, save_policy=1, async_save=False, deadline=None, watchdog=None) as run,
    ):
        step = run.restore()
        for _ in range(loader.epoch, 4):
            for batch in loader:
                if loader.batch > 3:
                    break
                step += 1
                seen.append((step, loader.epoch, batch.item()))
                run.step(step)
                if step == cut:
                    sys.exit("killed")
    return seen


def test_a_pass_that_is_resumed_and_left_at_once_is_an_epoch(tmp_path):
    whole = limited(tmp_path / "whole")
    assert [(epoch, sample) for _, epoch, sample in whole] == [(epoch, n) for epoch in range(4) for n in range(3)]
    for cut in range(1, 12):
        assert limited(tmp_path / str(cut), cut) + limited(tmp_path / str(cut)) == whole


def test_a_prefetcher_around_a_loader(check_cuts):
    check_cuts(lambda: Prefetcher(plain(num_workers=1)), cuts=(1, 6, 8, 11))


@pytest.mark.parametrize(
    "batch",
    [
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.fft.fft(torch.ones(4)).conj(),
        lambda: torch.ones(4, dtype=torch.bfloat16),
        lambda: torch.ones(4).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        lambda: {"a": [1, "x", None, object()], "b": np.array(["x"], object)},
        lambda: torch.ones(0),
        lambda: torch.ones(3, 4).T,
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_whatever_a_batch_is_its_digest_is_a_text(batch):
    made = batch()
    assert digest_of([made]) == digest_of([made])
    assert digest_of([torch.arange(100_000)]) != digest_of([torch.arange(100_000) + 1])


def test_a_loader_that_does_not_give_the_same_batches_again_is_named(check_cuts):
    check_cuts(
        lambda: Drawing(plain()), cuts=(2, 6, 11), warned=["Drawing does not give the same batches again: batch"]
    )


def test_a_pass_that_trains_nothing_is_named(tmp_path):
    loader = ResumableLoader(plain())
    with ckptman.Checkpointer(tmp_path, {"data": loader, "rng": RNGState()}, deadline=None, watchdog=None) as run:
        for step, _ in enumerate(loader, 1):
            run.step(step)
        assert len(list(loader)) == 4
        with pytest.warns(RuntimeWarning, match=r"a pass .* without a step\(\).*loader\.loader"):
            next(iter(loader))
        assert loader.epoch == 2
        assert len(list(loader.loader)) == 4
        assert loader.epoch == 2


def test_an_empty_pass_is_explained(tmp_path):
    train(tmp_path, plain, nothing, cut=4)
    _, told = train(tmp_path, plain, nothing)
    assert len(told) == 1
    assert "from behind the last batch of epoch 0, so this pass over the data is empty" in told[0]


# ---- other loaders, and generators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_persistent_workers_beside_the_training_are_named(tmp_path, generator):
    validation = DataLoader(Noisy(), num_workers=1, persistent_workers=True, generator=generator)
    own = ResumableLoader(plain(num_workers=1, persistent_workers=True))
    state = {"data": own, "rng": RNGState()}
    with (
        ckptman.Checkpointer(tmp_path, state, deadline=None, watchdog=None) as run,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        run.step(1)
        run.step(2)
    told = [str(each.message) for each in caught if "persistent_workers" in str(each.message)]
    assert len(told) == (generator is None)
    assert len(validation) == 8


def draw(root, seeds):
    torch.manual_seed(seeds[torch.distributed.get_rank() % len(seeds)])
    with ckptman.Checkpointer(root, {"rng": RNGState()}, save_policy=1, deadline=None, watchdog=None) as run:
        step = run.restore()
        run.step(step + 1)
        return torch.rand(()).item()


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_a_new_rank_draws_as_the_others_if_they_all_drew_alike(tmp_path, seeds):
    assert len(set(run_ranks(2, draw, tmp_path, seeds))) == len(set(seeds))
    first, second, third = run_ranks(3, draw, tmp_path, (7,))
    assert (first == second, third in (first, second)) == ((True, True) if seeds == (0, 0) else (False, False))
