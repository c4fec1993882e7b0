"""One bit of a tensor differs between two ranks that hold it both: no checkpoint says that they agreed.

In any layout, plain or over meshes, before the first save, after a restore, or at the last moment before the copy. The
save is refused, or the difference is told, in a warning, the journal and the manifest. Earlier checkpoints stay.
"""

import contextlib
import random
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ckptman
from ckptman.engine.comm.control_group import Channel
from ckptman.engine.saving.staging import Stager
from ckptman.errors import CkptmanError
from ckptman.runtime.journal import read_journal
from ckptman.storage.format.manifest import read_manifest
from ckptman.storage.format.paths import journal_path, step_folder
from tests.engine.comm.test_replicas import MESHES, change_one, layout
from tests.faults.mutants import apply
from tests.faults.subject import open_run
from tests.helpers.ranks import run_ranks

CASES = 400
AT_ONCE = 40
SECONDS_EACH = 20.0
MOMENTS = ("before the first save", "after a restore", "before the copy")


def run(tally):
    """400 layouts, on four ranks."""
    left = tally.count(CASES, least=12)
    while left > 0:
        count, seed = min(left, AT_ONCE), tally.dice.randrange(2**32)
        left -= count
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            limit = SECONDS_EACH * count
            of_ranks = run_ranks(4, part, folder, seed, count, tally.mutant, limit=limit, fresh=True)
        for cases in zip(*of_ranks):
            told = cases[0]
            if told["changed"]:
                with tally.fault(f"layout {told['number']} of seed {seed}, {told['moment']}", told["moment"]):
                    _judge(tally, cases)


def _judge(tally, cases):
    leader = cases[0]
    told = [text for each in cases for text in each["warned"] if "x differs between ranks" in text]
    errors = {str(each["error"]) for each in cases}
    if not tally.check(len(errors) == 1, "other", f"the ranks do not end alike: {errors}"):
        return
    if (error := leader["error"]) is not None:
        tally.refuse(error)
        tally.check("x differs between ranks" in str(error), "unclear", f"it is not said that they differ: {error}")
        tally.check(leader["steps"] == leader["before"], "lost", f"steps {leader['steps']}, not {leader['before']}")
        return
    tally.survive()
    tally.check(leader["replicas"] == "differ", "wrong", f"the manifest says {leader['replicas']}")
    tally.check(len(told) == 1, "wrong", f"{len(told)} warnings")
    tally.check(leader["events"] == 1, "wrong", f"{leader['events']} lines in the journal")


def part(folder, seed, count, mutant):
    """One rank. What came of each case."""
    apply(mutant)
    control = Channel(60)
    meshes = {str(ranks): DeviceMesh("cpu", ranks) for ranks in MESHES}
    found = [_case(Path(folder, str(number)), f"{seed} {number}", meshes, control, number) for number in range(count)]
    control.close()
    return found


def _case(root, seed, meshes, control, number):
    draw = random.Random(seed)
    tensor, moment = layout(draw, meshes, dist.get_rank()), draw.choice(MOMENTS)
    state = {"other": torch.ones(3)} | ({"x": tensor} if tensor is not None else {})
    error, changed = None, False
    if moment == "after a restore":
        with open_run(root, state, signals=None) as run:
            run.restore()
            run.save(1)
    before = [each.step for each in ckptman.Run(root).checkpoints] if root.exists() else []
    control.gather(None)  # all have looked before one begins the next save
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with open_run(root, state, signals=None) as run:
                run.restore()
                if moment == "before the copy":
                    with _staged_after(lambda: change_one(draw, tensor, control)) as did:
                        run.save(2)
                        run.wait()
                    changed = did[0]
                else:
                    changed = change_one(draw, tensor, control)
                    run.save(2)
        except CkptmanError as refused:
            error = refused
            changed = changed or moment == "before the copy"
    journal = read_journal(journal_path(root))[0]
    steps = [each.step for each in ckptman.Run(root).checkpoints]
    return {
        "number": number,
        "moment": moment,
        "changed": changed,
        "error": error,
        "before": before,
        "steps": steps,
        "warned": [str(each.message) for each in told],
        "replicas": read_manifest(root / step_folder(2)).replicas if 2 in steps else None,
        "events": sum(each["event"] == "replicas_differ" for each in journal),
    }


@contextlib.contextmanager
def _staged_after(change):
    """Inside, a rank makes its change when its state was looked at and is copied."""
    stage, did = Stager.stage, []

    def change_and_stage(*arguments):
        if not did:
            did.append(change())
        return stage(*arguments)

    Stager.stage = change_and_stage
    try:
        yield did
    finally:
        Stager.stage = stage
