"""Checkpoints in the memory of nodes, or on their own disks: damaged, and left behind by deaths at any moment.

A run goes on from what counted there, bit for bit, or from the older one on the shared disk, and says why. After a
death what counts is the last one that was told, or a later one that came to be whole.
"""

import os
import shutil
import tempfile
import threading
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

import ckptman
from tests.faults.damage import _folder, _resize, _zero
from tests.faults.deaths import CASE_SECONDS, die_everywhere, impatient
from tests.faults.kills import fill, gathered_version, one_kill, sharded
from tests.faults.limits import limit
from tests.faults.mutants import apply
from tests.faults.powercut import LOSSES
from tests.faults.regions import draw, flip, regions_of
from tests.faults.subject import blank, content, open_run, version_of
from tests.helpers.ranks import RankError, run_ranks, say

NODES = 3
"""Of the runs that are killed."""
OLD, NEW = 1, 2
"""Steps: on disk, and in memory alone. Each is the version of its number."""
NO_NEWS = ("manifest.json missing", "the folder missing")
PASSED_OVER = "is not what the run goes on from"


def run(tally):
    """400 flipped bits and each file damaged with one copy, 60 bits with two; each death, on both; 60 kills."""
    with tempfile.TemporaryDirectory(prefix="faults-memory-", dir="/dev/shm") as folder:
        # A power cut takes memory as a whole.
        die_everywhere(tally, "memory: deaths", Saves(), Path(folder, "deaths"), losses=LOSSES[:1])
        damage(tally, Path(folder, "one"), ranks=1, flips=400)
        damage(tally, Path(folder, "two"), ranks=2, flips=60)
        for ranks in (3, 6):
            kill_nodes(tally, Path(folder, f"kills-{ranks}"), ranks, tally.count(30))
    with tempfile.TemporaryDirectory(prefix="faults-memory-", dir="/var/tmp") as folder:
        die_everywhere(tally, "local disk: deaths", Saves(), Path(folder, "deaths"))


class Went(NamedTuple):
    """Where a run went on from, what it then held, and what it said; or the error that came instead."""

    step: int
    version: int | None
    said: list[str]
    error: Exception | None


def damage(tally, folder, ranks, flips):
    """Damage what the first node holds. With two ranks, each of which is a node, the other one has a copy."""
    folder.mkdir()
    run_ranks(ranks, save_both, folder, tally.mutant, fresh=True)
    with put_back(folder) as fresh:
        (held,) = folder.glob(f"memory/ckptman-*/*-n0/step-{NEW:010d}")
        regions = regions_of(held)
        for number in range(tally.count(flips)):
            kind = list(regions)[number % len(regions)]
            file, at = draw(regions[kind], tally.dice)
            bit = tally.dice.randrange(8)
            case = f"{ranks} ranks: bit {bit} of byte {at} of {file} ({kind})"
            with tally.fault(case, f"memory: bits, {ranks} ranks"), limit(CASE_SECONDS):
                flip(held / file, at, bit)
                judge(tally, start_again(ranks, folder, tally.mutant))
            fresh()
        for what, spoil in tally.some(file_cases(held)) if ranks == 1 else ():
            with tally.fault(f"{ranks} ranks: {what}", f"memory: files, {ranks} ranks"), limit(CASE_SECONDS):
                spoil(held)
                went, is_news = start_again(ranks, folder, tally.mutant), what not in NO_NEWS
                judge(tally, went, is_news)
            fresh()
        with tally.fault(f"{ranks} ranks: nothing", "untouched"):
            went = start_again(ranks, folder, tally.mutant)
            tally.check(went.step == NEW, "lost", f"it went on from {went.step}: {went.said}")
            judge(tally, went)


def judge(tally, went, is_news=True):
    """What a run came to whose memory was damaged. `is_news`: not where it looks as if nothing had counted there."""
    if went.error is not None:
        tally.refuse(went.error)
        return
    tally.check(went.version == went.step, "wrong", f"step {went.step} was restored as {went.version}: {went.said}")
    if not tally.check(went.step in (OLD, NEW), "lost", f"it went on from step {went.step}: {went.said}"):
        return
    if went.step == NEW:
        tally.survive()
        return
    tally.refused += 1
    told = [each for each in went.said if PASSED_OVER in each]
    tally.check(told or not is_news, "unclear", f"step {NEW} in memory was passed over without a word: {went.said}")


