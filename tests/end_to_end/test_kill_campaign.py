"""kill -9 at chosen moments and at random ones: every resume starts from the newest commit and repeats the same run."""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import ckptman
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.prune import execute, plan_prune
from ckptman.format.paths import journal_path
from ckptman.io.durable_files import Disk
from ckptman.runtime.journal import read_journal
from tests.helpers.apps import App
from tests.helpers.faulty_disk import saving_to
from tests.helpers.ranks import run_ranks, say, start_ranks

pytestmark = pytest.mark.slow


class StallingDisk(Disk):
    """Stops for ever in the middle of the save of one step, and says so."""

    stall = False

    def sync_file(self, fd):
        # Data files only: the journal is flushed too, when the checkpoint is committed already.
        if self.stall and Path(f"/proc/self/fd/{fd}").readlink().suffix == ".distcp":
            say("in a save")
            threading.Event().wait()
        super().sync_file(fd)


def train(root, mesh, until, every, plan):
    """Train and log each loss; `plan` says at which step which rank gets a SIGTERM, or the save stalls."""
    rank, app, disk = dist.get_rank(), App(mesh), StallingDisk()
    with (
        (Path(root).parent / f"losses-{Path(root).name}-{rank}.jsonl").open("a") as log,
        ckptman.SignalHandler() as signals,
        saving_to(disk),
        ckptman.Checkpointer(
            root,
            app.state,
            save_policy=ckptman.EverySteps(every) | ckptman.OnStop(),
            retention=ckptman.KeepLast(2),
            signals=signals,
            deadline=None,
            timeout_seconds=30,
        ) as checkpointer,
    ):
        start = checkpointer.restore()
        say(f"started at {start}")
        for step in range(start + 1, until + 1):
            if plan.get("term") == step and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            disk.stall = plan.get("stall", until) <= step and rank == 0 and "stall" in plan
            loss = app.train_step()
            log.write(json.dumps({"step": step, "loss": loss}) + "\n")
            log.flush()
            checkpointer.step(step, {"loss": loss})
            if plan.get("announce") == step:
                checkpointer.wait()
                say("step done")
                if rank == 1:
                    threading.Event().wait()
            if checkpointer.should_stop():
                break
    return {"start": start, "digests": app.digests(), "exit_code": checkpointer.exit_code}


def losses(root, rank):
    """The loss of every step; a step that was done twice must have had the same loss twice."""
    found = {}
    for line in (root.parent / f"losses-{root.name}-{rank}.jsonl").read_text().splitlines():
        if line.endswith("}"):
            entry = json.loads(line)
            assert found.setdefault(entry["step"], entry["loss"]) == entry["loss"], f"step {entry['step']} differs"
    return found


def test_three_interruptions_change_nothing(tmp_path):
    mesh, world, until = (2, 2), 4, 16
    whole = run_ranks(world, train, str(tmp_path / "whole"), mesh, until, 100, {})
    root = tmp_path / "parts"
    stopped = run_ranks(world, train, str(root), mesh, until, 3, {"term": 4})
    assert [each["exit_code"] for each in stopped] == [75] * world
    with start_ranks(world, train, str(root), mesh, until, 3, {"announce": 10}) as ranks:
        ranks.await_message(1, "step done")
        ranks.kill(1)
    with start_ranks(world, train, str(root), mesh, until, 3, {"stall": 12}) as ranks:
        ranks.await_message(0, "in a save")
        for rank in range(world):
            ranks.kill(rank)
    assert any(".tmp-" in each.name for each in root.iterdir())
    last = run_ranks(world, train, str(root), mesh, until, 3, {})
    assert [each["start"] for each in last] == [9] * world
    for rank in range(world):
        assert losses(root, rank) == losses(tmp_path / "whole", rank)
        assert last[rank]["digests"] == whole[rank]["digests"]
    assert not any(".tmp-" in each.name for each in root.iterdir())


@pytest.mark.parametrize(
    "kills", [5, pytest.param(50, marks=[pytest.mark.campaign, pytest.mark.timeout(1200)])], ids=["short", "campaign"]
)
def test_random_kills_resume_from_the_newest_commit(tmp_path, kills):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    dice, root, mesh, starts = random.Random(seed), tmp_path / "parts", (2,), []
    for _ in range(kills):
        newest = newest_step(root)
        with start_ranks(2, train, str(root), mesh, 1_000_000, 1, {}) as ranks:
            ranks.await_message(0, f"started at {newest}")
            # What is tested is a kill at any moment, so here time itself is the input.
            time.sleep(dice.uniform(0.0, 0.8))
            ranks.kill(0)
            if dice.random() < 0.7:
                ranks.kill(1)
        starts.append(newest)
        durable = [event["step"] for event in read_journal(journal_path(root))[0] if event["event"] == "save_durable"]
        assert newest_step(root) >= max(durable, default=0), "a save that was told durable is gone"
    until = newest_step(root) + 3
    last = run_ranks(2, train, str(root), mesh, until, 1, {})
    whole = run_ranks(2, train, str(tmp_path / "whole"), mesh, until, 10**6, {})
    for rank in range(2):
        assert losses(root, rank) == losses(tmp_path / "whole", rank)
        assert last[rank]["digests"] == whole[rank]["digests"]
    execute(root, plan_prune(root, ckptman.KeepLast(1)), "0123abcd-1")
    assert sorted(each.name for each in root.iterdir()) == [".ckptman", f"step-{until:010d}"]
    print(f"{kills} kills, {kills} resumes, from steps {starts}; {until} steps, all as in the run that never stopped")


def newest_step(root):
    entries = Catalog(root).complete() if root.exists() else []
    return entries[-1].step if entries else 0
