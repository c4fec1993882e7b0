"""A rank of the bundled loop is stopped (SIGSTOP) on a real Slurm: noticed, told, and over in the stated time."""

import time
from itertools import pairwise

import pytest

from ckptman.policies.hang_timeout import HangTimeout
from ckptman.runtime.journal import read_journal
from ckptman.storage.format.paths import journal_path, stacks_path
from tests.helpers.forkserver import worker_of
from tests.slurm.bundled import begin, check, script, trains

PATIENCE = HangTimeout(5.0)
SILENT_SECONDS = 2.0 + 4 * PATIENCE.look_seconds
"""For so long the ranks that are left wait for the answer of one that is silent."""
LAST_SECONDS = 120.0
"""After that a process is gone at the latest, also where nobody can be asked who is silent."""
SAVED_EVERY = 20
SPARE_SECONDS = 10.0
"""For writing the stacks, and for Slurm to end the job: two cores for all."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("rank", "known", "telling_seconds"),
    [
        pytest.param(3, "not heard of: rank 3", SILENT_SECONDS, id="one of them"),
        pytest.param(
            0, "nobody could be asked", LAST_SECONDS, id="the one that keeps the store", marks=pytest.mark.campaign
        ),
    ],
)
def test_a_rank_that_is_stopped(lab, tokens, whole, tmp_path, rank, known, telling_seconds):
    # Far from any save: there the limits of the ranks are the same. The one at step 20 is the progress of the attempt.
    settings = {"run__watchdog_seconds": PATIENCE.floor_seconds, "checkpoint__every_steps": SAVED_EVERY}
    scene = begin(lab, script(tmp_path, tokens, **settings))
    job = trains(scene, tmp_path, 1, own_steps=SAVED_EVERY + 4)
    worker_of(scene.ranks(job)[rank]).suspend()
    stopped = time.time()
    scene.until_ended(1, LAST_SECONDS + 30)
    longest = max(later["time"] - each["time"] for each, later in pairwise(read_journal(tmp_path / "steps.jsonl")[0]))
    end = scene.chain.ends()[1]
    limit = PATIENCE.notice_seconds("step", longest) + telling_seconds
    assert end.ending == "crashed"
    assert "Stalled: no sign of life for" in end.reason
    assert known in end.reason
    assert end.ended_seconds - stopped < limit + SPARE_SECONDS
    for other in {0, 1, 2, 3} - {rank}:
        assert "Thread" in stacks_path(tmp_path / "ck", 1, other).read_text()
    scene.finishes(120)
    assert len(scene.chain.attempts()) == 2
    check(tmp_path, whole, allowed=SAVED_EVERY)
    (failed,) = (each for each in read_journal(journal_path(tmp_path / "ck"))[0] if each["event"] == "failed")
    told, over = failed["time"] - stopped, end.ended_seconds - stopped
    print(f"stated {limit:.1f} s (longest {longest:.1f} s): told after {told:.1f} s, over after {over:.1f}")
