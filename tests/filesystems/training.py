"""What ranks do on the nodes: a run whose every value follows from its step, and readers that check each of them."""

import contextlib
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptman
from ckptman.cli.app import main
from ckptman.storage.catalog.writer_lock import claim
from ckptman.storage.format.paths import parse_step
from tests.helpers.ranks import say, start_ranks

PARAMETERS, ROWS, COLUMNS = 3, 256, 256


def expected(number, step):
    """The values of a parameter at a step."""
    return (torch.arange(ROWS * COLUMNS) % 997).view(ROWS, COLUMNS).float() + number * 1000 + step


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(ROWS, COLUMNS)) for _ in range(PARAMETERS)])


def sharded_model():
    """The model, by rows over all ranks there are."""
    model = Model()
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


@torch.no_grad()
def train_to(model, step):
    for number, each in enumerate(model.all):
        whole = expected(number, step)
        if isinstance(each, DTensor):
            mine = torch.chunk(whole, dist.get_world_size())[dist.get_rank()]
            each.to_local().copy_(mine)
        else:
            each.copy_(whole)


@torch.no_grad()
def check(model, step):
    for number, each in enumerate(model.all):
        whole = each.full_tensor() if isinstance(each, DTensor) else each
        assert torch.equal(whole, expected(number, step)), f"wrong values of step {step}"


class Phase:
    """What the test wants next: a word in a file on the local disk, which rank 0 tells to the others."""

    def __init__(self, path):
        self.path = path

    def set(self, word):
        part = self.path.with_suffix(".part")
        part.write_text(word)
        part.rename(self.path)

    def await_word(self, word):
        """Wait until the test has said it."""
        while self.path.read_text() != word:
            time.sleep(0.001)

    def agreed(self):
        word = [self.path.read_text()]
        if dist.is_initialized():
            dist.broadcast_object_list(word)
        return word[0]


def train(root, phase, options):
    """Save at each step until the phase is "over", and say how each save went: "PHASE saved COUNT", or "failed".

    Returns: the step of the last save that went well, and the errors of the others.
    """
    model, number = sharded_model(), {"n": 0}
    counts, errors, last = Counter(), [], 0
    warnings.simplefilter("always")  # with a server away, some are due
    settings = {"save_policy": 1, "async_save": False, "timeout_seconds": 60.0, "signals": None, **options}
    with ckptman.Checkpointer(root, {"model": model, "number": number}, **settings) as checkpointer:
        step = last = checkpointer.restore()
        if step:
            check(model, step)
        assert number["n"] == step
        say(f"restored {step}")
        while (now := phase.agreed()) != "over":
            step += 1
            train_to(model, step)
            number["n"] = step
            try:
                checkpointer.step(step)
                went, last = "saved", step
            except ckptman.CommitError as error:
                went = "failed"
                errors.append(str(error))
            counts[now, went] += 1
            say(f"{now} {went} {counts[now, went]}")
    check(model, step)
    return last, errors


def restore(root):
    """Restore the newest checkpoint into a model of zeros. Returns its step."""
    model, number = sharded_model(), {"n": 0}
    with ckptman.Checkpointer(root, {"model": model, "number": number}, save_policy=None, signals=None) as checkpointer:
        step = checkpointer.restore()
    assert number["n"] == step
    check(model, step)
    return step


def check_read(values, step):
    """That what `ckptman.read` gave is what was saved at a step."""
    assert values["number"]["n"] == step
    for number in range(PARAMETERS):
        assert torch.equal(values["model"][f"all.{number}"], expected(number, step)), f"wrong values of step {step}"


@contextlib.contextmanager
def running(nodes, root, folder, **options):
    """A run with a rank on each of these nodes, and the phase that it is in: "first"."""
    phase = Phase(Path(folder) / "phase")
    phase.set("first")
    programs = [node.program for node in nodes]
    with start_ranks(len(nodes), train, root, phase, options, programs=programs, limit=270) as world:
        yield world, phase


def finish(world, phase):
    """End a run. Returns what `train` does, that of each rank."""
    phase.set("over")
    return world.results()


def read_beside_prunes(root, count):
    """Read checkpoints that a run saves and prunes meanwhile, oldest first, by the names that were there a moment ago.

    Returns: how often a read gave what was saved, how often nothing was found, and what else came of one.
    """
    counts, names = Counter(), []
    while counts.total() < count:
        names = names or sorted(step_names(root))
        name = names.pop(0)
        try:
            check_read(ckptman.read(root / name), parse_step(name).step)
            counts["right"] += 1
        except ckptman.NotFoundError:
            counts["not found"] += 1
        except Exception as error:  # warnings too
            counts[f"{type(error).__name__}: {error}"] += 1
    return counts


def step_names(root):
    """The names of the checkpoints in a root."""
    return [each.name for each in root.iterdir() if (of := parse_step(each.name)) is not None and of.kind == "step"]


def use_what_goes(root, name, phase, verb, target):
    """Look at a checkpoint, await its deletion by the other node, and use it at once.

    Returns: "right" if the data was; else the error, or the exit code of a verb.
    """
    folder = root / name
    for each in folder.iterdir():  # what a client has asked for, it remembers
        each.read_bytes()
    say("looked")
    phase.await_word("gone")
    try:
        if verb == "read":
            check_read(ckptman.read(folder), parse_step(name).step)
        elif verb == "load":
            model, number = Model(), {"n": 0}
            ckptman.load({"model": model, "number": number}, folder)
            check(model, number["n"])
        elif verb == "restore":
            return restore(root)
        else:
            return main([verb, str(folder), *([str(target)] if verb == "copy" else [])])
    except Exception as error:  # warnings too
        return f"{type(error).__name__}: {error}"
    return "right"


def claim_at_once(root, rounds):
    """Claim new roots together with the other rank. Returns how many owners each had."""
    owners = []
    for number in range(rounds):
        folder = root / f"claimed-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        try:
            mine = claim(folder, f"run-{dist.get_rank()}", None)
        except ckptman.BusyError:
            mine = None
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine is not None)  # the owner holds it until the other has its answer
        if mine is not None:
            mine.check()
            mine.release()
        owners.append(sum(found))
    return owners


def restored_by(nodes, root):
    """The step that ranks on these nodes restore, all values checked."""
    with start_ranks(len(nodes), restore, root, programs=[node.program for node in nodes]) as world:
        (step,) = set(world.results())
    return step


def all_are_whole(node, root):
    """That a node finds every checkpoint of a root undamaged."""
    told = node.ckptman("verify", root, "--all")
    assert told.returncode == 0, told.stdout + told.stderr
