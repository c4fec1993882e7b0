"""A rank that dies, is stopped or has a disk that never answers, in each phase of a commit.

The others are told within `timeout_seconds`: nothing waits for ever. Earlier checkpoints are untouched, and the run
starts again as if nothing had been.
"""

import json
import os
import signal
import tempfile
import threading
import time
import warnings
from itertools import count, product
from pathlib import Path

import torch.distributed as dist

import ckptman
from tests.faults.disks import WAYS
from tests.faults.kills import fill, sharded
from tests.faults.mutants import apply
from tests.faults.subject import blank, open_run, version_of
from tests.helpers.faulty_disk import FaultyDisk, holds, on_disk
from tests.helpers.ranks import RankError, say, start_ranks

TIMEOUT_SECONDS = 2.0
"""What the runs here are told to wait for each other."""
SLACK_SECONDS = 4.0
"""What a busy machine of two cores may take besides: for an exchange before, and to get to the message."""
CASE_SECONDS = 40.0


OPERATIONS = 16
"""About as many as the leader's part of a save has."""
WHAT = (
    ("async", "is stopped"),
    ("sync", "dies"),
    ("async", "dies"),
    ("sync", "has a disk that hangs"),
)


class TrapDisk(FaultyDisk):
    """At operation `at`, counted from when it is armed, something happens to this process."""

    def __init__(self, way, at, note):
        super().__init__()
        self._way, self._at, self._note = way, at, note
        self._armed = False

    def arm(self):
        self.log.clear()
        self._armed = True

    def _do(self, name, whole, half=None):
        if self._armed and len(self.log) == self._at:
            self._armed = False
            self._note.write_text(json.dumps({"at": time.monotonic(), "operation": name}))
            if self._way == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self._way == "is stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                threading.Event().wait()
        return super()._do(name, whole)


def run(tally):
    """Each operation of each of two ranks, sync and async; and a load in which a rank does not go on."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for victim, (kind, way) in product((0, 1), WHAT):
            for at in count():
                if tally.share < 1 and not tally.takes():
                    if at > OPERATIONS:
                        break
                    continue
                if not _one(tally, Path(folder, f"{victim}-{kind}-{way}-{at}"), victim, kind, way, at):
                    break
        if not tally.injected:  # a share is never nothing
            kind, way = tally.dice.choice(WHAT)
            _one(tally, Path(folder, "least"), tally.dice.randrange(2), kind, way, 0)


def _one(tally, folder, victim, kind, way, at):
    """Whether the operation was reached."""
    folder.mkdir()
    root, note, told = folder / "root", folder / "note", folder / "told"
    survivor = 1 - victim
    with tally.fault(f"rank {victim} {way} at operation {at} of a save, {kind}", way):
        case = (str(root), str(folder), victim, kind, way, at, tally.mutant)
        with start_ranks(2, part, *case, limit=CASE_SECONDS) as ranks:
            try:
                ranks.await_message(survivor, "told")
            except RankError as error:
                tally.fail("hang" if note.exists() else "other", str(error)[-500:])
                return note.exists()
            for rank in (0, 1):
                ranks.kill(rank)
        said = json.loads(told.read_text())
        if not note.exists():
            tally.injected -= 1
            tally.parts[way] -= 1
            return False
        happened = json.loads(note.read_text())
        seconds = said["at"] - happened["at"]
        if said["error"] is None:
            tally.survive()  # it was the last this rank had to do, and the others needed nothing more of it
        else:
            tally.refused += 1
            tally.hear(said["error"])
        tally.check(
            seconds < TIMEOUT_SECONDS + SLACK_SECONDS,
            "hang",
            f"rank {survivor} was told after {seconds:.1f} s (at {happened['operation']})",
        )
        _judge(tally, root, said["error"] is None)
    return True


def _judge(tally, root, durable):
    try:
        held = sorted(holds(root))
    except Exception as error:
        tally.fail("lost", f"what is there is not whole: {error}")
        return
    tally.check(held in ([1], [1, 2]) and (not durable or 2 in held), "lost", f"{held} are there")
    state = blank()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_run(root, state, async_save=False, retention=ckptman.KeepLast(1)) as run:
            start = run.restore()
            tally.check(start == held[-1] == version_of(state), "wrong", f"restored {start}, {version_of(state)}")
            run.save(3)
    left = sorted(path.name for path in root.iterdir() if path.name != ".ckptman")
    tally.check(left == ["step-0000000003"], "other", f"after the next save there are {left}")


def part(root, folder, victim, kind, way, at, mutant):
    """One rank: save step 1; at step 2 the victim meets its fate, and the other tells what it was told."""
    apply(mutant)
    warnings.simplefilter("ignore")
    disk = TrapDisk(way, at, Path(folder, "note"))
    state = sharded(blank())
    error = None
    try:
        with on_disk(disk), open_run(Path(root), state, timeout_seconds=TIMEOUT_SECONDS, **WAYS[kind]) as run:
            run.restore()
            fill(state, 1)
            run.save(1)
            run.wait()
            dist.barrier()
            if dist.get_rank() == victim:
                disk.arm()
            fill(state, 2)
            run.save(2)
            run.wait()
    except ckptman.CkptmanError as failed:
        error = str(failed)
    if dist.get_rank() != victim:
        Path(folder, "told").write_text(json.dumps({"at": time.monotonic(), "error": error}))
        say("told")
    threading.Event().wait()
