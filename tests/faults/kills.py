"""Real `kill -9`s at random moments: of ranks that save and prune, of ranks that train, and of a process that copies.

Afterwards the newest checkpoint that was told durable is there, every byte is right, what was pruned stays away, and
the next start of the same ranks restores it, bit for bit, and saves again.
"""

import contextlib
import os
import random
import signal
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckptman
from ckptman.runtime.journal import read_journal
from ckptman.storage.catalog.backends.local import LocalBackend
from ckptman.storage.catalog.catalog import Catalog
from ckptman.storage.format.paths import journal_path, step_folder
from ckptman.storage.transfer.copy import CopyOptions, copy_checkpoint
from tests.faults.limits import limit
from tests.faults.mutants import apply
from tests.faults.subject import blank, bytes_of, content, open_run, version_of
from tests.helpers.apps import App
from tests.helpers.checkpoints import commit, note_in
from tests.helpers.faulty_disk import holds
from tests.helpers.ranks import RankError, run_ranks, say, start_ranks

KEPT = 2
WAYS = {"sync": {"async_save": False}, "async": {}}
START_SECONDS = 60.0


def run(tally):
    """300 kills of two or four ranks that save or train, 60 of a process that copies."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for world_size, kills in ((2, 170), (4, 80)):
            kill_ranks(tally, Path(folder, f"ranks-{world_size}"), world_size, tally.count(kills))
        kill_training(tally, Path(folder, "training"), tally.count(50, least=2))
        kill_copies(tally, Path(folder, "copies"), tally.count(60, least=2))


def kill_copies(tally, folder, kills):
    """Kill a process that copies and deletes without end. Each time what counts at the destination is whole and proved.

    What a process changes one after the other is stopped at every change by `copies`; here several threads copy.
    """
    source, root = folder / "source", folder / "root"
    for step in (100, 200, 300):
        commit(source, step, rows=60_000, ranks=3)
    LocalBackend(root).make()
    for number in range(kills):
        with tally.fault(f"kill {number} of a process that copies", "copy"), limit(START_SECONDS):
            killed = _killed(tally.dice, source, root)
            tally.check(killed, "other", "it ended by itself")
            notes = [note_in(root / step_folder(step)) for step in holds(root)]
            proved = all(note and note.every_byte for note in notes)
            if tally.check(proved, "other", "a copy counts and is not proved"):
                tally.survive()
    for entry in Catalog(source).complete():
        copy_checkpoint(entry, LocalBackend(root))
    tally.check(holds(root) == holds(source), "lost", f"in the end there is {holds(root)}")
    left = [parsed for _, parsed in Catalog(root).leftovers() if parsed.kind == "tmp"]
    tally.check(not left, "other", f"in the end there are {left}")


def _killed(dice, source, root):
    """Start to copy, kill it at a random moment after the first copy; whether it was that which ended it."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        os.fsync = lambda fd: None  # a kill is no power cut, and more happens in the same time
        try:
            _copy_for_ever(source, root, theirs)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(theirs)
    try:
        os.read(ours, 1)
        time.sleep(dice.uniform(0, 0.05))
    finally:
        os.close(ours)
        os.kill(pid, dice.choice([signal.SIGKILL, signal.SIGTERM]))
        _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def _copy_for_ever(source, root, told):
    place = LocalBackend(root)
    while True:
        for entry in Catalog(source).complete():
            copy_checkpoint(entry, place, CopyOptions(threads=2))
            with contextlib.suppress(BrokenPipeError):  # nobody listens any more: the kill is on its way
                os.write(told, b"x")
        for entry in Catalog(root).complete():
            place.remove(entry.path, entry.path.name, os.urandom(4).hex())


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
                one_kill(tally.dice, world_size, first, 0.25, churn, str(root), way, seed, tally.mutant)
            except RankError as error:
                tally.fail("hang" if "in time" in str(error) else "other", str(error)[-700:])
                continue
            if _judge(tally, root, gone):
                tally.survive()


def one_kill(dice, world_size, first, longest_seconds, work, *arguments):
    """Kill the ranks in `first` at a random moment after all ranks have restored, and the others soon after."""
    with start_ranks(world_size, work, *arguments, limit=START_SECONDS) as ranks:
        for rank in range(world_size):
            ranks.await_message(rank, "restored")
        # A kill at any moment is the point: here time itself is what is drawn.
        time.sleep(dice.uniform(0, longest_seconds))
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


def kill_training(tally, folder, kills):
    """Kill two ranks that train a sharded model: losses and state are in the end those of a run that nobody killed."""
    killed, whole, mesh = folder / "killed", folder / "whole", (2,)
    folder.mkdir()
    for number in range(kills):
        with tally.fault(f"kill {number} of training", "training"):
            one_kill(
                tally.dice, 2, [0, 1][: tally.dice.randint(1, 2)], 0.8, train, killed, mesh, 10**6, 1, tally.mutant
            )
            events, _ = read_journal(journal_path(killed))
            durable = max((event["step"] for event in events if event["event"] == "save_durable"), default=0)
            if tally.check(_newest(killed) >= durable, "lost", f"step {durable} was durable"):
                tally.survive()
    until = _newest(killed) + 3
    found = run_ranks(2, train, killed, mesh, until, 1, tally.mutant, fresh=True)
    wanted = run_ranks(2, train, whole, mesh, until, 10**6, tally.mutant, fresh=True)
    tally.check(found == wanted, "wrong", f"after {kills} kills training came to another end at step {until}")


def train(root, mesh, until, every, mutant):
    """One rank: train to a step, and note each loss. Returns all losses, which may not have changed, and digests."""
    apply(mutant)
    app, losses, log = App(mesh), {}, Path(f"{root}-losses-{dist.get_rank()}")
    with open_run(root, app.state, save_policy=ckptman.EverySteps(every), retention=ckptman.KeepLast(KEPT)) as run:
        start = run.restore()
        say("restored")
        for step in range(start + 1, until + 1):
            loss = app.train_step()
            with log.open("ab", buffering=0) as file:
                file.write(f"{step} {loss!r}\n".encode())
            run.step(step)
    for line in log.read_text().splitlines():
        step, loss = line.split()
        assert losses.setdefault(step, loss) == loss, (
            f"step {step} was {losses[step]}, and when it was done again {loss}"
        )
    return losses, app.digests()


def _newest(root):
    return max((entry.step for entry in Catalog(root).complete()), default=0) if root.exists() else 0


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
