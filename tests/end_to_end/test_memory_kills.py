"""Ranks and nodes killed at any moment, with checkpoints in memory: nothing that counted is lost, nothing torn."""

import os
import random
import shutil
import signal
import time
import warnings
from collections import Counter

import pytest
import torch.distributed as dist

import ckptman
from ckptman.policies import EverySteps, OnStop
from tests.helpers.apps import App
from tests.helpers.node_memory import shm
from tests.helpers.ranks import RankError, run_ranks, say, start_ranks

__all__ = ["shm"]

NODES, INTERVAL, DISK_INTERVAL = 3, 2, 12
SHORT_KILLS, LONG_KILLS = 6, 300
MOST_SECONDS = 1.5


def train(root, shm, steps, seconds):
    """Train, and tell what counts in memory and how far it is."""
    rank = dist.get_rank()
    os.environ["SLURMD_NODENAME"] = f"n{rank * NODES // dist.get_world_size()}"
    warnings.simplefilter("ignore")
    app, losses = App((dist.get_world_size(),)), []
    memory = ckptman.MemoryTier(EverySteps(INTERVAL), path=shm)
    with ckptman.Checkpointer(
        root, app.state, save_policy=EverySteps(DISK_INTERVAL) | OnStop(), memory=memory, timeout_seconds=30
    ) as checkpointer:
        start = checkpointer.restore()
        say(f"from {start}")
        for step in range(start + 1, steps + 1):
            losses.append((step, app.train_step()))
            checkpointer.step(step)
            assert checkpointer._memory is not None
            manifest = checkpointer._memory.saves._manifest
            say(f"at {step} {manifest.step if manifest is not None else start}")
            time.sleep(seconds)
    return losses, app.digests()


def drain(world, rank):
    """What a rank has said until it died."""
    while True:
        try:
            world._read(rank)
        except RankError:
            return [text for kind, text in world._messages[rank] if kind == "said"]


def kill_once(root, shm, dice, steps, ranks):
    """Start ranks, kill one of them or a node's at a random moment, and then the others, as a launcher does. Returns
    where they began, what counted in memory, how far they were, and what was killed."""
    what = dice.choice(["rank", "node", "all"])
    with start_ranks(ranks, train, root, shm, steps, 0.01, limit=120) as world:
        world._read(0)
        time.sleep(dice.uniform(0, MOST_SECONDS))
        first = dice.randrange(ranks)
        node = first * NODES // ranks
        of_node = [rank for rank in range(ranks) if rank * NODES // ranks == node]
        for rank in {"rank": [first], "node": of_node, "all": range(ranks)}[what]:
            world.kill(rank, signal.SIGKILL)
        time.sleep(dice.uniform(0, 0.3))
        for rank in range(ranks):
            world.kill(rank, signal.SIGKILL)
        said = [drain(world, rank) for rank in range(ranks)]
        world.join()
    if what == "node":
        for folder in shm.glob(f"ckptman-*/*-n{node}"):
            shutil.rmtree(folder)
    begun = [int(text.split()[1]) for each in said for text in each if text.startswith("from ")]
    at = [tuple(map(int, text.split()[1:])) for each in said for text in each if text.startswith("at ")]
    counted = max((memory for _, memory in at), default=max(begun, default=0))
    return max(begun, default=-1), counted, max((step for step, _ in at), default=0), what


def kill_again_and_again(folder, kills, seed, ranks=3):
    """Kill ranks of a run in `folder`, a new one in memory, and let it come to its end: as if nobody had."""
    shm = folder / "memory"
    shm.mkdir()
    dice, done, steps = random.Random(seed), Counter[str](), 24 * kills
    counted = 0
    for number in range(kills):
        begun, now_counted, at, what = kill_once(folder / "root", shm, dice, steps, ranks)
        print(f"{number}: {what}, from {begun}, counted {now_counted}, at {at}")
        if begun >= 0:
            assert begun >= counted, f"step {counted} counted in memory, and the run went on from {begun}"
            counted = max(counted, now_counted)
        done[what] += 1
    found = run_ranks(ranks, train, folder / "root", shm, counted + 12, 0.0, limit=120)[0]
    clean = folder / "clean"
    clean.mkdir()
    known = run_ranks(ranks, train, clean / "root", clean, counted + 12, 0.0, limit=600)[0]
    assert found[0] == known[0][-len(found[0]) :]
    assert found[1] == known[1]
    print(dict(done), f"{counted + 12} steps")


def check(shm, kills, ranks):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    kill_again_and_again(shm, kills, seed, ranks)


@pytest.mark.slow
def test_ranks_and_nodes_are_killed_and_nothing_that_counted_is_lost(shm):
    check(shm, SHORT_KILLS, 3)


@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("ranks", [3, 6])
def test_300_kills(shm, ranks):
    check(shm, LONG_KILLS // 2, ranks)