def file_cases(held):
    """What is done to a checkpoint in memory."""
    for path in sorted(held.iterdir()):
        size = path.stat().st_size
        for length in sorted({0, 1, size // 2, size - 1, size + 1, size + 4096} - {size}):
            yield f"{path.name} has {length} bytes", partial(_on, path.name, partial(_resize, length=length))
        yield f"{path.name} missing", partial(_on, path.name, os.unlink)
        yield f"{path.name} all zeros", partial(_on, path.name, _zero)
        yield f"{path.name} is a folder", partial(_on, path.name, _folder)
        yield f"{path.name} leads to /etc/passwd", partial(_on, path.name, _link)
    yield "the folder missing", shutil.rmtree


def _on(name, work, held):
    work(held / name)


def _link(path):
    path.unlink()
    path.symlink_to("/etc/passwd")


@contextmanager
def put_back(folder):
    """A function that undoes whatever was done to a root and to what nodes hold. Paths stay the same."""
    kept = folder.with_name(f"{folder.name}-kept")
    shutil.copytree(folder, kept, symlinks=True)

    def fresh():
        shutil.rmtree(folder)
        shutil.copytree(kept, folder, symlinks=True)

    fresh()
    yield fresh
    shutil.rmtree(kept)


def start_again(ranks, folder, mutant):
    """Start the run again, on as many ranks. One is this process."""
    went = restore(folder, mutant) if ranks == 1 else run_ranks(ranks, restore, folder, mutant, fresh=True)[0]
    return went


def open_with_memory(folder, state, every=10**6):
    """A run whose every rank is a node of its own."""
    os.environ["SLURMD_NODENAME"] = f"n{dist.get_rank() if dist.is_initialized() else 0}"
    path = folder / "memory"
    path.mkdir(exist_ok=True)
    copies = dist.get_world_size() if dist.is_initialized() else 1
    memory = ckptman.MemoryTier(ckptman.EverySteps(every), copies=copies, path=path)
    return open_run(folder / "root", state, memory=memory)


def _blank():
    return sharded(blank()) if dist.is_initialized() else blank()


def _fill(state, version):
    fill(state, version) if dist.is_initialized() else state.update(content(version))


def save_both(folder, mutant):
    """Save one step to disk and the next to memory, and end without a word, as after a death."""
    apply(mutant)
    with quiet():
        state = _blank()
        run = open_with_memory(folder, state, every=1)
        run.restore()
        _fill(state, OLD)
        run.save(OLD)
        run.wait()
        _fill(state, NEW)
        run.step(NEW)
        assert run._memory is not None
        run._memory.saves.wait()


def restore(folder, mutant):
    """Start the run again."""
    apply(mutant)
    state = _blank()
    with warnings.catch_warnings(record=True) as caught, impatient():
        warnings.simplefilter("always")
        try:
            with open_with_memory(folder, state) as run:
                step = run.restore()
                version = gathered_version(state) if dist.is_initialized() else version_of(state)
        except ckptman.CkptmanError as error:
            return Went(-1, None, [], error)
    return Went(step, version, [str(each.message) for each in caught], None)


@contextmanager
def quiet():
    """One copy is what is wanted here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class Saves:
    """Three saves to memory, one of which is to the disk, too. A `Scene`; each step is the version of its number."""

    every: int = 2
    steps: int = 6

    def before(self, world):
        """Nothing is there before."""

    def act(self, world, tell):
        os.environ["CKPTMAN_IO_THREADS"] = "1"
        state = content(0)
        with quiet():
            run = open_with_memory(world, state, self.every)
            run.restore()
            for step in range(1, self.steps + 1):
                state.update(content(step))
                run.step(step)
                assert run._memory is not None
                run._memory.saves.wait()
                if step == 4:
                    run.save(step)
                    run.wait()
                if (counts := run._memory.saves._manifest) is not None:
                    tell(str(counts.step))
            # It dies: what it held stays.

    def judge(self, tally, world, before, told):
        least, state = max(map(int, told), default=0), content(0)
        try:
            with quiet(), impatient(), open_with_memory(world, state, self.every) as run:
                start = run.restore()
                good = tally.check(start >= least, "lost", f"step {least} counted, and {start} was restored")
                good &= tally.check(version_of(state) == start, "wrong", f"step {start} holds something else")
                for step in range(start + 1, start + 3):
                    state.update(content(step))
                    run.step(step)
        except Exception as error:
            tally.fail("other", f"the next run does not go on: {type(error).__name__}: {error}")
            return
        fresh = blank()
        ckptman.load(fresh, world / "root" / f"step-{start + 2:010d}")
        if (
            tally.check(version_of(fresh) == start + 2, "wrong", "what the run saved at its end is something else")
            and good
        ):
            tally.survive()


def kill_nodes(tally, folder, ranks, kills):
    """Kill a rank, a node with all that it holds, or all ranks at a random moment, and the others soon after.

    The next start goes on from what counted, and it is bit for bit what was saved.
    """
    folder.mkdir()
    for number in range(kills):
        what, node = tally.dice.choice(("rank", "node", "all")), tally.dice.randrange(NODES)
        of_node = [rank for rank in range(ranks) if _node(rank, ranks) == node]
        first = {"rank": of_node[:1], "node": of_node, "all": range(ranks)}[what]
        with tally.fault(f"kill {number} of {ranks} ranks: {what}, node {node}", "memory: kills"):
            try:
                one_kill(tally.dice, ranks, first, 1.0, churn, folder, tally.mutant)
                for held in folder.glob(f"memory/ckptman-*/*-n{node}") if what == "node" else ():
                    shutil.rmtree(held)
                one_kill(tally.dice, ranks, first, 0.0, churn, folder, tally.mutant)
            except RankError as error:
                tally.fail("hang" if "in time" in str(error) else "lost", str(error)[-700:])
            else:
                tally.survive()


def _node(rank, ranks):
    return rank * NODES // ranks


def churn(folder, mutant):
    """One rank: restore what counted, check every bit, then save again and again, to memory mostly, until killed."""
    apply(mutant)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ["SLURMD_NODENAME"] = f"n{_node(rank, ranks)}"
    told = folder / "told"
    counted = max(map(int, told.read_text().split()), default=0) if told.exists() else 0
    dist.barrier()  # all have read it
    path, state = folder / "memory", sharded(blank())
    path.mkdir(exist_ok=True)
    memory = ckptman.MemoryTier(ckptman.EverySteps(2), path=path)
    with quiet(), open_run(folder / "root", state, memory=memory, save_policy=ckptman.EverySteps(12)) as run:
        start = run.restore()
        assert start >= counted, f"step {counted} counted in memory, and the run went on from {start}"
        assert not start or gathered_version(state) == start, f"step {start} was restored as something else"
        say("restored")
        for step in range(start + 1, 10**6):
            fill(state, step)
            try:
                run.step(step)
            except ckptman.CkptmanError:  # others were killed first
                threading.Event().wait()
            if (counts := run._memory.saves._manifest) is not None:
                with told.open("ab", buffering=0) as file:
                    file.write(b"%d\n" % counts.step)
