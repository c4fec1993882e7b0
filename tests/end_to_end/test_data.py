"""Loops over a DataLoader, killed at random steps: they end as the run that nobody killed, loss by loss."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from xxhash import xxh3_128_hexdigest

import ckptman
from tests.helpers.ranks import run_ranks, start_ranks

SAMPLES, EPOCHS, ACCUMULATED = 45, 3, 2


class Augmented(Dataset[torch.Tensor]):
    """Draws from all generators for each sample, and tells which one it is in the first number."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(index), *noise, index / SAMPLES])


def loader_of(kind, workers):
    data = Augmented()
    sampler = None
    if kind == "elastic":
        sampler = ckptman.ElasticSampler(SAMPLES, seed=5)
    elif dist.get_world_size() > 1:
        sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 3, sampler=sampler, shuffle=sampler is None, num_workers=workers)
    return ckptman.ResumableLoader(loader)


def train(root, kind, workers, die_after):
    """The loop: dropout, gradients of two batches to a step, a save every second step. Notes samples and losses."""
    rank = dist.get_rank()
    for seed_all in (random.seed, np.random.seed, torch.manual_seed):
        seed_all(rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1))
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = loader_of(kind, workers)
    state = {"model": model, "optimizer": optimizer, "data": loader, "rng": ckptman.RNGState()}
    policy = ckptman.EverySteps(2)
    with (
        open(Path(root, f"log-{rank}"), "a") as log,
        ckptman.Checkpointer(root, state, save_policy=policy, deadline=None) as checkpointer,
    ):
        step = start = checkpointer.restore()
        for _ in range(loader.epoch, EPOCHS):
            for batch in loader:
                loss = model(batch).square().mean() / ACCUMULATED
                loss.backward()
                told = f"{loss.item().hex()} {batch[:, 0].int().tolist()}"
                print(f"{loader.epoch}/{loader.batch}: {told}", file=log, flush=True)
                if loader.batch % ACCUMULATED and loader.batch < len(loader):
                    continue
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                checkpointer.step(step)
                if die_after is not None and step == start + die_after:
                    checkpointer.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return xxh3_128_hexdigest(weights)


def computed(root, rank):
    """What the run computed for each batch; of one that was computed again after a kill, the last time."""
    lines = (root / f"log-{rank}").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines)


def kill_at_random(root, world_size, kind, workers, draws, kills):
    """Run until it is finished, with kills on the way. Returns also how many there were."""
    for killed in range(kills):
        with start_ranks(world_size, train, str(root), kind, workers, next(draws)) as world:
            if world.join() == [0] * world_size:
                return world.results(), killed
    return run_ranks(world_size, train, str(root), kind, workers, None), kills


def check(tmp_path, world_size, kind, workers, kills, rng):
    """Compare a run that is killed with a whole one. Returns how often it was, before it was finished."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(parents=True)
    cut.mkdir()
    expected = run_ranks(world_size, train, str(whole), kind, workers, None)
    draws = iter(lambda: rng.randint(1, 4), None)
    digests, killed = kill_at_random(cut, world_size, kind, workers, draws, kills)
    assert digests == expected
    for rank in range(world_size):
        assert computed(cut, rank) == computed(whole, rank)
    return killed


@pytest.fixture
def rng():
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize(("kind", "workers"), [("plain", 0), ("elastic", 2)])
def test_killed_twice(tmp_path, kind, workers, rng):
    check(tmp_path, 1, kind, workers, 2, rng)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers"), [("plain", 2), ("elastic", 0)])
def test_two_ranks_killed_twice(tmp_path, kind, workers, rng):
    check(tmp_path, 2, kind, workers, 2, rng)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["plain", "elastic"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_twenty_times(tmp_path, world_size, kind, workers, rng):
    killed = 0
    while killed < 20:  # in several runs: one is finished before
        killed += check(tmp_path / str(killed), world_size, kind, workers, 20 - killed, rng)


def elastic_part(root, batches):
    """Go on, for so many batches, and return the samples that this rank saw."""
    loader = loader_of("elastic", 0)
    seen = []
    state = {"data": loader, "rng": ckptman.RNGState()}
    with ckptman.Checkpointer(root, state, save_policy=ckptman.OnStop(), deadline=None) as checkpointer:
        step = checkpointer.restore()
        while loader.epoch < 1:
            for batch in loader:
                seen += batch[:, 0].int().tolist()
                step += 1
                checkpointer.step(step)
                if len(seen) >= 3 * batches:
                    checkpointer.save(step)
                    return seen
    return seen


def test_each_sample_once_on_two_ranks_one_and_two(tmp_path):
    parts = [run_ranks(2, elastic_part, str(tmp_path), 2), run_ranks(1, elastic_part, str(tmp_path), 3)]
    parts.append(run_ranks(2, elastic_part, str(tmp_path), 99))
    seen = [sample for ranks in parts for rank in ranks for sample in rank]
    assert len(seen) == len(set(seen))
    assert len(seen) in (SAMPLES, SAMPLES - 1)  # what two ranks cannot share begins the next epoch
