"""kill -9 of a process that commits and prunes without pause: what it said was committed is there, and whole."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptman.catalog.backends.local import LocalBackend
from ckptman.catalog.catalog import Catalog
from ckptman.catalog.prune import execute, plan_prune
from ckptman.catalog.writer_lock import claim, read_owner
from ckptman.format.paths import run_folder
from ckptman.policies.retention import KeepLast
from tests.helpers.faulty_disk import holds, save

KEPT = 2


def saves_forever(root, seed):
    """Claim, commit, tell, prune, again and again; now and then an earlier step, or the same step once more."""
    os.fsync = lambda fd: None  # a kill is no power cut, and more happens in the same time
    dice = random.Random(seed)
    LocalBackend(root).make()
    held = claim(root, "run", None)
    step = max((entry.step for entry in Catalog(root).complete()), default=0)
    while True:
        step = max(0, step + dice.choice([1, 1, 1, 0, 0, -1]))
        held.check()
        entry = save(root, step, os.urandom(dice.choice([0, 100, 100_000])), tag=held.next_tag())
        print(entry.sequence, flush=True)
        execute(root, plan_prune(root, KeepLast(KEPT)), held.next_tag())


def kill_again_and_again(root, kills, seed):
    """Start the process above and kill it at a random moment, `kills` times, looking at the root each time."""
    print(f"seed {seed}")
    dice = random.Random(seed)
    told, gone = 0, set[int]()
    for number in range(1, kills + 1):
        command = [sys.executable, "-m", "tests.saving.test_commit_kill", str(root), str(dice.randrange(2**32))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as child:
            assert child.stdout is not None
            try:
                lines = [child.stdout.readline()]  # it took over what the dead one before it had claimed, and commits
                time.sleep(dice.uniform(0, 0.1))
            finally:
                child.kill()
            lines += child.stdout.read().splitlines()
        assert child.returncode == -signal.SIGKILL, "it ended by itself"
        # A line may be torn by the kill; what it tells was committed all the same.
        told = max(told, *(int(line) for line in lines if line.strip()))
        held = {sequence for sequence, _ in holds(root).values()}
        assert max(held) >= told, f"kill {number}: sequence {told} was committed and is gone"
        assert held.isdisjoint(gone), f"kill {number}: what was pruned came back"
        gone = set(range(max(held))) - held
    execute(root, plan_prune(root, KeepLast(KEPT)), "0123abcd-1")
    assert {path.name for path in root.iterdir()} == {".ckptman", *(path.path.name for path in Catalog(root).scan())}
    assert len(holds(root)) == KEPT
    owner = read_owner(root)
    assert owner is not None
    assert [path.name for path in run_folder(root).iterdir()] == [f"owner-{kills:06d}.json"]


@pytest.mark.slow
def test_ten_kills(tmp_path):
    kill_again_and_again(tmp_path / "root", 10, seed=random.randrange(2**32))


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_five_hundred_kills(tmp_path):
    kill_again_and_again(tmp_path / "root", 500, seed=random.randrange(2**32))


if __name__ == "__main__":
    saves_forever(Path(sys.argv[1]), int(sys.argv[2]))
