"""Real `kill -9`s at random moments: of ranks that save, and of a process that commits and prunes without pause.

Afterwards the newest checkpoint that was told durable is there, every byte is right, what was pruned stays away, and
the next start of the same ranks restores it, bit for bit, and saves again.
"""

import os
import random
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckptman
from ckptman.catalog.catalog import Catalog
from tests.faults.mutants import apply
from tests.faults.subject import blank, bytes_of, content, open_run, version_of
from tests.helpers.faulty_disk import holds
from tests.helpers.ranks import RankError, say, start_ranks
from tests.saving import test_commit_kill as test_store_kill
from tests.transfer import test_copy_faults

KEPT = 2
WAYS = {"sync": {"async_save": False}, "async": {}}
START_SECONDS = 60.0


def run(tally):
    """300 kills of two or four ranks, 100 of a process that only commits and prunes, 60 of one that copies."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for world_size, kills in ((2, 220), (4, 80)):
            kill_ranks(tally, Path(folder, f"ranks-{world_size}"), world_size, tally.count(kills))
        # Enough for some to be pruned.
        kill_one(tally, "commit and prune", test_store_kill.kill_again_and_again, Path(folder, "root"), 100, least=10)
        Path(folder, "copies").mkdir()
        kill_one(tally, "copy", test_copy_faults.kill_again_and_again, Path(folder, "copies"), 60, least=2)


def kill_one(tally, part, campaign, folder, number, least):
    """A campaign of another test, which kills one process again and again and looks at what is left each time."""
    kills = tally.count(number, least)
    with tally.fault(f"{kills} kills of one process: {part}", part):
        tally.injected += kills - 1
        tally.parts[part] += kills - 1
        try:
            campaign(folder, kills, tally.dice.randrange(2**32))
        except AssertionError as error:
            tally.fail("lost", str(error))
        else:
            tally.harmless += kills


def kill_ranks(tally, folder, world_size, kills):
    """Start ranks, kill some of them at a random moment and the others soon after, look; again and again."""
    folder.mkdir()
    root, gone = folder / "root", set[int]()
    for number in range(kills):
        way = tally.dice.choice(list(WAYS))
        seed = tally.dice.randrange(2**32)
        first = tally.dice.sample(range(world_size), tally.dice.randint(1, world_size))
        with tally.fault(f"kill {number} of {world_size} ranks, {way}, ranks {first} first", f"{world_size} ranks"):
            try:
                _one_kill(tally.dice, root, world_size, way, seed, first, tally.mutant)
            except RankError as error:
                tally.fail("hang" if "in time" in str(error) else "other", str(error)[-700:])
                continue
            if _judge(tally, root, gone):
                tally.survive()


def _one_kill(dice, root, world_size, way, seed, first, mutant):
    with start_ranks(world_size, churn, str(root), way, seed, mutant, limit=START_SECONDS) as ranks:
        for rank in range(world_size):
            ranks.await_message(rank, "restored")
        # A kill at any moment is the point: here time itself is what is drawn.
        time.sleep(dice.uniform(0, 0.25))
        for rank in first:
            ranks.kill(rank)
        time.sleep(dice.choice([0, 0, 0.02, 0.3]))
        for rank in set(range(world_size)) - set(first):
            ranks.kill(rank)
        ranks.join()


def churn(root, way, seed, mutant):
    """One rank: restore, check every bit, then save again and again until killed."""
    apply(mutant)
    warnings.filterwarnings("ignore", ".*(?:could not be removed|leftovers)")
    dice, rank = random.Random(seed), dist.get_rank()
    told = os.open(f"{root}.told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    state = sharded(blank())
    with open_run(Path(root), state, retention=ckptman.KeepLast(KEPT), **WAYS[way]) as run:
        start = run.restore()
        assert not start or gathered_version(state) == start, f"step {start} was restored as something else"
        say("restored")
        step = start
        for _ in range(10**6):
            step += 1
            fill(state, step)
            try:
                run.save(step)
                if dice.random() < 0.5:
                    run.wait()
                    if rank == 0:
                        os.write(told, f"{step}\n".encode())
            except ckptman.CkptmanError:  # others were killed first
                threading.Event().wait()


def sharded(state):
    """The state with its large tensor cut over all ranks, and another one in parts of unequal size."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("large", "half"):
        state["x"][name] = distribute_tensor(state["x"][name], mesh, [Shard(0)], src_data_rank=None)
    return state


def fill(state, version, scale=1):
    """Change a state to another version, in place, as training does."""
    fresh = sharded(content(version, scale))
    for name, tensor in state["x"].items():
        bytes_of(_local(tensor)).copy_(bytes_of(_local(fresh["x"][name])))
    state.update({name: value for name, value in fresh.items() if name != "x"})


def gathered_version(state):
    """The version that a sharded state is. Every rank calls it."""
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state["x"].items()}
    return version_of({**state, "x": whole})


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _judge(tally, root, gone):
    told_file = Path(f"{root}.told")
    # The last line may be torn by the kill.
    lines = told_file.read_bytes().split(b"\n")[:-1] if told_file.exists() else []
    told = max((int(line) for line in lines), default=0)
    try:
        held = holds(root)
    except Exception as error:
        tally.fail("lost", f"what is there is not whole: {error}")
        return False
    sequences = {sequence for sequence, _ in held.values()}
    newest = max(held, default=0)
    good = tally.check(newest >= told, "lost", f"step {told} was durable, the newest is {newest}")
    good &= tally.check(sequences.isdisjoint(gone), "other", "what was pruned came back")
    gone |= set(range(max(sequences, default=0))) - sequences
    for entry in Catalog(root).complete()[-1:]:
        state = blank()
        ckptman.load(state, entry.path)
        good &= tally.check(version_of(state) == entry.step, "wrong", f"step {entry.step} holds something else")
    return good
